"""Index scores: decode, every request with keys of its own, and prefill, where all share them."""

import importlib.util

from dsv41.indexer import index_scores as text
from dsv41.quant import OFFICIAL

from ..bench import Case
from ..indexing_bench import FOUR_BIT, RECORD, check_scores, packed_keys, queries
from .cupy_op import scores_v1, scores_v2, scores_v3, scores_v4, scores_v5, scores_v6

OP, TEXT_TOKENS = "index_scores", 512
DECODE = [(32, 131_072, 100.0), (32, 524_288, 400.0), (1, 524_288, 15.0)]  # requests, keys, to beat


def cases(quick=False):
    for requests, count, target in [(4, 4096, None)] if quick else DECODE:
        yield from decode(requests, count, target)
    tokens, count, target = (64, 4096, None) if quick else (8192, 65_536, 4900.0)
    yield from prefill(tokens, count, target)


def decode(requests, count, target):
    keys = packed_keys(requests * count).reshape(requests, count, RECORD)
    shape = f"decode B={requests}, {count} keys"
    for numerics, name in ((OFFICIAL, ""), (FOUR_BIT, " fp32")):
        q, w = queries(requests, numerics=numerics)
        for version in versions(q, w, keys, numerics, small=requests * count < 1 << 23):
            yield case(version, shape + name, q, w, keys, numerics, target)
        if numerics is OFFICIAL:
            yield from in_torch(shape, q, w, keys)


def prefill(tokens, count, target):
    keys, (q, w) = packed_keys(count), queries(tokens)
    shape = f"prefill T={tokens}, {count} keys"
    for version in versions(q, w, keys, OFFICIAL, small=False):
        yield case(version, shape, q, w, keys, OFFICIAL, target)
    yield from in_torch(shape, q, w, keys)
    few = min(tokens, TEXT_TOKENS)  # the text keeps the products of all heads
    q, w, shape = q[:few], w[:few], f"prefill T={few}, {count} keys"
    for version in (*versions(q, w, keys, OFFICIAL, small=False), of_text(q, w, keys, OFFICIAL)):
        if few < tokens or version[0] == "cupy text":
            yield case(version, shape, q, w, keys, OFFICIAL, None)


def of_text(q, w, keys, numerics):
    return "cupy text", lambda: text.definition(q, w, keys, numerics)


def in_torch(shape, q, w, keys):
    """The case of PyTorch, where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return
    from .. import torch_indexing as peer

    unpacked = peer.bf16(q), peer.bf16(w), peer.unpacked(keys)
    out = peer.scores(*unpacked)
    version = "torch", lambda: peer.back(peer.scores(*unpacked, out))
    yield case(version, shape, q, w, keys, OFFICIAL, None, ties=0.1)


def versions(q, w, keys, numerics, small):
    """(name, function -> scores): what is made for the shape, and at small ones the slow ways."""
    known = {"HEADS": 32, "CHANNELS": 128, "PACKED": 1, "BF16": int(numerics.bf16)}
    runs = {"v2": scores_v2, "v3": scores_v3, "v4": scores_v4, "v5": scores_v5, "v6": scores_v6}
    for name in ("v3", "v5") if keys.ndim == 2 else ("v2", "v4", "v6"):
        yield name, lambda run=runs[name]: run(known, q, w, keys)
    if small:
        yield "v1", lambda: scores_v1(known, q, w, keys)
        yield of_text(q, w, keys, numerics)


def case(version, shape, q, w, keys, numerics, target, **limits):
    name, call = version
    pairs = len(q) * keys.shape[-2]

    def check():
        scores = call()
        one = keys.ndim == 2
        return check_scores(
            q,
            w,
            lambda t, j: keys[j] if one else keys[t][j],
            lambda t: scores[t],
            numerics,
            **limits,
        )

    return Case(
        op=OP,
        version=name,
        shape=shape,
        call=call,
        check=check,
        bytes=keys.nbytes + 4 * pairs,
        flops=2 * 32 * 128 * pairs,
        rate="fp8",  # MXFP4 keys and queries: every factor is an E4M3 number
        target_us=target if name.startswith("v") else None,
    )
