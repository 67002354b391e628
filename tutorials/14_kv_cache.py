# %% [markdown]
# # 14 · The KV cache
#
# **Where do 890 bytes come from, and why does a running engine report another number?**
#
# The report gives one figure for the memory of DeepSeek-V4.1-Flash: 890 bytes per token of context.
# It does not say how the figure is made up. This chapter derives it record by record, then measures
# it on the arrays of a cache. It shows what the 890 leave out, and computes the report's two
# efficiency figures: 1(b), bytes, and 2, arithmetic.
#
# You need NumPy and chapter 01 (288, 528 and 68 bytes a record). Chapter 07 says which layer owns
# what; here its result is used. 20 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/14_kv_cache.py`.
#
# Sources: the V4.1 report, Figures 1(b) and 2, and §2.4.4; config.json for the plan; config.json of
# V3.2 and V4-Flash, arXiv 2401.02954 for V1, and FlashMLA's tests for the records of V3.2 and V4.
# The modules that this page arrives at: [cache.py](../dsv41/cache.py),
# [ledger.py](../dsv41/ledger.py) and [figures.py](../dsv41/figures.py).

# %%
from itertools import pairwise

import numpy as np

from lib.page import BLUE, GREEN, GREY, INK, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One sum
#
# Four layers own global KV. Each of these *sources* $s$ stores one entry for $m_s$ tokens: a main
# KV record and an index key. The other layers store nothing that grows. So
#
# $$\text{bytes per token} = \sum_{s \in K} \frac{288 + 68}{m_s}$$
#
# The encoder is layers 0 to 19, the decoder 20 to 39.

# %%
from dsv41 import figures, ledger
from dsv41.cache import Cache
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL

real = preset("v4.1-flash")
MAIN, KEY, WINDOW = 512 // 2 + 512 // 16, 128 // 2 + 128 // 32, 512 + 512 // 32
m_of = {s: real.compress_ratios[s] for s in real.kv_source_layer_ids}  # source -> m

print("source  half     m   main KV  index key   bytes per token")
half = {"encoder": 0, "decoder": 0}
for s, m in m_of.items():
    name = "encoder" if s < 20 else "decoder"
    half[name] += (MAIN + KEY) / m
    print(f"{s:6}  {name}  {m}   {MAIN / m:7.0f}  {KEY / m:9.0f}   {(MAIN + KEY) / m:15.0f}")
print(f"encoder {half['encoder']:.0f} + decoder {half['decoder']:.0f} = {sum(half.values()):.0f}")
entries = sum(1 / m for m in m_of.values())
print(f"main KV {entries * MAIN:.0f} + index keys {entries * KEY:.0f} = {entries * 356:.0f}")
assert half == {"encoder": 534, "decoder": 356}, "534 bytes in the encoder, 356 in the decoder"
assert (entries * MAIN, entries * KEY) == (720, 170), "720 bytes of main KV, 170 of index keys"

# %%
with figure("890 bytes per token: three sources share pairs, one does not") as ax:
    left = 0
    for s, m in m_of.items():
        for width, colour in ((MAIN / m, BLUE), (KEY / m, ORANGE)):
            ax.barh(0, width, left=left, color=colour, edgecolor="white", height=0.5)
            ax.text(left + width / 2, 0, f"{width:.0f}", color="white", ha="center", va="center")
            left += width
        middle = left - (MAIN + KEY) / m / 2
        ax.text(middle, 0.33, f"layer {s}, m = {m}", ha="center", color=INK)
    for a, b, name in ((0, 534, "encoder 534"), (534, 890, "decoder 356")):
        ax.plot([a + 4, b - 4], [-0.36, -0.36], color=INK, linewidth=1)
        ax.text((a + b) / 2, -0.53, name, ha="center", color=INK, fontweight="bold")
    ax.text(0, 0.62, "main KV", color=BLUE, fontweight="bold")
    ax.text(150, 0.62, "index keys", color=ORANGE, fontweight="bold")
    ax.set(ylim=(-0.65, 0.8), xlim=(0, 892), yticks=[], xlabel="bytes per token")
    ax.spines["left"].set_visible(False)

