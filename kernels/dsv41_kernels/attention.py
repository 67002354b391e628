"""What the wrappers of the attention kernels share: checks, formats, launches.

The kernels take contiguous, aligned CuPy arrays; what comes otherwise is copied where the values
are clear, and refused with the argument's name where they are not. A `Call` holds the checked
arguments of one call in the order in which all kernels want them.
"""

import functools

import cupy
import numpy as np

from dsv41.quant import FLOAT, MAIN_KV_FP4, WINDOW_KV_FP8

FORMATS = {FLOAT: 0, WINDOW_KV_FP8: 1, MAIN_KV_FP4: 2}  # as records.cuh counts them
SHARED_BYTES = 227 * 1024  # shared memory that a block may use on Hopper
THREADS = 128
MOST_CHANNELS = 512


def known(q, numerics):
    """Do the kernels take queries of this shape and type, and records of these formats?"""
    if q.ndim != 3 or q.dtype != np.float32:
        return False
    formats = numerics.window_kv in FORMATS and numerics.main_kv in FORMATS
    return formats and q.shape[2] % 32 == 0 and 0 < q.shape[2] <= MOST_CHANNELS


def few_heads(q):
    """Are these the sizes of attention.cuh?"""
    heads, channels = q.shape[1:]
    return heads in (4, 8, 16) and channels in (32, 64, 128, 256) and heads * channels <= 2048


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


class Call:
    """The arguments of `rope_sparse_attn`, checked; freqs None stands for "do not rotate"."""

    def __init__(
        self, q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
    ):
        self.tokens, self.heads, self.channels = q.shape
        self.q = array("q", q, np.float32, q.shape)
        self.positions, self.freqs = self._rotation(positions, freqs)
        self.window = self._records("window", window, numerics.window_kv)
        self.window_rows = array("window_rows", window_rows, np.int64, (self.tokens, None))
        self.global_kv = self._records("global_kv", global_kv, numerics.main_kv)
        self.global_rows = array("global_rows", global_rows, np.int64, (self.tokens, None))
        self.sink = array("sink", sink, np.float32, (self.heads,))
        self.width = self.window_rows.shape[1] + self.global_rows.shape[1]
        self.pairs = 0 if freqs is None else len(self.freqs)
        self.macros = {
            "C": self.channels,
            "NEAR": FORMATS[numerics.window_kv],
            "FAR": FORMATS[numerics.main_kv],
            "BF16": int(numerics.bf16),
        }

    def _records(self, name, x, fmt):
        if FORMATS[fmt] == 0:
            return array(name, x, np.float32, (None, self.channels))
        return array(name, x, np.uint8, (None, fmt.record_bytes(self.channels)))

    def _rotation(self, positions, freqs):
        if freqs is None:
            return np.uintp(0), np.uintp(0)
        if not isinstance(freqs, cupy.ndarray):
            freqs = on_device(np.asarray(freqs, np.float32).tobytes(), cupy.cuda.Device().id)
        if 2 * len(freqs) > self.channels:
            raise ValueError(f"freqs: {len(freqs)} pairs do not fit into {self.channels} channels")
        positions = array("positions", cupy.asarray(positions), np.int64, (self.tokens,))
        return positions, array("freqs", freqs, np.float32, (None,))

    def lists(self, at=slice(None)):
        """Records and the rows that the queries `at` read."""
        return (
            *(self.window, np.int64(len(self.window))),
            *(self.window_rows[at], np.int32(self.window_rows.shape[1])),
            *(self.global_kv, np.int64(len(self.global_kv))),
            *(self.global_rows[at], np.int32(self.global_rows.shape[1])),
        )

    def arguments(self, at=slice(None)):
        """Everything up to the sink, for the queries `at`."""
        positions = self.positions[at] if self.pairs else self.positions
        turn = positions, self.freqs, np.int32(self.pairs)
        return self.q[at], *turn, *self.lists(at), self.sink


@functools.lru_cache(maxsize=64)
def on_device(content, device):
    """float32 constants in the device's memory; every layer asks for the same few."""
    return cupy.asarray(np.frombuffer(content, np.float32))


def launch(function, blocks, threads, arguments, shared=0):
    """Launch with `shared` bytes of dynamic shared memory."""
    if shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared
    function((blocks,), (threads,), arguments, shared_mem=shared)
