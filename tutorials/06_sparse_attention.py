# %% [markdown]
# # 06 · Sparse attention as a gather
#
# **How does a query attend to 640 records out of a million, and what can go wrong in a list of row
# numbers?**
#
# Somebody has chosen the records: the last 128 tokens, and 512 entries that an indexer found
# (chapter 05). What arrives here is a list of rows. Attention fetches those rows and takes one
# softmax over them. This chapter builds that, one query first, then many, then in chunks.
#
# You need NumPy and the idea of attention. 20 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/06_sparse_attention.py`.
#
# Sources: the V4.1 report, §2.3, for window, entries and sink; `sparse_attn_kernel` in the released
# inference/kernel.py for the chunks. The module that this page arrives at:
# [sparse_attn.py](../dsv41/sparse_attn.py).

# %%
import numpy as np

from lib.page import BLUE, GREEN, GREY, ORANGE, ROOT, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One query, one head, one list
#
# A record $K_i$ of $C$ channels is key and value at once. Each head has a learned number, its
# *sink*. It joins the denominator and brings no value:
#
# $$s_i = \frac{q \cdot K_i}{\sqrt C}, \qquad
# p_i = \frac{e^{s_i}}{\sum_j e^{s_j} + e^{\text{sink}}}, \qquad o = \sum_i p_i K_i$$
#
# Three records of two channels. Two come from the window, one from far back. The first channel acts
# as the key, the second is what we want to read: 1, 2 and 10. A −1 in the list means: nothing here.


# %%
def attend(q, records, rows, sink):
    """q (C,), records (N, C), rows: list of int -> o (C,), one row after the other."""
    total, out = np.exp(sink), np.zeros(len(q))
    for row in rows:
        if row < 0:
            continue
        weight = np.exp(q @ records[row] / np.sqrt(len(q)))
        total += weight
        out += weight * records[row]
    return out / total


records = np.array([[0, 1], [0, 2], [np.log(2), 10]])
q, sink = np.array([np.sqrt(2), 0]), np.log(3)
e = [np.exp(q @ record / np.sqrt(2)) for record in records] + [np.exp(sink)]
for name, weight in zip(
    ("window, value 1", "window, value 2", "far, value 10", "sink"), e, strict=True
):
    print(f"{name:16} e^s {weight:.0f}   p {weight / sum(e):.4f}")
one = attend(q, records, [0, 1, 2, -1], sink)[1]
print(f"output {one:.6f} = (1 + 2 + 2 x 10) / 7")
close("one softmax", one, 23 / 7, within=1e-12)

# %% [markdown]
# **Break it.** Window and far records come from two caches. The tempting program attends to each on
# its own and adds the results. Each softmax then hands out weight as if the other did not exist,
# and the sink counts twice.

# %% tags=["break"]
near, far = attend(q, records, [0, 1], sink)[1], attend(q, records, [2], sink)[1]
no_sink = attend(q, records, [0, 1, 2], -np.inf)[1]
print(f"one softmax              {one:.4f}")
print(f"two softmaxes, added     {near:.4f} + {far:.4f} = {near + far:.4f}")
print(f"one softmax, no sink     {no_sink:.4f}")
close("two softmaxes give 4.6", near + far, 4.6, within=1e-12)
close("without the sink 5.75", no_sink, 5.75, within=1e-12)
assert near + far > 1.3 * one, "weights of the two sum to more than the shared ones"

# %% [markdown]
# ## Many queries: the gather
#
# Every query brings a list of the same width, filled up with −1. NumPy fetches all of them in one
# indexing operation: `records[rows]`. Heads share the records.


