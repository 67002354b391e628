"""What a kernel may be given: arrays on the GPU, of one type and shape, in C order.

A kernel sees a pointer and no strides, so every wrapper passes its arguments through here: a wrong
one is an error that names it, an array in another memory order is copied, and so is one that does
not begin at a multiple of 16 bytes, because kernels load 16 bytes at a time.
"""

import cupy


def on_device(name, x, shape, dtype="float32"):
    """x as a C-ordered CUDA array; TypeError or ValueError when place, type or shape is wrong."""
    if not hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"{name}: expected a CUDA array, got {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    address = x.__cuda_array_interface__.get("data", (0,))[0]
    return cupy.ascontiguousarray(x.copy() if address % 16 else x)


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
