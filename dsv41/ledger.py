"""How much memory, arithmetic and disk does a model need?

Counted from its description (families.py), N tokens of context, with prices p of BF16 1, FP8 1/2,
FP4 1/4 for one multiplication and addition, that is, two FLOPs:

    global KV   bytes per token = sum over layers of (entry + index key) / tokens per entry
    decode      FLOPs per token = 2 p P + 2 P_head + sum 2 heads (d_k + d_v) keys(N)
                                  + sum 2 p_I index_heads d_I scored(N)
    prefill     the same summed over positions; decoder layers of V4.1 run on the last W only

The report (abstract, Figures 1(b) and 2) prices precisions without saying which operator runs in
which. Here linear layers cost FP8, FP4 experts included (FP4 x FP8 runs at FP8 speed), attention
and head BF16, index scores FP4 (V3.2: FP8). FP8 attention would miss the 10 % and 27 % of V3.2 that
the V4 report publishes. Left out: norms, softmax, mHC mixing, and the time that any of it takes.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from .families import BESIDE, BF16, F32, FP4, FP8, FP8_ROWS, describe, from_config
from .quant import TILE, WEIGHT_FP4, WEIGHT_FP8

PRICE = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
LONGEST = 1 << 20  # tokens


class Parameters(NamedTuple):
    """Counts. `parts` maps a part to (stored, per generated token, per prompt token).

    `decode` and `prefill` are the backbone's active parameters, embedding rows left out.
    """

    parts: dict
    backbone: int
    engram: int
    decode: int
    prefill: int


class KvBytes(NamedTuple):
    """`main`, `index`, `disk` per token of context; the rest per request, whatever its length."""

    main: float
    index: float
    disk: float
    window: int
    carry: int
    history: int
    draft: int

    @property
    def hbm(self):
        return self.main + self.index

    @property
    def per_request(self):
        """Without the drafter's rings, which only a request that drafts needs."""
        return self.window + self.carry + self.history


class Flops(NamedTuple):
    """Weighted FLOPs. `engram`, its projections, stays outside the total as it does in 16 B."""

    linear: float
    head: float
    attention: float
    index: float
    engram: float

    @property
    def total(self):
        return sum(self[:4])


# ---- counting -------------------------------------------------------------------------------


def parameters(model):
    """model (Model, Config or name) -> Parameters."""
    parts = {}
    for w in describe(model).weights:
        counts = (w.size * w.count, w.size * w.used, w.size * w.early)
        before = parts.get(w.part, (0, 0, 0))
        parts[w.part] = tuple(a + b for a, b in zip(before, counts, strict=True))
    backbone = [counts for part, counts in parts.items() if part not in BESIDE]
    stored, decode, prefill = map(sum, zip(*backbone, strict=True))
    return Parameters(parts, stored, parts.get("Engram tables", (0,))[0], decode, prefill)


def kv_bytes(model):
    """model -> KvBytes."""
    model = describe(model)
    stores = [kind for kind in model.kinds if kind.ratio]
    main = sum(kind.count * kind.entry_bytes / kind.ratio for kind in stores)
    index = sum(kind.count * kind.key_bytes / kind.ratio for kind in stores)
    return KvBytes(
        main,
        index,
        disk=(main + index) / (1 - model.window_share),
        window=sum(kind.count * kind.window * kind.window_bytes for kind in model.kinds),
        carry=sum(kind.count * kind.carry_bytes for kind in model.kinds),
        history=model.history_bytes,
        draft=model.draft_bytes,
    )


def decode_flops(model, context):
    """model, tokens of context (int or int array) -> Flops of the next token."""
    model = describe(model)
    linear, head, engram = (
        sum(w.size * w.used for w in _matrices(model, part)) for part in ("", "head", "Engram")
    )
    price = PRICE[model.linear]
    return Flops(
        linear=2 * price * linear,
        head=2 * head,
        attention=sum(_attention(kind, context) for kind in model.kinds),
        index=sum(_scoring(kind, context, model.index) for kind in model.kinds),
        engram=2 * price * engram,
    )


