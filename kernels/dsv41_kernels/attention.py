"""What the wrappers of the attention kernels share: checks, formats, the error word.

A `Call` holds the checked arguments of one call, in the order in which all kernels want them.
"""

import functools

import cupy
import numpy as np

from dsv41.quant import FLOAT, MAIN_KV_FP4, WINDOW_KV_FP8

from .arguments import cuda_array, require
from .errors import bad_values

FORMATS = {FLOAT: 0, WINDOW_KV_FP8: 1, MAIN_KV_FP4: 2}  # as records.cuh counts them
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


class Call:
    """The arguments of `rope_sparse_attn`, checked; freqs None stands for "do not rotate"."""

    def __init__(
        self, q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
    ):
        self.tokens, self.heads, self.channels = q.shape
        self.q = cuda_array("q", q, np.float32)
        self.positions, self.freqs = self._rotation(positions, freqs)
        self.window = self._records("window", window, numerics.window_kv)
        self.window_rows = self._rows("window_rows", window_rows)
        self.global_kv = self._records("global_kv", global_kv, numerics.main_kv)
        self.global_rows = self._rows("global_rows", global_rows)
        self.sink = cuda_array("sink", sink, np.float32, shape=(self.heads,))
        self.width = self.window_rows.shape[1] + self.global_rows.shape[1]
        self.pairs = 0 if freqs is None else len(self.freqs)
        self.macros = {
            "C": self.channels,
            "NEAR": FORMATS[numerics.window_kv],
            "FAR": FORMATS[numerics.main_kv],
            "BF16": int(numerics.bf16),
        }

    def _records(self, name, x, fmt):
        plain = fmt is FLOAT
        x = cuda_array(name, x, np.float32 if plain else np.uint8, ndim=2)
        wanted = self.channels if plain else fmt.record_bytes(self.channels)
        require(x.shape[1] == wanted, f"{name}: expected records of {wanted}, got {x.shape}")
        return x

    def _rows(self, name, x):
        x = cuda_array(name, x, np.int64, np.int32, ndim=2).astype(np.int64, copy=False)
        require(len(x) == self.tokens, f"{name}: expected {self.tokens} rows, got {x.shape}")
        return x

    def _rotation(self, positions, freqs):
        if freqs is None:
            return np.uintp(0), np.uintp(0)
        if not hasattr(freqs, "__cuda_array_interface__"):
            freqs = on_device(
                np.asarray(freqs, np.float32).tobytes(), cupy.cuda.runtime.getDevice()
            )
        fits = 2 * len(freqs) <= self.channels
        require(fits, f"freqs: {len(freqs)} pairs do not fit into {self.channels} channels")
        positions = cuda_array("positions", positions, np.int64, np.int32, shape=(self.tokens,))
        return positions.astype(np.int64, copy=False), cuda_array("freqs", freqs, np.float32)

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

    def errors(self, first=0):
        """A block with the word for rows past the end, in launches whose queries start at first."""

        def describe(position, kind):
            token, place = divmod(position, self.width)
            token, later = token + first, place - self.window_rows.shape[1]
            name, rows, records = "window_rows", self.window_rows, self.window
            if later >= 0:
                name, rows, records, place = "global_rows", self.global_rows, self.global_kv, later
            row = int(rows[token, place])
            return f"{name}: row {row} of {len(records)} records at ({token}, {place})"

        return bad_values(describe, self.q)


@functools.lru_cache(maxsize=64)
def on_device(content, device):
    """float32 constants in the device's memory; every layer asks for the same few."""
    return cupy.asarray(np.frombuffer(content, np.float32))
