# %% [markdown]
# # 03 · Window attention with a sink and one shared latent
#
# **What does a token see of its near past, and what must be kept for it?**
#
# Every layer of DeepSeek-V4.1-Flash attends to the last 128 tokens. It keeps one vector of 512
# numbers per token, which serves 64 heads as key and as value, in a ring that never grows. This
# chapter builds the softmax with its sink, the window, the ring, and counts the bytes.
#
# You need NumPy, softmax, and chapter 02 for the rotation that is left out here until the end. 25
# minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/03_window_attention.py`.
#
# Sources: Attention and get_window_topk_idxs in the released inference/model.py,
# sparse_attn_kernel in inference/kernel.py; the V4.1 report, §2.1, for where the window stands.
# The modules that this page arrives at: [window.py](../dsv41/window.py),
# [sparse_attn.py](../dsv41/sparse_attn.py) and [batch.py](../dsv41/batch.py).

# %%
import math

import numpy as np

from lib.page import BLUE, GREEN, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One vector is key and value
#
# A token leaves one vector $K_j$, its latent. All heads read the same one. Head $h$ of query $t$
# scores it, and takes a share of it:
#
# $$s_j = \frac{q_h \cdot K_j}{\sqrt{C}}, \qquad
# p_j = \frac{e^{s_j}}{\sum_i e^{s_i} + e^{\mathrm{sink}_h}}, \qquad o_h = \sum_j p_j K_j$$
#
# The **sink** is one learned number per head. It stands in the sum below, like the score of one
# more key, but brings no value. So the shares need not add up to one.
#
# By hand: four channels, so the scale is 1/2. Channel 0 makes the scores 0, 0 and ln 2, channel 1
# holds the numbers 1, 2 and 10. The sink is ln 3.


# %%
def attend_by_loop(q, keys, sink):
    """One query, one head. q (C,), keys: list of (C,), sink -> list of C numbers, and shares"""
    weights = []
    for key in keys:
        weights.append(math.exp(sum(a * b for a, b in zip(q, key, strict=True)) / len(q) ** 0.5))
    total = sum(weights) + math.exp(sink)
    shares = [weight / total for weight in weights]
    o = [sum(p * key[c] for p, key in zip(shares, keys, strict=True)) for c in range(len(q))]
    return o, shares


