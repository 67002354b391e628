"""Where CUDA sources become callable kernels.

A kernel lives in <op>/kernel.cu and is compiled by NVRTC through CuPy the first time it is asked
for, with the sizes that the compiler should know as macros. Headers of our own are put in the place
of their #include, so the source text, which is the cache key, is the whole program and a changed
file is never served from an old binary. `grid` counts blocks of threads for n pieces of work.
"""

import functools
import re
from pathlib import Path

THREADS = 256
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel gets without asking


@functools.cache
def kernel(op, name, shared=0, arch=None, **macros):
    """The compiled kernel `name` of <op>/kernel.cu, with -D macros.

    `shared` is the most dynamic shared memory that a launch will ask for, in bytes; `arch` names a
    target that CuPy does not choose by itself, "sm_90a" for instance.
    """
    import cupy

    code = source(Path(__file__).parent / op / "kernel.cu")
    target = (f"-arch={arch}",) if arch else ()
    options = ("--std=c++17", *target, *(f"-D{key}={value}" for key, value in macros.items()))
    found = cupy.RawModule(code=code, options=options).get_function(name)
    if shared > STATIC_SHARED:
        found.max_dynamic_shared_size_bytes = shared
    return found


def source(path):
    """The text of a CUDA file with its `#include "..."` lines replaced by the files they name."""
    text = path.read_text(encoding="utf-8")
    return re.sub(
        r'^#include "([^"]+)"$', lambda found: source(path.parent / found[1]), text, flags=re.M
    )


def grid(count, threads=THREADS):
    """Blocks of `threads` that cover `count` threads, as a launch dimension."""
    return (-(-count // threads),)
