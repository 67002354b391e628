"""Which way does every weight have to move? The loss of a pack of documents and all its gradients.

    x = RMSNorm( sum_i A_i X_i )     z = x Whead^T     L = mean cross-entropy of the next tokens
    dWhead = dz^T x     dX_i = A_i dx     dA_i = X_i . dx     and so on, down to the embedding

The documents of a pack are the requests of one call on a fresh cache, so windows, groups, n-grams
and selections stop at their edges without a rule for it, and no document moves another's gradient.
Every layer runs; the walk back visits the layers in reverse (block.py). Logits are made, compared
and dropped in blocks of rows, since a whole (T, V) would outweigh everything else.

`params` are dense floats: the masters themselves, or `stored_weights` of them, the values that the
checkpoint would hold. The gradient by a stored value counts as that of its master, which is all
there is to straight-through training with FP8 and FP4 weights. Selection biases get no gradient:
`info["load"]` is what their rule needs. Source: report, sections 2.5 and 4.2.2.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..batch import TEXT, make_batch
from ..cache import Cache
from ..call import Call
from ..dispatch import beside, block_elements, to_host
from ..formats import round_bf16
from ..mhc import hc_collapse, initial_streams
from ..model import engram_rows
from ..ops import matmul_rows, rmsnorm, rows
from ..quant import FLOAT32, TILE, WEIGHT_FP4, WEIGHT_FP8, dequantize_tiles, quantize_tiles
from ..tensors import expected_tensors, flatten, nest
from .block import Back, block_backward, block_forward
from .losses import cross_entropy
from .mhc import hc_collapse_backward
from .ops import add_rows, linear_backward, rmsnorm_backward

PAGE_TOKENS = 16  # pages are not shared here, and documents may be short


@dataclass(frozen=True)
class Documents:
    """What one step learns from: ids, a list of 1-D int arrays, each a document of >= 1 token.

    types: like ids, -1 text, >= 0 inside an image span. wanted: like ids, bool, which tokens are to
    be predicted (default all). images (rows, D): embeddings of all image tokens, in order, instead
    of those of their ids.
    """

    ids: list
    types: list | None = None
    wanted: list | None = None
    images: np.ndarray | None = None

    def targets(self):
        """-> rows (n,) that have something to predict, and the tokens (n,) that follow them."""
        found, tokens, begin = [], [], 0
        for i, ids in enumerate(self.ids):
            asked = np.ones(len(ids), bool) if self.wanted is None else np.asarray(self.wanted[i])
            if self.types is not None:
                asked = asked & (np.asarray(self.types[i]) == TEXT)
            at = np.flatnonzero(asked[1:])
            found.append(begin + at)
            tokens.append(np.asarray(ids)[at + 1])
            begin += len(ids)
        return np.concatenate(found), np.concatenate(tokens)


@dataclass(frozen=True)
class Options:
    """classes (V,): Engram class of every token id. balance, index: weights of the two losses."""

    classes: np.ndarray | None = None
    balance: float = 1e-4
    index: float = 1.0


def loss_and_grads(params, config, documents, numerics=FLOAT32, options=None):
    """documents: Documents, or a list of id arrays -> loss, gradients nested like params, info.

    Engram tables get (rows (u,) ascending, values (u, C)); tensors without a gradient are absent:
    selection biases, the drafter, the vision tower. info: the parts "next_token", "balance" and
    "index", "targets" (how many tokens were predicted), "load" {layer: (2, E) choices of text and
    image tokens}, and "images", the gradient by documents.images.
    """
    documents = documents if isinstance(documents, Documents) else Documents(list(documents))
    options = options or Options()
    call = open_call(params, config, documents, numerics, options.classes)
    streams, pre, kept = run_forward(params, documents, call)
    back = Back(options.balance, options.index)
    targets = documents.targets()
    loss, dstreams, dpre, grads = read_out(streams, pre, params, targets, call)
    grads["layers"] = {}
    for layer in reversed(config.plan):
        dstreams, dpre, grads["layers"][layer.index] = block_backward(
            dstreams, dpre, kept.pop(), params["layers"][layer.index], layer, call, back
        )
    grads["embed"], images = embed_backward(np.sum(dstreams, axis=1), params, documents, call)
    info = {"next_token": loss, **{k: float(v) for k, v in back.losses.items()}, "images": images}
    info |= {"targets": len(targets[0]), "load": back.load}
    total = loss + options.balance * info["balance"] + options.index * info["index"]
    return total, grads, info


def evaluate(params, config, documents, numerics=FLOAT32, options=None):
    """The same documents without gradients -> nats of all predicted tokens together, how many."""
    documents = documents if isinstance(documents, Documents) else Documents(list(documents))
    call = open_call(params, config, documents, numerics, (options or Options()).classes)
    streams, pre, _ = run_forward(params, documents, call)
    at, tokens = (beside(x, streams) for x in documents.targets())
    x, head = last_x(streams[at], pre[at], params, call), params["head"]["weight"]
    pieces = (
        cross_entropy(matmul_rows(x[rows], head, numerics), tokens[rows])[0]
        for rows in row_blocks(x, head)
    )
    return sum(float(np.sum(nats)) for nats in pieces), len(x)


def best_tokens(params, config, documents, at, numerics=FLOAT32, options=None):
    """The likeliest next token behind each of the rows `at` (n,) of the documents laid end to end
    -> (n,) int64 on the host.
    """
    documents = documents if isinstance(documents, Documents) else Documents(list(documents))
    call = open_call(params, config, documents, numerics, (options or Options()).classes)
    streams, pre, _ = run_forward(params, documents, call)
    at = beside(np.asarray(at), streams)
    x = last_x(streams[at], pre[at], params, call)
    return to_host(np.argmax(matmul_rows(x, params["head"]["weight"], numerics), axis=1))


def first_not_finite(params, config, documents, numerics=FLOAT32, options=None):
    """What a NaN came from: the first weight that is not finite, else the first traced tensor of a
    forward pass, in the order of computation -> its name, None when all are finite.
    """
    for name, leaf in flatten(params).items():
        if not np.isfinite(getattr(leaf, "master", leaf)).all():
            return name
    call, trace = open_call(params, config, documents, numerics, (options or Options()).classes), {}
    try:
        run_forward(params, documents, replace(call, trace=trace))
    except ValueError:
        pass  # a quantiser or the router stopped at it; what was computed before is in the trace
    wrong = (n for n, x in trace.items() if x.dtype.kind == "f" and np.isnan(x).any())
    return next(wrong, None)


def open_call(params, config, documents, numerics, classes=None):
    """One call that brings every document whole, on a cache of its own."""
    cache = Cache(config, numerics, PAGE_TOKENS, like=params["embed"]["weight"])
    pad = classes[config.engram_pad_token_id] if config.engram_layer_ids else 0
    slots = [cache.add(pad) for _ in documents.ids]
    batch = make_batch(documents.ids, [0] * len(slots), slots, documents.types)
    cache.begin(batch)
    return Call(batch, cache, config, numerics, engram_rows(config, classes, batch, cache))


def embed(params, documents, call):
    """-> (T, D): the ids' rows, or the given embeddings where a token is part of an image."""
    weight = params["embed"]["weight"]
    out = rows(weight, beside(call.batch.ids, call.cache.like))
    if documents.images is not None:
        out[call.is_image] = documents.images
    return call.numerics.store(out)