# %% [markdown]
# ## No token costs 890
#
# 890 is a mean. A source with $m = 2$ writes nothing for an even token: it waits for the pair's
# second one. Count what is on the books after each token, in a loop that knows nothing but the
# rule, then for all lengths at once:
#
# $$\text{stored}(n) = \sum_s 356 \cdot \lfloor n / m_s \rfloor$$


# %%
def written_by_loop(tokens):
    """-> bytes that each token adds to the global cache."""
    added = []
    for t in range(tokens):
        now = 0
        for m in m_of.values():
            if t % m == m - 1:  # the last token of its group
                now += MAIN + KEY
        added.append(now)
    return added


def stored(n):
    """n tokens (int or array) -> bytes of global records."""
    return sum((MAIN + KEY) * (n // m) for m in m_of.values())


print("token     ", "  ".join(f"{t:5}" for t in range(8)))
print("adds      ", "  ".join(f"{b:5,}" for b in written_by_loop(8)))
print("stored    ", "  ".join(f"{b:5,}" for b in np.cumsum(written_by_loop(8))))
print("890 (t+1) ", "  ".join(f"{890 * (t + 1):5,}" for t in range(8)))
same("all lengths at once = the loop", stored(np.arange(1, 1001)), np.cumsum(written_by_loop(1000)))
assert set(written_by_loop(1000)) == {356, 1424}, "a token adds 356 or 1,424 bytes, never 890"
assert stored(1000) == 890 * 1000 and 890 * 999 - stored(999) == 534, "behind by 534 at odd n"

# %% [markdown]
# ## Pages
#
# Requests come and go, so records lie in *pages*. A page holds the entries of `page_tokens`
# neighbouring tokens of one request, and has the same number in every pool. A source with ratio $m$
# gives a page $P / m$ rows:
#
# $$\text{row}(j) = \text{pages}[\lfloor j\,m / P \rfloor] \cdot \tfrac{P}{m}
#   + j \bmod \tfrac{P}{m}$$
#
# Take a real cache of the released plan with $P = 8$. A first request takes 15 pages and leaves.
# Then A grows to 20 tokens, while B comes in between.

# %%
P = 8
cache = Cache(real, OFFICIAL, page_tokens=P)
first = cache.add()
cache.reserve(first, 15 * P)
cache.release(first)
a, b = cache.add(), cache.add()
for slot, length in ((a, 6), (b, 9), (a, 20)):
    cache.reserve(slot, length)
print("pages of A, 20 tokens:", cache.pages[a])
print("pages of B,  9 tokens:", cache.pages[b])
assert cache.pages == [[15, 2, 3], [0, 1]], "pages in order of need, not in order of number"


def row(pages, entry, m):
    per_page = P // m
    return pages[entry // per_page] * per_page + entry % per_page


for s, m in m_of.items():
    by_hand = [row(cache.pages[a], entry, m) for entry in range(20 // m)]
    if s in (14, 20):
        print(f"layer {s}, m = {m}: A's rows", *by_hand)
    same(f"rows of layer {s}: by hand = cache.rows", cache.rows(s, a, np.arange(20 // m)), by_hand)

# %%
with figure("One page list for four sources: page 2 is page 2 in every pool") as ax:
    owner = {page: (slot, i) for slot in (a, b) for i, page in enumerate(cache.pages[slot])}
    for s, bottom in ((20, 1.5), (14, 0)):
        m = m_of[s]
        for page in range(16):
            slot, i = owner.get(page, (None, 0))
            for r in range(P // m):
                used = slot is not None and i * P + r * m + m <= {a: 20, b: 9}[slot]
                colour = "white" if slot is None else {a: BLUE, b: ORANGE}[slot]
                at = page + r * m / P
                ax.bar(at, 0.8, m / P, bottom, align="edge", color=colour, alpha=1 if used else 0.2)
                ax.plot([at, at], [bottom, bottom + 0.8], color="white", linewidth=0.5)
            ax.bar(page, 0.8, 1, bottom, align="edge", fill=False, edgecolor=GREY, linewidth=0.8)
        ax.text(-0.2, bottom + 0.4, f"layer {s}\nm = {m}", ha="right", va="center")
    for page, (slot, i) in owner.items():
        text = f"{'A' if slot == a else 'B'}\n{i * P}–{i * P + P - 1}"
        ax.text(page + 0.5, 2.4, text, ha="center", fontsize=7, color=BLUE if slot == a else ORANGE)
    ax.text(8.5, 2.45, "free", color=GREY, ha="center")
    ax.text(3.5, -0.9, "pale: reserved, empty", ha="center", fontsize=8)
    ax.set(xlim=(-1.8, 16.1), ylim=(-1, 3), yticks=[], xlabel="page number")
    ax.set_xticks(np.arange(16) + 0.5, range(16))
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)

# %% [markdown]
# ## Measured on the arrays
#
# Write 20 tokens' entries for A. Then ask the arrays, not the formula: how many bytes have been
# stored, how many does a page hold, and does A read back what it wrote?

# %%
rng = np.random.default_rng(1)
for s, m in m_of.items():
    numbers = np.arange(20 // m)
    kv = OFFICIAL.main_kv.encode(rng.standard_normal((len(numbers), 512)).astype(np.float32))
    keys = OFFICIAL.index.encode(rng.standard_normal((len(numbers), 128)).astype(np.float32))
    cache.write_entries(s, numbers, np.full(len(numbers), a), kv, keys)  # (n, 288), (n, 68)
    assert np.array_equal(cache.main_kv[s][cache.rows(s, a, numbers)], kv), "A reads its own KV"
    assert np.array_equal(cache.index_keys(s, a, len(numbers)), keys), "A reads its own keys"

pools = [(s, pool[s]) for s in m_of for pool in (cache.main_kv, cache.index)]
filled = sum(int(pool.any(axis=1).sum()) * pool.shape[1] for _, pool in pools)
print(f"filled rows: {filled:,} bytes for 20 tokens = {filled / 20:.0f} a token")
capacity = sum(pool.nbytes for _, pool in pools)
print(f"all pools: {capacity:,} bytes for 16 pages x {P} = {capacity / (16 * P):.0f} a token")
block = cache.get_block(a, 0)
print(f"one page of A as bytes: {len(block):,} = {P} x {len(block) / P:.0f}")
same("filled rows = the sum", filled, stored(20))
same("pools: 890 a token", capacity / (16 * P), 890.0)
same("a page: 890 a token", len(block), 890 * P)
same("no row of B was touched", cache.main_kv[20][cache.rows(20, b, np.arange(9))].any(), False)

# %% [markdown]
# **Break it.** Eight layers make a choice of entries, so count index keys for eight layers. The
# total looks reasonable. It is wrong: the four Reindex layers have queries of their own, and score
# the keys of layer 20. A choice is not a key.

# %% tags=["break"]
index_m = [real.compress_ratios[s] for s in real.index_source_layer_ids]
wrong = sum(MAIN / m for m in m_of.values()) + sum(KEY / m for m in index_m)
right = sum((MAIN + KEY) / m for m in m_of.values())
print(f"layers with a choice: {real.index_source_layer_ids}")
print(f"layers with keys:     {tuple(cache.index)}")
print(f"wrong: {wrong:.0f} bytes per token, right: {right:.0f}, too much: {wrong - right:.0f}")
assert wrong == 1162 and wrong - right == 4 * KEY, "four keys that nobody stores"
same("the cache has index pools for the KV sources only", list(cache.index), list(cache.main_kv))

# %% [markdown]
# The record format decides as much as the plan. The same four sources with other records:

# %%
formats = {"released: 288 + 68": (MAIN, KEY), "V4's record: 584 + 68": (584, KEY),
           "bf16: 1024 + 256": (1024, 256), "float32: 2048 + 512": (2048, 512)}  # fmt: skip
for name, (main, key) in formats.items():
    print(f"{name:22} {entries * (main + key):6,.0f} bytes per token")
same("float32, measured", Cache(real, FLOAT32).bytes_per_token(), entries * (2048 + 512))
same("released, measured", Cache(real, OFFICIAL).bytes_per_token(), 890.0)
assert entries * (584 + 68) == 1630, "V4's record (bf16 RoPE part) in V4.1's plan"

# %% [markdown]
# ## What is not in the 890
#
# Some state has the same size for a request of one token and of a million:
#
# - 40 window rings of 128 records of 528 bytes;
# - the *carry*: at $m = 2$, two float32 vectors of the token that waits for its pair;
# - the Engram *history*: the classes of the last three tokens, int64.

# %%
ring, carry, history = 40 * 128 * WINDOW, 3 * 2 * 512 * 4, 3 * 8
fixed = ring + carry + history
print(f"window rings  40 x 128 x 528  {ring:9,}   encoder half {ring // 2:,}")
print(f"carry          3 x 2 x 512 x 4 {carry:8,}")
print(f"history        3 x 8          {history:9,}")
print(f"per request                   {fixed:9,} = {fixed / 890:,.0f} tokens x 890")
same("rings, measured", sum(w[0].nbytes for w in cache.window), ring)
same("carry, measured", sum(c[0].nbytes for c in cache.carry.values()), carry)
same("history, measured", cache.history[0].nbytes, history)
same("bytes_per_request", cache.bytes_per_request(), fixed)
assert round(ring / 1e6, 2) == 2.70, "2.70 MB of window KV per request"

# %% [markdown]
# A request shorter than 3,051 tokens keeps more in its fixed part than in its global KV.
#
# ## "Bytes per token", as an engine reports it
#
# Divide what a request holds by its length, and the answer depends on the length:
#
# $$\frac{\text{held}(n)}{n} = \frac{\text{fixed}}{n} + 890 + \text{what the last page wastes}$$
#
# So measure several lengths and fit a line to the *totals*. Its slope is the price of a token.


# %%
def held(cache, slot):
    """Bytes that a request holds: its pages, full or not, and the fixed part."""
    page = len(cache.get_block(slot, 0))
    return len(cache.pages[slot]) * page + cache.bytes_per_request()


def measure(lengths):
    cache = Cache(real, OFFICIAL, page_tokens=64)
    slot, totals = cache.add(), []
    for length in lengths:  # ascending
        cache.reserve(slot, length)
        totals.append(held(cache, slot))
    return np.array(totals)


def fit(lengths, totals):
    slope, constant = np.polyfit(lengths, totals, 1)
    return constant, slope


whole = 64 * 2 ** np.arange(9)  # 64 ... 16,384: no page is left half empty
odd = np.sort(np.random.default_rng(2).integers(1, 16_384, 400))
print("tokens   held bytes   held / tokens")
for n, total in list(zip(whole, measure(whole), strict=True))[::2]:
    print(f"{n:6,}  {total:11,}  {total / n:14,.0f}")
for name, lengths in (("full pages", whole), ("any length", odd)):
    constant, slope = fit(lengths, measure(lengths))
    print(f"{name}: {constant:,.0f} + {slope:.1f} a token")
close("full pages: the fit finds both parts", fit(whole, measure(whole)), (fixed, 890), within=0.1)
constant, slope = fit(odd, measure(odd))
close("any length: slope", slope, 890, within=2)
print(f"{(constant - fixed) / 890:.0f} tokens more in the constant: half a page of 64")
assert 20 < (constant - fixed) / 890 < 44, "the last page is half empty on average"

# %%
lengths = np.unique(np.geomspace(16, 1 << 20, 200).astype(int))
with figure("The same cache: 170,000 bytes per token at 16 tokens, 893 at a million") as ax:
    per_token = (fixed + 890 * 64 * -(-lengths // 64)) / lengths
    ax.plot(lengths, per_token, color=BLUE, linewidth=2)
    ax.axhline(890, color=ORANGE, linewidth=1.2, linestyle="--")
    ax.text(20, 600, "890, the slope", color=ORANGE, fontweight="bold", va="center")
    ax.text(300, 40_000, "held / tokens", color=BLUE, fontweight="bold")
    n = fixed / 890
    ax.plot([n], [1780], "o", color=INK, markersize=5)
    ax.annotate("3,051 tokens: half is fixed", (n, 1780), (8, 6), textcoords="offset points")
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes per token", ylim=(400, 4e5))
    ax.set_xticks([100, 10_000, 1_000_000], ["100", "10,000", "1,000,000"])
    ax.set_yticks([1000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
    ax.grid(axis="y")
print(f"16 tokens: {per_token[0]:,.0f}, 1M: {per_token[-1]:.1f}")
assert per_token[0] > 170_000 and 892 < per_token[-1] < 893, "far above, and close to 890"

# %% [markdown]
# **Break it.** Read "bytes per token" off a run of 1,000 tokens and multiply by a million.

# %% tags=["break"]
n = 1 << 20
(short,) = measure([1000])
wrong, right = short / 1000 * n, fixed + 890 * n
print(f"1,000 tokens hold {short:,} bytes: {short / 1000:,.0f} a token")
print(f"1M tokens, wrong: {wrong / 1e9:.2f} GB   right: {right / 1e9:.3f} GB")
print(f"of the right one, global {890 * n / 1e9:.3f} GB, fixed {fixed / 1e9:.4f} GB")
assert wrong > 4 * right, "four times too much"

# %% [markdown]
# ## Figure 1(b): bytes per token through the models
#
# The same sum, for the ancestors. V1 keeps K and V of 8 heads in every layer. V3.2 keeps one latent
# (512 FP8, four float32 scales, 64 bf16) and a key of 132 bytes in every layer. V4-Flash keeps
# 584 + 68 bytes for 4 tokens in 21 layers, and 584 bytes for 128 tokens in 20.

# %%
by_hand = {
    "V1-67B": 95 * 2 * 8 * 128 * 2,
    "V3.2": 61 * ((512 + 4 * 4 + 64 * 2) + (128 + 4)),
    "V4-Flash": 21 * (584 + 68) / 4 + 20 * 584 / 128,
    "V4.1-Flash": entries * (MAIN + KEY),
}
published = {"V1-67B": 389_120, "V3.2": 48_068, "V4-Flash": 3_514, "V4.1-Flash": 890}
for name, value in by_hand.items():
    print(f"{name:10}  {value:10,.2f}   report {published[name]:8,}")
    same(f"{name}: the ledger's bytes", ledger.kv_bytes(name).hbm, float(value))
close("the report's numbers", list(by_hand.values()), list(published.values()), within=0.5)
v1, v32, v4, v41 = by_hand.values()
print(f"V1 / V4.1 {v1 / v41:.1f}   V3.2 / V4.1 {v32 / v41:.1f}   V4 / V4.1 {v4 / v41:.2f}")
ratios = [round(v1 / v41), round(v32 / v41), round(v4 / v41, 1)]
assert ratios == [437, 54, 3.9], "437, 54 and 3.9 times less"

# %%
with figure("Figure 1(b): global KV is 437 times smaller than in V1") as ax:
    values = list(by_hand.values())
    ax.bar(list(by_hand), values, width=0.55, color=[GREY, GREEN, BLUE, ORANGE])
    for place, value in enumerate(values):
        ax.text(place, value * 1.2, f"{value:,.0f}", ha="center", fontweight="bold")
    for place, (before, after) in enumerate(pairwise(values)):
        ax.text(place + 0.5, (before * after) ** 0.5, f"÷ {before / after:.1f}", ha="center")
    ax.set(yscale="log", ylim=(100, 1.5e6), ylabel="bytes per token")
    ax.set_yticks([100, 1000, 10_000, 100_000], ["100", "1,000", "10,000", "100,000"])
    ax.set_yticks([], minor=True)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y")

# %% [markdown]
# The last step has two causes, of about the same size: fewer entries, and smaller ones. The bars
# leave out what a request keeps at any length, and so do the 3.9.

# %%
v4_entries = 21 / 4 + 20 / 128
fewer, smaller = v4_entries / entries, (v4 / v4_entries) / (MAIN + KEY)
print(f"entries per token {v4_entries:.2f} -> {entries:.2f}: {fewer:.2f} times fewer")
print(f"bytes per entry   {v4 / v4_entries:.0f} -> {MAIN + KEY}:   {smaller:.2f} times smaller")
close("together", fewer * smaller, v4 / v41, within=1e-9)
for name in ("V4-Flash", "V4.1-Flash"):
    kept = ledger.kv_bytes(name)
    print(f"{name:10}: per request {kept.per_request / 1e6:5.2f} MB, of it rings",
          f"{kept.window / 1e6:.2f} MB")  # fmt: skip
assert fewer > 2 and smaller > 1.8, "both halves matter"
same("the ledger's fixed part is the cache's", ledger.kv_bytes(real).per_request, fixed)

# %% [markdown]
# ## Figure 2: arithmetic per generated token
#
# A FLOP costs 1 in BF16, 1/2 in FP8, 1/4 in FP4 (the report's weights). Which operator runs in
# which precision it does not say; the choice here is the ledger's. Matrices do not depend on the
# context $N$. Two terms do: attention reads keys, the indexer scores them.
#
# $$F(N) = \text{const} + \sum_L 2\,n_h (d_k + d_v)\,\text{keys}_L(N)
#   + \sum_L 2\,p_I\,n_I\,d_I\,\text{scored}_L(N)$$
#
# First a walk through the 40 layers, for one context. Then closed forms for all contexts. Layers
# that choose are the 8 index sources; those behind layer 20 score at most $2048 \cdot 8$ keys.


# %%
def walk(N):
    """-> keys that all layers attend to, keys that all layers score."""
    keys = scored = 0
    for layer in range(40):
        keys += min(N, 128)  # the window
        m = real.compress_ratios[layer]
        if m:
            keys += min(N // m, 512)
            if layer in real.kv_source_layer_ids:
                scored += N // m
            elif layer in real.index_source_layer_ids:
                scored += min(N // m, 2048 * 8)
    return keys, scored


def v41_counts(N):
    keys = 40 * np.minimum(N, 128) + 18 * np.minimum(N // 2, 512) + 20 * np.minimum(N, 512)
    return keys, 3 * (N // 2) + N + 4 * np.minimum(N, 16_384)


def v4_counts(N):
    keys = 43 * np.minimum(N, 128) + 21 * np.minimum(N // 4, 512) + 20 * (N // 128)
    return keys, 21 * (N // 4)


def v32_counts(N):
    return 61 * np.minimum(N, 2048), 61 * N


some = np.array([1, 2, 127, 1000, 1001, 1025, 16_385, 1 << 20])
same("closed form = layer by layer", np.stack(v41_counts(some), axis=1), [walk(n) for n in some])
print("context      keys attended   keys scored")
for n in (1000, 1 << 20):
    print(f"{n:9,}  {walk(n)[0]:16,} {walk(n)[1]:13,}")

N = np.arange(1, (1 << 20) + 1)  # every context up to 1M
# name: counts, heads (d_k + d_v), p_I n_I d_I
SHAPES = {
    "V3.2": (v32_counts, 128 * (576 + 512), 0.5 * 64 * 128),
    "V4-Flash": (v4_counts, 64 * 1024, 0.25 * 64 * 128),
    "V4.1-Flash": (v41_counts, 64 * 1024, 0.25 * 32 * 128),
}
total, parts = {}, {}
for name, (counts, attention, index) in SHAPES.items():
    keys, scored = counts(N)
    full = ledger.decode_flops(name, N)
    parts[name] = full.linear + full.head, 2.0 * attention * keys, 2 * index * scored
    total[name] = sum(parts[name])  # (2^20,)
    same(f"{name}: attention at every context", parts[name][1], full.attention.astype(float))
    same(f"{name}: index at every context", parts[name][2], full.index.astype(float))

print("weighted GFLOP    4K    128K      1M   growth 4K to 1M: attention, index")
for name, F in total.items():
    at = [F[n - 1] / 1e9 for n in (4096, 1 << 17, 1 << 20)]
    grown = [(x[-1] - x[4095]) / 1e9 for x in parts[name][1:]]
    print(f"{name:12}" + "{:8.1f}{:8.1f}{:8.1f}".format(*at), f"  x {at[2] / at[0]:.2f}",
          "  + {:5.1f}, + {:5.1f}".format(*grown))  # fmt: skip
growth = total["V4.1-Flash"][-1] / total["V4.1-Flash"][4095]
close("V4.1 grows by about 1/4 (report, Figure 2)", growth, 1.25, within=0.03)
same("its attention is constant from 1,024 on", np.ptp(parts["V4.1-Flash"][1][1023:]), 0.0)

# %% [markdown]
# In V4.1 the attention does not grow at all behind 1,024 tokens. In V4-Flash it does: 20 layers
# read every 128-token entry. V4.1 starts higher, mostly because of its larger matrices. So the
# curves cross. Count where, with no assumption that they cross once.
#
# These are operations at a price, not times. And the crossing moves with what the report leaves
# open: two other choices of precision stand at the end.

# %%
cheaper = total["V4.1-Flash"] < total["V4-Flash"]  # (2^20,)
changes = N[1:][cheaper[1:] != cheaper[:-1]]
print("constant part: V4-Flash {:.1f}, V4.1 {:.1f}".format(
    *(parts[name][0] / 1e9 for name in ("V4-Flash", "V4.1-Flash"))))  # fmt: skip
print("V4.1 becomes cheaper at", *changes, f"= {changes[0] // 128} x 128")
for n in (changes[0] - 1, changes[0]):
    print(f"N = {n:,}: V4-Flash {total['V4-Flash'][n - 1] / 1e9:.4f},",
          f"V4.1 {total['V4.1-Flash'][n - 1] / 1e9:.4f}")  # fmt: skip
same("one crossing, at 106 thousand tokens", changes, [105_984])
same("the ledger's search finds it", ledger.crossing("V4.1-Flash", "V4-Flash"), int(changes[0]))
assert changes[0] % 128 == 0, "it falls on a new 128-token entry of V4-Flash"

moved = {}
for name, price_a, price_i in (
    ("as above", 1, 1),
    ("attention in FP8", 0.5, 1),
    ("index scores in FP8", 1, 2),
):
    new, old = (c + price_a * a + price_i * i for c, a, i in
                (parts["V4.1-Flash"], parts["V4-Flash"]))  # fmt: skip
    moved[name] = int(N[new < old][0])
    print(f"{name:20} {moved[name]:8,}")
same("a crossing for each choice", list(moved.values()), [105_984, 126_208, 75_888])

# %%
with figure("Figure 2: below 106 thousand tokens V4-Flash needs less arithmetic") as ax:
    shown = np.unique(np.geomspace(1024, 1 << 20, 200).astype(int))
    for name, colour in (("V3.2", GREEN), ("V4-Flash", BLUE), ("V4.1-Flash", ORANGE)):
        ax.plot(shown, total[name][shown - 1] / 1e9, color=colour, linewidth=2)
        end = total[name][-1] / 1e9
        label = f"{name}\n{total[name][4095] / 1e9:.1f} → {end:.1f}"
        ax.text(1.1 * (1 << 20), end, label, color=colour, va="center", fontweight="bold")
    height = total["V4-Flash"][changes[0] - 1] / 1e9
    ax.plot(changes, [height], "o", color=INK, markersize=5, zorder=3)
    ax.annotate("105,984", (changes[0], height), (4, -14), textcoords="offset points")
    ax.set(xscale="log", yscale="log", ylim=(10, 1000), xlim=(1024, 1 << 20))
    ax.set_xticks([1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
                  ["1K", "4K", "16K", "64K", "256K", "1M"])  # fmt: skip
    ax.set_xticks([], minor=True)
    ax.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    ax.set(xlabel="tokens of context", ylabel="weighted GFLOP per token")
    ax.grid(axis="y")

# %% [markdown]
# ## The module gives the same numbers
#
# [Cache](../dsv41/cache.py#Cache) measures itself, [kv_bytes](../dsv41/ledger.py#kv_bytes) counts
# from the plan, and [draw_kv_bytes](../dsv41/figures.py#draw_kv_bytes) draws from the ledger.

# %%
kept, own = ledger.kv_bytes(real), Cache(real, OFFICIAL)
same("main KV and index keys", [kept.main, kept.index], [720.0, 170.0])
same("rings, carry, history", [kept.window, kept.carry, kept.history], [ring, carry, history])
same("the cache's 890", own.bytes_per_token(), kept.hbm)
same("the cache's fixed part", own.bytes_per_request(), kept.per_request)
same("the keys scored", [ledger.index_entries(real, int(n)) for n in some], v41_counts(some)[1])
assert list(figures.COLOURS) == list(by_hand), "the module draws the same four models"
try:
    Cache(real, OFFICIAL, page_tokens=7)
except ValueError as refusal:
    message = str(refusal)
print(message)
assert "positive even number" in message, "a page must not split a pair"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Bytes of global KV per token for any plan, with records of 288 and 68 bytes. The inputs include
#    index sources that own no keys.
# 2. Bytes that a request of $n$ tokens holds in the released plan, reserved pages and fixed part
#    included. Mind the last page.
# 3. An engine reports bytes *per token* for requests of several lengths. Find the fixed part and
#    the slope.


# %% tags=["exercise"]
def plan_bytes(ratios, kv_sources, index_sources):
    """list of m by layer, list, list -> float, bytes per token"""
    return ...


check("14.plan_bytes", plan_bytes)


# %% tags=["exercise"]
def request_bytes(n, page_tokens):
    """n >= 1 tokens, even page size -> int"""
    return ...


check("14.request_bytes", request_bytes)


# %% tags=["exercise"]
def fixed_and_slope(lengths, per_token):
    """lengths (N,), reported bytes per token (N,) -> [fixed bytes, bytes of one more token]"""
    return ...


check("14.fixed_and_slope", fixed_and_slope)

# %% [markdown]
# ## What we learned
#
# - 890 = 3 · 356 / 2 + 356: 534 in the encoder, 356 in the decoder; 720 of main KV, 170 of keys.
# - No token costs 890. An even one adds 356, an odd one 1,424.
# - Eight layers choose, four have keys. Counting eight gives 1,162.
# - A request also holds 2,715,672 bytes at any length, nearly all of it window rings. "Bytes per
#   token" of a short run says little: fit fixed + slope.
# - 437, 54 and 3.9 times less than V1, V3.2 and V4-Flash. The 3.9 is 2.2 times fewer entries, 1.8
#   times smaller ones.
# - Decode grows by a quarter from 4K to 1M, all of it index scores. Against V4-Flash it pays from
#   105,984 tokens on, by this count.
#
# Worked solutions: [solutions/14_kv_cache.py](solutions/14_kv_cache.py). Next: [15
# Serving](15_serving.ipynb). All chapters: [README.md](README.md).
