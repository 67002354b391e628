"""Do the kernels compile for Hopper, and do they fit into registers? Answered without a GPU.

NVRTC is a plain library (pip install nvidia-cuda-nvrtc): it turns source text into a cubin for any
architecture and needs no driver. It is called here through ctypes, with the options that CuPy adds
by itself, and ptxas -v writes into the log what every kernel uses: registers, shared memory, and
spills, which are registers that did not fit and go through memory in the middle of the arithmetic.

    python -m dsv41_kernels.nvrtc [OP ...]      compile and print a table
"""

import ctypes
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from . import commands
from .launch import HERE, builds, options, source

CUPY_ADDS = ("-ftz=true", "--device-as-default-execution-space")

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?\n"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n"
    r".*?Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one kernel needs of an SM; `spills` in bytes of loads and stores."""

    name: str
    registers: int
    spills: int
    stack: int
    shared: int


def operations():
    """Names of all folders with a kernel.cu, and of the .cu files beside them."""
    folders = sorted(path.parent.name for path in HERE.glob("*/kernel.cu"))
    return folders + sorted(path.name for path in HERE.glob("*.cu"))


def usage(op, arch="sm_90", macros=()):
    """Compile <op>/kernel.cu -> list of Usage, one per kernel. ValueError with NVRTC's log."""
    return read_log(compile_source(source(op), (*options(arch, dict(macros)), f"-arch={arch}")))


def read_log(log):
    """What ptxas -v wrote -> list of Usage."""
    # trap: the lazy regex must not run past the next kernel, so every part is searched alone
    parts = re.split(r"(?=ptxas info\s*: Compiling entry function)", log)
    return [_usage(match) for match in map(_KERNEL.search, parts) if match]


def _usage(match):
    spills = int(match["stores"]) + int(match["loads"])
    shared = int(match["shared"] or 0)
    return Usage(match["name"], int(match["registers"]), spills, int(match["stack"]), shared)


def compile_source(text, flags):
    """-> the compiler's log; ValueError with it when the source does not compile."""
    library = _library()
    flags = [*dict.fromkeys(flags), *CUPY_ADDS, "--ptxas-options=-v", *_include_flags()]
    encoded = [flag.encode() for flag in flags]
    program = ctypes.c_void_p()
    name = b"kernel.cu"
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name, 0, None, None)
    array = (ctypes.c_char_p * len(encoded))(*encoded)
    failed = library.nvrtcCompileProgram(program, len(encoded), array)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise ValueError(f"kernel.cu does not compile:\n{log.value.decode()}")
    return log.value.decode()


def available():
    """True where NVRTC can be loaded."""
    try:
        return _library() is not None
    except OSError:
        return False


def _library():
    """libnvrtc of the pip wheel, else of an installed toolkit."""
    found = [path for root in _wheel_roots() for path in sorted(root.glob("**/libnvrtc.so.*"))]
    wheels = [str(path) for path in found if ".alt." not in path.name]
    for candidate in (*wheels, "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            last = error
    raise OSError(f"NVRTC not found (pip install nvidia-cuda-nvrtc): {last}")


def _wheel_roots():
    found = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (found.submodule_search_locations if found else ())]


def _include_flags():
    """Folders of CUDA's own headers (cuda_bf16.h, mma.h), where a wheel or a toolkit has them."""
    folders = {p.parent for root in _wheel_roots() for p in root.glob("*/include/cuda_bf16.h")}
    folders |= {p for root in _wheel_roots() for p in root.glob("*/include/cccl")}
    toolkit = Path("/usr/local/cuda/include")
    folders |= {toolkit, toolkit / "cccl"} if not folders and toolkit.exists() else set()
    return [f"-I{folder}" for folder in sorted(folders)]


def table(names):
    """Lines of the report: one per kernel and build."""
    yield f"{'kernel':<44}{'build':<28}{'registers':>10}{'spills':>8}{'stack':>8}{'shared':>8}"
    for op in names:
        for arch, macros in builds(op):
            build = " ".join([arch, *(f"{key}={value}" for key, value in macros.items())])
            for k in usage(op, arch, macros):
                label = f"{op}/{k.name}"
                numbers = f"{k.registers:>10}{k.spills:>8}{k.stack:>8}{k.shared:>8}"
                yield f"{label:<44}{build:<28}{numbers}"


def main(argv=None):
    parser = commands.parser("nvrtc", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="folder names (default: all)")
    for line in table(parser.parse_args(argv).ops or operations()):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
