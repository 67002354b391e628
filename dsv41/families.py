"""What were DeepSeek's models before V4.1 made of?

Each is a `Model` (accounts.py) written down from what was published:

    V1-67B      dense; K and V of 8 heads per token
    V2, V3      experts; MLA: one latent of 512 + 64 channels per token, shared by all heads
    V3.2        V3 with FP8 caches and an indexer that picks 2048 tokens
    V4          window layers, CSA (an entry per 4 tokens, top-k) and HCA (an entry per 128)

MODELS holds them by name, and V4.1-Flash, which is read off its config instead.
Sources: config.json of each release, arXiv 2401.02954 (V1), 2405.04434 (V2), 2412.19437 (V3),
2606.19348 (V4), inference/model.py of V3.2 and V4. Left out: the MTP blocks of V3 and V4, which the
published sizes do not count either.
"""

from dataclasses import replace
from types import SimpleNamespace

from .accounts import (
    F32,
    Kind,
    Model,
    embedding_and_head,
    from_config,
    repeat,
    router_and_experts,
    tensors,
    v4_block,
)
from .config import Config
from .presets import preset
from .quant import INDEX_FP4


def describe(model):
    """A Model, a Config, or a name in MODELS -> Model."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Config):
        return from_config(model)
    if not isinstance(model, str) or model not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {model!r}")
    return MODELS[model]


def _v1():
    """Dense, grouped-query attention: 64 query and 8 KV heads of 128 (2401.02954, table 2)."""
    layers, hidden, ffn, heads, kv_heads, head = 95, 8192, 22_016, 64, 8, 128
    query, kv = (hidden, hidden), (kv_heads * head, hidden)
    block = [
        *tensors("attention", query, kv, kv, query),
        *tensors("dense FFN", (ffn, hidden), (ffn, hidden), (hidden, ffn)),
        *tensors("norms and sinks", (hidden,), (hidden,)),
    ]
    kind = Kind("GQA", layers, heads, 2 * head, entry_bytes=2 * kv_heads * head * 2)  # bf16 K, V
    weights = embedding_and_head(102_400, hidden) + repeat(block, layers)
    return Model("V1-67B", tuple(weights), (kind,), linear="bf16")


_V2 = SimpleNamespace(  # config.json of DeepSeek-V2
    vocabulary=102_400, layers=60, dense=1, hidden=5120, heads=128, ffn=12_288,
    width=1536, routed=160, active=6, shared=2, biases=0,
)  # fmt: skip
_V3 = SimpleNamespace(  # inference/configs/config_671B.json of DeepSeek-V3
    vocabulary=129_280, layers=61, dense=3, hidden=7168, heads=128, ffn=18_432,
    width=2048, routed=256, active=8, shared=1, biases=1,
)  # fmt: skip
_LATENT, _ROPE, _QUERY_RANK = 512, 64, 1536  # the same in V2, V3 and V3.2


def _mla(name, c, linear):
    """Every head meets one bf16 latent of 512 + 64 channels, whose 512 are also the value."""
    hidden, nope = c.hidden, 128
    queries = c.heads * (nope + _ROPE)
    attention = [(_QUERY_RANK, hidden), (queries, _QUERY_RANK), (_LATENT + _ROPE, hidden)]
    attention += [(c.heads * 2 * nope, _LATENT), (hidden, c.heads * nope)]
    norms = [(_QUERY_RANK,), (_LATENT,), (hidden,), (hidden,)]
    experts = router_and_experts(hidden, c.width, c.routed, c.active, c.shared)
    dense = tensors("dense FFN", (c.ffn, hidden), (c.ffn, hidden), (hidden, c.ffn))
    weights = [
        *embedding_and_head(c.vocabulary, hidden),
        *repeat(tensors("attention", *attention) + tensors("norms and sinks", *norms), c.layers),
        *repeat(dense, c.dense),
        *repeat(experts + tensors("router", *[(c.routed,)] * c.biases), c.layers - c.dense),
    ]
    width, record = _LATENT + _ROPE + _LATENT, 2 * (_LATENT + _ROPE)
    kind = Kind("MLA", c.layers, c.heads, width, entry_bytes=record)
    return Model(name, tuple(weights), (kind,), linear)


def _v32():
    """V3 with FP8 caches and a top-2048 chosen by 64 index heads of 128 (its ModelArgs)."""
    base, heads, head = _mla("V3.2", _V3, "fp8"), 64, 128
    queries, key, gate = (heads * head, _QUERY_RANK), (head, _V3.hidden), (heads, _V3.hidden)
    indexer = tensors("indexer", queries, key, gate) + tensors("norms and sinks", (head,), (head,))
    kind = replace(
        base.kinds[0],
        topk=2048,
        score_width=heads * head,
        # FP8 latent, f32 scale per 128 channels, bf16 RoPE part: the 656 of FlashMLA's tests
        entry_bytes=_LATENT + 4 * _LATENT // 128 + 2 * _ROPE,
        key_bytes=head + 4,  # FP8 and one f32 scale
    )
    weights = (*base.weights, *repeat(indexer, _V3.layers))
    return replace(base, weights=weights, kinds=(kind,), index="fp8")


_V4_FLASH = SimpleNamespace(  # config.json; swa, csa and hca count its compress_ratios 0, 4, 128
    vocab_size=129_280, hidden_size=4096, swa=2, csa=21, hca=20, num_hash_layers=3,
    num_attention_heads=64, head_dim=512, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=2048,
    hc_mult=4, sliding_window=128, index_n_heads=64, index_head_dim=128, index_topk=512,
)  # fmt: skip
_V4_PRO = SimpleNamespace(  # likewise
    vocab_size=129_280, hidden_size=7168, swa=0, csa=30, hca=31, num_hash_layers=3,
    num_attention_heads=128, head_dim=512, q_lora_rank=1536, o_groups=16, o_lora_rank=1024,
    n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=3072,
    hc_mult=4, sliding_window=128, index_n_heads=64, index_head_dim=128, index_topk=1024,
)  # fmt: skip


def _v4_compressor(c, part, channels, ratio, halves):
    """KV and gate projection, a position bias added to the gate, a norm; CSA has two halves."""
    projection = (halves * channels, c.hidden_size)
    bias = tensors(part, (ratio, halves * channels), stored=F32, used=0)
    return tensors(part, projection, projection) + bias + tensors("norms and sinks", (channels,))


def _v4(name, c):
    """Layers are window-only (SWA), CSA (ratio 4, with an indexer) or HCA (ratio 128)."""
    layers, streams = c.swa + c.csa + c.hca, (c.hc_mult, c.hc_mult * c.hidden_size)
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    csa = _v4_compressor(c, "compressor", c.head_dim, 4, 2)
    csa += _v4_compressor(c, "indexer", c.index_head_dim, 4, 2)
    csa += tensors("indexer", queries, (c.index_n_heads, c.hidden_size))
    hca = _v4_compressor(c, "compressor", c.head_dim, 128, 1)
    collapse = tensors("mHC", streams, (c.hc_mult,), (1,), stored=F32)  # before the head
    weights = [
        *embedding_and_head(c.vocab_size, c.hidden_size),
        *collapse,
        *repeat(v4_block(c, c.n_routed_experts, c.num_experts_per_tok), layers),
        *repeat(tensors("router", (c.n_routed_experts,)), layers - c.num_hash_layers),  # bias
        *repeat(csa, c.csa),
        *repeat(hca, c.hca),
    ]
    # window KV is kept at two points a turn, close to half of what is stored (V4.1 report, 3.2.1)
    return Model(name, tuple(weights), _v4_kinds(c), window_share=0.5)


def _v4_kinds(c):
    heads, width, window = c.num_attention_heads, 2 * c.head_dim, c.sliding_window
    record = 448 + 64 * 2 + 7 + 1  # FP8, bf16 RoPE part, E8M0 per 64, padding (FlashMLA's tests)
    ring = {"window": window, "window_bytes": record}
    # f32 values and gates: two groups of four tokens in two halves, or one group of 128
    csa_carry, hca_carry = 2 * 8 * 2 * (c.head_dim + c.index_head_dim) * 4, 2 * 128 * c.head_dim * 4
    csa = {"topk": c.index_topk, "score_width": c.index_n_heads * c.index_head_dim}
    csa |= {"entry_bytes": record, "key_bytes": INDEX_FP4.record_bytes(c.index_head_dim)}
    hca = {"entry_bytes": record, "carry_bytes": hca_carry}
    return (
        Kind("SWA", c.swa, heads, width, 0, **ring),
        Kind("CSA", c.csa, heads, width, 4, **csa, carry_bytes=csa_carry, **ring),
        Kind("HCA", c.hca, heads, width, 128, **hca, **ring),
    )


MODELS = {
    model.name: model
    for model in (
        _v1(),
        _mla("V2", _V2, "bf16"),
        _mla("V3", _V3, "fp8"),
        _v32(),
        _v4("V4-Flash", _V4_FLASH),
        _v4("V4-Pro", _V4_PRO),
        from_config(preset("v4.1-flash"), "V4.1-Flash"),
    )
}
