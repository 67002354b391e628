"""Chapter 08: answers come from dsv41.indexer, and from Python's sets."""

import numpy as np

from dsv41.indexer import candidate_blocks, pool_entries

from ..page import Exercise


def _dropped(visible, size, budget):
    scores = np.zeros((1, visible), np.float32)
    blocks = candidate_blocks(scores, np.array([visible]), size, budget)
    entries = pool_entries(blocks, size)
    return visible - int(np.sum((entries >= 0) & (entries < visible)))


def _sizes(rng):
    for size, budget in ((1, 3), (2, 2), (4, 4), (8, 16)):
        full = size * budget
        for visible in (1, full - 1, full, full + 1, *rng.integers(1, 4 * full, 5).tolist()):
            yield visible, size, budget
    yield 16_385, 8, 2048


def _recall_of(got, want):
    wanted = set(want.tolist()) - {-1}
    return len(wanted & set(got.tolist())) / len(wanted) if wanted else 1.0


def _choices(rng):
    def padded(count):
        return np.append(np.sort(rng.permutation(16)[:count]), [-1] * (8 - count))

    for counts in ((8, 8), (3, 8), (8, 3), (5, 5), (4, 6), (0, 4), (4, 0), (0, 0)):
        yield tuple(padded(count) for count in counts)


def _in_pool(entries, blocks, size):
    return np.isin(entries, pool_entries(blocks[None], size)[0]) & (entries >= 0)


def _pools(rng):
    for size in (1, 2, 4, 8, 8, 8):
        for count in (0, 2, 5):
            blocks = np.append(np.sort(rng.permutation(12)[:count]), [-1] * (5 - count))
            yield rng.integers(-1, 12 * size, 20), blocks, size
        yield np.array([-1, 0, size, -1]), np.array([0, -1]), size


EXERCISES = {
    "dropped": Exercise(
        _dropped,
        blank="return how many visible entries lie outside a pool of `budget` blocks",
        hint="count the dropped blocks: the newest is never one of them, so each is full",
        inputs=_sizes,
    ),
    "recall_of": Exercise(
        _recall_of,
        blank="return the share of want's entries that got holds too",
        hint="drop the -1 of want first, then divide by what is left, if anything is",
        inputs=_choices,
        within=1e-12,
    ),
    "in_pool": Exercise(
        _in_pool,
        blank="return for each entry whether its block is one of `blocks`",
        hint="the block of an entry is entry // size, and -1 // size equals the padding",
        inputs=_pools,
    ),
}
