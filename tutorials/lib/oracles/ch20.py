"""Chapter 20: answers come from enumeration and from the definition, not from the chapter."""

import numpy as np

from dsv41.quant import MAIN_KV_FP4

from ..page import Exercise


def _sectors(first, stride, size):
    touched = np.add.outer(first + stride * np.arange(32), np.arange(size)) // 32
    return len(np.unique(touched))


def _requests(rng):
    yield 0, 2, 2
    yield 0, 32, 8
    yield 28, 8, 8  # every fourth lane crosses a boundary
    for _ in range(6):
        yield tuple(int(n) for n in rng.integers((0, 0, 1), (64, 80, 17)))


def _column_rounds(pitch):
    return int(np.bincount(np.arange(32) * pitch % 32).max())


def _pitches(rng):
    for pitch in (32, 33, 8, 36, *rng.integers(1, 200, 5)):
        yield (int(pitch),)


def _unpack(records):
    return MAIN_KV_FP4.decode(records, 512)


def _records(rng):
    for rows in (1, 2):
        sizes = np.exp2(rng.integers(-6, 6, (rows, 1)))
        yield (MAIN_KV_FP4.encode((rng.standard_normal((rows, 512)) * sizes).astype(np.float32)),)


EXERCISES = {
    "sectors": Exercise(
        _sectors,
        blank="return how many sectors of 32 bytes the 32 lanes touch together",
        hint="collect byte // 32 of every byte of every lane in a set: one lane may touch two "
        "sectors, and two lanes the same one",
        inputs=_requests,
    ),
    "column_rounds": Exercise(
        _column_rounds,
        blank="return the largest number of lanes that meet at one bank",
        hint="lane t reads word pitch * t, which lives in bank pitch * t mod 32; all words differ",
        inputs=_pitches,
    ),
    "unpack": Exercise(
        _unpack,
        blank="launch a kernel that fills out, one thread a code byte, and return out",
        hint="thread i has row i // 256 and byte i % 256; the even channel is the low nibble, bit "
        "3 of a code its sign; the scale of channel c is byte 256 + c // 16",
        inputs=_records,
    ),
}
