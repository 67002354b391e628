# %% [markdown]
# # 01 · Number formats
#
# **How do 512 numbers fit into 288 bytes, and what do they lose?**
#
# DeepSeek-V4.1-Flash remembers what it has read as vectors of 512 numbers. In float32 one vector
# takes 2,048 bytes. In the cache it takes 288. This chapter builds that format from single bits:
# bf16, E4M3, E2M1, E8M0, then blocks that share a scale, then bytes.
#
# You need NumPy, nothing about DeepSeek. 25 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/01_number_formats.py`.
#
# Sources: OCP FP8 and OCP Microscaling v1.0 for the elements; the V4.1 report, §2.4.4, for the
# main KV format. The modules that this page arrives at: [formats.py](../dsv41/formats.py) and
# [quant.py](../dsv41/quant.py).

# %%
import ml_dtypes
import numpy as np

from lib.page import BLUE, GREEN, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One equation for every small float
#
# A code has a sign $s$, an exponent field $E$ and $m$ mantissa bits $M$. The format adds a bias
# $b$:
#
# $$\text{value} = (-1)^s \cdot 2^{\max(E,\,1) - b} \cdot \left([E > 0] + M / 2^m\right)$$
#
# $E$ says which power of two, $M$ walks in equal steps to the next one. $E = 0$ drops the leading
# 1: these are the subnormals, and zero is one of them.
#
# Start with the smallest format, **E2M1**: four bits, two of them exponent, one mantissa, bias 1.
# Sixteen codes fit on the page.


# %%
def value(code, exponent_bits, mantissa_bits, bias):
    """One code -> its value, straight from the equation."""
    s = code >> (exponent_bits + mantissa_bits)
    E = (code >> mantissa_bits) % 2**exponent_bits
    M = code % 2**mantissa_bits
    return (-1) ** s * 2.0 ** (max(E, 1) - bias) * ((E > 0) + M / 2**mantissa_bits)


print("code  bits  s E M  value")
for code in range(16):
    bits = f"{code:04b}"
    print(f"{code:4}  {bits}  {bits[0]} {int(bits[1:3], 2)} {bits[3]}  {value(code, 2, 1, 1):5}")

E2M1_VALUES = [value(code, 2, 1, 1) for code in range(8)]
assert E2M1_VALUES == [0, 0.5, 1, 1.5, 2, 3, 4, 6], "E2M1 has eight magnitudes"

# %% [markdown]
# Eight magnitudes and a sign: that is all an FP4 number can be. Code 8 is −0.
#
# The same equation with four exponent bits, three mantissa bits and bias 7 is **E4M3**. Write it
# once for all codes at a time. The only extra rule: E4M3 has no infinity, and the code with all
# bits set is NaN.


# %%
def table(exponent_bits, mantissa_bits, bias):
    """-> f32, the value of every code."""
    code = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    s = code >> (exponent_bits + mantissa_bits)
    E = (code >> mantissa_bits) % 2**exponent_bits
    M = code % 2**mantissa_bits
    fraction = (E > 0) + M / 2**mantissa_bits
    return ((-1.0) ** s * 2.0 ** (np.maximum(E, 1) - bias) * fraction).astype(np.float32)


e2m1 = table(2, 1, 1)
e4m3 = table(4, 3, 7)
same("all E2M1 codes at once = one by one", e2m1, [value(c, 2, 1, 1) for c in range(16)])
same("all E4M3 codes at once = one by one", e4m3, [value(c, 4, 3, 7) for c in range(256)])

e4m3[[0x7F, 0xFF]] = np.nan
bytes_ = np.arange(256, dtype=np.uint8)
foreign = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
same("and as another library reads them", e4m3, foreign)
print("largest:", np.nanmax(e4m3), " smallest above zero:", e4m3[1], "= 2^-9")

