"""Chapter 00: answers come from dsv41.window, dsv41.accounts and dsv41.sampling."""

import numpy as np

from dsv41.accounts import router_and_experts
from dsv41.batch import make_batch
from dsv41.sampling import Sampling, distribution
from dsv41.window import window_index

from ..page import Exercise


def _tokens_read(t, window, entries, m):
    batch = make_batch([np.zeros(t + 1, np.int64)], starts=[0], slots=[0])
    recent = window_index(batch, window)[t] - batch.count * window  # rows of the call itself
    members = np.asarray(entries)[:, None] * m + np.arange(m)
    return np.unique(np.concatenate([recent[recent >= 0], members[members >= 0]]))


def _readers(rng):
    for t, window, m in ((0, 8, 1), (5, 8, 2), (7, 8, 2), (8, 8, 1), (71, 8, 2), (300, 128, 2)):
        visible = (t + 1) // m
        entries = rng.permutation(visible)[:6]  # some of them inside the window
        yield t, window, np.concatenate([np.sort(entries), np.full(6 - len(entries), -1)]), m
    yield 40, 8, np.full(6, -1), 2


def _multiplied(hidden, width, experts, active):
    parts = router_and_experts(hidden, width, experts, active, shared=1)
    return sum(weight.size * weight.used for weight in parts)


def _sizes(rng):
    yield 5120, 2304, 384, 6
    yield 64, 64, 8, 2
    for _ in range(6):
        experts = int(rng.integers(2, 500))
        yield (*(int(n) for n in rng.integers(8, 6000, 2)), experts, int(rng.integers(1, experts)))


def _next_token(logits, temperature, u):
    p = distribution(logits, Sampling(temperature=temperature))
    return int(np.searchsorted(np.cumsum(p), u, side="right"))


def _draws(rng):
    yield np.array([1.0, 3, 3, 2]), 0.0, 0.9  # two best
    yield np.array([0.0, 0, 0, 0]), 1.0, 0.5  # a sum that is u exactly
    yield np.array([1000.0, 999, -1000]), 1.0, 0.9  # exp(1000) is inf
    for temperature in (0.0, 0.3, 1.0, 1.0, 2.0, 5.0):
        yield 3 * rng.standard_normal(20), temperature, float(rng.uniform(0.001, 0.999))


EXERCISES = {
    "tokens_read": Exercise(
        _tokens_read,
        blank="return the positions that the query reads, ascending, each once",
        hint="the window begins at max(0, t - window + 1); entry e stands for e * m .. e * m + m - "
        "1; np.unique sorts and drops repetitions",
        inputs=_readers,
    ),
    "multiplied": Exercise(
        _multiplied,
        blank="return the count of weights that one token meets",
        hint="an expert has three matrices of hidden x width, the router has one row per expert, "
        "and the shared expert runs always",
        inputs=_sizes,
    ),
    "next_token": Exercise(
        _next_token,
        blank="return the id of the next token",
        hint="subtract the largest logit before exp; temperature 0 cannot be divided by; "
        "np.searchsorted(..., side='right') finds the first sum above u",
        inputs=_draws,
    ),
}
