# %% [markdown]
# # 21 · RawKernels: Mega-mHC, one pass over the streams
#
# **How do five kernels become one that reads the residual streams once, and who says that it
# computes the same?**
#
# Between two sublayers, four streams of 5,120 numbers are updated, collapsed, normalised, and asked
# for the next 24 mixing coefficients. [Chapter 10](10_hyper_connections.ipynb) found that half of
# the traffic is enough. This chapter reads the CUDA C++ that does it, rung by rung, and re-enacts
# what a rung computes.
#
# You need chapter 10, and warps from [chapter 20](20_first_numba_kernel.ipynb). 30 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks,simulator]"`. Then open this page in Jupyter,
# or run `python tutorials/21_rawkernels.py`.
#
# **No GPU is needed, and none is used.** One kernel runs in Numba's simulator, the others are
# re-enacted in NumPy. CUDA sources are compiled for Hopper by NVRTC, which needs no GPU either.
# Times come from files in `kernels/results`, measured on the GPU that they name.
#
# Sources: the V4.1 report, §2.4.1; the CUDA C++ Programming Guide, for warps and for the limits of
# compute capability 9.0. The kernels: [kernel.cu](../kernels/dsv41_kernels/hc_boundary/kernel.cu)
# and [one_pass.cuh](../kernels/dsv41_kernels/hc_boundary/one_pass.cuh); their definition:
# [mhc.hc_boundary](../dsv41/mhc.py#hc_boundary).

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when numba is imported: simulate, GPU or not

import re
import warnings
from types import SimpleNamespace

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # numba-cuda's own, from NumPy 2.5 on
    import numba
    from numba import cuda

from lib.measured import report
from lib.page import BLUE, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib", "numba", "numba-cuda")
assert numba.config.ENABLE_CUDASIM, "this page runs in the simulator"

# %% [markdown]
# ## From one sublayer to the next
#
# The sublayer has left its output $y$. Its coefficients are known: $A$ from the sublayer before,
# $B$ and $C$ its own. What happens to one token:
#
# $$X'_k = C_k\, y + \sum_j B_{jk} X_j, \qquad x = \sum_k A_k X'_k, \qquad
# \hat x = \frac{x}{\mathrm{rms}(x)}\, g, \qquad u = \frac{\mathrm{fn}\, X'}{\mathrm{rms}(X')}$$
#
# $\hat x$ goes into the next sublayer. $u$ becomes the next $A$, $B$, $C$. Two streams of four
# numbers, by hand:

# %%
from dsv41.formats import round_bf16
from dsv41.mhc import hc_boundary, hc_coefficients, sinkhorn
from dsv41.quant import FLOAT32, OFFICIAL

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
X, y = [[1.0, 2, 0, -1], [0, 1, 3, 1]], [2.0, 0, -2, 4]
A, C, B = [0.5, 0.25], [1.0, 0.5], [[0.75, 0.25], [0.25, 0.75]]  # B: from, to

new = [[C[k] * y[c] + sum(B[j][k] * X[j][c] for j in (0, 1)) for c in range(4)] for k in (0, 1)]
x = [sum(A[k] * new[k][c] for k in (0, 1)) for c in range(4)]
rms = (sum(v * v for v in x) / 4) ** 0.5
print("new streams", new, "\nx          ", x, "\nnormalised ", [round(v / rms, 4) for v in x])

one = [np.float32(v)[None] for v in (X, y, A, C, B)]
parameters = np.zeros((8, 8), "f4"), np.zeros(8, "f4"), np.ones(3, "f4"), np.ones(4, "f4")
defined = hc_boundary(*one, *parameters, CONFIG, FLOAT32)
same("streams by hand = the definition", defined[0][0], np.float32(new))
close("x by hand = the definition", defined[1][0], np.float32(x) / rms, within=1e-6)

# %% [markdown]
# ## A RawKernel is a string
#
# Numba compiles Python. CuPy's `RawKernel` takes CUDA C++ as text and compiles it when it is first
# called, for the GPU that it finds, with sizes as macros. What `S` is, the compiler knows; loops
# over it disappear. Here is the collapse, $x = \sum_i A_i X_i$, as it stands in its file:

# %%
from dsv41_kernels.launch import builds, options, source