# %%
with figure("Between powers of two E2M1 has 2 codes, E4M3 has 8", rows=2, sharex=True) as ax:
    for axis, codes, name, colour in ((ax[0], e2m1, "E2M1", ORANGE), (ax[1], e4m3, "E4M3", BLUE)):
        shown = codes[(codes >= 0) & (codes <= 8)]
        axis.vlines(shown, 0, 1, color=colour, linewidth=1.2)
        for power in (1, 2, 4):
            axis.axvspan(power, 2 * power, color=GREY, alpha={1: 0.1, 2: 0.2, 4: 0.1}[power], lw=0)
        axis.set(yticks=[], ylim=(0, 1.45), xlim=(-0.1, 8.1), xticks=range(9))
        axis.set_ylabel(name, rotation=0, ha="right", va="center", color=colour, fontsize=11)
        axis.spines["left"].set_visible(False)
        for power, right in ((1, 2), (2, 4), (4, 8)):
            inside = np.sum((codes >= power) & (codes < 2 * power))
            axis.text((power + right) / 2, 1.1, f"{inside} codes", ha="center")
    for code, number in enumerate(E2M1_VALUES):
        ax[0].text(number + 0.03, 0.05, f"{code:04b}", fontsize=7)
    ax[1].set_xlabel("value")

# %% [markdown]
# ## Rounding: nearest, and ties to the even code
#
# To store $x$, take the nearest value. Halfway between two, take the one whose code is even. The
# slow and obvious way tries every code.


# %%
def nearest(x, positive):
    """x >= 0 -> the code of the nearest of the `positive` values, on a tie the even code."""
    return min(range(len(positive)), key=lambda code: (abs(positive[code] - x), code % 2))


for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0):
    code = nearest(tie, E2M1_VALUES)
    print(f"{tie:6} -> {E2M1_VALUES[code]:3}   code {code}")

ties = [E2M1_VALUES[nearest(x, E2M1_VALUES)] for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)]
assert ties == [0, 1, 1, 2, 2, 4, 4], "ties alternate: down, up, down, up"

# %% [markdown]
# Note the last line: 100 becomes 6. These formats *saturate*, they do not overflow.
#
# Now without a search. Float32 rounds to even by itself whenever a sum has no room for its last
# bits. Add a $c$ so large that one unit in its last place is one step of our grid, then take it
# away again:
#
# $$\mathrm{round}(x) = (x + c) - c, \qquad c = 2^{23 - m} \cdot 2^{\lfloor \log_2 |x| \rfloor}$$


# %%
def round_to(x, mantissa_bits, bias, largest):
    """x f32 -> f32, the nearest value of the format; ties to even, saturating."""
    magnitude = np.minimum(np.abs(x), np.float32(largest))
    exponent = magnitude.view(np.uint32) & np.uint32(0x7F800000)
    power = exponent.view(np.float32)  # the power of two at or below x
    power = np.maximum(power, np.float32(2.0 ** (1 - bias)))  # subnormals share one step
    c = power * np.float32(2.0 ** (23 - mantissa_bits))
    return np.copysign((magnitude + c) - c, x)


x = np.arange(0, 8, 1 / 64, dtype=np.float32)  # every tie of E2M1 is in here
slow = np.float32([E2M1_VALUES[nearest(v, E2M1_VALUES)] for v in x])
same("E2M1 by adding c = by search", round_to(x, 1, 1, 6.0), slow)

positive = e4m3[:127].tolist()
x = np.arange(0, 500, 0.25, dtype=np.float32)
slow = np.float32([positive[nearest(v, positive)] for v in x])
same("E4M3 by adding c = by search", round_to(x, 3, 7, 448.0), slow)

# %% [markdown]
# **Break it.** Leave out the saturation and let a library cast 500 to E4M3. There is no infinity
# to fall into, so the cast gives NaN, and one NaN in a dot product is a NaN in the answer.

# %% tags=["break"]
x = np.float32([1, 2, 500])
with np.errstate(invalid="ignore"):
    wrong = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
print("cast:      ", wrong, " dot:", wrong @ np.ones(3, np.float32))
right = round_to(x, 3, 7, 448.0)
print("saturated: ", right, " dot:", right @ np.ones(3, np.float32))
assert np.isnan(wrong @ np.ones(3)), "one value too large, and the sum is gone"

