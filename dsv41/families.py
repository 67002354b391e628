"""What is each DeepSeek model made of, as far as memory and arithmetic can tell?

A `Model` is two lists, enough for everything that ledger.py counts:

    weights   tensors: shape, how many there are, and how many of them a generated token (`used`)
              and any prompt token (`early`) is multiplied by
    kinds     layers: what they keep per token, how many keys a query meets, how many it scores

V4.1 is read off a `Config` and its layer plan, so any other config is described by the same code;
its ancestors are plain facts. Sources: config.json of each release, arXiv 2401.02954 (V1),
2405.04434 (V2), 2412.19437 (V3), 2606.19348 (V4), inference/model.py of V3.2 and V4.
Left out: the MTP blocks of V3 and V4, which the published sizes do not count either.
"""

from dataclasses import dataclass, replace
from math import inf, prod
from types import SimpleNamespace

from .config import Config
from .presets import preset
from .quant import INDEX_FP4, MAIN_KV_FP4, WINDOW_KV_FP8

# how the V4.1 checkpoint stores a tensor; its ancestors' layouts are not described
BF16, F32, FP8, FP4, FP8_ROWS = "bf16", "f32", "fp8 tiles", "fp4 rows", "fp8 rows"
# parts that the published backbone does not include
BESIDE = ("Engram tables", "Engram projections", "DSpark drafter", "vision tower")


@dataclass(frozen=True)
class Weight:
    """`count` tensors of one shape; `part` is the line of the ledger that they belong to."""

    part: str
    shape: tuple
    stored: str
    count: int
    used: int
    early: int

    @property
    def size(self):
        """Parameters of one tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Kind:
    """`count` layers that keep, meet and score the same things."""

    name: str
    count: int
    heads: int
    width: int  # channels multiplied per head and key: the key's and the value's
    ratio: int = 1  # tokens per entry of global KV; 0 = the layer sees none
    topk: float = inf  # entries a query attends to
    window: int = 0  # recent tokens it attends to besides
    score_width: int = 0  # index heads x channels per scored entry; 0 = no top-k of its own
    pool: float = inf  # entries scored at most
    entry_bytes: int = 0  # one entry of global KV, where the layer stores its own
    key_bytes: int = 0  # one index key, likewise
    window_bytes: int = 0  # one token of the window ring
    carry_bytes: int = 0  # tokens that wait for their group to close
    early: bool = True  # runs for every prompt token, not only for the last `window` ones


@dataclass(frozen=True)
class Model:
    """A name, two lists, and the few facts that they cannot say."""

    name: str
    weights: tuple
    kinds: tuple
    linear: str = "fp8"  # precision in which linear layers are priced, and index scores
    index: str = "fp4"
    window_share: float = 0.0  # part of the persistent cache that is window KV
    history_bytes: int = 0  # token ids that Engram looks back at
    draft_bytes: int = 0  # the drafter's window rings


def describe(model):
    """A Model, a Config, or a name in MODELS -> Model."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Config):
        return from_config(model)
    if not isinstance(model, str) or model not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {model!r}")
    return MODELS[model]


def _w(part, *shapes, stored=BF16, count=1, used=None):
    used = count if used is None else used
    return [Weight(part, shape, stored, count, used, used) for shape in shapes]


def _repeat(weights, layers, early=None):
    """Rows of one layer -> rows of `layers` layers, `early` of which run for all prompt tokens."""
    early = layers if early is None else early
    return [
        replace(w, count=w.count * layers, used=w.used * layers, early=w.early * early)
        for w in weights
    ]


def _ends(vocabulary, hidden):
    head = [replace(w, early=0) for w in _w("head", (vocabulary, hidden))]
    table = _w("embedding", (vocabulary, hidden), used=0)  # looked up, not multiplied
    return table + head + _w("norms and sinks", (hidden,))


def _experts(hidden, width, routed, active, shared):
    """Router and experts of one layer; an expert has gate and up (width, hidden), and down."""
    up, down = (width, hidden), (hidden, width)
    return [
        *_w("router", (routed, hidden)),
        *_w("routed experts", up, up, down, stored=FP4, count=routed, used=active),
        *_w("shared expert", up, up, down, stored=FP8, count=shared),
    ]


# ---- V1 to V3.2 -----------------------------------------------------------------------------