text = source("hc_collapse")
print(text[text.index('extern "C"') :].strip())
arch, macros = builds("hc_collapse")[1]
print("compiled with", " ".join(options(arch, macros)))
assert macros == {"S": "4", "ROUND": "1"}, "its own // build: line says so"

# %% [markdown]
# A thread owns one channel of one token. Blocks are numbered through: block $b$ has token
# $b / \text{tiles}$. The same in Numba, but for the fused addition, run in the simulator. 300
# channels are two tiles of 256, so the guard has work to do.


# %%
@cuda.jit
def collapse_kernel(streams, pre, x, visits, tiles, width):
    t = cuda.blockIdx.x // tiles
    c = cuda.blockIdx.x % tiles * cuda.blockDim.x + cuda.threadIdx.x
    if c >= width:
        return
    total = np.float32(0)
    for i in range(4):
        total += pre[t, i] * streams[t, i, c]
    x[t, c] = total
    visits[t, c] += 1


rng = np.random.default_rng(1)
tokens, width = 2, 300
streams, pre = rng.standard_normal((tokens, 4, width), "f4"), rng.uniform(0, 1, (tokens, 4))
pre = pre.astype("f4")
x, visits = np.zeros((tokens, width), "f4"), np.zeros((tokens, width), "i4")
collapse_kernel[tokens * 2, 256](streams, pre, x, visits, 2, width)
same("every number once", visits, np.ones((tokens, width), "i4"))
close("the collapse of the definition", x, (pre[:, None] @ streams)[:, 0], within=1e-5)

# %% [markdown]
# ## One rounding or two
#
# The CUDA text does not say `sum += a * b`. It says `__fmaf_rn(a, b, sum)`, one instruction with
# one rounding. Of `a * b + sum` a compiler may make either, and the next version of it the other.
# Does anybody notice, when the result is rounded to bf16 anyway?
#
# **Break it.** The update $X'_k$ in the kernel's order, and with every product rounded first. In
# float64 a product of two float32 is exact, so a fused operation is easy to re-enact.


# %% tags=["break"]
def fma(a, b, c):
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype("f4")


def rounded_twice(a, b, c):
    return np.float32(a) * np.float32(b) + np.float32(c)


def new_stream(k, post, comb, x, y, accumulate=fma):
    """Column k of comb, streams in order, then the rounded post * y: hc_update/kernel.cu."""
    mixed = np.zeros_like(y)
    for j in range(len(x)):
        mixed = accumulate(comb[j, k], x[j], mixed)
    return np.float32(post[k]) * y + mixed


rng = np.random.default_rng(2)
x, y = (
    round_bf16(rng.standard_normal((4, 1_000_000), "f4")),
    round_bf16(rng.standard_normal(1_000_000)),
)
post, comb = rng.uniform(0, 2, 4).astype("f4"), rng.uniform(0, 0.5, (4, 4)).astype("f4")
fused, split_up = (new_stream(0, post, comb, x, y, how) for how in (fma, rounded_twice))
bits = np.mean(fused != split_up)
flips = round_bf16(fused) != round_bf16(split_up)
print(f"float32 differs in {bits:.0%} of the numbers, bf16 in {flips.sum()} of {flips.size:,}")
at = int(np.argmax(flips))
print(f"for example {fused[at]:.9f} and {split_up[at]:.9f}: bf16", end="")
print(f" {round_bf16(fused)[at]} and {round_bf16(split_up)[at]}")
assert bits > 0.1 and 0 < flips.sum() < 1000, "rare, and no test of 1e-2 would ever see it"

# %% [markdown]
# 23 in a million, each by a whole step of bf16. So the order is written out, and all versions below
# use it. That makes "the same streams" mean equal bits.
#
# ## The ladder, counted
#
# `Memory` counts every number that is read from or written to an array in slow memory. Local
# variables are free: they stand for registers and shared memory. A *stride* is 256 channels, one
# for each thread of a block. All three rungs add their dot products thread by thread, as v3 does,
# so that they can be compared bit for bit. (v1's own kernel cuts a row into pieces first.)
#
# **v1**, a kernel for each step. What one step leaves, the next one fetches.


# %%
class Memory:
    """An array in slow memory; `tally` counts numbers, by the name of the array."""

    def __init__(self, name, array, tally):
        self.name, self.array, self.tally = name, array, tally

    def _count(self, numbers):
        self.tally[self.name] = self.tally.get(self.name, 0) + numbers.size

    def __getitem__(self, at):
        self._count(self.array[at])
        return self.array[at]

    def __setitem__(self, at, value):
        self._count(self.array[at])
        self.array[at] = value


