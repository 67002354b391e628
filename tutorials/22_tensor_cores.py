# %% [markdown]
# # 22 · Sparse attention and the indexer on tensor cores
#
# **How do 640 scattered records of FP4 and FP8 become matrix products, and why does the answer not
# depend on who else is in the batch?**
#
# A tensor core multiplies small matrices and nothing else. The records of a query lie anywhere in
# memory, in 4 and 8 bits. This chapter takes the path of
# [tiles.cuh](../kernels/dsv41_kernels/rope_sparse_attn/tiles.cuh): bytes, bf16, products, softmax,
# products. Then it turns to the indexer, whose scores are products too, and to the choice of the
# best 512.
#
# You need chapters [05](05_indexer_topk.ipynb) and [06](06_sparse_attention.ipynb), and warps from
# [chapter 20](20_first_numba_kernel.ipynb). 35 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks,simulator]"`. Then open this page in Jupyter,
# or run `python tutorials/22_tensor_cores.py`.
#
# **No GPU is needed, and none is used.** Numba's simulator has no tensor cores, so the kernels are
# re-enacted in NumPy, all 32 lanes of a warp. CUDA sources are compiled for Hopper by NVRTC. Times
# come from files in `kernels/results`, measured on the GPU that they name.
#
# Sources: the PTX ISA manual, for the layouts of `mma.m16n8k16` and `ldmatrix`; the CUDA C++
# Programming Guide, for banks. The kernels:
# [tensor.cuh](../kernels/dsv41_kernels/tensor.cuh),
# [kernel.cu](../kernels/dsv41_kernels/rope_sparse_attn/kernel.cu),
# [score_mma.cuh](../kernels/dsv41_kernels/score_mma.cuh),
# [topk.cuh](../kernels/dsv41_kernels/topk.cuh). Their definitions:
# [sparse_attn.py](../dsv41/sparse_attn.py), [indexer.py](../dsv41/indexer.py).

# %%
import numpy as np

from lib.measured import report
from lib.page import BLUE, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One instruction, 32 lanes
#
# `mma.m16n8k16` is $D \mathrel{+}= A B$, with $A$ 16×16 and $B$ 16×8 in bf16, $D$ 16×8 in float32.
# No lane holds a matrix. Each of the 32 lanes of a warp holds four pairs of $A$, two pairs of $B$,
# two pairs of $D$: its *fragment*. Lane $4g + t$ has
#
# | matrix | pairs begin at (row, column) | a pair runs along |
# | --- | --- | --- |
# | $A$ | $(g, 2t)$, $(g+8, 2t)$, $(g, 2t+8)$, $(g+8, 2t+8)$ | columns |
# | $B$ | $(2t, g)$, $(2t+8, g)$ | rows |
# | $D$ | $(g, 2t)$, $(g+8, 2t)$ | columns |
#
# So a lane lacks most of what its own four sums need. The hardware asks the other lanes. Here is
# that, in loops: who has the number that I need?

# %%
LANES = np.arange(32)
G, T = LANES[:, None, None] // 4, LANES[:, None, None] % 4
TWO = np.array([0, 1])[None, None]  # the members of a pair
eights = np.array([0, 8, 0, 8])[None, :, None]
A_AT = G + eights + 0 * TWO, 2 * T + np.array([0, 0, 8, 8])[None, :, None] + TWO
B_AT = 2 * T + eights[:, :2] + TWO, G + 0 * eights[:, :2] + 0 * TWO
D_AT = G + eights[:, :2] + 0 * TWO, 2 * T + 0 * eights[:, :2] + TWO  # (32 lanes, pairs, 2)


def mma_by_lanes(d, a, b):
    """Fragments d (32, 2, 2), a (32, 4, 2), b (32, 2, 2) -> d + a b, as a fragment."""
    out, steps = d.copy(), 0
    for lane in range(32):
        g, t = divmod(lane, 4)
        for low, n in np.ndindex(2, 2):  # row g or g + 8, column 2t + n
            for u, far, e in np.ndindex(4, 2, 2):  # k = 2u + 8 far + e
                mine = a[4 * g + u, low + 2 * far, e]  # held by a lane of my row group
                other = b[4 * (2 * t + n) + u, far, e]  # by a lane of my column's group
                out[lane, low, n] += mine * other
                steps += 1
    return out, steps


rng = np.random.default_rng(1)
A, B, D = (rng.integers(-9, 10, shape).astype("f4") for shape in ((16, 16), (16, 8), (16, 8)))
got, steps = mma_by_lanes(D[D_AT], A[A_AT], B[B_AT])
print(f"lane 13 holds of A {A[A_AT][13].tolist()}, of B {B[B_AT][13].tolist()}")
print(f"{steps:,} multiply-adds, one instruction")
same("32 lanes = a matrix product", got, (D + A @ B)[D_AT])
held = np.zeros((3, 16, 16), int)
for matrix, at in zip(held, (A_AT, B_AT, D_AT), strict=True):
    np.add.at(matrix, at, 1)
assert held[0].all() and held.max() == 1, "every number of A is with exactly one lane"
assert held.sum() == 256 + 128 + 128, "so are those of B and D"

