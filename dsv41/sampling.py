"""Which token comes next, and which drafted tokens may stay?

    p = softmax(logits / temperature), cut to the smallest set that holds top_p of it

Temperature 0 takes the best logit (the lowest id among equals). A drafted token d that was drawn
from q is kept with probability min(1, p(d) / q(d)); the first one refused is replaced by a draw
from what q left out, max(p - q, 0) normalised, and ends the run; if all are kept the last row of
the main model gives one token more. What comes out has exactly the law p of plain sampling,
whatever q is; at temperature 0 it is the very same text. Source: speculative sampling (arXiv
2302.01318); the DSpark paper.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens. temperature 0 is greedy; top_p in (0, 1]."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed: expected an integer >= 0, got {self.seed!r}")


def distribution(logits, sampling):
    """logits (V,) f32 -> probabilities (V,) f64 that `sampling` draws from; greedy is one-hot.

    Raises ValueError when no logit is finite or one is NaN.
    """
    logits = np.asarray(logits, np.float64)
    best = int(np.argmax(logits))  # the first among equals, and NaN if there is one
    if not np.isfinite(logits[best]):
        raise ValueError(f"logits: no token can be chosen, the best logit is {logits[best]}")
    if sampling.temperature == 0:
        return np.eye(1, len(logits), best)[0]
    weights = np.exp((logits - logits[best]) / sampling.temperature)
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        covered = np.cumsum(weights[order]) / np.sum(weights)
        # a token stays while those before it do not cover top_p yet, so the best always stays
        weights[order[1:][covered[:-1] >= sampling.top_p]] = 0
    return weights / np.sum(weights)


def draw(probabilities, generator):
    """probabilities (V,) f64 -> a token id. Consumes one uniform number from [0, 1)."""
    cumulative = np.cumsum(probabilities)
    token = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(probabilities)[-1]))


def verify(target, drafted, tokens, generator):
    """Decide about a run of drafted tokens -> (how many are kept, the token behind them).

    target (n + 1, V) f64: what the main model draws from at each drafted position and behind the
    last; drafted (n, V) f64: what the tokens (n,) were drawn from.
    """
    for k, token in enumerate(tokens):
        p, q = target[k], drafted[k]
        if generator.random() * q[token] < p[token]:
            continue
        rest = np.maximum(p - q, 0)
        return k, draw(rest if rest.any() else p, generator)
    return len(tokens), draw(target[len(tokens)], generator)