n, d, T, THREADS = 4, 5120, 4, 256
strides = [slice(start, start + THREADS) for start in range(0, d, THREADS)]
rng = np.random.default_rng(3)
given = SimpleNamespace(
    X=round_bf16(rng.standard_normal((T, n, d), "f4")),
    y=round_bf16(rng.standard_normal((T, d), "f4")),
    A=rng.uniform(0, 1, (T, n)).astype("f4"),
    C=rng.uniform(0, 2, (T, n)).astype("f4"),
    B=rng.uniform(0, 0.5, (T, n, n)).astype("f4"),  # from Sinkhorn, but any numbers will do
    fn=rng.standard_normal((24, n, d), "f4") / np.float32(n * d) ** 0.5,
    norm=1 + rng.standard_normal(d, "f4") / 10,
)
stored = round_bf16  # what a number becomes when it is stored


def new_memory():
    tally, zeros = {}, np.zeros((T, n, d), "f4")
    arrays = (("X", given.X), ("y", given.y), ("fn", given.fn), ("X'", zeros),
              ("x", zeros[:, 0].copy()), ("normalised", zeros[:, 0].copy()))  # fmt: skip
    return tally, [Memory(name, array, tally) for name, array in arrays]


def update(t, x, y):
    return np.stack([stored(new_stream(k, given.C[t], given.B[t], x, y)) for k in range(n)])


def collapse(t, x):
    total = np.zeros(x.shape[1], "f4")
    for k in range(n):
        total = fma(given.A[t, k], x[k], total)
    return stored(total)


def normalised(row):
    root = np.float32(1) / np.sqrt(np.mean(row * row) + np.float32(CONFIG.rms_norm_eps))
    return stored(row * root * given.norm)


def v1():
    tally, (X, y, fn, X_new, x, x_norm) = new_memory()
    sums = np.zeros((T, THREADS, 32), "f4")  # by thread: 24 dot products, a sum of squares
    for t in range(T):
        for at in strides:  # hc_update
            X_new[t, :, at] = update(t, X[t, :, at], y[t, at])
    for at in strides:  # hc_coefficients: a number of fn serves the tokens of a block
        weights = fn[:, :, at]
        for t in range(T):
            add_dots(sums[t], weights, X_new[t, :, at])
    for t in range(T):
        for at in strides:  # hc_collapse
            x[t, at] = collapse(t, X_new[t, :, at])
    for t in range(T):
        x_norm[t] = normalised(x[t])  # normalise; 10 kB: its second look is served by the cache
    return X_new.array, x_norm.array, sums, tally


def add_dots(sums, weights, tile):
    """Every thread adds its channel: sums (256, 32), weights (24, n, 256), tile (n, 256)."""
    for k in range(n):
        sums[:, :24] += (weights[:, k] * tile[k]).T
        sums[:, 24] += tile[k] * tile[k]


# %% [markdown]
# **v2** updates, then does everything that reads the new streams at once. **v3** does not read them
# at all: when a thread has made its channel of the four new streams, it has them in registers, and
# $A$ is known. Only the collapsed row waits, in shared memory, until its RMS is there.


# %%
def v2():
    tally, (X, y, fn, X_new, _, x_norm) = new_memory()
    sums, rows = np.zeros((T, THREADS, 32), "f4"), np.zeros((T, d), "f4")
    for t in range(T):
        for at in strides:  # hc_update
            X_new[t, :, at] = update(t, X[t, :, at], y[t, at])
    for at in strides:  # enter
        weights = fn[:, :, at]
        for t in range(T):
            tile = X_new[t, :, at]
            add_dots(sums[t], weights, tile)
            rows[t, at] = collapse(t, tile)
    for t in range(T):
        x_norm[t] = normalised(rows[t])
    return X_new.array, x_norm.array, sums, tally


def v3():
    tally, (X, y, fn, X_new, _, x_norm) = new_memory()
    sums, rows = np.zeros((T, THREADS, 32), "f4"), np.zeros((T, d), "f4")
    for at in strides:  # boundary
        weights = fn[:, :, at]
        for t in range(T):
            tile = update(t, X[t, :, at], y[t, at])
            X_new[t, :, at] = tile
            add_dots(sums[t], weights, tile)
            rows[t, at] = collapse(t, tile)
    for t in range(T):
        x_norm[t] = normalised(rows[t])
    return X_new.array, x_norm.array, sums, tally


