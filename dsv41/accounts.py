"""What is a model made of, as far as memory and arithmetic can tell?

A `Model` is two lists, enough for everything that ledger.py counts:

    weights   tensors: shape, how many there are, and how many of them a generated token (`used`)
              and any prompt token (`early`) is multiplied by
    kinds     layers: what they keep per token, how many keys a query meets, how many it scores

`from_config` reads both off a `Config` of V4.1 and its layer plan, whatever its sizes; the earlier
models are plain facts (families.py). Every shape is stated a second time here: tensors.py lists the
checkpoint by name, this file by purpose, and the tests compare their sums.
Source: config.json, inference/model.py and the tensors of the V4.1 release.
"""

from dataclasses import dataclass, replace
from math import inf, prod

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
    stored: str  # one of the layouts above
    count: int
    used: int  # of them, multiplied for a generated token
    early: int  # of them, multiplied for every prompt token

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
    linear: str = "fp8"  # precision in which linear layers are priced
    index: str = "fp4"  # likewise index scores
    window_share: float = 0.0  # part of the persistent cache that is window KV
    history_bytes: int = 0  # token ids that Engram looks back at
    draft_bytes: int = 0  # the drafter's window rings


def tensors(part, *shapes, stored=BF16, count=1, used=None):
    """-> one Weight per shape. used: how many of the `count` multiply a token; by default all."""
    used = count if used is None else used
    return [Weight(part, shape, stored, count, used, used) for shape in shapes]


def repeat(weights, layers, early=None):
    """Weights of one layer -> of `layers` layers, `early` of which run for all prompt tokens."""
    early = layers if early is None else early
    return [
        replace(w, count=w.count * layers, used=w.used * layers, early=w.early * early)
        for w in weights
    ]


def embedding_and_head(vocabulary, hidden):
    """With the final norm. The head runs for the last prompt token only."""
    head = [replace(w, early=0) for w in tensors("head", (vocabulary, hidden))]
    table = tensors("embedding", (vocabulary, hidden), used=0)  # looked up, not multiplied
    return table + head + tensors("norms and sinks", (hidden,))


def router_and_experts(hidden, width, routed, active, shared):
    """Router and experts of one layer; an expert has gate and up (width, hidden), and down."""
    up, down = (width, hidden), (hidden, width)
    return [
        *tensors("router", (routed, hidden)),
        *tensors("routed experts", up, up, down, stored=FP4, count=routed, used=active),
        *tensors("shared expert", up, up, down, stored=FP8, count=shared),
    ]


def v4_block(c, routed, active):
    """What every layer of V4 and V4.1 has, for sizes under their config.json names."""
    hidden, rank, queries = c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.head_dim
    out, mixes = c.o_groups * c.o_lora_rank, (2 + c.hc_mult) * c.hc_mult
    attention = [(rank, hidden), (queries, rank), (c.head_dim, hidden)]
    attention += [(out, queries // c.o_groups), (hidden, out)]
    return [
        *tensors("attention", *attention, stored=FP8),
        *tensors("norms and sinks", (rank,), (c.head_dim,), (hidden,), (hidden,)),
        *tensors("norms and sinks", (c.num_attention_heads,), stored=F32),
        *tensors("mHC", (mixes, c.hc_mult * hidden), (mixes,), (3,), stored=F32, count=2),
        *router_and_experts(hidden, c.moe_intermediate_size, routed, active, c.n_shared_experts),
    ]


def from_config(c, name="V4.1"):
    """Config -> Model: tensor by tensor, and layer by layer from the plan."""
    encoder = sum(layer.half == "encoder" for layer in c.plan)
    block = v4_block(c, c.n_routed_experts, c.num_experts_per_tok) + _biases(c, c.n_routed_experts)
    weights = [
        *embedding_and_head(c.vocab_size, c.hidden_size),
        *repeat(block, c.num_hidden_layers, encoder),
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
    return tensors("router", (experts,), stored=F32, count=2 if c.vision_config else 1)


def _global_kv(c):
    """Compressors and index keys of the KV sources, index queries of the layers that select.

    The last source is a decoder layer, yet its KV and keys are made for all prompt tokens.
    """
    full = [layer for layer in c.plan if layer.mode == "full"]
    selecting = [layer for layer in c.plan if layer.selects]
    latent, key = (c.head_dim, c.hidden_size), (c.index_head_dim, c.head_dim)
    source = tensors("compressor", latent) + tensors("indexer", key)
    source += tensors("norms and sinks", (c.head_dim,), (c.index_head_dim,))
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    query = tensors("indexer", queries, stored=FP8)
    query += tensors("indexer", (c.index_n_heads, c.hidden_size))
    pair_gate = tensors("compressor", latent)
    return [
        *repeat(source, len(full)),
        *repeat(pair_gate, sum(layer.ratio > 1 for layer in full)),
        *repeat(query, len(selecting), sum(layer.half == "encoder" for layer in selecting)),
    ]


def _engram(c):
    if not c.engram_layer_ids:
        return []
    streams, columns = c.hc_mult, (c.engram_max_ngram_size - 1) * c.engram_n_heads
    projection = ((streams + 1) * c.hidden_size, columns * c.engram_head_dim)
    norm = (streams * c.hidden_size,)
    tables = [(rows, c.engram_head_dim) for rows in c.engram_num_embeddings]
    inside = tensors("Engram projections", projection, stored=FP8)
    inside += tensors("Engram projections", norm, norm)
    return tensors("Engram tables", *tables, stored=FP8_ROWS, used=0) + repeat(inside, len(tables))


def _drafter(c):
    """DSpark: window-only blocks with fewer experts, a feature projection, two small heads.

    All one part, beside the backbone's active parameters.
    """
    if not c.num_nextn_predict_layers:
        return []
    hidden, markov = c.hidden_size, (c.vocab_size, c.dspark_markov_rank)
    experts, active = c.dspark_n_routed_experts, c.dspark_num_experts_per_tok
    block = v4_block(c, experts, active) + _biases(c, experts)
    confidence = (1, hidden + c.dspark_markov_rank)
    rows = [
        *repeat(block, c.num_nextn_predict_layers),
        *tensors("", (hidden, len(c.dspark_target_layer_ids) * hidden), stored=FP8),
        *tensors("", (hidden,), (hidden,), markov, markov, confidence),
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
    return tensors("vision tower", *block * v.num_hidden_layers, *ends, used=0)


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
