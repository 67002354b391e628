"""Where CUDA sources become callable kernels.

A kernel lives in <op>/kernel.cu and is compiled by NVRTC through CuPy the first time it is asked
for, with the sizes that the compiler should know as macros. The source text is the cache key, so a
changed file is never served from an old binary; headers are pasted into it for the same reason.
`grid` counts blocks of threads for n pieces of work.
"""

import functools
import re
from pathlib import Path

THREADS = 256


@functools.cache
def kernel(op, name, arch=None, **macros):
    """The compiled kernel `name` of <op>/kernel.cu, with -D macros.

    arch: "sm_90a" for instructions that only Hopper has; otherwise the device's own.
    """
    import cupy

    source = spliced(Path(__file__).parent / op / "kernel.cu")
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in macros.items()))
    options += (f"-arch={arch}",) if arch else ()
    return cupy.RawModule(code=source, options=options).get_function(name)


def spliced(path):
    """The text of a source file with the headers that it includes by relative path pasted in."""

    def paste(line):
        return spliced(path.parent / line[1])

    return re.sub(r'^#include "(.+)"$', paste, path.read_text(encoding="utf-8"), flags=re.M)


def grid(count, threads=THREADS):
    """Blocks of `threads` that cover `count` threads, as a launch dimension."""
    return (-(-count // threads),)
