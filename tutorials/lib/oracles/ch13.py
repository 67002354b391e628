"""Chapter 13: answers come from dsv41.mhc, dsv41.ops and dsv41.verify, and from ml_dtypes."""

import ml_dtypes
import numpy as np

from dsv41 import mhc, ops, verify
from dsv41.quant import FLOAT32

from ..page import Exercise

LIMIT = verify.limit_of("x_out", np.zeros(1, np.float32), FLOAT32)


def _to_logits(streams, pre, weight, head):
    x = mhc.hc_collapse(streams, pre, FLOAT32)
    return ops.matmul_rows(ops.rmsnorm(x, weight, 1e-20, FLOAT32), head, FLOAT32)


def _last_streams(rng):
    for tokens in (1, 3, 5, 5):
        shapes = (tokens, 4, 16), (tokens, 4), (16,), (9, 16)
        yield tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    streams, pre, weight, head = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    streams[2] = 0
    yield streams, pre, weight, head


def _first_departure(ours, theirs, limit):
    assert limit == LIMIT
    pairs = zip(ours, theirs, strict=True)
    within = [verify.compare("x_out", a, b, FLOAT32).within for a, b in pairs]
    return within.index(False) if False in within else -1


def _two_runs(rng):
    for first in (None, 0, 2, 5, *rng.integers(0, 6, 6).tolist()):
        theirs = rng.standard_normal((6, 4, 5)).astype(np.float32)
        theirs[:, 0, 3:] = -np.inf
        ours = theirs + np.float32(1e-6) * rng.uniform(-1, 1, theirs.shape).astype(np.float32)
        if first is not None:
            for layer in range(first, 6):
                ours[layer, 1 + layer % 3, 2] -= np.float32(0.01)
        yield ours, theirs, LIMIT
    for bad in (np.nan, np.inf):
        ours = np.zeros((6, 4, 5), np.float32)
        ours[4, 3, 1] = bad
        yield ours, np.zeros_like(ours), LIMIT


def _step_closer(x):
    zero = np.zeros(x.shape, ml_dtypes.bfloat16)
    return np.nextafter(x.astype(ml_dtypes.bfloat16), zero).astype(np.float32)


def _bf16_values(rng):
    powers = np.ldexp(np.float32(1), rng.integers(-60, 60, 8)).astype(np.float32)
    yield (np.concatenate([powers, -powers]),)
    for _ in range(5):
        x = rng.standard_normal(12) * 2.0 ** rng.integers(-20, 20, 12)
        yield (x.astype(ml_dtypes.bfloat16).astype(np.float32),)


EXERCISES = {
    "to_logits": Exercise(
        _to_logits,
        blank="return the logits: collapse with pre, norm, head",
        hint="one RMS per token, after the collapse; eps stands under the root",
        inputs=_last_streams,
        within=1e-3,
    ),
    "first_departure": Exercise(
        _first_departure,
        blank="return the number of the first layer with a distance above the limit, or -1",
        hint="-inf minus -inf is NaN, so compare for equality first; a NaN must count as departing",
        inputs=_two_runs,
    ),
    "step_closer": Exercise(
        _step_closer,
        blank="return every value moved by one bf16 step toward zero",
        hint="the sign is a bit of its own: the same integer step serves both signs",
        inputs=_bf16_values,
    ),
}
