"""Why does an encoder-decoder without any bidirectional layer save half of the prefill? (CED)

The stack is cut at the last KV source (layer 20 of 40). Layers before it, the encoder half, make
their own window KV and, in a few places, global KV. All global KV of the decoder half is projected
from one vector per token, the attention input of that first decoder layer:

    x_20 = RMSNorm( sum_i A_i X_i )        X, A: what the encoder half leaves behind

Later decoder layers own no compressor; they read layer 20's entries, and their own window. So a
prompt token's deep decoder states are never read through global attention, only through the
windows of the last tokens. Both halves are causal. This module runs the two halves over one
`block`; here every token passes through every layer, which is exact. Source: report, sections 2.2
and 3.2.2; there is no extra projection or norm between the halves in the released
inference/model.py.
"""

from .csa2 import Shared, attention
from .engram import engram
from .mhc import hc_coefficients, hc_collapse, hc_update
from .moe import moe_experts, route
from .ops import rmsnorm
from .trace import put


def halves(plan):
    """plan -> (encoder layers, decoder layers), cut at the last KV source."""
    encoder = tuple(layer for layer in plan if layer.half == "encoder")
    return encoder, plan[len(encoder) :]


def run_layers(streams, pre, params, rows, cache, batch, config, numerics, trace=None):
    """All blocks: streams (T, S, D), pre (T, S), rows: Engram rows per module -> streams, pre.

    `shared` begins empty with the call and is handed from layer to layer.
    """
    shared = Shared()
    encoder, decoder = halves(config.plan)
    for layer in encoder + decoder:
        p = params["layers"][layer.index]
        streams, pre = block(
            streams, pre, p, layer, rows, shared, cache, batch, config, numerics, trace
        )
    return streams, pre


def block(streams, pre, p, layer, rows, shared, cache, batch, config, numerics, trace=None):
    """One decoder block: Engram, attention, MoE -> new streams (T, S, D), pre for the next block.

    trap: `pre` is one sublayer late. Attention reads the streams through the pre that the block
    before made at its MoE; the MoE reads them through the pre made at this block's attention.
    """
    if layer.engram is not None:
        streams, gate = engram(
            streams, rows[layer.engram], p["engram"], batch.is_image, config, numerics
        )
        put(trace, layer, "engram.rows", lambda: rows[layer.engram])
        put(trace, layer, "engram.gate", lambda: gate)
        put(trace, layer, "engram.x", lambda: streams)

    def attend(x):
        return attention(x, p["attn"], layer, shared, cache, batch, config, numerics, trace)

    def feed_forward(x):
        return moe(x, p["ffn"], layer, batch, config, numerics, trace)

    streams, pre = sublayer(streams, pre, attend, "attn", p, layer, config, numerics, trace)
    streams, pre = sublayer(streams, pre, feed_forward, "ffn", p, layer, config, numerics, trace)
    put(trace, layer, "x_out", lambda: streams)
    return streams, pre


def sublayer(streams, pre, function, name, p, layer, config, numerics, trace=None):
    """Predict coefficients, collapse with the old pre, norm, run, update -> streams, new pre."""
    coefficients = [p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")]
    new_pre, post, comb = hc_coefficients(streams, *coefficients, config, numerics)
    x = hc_collapse(streams, pre, numerics)
    y = function(rmsnorm(x, p[f"{name}_norm"]["weight"], config.rms_norm_eps, numerics))
    for part, value in (("pre", new_pre), ("post", post), ("comb", comb)):
        put(trace, layer, f"hc_{name}.{part}", lambda value=value: value)
    put(trace, layer, f"{name}.out", lambda: y)
    return hc_update(streams, y, post, comb, numerics), new_pre


def moe(x, p, layer, batch, config, numerics, trace=None):
    """The MoE sublayer of the backbone: x (T, D) -> (T, D)."""
    chosen, weight, biased = route(
        x,
        p["gate"],
        batch.is_image,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
        config.norm_topk_prob,
        numerics,
    )
    put(trace, layer, "moe.biased", lambda: biased)
    put(trace, layer, "moe.expert", lambda: chosen)
    put(trace, layer, "moe.weight", lambda: weight)
    return moe_experts(x, p, chosen, weight, config.swiglu_limit, numerics)