def embed_backward(dx, params, documents, call):
    """dx (T, D) -> gradients of "embed", and of documents.images (None without)."""
    ids, images = beside(call.batch.ids, dx), None
    if documents.images is not None:
        ids, images = np.where(call.is_image, -1, ids), dx[call.is_image]
    weight = np.zeros_like(params["embed"]["weight"])
    add_rows(weight, dx, ids)
    return {"weight": weight}, images


def run_forward(params, documents, call):
    """All blocks -> streams (T, S, D), pre (T, S), and what each layer's backward needs."""
    streams, pre = initial_streams(embed(params, documents, call), call.config.hc_mult)
    kept = []
    for layer in call.config.plan:
        p = params["layers"][layer.index]
        streams, pre, more = block_forward(streams, pre, p, layer, call)
        kept.append(more)
    return streams, pre, kept


def last_x(streams, pre, params, call):
    """What the head reads, (T, D)."""
    x = hc_collapse(streams, pre, call.numerics)
    return rmsnorm(x, params["norm"]["weight"], call.config.rms_norm_eps, call.numerics)


def read_out(streams, pre, params, targets, call):
    """The last norm, the head and the loss -> mean loss in nats (0 without targets), dstreams
    (T, S, D), dpre (T, S), gradients of norm and head.
    """
    config, numerics = call.config, call.numerics
    norm, eps = params["norm"]["weight"], config.rms_norm_eps
    at, tokens = (beside(x, streams) for x in targets)
    collapsed = hc_collapse(streams[at], pre[at], numerics)
    x = rmsnorm(collapsed, norm, eps, numerics)
    loss, dx, dhead = head_loss(x, params["head"]["weight"], tokens, numerics)
    dcollapsed, dnorm = rmsnorm_backward(dx, collapsed, norm, eps)
    dstreams, dpre = np.zeros_like(streams), np.zeros_like(pre)
    dstreams[at], dpre[at] = hc_collapse_backward(dcollapsed, streams[at], pre[at])
    return loss, dstreams, dpre, {"norm": {"weight": dnorm}, "head": {"weight": dhead}}