q = [2.0, 0.0, 0.0, 0.0]
keys = [[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [math.log(2), 10.0, 0.0, 0.0]]
o, shares = attend_by_loop(q, keys, sink=math.log(3))
print("weights 1, 1, 2 and the sink's 3: together 7")
print("shares of the keys", "".join(f"{7 * p:5.2f} / 7" for p in shares))
print(f"output channel 1   (1*1 + 1*2 + 2*10) / 7 = 23/7 = {o[1]:.4f}")
close("by hand", o[1], 23 / 7, within=1e-12)
close("without a sink", attend_by_loop(q, keys, -math.inf)[0][1], 23 / 4, within=1e-12)

# %%
with figure("The sink takes weight and brings nothing: a head can look away") as ax:
    sinks = ((-math.inf, "no sink"), (math.log(3), "ln 3"), (math.log(36), "ln 36"))
    for row, (sink, _) in enumerate(reversed(sinks)):
        left, parts = 0.0, attend_by_loop(q, keys, sink)[1]
        colours = (BLUE, GREEN, ORANGE, "#EEEEEE")
        names = ("key 0", "key 1", "key 2", "sink")
        for part, colour, label in zip((*parts, 1 - sum(parts)), colours, names, strict=True):
            ax.barh(row, part, left=left, color=colour, edgecolor="white", height=0.6)
            if part > 0.08:
                ink = "black" if label == "sink" else "white"
                ax.text(left + part / 2, row, label, ha="center", va="center", color=ink)
            left += part
        assert abs(left - 1) < 1e-9, "with the sink's share they add up to one"
    ax.set(yticks=range(3), xlim=(0, 1), xlabel="share of the softmax")
    ax.set_yticklabels([name for _, name in reversed(sinks)])

# %% [markdown]
# **Break it.** Scale the sink by $1 / \sqrt{C}$, as if it were the dot product of a key. It is the
# score itself, already in the softmax's units.

# %% tags=["break"]
right = attend_by_loop(q, keys, math.log(3))[0][1]
wrong = attend_by_loop(q, keys, math.log(3) / 2)[0][1]
print(f"sink as it is   {right:.4f}  = 23 / (4 + 3)")
print(f"sink scaled     {wrong:.4f}  = 23 / (4 + sqrt 3)")
close("the wrong denominator", wrong, 23 / (4 + math.sqrt(3)), within=1e-12)
assert abs(wrong - right) > 0.5, "a scaled sink takes too little weight"

# %% [markdown]
# ## All queries and heads at once
#
# Attention is a gather. Each query has a list of rows, padded with −1 where there is nothing to
# see. The largest score or sink is subtracted before `exp`; that cancels and avoids overflow.


# %%
def attend(q, records, rows, sink):
    """q (T, H, C), records (N, C), rows (T, W) int, sink (H,) -> (T, H, C), float32"""
    seen = rows >= 0
    kv = records[np.maximum(rows, 0)]  # (T, W, C)
    kv[~seen] = 0
    s = q @ kv.transpose(0, 2, 1) * np.float32(q.shape[-1] ** -0.5)  # (T, H, W)
    s = np.where(seen[:, None], s, np.float32(-np.inf))
    top = np.maximum(s.max(axis=-1, keepdims=True), sink[:, None])  # (T, H, 1)
    weights = np.exp(s - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink[:, None] - top)
    return weights / total @ kv


small = attend(
    np.float32([[q]]), np.float32(keys), np.array([[0, 1, 2, -1]]), np.float32([math.log(3)])
)
close("at once = by hand", small[0, 0, 1], 23 / 7, within=1e-6)

rng = np.random.default_rng(1)
queries = rng.standard_normal((12, 2, 8)).astype(np.float32)
latents = rng.standard_normal((12, 8)).astype(np.float32)
sink = np.float32([-1, 1])
everything = np.tile(np.arange(12), (12, 1))
by_loop = np.zeros((12, 2, 8))
for t, h in np.ndindex(12, 2):
    by_loop[t, h], _ = attend_by_loop(queries[t, h].tolist(), latents.tolist(), float(sink[h]))
close("12 queries, 2 heads = by loop", attend(queries, latents, everything, sink), by_loop, 1e-5)

# %% [markdown]
# ## The window
#
# Query $t$ sees the last $W$ tokens, itself included:
#
# $$t - W + 1 \le j \le t, \qquad j \ge 0$$
#
# The model has $W = 128$. Four fit on the page. The list of query $t$ has $W$ places. Early
# queries fill the first of them and leave −1 behind.


# %%
W = 4


def rows_by_loop(tokens, width):
    rows = []
    for t in range(tokens):
        seen = [j for j in range(tokens) if t - width + 1 <= j <= t]
        rows.append(seen + [-1] * (width - len(seen)))
    return np.array(rows)


def window_rows(tokens, width):
    """-> (T, W) int, positions ascending, -1 behind them"""
    t = np.arange(tokens)[:, None]
    rows = np.maximum(t - width + 1, 0) + np.arange(width)  # (T, W)
    return np.where(rows <= t, rows, -1)


rows = window_rows(12, W)
for t in (0, 1, 2, 3, 4, 11):
    print(f"query {t:2} reads", "".join(f"{row:4}" for row in rows[t]))
same("all rows at once = by loop", rows, rows_by_loop(12, W))
same("how many each query sees", (rows >= 0).sum(axis=1), [1, 2, 3] + [4] * 9)

# %%
pattern = np.zeros((12, 12))
for t, j in zip(np.repeat(np.arange(12), W), rows.ravel(), strict=True):
    if j >= 0:
        pattern[t, j] = 1
with figure("Window 4: a query sees itself and three before") as ax:
    for t, j in np.argwhere(pattern):
        colour = ORANGE if t == j else BLUE
        ax.barh(t + 0.46, 0.92, left=j, height=0.92, color=colour)
    ax.set(xlim=(0, 12), ylim=(12, 0), aspect="equal", xlabel="key j", ylabel="query t")
    ax.set_xticks(np.arange(0, 12, 2) + 0.46, range(0, 12, 2))
    ax.set_yticks(np.arange(0, 12, 2) + 0.46, range(0, 12, 2))
    ax.text(12.3, 1.0, "itself", color=ORANGE)
    ax.text(12.3, 2.2, "up to 3 before", color=BLUE)
    ax.spines[:].set_visible(False)
assert np.array_equal(pattern, np.tril(np.ones((12, 12))) - np.tril(np.ones((12, 12)), -W)), "band"

# %% [markdown]
# **Break it.** −1 is a legal index in NumPy: the last row. Forget the mask, and token 0 reads the
# last token of the text, three times over. Nothing fails.

# %% tags=["break"]
print("rows of query 0:", rows[0])
marked = np.zeros((12, 8), np.float32)
marked[0], marked[11] = 1, 100
no_query, no_sink = np.zeros((12, 1, 8), np.float32), np.float32([-np.inf])
right = attend(no_query, marked, rows, no_sink)[0, 0, 0]
wrong = marked[rows[0]].mean(axis=0)[0]  # equal scores: the softmax is a mean
print(f"masked      {right:6.2f}   token 0 sees itself")
print(f"not masked  {wrong:6.2f}   = (1 + 3 * 100) / 4")
assert right == 1 and wrong == 75.25, "the future leaks in through -1"

# %% [markdown]
# ## A future token changes nothing earlier
#
# Replace the latent of token 6 and compare all outputs, bit by bit. Tokens 6 to 9 have it in their
# window and change. Everybody else keeps every bit.

# %%
before = attend(queries, latents, rows, sink)
other = latents.copy()
other[6] = np.random.default_rng(2).standard_normal(8)
after = attend(queries, other, rows, sink)
changed = np.any(before != after, axis=(1, 2))
print("token   ", "".join(f"{t:3}" for t in range(12)))
print("changed ", "".join("  *" if c else "  ." for c in changed))
same("who sees token 6", np.flatnonzero(changed), [6, 7, 8, 9])
same("tokens before it keep their bits", after[:6], before[:6])
same("tokens beyond the window, too", after[10:], before[10:])

# %% [markdown]
# Does a model of such layers see only 128 tokens back? No. Token 9 has read token 6, so in the
# next layer token 12 reads something of token 6 through it. Each layer adds $W - 1$. Count with the
# pattern itself: multiply it.

# %%
reach, band = {}, np.tril(np.ones((40, 40))) - np.tril(np.ones((40, 40)), -W)
for layers in (1, 2, 3):
    seen = np.linalg.matrix_power(band, layers)
    reach[layers] = 39 - int(np.flatnonzero(seen[39]).min())
    print(f"{layers} layers of window 4: {reach[layers]} tokens back")
assert reach == {1: 3, 2: 6, 3: 9}, "each layer adds W - 1"
print(f"40 layers of window 128: {40 * 127} tokens back, but only through others")

# %% [markdown]
# ## The ring
#
# Behind the window nothing is read, so nothing need be kept. $W$ rows are enough: token $j$ lives
# in row $j \bmod W$ and takes the place of token $j - W$, which has just left the window.

# %%
ring = ["."] * W
for j in range(7):
    ring[j % W] = str(j)
    print(f"after token {j}:  " + "  ".join(f"{who:>2}" for who in ring))
assert ring == ["4", "5", "6", "3"], "the last four tokens, not in order"

# %% [markdown]
# The order in the ring does not matter to a sum, up to rounding, since each key has its position
# inside (chapter 02). A call may bring several tokens. Its queries read the ring *as it was before
# the call*, followed by the call's own rows: old token $j$ is row $j \bmod W$, new token $j$ is
# row $W + (j - \text{first})$.


# %%
def call_rows(first, count, width):
    """A call that brings tokens first .. first + count - 1 -> (count, W) rows of [ring | new]"""
    out = np.full((count, width), -1)
    for i in range(count):
        t = first + i
        seen = range(max(0, t - width + 1), t + 1)
        for place, j in enumerate(seen):
            out[i, place] = width + j - first if j >= first else j % width
    return out


def in_calls(lengths, read_first=True):
    """The 12 tokens in calls of these lengths -> (12, H, C); the ring is carried along."""
    ring, out, first = np.zeros((W, 8), np.float32), [], 0
    for count in lengths:
        new = latents[first : first + count]
        last = np.arange(max(first, first + count - W), first + count)  # what will stay
        old = ring.copy()
        ring[last % W] = latents[last]
        records = np.concatenate([old if read_first else ring, new])  # (W + count, C)
        at = call_rows(first, count, W)
        out.append(attend(queries[first : first + count], records, at, sink))
        first += count
    return np.concatenate(out)


print("a call that brings tokens 5, 6, 7; the ring holds 4 1 2 3:")
for t, at in zip((5, 6, 7), call_rows(5, 3, W), strict=True):
    print(f"query {t} reads rows", at)
close("rows in another order", attend(queries, latents, rows[:, ::-1], sink), before, within=1e-6)
for lengths in ([12], [1] * 12, [5, 3, 4], [3, 9]):
    close(f"calls of {lengths} = all at once", in_calls(lengths), before, within=1e-6)

# %% [markdown]
# **Break it.** Write the new tokens into the ring first, then read. In a call of one token this
# goes unnoticed: the row it overwrites has just left the window. In a call of three, token 5 finds
# tokens 6 and 7 where 2 and 3 were.

# %% tags=["break"]
for lengths in ([1] * 12, [5, 3, 4]):
    wrong = in_calls(lengths, read_first=False)
    off = np.abs(wrong - before).max(axis=(1, 2))
    print("calls of", lengths)
    print("  difference ", "".join(f"{d:5.2f}" for d in off))
    if max(lengths) == 1:
        assert off.max() < 1e-6, "one token a call hides the mistake"
assert off[5] > 0.1, "several tokens a call show it"
assert off[7] < 1e-6, "the last of the call overwrote only what it no longer needs"

# %% [markdown]
# ## Count the bytes
#
# A record is 512 FP8 numbers and a scale for every 32 of them: 528 bytes (chapter 01). There are
# 128 records a layer and 40 layers. The window is stored in FP8 while the compressed entries are
# in FP4.

# %%
record = 512 + 512 // 32
request = 40 * 128 * record
usual = 64 * 2 * 512 * 2  # 64 heads, key and value, bf16
print(f"one record        {record:10,} bytes")
print(f"all rings         {request:10,} bytes a request, at any length")
print(f"64 keys and values {usual:9,} bytes a token and layer in bf16, {usual / record:.0f} times")
crossing = request / 890
print(f"global KV (890 bytes a token) passes the rings at {crossing:,.0f} tokens")
assert request == 2_703_360, "bytes of a request's rings"

context = 2.0 ** np.linspace(0, 20, 200)
with figure("The rings stop growing at 128 tokens, global KV passes them at 3,037") as ax:
    rings = np.minimum(context, 128) * 40 * record
    ax.plot(context, rings, color=BLUE)
    ax.plot(context, 890 * context, color=ORANGE)
    ax.plot(crossing, request, "o", color=GREY)
    ax.text(90, 4e6, "window rings", color=BLUE, ha="right")
    ax.text(3e4, 8e7, "global KV, 890 bytes a token", color=ORANGE, ha="right")
    ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="bytes")
    ax.set_xticks([1, 128, 3037, 65_536, 1_048_576], ["1", "128", "3,037", "65,536", "1,048,576"])
    ax.set_xticks([], minor=True)
    ax.grid(axis="y")
