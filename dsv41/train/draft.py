"""How does the drafter learn to say what the main model is about to say?

From documents that the frozen main model has read, blocks are cut at random anchors a. All blocks
of a pack are drafted in one pass, as in use:

    slot k of a block     position a + k; its input is embed[x_a] for k = 0, noise behind it
    sees                  context records of positions a - W .. a - 1, and its whole block
    predicts              x_(a+k+1); the Markov head knows x_(a+k) (teacher forcing)
    is compared with      p* of the main model at a + k, which has read the true text up to there
    weighs                exp(-k / decay): a late slot is of use only when all before it are right

Blocks do not see each other, nor a true token behind their anchor. Gradients reach the drafter's
own tensors ("mtp") and stop at the main model's features, embedding and head. Context records are
made once per stage for all positions and get the sum of what all blocks want of them. Source:
draft.py; DSpark paper (arXiv 2607.05147). Left out: the confidence's temperatures, fitted later.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from ..ced import sublayers
from ..dispatch import beside
from ..draft import _Pass
from ..mhc import hc_collapse, initial_streams
from ..moe import route
from ..ops import dense, linear_fp8, matmul_rows, rmsnorm, rows
from ..plan import Layer
from ..quant import FLOAT32
from ..rope import frequencies
from ..window import window_kv
from .block import attend_backward, sublayer_backward
from .losses import DRAFT_WEIGHTS, draft_loss, softmax
from .mhc import hc_collapse_backward
from .model import Options, last_x, open_call, row_blocks, run_forward
from .moe import moe_experts_backward, route_backward
from .ops import add_grads, add_rows, linear_backward, linear_fp8_backward, rmsnorm_backward
from .window import window_kv_backward


def draft_loss_and_grads(
    params, config, documents, anchors, numerics=FLOAT32, options=None, decay=None
):
    """documents: model.Documents; anchors: per document, int positions 1 .. length - 2; decay: of
    the slots' weights, default the block size -> loss, gradients {"mtp": ...}, info.

    info: weighted means "ce", "tv" (sum_v |p - p*|) and "confidence", "slots" (how many counted)
    and "load" {stage: (E,) how often each expert was chosen}.
    """
    call = open_call(params, config, documents, numerics, (options or Options()).classes)
    features, final = read_by_main_model(params, documents, call)
    blocks = cut_blocks(documents, anchors, config, decay or config.dspark_block_size)
    draft = DraftCall(params, features, blocks, call)
    streams, pre, kept = draft_forward(params, draft)
    hidden = hc_collapse(streams, pre, numerics)
    losses, dhidden, heads = heads_backward(hidden, final, params, draft)
    grads, load = stages_backward(*hc_collapse_backward(dhidden, streams, pre), kept, draft)
    last = config.num_nextn_predict_layers - 1
    info = losses | {"slots": int(np.count_nonzero(blocks.weight)), "load": load}
    loss = sum(DRAFT_WEIGHTS[name] * losses[name] for name in DRAFT_WEIGHTS)
    return loss, {"mtp": add_grads(grads, {last: heads})}, info


# ---- blocks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The slots of all blocks, n = A * B, and the rows of the pack that they refer to.

    weight sums to 1; it is 0 where a slot has nothing to predict.
    """

    positions: np.ndarray  # (n,) in the document
    ids: np.ndarray  # (n,) input tokens: the anchor, then noise
    context: np.ndarray  # (A, W) rows whose context records the block sees, -1 padded
    main: np.ndarray  # (n,) rows of the same positions, where the main model predicts
    before: np.ndarray  # (n,) the token there, which the Markov head knows
    truth: np.ndarray  # (n,) the token behind it
    weight: np.ndarray  # (n,)


def sample_anchors(documents, count, rng):
    """Up to `count` random anchors per document, ascending -> list of int arrays.

    An anchor has a token before it, which is context, and one behind it, to be predicted.
    """
    possible = [np.arange(1, len(ids) - 1) for ids in documents.ids]
    return [np.sort(rng.permutation(positions)[:count]) for positions in possible]


def cut_blocks(documents, anchors, config, decay):
    """-> Blocks, in the order of the anchors."""
    _check_anchors(documents, anchors)
    size, ids = config.dspark_block_size, np.concatenate(documents.ids)
    lengths = np.array([len(d) for d in documents.ids])
    of = np.repeat(np.arange(len(lengths)), [len(a) for a in anchors])  # (A,) document
    first, anchor = (np.cumsum(lengths) - lengths)[of, None], np.concatenate(anchors)[:, None]
    positions = anchor + np.arange(size)  # (A, B)
    main = first + np.minimum(positions, lengths[of, None] - 1)
    behind = np.full(len(ids), -1)
    behind[documents.targets()[0]] = documents.targets()[1]
    truth = np.where(positions < lengths[of, None], behind[main], -1)
    weight = np.where(truth >= 0, np.exp(-np.arange(size) / decay), 0)
    context = first + anchor + np.arange(-config.sliding_window, 0)
    inputs = np.full(positions.shape, config.dspark_noise_token_id)
    inputs[:, 0] = ids[main[:, 0]]
    return Blocks(
        *(positions.ravel(), inputs.ravel(), np.where(context >= first, context, -1)),
        *(main.ravel(), ids[main.ravel()], np.maximum(truth, 0).ravel()),
        (weight / max(np.sum(weight), 1e-30)).ravel(),
    )


