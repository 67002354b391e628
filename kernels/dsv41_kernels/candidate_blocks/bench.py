"""The best 2,048 blocks of 8: the candidate pool that one source publishes."""

import importlib.util

import cupy
import numpy as np

from dsv41.indexer import block_scores
from dsv41.indexer import candidate_blocks as text

from ..bench import Case
from ..indexing_bench import check_best, float_rows
from .cupy_op import candidate_blocks

OP, SIZE, BUDGET = "candidate_blocks", 8, 2048
SHAPES = [(1, 1 << 20), (32, 1 << 20)]


def cases(quick=False):
    for rows, count in [(2, 1 << 18)] if quick else SHAPES:
        scores, visible = float_rows(rows, count), cupy.full(rows, count - 3, np.int64)
        for name, function in functions():
            call = lambda f=function, s=scores, v=visible: f(s, v, SIZE, BUDGET)  # noqa: E731
            yield Case(
                op=OP,
                version=name,
                shape=f"{BUDGET} blocks of {rows} x {count}",
                call=call,
                check=lambda c=call, s=scores, v=visible: check(s, v, c()),
                bytes=scores.nbytes + 8 * rows * BUDGET,
            )


def functions():
    """(version, function): ours, the text, and PyTorch where it is installed."""
    yield "v4", candidate_blocks
    yield "cupy text", text.definition
    if importlib.util.find_spec("torch"):
        import torch

        from .. import torch_indexing as peer

        def in_torch(scores, visible, size, budget):
            tensors = torch.from_dlpack(scores), torch.from_dlpack(visible)
            return peer.back(peer.blocks(*tensors, size, budget))

        yield "torch", in_torch


def check(scores, visible, blocks):
    best = block_scores(scores[:1].get(), visible[:1].get(), SIZE)[0]
    return check_best(cupy.asarray(best), blocks[0], BUDGET)
