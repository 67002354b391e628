"""What do the report's two efficiency figures look like when they are computed?

    draw_kv_bytes       Figure 1(b): bytes of global KV per token, from V1 to V4.1-Flash
    draw_decode_flops   Figure 2: weighted FLOPs per generated token against tokens of context
    draw_losses         how a training run went
    draw_strategies     what a stored prefix costs on disk against what a hit still has to compute

Nothing is read off a plot: every number comes from ledger.py, and so does the context from which on
V4.1-Flash generates more cheaply than V4-Flash. The PNG holds no date and no version, so the same
matplotlib writes the same bytes. Source: the report's captions; it publishes four byte counts and
their ratios, and for the FLOPs only the growth of V4.1-Flash. Left out: Figure 1(a), benchmarks.
"""

import json
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from .ledger import LONGEST, crossing, decode_flops, kv_bytes, tokens_label
from .presets import preset

# from Okabe and Ito's palette, which colour-blind readers tell apart
COLOURS = {"V1-67B": "#999999", "V3.2": "#009E73", "V4-Flash": "#0072B2", "V4.1-Flash": "#D55E00"}
INK, FAINT = "#333333", "#DDDDDD"


def draw_kv_bytes(path):
    """Write Figure 1(b) as a PNG: a bar per model, its bytes, and the step to the next one."""
    values = [kv_bytes(name).hbm for name in COLOURS]
    title = f"Global KV cache: {values[0] / values[-1]:.0f} times less since V1"
    with _figure(path, title) as axes:
        axes.bar(list(COLOURS), values, width=0.55, color=list(COLOURS.values()))
        for place, value in enumerate(values):
            _write(axes, f"{value:,.0f}", (place, value), (0, 9), fontweight="bold")
        for place, (before, after) in enumerate(pairwise(values)):
            between = (place + 0.5, (before * after) ** 0.5)
            _write(axes, f"÷ {before / after:.1f}", between, (0, 4))
        _log_scale(axes, "bytes per token of context", (100, 1e6))
        axes.tick_params(axis="x", length=0)


def draw_decode_flops(path):
    """Write Figure 2 as a PNG: V3.2, V4-Flash and V4.1-Flash from 1K to 1M tokens of context."""
    contexts = (2 ** np.linspace(10, 20, 161)).astype(int)
    ticks = [1 << power for power in range(10, 21, 2)]
    with _figure(path, "Decode cost, and its growth from 4K to 1M tokens of context") as axes:
        for name in ("V3.2", "V4-Flash", "V4.1-Flash"):
            axes.plot(contexts, _gflop(name, contexts), color=COLOURS[name], linewidth=2)
            first, last = _gflop(name, 4096), _gflop(name, LONGEST)
            label = f"{name}\n{first:.1f} → {last:.1f}"
            _write(axes, label, (LONGEST, last), (7, 0), ha="left", color=COLOURS[name])
        _mark_crossing(axes)
        _log_scale(axes, "weighted GFLOP per token", (10, 1000))
        axes.set_xscale("log", base=2)
        axes.set_xlim(ticks[0], ticks[-1])
        axes.set_xticks(ticks, [tokens_label(tick) for tick in ticks])
        axes.set_xlabel("tokens of context", color=INK)


def draw_strategies(path):
    """Write a PNG of the four ways to keep window KV of V4.1-Flash (prefix.py): bytes per token on
    disk against the mean number of tokens that a hit runs again.
    """
    with _figure(path, "A stored prefix: bytes kept against tokens run again") as axes:
        sizes, tokens = _periodic(2 ** np.arange(7, 14))
        axes.plot(sizes, tokens, "o-", color=COLOURS["V4-Flash"], markersize=4)
        label = "periodic, every 128 … 8,192 tokens"
        _write(axes, label, (sizes[3], tokens[3]), (8, 8), ha="left")
        for name, point, offset, side in _strategies():
            axes.plot(*point, "o", color=COLOURS["V4.1-Flash"], markersize=7, clip_on=False)
            label = f"{name}: {point[0]:,.0f} bytes"
            _write(axes, label, point, offset, ha=side, fontweight="bold")
        _log_scale(axes, "tokens run again at a hit", (1, 1e4))
        axes.set_xscale("log")
        axes.set_xlim(700, 30_000)
        axes.set_xticks([1000, 10_000], ["1,000", "10,000"])
        axes.set_xlabel("bytes per token on disk (log)", color=INK)