ladder = {"v1": v1(), "v2": v2(), "v3": v3()}
header = source("hc_boundary").split("#include")[0]
counted = {}
for name, (made, into, sums, tally) in ladder.items():
    same(f"{name}: the streams of v1", made, ladder["v1"][0])
    same(f"{name}: the x of v1", into, ladder["v1"][1])
    same(f"{name}: the sums of v1", sums, ladder["v1"][2])
    counted[name] = sum(tally[key] for key in tally if key != "fn") // T
    a, b = map(int, re.search(rf"//   {name} .*\((\d)n \+ (\d)\) d", header).groups())
    print(f"  {name}: {counted[name] // d:2} d a token; kernel.cu says ({a}n + {b}) d")
    assert counted[name] == (a * n + b) * d, "what the kernel's own text says"

# %% [markdown]
# $(4n+4)d$, $(3n+2)d$, $(2n+2)d$: what [chapter 10](10_hyper_connections.ipynb) counted from the
# equations, here from the kernels' steps. And $(2n + 2)d$ is the floor: $X$ and $y$ must be read,
# $X'$ and $\hat x$ written.
#
# ## What the formula leaves out
#
# `fn` is no activation, it is 24 rows of 20,480 weights: 2 MB, which stay in the L2 cache. But
# every block reads all of it. The block sizes stand in the sources.


# %%
def constant(name):
    return int(re.search(rf"constexpr int {name} = (\d+);", source("hc_boundary"))[1])


arch, macros = builds("hc_boundary")[0]
UNITS, HALVES = int(macros["UNITS"]), int(macros["HALVES"])
assert 32 * UNITS * HALVES == d, "v4 cuts the channels into halves, and those into units of 32"
fn_bytes = 4 * 24 * n * d
TEAMS = 132 // HALVES  # for many tokens v4 has a block for each of 132 SMs, a half of fn in each
per_token = {
    "v3": fn_bytes / constant("ROWS"),
    "v4, 64 tokens": fn_bytes / 64,  # a block: 64 tokens, one unit's channels
    "v4, 4,096 tokens": TEAMS * fn_bytes / 4096,  # a half stays in a block's shared memory
}
print(f"fn: {fn_bytes / 1e6:.2f} MB; streams, y and x: {2 * counted['v3'] / 1e3:.1f} kB a token")
for name, amount in per_token.items():
    print(f"{name:18} reads {amount / 1e3:6.1f} kB of fn a token from L2")
assert ladder["v3"][3]["fn"] * 4 / T == per_token["v3"], "the count of v3's block of four tokens"
assert per_token["v3"] > 4 * 2 * counted["v3"], "almost five times the streams, from L2"
parked = 8 * (24 + 2) * HALVES  # dot products and two sums of squares, each beside a tag
print(f"v4, 4,096 tokens, also parks {parked / 1e3:.1f} kB of sums a token in L2")
assert f"{parked // HALVES} * HALVES of sums stay in L2" in source("hc_boundary"), "as it says"

with figure("Bytes a token: v3 is at the floor of memory, v4 spares L2 as well") as ax:
    names = ("v1", "v2", "v3", "v4")
    memory = [2 * counted[name] / 1e3 for name in ("v1", "v2", "v3", "v3")]
    weights = [ladder[name][3]["fn"] * 4 / T / 1e3 for name in ("v1", "v2", "v3")]
    weights.append(per_token["v4, 4,096 tokens"] / 1e3)
    for at, (first, second) in enumerate(zip(memory, weights, strict=True)):
        ax.barh(-at + 0.2, first, height=0.36, color=BLUE)
        ax.text(first + 5, -at + 0.2, f"{first:.0f} kB", va="center", color=BLUE)
        ax.barh(-at - 0.2, second, height=0.36, color=GREY)
        ax.text(second + 5, -at - 0.2, f"{second:.0f} kB", va="center", color=GREY)
    ax.text(330, 0.2, "through memory, bf16", color=BLUE, fontweight="bold", va="center")
    ax.text(330, -3.2, "fn, from L2", color=GREY, fontweight="bold", va="center")
    ax.set(yticks=[0, -1, -2, -3], yticklabels=names, xlim=(0, 600), xlabel="kB a token")

