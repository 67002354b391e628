"""Which layer does what, and is that possible?

    ratio 0                          -> swa      window attention only
    in kv_source_layer_ids           -> full     makes compressed KV, index keys and a top-k
    else in index_source_layer_ids   -> reindex  reads a source's KV and keys, makes its own top-k
    else                             -> reuse    reads a source's KV through somebody's top-k

The source of a layer is the nearest one at or before it. `candidate_source_layer_id` publishes the
pool of entries in which every later index source must choose. The last KV source is where the
decoder half begins: all global KV of the layers behind it is made from its input (ced.py).
Source: config.json and Attention.__init__ in the released inference/model.py.
"""

import math
from dataclasses import dataclass, fields

RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class Layer:
    """What one block does. Sources are layer numbers; None where the layer needs none."""

    index: int
    ratio: int  # tokens per compressed entry; 0 = window only
    mode: str  # swa, full, reindex, reuse
    kv_source: int | None  # whose compressed KV and index keys it reads
    index_source: int | None  # whose top-k it reads
    candidates: str | None  # "publish" or "consume"
    engram: int | None  # number of its Engram module
    half: str  # encoder, decoder

    @property
    def selects(self):
        """True when the layer computes a top-k of its own."""
        return self.mode in ("full", "reindex")


def build_plan(config):
    """config -> tuple of Layer, one per decoder block."""
    return tuple(_layer(config, index) for index in range(config.num_hidden_layers))


def _layer(config, index):
    ratio = config.compress_ratios[index]
    kv_source = _nearest(config.kv_source_layer_ids, index) if ratio else None
    index_source = _nearest(config.index_source_layer_ids, index) if ratio else None
    if not ratio:
        mode = "swa"
    elif kv_source == index:
        mode = "full"
    else:
        mode = "reindex" if index_source == index else "reuse"
    pool = config.candidate_source_layer_id
    candidates = None
    if pool is not None and mode in ("full", "reindex") and index >= pool:
        candidates = "publish" if index == pool else "consume"
    modules = config.engram_layer_ids
    last = max(config.kv_source_layer_ids, default=config.num_hidden_layers)
    return Layer(
        index=index,
        ratio=ratio,
        mode=mode,
        kv_source=kv_source,
        index_source=index_source,
        candidates=candidates,
        engram=modules.index(index) if index in modules else None,
        half="encoder" if index < last else "decoder",
    )


def _nearest(sources, index):
    return max((s for s in sources if s <= index), default=None)


def check_config(config):
    """Raise ValueError, in one sentence that names the field, for a model that cannot exist."""
    for problem in _kind_problems(config):
        raise ValueError(problem)
    for problem in _size_problems(config):
        raise ValueError(problem)
    for problem in _plan_problems(config):
        raise ValueError(problem)


def _kind_problems(c, where=""):
    """Every field holds what it is annotated with; numbers are finite and not negative."""
    for f in fields(c):
        value = getattr(c, f.name)
        if f.name in ("rope_scaling", "vision_config") and value is not None:
            yield from _kind_problems(value, f"{f.name}.")
        expected = _kind_problem(f.type, value)
        if expected:
            yield f"{where}{f.name}: expected {expected}, not negative, got {value!r}"
        elif where and f.type in (int, float) and value == 0:
            yield f"{where}{f.name}: expected a positive number, got 0"


def _kind_problem(kind, value):
    """What a field of this annotation should have held; None if it does."""
    if kind in (int, float) and not _is_number(value, kind):
        return f"a number ({kind.__name__})"
    if kind == int | None and not (value is None or _is_number(value, int)):
        return "an integer or nothing"
    if kind == float | None and not (value is None or _is_number(value, float)):
        return "a number or nothing"
    is_list = isinstance(value, tuple) and all(_is_number(v, int) for v in value)
    return "a list of integers" if kind is tuple and not is_list else None


def _is_number(value, kind):
    kinds = int if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf


def _count_problems(c):
    positive = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads "
        "head_dim q_lora_rank o_lora_rank o_groups n_routed_experts num_experts_per_tok "
        "sliding_window index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters "
        "rope_theta compress_rope_theta max_position_embeddings engram_head_dim engram_n_heads "
        "dspark_block_size"
    )
    for name in positive.split():
        if not getattr(c, name) > 0:
            yield f"{name}: expected a positive number, got {getattr(c, name)!r}"
    grouped = (
        "hidden_size moe_intermediate_size head_dim q_lora_rank index_head_dim engram_head_dim"
    )
    for name in grouped.split():
        if getattr(c, name) % 32:
            yield f"{name}: the quantisers group 32 channels, {getattr(c, name)} is no multiple"
    yield from _token_problems(c)
    if c.o_groups * c.o_lora_rank % 32:
        yield (
            f"o_lora_rank: the quantisers group 32 channels, {c.o_groups} groups of "
            f"{c.o_lora_rank} are no multiple"
        )
    if c.engram_max_ngram_size < 2:
        yield f"engram_max_ngram_size: expected at least 2, got {c.engram_max_ngram_size}"