def draw_losses(log, path):
    """Write a PNG of a training run's log.jsonl: the model's loss by tokens seen, held-out bits per
    byte, and, where it was watched, the share of facts recalled. The drafter's steps are shown only
    where there are no others.
    """
    every = list(map(json.loads, Path(log).read_text(encoding="utf-8").splitlines()))
    records = [record for record in every if "tv" not in record] or every
    if not records:
        raise ValueError(f"log: {log} holds no step")
    seen = np.cumsum([record["tokens"] for record in records]) / 1e6
    loss = np.array([record["loss"] for record in records])
    smooth = np.convolve(np.pad(loss, (8, 8), "edge"), np.ones(17) / 17, "valid")
    with _figure(path, f"Training loss, {smooth[-1]:.2f} nats a token at the end") as axes:
        axes.plot(seen, loss, color=FAINT, linewidth=1)
        axes.plot(seen, smooth, color=COLOURS["V4.1-Flash"], linewidth=2)
        held = [(x, y, r) for x, y, r in zip(seen, smooth, records, strict=True) if "heldout" in r]
        for place, height, record in held[:: max(1, len(held) // 6)]:
            axes.plot(place, height, "o", color=INK, markersize=4)
            _write(axes, f"{record['heldout']:.2f}", (place, height), (8, 12))
        axes.set_xlabel("million tokens  (dots: held-out bits per byte)", color=INK)
        axes.set_ylabel("nats per token", color=INK)
        _draw_recall(axes, [(place, r["recall"]) for place, _, r in held if r.get("recall")])


def _draw_recall(axes, watched):
    """[(million tokens, {distance: share})] on an axis of its own; the farthest distance."""
    if not watched:
        return
    farthest = max(watched[0][1], key=int)
    right = axes.twinx()
    places, shares = zip(*((x, 100 * r[farthest]) for x, r in watched), strict=True)
    right.plot(places, shares, color=COLOURS["V4-Flash"], linewidth=2)
    right.set_ylabel(f"% recalled across {int(farthest):,} tokens", color=COLOURS["V4-Flash"])
    right.set_ylim(-3, 105)
    right.spines[["top"]].set_visible(False)


def _periodic(periods):
    """Checkpoints of all rings every `periods` tokens -> bytes per token, tokens run again."""
    kept = kv_bytes("V4.1-Flash")
    return kept.disk + kept.window / periods, periods / 2


def _strategies():
    """(name, (bytes per token, tokens run again), offset of the label, its side)."""
    config, kept = preset("v4.1-flash"), kv_bytes("V4.1-Flash")
    width = config.sliding_window
    yield "bounded", (kept.disk, width), (8, 14), "left"
    yield "zero", (kept.disk, width * config.num_hidden_layers), (10, 10), "left"
    yield "full", (kept.disk + kept.window / width, 1), (-8, 12), "right"


def _gflop(name, context):
    return decode_flops(name, context).total / 1e9


def _mark_crossing(axes):
    context = crossing("V4.1-Flash", "V4-Flash")
    height = _gflop("V4.1-Flash", context)
    axes.plot([context], [height], "o", color=INK, markersize=5, zorder=3)
    _write(axes, f"same cost at {round(context, -3):,}", (context, height), (42, -13))


def _log_scale(axes, label, limits):
    decades = 10.0 ** np.arange(np.log10(limits[0]), np.log10(limits[1]) + 0.5)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.set_yticks(decades, [f"{decade:,.0f}" for decade in decades])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_ylabel(f"{label} (log)", color=INK)


def _write(axes, text, point, offset, ha="center", color=INK, **style):
    place = {"xytext": offset, "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(text, point, **place, ha=ha, va="center", color=color, **style)


@contextmanager
def _figure(path, title):
    """Axes to draw on; written to `path` at the end, whatever style and backend the caller set."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'dsv41[plots]'") from None
    with style.context("default"):
        figure = Figure(figsize=(6, 3.5), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        yield axes
        figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