# %% [markdown]
# (v1 and v2 are drawn with v3's blocks of four tokens. v4 is drawn at 4,096 tokens.)
#
# ## 32 sums in 31 exchanges
#
# A warp ends with 32 lanes holding 32 partial sums each. Lane $l$ shall have the total of number
# $l$. One sum over a warp takes 5 exchanges between lanes, so 32 sums take 160? No. In each step a
# lane *gives away* the half of the numbers that it does not care for, and gets its partner's share
# of the half that it keeps: 16 + 8 + 4 + 2 + 1.


# %%
def warp_sums(v):
    """v (32 lanes, 32 numbers) f32 -> (32,): what each lane ends up with; mhc.cuh"""
    lanes, exchanges, half = np.arange(32), 0, 16
    while half:
        upper = (lanes & half > 0)[:, None]
        low, high = v[:, :half], v[:, half : 2 * half]
        give, keep = np.where(upper, low, high), np.where(upper, high, low)
        v = keep + give[lanes ^ half]  # __shfl_xor_sync
        exchanges, half = exchanges + half, half // 2
    return v[:, 0], exchanges


by_warp = ladder["v3"][2][0].reshape(8, 32, 32)  # token 0: warp, lane, number
totals = np.zeros(32, "f4")
for warp in range(8):  # warps in order
    mine, exchanges = warp_sums(by_warp[warp])
    totals += mine
exact = by_warp.astype("f8").sum(axis=(0, 1))
print(f"{exchanges} exchanges a lane, not {5 * 32}")
close("lane l has the total of number l", totals, exact, within=1e-2)
assert np.abs(totals[:24] - exact[:24]).max() < 1e-5, "the dot products, to 1e-5"
assert exchanges == 31, "16 + 8 + 4 + 2 + 1"

# %% [markdown]
# **Break it.** Keep the wrong half: `lanes & half == 0` instead of `> 0`. All totals are right, and
# each is with the wrong lane. A test that compares sorted sums, or the sum of the sums, passes.


# %% tags=["break"]
def wrong_half(v):
    lanes, half = np.arange(32), 16
    while half:
        upper = (lanes & half == 0)[:, None]
        low, high = v[:, :half], v[:, half : 2 * half]
        v = np.where(upper, high, low) + np.where(upper, low, high)[lanes ^ half]
        half //= 2
    return v[:, 0]


right, wrong = warp_sums(by_warp[0])[0], wrong_half(by_warp[0])
for lane in (8, 9, 10):
    print(f"lane {lane:2}: right {right[lane]:7.3f}, wrong {wrong[lane]:7.3f}")
close("sorted, they are the same", np.sort(wrong), np.sort(right), within=1e-2)
assert not np.allclose(wrong, right), "number 23 is where number 8 belongs"
close("number l went to lane 31 - l", wrong[::-1], right, within=1e-2)

# %% [markdown]
# ## Who comes last must not matter
#
# For many tokens v4 cuts the channels: 32 *halves* of 160, each summed by another block. Blocks
# finish in any order. Adding to one number as they come (an atomic addition) is easy, and runs
# differ in their bits. So every half leaves its sum in a place of its own, in one word with a tag,
# which no launch and no other tokens of this one have had in that place before. Whoever sees the
# tag in all places adds 32 sums, in an order of the places. Nobody counts arrivals, and places are
# never cleared. (For few tokens 160 blocks leave sums of 32 channels, three in a word of 16 bytes
# with a tag, which are added up to the same halves.)

# %%
rng = np.random.default_rng(4)
halves = rng.standard_normal(HALVES, "f4")
as_they_come, by_place = set(), set()
for _ in range(1000):
    arrival, atomic, places = rng.permutation(HALVES), np.float32(0), np.zeros(HALVES, "f4")
    for half in arrival:
        atomic += halves[half]
        places[half] = halves[half]
    total = np.float32(0)
    for half in range(HALVES):
        total += places[half]
    as_they_come.add(float(atomic))
    by_place.add(float(total))
print(
    f"1,000 orders of arrival: {len(as_they_come)} results as they come, {len(by_place)} by place"
)
assert len(as_they_come) > 5 and len(by_place) == 1, "one place each: one result"
close("all of them nearly right", sorted(as_they_come), [float(total)] * len(as_they_come), 1e-5)