assert round(crossing) == 3037, "where both are equal"

# %% [markdown]
# ## The module gives the same numbers
#
# [window_index](../dsv41/window.py#window_index) is our `call_rows` for many requests at once,
# [window_records](../dsv41/window.py#window_records) lays out the rings and the new rows, and
# [sparse_attn](../dsv41/sparse_attn.py#sparse_attn) is our `attend` over two lists.
# [make_batch](../dsv41/batch.py#make_batch) says which row belongs to whom. Two requests share
# nothing but the array.
#
# Two corners. A query without any row gives 0, whatever its sink. And a row behind the list may
# hold NaN bytes; it must not be touched, since $0 \cdot \mathrm{NaN}$ is NaN.

# %%
from dsv41 import FLOAT32, OFFICIAL, preset
from dsv41.batch import make_batch
from dsv41.ledger import kv_bytes
from dsv41.sparse_attn import sparse_attn
from dsv41.window import window_index, window_records

nothing, no_rows = latents[:0], np.zeros((12, 0), np.int64)
batch = make_batch([np.zeros(12)], starts=[0], slots=[0])
at = window_index(batch, W)
kv = window_records(np.zeros((1, W, 8), np.float32), latents)  # (W + 12, C)
same("rows of one call", at, call_rows(0, 12, W))
module = sparse_attn(queries, kv, at, nothing, no_rows, sink, FLOAT32)
close("attention over the rows", module, before, within=1e-6)