def prefill_flops(model, tokens, exact=False):
    """model, prompt length -> Flops of the whole prompt and its first prediction.

    exact: run every layer on every token. Otherwise decoder layers see the last W tokens only, and
    those see no window KV from before (bounded replay).
    """
    model = describe(model)
    positions = np.arange(1, tokens + 1)
    tail = tokens if exact else min(tokens, max(kind.window for kind in model.kinds) or tokens)
    start = tokens - tail
    price = 2 * PRICE[model.linear]
    runs = [(k, positions, 0) if k.early else (k, positions[start:], start) for k in model.kinds]
    return Flops(
        linear=price * sum(_uses(w, tokens, tail) for w in _matrices(model, "")),
        head=2 * sum(w.size * w.used for w in _matrices(model, "head")),
        attention=sum(np.sum(_attention(k, seen, first)) for k, seen, first in runs),
        index=sum(np.sum(_scoring(k, seen, model.index)) for k, seen, _ in runs),
        engram=price * sum(_uses(w, tokens, tail) for w in _matrices(model, "Engram")),
    )


def layer_share(model, tokens):
    """Share of the layers' work that prefill does: (20 N + 20 x 128) / 40 N for V4.1-Flash."""
    kinds = describe(model).kinds
    done = sum(k.count * (tokens if k.early else min(tokens, k.window)) for k in kinds)
    return done / (tokens * sum(k.count for k in kinds))


def index_entries(model, context):
    """Index entries that the next token is scored against, in all layers that select."""
    return sum(k.count * _scored(k, context) for k in describe(model).kinds)


def crossing(model, other, longest=LONGEST):
    """Shortest context at which `model` decodes a token with fewer FLOPs than `other`."""
    model, other = describe(model), describe(other)

    def cheaper(context):
        return decode_flops(model, context).total < decode_flops(other, context).total

    return bisect_left(range(longest), True, key=cheaper)


def stored_bytes(config):
    """Config -> {part: bytes in the checkpoint}, scales included."""
    parts = {}
    for w in from_config(config).weights:
        parts[w.part] = parts.get(w.part, 0) + w.count * tensor_bytes(w.shape, w.stored)
    return parts


def expert_bytes(config):
    """One routed expert in the checkpoint: gate, up and down."""
    up = (config.moe_intermediate_size, config.hidden_size)
    return 2 * tensor_bytes(up, FP4) + tensor_bytes(up[::-1], FP4)


def tensor_bytes(shape, stored):
    """Bytes of one tensor in a layout of families.py, for example FP4 (N, K) -> N (K/2 + K/32)."""
    if stored in (BF16, F32):
        return math.prod(shape) * (2 if stored == BF16 else 4)
    rows, columns = shape
    if stored == FP8:
        return rows * columns + math.ceil(rows / TILE) * math.ceil(columns / TILE)
    return rows * {FP4: WEIGHT_FP4, FP8_ROWS: WEIGHT_FP8}[stored].record_bytes(columns)


def _matrices(model, part):
    """Weights that multiply: all of the backbone's but the head (""), the head, or Engram's."""
    for w in model.weights:
        inside = w.part.startswith(part) if part else w.part not in (*BESIDE, "head")
        if inside and len(w.shape) == 2:
            yield w


def _uses(w, tokens, tail):
    """Multiplications of a prompt: `early` copies by every token, the others by its tail."""
    return w.size * (w.early * tokens + (w.used - w.early) * tail)


