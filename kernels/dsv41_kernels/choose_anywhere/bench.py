"""Score and select: a decode step over paged keys, and the packed documents of a training step."""

import importlib.util

import numpy as np

from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.selection import choose_anywhere as text

from ..bench import Case
from ..indexing import macros
from ..indexing_bench import (
    check_values,
    decode_entries,
    float_rows,
    packed_documents,
    packed_keys,
    queries,
)
from .cupy_op import choose_anywhere, choose_at_once, choose_from_scores

OP = "choose_anywhere"
DECODE = [(1, 524_288), (32, 131_072), (32, 524_288)]


def cases(quick=False):
    for requests, seen in [(3, 4096)] if quick else DECODE:
        entries = decode_entries(packed_keys(requests * seen), requests, seen)
        q, w = queries(requests)
        work, shape = (68 * requests * seen, 8192 * requests * seen), f"B={requests}, {seen} keys"
        for pool, name in ((None, ""), ((8, 2048), ", pool")):
            arguments = q, w, entries, 512, pool, OFFICIAL
            functions = {f"v{n}": scoring(f"scores_v{n}") for n in (2, 3, 4)}
            if requests * seen < 1 << 20 and pool is None:
                functions["cupy text"] = text.definition
            yield from of(shape + name, arguments, work, functions, "fp8")
            if pool is None and importlib.util.find_spec("torch"):
                yield in_torch(shape, arguments, work)
    yield from training(*((2, 128) if quick else (6, 4096)))


def in_torch(shape, arguments, work):
    """Scores of all keys and the best of them by PyTorch."""
    from .. import torch_indexing as peer

    q, w, entries, k, *_ = arguments
    keys = requests_keys(entries)
    tensors = peer.bf16(q), peer.bf16(w), peer.unpacked(keys)
    call = lambda: peer.back(peer.topk(peer.scores(*tensors), k))  # noqa: E731

    def done():
        chosen, last = call(), len(q) - 1
        pick = lambda t: (q[t : t + 1], w[t : t + 1], keys[t], chosen[t])  # noqa: E731
        return max(check_values(*pick(t)) for t in {0, last})

    return Case(OP, "torch", shape, call, done, *work, rate="fp8")


def requests_keys(entries):
    """Key records (R, N, Z) of every request, out of their pages."""
    rows = entries.pages[:, :, None] * entries.per_page + np.arange(
        entries.per_page, like=entries.pages
    )
    return entries.keys[rows.reshape(len(rows), -1)][:, : int(entries.reach.max())]


def training(documents, length):
    entries = packed_documents(float_rows(documents * length, 32), documents, length)
    q, w = queries(documents * length, 4, 32, FLOAT32)
    work = 2 * q.nbytes, 128 * documents * length * (length + 1)
    functions = {"v1": at_once("choose_v1"), "v2": choose_anywhere, "cupy text": text.definition}
    shape = f"training {documents} x {length}, 4 x 32"
    yield from of(shape, (q, w, entries, 64, (8, 64), FLOAT32), work, functions)


def scoring(name):
    """choose_anywhere by bf16 products (v2), FP8 products (v3) or INT8 products (v4)."""

    def choose(q, w, entries, k, pool, numerics):
        known, longest = macros(q, numerics), int(entries.reach.max())
        arrays = q, w, entries.keys, entries.pages, entries.order, entries.visible
        return choose_from_scores(arrays, entries.per_page, longest, k, pool, known, name)

    return choose


def at_once(name):
    """choose_anywhere in one launch of the kernel of that name."""

    def choose(q, w, entries, k, pool, numerics):
        known, longest = macros(q, numerics), int(entries.reach.max())
        arrays = q, w, entries.keys, entries.pages, entries.order, entries.visible
        return choose_at_once(arrays, entries.per_page, longest, k, pool, known, name)

    return choose


def of(shape, arguments, work, functions, rate="fp16"):
    for name, function in functions.items():
        call = lambda f=function: f(*arguments)  # noqa: E731
        done = lambda c=call: check(arguments, c())  # noqa: E731
        yield Case(OP, name, shape, call, done, *work, rate=rate)


def check(arguments, got):
    """A few queries alone in CPU memory -> share of their choices that differ: 0, but for scores
    that lay on a tie of bf16.
    """
    q, w, entries, *rest = arguments
    missed = 0.0
    for t in sorted({0, len(q) // 2, len(q) - 1}):
        alone = entries_of(entries, t)
        want = text.definition(q[t : t + 1].get(), w[t : t + 1].get(), alone, *rest)
        for ours, theirs in zip(want, got, strict=True):
            if ours is not None:
                theirs = theirs[t].get()
                missed = max(missed, np.mean(~np.isin(theirs, ours[0])))
    assert missed <= (0.01 if rest[-1].bf16 else 0), f"{missed:.2%} of a query's choices differ"
    return missed


def entries_of(entries, t):
    """The Entries of query t alone, in CPU memory, with the keys of its own pages."""
    pages = entries.pages[entries.order[t]]
    rows = pages[:, None] * entries.per_page + np.arange(entries.per_page, like=pages)
    keys, seen = entries.keys[rows.ravel()].get(), entries.reach[t : t + 1]
    own = np.arange(len(pages))[None]
    return type(entries)(keys, own, entries.per_page, seen * 0, seen, [(0, slice(0, 1))], seen)
