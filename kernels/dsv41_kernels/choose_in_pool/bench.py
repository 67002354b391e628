"""Selection inside the candidate pool: 512 of 16,384 listed keys of a long context."""

import importlib.util

import cupy
import numpy as np

from dsv41.indexer import pool_entries
from dsv41.quant import OFFICIAL
from dsv41.selection import choose_in_pool as text

from ..bench import Case
from ..choose_anywhere.bench import entries_of
from ..indexing import macros
from ..indexing_bench import check_values, decode_entries, packed_keys, queries
from .cupy_op import choose_v2

OP, BUDGET, SIZE, K = "choose_in_pool", 2048, 8, 512


def cases(quick=False):
    for requests, seen in [(2, 65_536)] if quick else [(1, 1 << 20), (64, 131_072)]:
        entries = decode_entries(packed_keys(requests * seen), requests, seen)
        (q, w), rng = queries(requests), np.random.default_rng(4)
        blocks = [np.sort(rng.permutation(seen // SIZE)[:BUDGET]) for _ in range(requests)]
        arguments = q, w, entries, cupy.asarray(np.stack(blocks)), SIZE, K, OFFICIAL
        listed = requests * BUDGET * SIZE
        functions = {f"v{n}": scoring(f"scores_v{n}") for n in (2, 3, 4)}
        functions["cupy text"] = text.definition
        if importlib.util.find_spec("torch"):
            functions["torch"] = in_torch(*arguments[:4])
        for name, function in functions.items():
            call = lambda f=function, a=arguments: f(*a)  # noqa: E731
            yield Case(
                op=OP,
                version=name,
                shape=f"B={requests}, 16384 of {seen} keys",
                call=call,
                check=lambda c=call, a=arguments, n=name: CHECKS.get(n, check)(a, c()),
                bytes=68 * listed + 8 * requests * (BUDGET + K),
                flops=8192 * listed,
                rate="fp8",
            )


def in_torch(q, w, entries, blocks):
    """The same by PyTorch: the rows of the pool are known, their keys are gathered."""
    import torch

    from .. import torch_indexing as peer

    inside = pool_entries(blocks, SIZE)
    rows = entries.rows(entries.order[:, None], inside)
    tensors = peer.bf16(q), peer.bf16(w), peer.unpacked(entries.keys)
    places = torch.from_dlpack(rows), torch.from_dlpack(inside)
    return lambda *_: peer.back(peer.in_pool(*tensors, *places, K))


def check_torch(arguments, got):
    """PyTorch may take another one of two equal scores."""
    q, w, entries, blocks, *_ = arguments
    inside, worst = pool_entries(blocks, SIZE), 0.0
    for t in sorted({0, len(q) - 1}):
        keys = entries.keys[entries.rows(entries.order[t], inside[t])]
        alone = q[t : t + 1], w[t : t + 1], keys, got[t], inside[t]
        worst = max(worst, check_values(*alone))
    return worst


CHECKS = {"torch": check_torch}


def scoring(name):
    """choose_in_pool by bf16 products (v2), FP8 products (v3) or INT8 products (v4)."""

    def choose(q, w, entries, blocks, block_size, k, numerics):
        arrays = q, w, entries.keys, entries.pages, entries.order, entries.visible, blocks
        return choose_v2(arrays, entries.per_page, k, macros(q, numerics), name)

    return choose


def check(arguments, got):
    """As choose_anywhere's, with each query's blocks."""
    q, w, entries, blocks, *rest = arguments
    missed = 0.0
    for t in sorted({0, len(q) - 1}):
        alone = q[t : t + 1].get(), w[t : t + 1].get(), entries_of(entries, t)
        want = text.definition(*alone, blocks[t : t + 1].get(), *rest)[0]
        missed = max(missed, np.mean(~np.isin(got[t].get(), want)))
    assert missed <= 0.01, f"{missed:.2%} of a query's choices differ"
    return missed