def _attention(kind, context, start=0):
    """start: first token whose window KV exists."""
    entries = np.minimum(context // kind.ratio, kind.topk) if kind.ratio else 0
    keys = entries + np.minimum(context - start, kind.window)
    return 2 * kind.count * kind.heads * kind.width * keys


def _scored(kind, context):
    scores = kind.score_width and kind.ratio
    return np.minimum(context // kind.ratio, kind.pool) if scores else 0 * context


def _scoring(kind, context, precision):
    return 2 * PRICE[precision] * kind.count * kind.score_width * _scored(kind, context)


# ---- tables ---------------------------------------------------------------------------------


def report(models, contexts):
    """models (Model, Config or name), contexts in tokens -> tables that compare them."""
    models = [describe(model) for model in models]
    return "\n\n".join(
        [
            "Cache, in bytes. Per token of context: main KV, index keys, both in HBM, all of it on\n"
            "disk. Per request: window KV, tokens waiting to be compressed.\n" + _kv_rows(models),
            "Parameters, in billions. Active: per generated and per prompt token, without embedding\n"
            "rows and Engram.\n" + _parameter_rows(models),
            "Weighted GFLOP per generated token, by tokens of context (BF16 1, FP8 1/2, FP4 1/4).\n"
            + _flop_rows(models, contexts, decode_flops, 1e9),
            "Weighted TFLOP per prompt, by its tokens.\n"
            + _flop_rows(models, contexts, prefill_flops, 1e12),
        ]
    )


def _kv_rows(models):
    last = kv_bytes(models[-1]).hbm
    head = ["", "main KV", "index", "HBM", f"/ {models[-1].name}", "disk", "window", "waiting"]
    rows = [head]
    for model in models:
        kv = kv_bytes(model)
        cells = [_n(kv.main), _n(kv.index), _n(kv.hbm), f"{kv.hbm / last:,.1f}", _n(kv.disk)]
        rows.append([model.name, *cells, _n(kv.window), _n(kv.carry)])
    return _table(rows)


def _parameter_rows(models):
    rows = [["", "backbone", "Engram", "generated", "prompt"]]
    for model in models:
        _, *counts = parameters(model)
        rows.append([model.name, *(f"{count / 1e9:,.1f}" for count in counts)])
    return _table(rows)


def _flop_rows(models, contexts, flops, unit):
    rows = [["", *map(tokens_label, contexts)]]
    for model in models:
        cells = [f"{flops(model, n).total / unit:,.1f}" for n in contexts]
        rows.append([model.name, *cells])
    return _table(rows)


def breakdown(config):
    """Config -> tables of one model: weights, layers, cache, decode."""
    kv, expert = kv_bytes(config), expert_bytes(config)
    row = tensor_bytes((1, config.engram_head_dim), FP8_ROWS)
    return "\n\n".join(
        [
            "Weights: parameters; active per generated and per prompt token; bytes stored.\n"
            + _weight_rows(config),
            f"One routed expert is {_n(expert)} bytes, one Engram row {_n(row)}.",
            "Layers: tokens per entry of global KV; keys a query meets at most; bytes kept per token\n"
            "of context, and per request for the window.\n" + _kind_rows(config),
            f"Global KV per token: {_n(kv.main)} main + {_n(kv.index)} index = {_n(kv.hbm)} bytes.\n"
            f"Per request: {_n(kv.window)} window + {_n(kv.carry)} waiting + {_n(kv.history)} Engram"
            f" history = {_n(kv.per_request)} bytes; {_n(kv.draft)} more to draft.",
            "Weighted MFLOP per generated token, by tokens of context. Engram is not in the total.\n"
            + _term_rows(config, (4096, 131_072, LONGEST)),
            "Prefill runs the decoder on the last window only: "
            + ", ".join(f"{layer_share(config, n):.3f}" for n in (1536, 65_536))
            + " of all layers' work at 1,536 and 64K tokens.",
        ]
    )


def _weight_rows(config):
    counts, stored = parameters(config), stored_bytes(config)
    beside = [part for part in counts.parts if part in BESIDE]
    rows = [["", "parameters", "generated", "prompt", "bytes"]]
    for part in [part for part in counts.parts if part not in BESIDE]:
        rows.append([part, *map(_n, (*counts.parts[part], stored[part]))])
    total = sum(stored[part] for part in counts.parts if part not in BESIDE)
    rows.append(["= backbone", *map(_n, (counts.backbone, counts.decode, counts.prefill, total))])
    for part in beside:
        rows.append([part, *map(_n, (*counts.parts[part], stored[part]))])
    return _table(rows)


def _kind_rows(config):
    rows = [["", "layers", "tokens/entry", "keys", "B/token", "B/request"]]
    for kind in describe(config).kinds:
        ratio = kind.ratio or math.inf
        keys = kind.window + (kind.topk if kind.ratio else 0)
        kept = kind.count * (kind.entry_bytes + kind.key_bytes) / ratio
        ring = kind.count * kind.window * kind.window_bytes
        rows.append([kind.name, *map(_n, (kind.count, kind.ratio, keys, kept, ring))])
    return _table(rows)


def _term_rows(config, contexts):
    columns = [decode_flops(config, n) for n in contexts]
    rows = [["", *map(tokens_label, contexts)]]
    for term in ("linear", "head", "attention", "index", "total", "engram"):
        rows.append([term, *(f"{getattr(flops, term) / 1e6:,.1f}" for flops in columns)])
    return _table(rows)


def tokens_label(count):
    """4096 -> "4K", 1048576 -> "1M", 1000 -> "1,000"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count:,}"


def _n(number):
    return f"{number:,.2f}".removesuffix(".00")


def _table(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(row))
        for row in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)