# %% [markdown]
# ## bf16: the upper half of a float32
#
# bf16 keeps 8 exponent bits and 7 mantissa bits, exactly the upper 16 bits of a float32. Decoding
# is a shift. Encoding is a shift too, after adding "half minus one, plus one if the kept part is
# odd". That is round-to-even in integers.


# %%
def encode_bf16(x):
    """x f32, no NaN -> uint16."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def decode_bf16(codes):
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


x = np.float32([1.0, 1 + 1 / 256, 1 + 3 / 256, 3.14159274])
for number, bits, code in zip(x, x.view(np.uint32), encode_bf16(x), strict=True):
    back = decode_bf16(np.array([code]))[0]
    print(f"{number:.8f}  {bits:08x} -> {code:04x}  {back:.8f}")

many = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
same("as another library rounds", encode_bf16(many), many.astype(ml_dtypes.bfloat16).view("u2"))

# %% [markdown]
# Lines two and three are ties. One goes down to `3f80`, one up to `3f82`: both even.
#
# **Break it.** Just shift, without rounding? Every number then moves toward zero. Errors that all
# point the same way do not cancel.

# %% tags=["break"]
ones = np.random.default_rng(2).uniform(1, 2, 10_000).astype(np.float32)
exact = ones.sum(dtype=np.float64)
rounded = decode_bf16(encode_bf16(ones)).sum(dtype=np.float64)
cut = decode_bf16((ones.view(np.uint32) >> np.uint32(16)).astype(np.uint16)).sum(dtype=np.float64)
print(f"sum of 10,000 numbers  {exact:.1f}")
print(f"rounded to bf16        {rounded:.1f}   off by {rounded - exact:+.1f}")
print(f"cut to bf16            {cut:.1f}   off by {cut - exact:+.1f}")
assert abs(cut - exact) > 20 * abs(rounded - exact), "cutting drifts, rounding cancels"

# %% [markdown]
# ## What each format loses
#
# Round many $x$ and look at $|\mathrm{round}(x) - x| / |x|$. Inside its range a format with $m$
# mantissa bits is wrong by at most $1 / (2^{m+1} + 1)$: half a step, seen from the tie just above
# a power of two. Below the range everything becomes zero, above it everything becomes the largest
# value.

# %%
x = (2.0 ** np.linspace(-13, 12, 4000)).astype(np.float32)
curves = (
    ("E2M1", ORANGE, round_to(x, 1, 1, 6.0)),
    ("E4M3", BLUE, round_to(x, 3, 7, 448.0)),
    ("bf16", GREEN, decode_bf16(encode_bf16(x))),
)
with figure("Worst relative error of one rounding, without a shared scale") as ax:
    middle = np.log2(x).reshape(-1, 40).mean(axis=1)  # a quarter of an octave each
    for name, colour, rounded in curves:
        worst = (np.abs(rounded - x) / x).reshape(-1, 40).max(axis=1)
        ax.plot(middle, worst, color=colour, linewidth=2)
        place = {"E2M1": (4.2, 0.45), "E4M3": (4.2, 0.085), "bf16": (4.2, 0.0055)}[name]
        ax.text(*place, name, color=colour, fontweight="bold")
    ax.set(yscale="log", ylim=(1e-3, 1.6), xlim=(-13, 12), xticks=range(-12, 13, 3))
    ax.set_xticklabels([f"$2^{{{power}}}$" for power in range(-12, 13, 3)])
    ax.set(xlabel="x", ylabel="|round(x) − x| / |x|")
    ax.grid(axis="y")

inside = (x >= 1) & (x <= 6)
for (name, _, rounded), m in zip(curves, (1, 3, 7), strict=True):
    worst, bound = np.max(np.abs(rounded - x)[inside] / x[inside]), 1 / (2 ** (m + 1) + 1)
    print(f"{name}: worst {worst:.4f}, bound {bound:.4f}")
    assert worst <= bound, f"{name} stays within half a step"

# %% [markdown]
# E2M1 is good for a factor of 12, from 0.5 to 6. Left and right of that the curve is at 1: nothing
# is kept. Alone it is useless, and the repair is the next idea.
#
# ## Blocks share a scale
#
# Take $n$ neighbours. Find their largest magnitude. Choose a scale $s$ that brings it to the top
# of the element's range, store $s$ once and $x / s$ in few bits each:
#
# $$s = 2^{\lceil \log_2(\mathrm{amax} / 6) \rceil}, \quad \text{code} = \mathrm{E2M1}(x / s), \quad
# \hat x = s \cdot \text{value(code)}$$
#
# A power of two needs no sign and no mantissa, just an exponent: that is **E8M0**, one byte $E$
# that means $2^{E - 127}$. Four numbers by hand:

# %%
block = [0.3, -1.1, 2.9, 13.0]
amax = max(abs(v) for v in block)
scale = 2.0 ** np.ceil(np.log2(amax / 6))
print(f"amax {amax}   amax/6 {amax / 6:.3f}   scale {scale} = byte {int(np.log2(scale)) + 127}")

by_hand = []
for v in block:
    code = nearest(abs(v) / scale, E2M1_VALUES)
    by_hand.append(float(np.copysign(E2M1_VALUES[code] * scale, v)))
    print(f"{v:5}  /scale {v / scale:7.3f}  code {code}  back {by_hand[-1]:5}")

assert by_hand == [0, -2, 2, 12], "the large one is close, the small ones pay for it"

# %% [markdown]
# **Break it, twice.** Why round the scale *up*? Rounded down, it pushes the largest element over
# the top of the range, and the largest is the one that matters most.
#
# And why not `ceil(log2(x))`? In float32 the logarithm rounds, and just above a power of two it
# rounds the excess away. Read the exponent from the bits instead, plus one if any mantissa bit is
# set.

# %% tags=["break"]
amax = 23.0
for name, direction in (("up  ", np.ceil), ("down", np.floor)):
    scale = 2.0 ** direction(np.log2(amax / 6))
    back = E2M1_VALUES[nearest(amax / scale, E2M1_VALUES)] * scale
    print(f"scale {name}: {scale}   {amax} / scale = {amax / scale:5}   comes back as {back}")
assert back == 12, "rounded down, 23 comes back as 12"

x = np.float32(2**20 * (1 + 2**-23))  # the next float32 above 2^20
by_log = int(np.ceil(np.log2(x)))
by_bits = int(x.view(np.uint32) >> 23) + int((x.view(np.uint32) & 0x7FFFFF) != 0) - 127
print(f"x = 2^20 (1 + 2^-23): exponent {by_log} from the logarithm, {by_bits} from the bits")
assert 2.0**by_bits >= x > 2.0**by_log, "only the bits give a scale that is large enough"

# %% [markdown]
# ## Three formats in the caches
#
# | name | element | block | scale | used for |
# | --- | --- | --- | --- | --- |
# | MXFP8 | E4M3 | 32 | E8M0 | window KV, activations |
# | MXFP4 | E2M1 | 32 | E8M0 | index keys and queries, expert weights |
# | main KV | E2M1 | 16 | **E4M3** | the compressed KV of the global layers |
#
# A question that comes up again and again: *is the main KV cache MXFP4?* No. Same four-bit
# element, but half the block and another kind of scale. The report (§2.4.4) keeps MXFP4 for the
# indexer: it multiplies in FP4, and the standard format runs on most hardware. Main KV is decoded
# before attention, so it may take the more accurate format.
#
# Now the vectorised form, one function for all three.


# %%
def power_of_two_above(x):
    bits = x.view(np.uint32)
    up = (bits >> np.uint32(23)) + ((bits & np.uint32(0x7FFFFF)) != 0)
    return (up.astype(np.uint32) << np.uint32(23)).view(np.float32)


def fake(x, group, top, mantissa_bits, bias, scale, floor):
    """x (..., C) f32 -> the values a reader of the stored codes will see."""
    blocks = x.reshape(-1, group)  # (N, group)
    amax = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), np.float32(floor))  # (N, 1)
    if scale == "e8m0":
        s = power_of_two_above(amax * np.float32(1 / top))
    else:
        s = round_to(amax / np.float32(top), 3, 7, 448.0)  # an E4M3 number
    return (round_to(blocks / s, mantissa_bits, bias, top) * s).reshape(x.shape)


def mxfp8(x, group=32):
    return fake(x, group, 448.0, 3, 7, "e8m0", floor=1e-4)


def mxfp4(x, group=32):
    return fake(x, group, 6.0, 1, 1, "e8m0", floor=6 * 2.0**-126)


def main_kv(x, group=16):
    return fake(x, group, 6.0, 1, 1, "e4m3", floor=6 * 2.0**-9)


same("vectorised = the four numbers by hand", mxfp4(np.float32(block), group=4), by_hand)

# %% [markdown]
# What does the finer scale buy? Let the largest of a block grow from 6 to 48 and measure the error
# of the whole block. With a power of two, the largest lands anywhere from 3 to 6: on a code if we
# are lucky (marked 4, 6), halfway between two if we are not (3.5, 5). A scale in E4M3 has eight
# steps to an octave, so it always puts the largest near 6.

# %%
shape = np.random.default_rng(3).standard_normal((2000, 16)).astype(np.float32)
shape /= np.abs(shape).max(axis=1, keepdims=True)  # amax 1
sweep = 2.0 ** np.linspace(np.log2(6), np.log2(48), 121)


def error(quantise, amax):
    x = shape * np.float32(amax)
    return np.sqrt(np.mean((quantise(x, group=16) - x) ** 2) / np.mean(x**2))


e8m0_scale = [error(mxfp4, amax) for amax in sweep]
e4m3_scale = [error(main_kv, amax) for amax in sweep]
with figure("Error of a block of 16 E2M1 numbers, by the kind of scale") as ax:
    ax.plot(sweep, e8m0_scale, color=ORANGE)
    ax.plot(sweep, e4m3_scale, color=BLUE)
    for amax, lands, above in ((7, "on 3.5", 5), (8, "4", -15), (10, "on 5", 5), (12, "6", -15)):
        at = (amax, error(mxfp4, amax))
        ax.annotate(lands, at, (0, above), textcoords="offset points", ha="center", color=ORANGE)
    ax.text(20, 0.15, "E8M0 scale", color=ORANGE, ha="center", fontweight="bold")
    ax.text(20, 0.08, "E4M3 scale", color=BLUE, ha="center", fontweight="bold")
    ax.set(xscale="log", xlabel="largest magnitude of the block", ylabel="error / signal")
    ax.set_xticks([6, 12, 24, 48], ["6", "12", "24", "48"])
    ax.set_xticks([], minor=True)
    ax.set(ylim=(0, 0.165), xlim=(5.7, 50))
    ax.grid(axis="y")
for name, errors in (("E8M0", e8m0_scale), ("E4M3", e4m3_scale)):
    print(f"{name} scale: error {min(errors):.3f} to {max(errors):.3f}, mean {np.mean(errors):.3f}")
assert np.mean(e4m3_scale) < 0.9 * np.mean(e8m0_scale), "the finer scale is more accurate"
lands = sweep / round_to((sweep / 6).astype(np.float32), 3, 7, 448.0)
print(f"with an E4M3 scale the largest lands between {lands.min():.2f} and {lands.max():.2f}")
close("near 6", lands, np.full(121, 6.0), within=6 / 16)

# %% [markdown]
# All three on the same data: rows of 512 normal numbers, then one outlier of 100 per row. An
# outlier takes the scale for itself, so its neighbours drown. Only its own block suffers: that is
# what small blocks are for.
#
# Can an E4M3 scale be too small? It ends at 448, so the format reaches $448 \cdot 6 = 2688$. NVFP4
# adds a second, global scale for more; V4.1 leaves it out. The latent comes from an RMS norm with
# weights of about 1 (report, §2.4.4), so its length is $\sqrt{512}$, and no channel exceeds that.

# %%
plain = np.random.default_rng(4).standard_normal((200, 512)).astype(np.float32)
outlier = plain.copy()
outlier[:, 7] = 100
print("error of ordinary values   no outlier   in the outlier's block   in other blocks")
shares = {}
formats_and_groups = (("MXFP8", mxfp8, 32), ("MXFP4", mxfp4, 32), ("main KV", main_kv, 16))
for name, quantise, group in formats_and_groups:
    near = np.arange(512) < group
    near[7] = False
    far = np.arange(512) >= group
    shares[name] = [
        np.sqrt(np.mean((quantise(x) - x)[:, where] ** 2) / np.mean(x[:, where] ** 2))
        for x, where in ((plain, ~near), (outlier, near), (outlier, far))
    ]
    print(f"{name:22}" + "{:15.3f}{:25.3f}{:18.3f}".format(*shares[name]))
order = sorted(shares, key=lambda name: shares[name][0])
assert order == ["MXFP8", "main KV", "MXFP4"], "more bits are better, then a finer scale"
assert shares["MXFP4"][1] > 0.9, "next to the outlier nearly everything became zero"
close("other blocks do not notice", shares["main KV"][2], shares["main KV"][0], within=0.002)

latent = (
    np.random.default_rng(5).standard_normal((1000, 512)).astype(np.float32) ** 3
)  # heavy tails
latent /= np.sqrt(np.mean(latent**2, axis=1, keepdims=True))
spike = np.zeros(512, np.float32)
spike[0] = np.sqrt(512)  # the worst case: all of the length in one channel
print(f"largest channel {np.abs(latent).max():.1f}, bound {np.sqrt(512):.1f}, format 2688")
close("the worst case has RMS 1", np.sqrt(np.mean(spike**2)), 1, within=1e-6)
assert np.abs(latent).max() <= np.sqrt(512) < 6 * 448, "one scale level is enough"

# %% [markdown]
# ## Packing: two codes a byte
#
# Four bits is half a byte. The even channel goes into the low nibble, the odd one into the high
# nibble.
#
# **Break it:** swap the nibbles on reading. The size is right, the shape is right, every value is
# a legal one. Nothing fails. The numbers belong to their neighbours.

# %% tags=["break"]
codes = [1, 2, 3, 15]
by_loop = []
for i in range(0, len(codes), 2):
    by_loop.append(codes[i] + 16 * codes[i + 1])
print([f"{byte:02x}" for byte in by_loop])


def pack(codes):
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed):
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)  # (..., B, 2)
    return pairs.reshape(*packed.shape[:-1], -1)


same("packed at once = by the loop", pack(np.uint8(codes)), by_loop)
same("and back", unpack(pack(np.uint8(codes))), codes)

packed = pack(np.uint8(codes))
swapped = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=-1).reshape(-1)
print("right: ", e2m1[unpack(packed)])
print("wrong: ", e2m1[swapped])
assert sorted(swapped) == sorted(codes), "the same codes, in the wrong places"

# %% [markdown]
# ## Count the bytes
#
# A record is all codes, then all scales. $C$ channels of $w$ bits in blocks of $n$:
#
# $$\text{bytes} = C w / 8 + C / n$$
#
# Three layers write one entry for two tokens, one layer writes one for each token. An entry is a
# main KV record and an index key. The report's total for the global cache is 890 bytes a token.


# %%
def record_bytes(channels, width, group):
    return channels * width // 8 + channels // group


main, window, key = record_bytes(512, 4, 16), record_bytes(512, 8, 32), record_bytes(128, 4, 32)
print(f"main KV    512 x 4 bit + 32 scales = 256 + 32 = {main}")
print(f"window KV  512 x 8 bit + 16 scales = 512 + 16 = {window}")
print(f"index key  128 x 4 bit +  4 scales =  64 +  4 = {key}")
entries = 3 * 1 / 2 + 1
print(f"per token: {entries} entries x ({main} + {key}) = {entries * (main + key):.0f} bytes")
assert (main, window, key) == (288, 528, 68), "bytes of the three records"
assert entries * (main + key) == 890, "bytes of global KV per token"
print(f"bits per value: main KV {8 * main / 512}, window KV {8 * window / 512}, bf16 16")

# %% [markdown]
# ## The module gives the same numbers
#
# [Minifloat.round](../dsv41/formats.py#Minifloat.round) is our `round_to`,
# [BlockFormat](../dsv41/quant.py#BlockFormat) is our `fake` plus the bytes, and
# [pack_nibbles](../dsv41/formats.py#pack_nibbles) our `pack`. Everything below is equal to the
# last bit.
#
# Two corners at the end. A block of zeros must not divide by zero: a floor under amax keeps the
# scale legal. And E2M1 has no NaN, so one would turn into a number silently: it is refused.

# %%
from dsv41 import formats, quant
from dsv41.ledger import kv_bytes

x = np.random.default_rng(6).standard_normal((64, 512)).astype(np.float32) * 3
same("table of E2M1", formats.E2M1.table, e2m1)
same("table of E4M3", formats.E4M3.table, e4m3)
same("bf16 codes", formats.encode_bf16(x), encode_bf16(x))
same("E4M3 rounding", formats.E4M3.round(x * 40), round_to(x * 40, 3, 7, 448.0))
same("window KV", quant.WINDOW_KV_FP8.fake(x), mxfp8(x))
same("index keys", quant.INDEX_FP4.fake(x), mxfp4(x))
same("main KV", quant.MAIN_KV_FP4.fake(x), main_kv(x))

records = quant.MAIN_KV_FP4.encode(x)
same("64 records of 288 bytes", records.shape, (64, main))
values = e2m1[unpack(records[:, :256])] * e4m3[records[:, 256:]].repeat(16, axis=1)
same("our reading of the module's bytes", values, main_kv(x))
same("the ledger counts the same bytes", kv_bytes("V4.1-Flash").hbm, entries * (main + key))

zeros = np.zeros(16, np.float32)
same("zeros stay zeros", quant.MAIN_KV_FP4.fake(zeros), zeros)
x = np.ones((2, 32), np.float32)
x[1, 5] = np.nan
try:
    quant.INDEX_FP4.encode(x)
except ValueError as refusal:
    message = str(refusal)
print(message)
assert message.endswith("got nan at (1, 5)"), "the error names the position"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. E5M2 is the other FP8 format: 5 exponent bits, 2 mantissa bits, bias 15. Unlike E4M3 it has
#    infinities ($E = 31$, $M = 0$) and NaNs ($E = 31$, $M > 0$). Decode one byte.
# 2. Find the E8M0 byte of a block's scale: the smallest power of two that is at least amax / 6. The
#    inputs include the trap above.
# 3. Read an index key from its 68 bytes: 64 bytes of codes, then 4 scales.


# %% tags=["exercise"]
def e5m2(code):
    """code 0..255 -> float"""
    return ...


check("01.e5m2", e5m2)


# %% tags=["exercise"]
def scale_byte(block):
    """block (32,) f32, not all zero -> int, the byte E that means 2^(E - 127)"""
    top = np.abs(block).max() * np.float32(1 / 6)  # as the released kernel does it
    return ...


check("01.scale_byte", scale_byte)


# %% tags=["exercise"]
def read_key(record):
    """record (68,) uint8 -> (128,) f32"""
    return ...


check("01.read_key", read_key)

# %% [markdown]
# ## What we learned
#
# - One equation decodes every small float. Rounding is nearest, ties to the even code, saturating.
# - E2M1 covers a factor of 12. A scale per block moves that window to the block's numbers.
# - E8M0 scales are powers of two, rounded up, read from the bits. E4M3 scales fit closer.
# - Main KV is E2M1 with an E4M3 scale per 16; it is not MXFP4. The window stays in FP8.
# - 288, 528 and 68 bytes a record; 890 bytes a token. Swapped nibbles have the same size.
#
# Worked solutions: [solutions/01_number_formats.py](solutions/01_number_formats.py). Next: [02
# RMSNorm, RoPE, YaRN](02_rmsnorm_rope_yarn.ipynb). All chapters: [README.md](README.md).
