"""Chapter 04: answers come from dsv41.compress, its gradient, and the released config."""

import numpy as np

from dsv41.compress import pool_groups
from dsv41.presets import preset
from dsv41.quant import INDEX_FP4, MAIN_KV_FP4
from dsv41.train.compress import pool_groups_backward

from ..page import Exercise


def _pool_pair(u0, u1, g0, g1):
    return pool_groups(np.stack([u0, u1])[None], np.stack([g0, g1])[None])[0]


def _pairs(rng):
    for size in (1, 1, 1, 30, 200, 10_000):
        u0, u1, g0, g1 = rng.standard_normal((4, 6), np.float32)
        yield u0, u1, g0 * np.float32(size), g1 * np.float32(size)
    u0, u1 = rng.standard_normal((2, 4), np.float32)
    large = np.float32([10_000, -10_000, 10_000, -10_000])
    yield u0, u1, large, np.float32([-10_000, 10_000, 9_999, -9_999])


def _gate_gradient(d, u, g):
    return pool_groups_backward(d[None], u[None], g[None])[1][0]


def _groups(rng):
    for m in (1, 2, 2, 2, 4, 128):
        yield rng.standard_normal(5), rng.standard_normal((m, 5)), rng.standard_normal((m, 5)) * 3


def _global_bytes(n):
    config = preset("v4.1-flash")
    entry = MAIN_KV_FP4.record_bytes(config.head_dim) + INDEX_FP4.record_bytes(
        config.index_head_dim
    )
    return sum(n // config.compress_ratios[s] * entry for s in config.kv_source_layer_ids)


def _lengths(rng):
    return [(int(n),) for n in (0, 1, 2, 3, 127, 1_048_576, *rng.integers(1, 1_048_577, 20))]


EXERCISES = {
    "pool_pair": Exercise(
        _pool_pair,
        blank="return the pooled pair, one weight per channel",
        hint="exp of a large gate overflows, exp of minus a distance never does",
        inputs=_pairs,
        within=2e-6,
    ),
    "gate_gradient": Exercise(
        _gate_gradient,
        blank="return dL/dg, one row for each token",
        hint="the softmax's weights move too: compare each candidate with the pooled value",
        inputs=_groups,
        within=1e-9,
    ),
    "global_bytes": Exercise(
        _global_bytes,
        blank="return the bytes of all whole entries, main KV and index key",
        hint="three layers close an entry with every second token, one with every token",
        inputs=_lengths,
    ),
}
