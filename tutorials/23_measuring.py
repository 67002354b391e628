# %% [markdown]
# # 23 · Measuring: floors, rooflines, what limits each kernel
#
# **How fast could it be, how fast is it, and which of the two numbers is wrong?**
#
# A kernel that takes 100 µs may be perfect or ten times too slow. Only counting tells: the bytes
# that must move, the operations that must happen, the rates that this GPU was seen to reach. This
# chapter counts for every kernel of the previous ones, draws the roofline, and goes through the
# ways in which a measurement lies.
#
# You need the names from chapters [20](20_first_numba_kernel.ipynb) to
# [22](22_tensor_cores.ipynb). 25 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/23_measuring.py`.
#
# **No GPU is needed, and none is used.** Everything here is counted or simulated. Times of kernels
# come from files in `kernels/results`, measured on the GPU that they name, and where there is no
# file the page says so.
#
# Sources: Williams, Waterman and Patterson, "Roofline" (2009); NVIDIA's data sheet of the H200 SXM;
# the shapes of [presets.py](../dsv41/presets.py). The modules that this page arrives at:
# [bench.py](../kernels/dsv41_kernels/bench.py), [timing.py](../kernels/dsv41_kernels/timing.py) and
# [ledger.py](../dsv41/ledger.py).

# %%
from collections import OrderedDict

import numpy as np

from lib.measured import best, records
from lib.page import BLUE, GREEN, GREY, ORANGE, PURPLE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## What the machine was seen to do
#
# The data sheet promises 4,800 GB/s and 989 TFLOP/s in bf16. Nobody sees that. So the ceilings
# of this page are measured ones, all on one H200, before there was a kernel to flatter: a copy of
# 1 GB, large matrix products (a burst of a few, then sustained, when the power limit has lowered
# the clock), tensor cores fed from registers by `mma.sync`, and a kernel that does nothing.
#
# They are constants here, not results of this page. `python -m dsv41_kernels.bench` measures copy
# and product again on the GPU that it runs on, and writes them next to every time.

# %%
COPY = 4_300e9  # bytes/s, read plus written
BF16, BF16_SUSTAINED, MMA_SYNC, FP8 = 785e12, 700e12, 645e12, 1_484e12  # operations/s
LAUNCH_COLD, LAUNCH_HOT = 4.0, 0.9  # µs, an empty kernel, L2 flushed before or not
SHEET_BYTES, SHEET_BF16, SMS, BOOST = 4_800e9, 989.4e12, 132, 1.83e9  # data sheet

print(f"of the sheet: copy {COPY / SHEET_BYTES:.0%}, bf16 {BF16 / SHEET_BF16:.0%} in a burst,")
print(f"{BF16_SUSTAINED / SHEET_BF16:.0%} sustained, {MMA_SYNC / SHEET_BF16:.0%} by mma.sync")
per_clock = SHEET_BF16 / SMS / BOOST
print(f"one SM: {per_clock:,.0f} bf16 operations a clock")
close("which is 2 x 16 x 16 x 8, an mma, a clock", per_clock, 2 * 16 * 16 * 8, within=5)
assert BF16_SUSTAINED < BF16 < SHEET_BF16 and COPY < SHEET_BYTES, "seen is less than promised"

# %% [markdown]
# ## A floor, by hand
#
# Pack a million vectors of 512 numbers into FP4. Read 1,024 bytes of bf16, write 288. There is no
# arithmetic to speak of:

# %%
from dsv41 import FLOAT32, preset
from dsv41.ledger import decode_flops, expert_bytes, index_entries
from dsv41.quant import ACTIVATION_FP8, INDEX_FP4, MAIN_KV_FP4, WINDOW_KV_FP8

moved = (1 << 20) * (2 * 512 + MAIN_KV_FP4.record_bytes(512))
print(f"{moved / 1e9:.3f} GB / {COPY / 1e9:,.0f} GB/s = {moved / COPY * 1e6:.0f} µs")
close("320 µs", moved / COPY * 1e6, 320, within=0.5)


def floor_us(moved, operations=0, rate=BF16):
    """What memory or the tensor cores need at least, whichever needs longer."""
    return 1e6 * max(moved / COPY, operations / rate)