def _v1():
    """Dense, grouped-query attention: 64 query and 8 KV heads of 128 (2401.02954, table 2)."""
    layers, hidden, ffn, heads, kv_heads, head = 95, 8192, 22_016, 64, 8, 128
    query, kv = (hidden, hidden), (kv_heads * head, hidden)
    block = [
        *_w("attention", query, kv, kv, query),
        *_w("dense FFN", (ffn, hidden), (ffn, hidden), (hidden, ffn)),
        *_w("norms and sinks", (hidden,), (hidden,)),
    ]
    kind = Kind("GQA", layers, heads, 2 * head, entry_bytes=2 * kv_heads * head * 2)  # bf16 K, V
    weights = _ends(102_400, hidden) + _repeat(block, layers)
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
    hidden, heads, nope = c.hidden, c.heads * (128 + _ROPE), 128
    attention = [(_QUERY_RANK, hidden), (heads, _QUERY_RANK), (_LATENT + _ROPE, hidden)]
    attention += [(c.heads * 2 * nope, _LATENT), (hidden, c.heads * nope)]
    norms = [(_QUERY_RANK,), (_LATENT,), (hidden,), (hidden,)]
    experts = _experts(hidden, c.width, c.routed, c.active, c.shared)
    dense = _w("dense FFN", (c.ffn, hidden), (c.ffn, hidden), (hidden, c.ffn))
    weights = [
        *_ends(c.vocabulary, hidden),
        *_repeat(_w("attention", *attention) + _w("norms and sinks", *norms), c.layers),
        *_repeat(dense, c.dense),
        *_repeat(experts + _w("router", *[(c.routed,)] * c.biases), c.layers - c.dense),
    ]
    width, record = _LATENT + _ROPE + _LATENT, 2 * (_LATENT + _ROPE)
    kind = Kind("MLA", c.layers, c.heads, width, entry_bytes=record)
    return Model(name, tuple(weights), (kind,), linear)


def _v32():
    """V3 with FP8 caches and a top-2048 chosen by 64 index heads of 128 (its ModelArgs)."""
    base, heads, head = _mla("V3.2", _V3, "fp8"), 64, 128
    queries, key, gate = (heads * head, _QUERY_RANK), (head, _V3.hidden), (heads, _V3.hidden)
    indexer = _w("indexer", queries, key, gate) + _w("norms and sinks", (head,), (head,))
    kind = replace(
        base.kinds[0],
        topk=2048,
        score_width=heads * head,
        # FP8 latent, f32 scale per 128 channels, bf16 RoPE part: the 656 of FlashMLA's tests
        entry_bytes=_LATENT + 4 * _LATENT // 128 + 2 * _ROPE,
        key_bytes=head + 4,  # FP8 and one f32 scale
    )
    weights = (*base.weights, *_repeat(indexer, _V3.layers))
    return replace(base, weights=weights, kinds=(kind,), index="fp8")


# ---- V4 -------------------------------------------------------------------------------------

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


