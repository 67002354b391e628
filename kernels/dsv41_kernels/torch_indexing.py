"""Index scores and selections in plain PyTorch, eager: the peer of the indexer's kernels.

Keys are unpacked to bf16 before the clock starts, which spares PyTorch a step and costs it four
times the bytes; paging is left out. The products, the relu, the weights and the sum are rounded to
bf16 where the definition rounds them. Nothing else imports this; PyTorch is no dependency.
"""

import cupy
import torch

from dsv41.quant import INDEX_FP4

from .indexing_bench import CHANNELS

AT_ONCE = 1 << 28  # products that exist at a time


def bf16(x):
    """A CuPy array of float32 as a bf16 tensor."""
    return torch.from_dlpack(x).bfloat16()


def unpacked(records):
    """Key records (..., N, Z) -> (..., N, J) bf16."""
    flat = records.reshape(-1, records.shape[-1])
    step = 1 << 22
    parts = [
        bf16(INDEX_FP4.decode(flat[n : n + step], CHANNELS)) for n in range(0, len(flat), step)
    ]
    return torch.cat(parts).view(*records.shape[:-1], CHANNELS)


def scores(q, w, k, out=None):
    """q (T, I, J), w (T, I), k (N, J) or (T, N, J), all bf16 -> (T, N) float32."""
    tokens, heads, count = *q.shape[:2], k.shape[-2]
    out = torch.empty((tokens, count), device=q.device) if out is None else out
    step = max(1, AT_ONCE // (heads * count))
    for n in range(0, tokens, step):
        at = slice(n, n + step)
        if k.ndim == 2:
            dots = (q[at].flatten(0, 1) @ k.T).unflatten(0, (-1, heads))
        else:
            dots = q[at] @ k[at].mT  # (t, I, N)
        out[at] = (dots.relu_() * w[at, :, None]).sum(1)
    return out


def topk(scores, k):
    """(T, N) -> (T, k) indices, ascending."""
    return torch.sort(torch.topk(scores, k, dim=1).indices, dim=1).values


def blocks(scores, visible, size, budget):
    """The best blocks of each row, ascending, that of the newest entry among them."""
    place = torch.arange(scores.shape[1], device=scores.device)
    seen = torch.where(place < visible[:, None], scores, -torch.inf)
    best = seen.unflatten(1, (-1, size)).amax(2)
    best = best.scatter(1, (visible[:, None] - 1) // size, torch.inf)
    return topk(best, budget)


def in_pool(q, w, k, rows, entries, most):
    """The best of each query's own rows of k (all, J): rows, entries (T, P) -> (T, most)."""
    chosen = torch.topk(scores(q, w, k[rows]), most, dim=1).indices
    return torch.sort(entries.gather(1, chosen), dim=1).values


def back(tensor):
    """A tensor's memory as a CuPy array."""
    return cupy.from_dlpack(tensor)
