"""Chapter 16: answers come from dsv41.sampling, dsv41.schedule and dsv41.draft."""

from itertools import product
from types import SimpleNamespace

import numpy as np

from dsv41.draft import _Pass
from dsv41.sampling import verify
from dsv41.schedule import draft_lengths

from ..page import Exercise

PARTS = 12  # laws in quarters: every step of `verify` lies at a multiple of 1 / 12


class _Numbers:
    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


def _comes_out(p, q, d):
    counts, middles = np.zeros(len(p)), (np.arange(PARTS) + 0.5) / PARTS
    for numbers in product(middles, repeat=2):
        kept, token = verify(np.array([p, p]), q[None], [d], _Numbers(*numbers))
        counts[d if kept else token] += 1
    return counts / PARTS**2


def _laws(rng):
    for trial in range(20):
        size = int(rng.integers(2, 5))
        p, q = (rng.multinomial(4, np.full(size, 1 / size)) / 4 for _ in range(2))
        if trial % 5 == 0:
            q = p.copy()
        if trial % 5 == 1:
            q = np.eye(size)[int(rng.integers(size))]
        yield p, q, int(rng.choice(np.flatnonzero(q)))


def _how_many(survival, steps):
    return int(draft_lengths([survival], lambda tokens: steps[tokens - 1])[0])


def _requests(rng):
    yield np.array([0.8, 0.72]), np.array([1, 0.5, 0.45])  # falls, then rises above the start
    yield np.array([0.5, 0.25]), np.array([0.75, 0.5, 0.5])  # the first only keeps the rate
    yield np.ones(5), np.ones(6)
    for _ in range(20):
        survival = np.sort(rng.integers(0, 17, 5))[::-1] / 16
        yield survival, np.sort(rng.integers(16, 65, 6))[::-1] / 64


def _keys_of(length, first, window, block):
    size = SimpleNamespace(sliding_window=window, dspark_block_size=block)
    cache = SimpleNamespace(numerics=None)
    drafter = SimpleNamespace(config=size, first={0: first}, cache=cache)
    read = _Pass(drafter, [0], length + np.arange(block), None).key_rows()[0]
    return np.arange(length - window, length + block)[read >= 0]


def _blocks(rng):
    for length in (1, 7, 8, 9, *rng.integers(1, 40, 12).tolist()):
        yield length, int(rng.integers(0, length)), 8, int(rng.integers(1, 6))
    yield 1000, 0, 128, 5


EXERCISES = {
    "comes_out": Exercise(
        _comes_out,
        blank="return the law: d where it is kept, the replacement where it is not",
        hint="d has been drafted already, so q[d] is no weight; if p = q, nothing is left to draw",
        inputs=_laws,
        within=1e-9,
    ),
    "how_many": Exercise(
        _how_many,
        blank="return the number of drafts taken while the rate rises",
        hint="compare (1 + survival so far) times steps with the best rate; equal is no gain",
        inputs=_requests,
    ),
    "keys_of": Exercise(
        _keys_of,
        blank="return the ring's positions, then the block's",
        hint="the ring holds the window before the block, as far as features exist",
        inputs=_blocks,
    ),
}
