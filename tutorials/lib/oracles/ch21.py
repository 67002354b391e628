"""Chapter 21: bytes from arrays, sums in a warp's order, blocks by trying."""

import ml_dtypes
import numpy as np

from dsv41.quant import ACTIVATION_FP8

from ..page import Exercise


def _bytes_a_token(n, d, fp8):
    streams, row = np.zeros((n, d), ml_dtypes.bfloat16), np.zeros(d, ml_dtypes.bfloat16)
    x = ACTIVATION_FP8.record_bytes(d) if fp8 else row.nbytes
    return 2 * streams.nbytes + row.nbytes + x


def _sizes(rng):
    yield 4, 5120, False
    yield 4, 5120, True
    for n in (1, 2, 3, 6):
        yield n, 32 * int(rng.integers(1, 300)), bool(rng.integers(0, 2))


def _warp_sum(values):
    lanes = np.arange(32)
    for step in (16, 8, 4, 2, 1):
        values = values + values[lanes ^ step]
    return values[0]


def _lanes(rng):
    for _ in range(8):
        yield ((rng.standard_normal(32) * np.exp2(rng.integers(-9, 9, 32))).astype(np.float32),)


def _fits(blocks, registers, threads, shared):
    warps = threads // 32
    a_warp = -(-32 * registers // 256) * 256
    return (
        blocks <= 32
        and blocks * threads <= 2048
        and blocks * warps * a_warp <= 65_536
        and blocks * (shared + 1024) <= 228 * 1024
    )


def _blocks_an_sm(registers, threads, shared):
    return max(blocks for blocks in range(33) if _fits(blocks, registers, threads, shared))


def _kernels(rng):
    yield 205, 256, 58_000  # registers decide
    yield 32, 128, 0  # threads
    yield 20, 32, 0  # blocks
    yield 64, 256, 56 * 1024  # exactly four blocks of shared memory with its extra KB
    yield 255, 512, 0  # none
    for _ in range(6):
        threads = 32 * int(rng.integers(1, 33))
        yield int(rng.integers(16, 256)), threads, int(rng.integers(0, 200_000))


EXERCISES = {
    "bytes_a_token": Exercise(
        _bytes_a_token,
        blank="return the bytes that are read and written for one token",
        hint="streams are read and written, y is read, x is written: 2 d bytes, or d + d / 32",
        inputs=_sizes,
    ),
    "warp_sum": Exercise(
        _warp_sum,
        blank="return what lane 0 holds after five exchanges",
        hint="in the first step lane l adds the number of lane l ^ 16, in float32; so lane 0 has "
        "v[0] + v[16], not v[0] + v[1]",
        inputs=_lanes,
    ),
    "blocks_an_sm": Exercise(
        _blocks_an_sm,
        blank="return the smallest of four limits",
        hint="a warp takes 32 * registers, rounded up to 256; a block takes shared + 1,024 bytes; "
        "the answer may be 0",
        inputs=_kernels,
    ),
}
