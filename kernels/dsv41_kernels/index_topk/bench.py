"""Top-512 of float32 rows, from a candidate pool's length to the context of the released model."""

import importlib.util

import cupy
import numpy as np

from dsv41.indexer import index_topk as text

from ..bench import Case
from ..indexing_bench import check_best, float_rows
from ..longrows import choose_long
from ..orderedrows import choose_rows
from .cupy_op import topk_v1

OP, K = "index_topk", 512
QUICK = [(4, 1 << 17, None), (20, 1 << 17, None), (4, 16_384, None)]
SHAPES = [(32, 1 << 20, 55.0), (1, 1 << 20, 13.0), (64, 16_384, 7.0)]  # rows, scores, to beat


def cases(quick=False):
    for rows, count, target in QUICK if quick else SHAPES:
        scores, visible = float_rows(rows, count), cupy.full(rows, count, np.int64)
        for name, call in versions(scores, visible):
            yield Case(
                op=OP,
                version=name,
                shape=f"top-{K} of {rows} x {count}",
                call=call,
                check=lambda call=call, scores=scores: check(scores, call()),
                bytes=scores.nbytes + 8 * rows * K,
                target_us=target if name.startswith("v") else None,
            )


def versions(scores, visible):
    count = scores.shape[1]
    if count <= 16_384:
        yield "v1", lambda: topk_v1(scores, visible, K)
    yield "v2", lambda: choose_long(OP, (scores, visible), count, K)
    yield "v3", lambda: choose_rows(scores, visible, K, version="v3")
    yield "v4", lambda: choose_rows(scores, visible, K)
    yield "cupy text", lambda: text.definition(scores, visible, K)
    if importlib.util.find_spec("torch"):
        yield "torch", torch_topk(scores)


def torch_topk(scores):
    import torch

    from .. import torch_indexing as peer

    values = torch.from_dlpack(scores)
    return lambda: peer.back(peer.topk(values, K))


def check(scores, chosen):
    return max(check_best(scores[t], chosen[t], K) for t in sorted({0, len(scores) - 1}))