# %%
def attend_all(q, records, rows, sink):
    """q (T, H, C), records (N, C), rows (T, n), sink (H,) -> o (T, H, C) f32."""
    here = rows >= 0  # (T, n)
    kv = np.where(here[:, :, None], records[np.maximum(rows, 0)], np.float32(0))  # (T, n, C)
    s = q @ kv.transpose(0, 2, 1) / np.sqrt(np.float32(q.shape[-1]))  # (T, H, n)
    s = np.where(here[:, None], s, np.float32(-np.inf))
    top = np.maximum(s.max(axis=2, keepdims=True), sink[:, None])  # any number would do
    p = np.exp(s - top)
    total = p.sum(axis=2, keepdims=True) + np.exp(sink[:, None] - top)
    return p @ kv / total


rng = np.random.default_rng(1)
T, H, C, N, n = 5, 4, 32, 100, 12
q = rng.standard_normal((T, H, C)).astype(np.float32) * 3
records = rng.standard_normal((N, C)).astype(np.float32)
sink = rng.standard_normal(H).astype(np.float32)
rows = np.stack([np.sort(rng.choice(N, n, replace=False)) for _ in range(T)])  # (T, n)
for t in range(T):
    rows[t, 2 * t + 1 :] = -1  # 1, 3, 5, 7, 9 rows
    print(f"query {t}:", *rows[t])
loop = [[attend(q[t, h], records, rows[t], sink[h]) for h in range(H)] for t in range(T)]
close("all queries at once = one by one", attend_all(q, records, rows, sink), loop, within=1e-5)
order = rng.permutation(n)
close("the order of a list does not matter", attend_all(q, records, rows[:, order], sink), loop,
      within=1e-5)  # fmt: skip

# %% [markdown]
# Two lines of `attend_all` guard the −1: one sets the record to zero, one sets the score to
# $-\infty$. Both are needed.
#
# **Break it, twice.** −1 is a legal index in NumPy: the last row. In a cache that row belongs to
# somebody else. Take a query of zeros, so that all weights are equal, and the list `[0, -1, -1,
# -1]`. The right answer is record 0.
#
# Masking only the record leaves three empty rows in the sum: a quarter of the answer. Masking only
# the score is right, until the last row holds NaN, as unwritten memory may. Its weight is exactly
# 0, and $0 \cdot \text{NaN} = \text{NaN}$.


# %% tags=["break"]
def fetch_and_average(pool, mask_score, mask_record):
    here = np.array([True, False, False, False])
    kv = pool[[0, -1, -1, -1]]  # (4, 2)
    if mask_record:
        kv = np.where(here[:, None], kv, 0)
    p = np.exp(np.where(here, 0.0, -np.inf)) if mask_score else np.ones(4)
    return p @ kv / p.sum()


pool = np.array([[1.0, 0], [0, 1], [100, 100]])
unwritten = np.array([[1.0, 0], [0, 1], [np.nan, np.nan]])
print("last row holds:          somebody's 100          NaN")
results = {}
for name, masks in (("nothing masked", (0, 0)), ("score", (1, 0)), ("record", (0, 1)),
                    ("score and record", (1, 1))):  # fmt: skip
    results[name] = [fetch_and_average(each, *masks) for each in (pool, unwritten)]
    print(f"masked: {name:16}", "   ".join(f"{r!s:18}" for r in results[name]))
assert results["nothing masked"][0][0] > 75, "another request's 100 in our answer"
assert np.isnan(results["score"][1]).all(), "a weight of zero does not stop NaN"
same("both masks: record 0, twice", results["score and record"], [[1, 0], [1, 0]])

# %% [markdown]
# ## Chunks: one softmax, never all scores at once
#
# A kernel holds 64 rows at a time. It does not know the largest score to come. So it keeps three
# things: the maximum $M$ so far, the sum $Z$ and the weighted records $A$, both relative to $M$.
# When a chunk brings a larger maximum, what is there is scaled down:
#
# $$M' = \max(M, \max_i s_i), \quad
# Z' = e^{M - M'} Z + \sum_i e^{s_i - M'}, \quad
# A' = e^{M - M'} A + \sum_i e^{s_i - M'} K_i$$
#
# At the end the sink joins, and $o = A / (Z + e^{\text{sink} - M})$. Five scores, two at a time:

# %%
scores, values = [1.0, 3.0, 2.0, 5.0, 4.0], [10.0, 20.0, 30.0, 40.0, 50.0]
M, Z, A = -1e30, 0.0, 0.0
print(" chunk           M       Z        A")
for begin in range(0, 5, 2):
    s, v = scores[begin : begin + 2], values[begin : begin + 2]
    new = max(M, *s)
    Z = Z * np.exp(M - new) + sum(np.exp(x - new) for x in s)
    A = A * np.exp(M - new) + sum(np.exp(x - new) * y for x, y in zip(s, v, strict=True))
    M = new
    print(f"{s!s:12} {M:5.1f}  {Z:6.4f}  {A:7.4f}")
chunked = A / (Z + np.exp(0.5 - M))
p = np.exp(scores)
whole = p @ values / (p.sum() + np.exp(0.5))
print(f"chunks {chunked:.6f}, all at once {whole:.6f}")
close("five scores, with a sink of 0.5", chunked, whole, within=1e-12)


# %%
def online(q, kv, here, sink, chunk=64, start=-1e30, keep=lambda p: p):
    """q (T, H, C), kv (T, n, C), here (T, n) bool, sink (H,) -> (T, H, C) f32.

    keep: how probabilities are stored before they meet the values.
    """
    M = np.full((*q.shape[:2], 1), start, np.float32)
    Z, A = np.zeros_like(M), np.zeros_like(q)
    for begin in range(0, kv.shape[1], chunk):
        some, seen = kv[:, begin : begin + chunk], here[:, None, begin : begin + chunk]
        s = q @ some.transpose(0, 2, 1) * np.float32(q.shape[-1] ** -0.5)  # (T, H, chunk)
        s = np.where(seen, s, np.float32(-np.inf))
        new = np.maximum(M, s.max(axis=2, keepdims=True))
        p, decay = np.exp(s - new), np.exp(M - new)
        Z = Z * decay + p.sum(axis=2, keepdims=True)
        A = A * decay + keep(p) @ some
        M = new
    with np.errstate(over="ignore"):  # no row at all: the sink outweighs everything
        return A / (Z + np.exp(sink[:, None] - M))


rng = np.random.default_rng(2)
T, H, C, N, n = 6, 8, 64, 2000, 640
q = rng.standard_normal((T, H, C)).astype(np.float32) * 4
records = rng.standard_normal((N, C)).astype(np.float32)
sink = rng.standard_normal(H).astype(np.float32)
rows = np.stack([rng.permutation(N)[:n] for _ in range(T)])  # (T, n)
rows[1, 300:] = -1  # ends early
rows[2, :64] = -1  # first chunk empty
rows[3] = -1  # nothing to read
here = rows >= 0
kv = np.where(here[:, :, None], records[rows], np.float32(0))  # (T, n, C)
whole = attend_all(q, records, rows, sink)
for chunk in (1, 64, 640):
    close(f"chunks of {chunk} = one softmax", online(q, kv, here, sink, chunk), whole, within=2e-5)
same("a query without rows gives exactly 0", online(q, kv, here, sink)[3], np.zeros((H, C), "f"))

# %% [markdown]
# **Break it.** Why start at $-10^{30}$, and not at $-\infty$? While nothing but −1 has come, the
# maximum is still the start, and $-\infty - (-\infty)$ is NaN. Query 2 has an empty first chunk,
# query 3 is empty.
#
# And why a maximum at all? Scale the scores by 10: float32 ends at $e^{88}$.

# %% tags=["break"]
with np.errstate(invalid="ignore", over="ignore"):
    infinite = online(q, kv, here, sink, start=-np.inf)
    s = q @ kv.transpose(0, 2, 1) * np.float32(10 / np.sqrt(C))
    plain = np.exp(s) @ kv / np.exp(s).sum(axis=2, keepdims=True)
