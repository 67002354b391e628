"""How does a gradient walk back through a block, and out of it sideways?

Forwards, a sublayer is x = RMSNorm(collapse(X, A)), y = f(x), X' = update(X, y), with A' predicted
for the next one. Backwards the same steps in reverse: dX' and dA' come in, dX and dA go out, where
dX is the sum of what the update, the collapse and the coefficients passed on.

What layers share flows sideways, from a reader to the source that it read, and waits in `Back`:

    main KV      dK of every Full, Reuse and Reindex reader, added up
    index keys   the same, of every index source that scored them
    attention    of every reader of a selection, added up: the target of its index source

Readers stand behind their sources, so on the way back a source finds complete sums and takes them
out. Kept from the forward pass are streams, `pre` and y of every sublayer and the call's records
and selections; what is inside a sublayer is computed again. Source: csa2.py and ced.py.
"""

from dataclasses import dataclass, field

from ..ced import moe, sublayers
from ..compress import compress
from ..csa2 import attention, global_rows_of
from ..dispatch import beside
from ..indexer import index_queries
from ..mhc import hc_coefficients, hc_collapse
from ..moe import route
from ..ops import matmul_rows, rmsnorm, sqrt_softplus
from ..projections import low_rank_queries
from ..rope import frequencies
from ..sparse_attn import rope_sparse_attn
from ..window import window_kv
from .compress import compress_backward, main_kv_backward
from .engram import engram_backward, engram_forward
from .indexer import index_keys_backward, index_queries_backward, selection_backward
from .losses import balance_loss
from .mhc import hc_coefficients_backward, hc_collapse_backward, hc_update_backward
from .moe import moe_experts_backward, route_backward
from .ops import add_grads, rmsnorm_backward
from .projections import grouped_output_backward, low_rank_queries_backward
from .schedule import expert_load
from .sparse_attn import rope_sparse_attn_backward
from .window import own_rows, window_kv_backward


@dataclass
class Back:
    """What layers leave for the layers before them, and the losses found on the way.

    balance, index: weights of the two losses. main_kv and keys: {KV source: (rows, C or J)} by the
    decoded records of its pool; attention: {index source: (T, K)}, summed over its readers. losses:
    unweighted sums over layers. load: {layer: (2, E) tokens per expert, text and image}.
    """

    balance: float
    index: float
    main_kv: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    attention: dict = field(default_factory=dict)
    losses: dict = field(default_factory=lambda: {"balance": 0.0, "index": 0.0})
    load: dict = field(default_factory=dict)


def _add(sums, source, more):
    sums[source] = sums[source] + more if source in sums else more


# ---- forward, keeping ---------------------------------------------------------------------------


def block_forward(streams, pre, p, layer, call):
    """`ced.block` with float Engram tables -> streams, pre, and what `block_backward` needs."""
    entered = streams
    if layer.engram is not None:
        rows, rest = call.memory[layer.engram], (call.is_image, call.config, call.numerics)
        streams = engram_forward(streams, rows, p["engram"], *rest)
    streams, pre, kept = sublayers(streams, pre, (attention, moe), p, layer, call)
    return streams, pre, (entered, *kept)


# ---- backward -----------------------------------------------------------------------------------


def block_backward(dstreams, dpre, kept, p, layer, call, back):
    """dstreams (T, S, D), dpre (T, S) by what the block returned -> the same by what entered it,
    and the gradients of its parameters.
    """
    entered, attn, ffn = kept
    rest = p, layer, call, back
    dstreams, dpre, below = sublayer_backward(dstreams, dpre, ffn, "ffn", moe_backward, *rest)
    dstreams, dpre, above = sublayer_backward(
        dstreams, dpre, attn, "attn", attention_backward, *rest
    )
    grads = above | below
    if layer.engram is not None:
        rows, rest = call.memory[layer.engram], (call.is_image, call.config, call.numerics)
        dstreams, grads["engram"] = engram_backward(dstreams, entered, rows, p["engram"], *rest)
    return dstreams, dpre, grads


