"""How much memory, arithmetic and disk does a model need?

Counted from its description (accounts.py), for N tokens of context, at a price p per FLOP of 1 in
BF16, 1/2 in FP8 and 1/4 in FP4:

    global KV   bytes per token = sum over layers of (entry + index key) / tokens per entry
    decode      FLOPs per token = 2 p P + 2 P_head + sum 2 heads (d_k + d_v) keys(N)
                                  + sum 2 p_I index_heads d_I scored(N)
    prefill     the same over all positions; V4.1's decoder half runs on the last W of them only

The report (Figures 1(b) and 2) gives prices, but not which operator runs in which precision. Here
linear layers cost FP8, FP4 experts included (FP4 x FP8 runs at FP8 speed), attention and head BF16,
index scores FP4 (V3.2: FP8). FP8 attention would miss the 10 % and 27 % of V3.2 that the V4 report
publishes. Left out: norms, softmax, mHC mixing, and the time that any of it takes.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from .accounts import BESIDE, BF16, F32, FP4, FP8, FP8_ROWS, from_config
from .families import describe
from .quant import TILE, WEIGHT_FP4, WEIGHT_FP8

PRICE = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
LONGEST = 1 << 20  # tokens


class Parameters(NamedTuple):
    """Counts. `parts`: part -> (stored, active per generated token, active per prompt token).

    `decode` and `prefill` are the active ones of the backbone, embedding rows left out.
    """

    parts: dict
    backbone: int
    engram: int
    decode: int
    prefill: int


class KvBytes(NamedTuple):
    """`main`, `index`, `disk` per token of context; the others per request of any length."""

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
    """Weighted FLOPs. Engram's projections stay outside the total, as they do in the 16 B."""

    linear: float
    head: float
    attention: float
    index: float
    engram: float

    @property
    def total(self):
        return self.linear + self.head + self.attention + self.index


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


def stored_bytes(config):
    """Config -> {part: bytes in the checkpoint}, scales included."""
    parts = {}
    for w in from_config(config).weights:
        parts[w.part] = parts.get(w.part, 0) + w.count * _bytes(w.shape, w.stored)
    return parts


def expert_bytes(config):
    """One routed expert in the checkpoint: gate, up and down."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    return 2 * _bytes((width, hidden), FP4) + _bytes((hidden, width), FP4)


def engram_row_bytes(config):
    """One row of an Engram table in the checkpoint."""
    return _bytes((1, config.engram_head_dim), FP8_ROWS)


def _bytes(shape, stored):
    """One tensor in a layout of accounts.py, scales included: FP4 (N, K) -> N (K/2 + K/32)."""
    if stored in (BF16, F32):
        return math.prod(shape) * (2 if stored == BF16 else 4)
    rows, columns = shape
    if stored == FP8:
        return rows * columns + math.ceil(rows / TILE) * math.ceil(columns / TILE)
    return rows * {FP4: WEIGHT_FP4, FP8_ROWS: WEIGHT_FP8}[stored].record_bytes(columns)


def decode_flops(model, context):
    """model, tokens of context (int or int array) -> Flops of the next token."""
    _require_positive("context", context)
    model = describe(model)
    price = 2 * PRICE[model.linear]
    return Flops(
        linear=price * _multiplied(model, "linear"),
        head=2 * _multiplied(model, "head"),
        attention=sum(_attention(kind, context) for kind in model.kinds),
        index=sum(_scoring(kind, context, model.index) for kind in model.kinds),
        engram=price * _multiplied(model, "engram"),
    )


def prefill_flops(model, tokens, exact=False):
    """model, prompt length -> Flops of the whole prompt and its first prediction.

    exact: every layer runs on every token. Otherwise decoder layers see the last W tokens only,
    and those see no window KV from before (bounded replay). MLA is counted as in decode, where
    heads meet the latent; a dense prefill may expand it instead, and then needs less.
    """
    _require_positive("tokens", tokens)
    model = describe(model)
    positions = np.arange(1, tokens + 1)
    start = 0 if exact else max(tokens - max(kind.window for kind in model.kinds), 0)
    runs = [(k, positions, 0) if k.early else (k, positions[start:], start) for k in model.kinds]
    price = 2 * PRICE[model.linear]
    return Flops(
        linear=price * _multiplied(model, "linear", tokens, tokens - start),
        head=2 * _multiplied(model, "head"),
        attention=sum(np.sum(_attention(kind, seen, first)) for kind, seen, first in runs),
        index=sum(np.sum(_scoring(kind, seen, model.index)) for kind, seen, _ in runs),
        engram=price * _multiplied(model, "engram", tokens, tokens - start),
    )


def prefill_share(model, tokens):
    """Layers run per prompt token, as a share of all: (20 N + 20 x 128) / 40 N for V4.1-Flash."""
    _require_positive("tokens", tokens)
    kinds = describe(model).kinds
    run = sum(k.count * (tokens if k.early else min(tokens, k.window)) for k in kinds)
    return run / (tokens * sum(k.count for k in kinds))


def index_entries(model, context):
    """Index entries that the next token is scored against, over all layers that select."""
    return int(sum(k.count * _scored(k, context) for k in describe(model).kinds))


def crossing(model, other, longest=LONGEST):
    """Shortest context at which `model` decodes with fewer FLOPs than `other`, or `longest`."""
    model, other = describe(model), describe(other)

    def cheaper(context):
        return decode_flops(model, context).total < decode_flops(other, context).total

    return bisect_left(range(longest), True, lo=1, key=cheaper)


def _multiplied(model, group, tokens=1, tail=1):
    """Multiplications in matrices: `early` ones once per token, the others once per tail token."""
    return sum(
        w.size * (w.early * tokens + (w.used - w.early) * tail)
        for w in model.weights
        if len(w.shape) == 2 and _group(w.part) == group
    )


def _group(part):
    if part in BESIDE:
        return "engram" if part.startswith("Engram") else None
    return "head" if part == "head" else "linear"


def _attention(kind, context, start=0):
    """start: the first token whose window KV exists."""
    entries = np.minimum(context // kind.ratio, kind.topk) if kind.ratio else 0
    keys = entries + np.minimum(context - start, kind.window)
    return 2 * kind.count * kind.heads * kind.width * keys


def _scoring(kind, context, precision):
    return 2 * PRICE[precision] * kind.count * kind.score_width * _scored(kind, context)


def _scored(kind, context):
    return np.minimum(context // kind.ratio, kind.pool) if kind.score_width else 0 * context


def _require_positive(name, value):
    if np.min(value) < 1:
        raise ValueError(f"{name}: expected a positive number of tokens, got {np.min(value)}")


def tokens_label(count):
    """4096 -> "4K", 1048576 -> "1M", 1000 -> "1,000"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count:,}"