def head_loss(x, head, targets, numerics):
    """x (n, D), head (V, D), targets (n,) -> mean loss, dx (n, D), dhead (V, D)."""
    total, dx, dhead = 0.0, np.zeros_like(x), np.zeros_like(head)
    for at in row_blocks(x, head):
        losses, dlogits = cross_entropy(matmul_rows(x[at], head, numerics), targets[at])
        dx[at], more = linear_backward(dlogits / len(x), x[at], head)
        dhead += more
        total += float(np.sum(losses))
    return total / max(len(x), 1), dx, dhead


def row_blocks(x, head):
    """Slices of the rows of x whose logits fit into one temporary."""
    step = max(1, block_elements(x) // len(head))
    return [slice(begin, begin + step) for begin in range(0, len(x), step)]


# ---- weights as they are stored ---------------------------------------------------------------


class StoredRows:
    """An Engram table's float master, read through the FP8 format that its rows are stored in."""

    def __init__(self, master):
        self.master, self.shape = master, master.shape

    def __getitem__(self, rows):
        return WEIGHT_FP8.fake(self.master[beside(rows, self.master)])


def stored_weights(params, config):
    """float masters -> the values that a checkpoint would hold, as dense floats, nested alike.

    FP8 in tiles, FP4 in rows, bf16 where the file is bf16; the rest is the same arrays. Tensors of
    one layout and shape, such as the experts of all layers, are rounded together.
    """
    specs, leaves, alike, stored = expected_tensors(config), flatten(params), {}, {}
    for name, leaf in leaves.items():
        alike.setdefault((specs[name].layout, specs[name].dtype, leaf.shape), []).append(name)
    for (layout, dtype, _), names in alike.items():
        some = [leaves[name] for name in names]
        stored |= zip(names, _stored(some, layout, dtype), strict=True)
    return nest({name: stored[name] for name in leaves})


def _stored(leaves, layout, dtype):
    """Tensors of one shape -> their stored values, in order."""
    if layout == "table":
        return [StoredRows(leaf) for leaf in leaves]
    if layout == "tiles" and leaves[0].shape[0] % TILE:  # a tile would reach into the next tensor
        return [dequantize_tiles(*quantize_tiles(leaf)) for leaf in leaves]
    if layout == "tiles":
        return np.split(dequantize_tiles(*quantize_tiles(np.concatenate(leaves))), len(leaves))
    if layout == "rows":
        return list(WEIGHT_FP4.fake(np.stack(leaves)))
    return list(round_bf16(np.stack(leaves))) if dtype == "BF16" else leaves