two = window_index(make_batch([np.zeros(3), np.zeros(1)], starts=[5, 9], slots=[0, 1]), W)
alone = call_rows(5, 3, W)
same("first of two requests", two[:3], np.where(alone < W, alone, alone + W))  # 2 rings first
same("second of two requests", two[3], [W + 6 % W, W + 7 % W, W + 8 % W, 2 * W + 3])

empty = np.full((12, W), -1)
zero = sparse_attn(queries, kv, empty, nothing, no_rows, sink, FLOAT32)
same("nothing to see gives zeros", zero, np.zeros_like(queries))
kv[:W] = np.nan
same("NaN in unread rows does no harm",
     sparse_attn(queries, kv, at, nothing, no_rows, sink, FLOAT32), module)  # fmt: skip

flash = preset("v4.1-flash")
same("window and layers", (flash.sliding_window, flash.num_hidden_layers), [128, 40])
same("bytes of a record", OFFICIAL.window_kv.record_bytes(flash.head_dim), record)
same("bytes of the rings", kv_bytes(flash).window, request)

# %% [markdown]
# What we left out so far is how a latent is made: a matrix, the norm and the rotation of chapter
# 02, the FP8 of chapter 01. Put together they are
# [window_kv](../dsv41/window.py#window_kv). The rotated channels are quantised like the others.

