"""Chapter 06: answers come from dsv41.sparse_attn and from np.logaddexp."""

import numpy as np

from dsv41 import sparse_attn
from dsv41.quant import FLOAT32

from ..page import Exercise


def _fetch(records, rows):
    """With a query of zeros and no sink, attention to one row is that row."""
    q, sink = np.zeros((len(rows), 1, records.shape[1]), np.float32), np.float32([-np.inf])
    none = np.zeros((len(rows), 0), np.int64)
    o = sparse_attn.sparse_attn(q, records, rows[:, None], records, none, sink, FLOAT32)
    return o[:, 0]


def _lists(rng):
    for _ in range(20):
        count, channels = int(rng.integers(3, 12)), int(rng.integers(1, 5))
        records = rng.standard_normal((count, channels)).astype(np.float32)
        rows = rng.integers(-1, count - 1, 6)
        rows[rng.integers(6)] = -1
        records[np.setdiff1d(np.arange(count), rows)] = np.nan  # the last one always
        yield records, rows


def _one_softmax(near_scores, near_values, far_scores, far_values, sink):
    pools = [
        np.stack([s, v], axis=1).astype(np.float32)
        for s, v in ((near_scores, near_values), (far_scores, far_values))
    ]
    near, far = (np.arange(len(pool))[None] for pool in pools)
    q = np.float32([[[np.sqrt(2), 0]]])  # the score is the first channel
    o = sparse_attn.sparse_attn(q, pools[0], near, pools[1], far, np.float32([sink]), FLOAT32)
    return float(o[0, 0, 1])


def _groups(rng):
    for scale in (1, 1, 1, 3, 3, 300, 300, 300):
        for sink in (-np.inf, *rng.standard_normal(2)):
            n, m = rng.integers(1, 6, 2)
            near, far = (rng.uniform(-1, 1, size).astype(np.float32) * scale for size in (n, m))
            values = rng.uniform(-2, 2, n + m).astype(np.float32)
            yield near, values[:n], far, values[n:], np.float32(sink)


def _merge(M1, Z1, A1, M2, Z2, A2):
    with np.errstate(divide="ignore"):
        first, second = M1 + np.log(Z1), M2 + np.log(Z2)
    both = np.logaddexp(first, second)
    parts = [(first, Z1, A1), (second, Z2, A2)]
    return sum(np.exp(log - both) * A / Z for log, Z, A in parts if Z > 0)


def _halves(rng):
    for case in range(20):
        halves = []
        for _ in range(2):
            s = rng.standard_normal(5) + rng.choice([0, 0, 3, 1000])
            p = np.exp(s - s.max())
            halves.append((float(s.max()), float(p.sum()), p @ rng.standard_normal((5, 3))))
        if case % 4 == 3:
            halves[int(rng.integers(2))] = (-1e30, 0.0, np.zeros(3))
        yield (*halves[0], *halves[1])


EXERCISES = {
    "fetch": Exercise(
        _fetch,
        blank="return the listed records, zeros for -1",
        hint="replace what was fetched; a product with the mask keeps NaN",
        inputs=_lists,
    ),
    "one_softmax": Exercise(
        _one_softmax,
        blank="return the weighted mean of all values, the sink in the denominator only",
        hint="one maximum and one sum for both groups; subtract the maximum before exp",
        inputs=_groups,
        within=2e-4,
    ),
    "merge": Exercise(
        _merge,
        blank="return A / Z of both halves, relative to the common maximum M",
        hint="each half's Z and A are relative to its own maximum; scale both before adding",
        inputs=_halves,
        within=1e-9,
    ),
}
