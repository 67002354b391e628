"""Chapter 14: answers come from the arrays of dsv41.cache and from the numbers a report hides."""

from types import SimpleNamespace

import numpy as np

from dsv41.cache import Cache
from dsv41.presets import preset
from dsv41.quant import OFFICIAL

from ..page import Exercise


def _plan_bytes(ratios, kv_sources, index_sources):
    config = SimpleNamespace(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv_sources,
        engram_max_ngram_size=4,
        sliding_window=128,
        head_dim=512,
        index_head_dim=128,
    )
    return float(Cache(config, OFFICIAL).bytes_per_token())


def _plans(rng):
    for _ in range(20):
        count = int(rng.integers(8, 30))
        ratios = rng.integers(1, 3, count).tolist()
        kv = np.sort(rng.choice(count, int(rng.integers(1, 6)), replace=False)).tolist()
        index = sorted({*kv, *rng.choice(count, 4).tolist()})
        yield ratios, kv, index
    yield [0, 0, 2, 2, 1, 1, 1], [2, 4], [2, 4, 5, 6]


def _request_bytes(n, page_tokens):
    cache = Cache(preset("v4.1-flash"), OFFICIAL, page_tokens)
    slot = cache.add()
    cache.reserve(slot, n)
    return len(cache.pages[slot]) * len(cache.get_block(slot, 0)) + cache.bytes_per_request()


def _requests(rng):
    for page_tokens in (2, 16, 64, 128):
        for n in (1, page_tokens - 1, page_tokens, page_tokens + 1, int(rng.integers(1, 2000))):
            yield n, page_tokens


def _fixed_and_slope(lengths, per_token):
    """By the two outermost points; the inputs lie on a line exactly."""
    first, last = lengths[0] * per_token[0], lengths[-1] * per_token[-1]
    slope = (last - first) / (lengths[-1] - lengths[0])
    return [first - slope * lengths[0], slope]


def _reports(rng):
    for _ in range(20):
        lengths = np.sort(rng.choice(np.arange(100, 50_000), 6, replace=False))
        fixed, slope = rng.integers(0, 10_000_000), rng.integers(500, 5000)
        yield lengths, (fixed + slope * lengths) / lengths


EXERCISES = {
    "plan_bytes": Exercise(
        _plan_bytes,
        blank="return the sum over sources of (main KV + index key) / m",
        hint="who stores index keys: every layer that chooses, or every layer that owns KV?",
        inputs=_plans,
        within=1e-9,
    ),
    "request_bytes": Exercise(
        _request_bytes,
        blank="return the bytes of whole pages plus the part that does not grow",
        hint="one token already takes a page; a page has 890 bytes for each token it can hold",
        inputs=_requests,
    ),
    "fixed_and_slope": Exercise(
        _fixed_and_slope,
        blank="return the two numbers of the line through the totals",
        hint="the reported values do not lie on a line; what they were divided by brings it back",
        inputs=_reports,
        within=0.5,
    ),
}