# %% [markdown]
# ## Counting operations with an array that counts
#
# Formulas have typing errors. So let the definition run, on an array that notes every matrix
# product it takes part in. A multiply-add is two operations.


# %%
class Counting(np.ndarray):
    """An array whose matrix products add to `operations`."""

    operations = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [np.asarray(x) if isinstance(x, Counting) else x for x in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        if ufunc is np.matmul:
            Counting.operations += 2 * result.size * plain[0].shape[-1]
        return np.asarray(result).view(Counting)

    def __array_function__(self, function, types, arguments, options):
        result = super().__array_function__(function, types, arguments, options)
        return result.view(Counting) if isinstance(result, np.ndarray) else result


def counted(call, first, *rest):
    Counting.operations = 0
    call(first.view(Counting), *rest)
    return Counting.operations


from dsv41.indexer import index_scores
from dsv41.mhc import hc_coefficients
from dsv41.sparse_attn import sparse_attn

V = preset("v4.1-flash")
H, C, W, K = V.num_attention_heads, V.head_dim, V.sliding_window, V.index_topk
n, d = V.hc_mult, V.hidden_size
rng = np.random.default_rng(1)


def normal(*shape):
    return rng.standard_normal(shape).astype("f4")


lists = np.arange(W)[None], np.arange(K)[None]
attention = counted(sparse_attn, normal(1, H, C), normal(W, C), lists[0], normal(K, C), lists[1],
                    normal(H), FLOAT32)  # fmt: skip
q = normal(1, V.index_n_heads, V.index_head_dim)
scores = counted(index_scores, q, normal(1, V.index_n_heads), normal(100, 128), FLOAT32)
mixing = counted(hc_coefficients, normal(1, n, d), normal(24, n * d), normal(24), normal(3), V,
                 FLOAT32)  # fmt: skip
print(f"attention, one token  {attention:,}")
print(f"an index score        {scores / 100:,.0f}")
print(f"a boundary's products {mixing:,}")
same("two products of 64 heads, 640 records", attention, 2 * 2 * H * C * (W + K))
same("32 heads of 128 channels", scores, 100 * 2 * V.index_n_heads * V.index_head_dim)
sinkhorn = 2 * V.hc_sinkhorn_iters * 2 * n**3  # the text sums by products with ones
same("24 rows of fn, and Sinkhorn's sums", mixing, 2 * 24 * n * d + sinkhorn)
mixing -= sinkhorn  # the kernels add those without a product

# %% [markdown]
# ## Every kernel, counted
#
# Bytes are the least that must move: inputs once, results once, records once per query that reads
# them. Experts: a batch of $B$ tokens meets $384\,(1 - (378/384)^B)$ different ones, if they choose
# evenly; each is read once.


# %%
def attention_of(tokens, record=None, number=4):
    """number: bytes of a number of q and o; the kernels take float32, the release keeps bf16."""
    near, far = (record, record) if record else (WINDOW_KV_FP8.record_bytes(C), main_record)
    return tokens * (2 * number * H * C + 8 * (W + K) + W * near + K * far), tokens * attention


def scores_of(requests, keys, shared=False):
    kept = keys * INDEX_FP4.record_bytes(128) * (1 if shared else requests)
    return kept + 4 * requests * keys, requests * keys * scores // 100


def experts_of(tokens):
    met = V.n_routed_experts * (1 - (1 - V.num_experts_per_tok / V.n_routed_experts) ** tokens)
    products = 2 * 3 * d * V.moe_intermediate_size * V.num_experts_per_tok * tokens
    return met * expert_bytes(V) + 2 * 2 * d * tokens, products


def boundary_of(tokens):
    return 2 * (2 * n + 2) * d * tokens + 4 * 24 * n * d, mixing * tokens


main_record = MAIN_KV_FP4.record_bytes(C)
OPS = {
    "fp4_pack, 1M rows": (moved, 0),
    "rmsnorm_fp8, T=4096": (4096 * (2 * d + ACTIVATION_FP8.record_bytes(d)) + 4 * d, 0),
    "hc_boundary, T=1": boundary_of(1),
    "hc_boundary, T=4096": boundary_of(4096),
    "index_topk, 32 x 1M": (32 * (4 * 2**20 + 8 * K), 0),
    "index_scores, 32 x 131,072": scores_of(32, 131_072),
    "index_scores, prefill 8,192 x 65,536": scores_of(8192, 65_536, shared=True),
    "rope_sparse_attn, B=1": attention_of(1),
    "rope_sparse_attn, B=128": attention_of(128),
    "moe_experts, B=1": experts_of(1),
    "moe_experts, B=64": experts_of(64),
    "moe_experts, B=8,192": experts_of(8192),
}
print(f"{'':37}{'MB':>10}{'GFLOP':>11}{'FLOP/B':>9}{'floor µs':>11}  bound by")
for name, (size, work) in OPS.items():
    bound = "memory" if size / COPY >= work / BF16 else "arithmetic"
    print(f"{name:37}{size / 1e6:10,.2f}{work / 1e9:11,.2f}{work / size:9,.1f}", end="")
    print(f"{floor_us(size, work):11,.2f}  {bound}")
ridge = BF16 / COPY
print(f"the ridge: {ridge:.0f} operations a byte; sustained {BF16_SUSTAINED / COPY:.0f}")
close("a decode scan of 32 x 131,072 keys takes 70 µs", floor_us(*scores_of(32, 131_072)), 70.2,
      within=0.1)  # fmt: skip
assert floor_us(*OPS["hc_boundary, T=1"]) < LAUNCH_HOT, "one token: launching takes longer"
assert ridge > 180, "fewer operations a byte, and tensor cores wait for memory"

# %% [markdown]
# ## The roofline
#
# Operations per byte to the right, operations per second upwards. Left of the ridge memory limits,
# on the slope; right of it the tensor cores, on the flat. A perfect kernel lies *on* the roof. Dots
# are what the shape demands. Where `kernels/results` holds a measurement, a cross is what was
# reached.

# %%
drawn = {name: value for name, value in OPS.items() if value[1]}
NAMES = ("hc_boundary", "index_scores", "rope_sparse_attn", "moe_experts")
COLOURS = dict(zip(NAMES, (BLUE, GREEN, ORANGE, PURPLE), strict=True))
with figure("Roofline of an H200: what each shape allows") as ax:
    x = np.geomspace(0.3, 20_000, 200)
    ax.plot(x, np.minimum(x * COPY, BF16) / 1e12, color="black")
    ax.plot(x, np.minimum(x * COPY, FP8) / 1e12, color=GREY, linestyle=":")
    ax.text(19_000, FP8 / 1e12 * 1.1, "FP8", color=GREY, ha="right")
    ax.text(19_000, BF16 / 1e12 * 0.5, "bf16", ha="right")
    ax.text(2.2, 13, "4,300 GB/s", rotation=33, ha="center")
    for name, (size, work) in drawn.items():
        op = name.split(",")[0]
        ax.plot(work / size, min(work / size * COPY, BF16) / 1e12, "o", color=COLOURS[op])
    for place, op in enumerate(NAMES):
        ax.text(60, 26 / 1.7**place, op, color=COLOURS[op], fontweight="bold")
        for r in records(op):
            here = op != "moe_experts"  # whose record is of the miniature's sizes
            if here and r["flops"] and r["version"].startswith("v"):
                ax.plot(r["flops"] / r["bytes"], r["tflops"], "x", color=COLOURS[op])
    ax.set(xscale="log", yscale="log", ylim=(1, 3000), xlabel="operations a byte", ylabel="TFLOP/s")
decode = OPS["index_scores, 32 x 131,072"]
prefill = OPS["index_scores, prefill 8,192 x 65,536"]
print(f"the same scores: {decode[1] / decode[0]:.0f} operations a byte when every request has its")
print(f"own keys, {prefill[1] / prefill[0]:,.0f} when 8,192 queries share them")
assert decode[1] / decode[0] < ridge < prefill[1] / prefill[0], "opposite sides of the ridge"

# %% [markdown]
# ## A record format moves a kernel across the ridge
#
# One latent row of V4 takes 584 bytes. The main KV of V4.1 takes 288, the window 528. What is
# gathered then decides which side attention is on. It is close, so the ceiling that one assumes
# matters, and whether $q$ and $o$ travel as float32.

# %%
for name, record, number in (("V4 record, bf16 q", 584, 2), ("V4.1 records, bf16 q", None, 2),
                             ("V4.1 records, float32 q", None, 4)):  # fmt: skip
    size, work = attention_of(128, record, number)
    print(f"{name:24} {work / size:5.0f} operations a byte", end="")
    print(f", memory {size / COPY * 1e6:5.1f} µs, arithmetic {work / BF16 * 1e6:5.1f} µs")
old, new, wide = (attention_of(1, *k) for k in ((584, 2), (None, 2), (None, 4)))
assert old[1] / old[0] < ridge < new[1] / new[0], "half the bytes: from memory to arithmetic"
assert BF16_SUSTAINED / COPY < wide[1] / wide[0] < ridge, "float32: the ceiling decides"
print(f"intensity is the same for every batch: {attention_of(512)[1] / attention_of(512)[0]:.0f}")

# %% [markdown]
# ## Then why is one token so slow?
#
# The roofline assumes that all 132 SMs work. One token, in one block, has one SM. Its ten chunks
# come one after the other, since each needs the maximum of those before. An SM that did nothing but
# products, at its share of the sustained rate, would need:


# %%
alone = attention / (BF16_SUSTAINED / SMS) * 1e6
print(f"{alone:.1f} µs, for a floor of {floor_us(*attention_of(1)):.2f} µs")
close("15.8 µs", alone, 15.8, within=0.05)
SPREAD = 64  # blocks a token, as chapter 22 says
spread_out = alone / SPREAD
print(f"{SPREAD} blocks a token: {spread_out:.2f} µs of products, and what blocks tell one another")


def waves(tokens, blocks=1):
    """Microseconds of products alone: blocks a token, one block an SM."""
    return -(-tokens * blocks // SMS) * alone / blocks


batch = np.arange(1, 513)
with figure("Sparse decode: what limits it, by batch") as ax:
    roof = np.array([floor_us(*attention_of(int(b))) for b in batch])
    ax.plot(batch, roof, color="black")
    ax.plot(batch, [waves(b) for b in batch], color=ORANGE)
    ax.plot(batch[:7], [waves(b, SPREAD) for b in batch[:7]], color=GREEN)
    ax.axhline(LAUNCH_COLD, color=GREY, linestyle=":")
    ax.text(1.1, LAUNCH_COLD * 1.15, "an empty launch, cold", color=GREY)
    ax.text(1.1, alone * 1.15, "a block a token, products only", color=ORANGE)
    ax.text(1.1, 1.0, f"{SPREAD} blocks a token", color=GREEN)
    ax.text(40, 1.6, "roofline: all SMs at work", color="black")
    ax.set(xscale="log", yscale="log", ylim=(0.09, 90), xlabel="tokens", ylabel="µs")
first = int(batch[roof > LAUNCH_COLD][0])
print(f"from {first} tokens on the roofline is above an empty launch")
assert floor_us(*attention_of(1)) < LAUNCH_COLD / 30, "B = 1: the floor says nothing"
assert 30 < first < 64, "from B = 64 on, work is what takes the time"
assert waves(132) == waves(1) and waves(133) == 2 * waves(132), "132 tokens cost what one costs"
longer = [waves(b) > attention_of(int(b))[0] / COPY * 1e6 for b in batch[63:]]
assert all(longer), "B = 64 to 512: products take longer than memory, on the SMs that have work"

# %% [markdown]
# So at $B = 1$ it is latency: launch, chunks in a row, meetings of blocks. Neither GB/s nor TFLOP/s
# describes that. 64 blocks a token find an SM each up to $B = 2$. From $B = 64$ on it is tensor
# cores: the roof is above a launch, and products of the busy SMs take longer than all the bytes.
#
# **Break it.** A floor can be wrong, too. Index scores in prefill: the keys are FP4, and the kernel
# multiplies in INT8, where tensor cores are as fast as in FP8, almost twice as fast as in bf16.
# Take the bf16 ceiling, and a good kernel seems to beat physics:

# %% tags=["break"]
by_bf16, by_fp8 = floor_us(*prefill), floor_us(*prefill, rate=FP8)
made_up = 4_000  # µs, an invented time, to see what would be reported
print(f"floor by bf16 {by_bf16:,.0f} µs, by FP8 {by_fp8:,.0f} µs")
print(f"a kernel of {made_up:,} µs: {by_bf16 / made_up:.0%} of the one, ", end="")
print(f"{by_fp8 / made_up:.0%} of the other")
assert by_bf16 > made_up > by_fp8, "above 100%: not a fast kernel, a wrong floor"

# %% [markdown]
# ## Cold and hot
#
# The L2 cache holds some 50 MB. Run a kernel again and again, and small inputs never leave it: the
# "bandwidth" is then the cache's. In a model, forty layers pass between two calls. A cache that
# forgets what was used longest ago, by blocks of 1 MB:


# %%
def misses(reads, capacity):
    """How many of the reads (block numbers, in order) a least-recently-used cache has not."""
    cache, missed = OrderedDict(), 0
    for block in reads:
        missed += block not in cache
        cache[block] = True
        cache.move_to_end(block)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return missed


L2 = 50
sizes = [1, 4, 16, 32, 44, 48, 50, 51, 56, 64, 96, 128]
hot = [misses(list(range(size)) * 3, L2) - misses(list(range(size)) * 2, L2) for size in sizes]
flush = list(range(1000, 1256))  # 256 MB of something else
cold = [misses([*range(s), *flush, *range(s)], L2) - misses([*range(s), *flush], L2) for s in sizes]
same("cold: everything comes from memory", cold, sizes)
same("hot: nothing up to 50 MB, then all of it", hot, [0 if s <= L2 else s for s in sizes])
with figure("MB from memory by the third call in a row") as ax:
    ax.plot(sizes, cold, color=BLUE, marker="o")
    ax.plot(sizes, hot, color=ORANGE, marker="o")
    ax.text(20, 45, "after a flush (cold)", color=BLUE, ha="center")
    ax.text(34, 5, "straight after (hot)", color=ORANGE, ha="center")
    ax.set(xlabel="MB that the kernel reads", ylabel="MB from memory")

# %% [markdown]
# **Break it.** A top-512 of one row of a million scores reads 4.2 MB. Suppose that it took just an
# empty hot launch. Bytes over time is above what the memory can do:

# %% tags=["break"]
size = 4 * 2**20 + 8 * K
rate = size / (LAUNCH_HOT * 1e-6)
print(f"{size / 1e6:.1f} MB in {LAUNCH_HOT} µs: {rate / 1e9:,.0f} GB/s, of {COPY / 1e9:,.0f}")
assert rate > COPY, "more than the memory gives: the bytes came from L2"
assert misses(list(range(5)) * 2, L2) == 5, "the second time none of 5 MB"

# %% [markdown]
# ## Median, p10 and p90
#
# Times have a floor and no ceiling: clocks change, somebody else interrupts. These fifty are
# invented: forty-eight near 10 µs, and two that a page fault hit.

# %%
from dsv41_kernels.timing import spread

rng = np.random.default_rng(2)
times = np.concatenate([10 + 0.2 * rng.standard_normal(48), [410.0, 395.0]])
middle = spread(times)
print(f"mean {times.mean():.1f} µs; median {middle.median:.1f}, p10 {middle.p10:.1f}, ", end="")
print(f"p90 {middle.p90:.1f}; fastest {times.min():.1f}")
in_order = np.sort(times)
by_hand = (in_order[24] + in_order[25]) / 2
close("the median by hand = timing.spread", middle.median, by_hand, within=1e-3)
close("p10 by hand: 4.9 places up", middle.p10, in_order[4] * 0.1 + in_order[5] * 0.9, within=1e-3)
assert times.mean() > 2 * middle.median, "two of fifty make the mean 2.5 times too long"
assert middle.p90 - middle.p10 < 1, "p10 and p90 say: the rest agree within a microsecond"

# %% [markdown]
# The fastest is no better: it rewards luck. A median with narrow p10 and p90 can be measured again.
#
# ## Launches
#
# An empty kernel takes 4 µs cold. In a recorded graph the next launch of a chain costs about the
# hot 0.9. So a chain has a floor of its own, whatever it computes. The boundary of
# [chapter 21](21_rawkernels.ipynb), as five kernels and as one:


# %%
def chain_us(kernels, moved):
    return LAUNCH_COLD + (kernels - 1) * LAUNCH_HOT + moved / COPY * 1e6


fn = 4 * 24 * n * d
for tokens in (1, 64, 4096):
    five = chain_us(5, 2 * (4 * n + 4) * d * tokens + fn)
    one = chain_us(1, boundary_of(tokens)[0])
    print(f"T = {tokens:5,}: five kernels at least {five:6.1f} µs, one {one:6.1f} µs", end="")
    print(f", {five / one:.2f} times")
saved = chain_us(5, fn) - chain_us(1, fn)
close("one token: four launches saved", saved, 4 * LAUNCH_HOT, within=1e-9)
print(f"two boundaries a layer, {V.num_hidden_layers} layers: ", end="")
print(f"{2 * V.num_hidden_layers * saved:.0f} µs of launches a token")
assert 2 * V.num_hidden_layers * saved > 250, "more than a quarter of a millisecond"

# %% [markdown]
# ## What is worth a week
#
# A kernel twice as fast helps by its share. One decode step of 64 requests at 64K tokens, floors
# added over 40 layers. (Projections and head are left out.)

# %%
B, context = 64, 65_536
readers = [layer for layer in V.plan if layer.ratio]
entries = index_entries("V4.1-Flash", context)
near_bytes = 2 * 4 * H * C + W * (8 + WINDOW_KV_FP8.record_bytes(C))
near_only = B * near_bytes, B * attention * W / (W + K)
step = {
    "experts": V.num_hidden_layers * floor_us(*experts_of(B)),
    "attention": len(readers) * floor_us(*attention_of(B))
    + (V.num_hidden_layers - len(readers)) * floor_us(*near_only),
    "index scores": floor_us(*scores_of(B, entries)),
    "boundaries": 2 * V.num_hidden_layers * floor_us(*boundary_of(B)),
}
total = sum(step.values())
for name, part in step.items():
    print(f"{name:14}{part / 1e3:7.2f} ms {part / total:6.1%}")
assert step["experts"] > 0.9 * total, "of these four, the weights that are read in every step"
longer = floor_us(*scores_of(B, index_entries("V4.1-Flash", 2**20)))
growth = longer / step["index scores"]
print(f"index scores at 1M tokens: {longer / 1e3:.2f} ms, {growth:.1f} times as much")
assert growth < 2**20 / context, "16 times the context: the pool bounds four of eight sources"

# %% [markdown]
# ## What was measured
#
# All kernels with a benchmark, from the committed files: the fastest version at every shape, in µs
# with a cold L2. Each time was taken after its result had been compared with the definition. The
# floor is at the rate of a copy, half reads and half writes; another mixture can beat it a little.
# Slower versions, PyTorch and the NumPy text on CuPy stand in [kernels](../kernels/README.md).

# %%
from dsv41_kernels.bench import Case, operations
from dsv41_kernels.bench import floor_us as floor_of_bench

found = {op: records(op) for op in operations() if records(op)}
for device, date in sorted({(r["device"], r["date"]) for rows in found.values() for r in rows}):
    print(f"measured on {device}, {date}")
print(f"{'':73}{'floor':>9}{'best':>13}{'share':>7}")
for op, rows in found.items():
    shapes = {r["shape"]: [s for s in rows if s["shape"] == r["shape"]] for r in rows}
    for shape, some in sorted(shapes.items(), key=lambda item: best(item[1])["bytes"]):
        r = best(some)
        time = f"{r['version']} {r['cold_us']['median']:,.1f}"
        print(f"{op:27}{shape:46}{r['floor_us']:9,.1f}{time:>13}{r['share']:7.0%}")
missing = [op for op in operations() if op not in found]
if missing:
    print(f"nothing was measured yet of {len(missing)} operations:")
    for start in range(0, len(missing), 4):
        print("  " + ", ".join(missing[start : start + 4]))
    print("on a GPU: python -m dsv41_kernels.bench --json kernels/results/NAME.json")
for r in (r for op in found.values() for r in op):
    cold = r["cold_us"]
    assert cold["p10"] <= cold["median"] <= cold["p90"], "percentiles in order"
    by_memory = r["bytes"] / r["copy_gbps"] / 1e3
    assert r["floor_us"] >= by_memory - 1e-3, "no floor below what memory needs"
    assert abs(r["share"] - r["floor_us"] / cold["median"]) < 1e-3, "the share is floor / cold"
    assert 0.9 < r["copy_gbps"] * 1e9 / COPY < 1.05, "every run saw this page's copy again"

# %%
shares = {}
for op, rows in found.items():
    largest = max(r["bytes"] for r in rows if r["version"].startswith("v"))
    shares[op] = best([r for r in rows if r["bytes"] == largest])["share"]
if shares:
    shown = sorted(shares.items(), key=lambda item: item[1])
    half = len(shown) // 2
    title = "Share of the floor at the largest shape, best version, cold"
    with figure(title, columns=2, sharex=True) as axes:
        axes[0].figure.set_size_inches(7.5, 4.2)
        for ax, part in zip(axes, (shown[half:], shown[:half]), strict=True):
            ax.barh(range(len(part)), [share for _, share in part], color=BLUE)
            ax.set_yticks(range(len(part)), [name for name, _ in part], fontsize=7)
            ax.axvline(1, color=GREY, linestyle=":")
else:
    print("no figure: kernels/results is empty, and this page invents no share of a floor")

# %% [markdown]
# ## The modules give the same numbers
#
# [bench.floor_us](../kernels/dsv41_kernels/bench.py#floor_us) with this page's ceilings, and
# [ledger.decode_flops](../dsv41/ledger.py#decode_flops), which counts a whole step from the plan of
# the layers.

# %%
from types import SimpleNamespace

ceilings = SimpleNamespace(copy_gbps=COPY / 1e9, matrix_tflops=BF16 / 1e12)
for name, (size, work) in OPS.items():
    case = Case(name, "", "", call=None, check=None, bytes=size, flops=work)
    theirs, bound = floor_of_bench(case, ceilings)
    assert abs(theirs - floor_us(size, work)) < 1e-9 * theirs, f"{name}: the floor of bench.py"
    assert (bound == "memory") == (work / size <= ridge), f"{name}: the side of the ridge"
print(f"{len(OPS)} floors as bench.py has them")
ledger = decode_flops("V4.1-Flash", 1_000_000)
window_only = V.num_hidden_layers - len(readers)
mine = len(readers) * attention + window_only * attention * W // (W + K)
same("attention of a step at 1M tokens = the ledger", mine, int(ledger.attention))
routed = V.num_hidden_layers * experts_of(1)[1] // 2  # the ledger weighs FP4 and FP8 by a half
assert routed < ledger.linear, "routed experts are part of the ledger's linear layers"
scanned = index_entries("V4.1-Flash", 1_000_000)
same("a million tokens: entries scored", scanned, 3 * 500_000 + 1_000_000 + 4 * 16_384)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. A linear layer with an $N \times K$ weight of $w$ bytes a number; input and output are bf16.
#    What is the smallest number of tokens at which arithmetic takes at least as long as memory?
# 2. A kernel runs $b$ blocks of $t$ µs each, one an SM, on $s$ SMs. What share of the SMs' time is
#    used, until the last block is done?
# 3. A cache of `capacity` blocks forgets what was used longest ago. A kernel reads some blocks in
#    order, then all again in the same order, `rounds` times in all. How many reads miss?


# %% tags=["exercise"]
def tokens_to_ridge(rows, columns, weight_bytes, rate, bandwidth):
    """rows N, columns K, rate in operations/s, bandwidth in bytes/s -> int, or -1 for never"""
    return ...


check("23.tokens_to_ridge", tokens_to_ridge)


# %% tags=["exercise"]
def used_share(blocks, sms):
    """blocks, sms int, at least 1 -> float, 0 .. 1"""
    return ...


check("23.used_share", used_share)


# %% tags=["exercise"]
def missed(blocks, capacity, rounds):
    """blocks, capacity, rounds int, at least 1 -> int"""
    return ...


check("23.missed", missed)

# %% [markdown]
# ## What we learned
#
# - A floor is the larger of bytes over bandwidth and operations over rate, both as seen on this
#   GPU, for this number format.
# - Operations a byte decide the side of the ridge, and a record format can change it.
# - The roofline knows no latency. One token of attention has a floor of 0.1 µs and needs 16 µs of
#   one SM.
# - Cold is what a model sees. A median with p10 and p90 can be repeated; a mean and a best cannot.
# - A share above 100% is a wrong floor or a warm cache.
# - First ask what part of the step a kernel is.
#
# Worked solutions: [solutions/23_measuring.py](solutions/23_measuring.py). All chapters:
# [README.md](README.md).
