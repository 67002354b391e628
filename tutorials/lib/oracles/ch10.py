"""Chapter 10: answers come from dsv41.mhc, not from the chapter's own code."""

from types import SimpleNamespace

import numpy as np

from dsv41 import mhc
from dsv41.quant import FLOAT32

from ..page import Exercise

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)


def _pre_post(streams, fn, base, scale):
    pre, post, _ = mhc.hc_coefficients(streams[None], fn, base, scale, CONFIG, FLOAT32)
    return np.stack([pre[0], post[0]])


def _predictors(rng):
    for width in (1, 2, 8, 8, 16, 64):
        streams = rng.standard_normal((4, width)) * np.array([[0.1], [1], [3], [10]])
        fn = rng.standard_normal((24, 4 * width)) / np.sqrt(4 * width)
        base, scale = rng.standard_normal(24), rng.uniform(0.5, 2, 3)
        yield tuple(np.float32(value) for value in (streams, fn, base, scale))
    streams, fn = np.ones((4, 8), np.float32), np.zeros((24, 32), np.float32)
    yield streams, fn, np.full(24, -30, np.float32), np.ones(3, np.float32)  # eps is all of pre


def _head_input(embedding, pres, posts, combs):
    streams, pre = mhc.initial_streams(embedding[None], 4)
    for next_pre, post, comb in zip(pres, posts, combs, strict=True):
        y = mhc.hc_collapse(streams, pre, FLOAT32)[:, ::-1]
        streams = mhc.hc_update(streams, y, post[None], comb[None], FLOAT32)
        pre = next_pre[None]
    return mhc.hc_collapse(streams, pre, FLOAT32)[0]


def _chains(rng):
    for length in (1, 2, 3, 5, 8):
        combs = mhc.sinkhorn(2 * rng.standard_normal((length, 4, 4)).astype(np.float32), 20, 1e-6)
        pres, posts = rng.uniform(0, 1, (length, 4)), rng.uniform(0, 2, (length, 4))
        embedding = rng.standard_normal(6)
        yield np.float32(embedding), np.float32(pres), np.float32(posts), combs


EXERCISES = {
    "pre_post": Exercise(
        _pre_post,
        blank="return pre and post, stacked: 4 + 4 of the 24 numbers through their sigmoids",
        hint="one RMS over all 4 D numbers; eps is in pre only, the factor 2 in post only",
        inputs=_predictors,
        within=5e-6,
    ),
    "head_input": Exercise(
        _head_input,
        blank="return the streams after the last sublayer, collapsed",
        hint="sublayer l reads through pres[l - 1], the first through (1, 0, 0, 0); look at the "
        "axis over which combs[l] is contracted, and at what collapses the last streams",
        inputs=_chains,
        within=1e-3,
    ),
}