# %% [markdown]
# The cut depends on $d$ alone, never on the number of tokens. That is why a token has the same bits
# alone and in a batch, although one token and 4,096 run different kernels. This page cannot show
# that; [a test](../tests/test_kernels_hc_boundary.py) on a GPU does.
#
# ## Tensor cores without losing a bit
#
# 24 dot products of length 20,480 for each token are a matrix product. Tensor cores take bf16, and
# a product of two bf16 is exact in float32. The streams *are* bf16. `fn` is float32 with 24
# significant bits, and bf16 has 8. So write each weight as a sum of three bf16 numbers, and
# multiply three times.
#
# What a tensor core does when it *adds* is its own affair and cannot be re-enacted here. The kernel
# takes the sums out after 64 numbers of a row, three parts each, and goes on in float32; the tests
# on a GPU hold the result to 1e-6.


# %%
def parts_of(w, count=3):
    """w f32 -> (count, ...) bf16 values that add up to w, the largest first"""
    parts = []
    for _ in range(count):
        parts.append(round_bf16(w))
        w = w - parts[-1]  # exact: the digits that did not fit
    return np.stack(parts)


w = given.fn[0, 0, :2]
for value, row in zip(w, parts_of(w).T, strict=True):
    print(f"{value:.12f} = " + " + ".join(f"{part:.12f}" for part in row))
same(
    "three parts, added exactly, are fn",
    parts_of(given.fn).sum(axis=0, dtype="f8"),
    given.fn.astype("f8"),
)
same("each part is a bf16 number", parts_of(given.fn), round_bf16(parts_of(given.fn)))


