"""What the wrappers of the attention kernels share: checks, formats, launches.

The kernels take contiguous, aligned CuPy arrays; what comes otherwise is copied where the values
are clear, and refused with the argument's name where they are not. `Reads` holds the six arguments
that say what every query reads, in the order in which the kernels want them.
"""

import functools

import cupy
import numpy as np

from dsv41.quant import FLOAT, MAIN_KV_FP4, WINDOW_KV_FP8

from .launch import kernel

FORMATS = {FLOAT: 0, WINDOW_KV_FP8: 1, MAIN_KV_FP4: 2}  # as attention.cuh counts them
SHARED_BYTES = 227 * 1024  # shared memory that a block may use on Hopper
THREADS = 128


def array(name, x, dtype, shape):
    """x as a contiguous CuPy array on a 16-byte boundary; TypeError or ValueError name it."""
    if not isinstance(x, cupy.ndarray):
        raise TypeError(f"{name}: expected a CuPy array, got {type(x).__name__}")
    if dtype == np.int64 and x.dtype.kind in "iu":
        x = x.astype(np.int64, copy=False)
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {np.dtype(dtype).name}, got {x.dtype.name}")
    if x.ndim != len(shape) or any(s not in (None, n) for s, n in zip(shape, x.shape, strict=True)):
        expected = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name}: expected shape ({expected}), got {x.shape}")
    x = cupy.ascontiguousarray(x)
    return x if x.data.ptr % 16 == 0 else x.copy()


class Reads:
    """Records and lists of a call, checked: `.arguments` for the kernel, `.width` rows a query."""

    def __init__(self, tokens, channels, window, window_rows, global_kv, global_rows, numerics):
        self.window = records("window", window, numerics.window_kv, channels)
        self.window_rows = array("window_rows", window_rows, np.int64, (tokens, None))
        self.global_kv = records("global_kv", global_kv, numerics.main_kv, channels)
        self.global_rows = array("global_rows", global_rows, np.int64, (tokens, None))
        self.width = self.window_rows.shape[1] + self.global_rows.shape[1]

    def arguments(self, at=slice(None)):
        """The kernel's arguments for the queries `at`."""
        return (
            *(self.window, np.int64(len(self.window))),
            *(self.window_rows[at], np.int32(self.window_rows.shape[1])),
            *(self.global_kv, np.int64(len(self.global_kv))),
            *(self.global_rows[at], np.int32(self.global_rows.shape[1])),
        )


def records(name, x, fmt, channels):
    """A pool of records of `fmt`, checked."""
    if FORMATS[fmt] == 0:
        return array(name, x, np.float32, (None, channels))
    return array(name, x, np.uint8, (None, fmt.record_bytes(channels)))


def small(q, numerics):
    """Do the kernels of attention.cuh take queries of this shape and type, and these formats?"""
    if q.ndim != 3 or q.dtype != np.float32:
        return False
    heads, channels = q.shape[1:]
    sizes = heads in (4, 8, 16) and channels in (32, 64, 128, 256) and heads * channels <= 2048
    return sizes and numerics.window_kv in FORMATS and numerics.main_kv in FORMATS


def small_kernel(op, name, q, numerics):
    """A kernel of <op>/kernel.cu for queries that are `small`."""
    macros = {"H": q.shape[1], "C": q.shape[2], "BF16": int(numerics.bf16)}
    formats = {"NEAR": FORMATS[numerics.window_kv], "FAR": FORMATS[numerics.main_kv]}
    return kernel(op, name, **macros, **formats)


def rotation(positions, freqs, tokens, channels):
    """positions, freqs and their number for a kernel; None stands for "do not rotate"."""
    if freqs is None:
        return np.uintp(0), np.uintp(0), np.int32(0)
    positions = array("positions", cupy.asarray(positions), np.int64, (tokens,))
    if not isinstance(freqs, cupy.ndarray):
        freqs = on_device(np.asarray(freqs, np.float32).tobytes(), cupy.cuda.Device().id)
    if 2 * len(freqs) > channels:
        raise ValueError(f"freqs: {len(freqs)} pairs do not fit into {channels} channels")
    return positions, array("freqs", freqs, np.float32, (None,)), np.int32(len(freqs))


@functools.lru_cache(maxsize=64)
def on_device(content, device):
    """float32 constants in the device's memory; every layer asks for the same few."""
    return cupy.asarray(np.frombuffer(content, np.float32))


def launch(function, blocks, threads, arguments, shared=0):
    """Launch with `shared` bytes of dynamic shared memory."""
    if shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared
    function((blocks,), (threads,), arguments, shared_mem=shared)