def _check_anchors(documents, anchors):
    for i, (ids, own) in enumerate(zip(documents.ids, anchors, strict=True)):
        if len(own) and not (np.min(own) >= 1 and np.max(own) <= len(ids) - 2):
            raise ValueError(f"anchors: expected 1 .. {len(ids) - 2} in document {i}, got {own}")


# ---- forward ------------------------------------------------------------------------------------


def read_by_main_model(params, documents, call):
    """The frozen model's pass -> features (T, layers * D) and its last x (T, D)."""
    streams, pre, kept = run_forward(params, documents, call)
    inputs = [kept[layer][1][0] for layer in call.config.dspark_target_layer_ids]  # Engram added
    features = [call.numerics.store(np.mean(x, axis=1)) for x in inputs]
    return np.concatenate(features, axis=1), last_x(streams, pre, params, call)


class DraftCall(_Pass):
    """`draft._Pass` over the blocks of a pack: one ring that holds every position's record."""

    def __init__(self, params, features, blocks, call):
        config, numerics = call.config, call.numerics
        self.stages = [params["mtp"][n] for n in range(config.num_nextn_predict_layers)]
        self.blocks, self.features, self.place = blocks, features, call.here.positions
        p, eps, freqs = self.stages[0], config.rms_norm_eps, frequencies(config, 0)
        self.projected = linear_fp8(features, p["main_proj"]["weight"], numerics)
        self.context = rmsnorm(self.projected, p["main_norm"]["weight"], eps, numerics)
        rings = [
            {0: window_kv(self.context, p["attn"], self.place, freqs, config, numerics)}
            for p in self.stages
        ]
        drafter = SimpleNamespace(config=config, cache=call.cache, rings=rings)
        super().__init__(drafter, [0], beside(blocks.positions, features), None)

    def key_rows(self):
        """(n, W + B) rows of [records of all positions | slots]; a block's slots share them."""
        context, size = self.blocks.context, self.size
        own = len(self.features) + np.arange(len(context) * size).reshape(len(context), size)
        keys = np.repeat(np.concatenate([context, own], axis=1), size, axis=0)
        return beside(keys, self.features)


def draft_forward(params, draft):
    """All blocks through all stages -> streams (n, S, D), pre (n, S), and what each stage keeps."""
    config, numerics, kept = draft.config, draft.numerics, []
    ids = beside(draft.blocks.ids, draft.features)
    embedding = numerics.store(rows(params["embed"]["weight"], ids))
    streams, pre = initial_streams(embedding, config.hc_mult)
    for stage, p in enumerate(draft.stages):
        functions, rest = (draft.attention, draft.moe), (p, _layer(stage), draft)
        streams, pre, inside = sublayers(streams, pre, functions, *rest)
        kept.append(inside)
    return streams, pre, kept


def _layer(stage):
    return Layer(stage, 0, "swa", None, None, None, None, "draft")


# ---- backward -----------------------------------------------------------------------------------


def stages_backward(dstreams, dpre, kept, draft):
    """dstreams (n, S, D), dpre (n, S) by the last stage -> gradients {stage: ...}, load."""
    grads, back = {}, SimpleNamespace(context=np.zeros_like(draft.context), load={})
    for stage, p in reversed(list(enumerate(draft.stages))):
        attn, ffn = kept[stage]
        rest = p, _layer(stage), draft, back
        dstreams, dpre, below = sublayer_backward(dstreams, dpre, ffn, "ffn", _moe_backward, *rest)
        dstreams, dpre, above = sublayer_backward(
            dstreams, dpre, attn, "attn", _attention_backward, *rest
        )
        grads[stage] = above | below
    p, eps = draft.stages[0], draft.config.rms_norm_eps
    dprojected, dnorm = rmsnorm_backward(
        back.context, draft.projected, p["main_norm"]["weight"], eps
    )
    weight = p["main_proj"]["weight"]
    _, dproj = linear_fp8_backward(dprojected, draft.features, weight, draft.numerics)
    grads[0] |= {"main_norm": {"weight": dnorm}, "main_proj": {"weight": dproj}}
    return grads, back.load


