"""Chapter 15: answers come from dsv41.replay, dsv41.prefix and the cache's own page table."""

import numpy as np

from dsv41.cache import Cache
from dsv41.prefix import block_keys
from dsv41.presets import preset
from dsv41.quant import OFFICIAL
from dsv41.replay import replay_start

from ..page import Exercise

REAL = preset("v4.1-flash")


def _tokens_run(strategy, total, hit, period):
    starts = {
        "bounded": replay_start(hit, REAL),
        "zero": replay_start(hit, REAL, exact=True),
        "periodic": max(range(period, hit + 1, period)),
        "full": hit,
    }
    return total - starts[strategy]


def _hits(rng):
    for strategy in ("bounded", "zero", "periodic", "full"):
        yield strategy, 101, 96, 32  # shorter than a window
        yield strategy, 3000, 2998, 1024  # shorter than all windows
        for hit in (2 * rng.integers(600, 20_000, 5)).tolist():
            yield strategy, hit + int(rng.integers(1, 500)), hit, int(2 ** rng.integers(6, 11))


def _usable(prompt, earlier, block):
    ours, theirs = block_keys(prompt[:-1], block), block_keys(earlier, block)
    return block * len(set(ours) & set(theirs))


def _texts(rng):
    for _ in range(20):
        block = int(2 ** rng.integers(1, 5))
        text = rng.integers(0, 9, int(rng.integers(1, 70))).tolist()
        other = text[: int(rng.integers(0, len(text) + 1))]
        yield text, other + rng.integers(0, 9, 20).tolist(), block
    text = rng.integers(0, 9, 32).tolist()
    yield text, text, 8  # all of it is stored, and one token has to run
    yield text, [text[0] + 1, *text[1:]], 8  # equal blocks behind another beginning
    yield text, text[:20], 8  # the earlier text is shorter


def _pool_row(pages, entry, ratio):
    cache = Cache(preset("tiny"), OFFICIAL, page_tokens=8)
    slot = cache.add()
    cache.pages[slot] = list(pages)
    source = next(s for s, r in cache.ratio.items() if r == ratio)
    return int(cache.rows(source, slot, np.array([entry]))[0])


def _entries(rng):
    for ratio in (1, 2):
        for _ in range(10):
            pages = rng.permutation(12)[: int(rng.integers(1, 6))].tolist()
            yield pages, int(rng.integers(0, len(pages) * 8 // ratio)), ratio
        yield [5, 0], -1, ratio
        yield [5, 0, 9], 8 // ratio, ratio  # the first entry of the second page


EXERCISES = {
    "tokens_run": Exercise(
        _tokens_run,
        blank="return the new tokens plus those that run again to rebuild the windows",
        hint="nothing before token 0 can run again; the new tokens always run",
        inputs=_hits,
    ),
    "usable": Exercise(
        _usable,
        blank="return how many leading tokens of the prompt can be taken from the store",
        hint="leave the last token out first, then count equal tokens, then cut to whole blocks",
        inputs=_texts,
    ),
    "pool_row": Exercise(
        _pool_row,
        blank="return the row of the pool that holds the entry",
        hint="a page of 8 tokens holds 8 / ratio entries; mind -1",
        inputs=_entries,
    ),
}
