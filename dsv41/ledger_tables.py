"""How do the ledger's numbers look side by side?

    report      several models: cache bytes, sizes, FLOPs per generated token by context
    breakdown   one config: where its weights, cache, decode and prefill come from

Nothing is counted here: every number comes from ledger.py, which also says what is weighted and
what is left out. Parts that published sizes do not count (Engram, drafter, vision) stand below the
sum of the backbone.
"""

import math

from .accounts import BESIDE
from .families import describe
from .ledger import (
    LONGEST,
    decode_flops,
    engram_row_bytes,
    expert_bytes,
    kv_bytes,
    parameters,
    prefill_flops,
    prefill_share,
    stored_bytes,
    tokens_label,
)


def report(models, contexts):
    """models (Model, Config or name), contexts in tokens -> three tables that compare them."""
    models = [describe(model) for model in models]
    sections = (_cache(models), _sizes(models), _decoding(models, contexts))
    return "\n\n".join(sections)


def _cache(models):
    last = models[-1]
    title = (
        "Cache, in bytes. Per token of context: main KV, index keys, both in HBM, all on disk (V4\n"
        "keeps window KV there too). Per request: window KV, groups not yet compressed."
    )
    rows = [["", "main KV", "index", "HBM", f"x {last.name}", "disk", "window", "groups"]]
    for model in models:
        kv = kv_bytes(model)
        ratio = f"{kv.hbm / kv_bytes(last).hbm:,.1f}"
        numbers = [_n(kv.main), _n(kv.index), _n(kv.hbm), ratio, *map(_n, kv[2:5])]
        rows.append([model.name, *numbers])
    return _table(title, rows)


def _sizes(models):
    title = (
        "Parameters, in billions. Active per generated and per prompt token: of the backbone,\n"
        "without embedding rows."
    )
    rows = [["", "backbone", "Engram", "generated", "prompt"]]
    for model in models:
        _, *counts = parameters(model)
        rows.append([model.name, *(f"{count / 1e9:,.1f}" for count in counts)])
    return _table(title, rows)


def _decoding(models, contexts):
    title = "Weighted GFLOP per generated token (BF16 1, FP8 1/2, FP4 1/4), by tokens of context."
    rows = [["", *map(tokens_label, contexts)]]
    for model in models:
        totals = [decode_flops(model, context).total for context in contexts]
        rows.append([model.name, *(f"{total / 1e9:,.1f}" for total in totals)])
    return _table(title, rows)


def breakdown(config, contexts=(4096, 131_072, LONGEST)):
    """Config -> tables of one model: weights, layers, cache, decode at these contexts, prefill."""
    sections = (_weights(config), _layers(config), _terms(config, contexts), _prompts(config))
    return "\n\n".join(sections)


def _weights(config):
    counts, stored = parameters(config), stored_bytes(config)
    title = (
        "Weights: parameters, active per generated and per prompt token; bytes in the checkpoint."
    )
    rows = [["", "parameters", "generated", "prompt", "bytes"]]
    parts = [[part, *map(_n, (*counts.parts[part], stored[part]))] for part in counts.parts]
    rows += [row for row in parts if row[0] not in BESIDE]
    total = sum(size for part, size in stored.items() if part not in BESIDE)
    rows.append(["= backbone", *map(_n, (counts.backbone, counts.decode, counts.prefill, total))])
    rows += [row for row in parts if row[0] in BESIDE]
    expert, row = _n(expert_bytes(config)), _n(engram_row_bytes(config))
    return _table(title, rows) + f"\nA routed expert is {expert} bytes, an Engram row {row}."


def _layers(config):
    kv = kv_bytes(config)
    title = (
        "Layers: tokens per entry of global KV, most keys a query meets, bytes of global KV per\n"
        "token of context, bytes of window KV per request."
    )
    rows = [["", "layers", "tokens/entry", "keys", "global", "window"]]
    for kind in describe(config).kinds:
        keys = kind.window + (kind.topk if kind.ratio else 0)
        kept = kind.count * (kind.entry_bytes + kind.key_bytes) / (kind.ratio or math.inf)
        ring = kind.count * kind.window * kind.window_bytes
        rows.append([kind.name, *map(_n, (kind.count, kind.ratio, keys, kept, ring))])
    return _table(title, rows) + (
        f"\nPer token: {_n(kv.main)} main KV + {_n(kv.index)} index keys = {_n(kv.hbm)} bytes."
        f"\nPer request: {_n(kv.window)} window + {_n(kv.carry)} unfinished groups"
        f" + {_n(kv.history)} Engram history\n= {_n(kv.per_request)} bytes; "
        f"{_n(kv.draft)} more to draft."
    )


def _terms(config, contexts):
    columns = [decode_flops(config, context) for context in contexts]
    title = "Weighted FLOPs per generated token, by tokens of context; Engram is not in the total."
    rows = [["", *map(tokens_label, contexts)]]
    for term in ("linear", "head", "attention", "index", "total", "engram"):
        rows.append([term, *(_n(getattr(column, term)) for column in columns)])
    return _table(title, rows)


def _prompts(config):
    title = (
        "Weighted GFLOP of a prefill, by tokens of prompt: every layer on every token; decoder\n"
        "half on the last window only; share of the layers that this runs."
    )
    rows = [["", "every layer", "bounded replay", "share"]]
    for tokens in (1536, 65_536):
        work = [prefill_flops(config, tokens, exact).total / 1e9 for exact in (True, False)]
        share = f"{prefill_share(config, tokens):.3f}"
        rows.append([tokens_label(tokens), *(f"{flops:,.1f}" for flops in work), share])
    return _table(title, rows)


def _n(number):
    """3514.25 -> "3,514.25", 890.0 -> "890"."""
    return f"{number:,.2f}".removesuffix(".00")


def _table(title, rows):
    """First column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title]
    for first, *cells in rows:
        shown = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *shown]).rstrip())
    return "\n".join(lines)
