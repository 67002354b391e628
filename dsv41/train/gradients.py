"""How do gradients of several passes become one, and none too large?

    micro_batches     a step's documents in passes that fit into memory
    accumulate        sum of shares: each pass counts by the tokens it predicted, which is exact for
                      the next token; the losses that average over other counts (index, balance, the
                      drafter's) are weighted by the same shares, nearly right
    clip              all gradients by one factor, so that their common norm is at most so much

Engram tables have gradients of some rows only, (rows, values); rows of two passes are merged. A
gradient that is not finite stops the step and is named. Source: report, section 4.2.2 (clipping).
"""

import numpy as np

from ..tensors import flatten
from .many import scale_all, square_sums
from .model import Documents
from .ops import sum_rows


def micro_batches(documents, tokens):
    """Documents -> list of Documents of at most `tokens` tokens each (a longer one stands alone);
    0 keeps them together.
    """
    groups, size = [[]], 0
    for ids in documents.ids:
        if tokens and groups[-1] and size + len(ids) > tokens:
            groups.append([])
            size = 0
        groups[-1].append(ids)
        size += len(ids)
    return [Documents(group) for group in groups]


def accumulate(total, grads, share):
    """total + share * grads, nested; Engram tables are (rows, values) and are merged by row."""
    if isinstance(grads, dict):
        total = total or {}
        return {k: accumulate(total.get(k), grads.get(k), share) for k in {**total, **grads}}
    if grads is None:
        return total
    if not isinstance(grads, tuple):
        scaled = grads * np.float32(share)
        return scaled if total is None else total + scaled
    rows, values = grads[0], grads[1] * np.float32(share)
    if total is None:
        return rows, values
    return sum_rows(np.concatenate([total[1], values]), np.concatenate([total[0], rows]))


def clip(grads, most, step):
    """Scale all gradients in place so that their common norm is at most `most` -> the norm before.

    FloatingPointError names the first tensor with a gradient that is not finite.
    """
    values = {k: v[1] if isinstance(v, tuple) else v for k, v in flatten(grads).items()}
    squares = square_sums(list(values.values()))
    norm = float(np.sqrt(np.sum(squares)))
    if not np.isfinite(norm):
        first = list(values)[int(np.argmin(np.isfinite(squares)))]
        raise FloatingPointError(f"step {step}: the gradient of {first} is not finite")
    if norm > most:
        scale_all(list(values.values()), np.float32(most / norm))
    return norm
