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


@functools.cache
def kernel(op, name, **macros):
    """The compiled kernel `name` of <op>/kernel.cu, with -D macros."""
    import cupy

    code = source(Path(__file__).parent / op / "kernel.cu")
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in macros.items()))
    return cupy.RawModule(code=code, options=options).get_function(name)


def source(path):
    """The text of a CUDA file with its `#include "..."` lines replaced by the files they name."""
    text = path.read_text(encoding="utf-8")
    return re.sub(
        r'^#include "([^"]+)"$', lambda found: source(path.parent / found[1]), text, flags=re.M
    )


def grid(count, threads=THREADS):
    """Blocks of `threads` that cover `count` threads, as a launch dimension."""
    return (-(-count // threads),)


def row_tiles(width, threads=THREADS):
    """(tiles, threads): how many blocks of how many threads, whole warps, cover a row."""
    threads = min(threads, 32 * -(-width // 32))
    return -(-width // threads), threads
