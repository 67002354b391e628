"""Score and select: a decode step over paged keys, and the packed documents of a training step."""

import numpy as np

from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.selection import choose_anywhere as text

from ..bench import Case
from ..indexing_bench import decode_entries, float_rows, packed_documents, packed_keys, queries
from .cupy_op import choose_anywhere, choose_v2

OP = "choose_anywhere"
DECODE = [(1, 524_288), (32, 131_072), (32, 524_288)]


def cases(quick=False):
    for requests, seen in [(3, 4096)] if quick else DECODE:
        entries = decode_entries(packed_keys(requests * seen), requests, seen)
        q, w = queries(requests)
        work = 68 * requests * seen, 8192 * requests * seen
        shape = f"decode B={requests}, {seen} keys"
        yield from both(
            shape, (q, w, entries, 512, None, OFFICIAL), work, requests * seen < 1 << 20
        )
        shape += ", pool"
        yield from both(shape, (q, w, entries, 512, (8, 2048), OFFICIAL), work, False)
    documents, length = (2, 128) if quick else (6, 4096)
    entries = packed_documents(float_rows(documents * length, 32), documents, length)
    q, w = queries(documents * length, 4, 32, FLOAT32)
    pairs = documents * length * (length + 1) // 2
    shape = f"training {documents} x {length}, 4 x 32"
    yield from both(shape, (q, w, entries, 64, (8, 64), FLOAT32), (q.nbytes * 2, 256 * pairs), True)


def both(shape, arguments, work, with_text):
    functions = {"cupy_op": choose_anywhere, "cupy text": text.definition}
    for name in functions if with_text else ("cupy_op",):
        call = lambda f=functions[name]: f(*arguments)  # noqa: E731
        yield Case(OP, name, shape, call, lambda c=call: check(arguments, c()), *work)


def scorings(shape, arguments, work):
    """The two ways of scoring: bf16 products (v2) and FP8 products (v3)."""
    q, w, entries, k, pool, _ = arguments
    known = {"HEADS": 32, "CHANNELS": 128, "PACKED": 1, "BF16": 1}
    arrays = q, w, entries.keys, entries.pages, entries.order, entries.visible
    longest = int(entries.reach.max())
    for name in ("v2", "v3"):
        call = lambda s=f"scores_{name}": choose_v2(  # noqa: E731
            arrays, entries.per_page, longest, k, pool, known, s
        )
        yield Case(OP, name, shape, call, lambda c=call: check(arguments, c()), *work)


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
