# %% [markdown]
# # 04 · The compressor
#
# **How do two tokens become one entry of the cache, and what became of V4's overlap?**
#
# DeepSeek-V4.1-Flash keeps one compressed entry for each pair of tokens, or for each token. Its
# predecessor V4 kept one for four tokens and let neighbours overlap. This chapter pools by hand,
# channel by channel, cuts the text inside a pair, builds V4's overlap next to it, and counts
# what each has to remember.
#
# You need NumPy, softmax, and [chapter 01](01_number_formats.ipynb) for the record formats. 20
# minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/04_compressor.py`.
#
# Sources: the V4.1 report, §2.3, and `Compressor` in the released `inference/model.py` of V4 and
# of V4.1. The module that this page arrives at: [compress.py](../dsv41/compress.py).

# %%
import math

import numpy as np

from lib.page import BLUE, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## A pair, by hand
#
# Two linear maps turn each token into a candidate $u_t$ and a gate $g_t$, both 512 channels
# wide. Entry $j$ mixes tokens $2j$ and $2j+1$. **Each channel has its own weights**:
#
# $$\text{pooled}_j[c] = \sum_t a_t[c]\, u_t[c], \qquad
# a_t[c] = \frac{e^{g_t[c]}}{\sum_{t'} e^{g_{t'}[c]}}$$
#
# Take seven tokens of two channels. Six make three pairs, the seventh waits.

# %%
U = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
G = [[0, 0], [1, -1], [2, 0], [0, 2], [-1, 3], [-1, 3], [9, 9]]