def _attention_backward(dy, x, p, layer, draft, back):
    """dy, x (n, D) -> dx, gradients; adds the gradient by the context (T, D) to `back`."""
    config, numerics, tokens = draft.config, draft.numerics, len(draft.context)
    freqs = frequencies(config, 0)
    place, rest = (draft.positions, freqs), (freqs, config, numerics)
    own = window_kv(x, p, *place, config, numerics)
    window = np.concatenate([draft.drafter.rings[layer.index][0], own])
    reads = window, draft.key_rows(), *draft.drafter.cache.no_records(len(x))
    dx, (dwindow, _), _, grads = attend_backward(dy, x, p, place, reads, config, numerics)
    by_own, from_own = window_kv_backward(dwindow[tokens:], x, p, draft.positions, *rest)
    by_context, from_context = window_kv_backward(
        dwindow[:tokens], draft.context, p, draft.place, *rest
    )
    back.context += by_context
    return dx + by_own, grads | add_grads(from_own, from_context)


def _moe_backward(dy, x, p, layer, draft, back):
    """dy, x (n, D) -> dx, gradients; drafts count as text and balance by their bias alone."""
    config, numerics = draft.config, draft.numerics
    text = np.zeros(len(x), bool, like=x)
    routing = config.routed_scaling_factor, config.norm_topk_prob, numerics
    chosen, weight, scores = route(x, p["gate"], text, config.dspark_num_experts_per_tok, *routing)
    dx, dweight, grads = moe_experts_backward(
        dy, x, p, chosen, weight, config.swiglu_limit, numerics
    )
    back.load[layer.index] = np.bincount(chosen.ravel(), minlength=scores.shape[1])
    by_gate, grads["gate"] = route_backward(
        dweight, np.zeros_like(scores), x, p["gate"], chosen, *routing
    )
    return dx + by_gate, grads


def heads_backward(hidden, final, params, draft):
    """hidden (n, D) of the slots, final (T, D) of the main model -> weighted losses {name: float},
    dhidden (n, D), gradients of norm, markov_head and confidence_head.
    """
    p, numerics, eps = draft.stages[-1], draft.numerics, draft.config.rms_norm_eps
    embedding, norm = p["markov_head"]["embed"]["weight"], p["norm"]["weight"]
    before = beside(draft.blocks.before, hidden)
    e, x = embedding[before], rmsnorm(hidden, norm, eps, numerics)
    weight, both = p["confidence_head"]["proj"]["weight"], np.concatenate([hidden, e], axis=1)
    confidence = matmul_rows(both, weight, numerics)[:, 0]
    losses, dx, de, dconfidence, dhead = _slots_backward(x, e, confidence, final, params, draft)
    dboth, dweight = linear_backward(dconfidence[:, None], both, weight)
    dhidden, dnorm = rmsnorm_backward(dx, hidden, norm, eps)
    dembedding, width = np.zeros_like(embedding), hidden.shape[1]
    add_rows(dembedding, de + dboth[:, width:], before)
    markov = {"embed": {"weight": dembedding}, "head": {"weight": dhead}}
    grads = {"norm": {"weight": dnorm}, "markov_head": markov}
    grads["confidence_head"] = {"proj": {"weight": dweight}}
    return losses, dhidden + dboth[:, :width], grads


def _slots_backward(x, e, confidence, final, params, draft):
    """x (n, D) normed, e (n, rank), confidence (n,) -> weighted losses, dx, de, dconfidence, and
    the gradient of the Markov head's output matrix (V, rank). Logits live for one block of rows.
    """
    head, numerics, blocks = dense(params["head"]["weight"]), draft.numerics, draft.blocks
    out = draft.stages[-1]["markov_head"]["head"]["weight"]
    main, truth, weight = (beside(a, x) for a in (blocks.main, blocks.truth, blocks.weight))
    weight, sums = weight.astype(x.dtype), dict.fromkeys(DRAFT_WEIGHTS, 0.0)
    dx, de, dconfidence, dout = (np.zeros_like(a) for a in (x, e, confidence, out))
    for at in row_blocks(x, head):
        logits = matmul_rows(x[at], head, numerics) + matmul_rows(e[at], out, numerics)
        p_main = softmax(matmul_rows(final[main[at]], head, numerics))
        losses, dlogits, dc = draft_loss(logits, confidence[at], truth[at], p_main)
        dlogits, dconfidence[at] = dlogits * weight[at, None], dc * weight[at]
        dx[at] = dlogits @ head
        de[at], more = linear_backward(dlogits, e[at], out)
        dout += more
        sums = {k: sums[k] + float(np.sum(weight[at] * losses[k])) for k in sums}
    return sums, dx, de, dconfidence, dout
