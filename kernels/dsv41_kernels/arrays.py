"""What the hyper-connection wrappers share: their arrays' shapes, and launches over rows."""

import numpy as np

from .arguments import cuda_array


def on_device(name, x, shape, dtype="float32"):
    """x as a C-ordered, aligned CUDA array of this shape and type, or an error that names it."""
    return cuda_array(name, x, np.dtype(dtype), shape=shape)


def stream_sizes(streams, most=4):
    """(T, S, D) of `streams`; ValueError unless it has three axes and 1 to `most` streams."""
    shape = getattr(streams, "shape", ())
    if len(shape) != 3 or not 1 <= shape[1] <= most or shape[2] == 0:
        raise ValueError(f"streams: expected shape (T, 1 to {most}, D), got {tuple(shape)}")
    return shape


def row_tiles(width, threads=256):
    """(tiles, threads): how many blocks of how many threads, whole warps, cover a row."""
    threads = min(threads, 32 * -(-width // 32))
    return -(-width // threads), threads
