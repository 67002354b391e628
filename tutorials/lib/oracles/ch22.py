"""Chapter 22: lanes by searching, bits from the formats' tables, choices by comparing."""

import numpy as np

from dsv41.formats import E4M3, encode_bf16

from ..page import Exercise


def _holder(row, column):
    for lane in range(32):
        g, t = divmod(lane, 4)
        places = [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]
        if (row, column) in places:
            return lane, places.index((row, column))
    raise ValueError(f"no lane holds {(row, column)}")


def _elements(rng):
    yield from ((0, 0), (8, 0), (15, 7), (3, 5), (11, 2))
    for _ in range(6):
        yield int(rng.integers(16)), int(rng.integers(8))


def _placed(code):
    value = E4M3.decode(np.uint8([code])).astype(np.float64) * 2.0**-120
    return int(encode_bf16(value.astype(np.float32))[0])


def _codes(rng):
    for code in (0, 1, 0x38, 0x80, 0xB8, 0x7E, 0xFE, 7, 8):
        yield (code,)
    for code in rng.integers(0, 127, 6):
        yield (int(code),)


def _choice(key, entry):
    return key * 2**32 + (2**32 - 1 - entry)


def _candidates(rng):
    yield 0x80000000, 0
    yield 0x80000000, 1
    yield 0xFF800000, 2**32 - 1
    for _ in range(8):
        yield int(rng.integers(1, 2**32)), int(rng.integers(0, 2**20))


EXERCISES = {
    "holder": Exercise(
        _holder,
        blank="return the lane and its register",
        hint="g is row % 8 and t is column // 2; the second row of a lane is eight further down",
        inputs=_elements,
    ),
    "placed": Exercise(
        _placed,
        blank="return the sign at bit 15 and seven bits from bit 4 on",
        hint="the sign moves by 8, the other seven bits by 4; check that the moved ones do not "
        "take the sign along",
        inputs=_codes,
    ),
    "choice": Exercise(
        _choice,
        blank="return a number made of the key and the entry",
        hint="the key comes first, in the upper 32 bits; below it a number that falls as the "
        "entry grows, 2^32 - 1 for entry 0",
        inputs=_candidates,
    ),
}
