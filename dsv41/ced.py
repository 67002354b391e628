"""Why does an encoder-decoder without any bidirectional layer save half of the prefill? (CED)

The stack is cut at the last KV source (layer 20 of 40). Layers before it, the encoder half, make
their own window KV and, in a few places, global KV. All global KV of the decoder half is projected
from one vector per token, the attention input of that first decoder layer:

    x_20 = RMSNorm( sum_i A_i X_i )        X, A: what the encoder half leaves behind

Later decoder layers own no compressor; they read layer 20's entries, and their own window. So a
prompt token's deep decoder states are never read through global attention, only through the
windows of the last tokens. Both halves are causal. When every row is decoded, every token passes
through every layer, which is exact; a prefill may decode only the last window of a prompt, which is
what the report calls decoder SWA bounded replay (replay.py). Source: report, sections 2.2
and 3.2.2; there is no extra projection or norm between the halves in the released
inference/model.py.
"""

import numpy as np

from .csa2 import attention, write_global_kv
from .dispatch import beside
from .engram import engram
from .mhc import hc_boundary, hc_coefficients, hc_collapse, hc_update
from .moe import moe_experts, route
from .ops import rmsnorm
from .trace import put


def halves(plan):
    """plan -> (encoder layers, decoder layers), cut at the last KV source."""
    encoder = tuple(layer for layer in plan if layer.half == "encoder")
    return encoder, plan[len(encoder) :]


def run_layers(streams, pre, layers, in_decoder, call):
    """All blocks: streams (T, S, D), pre (T, S), layers: their parameters, in_decoder (T,) bool.

    Rows where `in_decoder` is False end after the encoder half, their global KV complete.
    -> streams and pre of the decoded rows.
    """
    encoder, decoder = halves(call.config.plan)
    call = call.with_floors("encoder")
    for layer in encoder:
        streams, pre = block(streams, pre, layers[layer.index], layer, call)
    if decoder and not in_decoder.all():
        write_decoder_kv(streams, pre, layers[decoder[0].index], decoder[0], call)
        rows = beside(np.flatnonzero(in_decoder), call.cache.like)
        streams, pre, call = streams[rows], pre[rows], call.only(in_decoder)
    call = call.with_floors("decoder")
    for layer in decoder if len(streams) else ():
        streams, pre = block(streams, pre, layers[layer.index], layer, call)
    return streams, pre


def write_decoder_kv(streams, pre, p, layer, call):
    """Global KV of the decoder half for all rows, from what the encoder half left behind."""
    x = hc_collapse(streams, pre, call.numerics)
    x = rmsnorm(x, p["attn_norm"]["weight"], call.config.rms_norm_eps, call.numerics)
    write_global_kv(x, p["attn"], layer, call)


def block(streams, pre, p, layer, call):
    """One decoder block: Engram, attention, MoE -> new streams (T, S, D), pre for the next block.

    trap: `pre` is one sublayer late. Attention reads the streams through the pre that the block
    before made at its MoE; the MoE reads them through the pre made at this block's attention.
    """
    if layer.engram is not None:
        streams = remember(streams, p["engram"], layer, call)
    if call.features is not None and layer.index in call.config.dspark_target_layer_ids:
        call.features.append(call.numerics.store(np.mean(streams, axis=1)))
    streams, pre, _ = sublayers(streams, pre, (attention, moe), p, layer, call)
    put(call.trace, layer, "x_out", lambda: streams)
    call.cache.work[layer.half] += len(streams)
    return streams, pre


def remember(streams, p, layer, call):
    """The Engram addition in front of a block; the carried pre stays as it is."""
    rows = call.memory[layer.engram]
    streams, gate = engram(streams, rows, p, call.is_image, call.config, call.numerics)
    put(call.trace, layer, "engram.rows", lambda: rows)
    put(call.trace, layer, "engram.gate", lambda: gate)
    put(call.trace, layer, "engram.x", lambda: streams)
    return streams


def sublayers(streams, pre, functions, p, layer, call):
    """Attention and MoE of one block, with one pass over the streams between them.

    functions: of the two, (x (T, D), their parameters, layer, call) -> y (T, D).
    -> new streams, pre for the next block, and (streams, pre, y) of both as they were inside.
    """
    config, numerics = call.config, call.numerics
    *mixing, norm = _entrance(p, "attn")
    x = rmsnorm(hc_collapse(streams, pre, numerics), norm, config.rms_norm_eps, numerics)
    coefficients = hc_coefficients(streams, *mixing, config, numerics)
    y = functions[0](x, p["attn"], layer, call)
    attn = streams, pre, y
    _show(call.trace, layer, "attn", coefficients, y)
    ahead = (*coefficients, *_entrance(p, "ffn"))
    pre = coefficients[0]
    streams, x, *coefficients = hc_boundary(streams, y, *ahead, config, numerics)
    y = functions[1](x, p["ffn"], layer, call)
    ffn = streams, pre, y
    _show(call.trace, layer, "ffn", coefficients, y)
    pre, post, comb = coefficients
    return hc_update(streams, y, post, comb, numerics), pre, (attn, ffn)


def _entrance(p, name):
    """fn, base, scale and the norm's weight: what a sublayer's entrance is made of."""
    return *(p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")), p[f"{name}_norm"][
        "weight"
    ]


def _show(trace, layer, name, coefficients, y):
    for part, value in zip(("pre", "post", "comb"), coefficients, strict=True):
        put(trace, layer, f"hc_{name}.{part}", lambda value=value: value)
    put(trace, layer, f"{name}.out", lambda: y)


def moe(x, p, layer, call):
    """The MoE sublayer of the backbone: x (T, D) -> (T, D)."""
    config, is_image = call.config, call.is_image
    chosen, weight, biased = route(
        x,
        p["gate"],
        is_image,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
        config.norm_topk_prob,
        call.numerics,
    )
    put(call.trace, layer, "moe.biased", lambda: biased)
    put(call.trace, layer, "moe.expert", lambda: chosen)
    put(call.trace, layer, "moe.weight", lambda: weight)
    return moe_experts(x, p, chosen, weight, config.swiglu_limit, call.numerics)
