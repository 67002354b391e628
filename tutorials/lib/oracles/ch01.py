"""Chapter 01: answers come from ml_dtypes and from dsv41.quant, not from the chapter's own code."""

import ml_dtypes
import numpy as np

from dsv41 import formats, quant

from ..page import Exercise


def _e5m2(code):
    return float(np.uint8(code).reshape(1).view(ml_dtypes.float8_e5m2).astype(np.float32)[0])


def _codes(rng):
    special = [0, 1, 3, 4, 0x7B, 0x7C, 0x7D, 0x80, 0xFC, 0xFF]
    return [(int(code),) for code in (*special, *rng.integers(0, 256, 30))]


def _scale_byte(block):
    top = np.abs(block).max() * np.float32(1 / 6)
    return int(formats.encode_e8m0_ceil(top.reshape(1))[0])


def _blocks(rng):
    for power in rng.integers(-20, 21, 20):
        yield (rng.standard_normal(32).astype(np.float32) * np.float32(2.0**power),)
    for power in rng.integers(10, 21, 10):  # amax / 6 next to a power of two, and on it
        for top in (2.0**power, 2.0**power * (1 + 2**-23), 2.0**power * (1 + 2**-22)):
            block = np.zeros(32, np.float32)
            block[rng.integers(32)] = -np.float32(6 * top)
            yield (block,)


def _read_key(record):
    return quant.INDEX_FP4.decode(record, 128)


def _records(rng):
    for _ in range(20):
        x = rng.standard_normal((4, 32)) * 2.0 ** rng.integers(-8, 9, (4, 1))
        yield (quant.INDEX_FP4.encode(x.astype(np.float32).reshape(128)),)


EXERCISES = {
    "e5m2": Exercise(
        _e5m2,
        blank="return the value of one E5M2 byte, as value() does, and mind E = 31",
        hint="s is bit 7, E the next five bits, M the last two; E = 31 is inf (M = 0) or NaN",
        inputs=_codes,
    ),
    "scale_byte": Exercise(
        _scale_byte,
        blank="return the byte of the smallest power of two >= top",
        hint="not the logarithm: read the exponent field of top, plus one if a mantissa bit is set",
        inputs=_blocks,
    ),
    "read_key": Exercise(
        _read_key,
        blank="return the 128 values: codes through the table, times their scales",
        hint="the even channel is the low nibble; scale i belongs to channels 32 i to 32 i + 31",
        inputs=_records,
    ),
}