with figure("Which lane holds a pair", 1, 3, width_ratios=(2, 1, 1)) as axes:
    for ax, name, at, columns in zip(axes, "ABD", (A_AT, B_AT, D_AT), (16, 8, 8), strict=True):
        owner = np.zeros((16, columns), int)
        owner[at] = LANES[:, None, None]
        ax.imshow(owner, cmap="cividis", aspect="auto")
        for lane, pair in np.ndindex(at[0].shape[:2]):
            row, column = (axis[lane, pair].mean() for axis in at)  # the middle of a pair
            colour = "white" if lane < 20 else "black"
            ax.text(column, row, lane, ha="center", va="center", fontsize=6, color=colour)
        ax.set(title=f"{name}, 16 x {columns}", xticks=[], yticks=[])

# %% [markdown]
# From here on the short form: put the fragments together, multiply, hand out again. Integers hide
# one thing: a product of two bf16 numbers is exact in float32, and the sum of 16 of them is not.
# How the hardware rounds it is its own affair. This page adds exactly and rounds once.
#
# ## The same bytes, keys and values
#
# In this model a record is key and value at once. For the scores $q \cdot K_i$ the sum runs along a
# record: a pair of $B$ is two neighbours in memory. For the output $\sum_i p_i K_i$ it runs across
# records: a pair of $B$ is the same channel of two records, a kilobyte apart.
#
# `ldmatrix` does both. Lanes $8i \dots 8i+7$ name the rows of an 8×8 matrix, each row 16 bytes, and
# a lane gets the pair $(g, 2t)$ of each of the four. With `.trans` it gets $(2t, g)$ and
# $(2t + 1, g)$.


# %%
def mma(d, a, b):
    product = np.zeros((2, 16, 16))
    product[0][A_AT], product[1][B_AT] = a, b
    return (d + (product[0] @ product[1])[D_AT]).astype("f4")


def load_matrices(rows, transposed=False):
    """rows (32, 8): what each lane's address names -> (32 lanes, 4 matrices, 2)"""
    four = rows.reshape(4, 8, 8).swapaxes(1, 2) if transposed else rows.reshape(4, 8, 8)
    return four[np.arange(4)[None, :, None], G, 2 * T + TWO]


def pieces(x):
    return x.reshape(len(x), -1, 8)  # 8 channels, 16 bytes


