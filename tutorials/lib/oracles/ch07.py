"""Chapter 07: answers come from dsv41.plan, dsv41.indexer and dsv41.ledger."""

from types import SimpleNamespace

import numpy as np

from dsv41 import indexer, ledger
from dsv41.plan import build_plan

from ..page import Exercise


def _two_sources(layer, ratios, kv_sources, index_sources):
    config = SimpleNamespace(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv_sources,
        index_source_layer_ids=index_sources,
        candidate_source_layer_id=None,
        engram_layer_ids=(),
    )
    found = build_plan(config)[layer]
    return [-1 if s is None else s for s in (found.kv_source, found.index_source)]


def _plans(rng):
    for _ in range(8):
        count = int(rng.integers(10, 20))
        ratios = rng.integers(0, 3, count).tolist()
        kv = sorted(rng.choice(np.arange(2, count), 2, replace=False).tolist())
        index = sorted({*kv, *rng.choice(np.arange(2, count), 3).tolist()})
        for layer in rng.permutation(count)[:6].tolist():
            yield layer, ratios, kv, index
    ratios, kv, index = [0, 0, 2, 2, 1, 1, 1, 1, 0], [2, 4], [2, 4, 6]
    for layer in (1, 2, 3, 7, 8):
        yield layer, ratios, kv, index


def _entries_of(scores, position, ratio, k):
    return indexer.index_topk(scores[None], np.array([(position + 1) // ratio]), k)[0]


def _queries(rng):
    for _ in range(30):
        ratio, count = int(rng.integers(1, 3)), int(rng.integers(2, 16))
        scores = rng.integers(-2, 4, count).astype(np.float32) / 2  # many ties
        yield scores, int(rng.integers(0, count * ratio)), ratio, int(rng.integers(1, 7))
    yield np.float32([0, 0, 9]), 4, 2, 2  # the best entry's pair is still open
    yield np.float32([1, 2]), 0, 2, 3  # nothing is visible


def _keys_read(n):
    return ledger.index_entries("V4.1-Flash", n)


def _contexts(rng):
    fixed = [1, 2, 513, 16_383, 16_384, 16_385, 1 << 20]
    return [(int(n),) for n in (*fixed, *rng.integers(1, 1 << 20, 10))]


EXERCISES = {
    "two_sources": Exercise(
        _two_sources,
        blank="return the nearest KV source and index source at or before the layer",
        hint="a layer of ratio 0 reads from nobody; a source behind the layer does not count",
        inputs=_plans,
    ),
    "entries_of": Exercise(
        _entries_of,
        blank="return the k best visible entries, ascending, padded with -1",
        hint="count the closed groups first; on a tie the lower entry number wins",
        inputs=_queries,
    ),
    "keys_read": Exercise(
        _keys_read,
        blank="return the keys read by 3 Full layers of m = 2, one of m = 1 and 4 Reindex layers",
        hint="an open pair has no key; a pool is never larger than what is visible",
        inputs=_contexts,
    ),
}