by_hand = []
for j in range(len(U) // 2):
    entry = []
    for c in range(2):
        e0, e1 = math.exp(G[2 * j][c]), math.exp(G[2 * j + 1][c])
        a0, a1 = e0 / (e0 + e1), e1 / (e0 + e1)
        entry.append(a0 * U[2 * j][c] + a1 * U[2 * j + 1][c])
        print(f"entry {j}, channel {c}: {a0:.3f} x {U[2 * j][c]:2} + {a1:.3f} x {U[2 * j + 1][c]:2}"
              f" = {entry[c]:.6f}")  # fmt: skip
    by_hand.append(entry)

close("first entry", by_hand[0], [2.462117157, 2.537882843], within=1e-9)
close("equal gates give the mean", by_hand[2], [10, 11], within=1e-12)

# %% [markdown]
# Entry 0 takes channel 0 mostly from token 1 and channel 1 mostly from token 0.
#
# All groups and channels at once. Subtract the larger gate first: it cancels in the fraction.


# %%
def pool(u, g):
    """u, g (N, m, C) f32 -> (N, C) f32"""
    e = np.exp(g - g.max(axis=1, keepdims=True))
    return np.sum(u * e, axis=1) / np.sum(e, axis=1)


def show(row):
    return " ".join(f"{number:7.3f}" for number in row)


u, g = np.float32(U), np.float32(G)  # (7, 2)
pairs = u[:6].reshape(3, 2, 2), g[:6].reshape(3, 2, 2)  # (N, m, C)
close("all at once = by hand", pool(*pairs), by_hand, within=1e-6)

# %% [markdown]
# **Break it, twice.** Give each token one gate for all its channels, here the mean of its gates.
# In the first two pairs the channels disagree, so the means are equal and nothing is chosen any
# more.
#
# And leave out the subtraction. Float32 ends at $e^{88}$, and $\infty / \infty$ is NaN.

# %% tags=["break"]
one_gate = np.broadcast_to(pairs[1].mean(axis=2, keepdims=True), (3, 2, 2))
wrong = pool(pairs[0], one_gate)
for j in range(3):
    print(f"entry {j}   a gate per channel {show(pool(*pairs)[j])}   per token {show(wrong[j])}")
same("one gate per token gives plain means here", wrong, [[2, 3], [6, 7], [10, 11]])
assert np.abs(wrong - pool(*pairs)).max() > 0.5, "the choice of each channel is lost"

large = np.float32([[[100.0], [0.0]]])
two = np.float32([[[1.0], [3.0]]])
with np.errstate(over="ignore", invalid="ignore"):
    e = np.exp(large)
    overflow = np.sum(two * e, axis=1) / np.sum(e, axis=1)
print("gates 100 and 0: without the subtraction", overflow[0], "  with it", pool(two, large)[0])
assert np.isnan(overflow[0, 0]) and pool(two, large)[0, 0] == 1, "the first token wins, no NaN"

# %% [markdown]
# With $m = 2$ the softmax is a sigmoid of the difference. That is all a pair can say: which of
# the two, channel by channel.

# %%
difference = g[0:6:2] - g[1:6:2]  # (3, 2)
first = 1 / (1 + np.exp(-difference))
close("softmax of two", first * u[0:6:2] + (1 - first) * u[1:6:2], pool(*pairs), within=1e-6)

# %% [markdown]
# ## A chunk may end inside a pair
#
# Text arrives in chunks of any length, in decoding one token at a time. Pairs are counted from
# the beginning of the **text**, not of the chunk. So the $u$ and $g$ of an open pair wait, in
# float32, until the partner comes.


# %%
def stream(chunks, m=2):
    """chunks: list of (u, g), each (t, C) -> entries per chunk, and what is left waiting"""
    waiting, emitted = np.zeros((0, 2, 2), np.float32), []  # (pending, u or g, C)
    for u_new, g_new in chunks:
        both = np.concatenate([waiting, np.stack([u_new, g_new], axis=1)])
        whole = len(both) // m * m
        groups = both[:whole].reshape(-1, m, 2, 2)  # (N, m, u or g, C)
        emitted.append(pool(groups[:, :, 0], groups[:, :, 1]))
        waiting = both[whole:]
    return emitted, waiting


def cut(sizes):
    edges = np.cumsum(sizes)[:-1]
    return list(zip(np.split(u, edges), np.split(g, edges), strict=True))


for sizes in ([7], [1, 4, 2], [2, 2, 2, 1], [1] * 7):
    emitted, waiting = stream(cut(sizes))
    print(f"chunks {sizes!s:22} entries after each {[len(part) for part in emitted]}")
    same(f"the same three entries in {len(sizes)} chunks", np.concatenate(emitted), pool(*pairs))
    same("and token 6 waits", waiting[0], np.stack([u[6], g[6]]))

# %% [markdown]
# An entry appears with its *last* token. Until then a waiting token is no part of the global
# cache; later tokens see it through the window of the last 128.
#
# **Break it.** Forget what waits and start pairing afresh in each chunk. The chunks 1 + 4 + 2
# still give three entries, the expected number. They are made of other pairs: (1, 2), (3, 4),
# (5, 6).

# %% tags=["break"]
afresh = [stream([chunk])[0][0] for chunk in cut([1, 4, 2])]
wrong = np.concatenate(afresh)
for j in range(3):
    print(f"entry {j}   right {show(pool(*pairs)[j])}   paired afresh {show(wrong[j])}")
same("the shape is right", wrong.shape, pool(*pairs).shape)
close("its first entry is of tokens 1 and 2", wrong[0], [4.462117157, 5.462117157], within=1e-6)
assert np.all(wrong > pool(*pairs) + 0.5), "every entry is wrong, and nothing fails"

# %% [markdown]
# ## V4: groups of four that overlap
#
# V4's CSA layers compress four tokens to one entry, and soften the edge between groups: each
# token has **two** candidates and two gates. The second half of the columns ("own") goes to its
# own entry, the first half ("next") to the entry after it. Entry $i$ is a softmax over eight
# rows:
#
# $$\text{pooled}_i[c] = \sum_{t\,\in\,\text{group } i-1} a_t\, u^{\text{next}}_t[c] \;+
# \sum_{t\,\in\,\text{group } i} a_t\, u^{\text{own}}_t[c]$$
#
# A learned bias for the place in the group, 0 to 3, is added to the gates. The first entry has
# no group before it: those four rows get the gate $-\infty$. First one entry at a time, then
# all.


# %%
def overlap_slowly(u, g, bias, i, m=4):
    """u, g (T, 2C), bias (m, 2C) -> entry i (C,), row by row"""
    C = u.shape[1] // 2
    rows = []
    for place in range(m):
        if i > 0:
            t = (i - 1) * m + place
            rows.append((u[t, :C], g[t, :C] + bias[place, :C]))
        t = i * m + place
        rows.append((u[t, C:], g[t, C:] + bias[place, C:]))
    e = [np.exp(gate) for _, gate in rows]
    return sum(ue[0] * w for ue, w in zip(rows, e, strict=True)) / sum(e)


def overlap(u, g, bias, m=4):
    """u, g (T, 2C), bias (m, 2C) -> (T // m, C)"""
    N, C = len(u) // m, u.shape[1] // 2
    u = u[: N * m].reshape(N, m, 2 * C)
    g = g[: N * m].reshape(N, m, 2 * C) + bias
    none = np.zeros((1, m, C), np.float32)
    u8 = np.concatenate([np.concatenate([none, u[:-1, :, :C]]), u[:, :, C:]], axis=1)  # (N, 8, C)
    g8 = np.concatenate([np.concatenate([none - np.inf, g[:-1, :, :C]]), g[:, :, C:]], axis=1)
    return pool(u8, g8)


draw = np.random.default_rng(1)
u4, g4 = draw.standard_normal((2, 18, 6), np.float32)  # 18 tokens, C = 3
bias = draw.standard_normal((4, 6), np.float32)
slow = [overlap_slowly(u4, g4, bias, i) for i in range(4)]
close("four entries at once = one by one", overlap(u4, g4, bias), slow, within=1e-6)

closed = g4.copy()
closed[:, :3] = -np.inf  # nobody speaks to the next entry
own = pool(u4[:16, 3:].reshape(4, 4, 3), (g4[:16, 3:].reshape(4, 4, 3) + bias[:, 3:]))
same("without the next half it is plain pooling of four", overlap(u4, closed, bias), own)

# %% [markdown]
# Which entries change when one token changes? That is the difference to V4.1 in one experiment.
# Change each token in turn and look.

# %%
u2, g2 = draw.standard_normal((2, 16, 3), np.float32)


def pairs_of(u, g):
    return pool(u.reshape(8, 2, 3), g.reshape(8, 2, 3))


touch4, touch2 = np.zeros((4, 16), int), np.zeros((8, 16), int)  # (entry, token)
for t in range(16):
    changed4, changed2 = u4[:16].copy(), u2.copy()
    changed4[t] += 1
    changed2[t] += 1
    before, after = overlap(u4[:16], g4[:16], bias), overlap(changed4, g4[:16], bias)
    touch4[:, t] = np.any(before != after, axis=1)
    touch2[:, t] = np.any(pairs_of(u2, g2) != pairs_of(changed2, g2), axis=1)

with figure(
    "V4's entries read eight tokens and overlap, V4.1's read two",
    rows=2,
    sharex=True,
    height_ratios=(4, 5),
) as ax:
    for axis, touch, name, m in (
        (ax[0], touch4, "V4, m = 4", 4),
        (ax[1], touch2, "V4.1, m = 2", 2),
    ):
        for i, t in zip(*np.nonzero(touch), strict=True):
            colour = BLUE if t // m == i else ORANGE
            axis.barh(i, 0.88, left=t - 0.44, height=0.8, color=colour)
        axis.set(ylabel="entry", ylim=(len(touch) - 0.4, -0.6), xlim=(-0.6, 15.6))
        axis.set_yticks(range(len(touch)))
        axis.set_title(name, fontsize=9)
        for edge in range(m, 16, m):
            axis.axvline(edge - 0.5, color=GREY, linewidth=0.6)
    ax[0].text(4.3, 3.1, "from the group before", color=ORANGE, ha="center", fontweight="bold")
    ax[0].text(9.5, 0.1, "from its own group", color=BLUE, ha="center", fontweight="bold")
    ax[1].set(xlabel="token", xticks=range(16))

print("entries that a token is in, V4:  ", touch4.sum(axis=0))
print("entries that a token is in, V4.1:", touch2.sum(axis=0))
same("V4: two entries, but for the last group so far", touch4.sum(axis=0), [2] * 12 + [1] * 4)
same("V4.1: one entry", touch2.sum(axis=0), [1] * 16)

# %% [markdown]
# Pairs share nothing. Any even length is a clean edge: what is stored before it depends on
# nothing behind it, and what comes behind needs nothing from before. In V4 the entry after an
# edge needs four more tokens' gates and candidates.
#
# ## Entries and bytes a token
#
# V4.1 compresses less, two to one instead of four to one. It can afford it: not every layer has
# a compressor of its own. Layers 2, 8 and 14 make an entry for each pair, layer 20 one for each
# token, and all other global layers read theirs. V4-Flash has 21 CSA layers ($m = 4$,
# overlapping) and 20 HCA layers ($m = 128$, no overlap), each with its own cache.
#
# A V4 entry is 448 channels in FP8, 64 in bf16, 7 scales and a pad byte (the record of FlashMLA's
# tests). CSA adds an index key. The counts of layers are those of V4-Flash's config.json.

# %%
from dsv41.ledger import kv_bytes

main, key = 512 // 2 + 512 // 16, 128 // 2 + 128 // 32
v4_main = 448 + 2 * 64 + 7 + 1
rows = (
    ("V4 CSA", 21, 4, v4_main + key),
    ("V4 HCA", 20, 128, v4_main),
    ("V4.1 pairs", 3, 2, main + key),
    ("V4.1 layer 20", 1, 1, main + key),
)
print("               caches  tokens/entry  bytes/entry  entries/token  bytes/token")
entries_of, bytes_of = {}, {}
for name, caches, m, size in rows:
    entries, total = caches / m, caches * size / m
    print(f"{name:15}{caches:6}{m:14}{size:13}{entries:15.3f}{total:13.2f}")
    model = name.split()[0]
    entries_of[model] = entries_of.get(model, 0) + entries
    bytes_of[model] = bytes_of.get(model, 0) + total
for model in ("V4", "V4.1"):
    print(f"{model}: {entries_of[model]:.3f} entries and {bytes_of[model]:.2f} bytes a token")
print(f"V4 / V4.1: {bytes_of['V4'] / bytes_of['V4.1']:.2f}")
same("the ledger's V4-Flash", kv_bytes("V4-Flash").hbm, bytes_of["V4"])
same("the ledger's V4.1-Flash", kv_bytes("V4.1-Flash").hbm, bytes_of["V4.1"])

# %% [markdown]
# What waits is smaller too. A V4.1 pair waits for one token: $u$ and $g$, 512 float32 channels
# each. A CSA layer keeps eight rows, each with both halves, and once more for its indexer, which
# has a compressor of its own with 128 channels. An HCA layer gathers 128 rows.

# %%
pair_waits = 2 * 512 * 4
csa_waits = 8 * 2 * (2 * 512) * 4 + 8 * 2 * (2 * 128) * 4
hca_waits = 128 * 2 * 512 * 4
print(f"V4.1, 3 layers x {pair_waits:7,} = {3 * pair_waits:10,} bytes a request")
print(f"CSA, 21 layers x {csa_waits:7,} = {21 * csa_waits:10,}")
print(f"HCA, 20 layers x {hca_waits:7,} = {20 * hca_waits:10,}")
same("V4.1 by the ledger", kv_bytes("V4.1-Flash").carry, 3 * pair_waits)
same("V4 by the ledger", kv_bytes("V4-Flash").carry, 21 * csa_waits + 20 * hca_waits)

# %% [markdown]
# ## From the pooled vector to the record
#
# The pooled vector is stored as bf16 and normalised: this *latent* is what the indexer reads.
# Attention reads it rotated and in the main KV format. An entry spans two tokens and needs one
# position: that of its **first** token, $2j$.
#
# **Break it.** Rotate by the entry number $j$ instead. A query meets a key at the angle of their
# distance. The newest entry, 2 tokens back, then looks 51 tokens away from query 100: the error
# is the entry number itself, and grows to half of the text.

# %% tags=["break"]
from dsv41.ops import rmsnorm
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rope import frequencies, rotate

one_pair = np.float32([1.0])  # one rotating pair of channels, one radian a token
query = rotate(np.float32([[1, 0]]), np.array([100]), one_pair)
latent = np.float32([[1, 0]])
print("query at 100    right distance   score   by entry number   score")
scores_differ = []
for j in (0, 10, 49):
    right = (query @ rotate(latent, np.array([2 * j]), one_pair).T).item()
    wrong = (query @ rotate(latent, np.array([j]), one_pair).T).item()
    print(f"entry {j:2}, tokens {2 * j:2}, {2 * j + 1:2}{100 - 2 * j:9}{right:12.4f}"
          f"{100 - j:16}{wrong:10.4f}")  # fmt: skip
    scores_differ.append(abs(right - wrong))
    assert abs(right - np.cos(100 - 2 * j)) < 1e-5, "the score is that of the distance"
assert scores_differ[0] == 0 and scores_differ[2] > 0.5, "only entry 0 is right"

# %% [markdown]
# ## The module gives the same numbers
#
# [pool_groups](../dsv41/compress.py#pool_groups) is our `pool`.
# [compress](../dsv41/compress.py#compress) is our `stream`, for several requests in one call,
# with the waiting rows in the cache. [main_kv](../dsv41/compress.py#main_kv) writes the records.
# The sizes are those of the tiny preset: 64 channels, layer 2 a source of pairs.

# %%
from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.compress import compress, main_kv, pool_groups

same("three pairs", pool_groups(*pairs), pool(*pairs))
config, exact = preset("tiny"), FLOAT32.but(batch_invariant=True)
C, D, source = config.head_dim, config.hidden_size, 2
draw = np.random.default_rng(2)
p = {"wkv": draw.standard_normal((C, D), np.float32), "norm": 1 + draw.random(C, np.float32)}
p = {name: {"weight": w} for name, w in (*p.items(), ("wgate", p["wkv"][::-1].copy()))}


def feed(x, sizes, numerics):
    """x (T, D) in chunks, beside another request of one token a chunk -> latents of x"""
    cache = Cache(config, numerics)
    mine, other = cache.add(), cache.add()
    found = []
    for chunk in np.split(x, np.cumsum(sizes)[:-1]):
        starts = [cache.length[mine], cache.length[other]]
        batch = make_batch([np.zeros(len(chunk), int), [0]], starts, [mine, other])
        rows = np.concatenate([chunk, x[:1]])
        got, _, owner = compress(rows, p, source, 2, cache, batch, config, numerics)
        found.append(got[owner == mine])
        cache.advance(batch)
    return np.concatenate(found), cache.carry[source][mine, 0]


x = draw.standard_normal((11, D), np.float32)
whole, waiting_alone = feed(x, [11], exact)  # (5, C), and u and g of token 10 (2, C)
for sizes in ([1] * 11, [3, 5, 3], [4, 7]):
    again, waits = feed(x, sizes, exact)
    same(f"five latents in {len(sizes)} chunks, bit for bit", again, whole)
    same("token 10 waits", waits, waiting_alone)

u_x, g_x = x[:10] @ p["wkv"]["weight"].T, x[:10] @ p["wgate"]["weight"].T  # (10, C)
ours = pool(u_x.reshape(5, 2, C), g_x.reshape(5, 2, C))
ours = rmsnorm(ours, p["norm"]["weight"], config.rms_norm_eps, FLOAT32)
close("projection, pool, norm", whole, ours, within=1e-4)
nothing, _ = feed(x[:1], [1], exact)
same("a text of one token has no entry", nothing.shape, (0, C))

# %% [markdown]
# And the record, with the roundings of the release.

# %%
official, _ = feed(x, [11], OFFICIAL)
freqs, positions = frequencies(config, 2), 2 * np.arange(5)
turned = OFFICIAL.store(rotate(official, positions, freqs))
records = main_kv(official, positions, freqs, OFFICIAL)
same("a record is the rotated latent", records, OFFICIAL.main_kv.encode(turned))
print(f"{C} channels in {records.shape[1]} bytes; 512 channels in {main}")
same("bytes of a record", OFFICIAL.main_kv.record_bytes(512), main)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Pool one pair with a single exponential per channel, for gates of any size. The inputs
#    include gates of ±10,000.
# 2. Training needs the gradient by the gates. With $d$ the gradient by the pooled entry, derive
#    $\partial L / \partial g_t[c]$ for one group of m tokens. Who gains when a token's candidate
#    lies above the mix?
# 3. How many bytes of global cache do `n` tokens have, in whole entries? Mind the open pair.


# %% tags=["exercise"]
def pool_pair(u0, u1, g0, g1):
    """all (C,) f32 -> (C,) f32"""
    return ...


check("04.pool_pair", pool_pair)


# %% tags=["exercise"]
def gate_gradient(d, u, g):
    """d (C,), u, g (m, C), f64 -> (m, C)"""
    return ...


check("04.gate_gradient", gate_gradient)


# %% tags=["exercise"]
def global_bytes(n):
    """n tokens -> int"""
    return ...


check("04.global_bytes", global_bytes)

# %% [markdown]
# ## What we learned
#
# - An entry is a softmax average of its tokens, with weights for each channel. For a pair that
#   is one sigmoid per channel.
# - Pairs count from the beginning of the text. An open pair waits in float32, for any chunk
#   edge.
# - V4's entries read eight tokens and each token is in two of them; V4.1's pairs share nothing.
# - Fewer caches, not longer groups, make V4.1 small: 2.5 entries and 890 bytes a token.
# - The latent goes to the indexer. Attention gets it rotated by its first token's position.
#
# Worked solutions: [solutions/04_compressor.py](solutions/04_compressor.py). Next: [05 The
# lightning indexer and top-k](05_indexer_topk.ipynb). All chapters: [README.md](README.md).