def score_tile(q, keys):
    """q (16 heads, C), keys (16 records, C) -> (16, 16); score_chunk of tiles.cuh"""
    d = np.zeros((2, 32, 2, 2), "f4")
    for k in range(0, q.shape[1] // 8, 2):  # two pieces are 16 channels
        a = load_matrices(pieces(q)[LANES % 16, k + LANES // 16])
        b = load_matrices(pieces(keys)[LANES % 8 + LANES // 16 * 8, k + LANES // 8 % 2])
        d[0], d[1] = mma(d[0], a, b[:, :2]), mma(d[1], a, b[:, 2:])
    return together(d)


def value_tile(d, p, values, transposed=True):
    """d (2, 32, 2, 2), p (16 heads, 64 records), values (64, 16 channels) -> d + p values"""
    for k in range(values.shape[0] // 16):
        a = load_matrices(pieces(p)[LANES % 16, 2 * k + LANES // 16])
        b = load_matrices(pieces(values)[16 * k + LANES % 16, LANES // 16], transposed)
        d = np.stack([mma(d[0], a, b[:, :2]), mma(d[1], a, b[:, 2:])])
    return d


def together(d):
    tile = np.zeros((16, 16), "f4")
    tile[D_AT[0], D_AT[1]], tile[D_AT[0], D_AT[1] + 8] = d
    return tile


q, keys = (rng.integers(-4, 5, (16, 64)).astype("f4") for _ in range(2))
p, values = (rng.integers(-4, 5, shape).astype("f4") for shape in ((16, 64), (64, 16)))
zero = np.zeros((2, 32, 2, 2), "f4")
same("scores: rows as they lie", score_tile(q, keys), q @ keys.T)
same("values: the same loads, transposed", together(value_tile(zero, p, values)), p @ values)

# %% [markdown]
# **Break it.** Forget `.trans`. Shapes fit, nothing crashes. Every 8×8 matrix of the values is
# turned over its diagonal, so channels and records change places.

# %% tags=["break"]
wrong = together(value_tile(zero, p, values, transposed=False))
print("right", *(p @ values)[0, :6].astype(int), "\nwrong", *wrong[0, :6].astype(int))
turned = values.reshape(8, 8, 2, 8).swapaxes(1, 3).reshape(64, 16)
same("what it computes: every 8 x 8 turned over", wrong, p @ turned)
assert not np.array_equal(wrong, p @ values), "and that is not the sum of the values"

# %% [markdown]
# ## Eight rows, one bank
#
# Shared memory has 32 banks of 4 bytes. A row of 512 bf16 is 1,024 bytes, so the same piece of
# eight rows begins in the same bank. `ldmatrix` reads those eight together: one after the other.
# The kernel puts piece $i$ of row $r$ at place $i \oplus (r \bmod 8)$.


# %%
def accesses(place, row_bytes=1024):
    """The most rows of one 8 x 8 matrix that meet in one bank, over all pieces of a row."""
    worst = 0
    for piece in range(row_bytes // 16):
        starts = np.array([row * row_bytes + 16 * place(piece, row) for row in range(8)])
        banks = (starts[:, None] // 4 + np.arange(4)) % 32  # four words a row
        worst = max(worst, np.bincount(banks.ravel()).max())
    return worst


plain, swizzled = accesses(lambda i, r: i), accesses(lambda i, r: i ^ (r % 8))
print(f"as they lie: {plain} accesses for an 8 x 8 matrix; with xor: {swizzled}")
assert plain == 8 and swizzled == 1, "eight times the time, or none lost"
places = {i ^ 5 for i in range(64)}
assert places == set(range(64)), "a row's pieces only change places"

# %% [markdown]
# ## Codes become bf16 by moving bits
#
# Converting a code is slow. Moving its bits is fast. bf16 has a sign, eight exponent bits (bias
# 127) and seven of mantissa. Put the sign of E2M1 at bit 15 and its three other bits at 8…6: the
# exponent now counts from 127 instead of 1, so this *is* the value times $2^{1-127}$. Subnormals
# included, since both formats treat the exponent 0 alike. E4M3 goes to 10…4, times $2^{7-127}$.
#
# One bf16 product with the scale times $2^{118}$ (or $2^{112}$) gives the value times $2^{-8}$, and
# 256 goes into the softmax's factor. A word holds eight codes. Moving it by 12, 8, 4, 0 brings two
# codes into place each time: code $i$ into the lower half, code $i + 4$ into the upper.

# %%
from dsv41.formats import E2M1, E4M3, decode_bf16, pack_nibbles, round_bf16
from dsv41.quant import FLOAT32, INDEX_FP4, MAIN_KV_FP4, OFFICIAL, WINDOW_KV_FP8

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the channels of a piece, as placing leaves them


def halves(pair):
    """u32 (...) -> the two bf16 values (..., 2) as f32"""
    return decode_bf16(np.stack([pair & 0xFFFF, pair >> 16], axis=-1).astype("u2"))


def multiply_pairs(pair, scale):
    return round_bf16(halves(pair) * scale[..., None])  # the product of two bf16, rounded to bf16


def place_e2m1(word, scale):
    """word (...) u32: 8 codes; scale (...) f32 -> (..., 8) f32, channels in ORDER"""
    sign, size = 0x80008000, 0x01C001C0
    moved = [(word << 12 & sign) | (word << 6 & size), (word << 8 & sign) | (word << 2 & size)]
    moved += [(word << 4 & sign) | (word >> 2 & size), (word & sign) | (word >> 6 & size)]
    return np.concatenate([multiply_pairs(m, scale) for m in moved], axis=-1)


def place_e4m3(low, high, scale):
    """low, high (...) u32: 4 codes each; scale (...) f32 -> (..., 8) f32, channels in ORDER"""
    sign, size = 0x80008000, 0x07F007F0
    u, v = (low & 0xFFFF) | (high << 16), (low >> 16) | (high & 0xFFFF0000)  # __byte_perm
    moved = [(u << 8 & sign) | (u << 4 & size), (u & sign) | (u >> 4 & size)]
    moved += [(v << 8 & sign) | (v << 4 & size), (v & sign) | (v >> 4 & size)]
    return np.concatenate([multiply_pairs(m, scale) for m in moved], axis=-1)


word = pack_nibbles(np.arange(8, dtype="u1")[None]).view("u4")[0]
print("codes 0 .. 7 hold", *E2M1.table[:8])
print("placed, x 2^126  ", *place_e2m1(word, np.float32([2.0**126]))[0])

codes, scales = np.arange(16, dtype="u1"), np.arange(1, 127, dtype="u1")  # positive, no NaN
words = pack_nibbles(codes.reshape(2, 8)).view("u4")[:, 0]
for group, word in zip(codes.reshape(2, 8), words, strict=True):
    got = place_e2m1(np.full(126, word), E4M3.decode(scales) * np.float32(2.0**118))
    want = E2M1.decode(group[ORDER]) * E4M3.decode(scales)[:, None] * np.float32(2.0**-8)
    same(f"E2M1 codes {group[0]} .. {group[-1]}, all 126 scales", got, want)

codes = np.array([c for c in range(256) if c & 127 != 127], "u1")  # 254 numbers, without NaN
codes = np.concatenate([codes, codes[:2]]).reshape(32, 8)
low, high = (codes[:, half].copy().view("u4")[:, :1] for half in (slice(4), slice(4, 8)))
exponents = np.arange(-100, 16)  # 2^15 is the largest that the encoders make
got = place_e4m3(low, high, np.exp2(exponents + 112.0, dtype="f4")[None])  # (32, 116, 8)
want = E4M3.decode(codes[:, ORDER])[:, None] * np.exp2(exponents - 8.0)[:, None]
same("E4M3, all 254 numbers, 116 scales", got, want.astype("f4"))

# %% [markdown]
# **Break it.** The 0.5 of E2M1 is a subnormal number on the way. Compilers are often told to flush
# those to zero (`-ftz=true`, which CuPy adds by itself). Packed bf16 products have no such form
# (PTX manual, `mul`). Had the kernel gone through float32:

# %% tags=["break"]
rng = np.random.default_rng(2)
x = rng.standard_normal((1000, 512)).astype("f4")
records = MAIN_KV_FP4.encode(x)
words, scale = records[:, :256].copy().view("u4"), E4M3.decode(records[:, 256:])
scale = np.repeat(scale, 2, axis=1)  # 16 channels share one, so two words of 8 codes do
kept = place_e2m1(words, scale * np.float32(2.0**118))
exact = MAIN_KV_FP4.decode(records, 512).reshape(1000, 64, 8)[..., ORDER] * np.float32(2.0**-8)
same("1,000 records, nothing flushed", kept, exact)
flushed = np.where(np.abs(kept) == scale[..., None] * np.float32(2.0**-9), np.float32(0), kept)
lost = np.mean((flushed == 0) & (kept != 0))
error = np.sqrt(np.mean((flushed - exact) ** 2) / np.mean(exact**2))
print(f"{lost:.1%} of the numbers become 0; relative error of a record {error:.3f}")
assert 0.1 < lost < 0.25 and error > 0.05, "every 0.5 is gone, and no NaN tells"

# %% [markdown]
# ## The whole kernel
#
# One token, 16 heads, 640 records: 128 of the window in FP8, 512 from far away in FP4. Decoding
# leaves channels in `ORDER`. So the query takes the same order: a dot product does not see it. The
# output has it too, and there it is undone.
#
# For each chunk of 64 records: products, then weights $p = 2^{s - m}$ with the running maximum $m$,
# products again. (Products of one chain over all channels, as v4 to v8 make them; v3 adds two
# halves.) When the maximum grows by $\delta$, everything summed so far shrinks by
# $2^{-\delta}$. The released code rounds $p$ to bf16 before it meets the values, and not in the
# denominator.

# %%
CHUNK, C, HEADS = 64, 512, 16
LIFT = np.float32(256) * np.float32(np.log2(np.e)) / np.sqrt(np.float32(C))


def gather(window, near_rows, pool, far_rows):
    """-> keys (640, 512), value x 2^-8, channels in ORDER, and which places are filled"""
    rows = np.concatenate([near_rows, far_rows])
    near, far = window[np.maximum(near_rows, 0)], pool[np.maximum(far_rows, 0)]
    words = near[:, :512].copy().view("u4").reshape(-1, 64, 2)
    scale = np.exp2(near[:, 512:].astype("f4") - np.float32(127 - 112))
    of_window = place_e4m3(words[..., 0], words[..., 1], np.repeat(scale, 4, axis=1))
    words, scale = far[:, :256].copy().view("u4"), E4M3.decode(far[:, 256:])
    of_pool = place_e2m1(words, np.repeat(scale * np.float32(2.0**118), 2, axis=1))
    keys = np.concatenate([of_window, of_pool]).reshape(-1, C)
    keys[rows < 0] = 0  # trap: whatever stood there
    return keys, rows >= 0


def scores_of(q, keys):
    tiles = [score_tile(q, keys[n : n + 16]) for n in range(0, len(keys), 16)]
    return np.concatenate(tiles, axis=1)


def weigh(s, valid, top):
    """-> p in float32, new maximum, by how much older sums shrink"""
    s = np.where(valid, s * LIFT, np.float32(-np.inf))
    new = np.maximum(top, s.max(axis=1))
    return np.exp2(s - new[:, None]), new, np.exp2(top - new)


def add_values(o, p, decay, keys):
    """o (32 tiles of 16 channels, fragments) -> shrunk, plus p keys"""
    o = o * decay[D_AT[0]]
    p = round_bf16(p)
    return np.stack([value_tile(o[n], p, keys[:, 16 * n : 16 * n + 16]) for n in range(len(o))])


def finish(o, total, top, sink):
    norm = total + np.exp2(sink * np.float32(np.log2(np.e)) - top)
    tiles = np.concatenate([together(tile) for tile in o], axis=1)
    out = np.zeros_like(tiles)
    pieces(out)[..., ORDER] = pieces(tiles * (np.float32(256) / norm)[:, None])
    return round_bf16(out)


def partial(q, keys, valid):
    """Chunks in order -> o as fragments, the sum of weights, the last maximum"""
    o, total = np.zeros((C // 16, 2, 32, 2, 2), "f4"), np.zeros(HEADS, "f4")
    top = np.full(HEADS, -1e30, "f4")
    for at in (slice(n, n + CHUNK) for n in range(0, len(keys), CHUNK)):
        p, top, decay = weigh(scores_of(q, keys[at]), valid[at], top)
        total = total * decay + p.sum(axis=1)
        o = add_values(o, p, decay, keys[at])
    return o, total, top


def tiles(q, keys, valid, sink):
    """q (16, 512) bf16 values, channels as they are -> o (16, 512)"""
    ordered = pieces(q)[..., ORDER].reshape(q.shape)
    o, total, top = partial(ordered, keys, valid)
    return finish(o, total, top, sink)


rng = np.random.default_rng(3)
window = WINDOW_KV_FP8.encode(rng.standard_normal((128, C)).astype("f4"))
pool = MAIN_KV_FP4.encode(rng.standard_normal((4096, C)).astype("f4"))
near_rows, far_rows = np.arange(128), np.sort(rng.choice(4096, 512, replace=False))
far_rows[-3:] = -1  # three places stay empty
q = round_bf16(2 * rng.standard_normal((HEADS, C)).astype("f4"))
sink = rng.standard_normal(HEADS).astype("f4")
keys, valid = gather(window, near_rows, pool, far_rows)
o = tiles(q, keys, valid, sink)

from dsv41.sparse_attn import sparse_attn

where = window, near_rows[None], pool, far_rows[None], sink
defined = sparse_attn(q[None], *where, OFFICIAL)[0]
print("kernel    ", *o[0, :5], "\ndefinition", *defined[0, :5])
step = 2.0 ** (np.floor(np.log2(np.abs(defined).max())) - 7)
close("the definition, up to a bf16 step", o, defined, within=step)
assert np.mean(o != defined) < 0.02, "few numbers are rounded the other way"

# %% [markdown]
# ## A split must be ordered
#
# One token keeps one multiprocessor busy, of 132. The usual cure: cut the 640 records into parts,
# give each part to another block, and combine. Every part has a maximum of its own, and with
# $m = \max_i m_i$ the sums are brought to a common scale. In real numbers that is exact.
#
# **Break it.** But $p$ was rounded to bf16 *relative to the maximum that its part knew*. And how
# many parts? As many as fill the GPU: many for one token, one for a full batch. Then the same
# request has other bits when it has company.


# %% tags=["break"]
def split(q, keys, valid, sink, parts):
    """Each part from a fresh start, then combined."""
    ordered = pieces(q)[..., ORDER].reshape(q.shape)
    size = len(keys) // parts
    made = [partial(ordered, keys[n : n + size], valid[n : n + size])
            for n in range(0, len(keys), size)]  # fmt: skip
    top = np.max([m[2] for m in made], axis=0)
    factors = [np.exp2(m[2] - top) for m in made]
    o = sum(m[0] * f[D_AT[0]] for m, f in zip(made, factors, strict=True))
    total = sum(m[1] * f for m, f in zip(made, factors, strict=True))
    return finish(o, total, top, sink)


decoded = WINDOW_KV_FP8.decode(window, C), MAIN_KV_FP4.decode(pool, C)
reals = sparse_attn(q[None], decoded[0], near_rows[None], decoded[1], far_rows[None], sink, FLOAT32)
by_parts = {parts: split(q, keys, valid, sink, parts) for parts in (1, 2, 5, 10)}
errors = {}
for parts, result in by_parts.items():
    errors[parts] = np.sqrt(np.mean((result - reals[0]) ** 2))
    print(f"cut in {parts:2}: {np.mean(result != o):4.0%} of the numbers have other bits;", end="")
    print(f" error against real numbers {errors[parts]:.4f}")
same("cut in 1 is the kernel", by_parts[1], o)
assert max(errors.values()) < 1.1 * errors[1], "no cut is worse than another, they only differ"
kinds = {result.tobytes() for result in by_parts.values()}
assert len(kinds) == 4, "four ways to split, four different results"

# %% [markdown]
# ## A split that changes no bit
#
# [cluster.cuh](../kernels/dsv41_kernels/rope_sparse_attn/cluster.cuh) spreads a token over 64
# blocks, 16 for every 16 heads, and divides nothing that is a sum. Here with eight for 16 heads:
#
# 1. Block $r$ scores chunks $r$ and $r + 8$ and tells their maxima.
# 2. All meet. The running maximum of a chunk is the largest of the maxima up to it. So every block
#    computes $p$ of its own chunks as if it had come in turn.
# 3. All meet. Block $r$ adds the values of 64 channels, over all ten chunks, in order.
#
# In whatever order blocks run between two meetings, the bits are those of one block that does it
# all. So the wrapper may choose by what is fast: clusters of 16 for very few tokens; then
# [quad.cuh](../kernels/dsv41_kernels/rope_sparse_attn/quad.cuh), the same with clusters of four or
# two blocks for all heads; for many tokens
# [resident.cuh](../kernels/dsv41_kernels/rope_sparse_attn/resident.cuh), where a block has a token
# to itself, and then the next. Nothing that is a sum is divided there either.


# %%
def cluster(q, keys, valid, sink, rng):
    ordered, chunks = pieces(q)[..., ORDER].reshape(q.shape), len(keys) // CHUNK
    at = [slice(n * CHUNK, n * CHUNK + CHUNK) for n in range(chunks)]
    never, s, p, o = np.full(HEADS, -1e30, "f4"), {}, {}, np.zeros((32, 2, 32, 2, 2), "f4")
    maxima = {-1: never}
    for block in rng.permutation(8):  # scores
        for c in range(block, chunks, 8):
            s[c] = scores_of(ordered, keys[at[c]])
            maxima[c] = weigh(s[c], valid[at[c]], never)[1]
    running = [np.max([maxima[i] for i in range(-1, c + 1)], axis=0) for c in range(-1, chunks)]
    for block in rng.permutation(8):  # weights, as if in turn
        for c in range(block, chunks, 8):
            p[c] = weigh(s[c], valid[at[c]], running[c])[0]
    decay = [np.exp2(running[c] - running[c + 1]) for c in range(chunks)]
    for block in rng.permutation(8):  # values of 64 channels
        mine = slice(4 * block, 4 * block + 4)
        for c in range(chunks):
            o[mine] = add_values(o[mine], p[c], decay[c], keys[at[c], 64 * block : 64 * block + 64])
    total = np.zeros(HEADS, "f4")
    for c in range(chunks):
        total = total * decay[c] + p[c].sum(axis=1)
    return finish(o, total, running[-1], sink)


for seed in (1, 2, 3):
    same(f"eight blocks, order {seed}: the same bits", cluster(q, keys, valid, sink,
         np.random.default_rng(seed)), o)  # fmt: skip

# %% [markdown]
# ## Index scores: a word, straight into registers
#
# The indexer's products: keys are the rows, 32 heads the columns, 128 channels the sum. A key is 64
# bytes of FP4 and four E8M0 scales. Here nothing is copied around at all. A lane takes one word of
# a record, 8 codes, and places them: pairs $(0,4)$, $(1,5)$, $(2,6)$, $(3,7)$. Those *are* its
# fragment of $A$, if the queries are loaded in the same order.
#
# The release rounds three times: the dot, its ReLU times the weight, and the sum over heads.
# The third is a product as well: $D$ has the layout of $A$, so what was computed goes in
# again, times a matrix of ones.
#
# (This is [score_mma.cuh](../kernels/dsv41_kernels/score_mma.cuh). The versions that run today
# make whole numbers of the codes, one INT8 product of all 128 channels;
# [score_int8.cuh](../kernels/dsv41_kernels/score_int8.cuh) says when that is exact, and
# [score_fp8.cuh](../kernels/dsv41_kernels/score_fp8.cuh) what is done when it is not.)


# %%
def query_fragments(q):
    """q (32 heads, 128) -> (4 groups of heads, 8 steps, 32 lanes, 2, 2); load_fragments"""
    lanes, g, c = np.arange(32), np.arange(32) // 4, np.arange(32) % 4
    fragments = np.zeros((4, 8, 32, 2, 2), "f4")
    for n, step in np.ndindex(4, 8):
        first = 8 * (step // 2 * 4 + c) + step % 2 * 2
        for register, upper in np.ndindex(2, 2):
            fragments[n, step, lanes, register, upper] = q[8 * n + g, first + register + 4 * upper]
    return fragments * np.float32(2.0**64)


def tile_scores(records, fragments, w):
    """records (16, 68) u8, w (32,) -> the scores of 16 keys"""
    words, g, c = records[:, :64].copy().view("u4"), np.arange(32) // 4, np.arange(32) % 4
    scales = ((records[:, 64:].astype("u4") + 62) << 23).view("f4")  # 2^(e - 127 + 126 - 64)
    dots = np.zeros((4, 32, 2, 2), "f4")
    for i in range(4):  # a word of each group of 32 channels
        upper, lower = (
            place_e2m1(words[row, 4 * i + c], scales[row, i]).reshape(32, 4, 2)
            for row in (g, g + 8)
        )
        for half in range(2):
            two = slice(2 * half, 2 * half + 2)
            a = np.stack([upper[:, two], lower[:, two]], axis=2).reshape(32, 4, 2)
            for n in range(4):
                dots[n] = mma(dots[n], a, fragments[n, 2 * i + half])
    sums, ones = np.zeros((32, 2, 2), "f4"), np.ones((32, 2, 2), "f4")
    for n in (0, 2):
        weights = np.stack([w[8 * m + 2 * c[:, None] + TWO[0]] for m in (n, n + 1)], axis=1)
        positive = round_bf16(np.maximum(dots[n : n + 2], 0)).swapaxes(0, 1)  # (32, 2, rows, 2)
        weighted = round_bf16(positive * weights[:, :, None])
        sums = mma(sums, weighted.reshape(32, 4, 2), ones)
    scores = np.zeros(16, "f4")
    scores[D_AT[0][:, :, 0]] = sums[:, :, 0]  # all columns are the same sum
    return round_bf16(scores)


from dsv41.indexer import index_scores, index_topk

rng = np.random.default_rng(4)
keys4 = INDEX_FP4.encode(rng.standard_normal((16_384, 128)).astype("f4"))  # a candidate pool
q4 = INDEX_FP4.fake(rng.standard_normal((32, 128)).astype("f4"))
w4 = round_bf16(rng.standard_normal(32).astype("f4") / np.float32(64))
fragments = query_fragments(q4)
made = [tile_scores(keys4[n : n + 16], fragments, w4) for n in range(0, 4096, 16)]
made, defined4 = np.concatenate(made), index_scores(q4[None], w4[None], keys4, OFFICIAL)[0]
print("lanes     ", *made[:6], "\ndefinition", *defined4[:6])
other = np.sum(made != defined4[:4096])
print(f"{other} of {made.size:,} scores lay on a tie of the last rounding and went the other way")
assert other < 40, "all others have the definition's bits"
close("those by one bf16 step", made, defined4[:4096], within=2.0**-8 * np.abs(defined4).max())

# %% [markdown]
# **Break it.** "More precise cannot hurt": leave out the rounding points. Scores then differ where
# bf16 made ties, and the choice of 512 is another one. Whoever compares with the release finds
# entries that it never read.

# %% tags=["break"]
exact4 = index_scores(q4[None], w4[None], INDEX_FP4.decode(keys4, 128), FLOAT32)[0]
visible = np.array([16_384])
chosen, precise = (set(index_topk(s[None], visible, 512)[0]) for s in (defined4, exact4))
print(f"{len(set(defined4.tolist())):,} different scores with rounding points,", end="")
print(f" of {len(defined4):,}; without them {len(chosen - precise)} of 512 choices differ")
assert len(chosen - precise) > 0, "another choice"
assert len(set(exact4.tolist())) > 0.99 * len(exact4), "without rounding hardly a tie"

# %% [markdown]
# ## The best 512, without sorting
#
# A float32 becomes an integer whose order is the order of choice: positive numbers get the top bit,
# negative ones are inverted. −0 becomes +0 first. Key 0 means never: −∞, NaN, hidden.
#
# Then four rounds. Count how many keys have which highest byte. Walk down from 255 until 512 are
# reached: that byte belongs to the 512th. Go on with the next byte, among the keys that share it.
# At the end the threshold is known, and how many of those equal to it still fit. *The first from
# the left* do.
#
# This is [topk.cuh](../kernels/dsv41_kernels/topk.cuh). The version that runs today,
# [topk_held.cuh](../kernels/dsv41_kernels/topk_held.cuh), makes the same choice with fewer rounds:
# it finds a bound that 512 of the scores surely reach, spreads what lies above it over 2,048
# counters, and has the 512th in one of them, beside few others.


# %%
def order_key(x):
    bits = np.float32(x).view("u4")
    never = np.isnan(x) | (bits == 0xFF800000)
    bits = np.where(bits == 0x80000000, np.uint32(0), bits)
    key = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))
    return np.where(never, np.uint32(0), key)


def radix(keys, k):
    """-> chosen entries, ascending, and how many keys each round still looked at"""
    prefix, left, open_keys = 0, k, []
    for shift in (24, 16, 8, 0):
        settled = 0 if shift == 24 else 0xFFFFFFFF << (shift + 8) & 0xFFFFFFFF
        candidates = keys[(keys & np.uint32(settled)) == prefix]
        open_keys.append(len(candidates))
        counts = np.bincount(candidates >> np.uint32(shift) & np.uint32(255), minlength=256)
        digit = 255
        while counts[digit] < left:
            left, digit = left - counts[digit], digit - 1
        prefix |= digit << shift
    level = np.cumsum(keys == prefix)  # equal ones, counted from the left
    return np.flatnonzero((keys > prefix) | ((keys == prefix) & (level <= left))), open_keys


some = np.float32([-np.inf, -3, -0.5, -0.0, 0.0, 1e-40, 0.5, 3, np.inf])
for value, key in zip(some, order_key(some), strict=True):
    print(f"{value:8.2g} -> {key:08x}")
assert (np.diff(order_key(some).astype("i8")) >= 0).all(), "the order of the numbers"
same("-0 and +0 are equal", order_key(some)[3], order_key(some)[4])
got, open_keys = radix(order_key(defined4), 512)
same("radix select = the definition", got, index_topk(defined4[None], visible, 512)[0])
at_bound = defined4 == np.sort(defined4)[-512]
ties = np.flatnonzero(at_bound)
fit = np.intersect1d(ties, got)
assert 0 < len(fit) < len(ties), "several entries score as the 512th does, and not all fit"
print(f"{len(ties)} entries score as the 512th does, {len(fit)} fit: ", end="")
print(f"{fit[-1]} is the last one in, {ties[len(fit)]} the first one out")
same("the lowest entries win", fit, ties[: len(fit)])

# %%
wide = np.random.default_rng(5).standard_normal(1 << 20).astype("f4")
rounds = {"1M float32 numbers": radix(order_key(wide), 512)[1]}
rounds["1M numbers rounded to bf16"] = radix(order_key(round_bf16(wide)), 512)[1]
with figure("Keys that a round still has to look at, of 1,048,576") as ax:
    for (name, counts), colour in zip(rounds.items(), (BLUE, ORANGE), strict=True):
        ax.plot(range(1, 5), counts, color=colour, marker="o")
        ax.text(4.08, counts[-1], name[3:].replace("numbers ", ""), color=colour, va="center")
        print(f"{name}: {counts}")
    ax.axhline(512, color=GREY, linestyle=":")
    ax.text(1.0, 560, "512", color=GREY)
    ax.set(yscale="log", xticks=range(1, 5), xlim=(0.9, 5.3))
    ax.set(ylim=(0.5, 3e6), xlabel="round, 8 bits each")
assert rounds["1M numbers rounded to bf16"][2:] == [rounds["1M numbers rounded to bf16"][2]] * 2, (
    "bf16 has no digits left after 16 bits: the last two rounds decide nothing"
)

# %% [markdown]
# **Break it.** Take the bits of the float as they are. Negative numbers then have the largest keys,
# and the most negative one is the best of all.

# %% tags=["break"]
raw, _ = radix(defined4.view("u4"), 512)
print(f"best score {defined4.max():.2f}; raw bits choose from {defined4[raw].min():.2f}", end="")
print(f" to {defined4[raw].max():.2f}")
assert defined4[raw].max() < 0, "512 negative scores"
assert defined4.min() in defined4[raw], "the worst of all among them"

# %% [markdown]
# ## Bytes and operations
#
# What one query costs, from the shapes of V4.1-Flash: 64 heads of 512 channels, 128 + 512 records;
# 32 index heads of 128 channels.

# %%
record_bytes = 128 * WINDOW_KV_FP8.record_bytes(512) + 512 * MAIN_KV_FP4.record_bytes(512)
flops = 2 * 2 * 64 * 512 * 640  # a multiply-add counts two; scores and values
products = 64 // 16 * (640 // 8 * 512 // 16 + 512 // 8 * 640 // 16)
print(f"records {record_bytes:,} bytes, {flops / 1e6:.1f} MFLOP, {products:,} mma instructions")
close("an mma is 4,096 operations", products * 4096, flops, within=0)
print(f"v1, a block a head: records decoded {2 * 64} times, {128 * 640:,} decodings for 640")
key_bytes, key_flops = INDEX_FP4.record_bytes(128), 2 * 32 * 128
print(f"an index key: {key_bytes} bytes, {key_flops:,} operations")
close("215,040 bytes", record_bytes, 215_040, within=0)
assert flops / record_bytes > 3 * key_flops / key_bytes, "attention does more with a byte"

# %% [markdown]
# ## What the compiler made of it
#
# One SM has 65,536 registers. NVRTC needs no GPU to say what a kernel takes of them.

# %%
from importlib.metadata import version as installed

from dsv41_kernels import nvrtc
from dsv41_kernels.launch import builds

if nvrtc.available():
    scorer, page = {"HEADS": "32", "BF16": "1"}, ("tiles", "scores_v1", "scores_v2", "topk_v1")
    wanted = {"rope_sparse_attn": {"HEADS": "16"}, "index_scores": scorer, "index_topk": {}}
    for op, sizes in wanted.items():
        arch, macros = next(b for b in builds(op) if sizes.items() <= b[1].items())
        for k in nvrtc.usage(op, arch, macros):
            if k.name not in page:
                continue
            print(f"versions: NVRTC {installed('nvidia-cuda-nvrtc')}: {k.name:10}", end="")
            print(f"{k.registers:4} registers, {k.spills} bytes spilled")
            assert k.registers <= 255, f"{k.name}: within what a thread can have"
else:
    print('NVRTC is not installed: pip install -e ".[simulator]"')
for op in ("rope_sparse_attn", "index_scores", "index_topk"):
    report(op)

# %% [markdown]
# ## The modules give the same numbers
#
# The kernel also turns the query by its position and the output back. Together with this page's
# products that is [rope_sparse_attn](../dsv41/sparse_attn.py#rope_sparse_attn), what a layer calls.

# %%
from dsv41.rope import rotate
from dsv41.sparse_attn import rope_sparse_attn

freqs, position = np.float32(160_000.0 ** -(np.arange(32) / 32)), np.array([70_001])
turned = round_bf16(rotate(q[None], position, freqs))[0]
mine = tiles(turned, keys, valid, sink)
mine = round_bf16(rotate(mine[None], position, freqs, inverse=True))[0]
defined = rope_sparse_attn(q[None], position, freqs, *where, OFFICIAL)[0]
close("attention with both rotations", mine, defined, within=2 * step)
assert np.mean(mine != defined) < 0.02, "and nearly always the same bits"
best, _ = radix(order_key(made), 512)
same("top-k of the page's own scores", best, index_topk(made[None], np.array([4096]), 512)[0])
chunked = np.concatenate([scores_of(q, keys[n : n + 16]) for n in range(0, 64, 16)], axis=1)
exact = q.astype("f8") @ keys[:64].T.astype("f8")
close("products of lanes, against float64", chunked, exact, within=1e-5 * np.abs(exact).max())

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Element $(r, c)$ of the 16×8 result $D$: which lane holds it, and which of its four registers?
#    Registers 0, 1 are row $g$, registers 2, 3 row $g + 8$.
# 2. One E4M3 code into the bits of a bf16 that is its value times $2^{-120}$. Moving bits only.
# 3. One integer that knows the tie rule. Of two entries with equal scores the lower one is better.
#    Make a 64-bit number from `order_key` of the score and the entry, so that a larger number is
#    always the better choice and no two are equal.


# %% tags=["exercise"]
def holder(row, column):
    """row 0 .. 15, column 0 .. 7 -> (lane, register)"""
    return ...


check("22.holder", holder)


# %% tags=["exercise"]
def placed(code):
    """code 0 .. 255 int -> int, 16 bits"""
    return ...


check("22.placed", placed)


# %% tags=["exercise"]
def choice(key, entry):
    """key int, 32 bits; entry int, below 2^32 -> int, 64 bits"""
    return ...


check("22.choice", choice)

# %% [markdown]
# ## What we learned
#
# - A fragment is a rule who holds what. Lanes together hold each number once, and 2,048
#   multiply-adds are one instruction.
# - One latent is key and value: the same bytes, loaded as they lie and transposed.
# - Codes become bf16 by moving bits and one product, exactly. Any order of channels will do, if
#   both sides share it.
# - $p$ is rounded relative to the maximum so far. Cutting the list changes bits; cutting heads,
#   channels and chunks in order does not.
# - Top-k needs no sort: four rounds of counting and a rule for ties.
#
# Worked solutions: [solutions/22_tensor_cores.py](solutions/22_tensor_cores.py). Next: how fast
# could all that be? [23 · Measuring](23_measuring.ipynb).