def sublayer_backward(dstreams, dpre, kept, name, function, p, layer, call, back):
    """function(dy, x, parameters, layer, call, back) -> dx, gradients of the inner part."""
    (streams, pre, y), config, numerics = kept, call.config, call.numerics
    mixing = [p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")]
    norm, eps = p[f"{name}_norm"]["weight"], config.rms_norm_eps
    _, post, comb = hc_coefficients(streams, *mixing, config, numerics)
    x = hc_collapse(streams, pre, numerics)
    dstreams, dy, dpost, dcomb = hc_update_backward(dstreams, streams, y, post, comb)
    dnormed, inner = function(dy, rmsnorm(x, norm, eps, numerics), p[name], layer, call, back)
    dx, dnorm = rmsnorm_backward(dnormed, x, norm, eps)
    by_collapse, dpre_before = hc_collapse_backward(dx, streams, pre)
    by_mixing, *dmixing = hc_coefficients_backward(
        dpre, dpost, dcomb, streams, *mixing, config, numerics
    )
    grads = {f"hc_{name}_{k}": d for k, d in zip(("fn", "base", "scale"), dmixing, strict=True)}
    grads |= {name: inner, f"{name}_norm": {"weight": dnorm}}
    return dstreams + by_collapse + by_mixing, dpre_before, grads


def attention_backward(dy, x, p, layer, call, back):
    """dy, x (T, D) -> dx (T, D), gradients of the "attn" parameters; leaves sums in `back`."""
    config, numerics, positions = call.config, call.numerics, call.here.positions
    place = positions, frequencies(config, layer.ratio)
    own = window_kv(x, p, *place, config, numerics)
    rows = own_rows(call.window_rows, call.batch, config.sliding_window)
    reads = own, rows, *global_rows_of(layer, call)
    dx, records, share, grads = attend_backward(dy, x, p, place, reads, config, numerics)
    by_window, window = window_kv_backward(records[0], x, p, *place, config, numerics)
    dx, grads = dx + by_window, grads | window
    if layer.mode == "swa":
        return dx, grads
    _add(back.main_kv, layer.kv_source, records[1])
    if back.index:
        _add(back.attention, layer.index_source, share)
    by_source, more = sources_backward(x, p, layer, call, back)
    return dx + by_source, grads | more


def attend_backward(dy, x, p, place, reads, config, numerics):
    """From the output back to the queries and to the records: place = positions, freqs; reads =
    window, window_rows, global_kv, global_rows
    -> dx by the queries, (dwindow, dglobal), share, gradients of queries, sink and output.
    """
    _, q = low_rank_queries(x, p, config, numerics)
    reads = *reads, p["attn_sink"], numerics
    do, output = grouped_output_backward(
        dy, rope_sparse_attn(q, *place, *reads), p, config, numerics
    )
    dq, dwindow, dglobal, dsink, share = rope_sparse_attn_backward(do, q, *place, *reads)
    dx, queries = low_rank_queries_backward(dq, x, p, config, numerics)
    return dx, (dwindow, dglobal), share, {"attn_sink": dsink, **queries, **output}


def sources_backward(x, p, layer, call, back):
    """What a layer's readers want of it as an index source and as a KV source -> dx, gradients."""
    dx, queries, grads = 0, {}, {}
    if layer.selects and back.index:
        queries = select_backward(x, p, layer, call, back)
    if layer.mode == "full":
        dx, grads = write_global_kv_backward(x, p, layer, call, back)
    return dx, add_grads(grads, {"indexer": queries} if queries else {})


def select_backward(x, p, layer, call, back):
    """The index loss of a layer that selects -> gradients of its index queries.

    Adds the gradient by the source's keys to `back`. The gradients by x and c_q are dropped: to the
    indexer they are constants.
    """
    config, numerics, source = call.config, call.numerics, layer.kv_source
    c_q, _ = low_rank_queries(x, p, config, numerics)
    place = call.here.positions, frequencies(config, layer.ratio), config, numerics
    q, w = index_queries(x, c_q, p["indexer"], *place)
    rows, attention = global_rows_of(layer, call)[1], back.attention.pop(layer.index)
    loss, dq, dw, dkeys = selection_backward(
        q, w, call.cache.index[source], rows, attention, back.index / len(x), numerics
    )
    back.losses["index"] += loss / len(x)
    _add(back.keys, source, dkeys)
    return index_queries_backward(dq, dw, x, c_q, p["indexer"], *place)[2]


def write_global_kv_backward(x, p, layer, call, back):
    """The summed gradients of a source's records -> dx (T, D), gradients of its compressor and
    index keys.
    """
    batch, config, numerics, source = call.batch, call.config, call.numerics, layer.index
    freqs = frequencies(config, layer.ratio)
    latent, entries, owners = compress(
        x, p["compressor"], source, layer.ratio, call.cache, batch, config, numerics
    )
    positions = beside(entries * layer.ratio, x)
    rows = beside(call.cache.rows_of_entries(source, entries, owners), x)
    dkv = back.main_kv.pop(source)[rows]
    dlatent = main_kv_backward(dkv, latent, positions, freqs, numerics)
    dx, compressor = compress_backward(
        dlatent, x, p["compressor"], layer.ratio, batch, config, numerics
    )
    grads = {"compressor": compressor}
    if source in back.keys:  # the latent is a constant to the indexer, so its gradient is dropped
        rest = latent, p["indexer"], positions, freqs, config, numerics
        grads["indexer"] = index_keys_backward(back.keys.pop(source)[rows], *rest)[1]
    return dx, grads


def moe_backward(dy, x, p, layer, call, back):
    """dy, x (T, D) -> dx (T, D), gradients of the "ffn" parameters; the balance loss included."""
    config, numerics, gate = call.config, call.numerics, p["gate"]
    routing = config.routed_scaling_factor, config.norm_topk_prob, numerics
    chosen, weight, _ = route(x, gate, call.is_image, config.num_experts_per_tok, *routing)
    dx, dweight, grads = moe_experts_backward(
        dy, x, p, chosen, weight, config.swiglu_limit, numerics
    )
    scores = sqrt_softplus(matmul_rows(x, gate["weight"], numerics))
    loss, dscores = balance_loss(scores, chosen, call.here.order, call.batch.count)
    back.losses["balance"] += loss
    back.load[layer.index] = expert_load(chosen, call.is_image, scores.shape[1])
    by_gate, grads["gate"] = route_backward(
        dweight, back.balance * dscores, x, gate, chosen, *routing
    )
    return dx + by_gate, grads