print("NaN outputs of 512 by query")
print("start -inf: ", *np.isnan(infinite).sum(axis=(1, 2)))
print("start -1e30:", *np.isnan(online(q, kv, here, sink)).sum(axis=(1, 2)))
print(f"largest score {s.max():.0f}: plain exp gives {np.isnan(plain).sum()} NaN,",
      f"chunks give {np.isnan(online(10 * q, kv, here, sink)).sum()}")  # fmt: skip
assert np.isnan(infinite[[2, 3]]).all(), "both queries are lost"
assert np.isnan(plain).any(), "plain exponentials overflow"
assert np.isfinite(online(10 * q, kv, here, sink)).all(), "the running maximum does not"

# %% [markdown]
# In exact arithmetic the chunk size is invisible. The released kernel stores $e^{s_i - M}$ as bf16
# before it meets the records, and $M$ is the maximum *so far*. So the number 64 is part of the
# numerics: another chunk size rounds other numbers.

# %%
from dsv41.formats import round_bf16

by_64 = online(q, kv, here, sink, 64, keep=round_bf16)
by_128 = online(q, kv, here, sink, 128, keep=round_bf16)
changed = np.mean(by_64 != by_128)
print(f"share of outputs that differ between chunks of 64 and of 128: {changed:.1f}")
apart = np.abs(by_64 - by_128).max()
print(f"they differ by up to {apart:.3f}, outputs go up to {np.abs(whole).max():.1f}")
assert changed > 0.3, "many last bits depend on the chunk"
close("but only by rounding", by_64, whole, within=0.01)

# %% [markdown]
# ## What a model reads
#
# Here are the lists of a small model with random weights: nine layers, a window of 8, six entries.
# The trace of layer 5, one entry per token. The shape is a band along the diagonal, and dots.

# %%
import dsv41

checkpoint = ROOT / "tests/golden/v41_tiny_a"
model, trace = dsv41.load(checkpoint), {}
model.logits(np.load(checkpoint / "prompt_bf16q.npz")["ids"][0, :72], trace=trace)
chosen = trace["L05.idx.topk"]  # (72, 6)
tokens = np.arange(72)
back = tokens[:, None] - tokens  # (query, token)
window = (back >= 0) & (back < 8)
entry = np.zeros((72, 72), bool)
for t in tokens:
    entry[t, chosen[t][chosen[t] >= 0]] = True

with figure("Window and six entries: at most 14 rows a query, however long the past") as ax:
    for cells, colour, name, at in ((window & ~entry, BLUE, "window", (44, 30)),
                                    (entry & ~window, ORANGE, "entry", (44, 20)),
                                    (entry & window, GREEN, "both", (44, 10))):  # fmt: skip
        t, j = np.nonzero(cells)
        ax.plot(t, j, "s", color=colour, markersize=2.2)
        ax.text(75, at[1], f"{name}: {len(t)}", color=colour, fontweight="bold")
    ax.set(xlabel="query", ylabel="token that it reads", xlim=(-1, 95), ylim=(-1, 72))
    ax.set(xticks=range(0, 73, 12), yticks=range(0, 73, 12))

reads = (window.sum(axis=1) + entry.sum(axis=1))[[0, 3, 8, 30, 71]]
print("rows read by queries 0, 3, 8, 30, 71:", *reads)
assert (window.sum(axis=1) + entry.sum(axis=1)).max() == 14, "8 + 6 rows at most"
assert np.sum(window & entry) > 0, "some tokens are read through both lists"

# %% [markdown]
# Green: a token that is read twice, through its window record and through its entry. That is how
# the model is defined, nothing is de-duplicated. A row that is listed twice counts twice:

# %%
two = np.float32([[0, 1], [0, 4]])
zero, none = np.zeros((1, 1, 2), np.float32), np.float32([-np.inf])
once, twice = (attend_all(zero, two, np.array([r]), none)[0, 0, 1] for r in ([0, 1], [0, 1, 1]))
print(f"records 1 and 4: mean {once:.1f}, with 4 listed twice {twice:.1f}")
same("listed twice, counted twice", np.float32([once, twice]), np.float32([2.5, 3.0]))

# %% [markdown]
# ## Count the FLOPs
#
# A multiplication and an addition, once for the score and once for the value: $4 H C$ for each row.
# The released model has 64 heads of 512 channels, a window of 128, and 512 entries in 38 of its 40
# layers, 18 of them with one entry per two tokens. The number of rows stops growing at 1,024
# tokens. Reading *all* entries never stops. What still grows is finding them, the subject of
# chapters 05 and 08.

# %%
from dsv41 import ledger


def rows_read(context, topk):
    """-> rows of all 40 layers for one new token; topk None reads every entry."""
    most = np.inf if topk is None else topk
    window = 40 * np.minimum(context, 128)
    return window + 18 * np.minimum(context // 2, most) + 20 * np.minimum(context, most)


contexts = 2 ** np.arange(7, 21)
sparse, dense = (4 * 64 * 512 * rows_read(contexts, topk) for topk in (512, None))
flops = ledger.decode_flops("V4.1-Flash", contexts)
same("the ledger counts the same", flops.attention, sparse)
for at in (0, 3, 7, 13):
    print(f"{contexts[at]:9,} tokens   512 entries {sparse[at] / 1e9:5.2f} GFLOP",
          f"  all entries {dense[at] / 1e9:8.2f} GFLOP")  # fmt: skip
assert sparse[3] == sparse[-1] and dense[-1] > 1000 * sparse[-1], "constant, and 1,000 times less"

with figure("Attention to chosen rows costs the same at 1K and at 1M tokens") as ax:
    for y, colour, name, up in ((sparse, BLUE, "512 entries", 0.55),
                                (dense, ORANGE, "all entries", 1),
                                (flops.index, GREY, "finding them", 1.6)):  # fmt: skip
        ax.plot(contexts, y / 1e9, color=colour, linewidth=2)
        at = (1.15 * contexts[-1], up * y[-1] / 1e9)
        ax.text(*at, name, color=colour, fontweight="bold", va="center")
    ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="GFLOP per new token")
    ax.set(xlim=(100, 2e7), ylim=(1e-3, 1e4))
    ax.set_xticks([2**7, 2**10, 2**13, 2**16, 2**20], ["128", "1K", "8K", "64K", "1M"])
    ax.set_xticks([], minor=True)
    ax.grid(axis="y")

# %% [markdown]
# Memory: one layer's gather for one query is 640 records of 512 numbers, whatever the context.
# Compare with the score matrix of 1,024 queries over a million tokens, for one of the 64 heads.

# %%
gathered = 640 * 512 * 4
matrix = 1024 * (1 << 20) * 4
print(f"gather, one query: {gathered / 1e6:.2f} MB of float32")
print(f"scores of 1,024 queries over 1M tokens, one head: {matrix / 1e9:.1f} GB of float32")
print(f"stored bytes behind the gather: 128 x 528 + 512 x 288 = {128 * 528 + 512 * 288:,}")
assert gathered < 2e6 and matrix > 4e9, "a gather is small, a score matrix is not"

# %% [markdown]
# ## The module gives the same numbers
#
# [sparse_attn](../dsv41/sparse_attn.py#sparse_attn) takes two pools and two lists, for window and
# far records. The lists are joined, so there is one softmax. In the released numerics the pools
# hold bytes: 528 for a window record, 288 for a far one (chapter 01).

# %%
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.sparse_attn import sparse_attn

near, far = rows[:, :128] % 1000, rows[:, 128:]  # window pool: the first 1,000 records
near = np.where(rows[:, :128] < 0, -1, near)
joined = np.concatenate([near, far], axis=1)
got = sparse_attn(q, records[:1000], near, records, far, sink, FLOAT32)
close("two pools = one softmax over the joined list", got, attend_all(q, records, joined, sink),
      within=2e-5)  # fmt: skip
