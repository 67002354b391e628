"""Chapter 12: answers come from dsv41.engram, not from the chapter's own code."""

import numpy as np

from dsv41 import engram

from ..page import Exercise


def _all_windows(classes, is_image, pad):
    return engram.look_back(classes, is_image, np.full(3, pad), pad)[0]


def _lines(rng):
    for length in (1, 2, 3, 4, 5, 9, 9, 20):
        classes = rng.integers(0, 50, length)
        yield classes, rng.random(length) < 0.25, int(rng.integers(50))
    yield np.arange(10, 16), np.array([False, True, False, False, False, False]), 2


def _two_rows(window, multiplier, primes):
    return engram.hash_rows(window[None], multiplier, primes, 1)[0]


def _phrases(rng):
    for _ in range(20):
        window, multiplier = rng.integers(0, 99_092, 3), 2 * rng.integers(0, 10**9, 3) + 1
        yield window, multiplier, rng.permutation([101, 103, 107, 109])[:2]


EXERCISES = {
    "all_windows": Exercise(
        _all_windows,
        blank="return the windows, with pad in every stopped place",
        hint="a -1 stops itself and all places to its right, which are older",
        inputs=_lines,
    ),
    "two_rows": Exercise(
        _two_rows,
        blank="return the row of order 2 and the row of order 3",
        hint="both orders begin with x0 m0 ^ x1 m1; the second row is offset by the first prime",
        inputs=_phrases,
    ),
}