def _token_problems(c):
    special = ["image_token_id", "engram_pad_token_id"]
    for name in special + ["dspark_noise_token_id"] * (c.num_nextn_predict_layers > 0):
        if (getattr(c, name) or 0) >= c.vocab_size:
            yield f"{name}: {getattr(c, name)} is outside the vocabulary of {c.vocab_size}"


def _size_problems(c):
    yield from _count_problems(c)
    if c.qk_rope_head_dim % 2 or not 0 < c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim):
        yield (
            f"qk_rope_head_dim: expected an even number up to head_dim {c.head_dim} and "
            f"index_head_dim {c.index_head_dim}, got {c.qk_rope_head_dim}"
        )
    if c.num_attention_heads % c.o_groups:
        yield f"o_groups: {c.o_groups} groups do not divide {c.num_attention_heads} heads"
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok: {c.num_experts_per_tok} of {c.n_routed_experts} experts"
    if c.n_shared_experts not in (0, 1):
        yield f"n_shared_experts: expected 0 or 1, got {c.n_shared_experts}"


def _plan_problems(c):
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) not in (layers, layers + c.num_nextn_predict_layers):
        yield f"compress_ratios: expected {layers} entries (and DSpark's), got {len(ratios)}"
    for index, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            yield f"compress_ratios: layer {index} has unknown ratio {ratio!r}, expected 0, 1 or 2"
    yield from _list_problems(c)
    for source in c.kv_source_layer_ids:
        if source not in c.index_source_layer_ids:
            yield f"index_source_layer_ids: KV source layer {source} must select from its own KV"
    for index in range(layers):
        yield from _layer_problems(c, index)
    yield from _pool_problems(c)
    if c.num_nextn_predict_layers and not c.dspark_target_layer_ids:
        yield "dspark_target_layer_ids: the drafter needs at least one layer to look at"
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        yield "engram_num_embeddings: expected one row count per engram layer"


def _list_problems(c):
    lists = "kv_source_layer_ids index_source_layer_ids engram_layer_ids dspark_target_layer_ids"
    for name in lists.split():
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < c.num_hidden_layers for i in ids):
            yield f"{name}: expected ascending layers below {c.num_hidden_layers}, got {list(ids)}"
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for source in getattr(c, name):
            if c.compress_ratios[source] == 0:
                yield f"{name}: layer {source} is window-only (ratio 0), so it has no entries"


def _layer_problems(c, index):
    ratio = c.compress_ratios[index]
    if ratio == 0:
        return
    kv_source = _nearest(c.kv_source_layer_ids, index)
    if kv_source is None:
        kind = "reindexes" if index in c.index_source_layer_ids else "reuses"
        yield f"kv_source_layer_ids: layer {index} {kind} compressed KV before any Full layer"
    elif c.compress_ratios[kv_source] != ratio:
        yield (
            f"compress_ratios: layer {index} has ratio {ratio} but reads layer {kv_source}'s KV, "
            f"which has ratio {c.compress_ratios[kv_source]}"
        )


def _pool_problems(c):
    pool = c.candidate_source_layer_id
    if pool is None:
        return
    if pool not in c.kv_source_layer_ids:
        yield f"candidate_source_layer_id: layer {pool} is not a KV source"
    elif pool != c.kv_source_layer_ids[-1]:
        yield f"candidate_source_layer_id: layer {pool} is not the last KV source"
    if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1:
        yield "candidate_topk_blocks, candidate_block_size: expected positive integers"
    if c.candidate_topk_blocks * c.candidate_block_size < c.index_topk:
        yield (
            f"index_topk: the pool of {c.candidate_topk_blocks} x {c.candidate_block_size} "
            f"candidates is smaller than top-{c.index_topk}"
        )


def format_plan(plan):
    """The plan as a text table, one line per layer."""
    rows = [("layer", "half", "ratio", "mode", "KV of", "top-k of", "candidates", "engram")]
    for layer in plan:
        cells = (layer.kv_source, layer.index_source, layer.candidates, layer.engram)
        shown = ["-" if cell is None else str(cell) for cell in cells]
        rows.append((str(layer.index), layer.half, str(layer.ratio), layer.mode, *shown))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