kv = np.where((joined >= 0)[:, :, None], records[joined], np.float32(0))
same("the same bits as our chunks", got, online(q, kv, joined >= 0, sink))

window_bytes = OFFICIAL.window_kv.encode(records[:1000])
far_bytes = OFFICIAL.main_kv.encode(records)
kv[:, :128] = OFFICIAL.window_kv.decode(window_bytes, C)[near]
kv[:, 128:] = OFFICIAL.main_kv.decode(far_bytes, C)[far]
kv = np.where((joined >= 0)[:, :, None], kv, np.float32(0))
from_bytes = sparse_attn(q, window_bytes, near, far_bytes, far, sink, OFFICIAL)
ours = round_bf16(online(q, kv, joined >= 0, sink, keep=round_bf16))
same("from bytes, with bf16 probabilities", from_bytes, ours)

# %% [markdown]
# Two last checks of the traps above. Fill every far record that nobody lists with `0xFF` bytes,
# which decode to NaN: not a bit of the output changes. And a row beyond the pool is an error, not a
# read.

# %%
poisoned = far_bytes.copy()
unused = np.setdiff1d(np.arange(N), far)
poisoned[unused] = 0xFF
print(f"{len(unused)} of {N} records poisoned")
assert np.isnan(OFFICIAL.main_kv.decode(poisoned[unused], C)).all(), "all NaN"
same("unused records do not matter",
     sparse_attn(q, window_bytes, near, poisoned, far, sink, OFFICIAL), from_bytes)  # fmt: skip
far[0, 0] = N
try:
    sparse_attn(q, window_bytes, near, far_bytes, far, sink, OFFICIAL)
except IndexError as refusal:
    message = str(refusal)
print(message)
assert message == "global_rows: row 2000 of 2000 records", "the error names list and row"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Fetch one list of records, zeros where the list says −1. The inputs hold NaN in rows that are
#    not listed.
# 2. Attend to two groups of scalar values with one softmax and a sink. The inputs include scores of
#    several hundred.
# 3. Two workers attend to two halves of a list. Each returns its maximum $M$, sum $Z$ and weighted
#    records $A$. Merge them into one output, without a sink. A half may be empty: $M = -10^{30}$,
#    $Z = 0$.


# %% tags=["exercise"]
def fetch(records, rows):
    """records (N, C) f32, rows (n,) int -> (n, C) f32"""
    return ...


check("06.fetch", fetch)


# %% tags=["exercise"]
def one_softmax(near_scores, near_values, far_scores, far_values, sink):
    """scores and values (n,) and (m,) f32, already scaled; sink f32 -> float"""
    s = np.concatenate([near_scores, far_scores])
    return ...


check("06.one_softmax", one_softmax)


# %% tags=["exercise"]
def merge(M1, Z1, A1, M2, Z2, A2):
    """M, Z floats, A (C,) f64 -> (C,) f64"""
    M = max(M1, M2)
    return ...


check("06.merge", merge)

# %% [markdown]
# ## What we learned
#
# - Sparse attention is a gather: a list of rows for each query, and one softmax over all of them
#   and the sink. 23/7, not 4.6.
# - −1 is masked twice, in the score and in the record. A weight of zero does not stop NaN.
# - Chunks with a running maximum give the same softmax. It starts at $-10^{30}$, so empty chunks
#   are harmless. With bf16 probabilities the chunk of 64 is part of the numerics.
# - The same token may come through both lists, and then counts twice.
# - From 1,024 tokens on, attention costs the same: 40 windows and 38 lists of 512.
#
# Worked solutions: [solutions/06_sparse_attention.py](solutions/06_sparse_attention.py). Next: [07
# CSA2: Full, Reindex, Reuse](07_csa2.ipynb). All chapters: [README.md](README.md).
