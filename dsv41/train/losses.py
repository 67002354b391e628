"""What is wrong with a prediction, as one number and as a gradient?

    next token   L = -log softmax(z)[target]                             dz = softmax(z) - 1[target]
    balance      L = sum_e f_e P_e    f_e = E / (k T) tokens that chose e, P_e = mean s_e / sum(s)
    index        L = sum_j a_j log(a_j / q_j), q = softmax of the scores          dI_j = q_j - a_j
    draft        L = 0.1 CE + 0.9 sum_v |p - p*| + BCE(c, 1 - sum_v |p - p*| / 2)

Balance is counted over each sequence, here a document, and weighted by its length; the counts f are
constants, so it lowers the probability of experts that are chosen too often. The index loss teaches
the indexer where attention went: a is the probability of each selected entry in the softmax over
window, selected entries and sink, summed over heads and over all layers that read the selection,
and only then made to sum to 1, so that a head that looks elsewhere has little say. Draft compares
the drafter's p with the main model's p*; confidence learns the chance of acceptance as it is, so
its label is a constant. Sources: DeepSeek-V3 report, section 2.1.2 (balance, 1e-4); V3.2 report,
section 2.1 (index; V4.1's report does not state one); DSpark paper, arXiv 2607.05147 (draft).
"""

import math

import numpy as np

from ..dispatch import op
from ..ops import sigmoid

DRAFT_WEIGHTS = {"ce": 0.1, "tv": 0.9, "confidence": 1.0}


def cross_entropy(logits, targets):
    """logits (n, V), targets (n,) int -> losses (n,) in nats, and each one's gradient (n, V)."""
    log_p = _log_softmax(logits)
    dlogits, at = np.exp(log_p), (np.arange(len(targets), like=targets), targets)
    dlogits[at] -= 1
    return -log_p[at], dlogits


def bits_per_byte(nats, count):
    """nats of a text in all, count: its length in bytes -> bits per byte."""
    return nats / (count * math.log(2))


@op
def balance_loss(scores, chosen, order, documents):
    """scores (T, E) > 0 of a router, chosen (T, k) experts, order (T,) the token's document, how
    many there are -> loss, 1 when balanced, and dscores (T, E).
    """
    tokens, experts = scores.shape
    pair = (order[:, None] * experts + chosen).ravel()
    counts = np.bincount(pair, minlength=documents * experts).reshape(documents, experts)
    lengths = np.bincount(order, minlength=documents)[:, None]
    f = (counts * experts / (np.maximum(lengths, 1) * chosen.shape[1])).astype(scores.dtype)
    f = f[order]  # (T, E), of the token's own document
    total = np.sum(scores, axis=1, keepdims=True)
    share = np.sum(f * scores, axis=1, keepdims=True) / total  # (T, 1)
    return np.mean(share), (f - share) / (total * tokens)


def index_loss(scores, valid, attention):
    """scores (t, K) of the selected entries, valid (t, K) bool, attention (t, K) what they got, on
    any scale -> losses (t,), 0 where nothing was selected, and each one's dscores (t, K).
    """
    total = np.sum(attention, axis=1, keepdims=True)
    a = attention / np.where(total > 0, total, 1)
    log_q = _log_softmax(np.where(valid, scores, -1e30))
    logs = np.log(np.where(a > 0, a, 1)) - np.where(a > 0, log_q, 0)
    return np.sum(a * logs, axis=1), np.where((total > 0) & valid, np.exp(log_q) - a, 0)


def draft_loss(logits, confidence, targets, p_main):
    """logits (n, V) of the drafter, confidence (n,) logits, targets (n,) the true tokens, p_main
    (n, V) the main model's probabilities -> losses {name: (n,)}, dlogits (n, V), dconfidence (n,).
    """
    ce, dlogits = cross_entropy(logits, targets)
    p = softmax(logits)
    distance = np.sum(np.abs(p - p_main), axis=1)
    sign = np.sign(p - p_main)
    dtv = p * (sign - np.sum(sign * p, axis=1, keepdims=True))
    label = 1 - distance / 2
    bce = np.logaddexp(0, confidence) - label * confidence
    weights = DRAFT_WEIGHTS
    dlogits = weights["ce"] * dlogits + weights["tv"] * dtv
    dconfidence = weights["confidence"] * (sigmoid(confidence) - label)
    return {"ce": ce, "tv": distance, "confidence": bce}, dlogits, dconfidence


def softmax(z):
    """z (..., V) -> probabilities (..., V)."""
    return np.exp(_log_softmax(z))


def _log_softmax(z):
    z = z - np.max(z, axis=-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))