def _block(c, routed, active):
    """What every layer of V4 and V4.1 has, for sizes under their config.json names."""
    hidden, rank, heads = c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.head_dim
    out, mixes = c.o_groups * c.o_lora_rank, (2 + c.hc_mult) * c.hc_mult
    attention = [(rank, hidden), (heads, rank), (c.head_dim, hidden)]
    attention += [(out, heads // c.o_groups), (hidden, out)]
    return [
        *_w("attention", *attention, stored=FP8),
        *_w("norms and sinks", (rank,), (c.head_dim,), (hidden,), (hidden,)),
        *_w("norms and sinks", (c.num_attention_heads,), stored=F32),
        *_w("mHC", (mixes, c.hc_mult * hidden), (mixes,), (3,), stored=F32, count=2),
        *_experts(hidden, c.moe_intermediate_size, routed, active, c.n_shared_experts),
    ]


def _v4_compressor(c, part, channels, ratio, halves):
    """KV and gate projection, a position bias added to the gate, a norm; CSA has two halves."""
    projection = (halves * channels, c.hidden_size)
    bias = _w(part, (ratio, halves * channels), stored=F32, used=0)
    return _w(part, projection, projection) + bias + _w("norms and sinks", (channels,))


def _v4(name, c):
    """Layers are window-only (SWA), CSA (ratio 4, with an indexer) or HCA (ratio 128)."""
    layers, streams = c.swa + c.csa + c.hca, (c.hc_mult, c.hc_mult * c.hidden_size)
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    csa = _v4_compressor(c, "compressor", c.head_dim, 4, 2)
    csa += _v4_compressor(c, "indexer", c.index_head_dim, 4, 2)
    csa += _w("indexer", queries, (c.index_n_heads, c.hidden_size))
    hca = _v4_compressor(c, "compressor", c.head_dim, 128, 1)
    weights = [
        *_ends(c.vocab_size, c.hidden_size),
        *_w("mHC", streams, (c.hc_mult,), (1,), stored=F32),  # streams collapse before the head
        *_repeat(_block(c, c.n_routed_experts, c.num_experts_per_tok), layers),
        *_repeat(_w("router", (c.n_routed_experts,)), layers - c.num_hash_layers),  # bias
        *_repeat(csa, c.csa),
        *_repeat(hca, c.hca),
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


# ---- V4.1 -----------------------------------------------------------------------------------


def from_config(c, name="V4.1"):
    """Config -> Model: tensor by tensor, and layer by layer from the plan."""
    encoder = sum(layer.half == "encoder" for layer in c.plan)
    block = _block(c, c.n_routed_experts, c.num_experts_per_tok) + _biases(c, c.n_routed_experts)
    weights = [
        *_ends(c.vocab_size, c.hidden_size),
        *_repeat(block, c.num_hidden_layers, encoder),
        *_global_kv(c),
        *_engram(c),
        *_drafter(c),
        *_vision(c),
    ]
    ring = c.sliding_window * WINDOW_KV_FP8.record_bytes(c.head_dim)
    return Model(
        name,
        tuple(weights),
        _kinds(c),
        history_bytes=8 * (c.engram_max_ngram_size - 1),  # int64
        draft_bytes=c.num_nextn_predict_layers * ring,
    )


def _biases(c, experts):
    """The router's selection bias, and one more for image tokens."""
    return _w("router", (experts,), stored=F32, count=2 if c.vision_config else 1)


def _global_kv(c):
    """Compressors and index keys of the KV sources, index queries of the layers that select.

    The last source is a decoder layer, yet its KV and keys are made for all prompt tokens.
    """
    full = [layer for layer in c.plan if layer.mode == "full"]
    selecting = [layer for layer in c.plan if layer.selects]
    latent, key = (c.head_dim, c.hidden_size), (c.index_head_dim, c.head_dim)
    source = _w("compressor", latent) + _w("indexer", key)
    source += _w("norms and sinks", (c.head_dim,), (c.index_head_dim,))
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    query = _w("indexer", queries, stored=FP8) + _w("indexer", (c.index_n_heads, c.hidden_size))
    return [
        *_repeat(source, len(full)),
        *_repeat(_w("compressor", latent), sum(layer.ratio > 1 for layer in full)),  # pair gates
        *_repeat(query, len(selecting), sum(layer.half == "encoder" for layer in selecting)),
    ]


def _engram(c):
    if not c.engram_layer_ids:
        return []
    streams, columns = c.hc_mult, (c.engram_max_ngram_size - 1) * c.engram_n_heads
    projection = ((streams + 1) * c.hidden_size, columns * c.engram_head_dim)
    norm = (streams * c.hidden_size,)
    tables = [(rows, c.engram_head_dim) for rows in c.engram_num_embeddings]
    inside = _w("Engram projections", projection, stored=FP8)
    inside += _w("Engram projections", norm, norm)
    return _w("Engram tables", *tables, stored=FP8_ROWS, used=0) + _repeat(inside, len(tables))


def _drafter(c):
    """DSpark: window-only blocks with fewer experts, a feature projection, two small heads."""
    if not c.num_nextn_predict_layers:
        return []
    hidden, markov = c.hidden_size, (c.vocab_size, c.dspark_markov_rank)
    experts, active = c.dspark_n_routed_experts, c.dspark_num_experts_per_tok
    block = _block(c, experts, active) + _biases(c, experts)
    confidence = (1, hidden + c.dspark_markov_rank)
    rows = [
        *_repeat(block, c.num_nextn_predict_layers),
        *_w("", (hidden, len(c.dspark_target_layer_ids) * hidden), stored=FP8),
        *_w("", (hidden,), (hidden,), markov, markov, confidence),
    ]
    return [replace(row, part="DSpark drafter", used=0, early=0) for row in rows]


def _vision(c):
    """ViT blocks with biased attention, the projector behind the unshuffle, three separators."""
    v, d = c.vision_config, c.hidden_size
    if v is None:
        return []
    h, ffn = v.hidden_size, v.intermediate_size
    block = [(h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (2 * ffn, h), (h, ffn)]
    ends = [(h, 3 * v.patch_size**2), (h,), (h,)]
    ends += [(d, h * v.downsample_ratio**2), (d,), (d, d), (d,), (d,), (d,), (d,)]
    return _w("vision tower", *block * v.num_hidden_layers, *ends, used=0)


def _kinds(c):
    """Layers of the same half, mode, ratio and candidate role are one kind."""
    alike = {}
    for layer in c.plan:
        key = (layer.half, layer.mode, layer.ratio, layer.candidates)
        alike[key] = [*alike.get(key, []), layer]
    return tuple(_kind(c, layers[0], len(layers)) for layers in alike.values())


def _kind(c, layer, count):
    full, consumes = layer.mode == "full", layer.candidates == "consume"
    waiting = max(layer.ratio - 1, 0)  # tokens of an open group, each with value and gate in f32
    return Kind(
        f"{layer.half} {layer.mode}",
        count,
        heads=c.num_attention_heads,
        width=2 * c.head_dim,
        ratio=layer.ratio,
        topk=c.index_topk,
        window=c.sliding_window,
        score_width=c.index_n_heads * c.index_head_dim if layer.selects else 0,
        pool=c.candidate_topk_blocks * c.candidate_block_size if consumes else inf,
        entry_bytes=MAIN_KV_FP4.record_bytes(c.head_dim) if full else 0,
        key_bytes=INDEX_FP4.record_bytes(c.index_head_dim) if full else 0,
        window_bytes=WINDOW_KV_FP8.record_bytes(c.head_dim),
        carry_bytes=waiting * 2 * c.head_dim * 4 if full else 0,
        early=layer.half == "encoder",
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
