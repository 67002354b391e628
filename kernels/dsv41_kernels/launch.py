"""Where CUDA sources become callable kernels.

A kernel lives in <op>/kernel.cu and is compiled by NVRTC through CuPy the first time it is asked
for, with the sizes that the compiler should know as macros. CuPy keys its cache by the source text
but not by what the text includes, so our own headers (`#include "name.cuh"`, beside kernel.cu or in
this folder) are put in place of their #include lines: a changed header is a changed source. Lines

    // build: S=4 PASSES=39
    // build: sm_90a HEADS=64

in kernel.cu list the macros that it is used with; sm_90a, which wgmma needs, is also taken from
there. nvrtc.py compiles the same sources without a GPU. `grid` counts blocks, `launch` launches.
"""

import functools
import re
from pathlib import Path

THREADS = 256
HERE = Path(__file__).parent
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel gets without asking
MOST_SHARED = 227 * 1024  # and with it, on Hopper
PORTABLE_CLUSTER = 8  # blocks of a cluster that it gets without asking
LARGE_CLUSTERS_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
used = set()  # (op, name) of all kernels that this process has asked for
macros_of_all = {}  # what else all sources are compiled with in this process

_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_BUILD = re.compile(r"^//[ \t]*build:[ \t]*(.*)$", re.MULTILINE)


def source(op):
    """The text of <op>/kernel.cu with our headers spliced in, each where it is first included.

    A name that ends in .cu is that file of this folder.
    """
    seen = set()
    folder, first = (HERE, op) if op.endswith(".cu") else (HERE / op, "kernel.cu")

    def splice(folder, name):
        path = next((p.resolve() for p in (folder / name, HERE / name) if p.exists()), None)
        if path is None:
            raise FileNotFoundError(f'{op}: no file for #include "{name}"')
        if path in seen:
            return ""
        seen.add(path)
        text = path.read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: splice(path.parent, match[1]), text)

    return splice(folder, first)


def builds(op):
    """-> list of (arch, macros): the `// build:` lines of <op>/kernel.cu, or one plain build."""
    lines = _BUILD.findall(source(op)) or [""]
    words = [line.split() for line in lines]
    arch = "sm_90a" if any("sm_90a" in line for line in words) else "sm_90"
    pairs = [[word.split("=", 1) for word in line if "=" in word] for line in words]
    return [(arch, {key: value for key, value in line}) for line in pairs]


def options(arch, macros):
    """NVRTC's options of one build. sm_90 is left to CuPy, which names the GPU it finds."""
    target = (f"-arch={arch}",) if arch != "sm_90" else ()
    return ("--std=c++17", *target, *(f"-D{key}={value}" for key, value in macros.items()))


@functools.cache
def module(op, arch=None, **macros):
    """<op>/kernel.cu compiled with -D macros, for `arch` or the one its build lines name."""
    import cupy

    flags = options(arch or builds(op)[0][0], macros | macros_of_all)
    return cupy.RawModule(code=source(op), options=flags)


@functools.cache
def kernel(op, name, shared=0, arch=None, cluster=1, **macros):
    """The compiled kernel `name` of <op>/kernel.cu, with -D macros.

    `shared` is the most dynamic shared memory that a launch will ask for, in bytes; `cluster` how
    many blocks its clusters have.
    """
    used.add((op, name))
    found = module(op, arch, **macros).get_function(name)
    if shared > STATIC_SHARED:  # what watched.cuh adds is static and counts, too
        found.max_dynamic_shared_size_bytes = min(shared, MOST_SHARED - found.shared_size_bytes)
    if cluster > PORTABLE_CLUSTER:
        import cupy

        cupy.cuda.driver.funcSetAttribute(found.kernel.ptr, LARGE_CLUSTERS_ALLOWED, 1)
    return found


def grid(count, threads=THREADS):
    """Blocks of `threads` that cover `count` threads, as a launch dimension."""
    return (-(-count // threads),)


def launch(kernel, blocks, threads, arguments, shared=0):
    """Launch on the current stream; nothing happens when there are no blocks."""
    blocks, threads = _dimension(blocks), _dimension(threads)
    if min(blocks) > 0:
        kernel(blocks, threads, arguments, shared_mem=shared)


def processors():
    """SMs of the current GPU."""
    import cupy

    runtime = cupy.cuda.runtime
    return runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, runtime.getDevice())


def numba_launch(kernel, blocks, threads, arguments, shared=0):
    """Launch a Numba kernel on CuPy's current stream, so that both libraries keep one order.

    In Numba's simulator arrays are NumPy's, and views of one array stay views of it.
    """
    from numba import config, cuda

    blocks, threads = _dimension(blocks), _dimension(threads)
    if min(blocks) == 0:
        return
    if config.ENABLE_CUDASIM:
        # trap: the simulator copies an array in and out, so of two views the last one would win
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        arguments = [FakeCUDAArray(a) if _is_array(a) else a for a in arguments]
        stream = 0
    else:
        import cupy

        # one stream, so nothing to wait for; waiting would also end the recording of a graph
        arguments = [cuda.as_cuda_array(a, sync=False) if _is_array(a) else a for a in arguments]
        current = cupy.cuda.get_current_stream().ptr
        stream = cuda.external_stream(current) if current else 0
    kernel[blocks, threads, stream, shared](*arguments)


def _is_array(x):
    return getattr(x, "ndim", 0) > 0


def _dimension(size):
    return size if isinstance(size, tuple) else (size,)