def tf32(w):
    """Rounded to the 11 significant bits of TF32, the other way to use tensor cores."""
    return ((w.view("u4") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("f4")


v = ladder["v3"][0].reshape(T, n * d).astype("f8")
exact = v @ given.fn.reshape(24, n * d).T.astype("f8")
kinds = {f"{count} bf16": parts_of(given.fn, count).sum(axis=0, dtype="f8") for count in (1, 2, 3)}
kinds = {"1 bf16": kinds["1 bf16"], "TF32": tf32(given.fn).astype("f8"), **kinds}
errors = {}
for name, weights in kinds.items():
    errors[name] = float(np.abs(v @ weights.reshape(24, n * d).T - exact).max())
    print(f"{name:7} largest error of the 24 numbers {errors[name]:.2e}")
assert errors["TF32"] > 1e-5, "TF32 is not enough: coefficients are promised to 1e-6"
assert errors["2 bf16"] > 1e-6, "two parts are not enough either"
assert errors["3 bf16"] < 1e-12, "three parts: what float64 itself rounds"

# %%
with figure("Largest error of a dot product, by what the weight is rounded to") as ax:
    shown = {name: max(error, 1e-13) for name, error in errors.items()}
    colours = (ORANGE, ORANGE, ORANGE, BLUE)
    for at, ((name, error), colour) in enumerate(zip(shown.items(), colours, strict=True)):
        ax.plot([1e-13, error], [-at, -at], color=colour, linewidth=6, solid_capstyle="butt")
        label = "none" if error == 1e-13 else f"{errors[name]:.0e}"
        ax.text(error * 1.5, -at, label, va="center", color=colour)
    ax.axvline(1e-6, color=GREY, linestyle=":")
    ax.text(1.3e-6, -3.0, "promised: 1e-6", color=GREY, va="center")
    ax.set(xscale="log", xlim=(1e-13, 1), yticks=range(0, -4, -1), yticklabels=list(shown))
    ax.set(ylim=(-3.6, 0.6))

# %% [markdown]
# ## Sinkhorn on eight numbers
#
# The definition divides a 4×4 matrix 39 times. Every pass scales rows or columns. So keep the
# matrix as it is, and change only a factor for each row and each column: 4 reciprocals a pass
# instead of 16 divisions.


# %%
def sinkhorn_scales(logits, passes=20):
    """logits (..., 4, 4) f32 -> comb; mhc.cuh: k stays, row and column change"""
    eps = np.float32(CONFIG.hc_eps)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    k = e / e.sum(axis=-1, keepdims=True) + eps
    row, column, left, below = np.ones(
        (4, *k.shape[:-1]), "f4"
    )  # the last two: 1 / row, 1 / column
    for p in range(2 * passes - 1):
        if p % 2 == 0:
            sums = (k * row[..., :, None]).sum(axis=-2)
            below = sums + eps * below
            column = 1 / below
        else:
            sums = (k * column[..., None, :]).sum(axis=-1)
            left = sums + eps * left
            row = 1 / left
    return row[..., :, None] * k * column[..., None, :]


logits = 3 * np.random.default_rng(5).standard_normal((2000, 4, 4)).astype("f4")
exact = sinkhorn.definition(logits.astype("f8"), 20, 1e-6)
close("dividing the matrix, against float64", sinkhorn(logits, 20, 1e-6), exact, within=1e-6)
close("scaling by factors, against float64", sinkhorn_scales(logits), exact, within=1e-6)
print(f"{39 * 16} divisions, {39 * 4} reciprocals")

# %% [markdown]
# ## Does it fit?
#
# An SM has 65,536 registers, a thread at most 255. What does not fit is *spilled*: it goes through
# memory in the middle of the arithmetic. The compiler tells, and it needs no GPU: NVRTC is a
# library. These lines change with its version, so a page is not compared on them; the asserts must
# hold for any.

# %%
from importlib.metadata import version as installed

from dsv41_kernels import nvrtc

block = dict.fromkeys(("boundary", "enter", "normalise"), constant("THREADS"))
block |= {"thin": 32 * (8 + 1), "wide": 32 * 2 * (UNITS + 1)}  # wide: two sets of warps
thin = "HELPER = 8, THIN_WARPS = HELPER + 1"
for rule in (thin, "SET_WARPS = UNITS + 1", "SETS = BF16_STORED ? 2 : 1"):
    assert f"{rule};" in source("hc_boundary"), "the threads that these two kernels ask for"
if nvrtc.available():
    for k in nvrtc.usage("hc_boundary", arch, macros):
        print(f"versions: NVRTC {installed('nvidia-cuda-nvrtc')}: {k.name:10}", end="")
        print(f"{k.registers:4} registers x {block[k.name]} threads, {k.spills} bytes spilled")
        assert k.spills == 0, f"{k.name}: everything fits"
        assert k.registers * block[k.name] <= 65_536, f"{k.name}: at least one block an SM"
else:
    print('NVRTC is not installed: pip install -e ".[simulator]"')

# %% [markdown]
# **Break it.** Registers are dear, so why not demand that four blocks fit on an SM, 64 registers a
# thread? v3 holds 26 sums for each of four tokens. `__launch_bounds__` says what we want:

# %% tags=["break"]
if nvrtc.available():
    macros = {"S": 4, "ROUND": 1, "BF16_STORED": 1}
    flags = (*options("sm_90", macros), "-arch=sm_90")
    for blocks in (1, 4):
        wanted = source("hc_boundary").replace("bounds__(THREADS)", f"bounds__(THREADS, {blocks})")
        log = nvrtc.compile_source(wanted, flags)
        found = {k.name: k for k in nvrtc.read_log(log)}["boundary"]
        print(f"versions: {blocks} blocks an SM: {found.registers} registers,", end="")
        print(f" {found.spills:,} bytes of spills in every thread")
        assert (found.spills > 0) == (blocks == 4), "too few registers: the sums go to memory"

# %% [markdown]
# ## The floor
#
# At 4.8 TB/s (NVIDIA's data sheet of the H200 SXM), in bf16, with `fn` once:

# %%
for count in (1, 64, 4096):
    moved = 2 * counted["v3"] * count + fn_bytes
    flops = 2 * 24 * n * d * count
    print(f"T = {count:5,}: {moved / 1e6:6.2f} MB, {moved / 4.8e12 * 1e6:6.2f} µs;", end="")
    print(f" {flops / 1e9:.3f} GFLOP of dot products")
close("102,400 bytes a token", 2 * counted["v3"], 102_400, within=0)
flops_per_token, rate = 2 * 24 * n * d, 67e12  # float32, data sheet
assert flops_per_token / rate < 2 * counted["v3"] / 4.8e12, "arithmetic hides behind memory"
print()
found = report("hc_boundary")
ours = [r for r in found if r["version"] in ("v1", "v2", "v3", "v4")]
assert all(r["error"] < 1e-6 for r in ours), "what was timed had its coefficients to 1e-6"

# %% [markdown]
# ## The module gives the same numbers
#
# [hc_boundary](../dsv41/mhc.py#hc_boundary) is the definition, on whole arrays. Its products add
# in another order, so a bf16 rounding goes the other way once in a while. Without roundings, all is
# equal to a few 1e-6.


# %%
def boundary(numerics):
    base, scale = np.zeros(24, "f4"), np.float32([0.5, 1.5, 2])
    fn = given.fn.reshape(24, n * d)
    state = given.X, given.y, given.A, given.C, given.B
    return hc_boundary(*state, fn, base, scale, given.norm, CONFIG, numerics), (fn, base, scale)


def mixing_of(sums, base, scale):
    """What the kernels make of the sums: (T, 256, 32) -> pre, post, comb"""
    warps = [[warp_sums(v)[0] for v in token.reshape(8, 32, 32)] for token in sums]
    total = np.sum(warps, axis=1, dtype="f4")  # (T, 32)
    z = total[:, :24] / np.sqrt(total[:, 24:25] / (n * d) + np.float32(CONFIG.rms_norm_eps))
    z = z * np.repeat(scale, (n, n, n * n)) + base
    gate = 1 / (1 + np.exp(-z[:, : 2 * n]))
    comb = sinkhorn_scales(z[:, 2 * n :].reshape(T, n, n))
    return gate[:, :n] + np.float32(CONFIG.hc_eps), 2 * gate[:, n:], comb


defined, parameters = boundary(OFFICIAL)
for what, got, want in zip(("streams", "x"), ladder["v3"][:2], defined[:2], strict=True):
    assert np.mean(got != want) < 1e-3, f"{what}: hardly ever rounded the other way"
    close(f"{what} of v3 = the definition, up to a step", got, want, within=2**-8 * 8)
coefficients = mixing_of(ladder["v3"][2], *parameters[1:])
exact = hc_coefficients.definition(
    *(a.astype("f8") for a in (ladder["v3"][0], *parameters)), CONFIG, FLOAT32
)
for name, got, want in zip(("pre", "post", "comb"), coefficients, exact, strict=True):
    close(f"{name} to 1e-6", got, want, within=1e-6)
stored = np.float32  # nothing is rounded when it is stored
plain, defined = v3(), boundary(FLOAT32)[0]
close("without roundings: streams", plain[0], defined[0], within=5e-6)
close("without roundings: x", plain[1], defined[1], within=5e-6)
stored = round_bf16

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. The next sublayer's first product wants $\hat x$ in MXFP8: a byte a number and a scale byte for
#    every 32. The kernel can write that instead of bf16. How many bytes through memory does a token
#    take, with streams and $y$ in bf16?
# 2. One sum over a warp, by `__shfl_xor_sync` in steps of 16, 8, 4, 2, 1. The total must have the
#    kernel's bits, so the order counts.
# 3. How many blocks fit on an SM? Limits of compute capability 9.0: 65,536 registers, handed out to
#    warps in units of 256; 2,048 threads; 32 blocks; 228 KB of shared memory, of which each block
#    takes 1 KB for the system.


# %% tags=["exercise"]
def bytes_a_token(n, d, fp8):
    """n streams, width d (a multiple of 32), fp8 bool -> int"""
    return ...


check("21.bytes_a_token", bytes_a_token)


# %% tags=["exercise"]
def warp_sum(values):
    """values (32,) f32, a lane each -> f32, the total with the bits of lane 0"""
    return ...


check("21.warp_sum", warp_sum)


# %% tags=["exercise"]
def blocks_an_sm(registers, threads, shared):
    """registers a thread, threads a block (a multiple of 32), shared bytes a block -> int"""
    return ...


check("21.blocks_an_sm", blocks_an_sm)

# %% [markdown]
# ## What we learned
#
# - A RawKernel is text. Sizes are macros, so the compiler knows them, and it reports what it used.
# - Fusing saves what one kernel writes and the next one reads: 20 d, 14 d, 10 d. The last is the
#   floor.
# - After that the weights are next: 0.5 MB a token from L2, unless a block keeps its slice.
# - Orders of addition are written down: fused operations, lanes, warps, halves. Nothing depends on
#   who comes last.
# - Three bf16 numbers are one float32. Tensor cores lose nothing on them.
#
# Worked solutions: [solutions/21_rawkernels.py](solutions/21_rawkernels.py). Next: [22 Tensor
# cores](22_tensor_cores.ipynb). All chapters: [README.md](README.md).
