"""Chapter 19: answers come from dsv41.train, not from the chapter's own code."""

import numpy as np

from dsv41.train.gradients import accumulate
from dsv41.train.losses import bits_per_byte, cross_entropy
from dsv41.train.model import Documents

from ..page import Exercise


def _text_bits(logits, targets, eos, text_bytes):
    nats, _ = cross_entropy(logits, targets)
    return bits_per_byte(float(np.sum(nats[targets != eos])), text_bytes)


def _predictions(rng):
    for n, size, vocabulary in ((1, 1.0, 5), (7, 3.0, 9), (20, 2000.0, 30)):
        logits = size * rng.standard_normal((n, vocabulary))
        targets = rng.integers(2, vocabulary, n)
        targets[1::4] = 1  # some documents end
        yield logits, targets, 1, int(rng.integers(n, 5 * n))


def _next_tokens(ids, segments):
    targets = np.full(len(ids), -1)
    pieces = [ids[segments == n] for n in range(segments.max() + 1)]
    at, tokens = Documents(pieces).targets()  # padding comes last, so places are the same
    targets[at] = tokens
    return targets


def _samples(rng):
    for sizes, padding in (((5,), 0), ((1, 4), 3), ((6, 1, 1, 3), 1), ((2, 2), 6)):
        segments = np.repeat([*range(len(sizes)), -1], [*sizes, padding])
        ids = rng.integers(3, 300, len(segments))
        yield np.where(segments < 0, 2, ids), segments


def _whole_gradient(grads, counts):
    total = None
    for grad, count in zip(grads, counts.tolist(), strict=True):
        total = accumulate(total, {"weight": grad}, count / counts.sum())
    return total["weight"]


def _passes(rng):
    for m, n in ((1, 3), (2, 4), (5, 6)):
        yield rng.standard_normal((m, n)), rng.integers(1, 200, m)


EXERCISES = {
    "text_bits": Exercise(
        _text_bits,
        blank="return the bits of all tokens but eos, over the bytes of the text",
        hint="subtract the row's largest logit before exp; leave out eos; nats over ln 2 are bits",
        inputs=_predictions,
        within=1e-6,
    ),
    "next_tokens": Exercise(
        _next_tokens,
        blank="return the next token of the same piece, and -1 where there is none",
        hint="the last token of a piece has no target, and padding has none and is none",
        inputs=_samples,
    ),
    "whole_gradient": Exercise(
        _whole_gradient,
        blank="return the gradient of the mean over all tokens",
        hint="a pass counts by its share of the tokens, not by 1 / m",
        inputs=_passes,
        within=1e-5,
    ),
}