# %%
from dsv41.formats import round_bf16
from dsv41.init import random_params
from dsv41.ops import linear_fp8, rmsnorm
from dsv41.rope import frequencies, rotate
from dsv41.window import window_kv

tiny = preset("tiny")
p = random_params(tiny, np.random.default_rng(3))["layers"][0]["attn"]
x = np.random.default_rng(4).standard_normal((5, tiny.hidden_size)).astype(np.float32)
x = round_bf16(x)
freqs, positions = frequencies(tiny, 0), np.arange(5)

latent = linear_fp8(x, p["wkv"]["weight"], OFFICIAL)
latent = rmsnorm(latent, p["kv_norm"]["weight"], tiny.rms_norm_eps, OFFICIAL)
turned = round_bf16(rotate(latent, positions, freqs))  # bf16 before FP8, as in the release
records = OFFICIAL.window_kv.encode(turned)
same("records of the module", window_kv(x, p, positions, freqs, tiny, OFFICIAL), records)
print("records", records.shape, records.dtype, "for latents of", tiny.head_dim, "channels")

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. A request has `n` tokens. Which token is in row `r` of its ring? Rows not yet written give −1.
# 2. One new token `t`, already written into the ring: which rows does it read, by ascending
#    position, −1 behind them?
# 3. A kernel without sinks returns its output and $L = \ln \sum_i e^{s_i}$. Add the sink
#    afterwards. The inputs include sinks of −∞ and of 1000.


# %% tags=["exercise"]
def token_in(r, n, width):
    """row r of a ring of `width`, n tokens written -> int, a position, or -1"""
    return ...


check("03.token_in", token_in)


# %% tags=["exercise"]
def decode_rows(t, width):
    """t int, width int -> (width,) int, rows of the ring"""
    return ...


check("03.decode_rows", decode_rows)


# %% tags=["exercise"]
def add_sink(o, L, sink):
    """o (H, C) f64 without sink, L (H,) f64, sink (H,) f64 -> (H, C) f64 with it"""
    return ...


check("03.add_sink", add_sink)

# %% [markdown]
# ## What we learned
#
# - One latent per token serves all heads as key and as value: 528 bytes.
# - The sink takes weight and brings no value. It is not scaled: 23/7, not 23 / (4 + √3).
# - A query sees itself and $W - 1$ tokens before it. −1 must be masked: NumPy reads it as last.
# - A future token changes no bit of an earlier output. Layers on top of each other see further.
# - Token $j$ lives in row $j \bmod W$. A call reads the old ring before it writes.
# - 2,703,360 bytes of rings a request, at any length.
#
# Worked solutions: [solutions/03_window_attention.py](solutions/03_window_attention.py). Next: [04
# The compressor](04_compressor.ipynb). All chapters: [README.md](README.md).
