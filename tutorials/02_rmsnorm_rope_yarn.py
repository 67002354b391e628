# %% [markdown]
# # 02 · RMSNorm, RoPE, YaRN, inverse rotation
#
# **How does a vector know its position, and how does attention forget it again?**
#
# Attention compares vectors by dot products, and a dot product does not know who came first. The
# position must be inside the vectors. DeepSeek-V4.1-Flash turns 64 of their 512 channels by an
# angle. This chapter builds the norm before the turn, the turn, its speeds, and the turn back.
#
# You need NumPy and sine and cosine. Chapter 01 is not needed. 25 minutes. Three exercises at the
# end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/02_rmsnorm_rope_yarn.py`.
#
# Sources: Zhang and Sennrich 2019, §4, for RMSNorm; Su et al. 2021 (RoFormer), §3.2, for the
# rotation; Peng et al. 2023 (YaRN), §3.2 and §3.4; RMSNorm, precompute_freqs_cis and
# apply_rotary_emb in the released inference/model.py for every constant. The modules that this
# page arrives at: [rope.py](../dsv41/rope.py) and `rmsnorm` in [ops.py](../dsv41/ops.py#rmsnorm).

# %%
import math

import numpy as np

from lib.page import BLUE, FAINT, GREEN, GREY, INK, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## RMSNorm: give every vector the same length
#
# Divide by the root of the mean square, multiply by a learned weight:
#
# $$y_c = \frac{x_c}{\sqrt{\frac{1}{C}\sum_i x_i^2 + \epsilon}} \cdot w_c$$
#
# No mean is subtracted, no bias is added. Four channels by hand: the squares of 1, 7, 5, 5 add up
# to 100, their mean is 25, the root is 5.


# %%
def norm_by_loop(x, weight, eps):
    total = 0.0
    for value in x:
        total += value * value
    rms = math.sqrt(total / len(x) + eps)
    return [value / rms * w for value, w in zip(x, weight, strict=True)]


def rmsnorm(x, weight, eps=1e-20):
    """x (..., C) f32, weight (C,) f32 -> (..., C) f32"""
    mean_square = (x * x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])  # (..., 1)
    return x * (1 / np.sqrt(mean_square + np.float32(eps))) * weight


x, weight = np.float32([1, 7, 5, 5]), np.ones(4, np.float32)
print("by loop:", norm_by_loop(x.tolist(), [1.0] * 4, 1e-20))
close("by hand", norm_by_loop(x.tolist(), [1.0] * 4, 1e-20), [0.2, 1.4, 1, 1], within=1e-12)
close("all channels at once = by loop", rmsnorm(x, weight), [0.2, 1.4, 1, 1], within=2e-7)
close("a longer input, the same output", rmsnorm(x * 1000, weight), rmsnorm(x, weight), 2e-7)

# %% [markdown]
# $\epsilon$ is there so that a zero vector gives zeros, not NaN. In this model it is $10^{-20}$.
#
# **Break it.** Set $10^{-6}$ instead, a common choice elsewhere, and feed it a short vector. The
# norm stops being a norm.

# %% tags=["break"]
print("rms of x     eps 1e-20   eps 1e-6")
lengths = {}
for rms in (1.0, 1e-2, 1e-3, 1e-4):
    short = x * np.float32(rms / 5)
    outs = [rmsnorm(short, weight, eps) for eps in (1e-20, 1e-6)]
    lengths[rms] = [float(np.sqrt(np.mean(out**2))) for out in outs]
    print(f"{rms:8.4f}     {lengths[rms][0]:9.4f}   {lengths[rms][1]:8.4f}")
assert abs(lengths[1e-4][0] - 1) < 1e-6, "with 1e-20 every length becomes 1"
assert lengths[1e-4][1] < 0.1, "with 1e-6 a short vector stays ten times too short"
same("zeros stay zeros", rmsnorm(np.zeros(4, np.float32), weight), np.zeros(4, np.float32))

# %% [markdown]
# ## Is each query head normalised?
#
# In V4 yes, in V4.1 no (`Attention` in either release's inference/model.py). V4.1 makes all heads
# from one low-rank vector $c_q$. The norm sits on $c_q$; what leaves the second matrix is rotated
# as it is:
#
# $$c_q = \mathrm{RMSNorm}(W_a x), \qquad q = W_b\, c_q$$
#
# **Break it.** Norm each head as well. All heads get one length, so no head can be more decided
# than another. The shapes are right, the scores are not. (The weights come from a tiny model.
# `dense` gives a stored matrix as float32; `FLOAT32` asks the module to round nothing on the way.)

# %% tags=["break"]
from dsv41 import FLOAT32, preset
from dsv41.init import random_params
from dsv41.ops import dense
from dsv41.projections import low_rank_queries

tiny = preset("tiny")
p = random_params(tiny, np.random.default_rng(1))["layers"][0]["attn"]
x = np.random.default_rng(2).standard_normal((3, tiny.hidden_size)).astype(np.float32)
c_q = rmsnorm(x @ dense(p["wq_a"]["weight"]).T, p["q_norm"]["weight"])
q = (c_q @ dense(p["wq_b"]["weight"]).T).reshape(3, tiny.num_attention_heads, tiny.head_dim)
close("queries of the module", low_rank_queries(x, p, tiny, FLOAT32)[1], q, within=1e-5)

wrong = rmsnorm(q, np.ones(tiny.head_dim, np.float32))
for name, heads in (("V4.1, as made:", q), ("normed again: ", wrong)):
    print(name, " rms of token 0's heads", np.round(np.sqrt(np.mean(heads[0] ** 2, -1)), 3))
assert np.ptp(np.sqrt(np.mean(wrong**2, -1))) < 1e-6, "normed again, heads lose their lengths"
assert np.ptp(np.sqrt(np.mean(q**2, -1))) > 0.01, "as made, heads differ in length"

# %% [markdown]
# ## RoPE: a pair of channels is an arrow
#
# Take two channels as one complex number $z$. At position $t$ turn it by $t f$:
#
# $$z \mapsto z \cdot e^{\mathrm{i}\, t f} \qquad (a, b) \mapsto (a \cos tf - b \sin tf,\;
# a \sin tf + b \cos tf)$$
#
# With $f = \pi / 2$ every token is a quarter turn.


# %%
def turn(a, b, angle):
    """One pair, one angle in radians."""
    cos, sin = math.cos(angle), math.sin(angle)
    return a * cos - b * sin, a * sin + b * cos


for t in range(5):
    a, b = turn(2.0, 1.0, t * math.pi / 2)
    print(f"t = {t}   ({a:5.2f}, {b:5.2f})   length {math.hypot(a, b):.4f}")
close("a quarter turn", turn(2.0, 1.0, math.pi / 2), (-1, 2), within=1e-12)
close("four of them", turn(2.0, 1.0, 4 * math.pi / 2), (2, 1), within=1e-12)

# %% [markdown]
# The head has 32 such pairs, each with its own speed $f_i = \text{base}^{-2i/64}$. Pair 0 turns
# one radian a token, and every later pair is slower than the one before.

# %%
DIM, BASE = 64, 10_000
f = np.float32(1) / np.float32(BASE) ** (np.arange(0, DIM, 2, dtype=np.float32) / np.float32(DIM))
circle = np.linspace(0, 2 * np.pi, 100)
with figure("The same arrow at positions 0 to 5: every pair has its own speed", columns=3) as axes:
    axes[0].figure.set_size_inches(7.5, 2.8)
    for ax, pair in zip(axes, (0, 4, 12), strict=True):
        ax.plot(np.cos(circle), np.sin(circle), color=FAINT, linewidth=0.8)
        for t in range(6):
            a, b = turn(1.0, 0.0, t * float(f[pair]))
            shade = 0.35 + 0.65 * (t == 0)
            ax.annotate("", (a, b), (0, 0), arrowprops={"arrowstyle": "->", "color": BLUE,
                        "alpha": shade, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
            if pair < 12:
                ax.text(1.17 * a, 1.17 * b, t, ha="center", va="center", color=INK)
        if pair == 12:
            ax.text(1.12, 0.08, "0 … 5", ha="left", va="center", color=INK)
        ax.set(xlim=(-1.4, 1.7), ylim=(-1.4, 1.4), aspect="equal", xticks=[], yticks=[])
        ax.set_xlabel(f"pair {pair}: {f[pair]:.3f} radians a token")
        ax.spines[:].set_visible(False)
assert f[0] == 1 and np.all(np.diff(f) < 0), "pair 0 turns one radian a token, later pairs less"

# %% [markdown]
# Now all pairs and all tokens at once. Only the *last* $2U$ channels turn, here 64 of 512; the
# others carry no position. A pair is two **neighbours**, channels $2i$ and $2i + 1$.


# %%
def rotate(x, positions, freqs):
    """x (T, ..., C) f32, positions (T,), freqs (U,) f32 -> a turned copy"""
    turning = 2 * len(freqs)
    angle = positions.astype(np.float32)[:, None] * freqs  # (T, U), a float32 product
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), len(freqs))
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., -turning::2], x[..., -turning + 1 :: 2]  # (T, ..., U) each
    out = x.copy()
    out[..., -turning::2] = a * cos - b * sin
    out[..., -turning + 1 :: 2] = a * sin + b * cos
    return out


x = np.random.default_rng(3).standard_normal((4, 2, 512)).astype(np.float32)
positions = np.array([0, 1, 7, 100])
by_loop = x.astype(np.float64)
for token, head, i in np.ndindex(4, 2, 32):
    even = 512 - DIM + 2 * i
    angle = float(np.float32(positions[token]) * f[i])
    by_loop[token, head, even : even + 2] = turn(*by_loop[token, head, even : even + 2], angle)

turned = rotate(x, positions, f)
close("all pairs at once = pair by pair", turned, by_loop, within=1e-6)
same("position 0 turns nothing", turned[0], x[0])
same("the first 448 channels never turn", turned[..., :448], x[..., :448])
close("no length changes", (turned**2).sum(-1), (x**2).sum(-1), within=1e-3)

# %% [markdown]
# ## A query and a key meet at their distance
#
# Both are turned, the query by $t f$, the key by $s f$. In the dot product the two angles
# subtract. With complex numbers, $\bar{\ }$ for the conjugate:
#
# $$\mathrm{Re}\left(q e^{\mathrm{i} t f} \cdot \overline{k e^{\mathrm{i} s f}}\right) =
# \mathrm{Re}\left(q \bar k\, e^{\mathrm{i} (t - s) f}\right)$$


# %%
def score(q, k, t, s, freqs, turning=rotate):
    """q, k (C,) -> the dot product of q at position t with k at position s."""
    q, k = turning(q[None], np.array([t]), freqs), turning(k[None], np.array([s]), freqs)
    return float((q * k).sum())


q, k = np.random.default_rng(4).standard_normal((2, DIM)).astype(np.float32)
print("   t     s   t - s    score")
places = ((3, 0), (10, 7), (503, 500), (0, 3), (4, 0))
scores = {}
for t, s in places:
    scores[t, s] = score(q, k, t, s, f)
    print(f"{t:4}  {s:4}  {t - s:6}   {scores[t, s]:6.2f}")
close("503, 500 scores as 3, 0", scores[503, 500], scores[3, 0], within=1e-3)
assert abs(scores[0, 3] - scores[3, 0]) > 0.1, "before and behind are different"

# %% [markdown]
# **Break it.** The other convention pairs channel $i$ with channel $i + 32$, the two halves. It
# keeps lengths and also depends on the distance only, so every test that looks at one of these
# properties passes. But the weights were trained for neighbours.


# %% tags=["break"]
def rotate_halves(x, positions, freqs):
    """Wrong for this model: channel i with channel i + U."""
    angle = positions.astype(np.float32)[:, None] * freqs
    a, b = x[..., : len(freqs)], x[..., len(freqs) :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


print("distance   neighbours   halves")
for t, s in ((0, 0), (1, 0), (10, 0), (110, 100)):
    right, wrong = score(q, k, t, s, f), score(q, k, t, s, f, rotate_halves)
    print(f"{t - s:8}   {right:10.4f} {wrong:8.4f}")
shift = wrong - score(q, k, 10, 0, f, rotate_halves)
length = float((rotate_halves(q[None], np.array([10]), f) ** 2).sum())
close("halves: distance only, too", shift, 0, within=1e-3)
close("halves: the length is kept, too", length, float((q**2).sum()), within=1e-4)
close("at distance 0 both agree", score(q, k, 0, 0, f, rotate_halves), score(q, k, 0, 0, f), 1e-6)
assert abs(right - wrong) > 1, "at distance 10 they are two different models"

# %% [markdown]
# ## Why is the output turned back?
#
# In this model one vector per token is key *and* value. The value is therefore turned as well,
# and what attention returns is a mix of arrows turned by their own positions:
#
# $$o_t = \sum_s p_s\, v_s e^{\mathrm{i} s f} \qquad\Rightarrow\qquad
# o_t\, e^{-\mathrm{i} t f} = \sum_s p_s\, v_s e^{-\mathrm{i} (t - s) f}$$
#
# Turning $o_t$ back by the *query's* position leaves distances only. It is the same function with
# the angle negated, the conjugate.
#
# Take three tokens with fixed weights, and move the whole text by 0, 1, 2, … positions. The text
# is the same, so the answer should be.

# %%
values = np.random.default_rng(5).standard_normal((3, DIM)).astype(np.float32)
p_s = np.float32([0.2, 0.3, 0.5])


def attended(shift):
    """Tokens at shift, shift + 1, shift + 2; the query is the last. -> o, and o turned back."""
    at = np.arange(3) + shift
    o = p_s @ rotate(values, at, f)  # (DIM,)
    return o, rotate(o[None], -at[-1:], f)[0]


raw, back = (np.array(rows) for rows in zip(*map(attended, range(6)), strict=True))  # (6, DIM)
with figure("Pair 2 of the output while the text moves by 0 to 5 positions", columns=2) as axes:
    for ax, rows, name, colour in (
        (axes[0], raw, "not turned back", ORANGE),
        (axes[1], back, "turned back", GREEN),
    ):
        for shift, (a, b) in enumerate(rows[:, 4:6].tolist()):
            ax.annotate("", (a, b), (0, 0), arrowprops={"arrowstyle": "->", "color": colour,
                        "shrinkA": 0, "shrinkB": 0})  # fmt: skip
            if name == "not turned back":
                ax.text(1.2 * a, 1.2 * b, shift, ha="center", va="center")
        if name == "turned back":
            ax.text(1.1 * a, 1.1 * b, "0 … 5", ha="left", va="center")
        limit = 1.45 * float(np.hypot(*rows[0, 4:6]))
        ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])
        ax.set_xlabel(name, color=colour)
        ax.spines[:].set_visible(False)

# %% [markdown]
# **Break it.** Forget the turn back. Moving the text by 1000 positions then changes the output.

# %% tags=["break"]
(o_0, back_0), (o_1000, back_1000) = attended(0), attended(1000)
print("first channels      at 0              at 1000")
for name, a, b in (("not turned back", o_0, o_1000), ("turned back", back_0, back_1000)):
    print(f"{name:16} {a[0]:7.4f} {a[1]:7.4f}   {b[0]:7.4f} {b[1]:7.4f}")
close("turned back, the place in the text does not matter", back_1000, back_0, within=1e-3)
assert np.abs(o_1000 - o_0).max() > 0.5, "not turned back, it does"

from_distance = p_s @ rotate(values, np.array([-2, -1, 0]), f)
close("only the distances -2, -1, 0 are left", back_1000, from_distance, within=1e-3)

# %% [markdown]
# ## Wavelengths, two bases, and YaRN
#
# A pair repeats after $2\pi / f_i$ tokens, its wavelength. There are two tables:
#
# | layer | base | YaRN |
# | --- | --- | --- |
# | window only | 10,000 | no |
# | with compressed KV, also when it only reads another layer's | 160,000 | yes |
#
# A layer uses its table for everything it turns: queries, window KV, compressed KV, index keys,
# index queries, and the turn back.
#
# *160,000 or 40,000?* Both are quoted, for V4-Flash too. 40,000 is the default of `ModelArgs` in
# the released inference/model.py. config.json says 160,000, for V4-Flash, V4-Pro and V4.1, and the
# file overrides the default. The break below shows what a model built without the file would see.
#
# YaRN stretches the long wavelengths by a factor of 16, because the original context of 65,536
# was extended to 1,048,576. A pair that turned often in the original context has seen all its
# angles: keep it. A pair that never finished one turn would meet new angles: divide its frequency
# by 16. Between them a ramp. Pair number $c(r)$ makes $r$ turns in the original context:
#
# $$c(r) = \frac{64 \ln(65536 / (2\pi r))}{2 \ln \text{base}}, \quad
# \rho_i = \mathrm{clip}\left(\frac{i - \lfloor c(32) \rfloor}{\lceil c(1) \rceil -
# \lfloor c(32) \rfloor}, 0, 1\right), \quad f_i \leftarrow f_i (1 - \rho_i) +
# \frac{f_i}{16} \rho_i$$


# %%
def plain(base):
    exponents = np.arange(0, DIM, 2, dtype=np.float32) / np.float32(DIM)
    return np.float32(1) / np.float32(base) ** exponents  # (32,) f32


def pair_that_turns(times, base):
    return DIM * math.log(65_536 / (2 * math.pi * times)) / (2 * math.log(base))


def yarn(base):
    freqs = plain(base)
    low, high = math.floor(pair_that_turns(32, base)), math.ceil(pair_that_turns(1, base))
    ramp = (np.arange(32, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    ramp = np.clip(ramp, np.float32(0), np.float32(1))
    return freqs / np.float32(16) * ramp + freqs * (1 - ramp)


near, unstretched, far = plain(10_000), plain(160_000), yarn(160_000)
print(f"c(32) = {pair_that_turns(32, 160_000):.3f}   c(1) = {pair_that_turns(1, 160_000):.3f}")
print("pair   base 10,000   base 160,000     with YaRN   stretched")
for i in (0, 8, 15, 16, 20, 24, 25, 31):
    waves = [2 * math.pi / float(freqs[i]) for freqs in (near, unstretched, far)]
    print("{:4} {:13,.1f} {:14,.1f} {:13,.1f}".format(i, *waves), end="")
    print(f"{waves[2] / waves[1]:12.3f}")
for r in (32, 1):
    slow = 160_000 ** (-2 * pair_that_turns(r, 160_000) / DIM)  # radians a token
    close(f"pair c({r}) turns {r} times in 65,536 tokens", 65_536 * slow / (2 * math.pi), r, 1e-9)
same("pairs 0 to 15 are kept", far[:16], unstretched[:16])
close("pairs 25 to 31 are 16 times slower", unstretched[25:] / far[25:], [16] * 7, within=1e-5)
assert 2 * math.pi / near[31] < 65_536 < 1_048_576 < 2 * math.pi / far[31], "the slowest pairs"

# %%
with figure("YaRN leaves pairs 0 to 15 alone and stretches 25 to 31 sixteenfold") as ax:
    pair = np.arange(32)
    ax.axvspan(15, 25, color=GREY, alpha=0.15, lw=0)
    ax.plot(pair, 2 * np.pi / near, color=ORANGE)
    ax.plot(pair, 2 * np.pi / unstretched, color=BLUE, linestyle=":")
    ax.plot(pair, 2 * np.pi / far, color=BLUE)
    ax.text(31.3, 2 * np.pi / near[31], "base 10,000", color=ORANGE, va="top")
    ax.text(31.3, 2 * np.pi / unstretched[31], "160,000", color=BLUE, va="center")
    ax.text(31.3, 2 * np.pi / far[31], "with YaRN", color=BLUE, va="center")
    ax.text(20, 9, "ramp", ha="center", color=INK)
    for tokens, name in ((65_536, "original context"), (1_048_576, "context")):
        ax.axhline(tokens, color=GREY, linewidth=0.8)
        ax.text(0, tokens * 1.25, name, color=INK, fontsize=8)
    ax.set(yscale="log", xlim=(-0.5, 37), ylim=(4, 3e7), xticks=range(0, 32, 5))
    ax.set(xlabel="pair", ylabel="wavelength in tokens")

# %% [markdown]
# **Break it.** Leave YaRN out, or use the window layers' base, or the default of the code. Short
# texts hide the first mistake. Let q and k be equal arrows: the score is then
# $\sum_i \cos(d f_i)$, at most 32.
#
# The YaRN paper also scales the attention scores, by the square of $0.1 \ln 16 + 1$. This model
# does not.

# %% tags=["break"]
print("distance    right   no YaRN   base 10,000   40,000 with YaRN")
meets, default = {}, yarn(40_000)
for d in (1, 16, 127, 1000, 10_000, 100_000):
    meets[d] = [float(np.cos(d * freqs).sum()) for freqs in (far, unstretched, near, default)]
    print("{:8,} {:8.3f} {:9.3f} {:13.3f} {:18.3f}".format(d, *meets[d]))
assert abs(meets[127][0] - meets[127][1]) < 0.1, "inside the window a missing YaRN is not seen"
assert abs(meets[100_000][0] - meets[100_000][1]) > 1, "far away it is"
assert abs(meets[127][0] - meets[127][2]) > 1, "the wrong base shows earlier"
assert abs(meets[127][0] - meets[127][3]) > 1, "and so does the default of the code"
magnitude = (0.1 * math.log(16) + 1) ** 2
print(f"with the paper's factor every score would be {magnitude:.3f} times as large")
assert magnitude > 1.6, "a sharper softmax than the trained one"

# %% [markdown]
# ## The angle at position 1,000,000
#
# The release multiplies a float32 position by a float32 frequency. Near 687,656 neighbouring
# float32 numbers are 0.0625 apart, so the angle of pair 1 is off by up to half of that, in
# radians.
#
# **Break it.** "Better" angles in float64 give other numbers than the release. The difference is
# larger than a step of bf16, the format in which the turned vectors are stored.

# %% tags=["break"]
position = 1_000_000
single = np.float32(position) * far
double = position * far.astype(np.float64)
print("pair   float32 angle    float64 angle   cos of it   cos of it")
for i in (0, 1, 2, 3, 8, 16, 31):
    print(f"{i:4} {single[i]:15.4f} {double[i]:16.4f}", end="")
    print(f"{np.cos(np.float64(single[i])):12.4f} {np.cos(double[i]):11.4f}")
off = np.abs(np.cos(single.astype(np.float64)) - np.cos(double))
print(f"spacing of float32 at pair 1: {np.spacing(single[1])}, largest change of a cosine", end=" ")
print(f"{off.max():.4f}")
assert np.spacing(single[1]) == 0.0625, "the grid of float32 angles there"
assert off.max() > 2**-8, "more than a step of bf16 at 1"
assert np.abs(single - double).max() <= 0.0625 / 2, "and never more than half a step of float32"

# %% [markdown]
# ## Count: what does turning cost?
#
# Six operations a pair: four products, a sum, a difference. A query has 64 heads, the key one,
# the output 64 again. A window of 128 keys costs $2 \cdot 512$ operations for a score and as many
# for a value, a key and a head. Turning needs 32 stored frequencies a base. Ready cosines and sines
# for a million positions would fill half a gigabyte:

# %%
turning = (64 + 1 + 64) * 32 * 6
window = 128 * 64 * (2 * 512 + 2 * 512)
table = 2 * 1_048_576 * 32 * 2 * 4  # two bases, positions, pairs, cos and sin, bytes
print(f"turning        {turning:12,} operations a token and layer")
print(f"window         {window:12,}")
print(f"share          {turning / window:12.2%}")
print(f"two tables     {table:12,} bytes;  frequencies {2 * 32 * 4} bytes")
assert turning < 0.002 * window, "two thousandths of the window's work"

# %% [markdown]
# ## The module gives the same numbers
#
# [rmsnorm](../dsv41/ops.py#rmsnorm), [frequencies](../dsv41/rope.py#frequencies) and
# [rotate](../dsv41/rope.py#rotate) are what we built, and [presets.py](../dsv41/presets.py) has
# the constants. The turn back is `inverse=True`.

# %%
from dsv41 import ops, rope

flash = preset("v4.1-flash")
same("window-only layers: 10,000", rope.frequencies(flash, ratio=0), near)
for ratio in (1, 2):
    same(f"layers of ratio {ratio}: 160,000, YaRN", rope.frequencies(flash, ratio), far)
stretch = (flash.rope_scaling.original_max_position_embeddings, flash.max_position_embeddings)
same("original context, context", stretch, [65_536, 65_536 * 16])
ratios = [layer.ratio for layer in flash.plan]
print(f"layers with base 10,000: {ratios.count(0)}, with 160,000: {40 - ratios.count(0)}")
assert ratios.count(0) == 2 and len(ratios) == 40, "two layers of forty have the plain base"

x = np.random.default_rng(6).standard_normal((5, 2, 512)).astype(np.float32)
weight = np.random.default_rng(7).uniform(0.5, 1.5, 512).astype(np.float32)
positions = np.array([0, 1, 127, 65_536, 1_000_000])
same("norm", ops.rmsnorm(x, weight, flash.rms_norm_eps, FLOAT32), rmsnorm(x, weight))
turned = rotate(x, positions, far)
same("turn", rope.rotate(x, positions, far), turned)
back = rope.rotate(turned, positions, far, inverse=True)
same("turn back", back, rotate(turned, -positions, far))
close("there and back again", back, x, within=2e-6)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Score a query at $t$ against a key at $s$ with *one* rotation instead of two.
# 2. The chapter's `rotate` has no `inverse`. Turn the output of several heads back by the query's
#    position, at positions up to a million.
# 3. You have a kernel that pairs halves, as `rotate_halves` does. Reorder the 64 channels so that
#    its pairs are this model's pairs.


# %% tags=["exercise"]
def one_turn(q, k, t, s, freqs):
    """q, k (64,) f32, t and s int, freqs (32,) f32 -> float, the dot product after turning"""
    return ...


check("02.one_turn", one_turn)


# %% tags=["exercise"]
def turned_back(o, t, freqs):
    """o (H, C) f32, one token's heads; t int; freqs (U,) f32 -> (H, C) f32"""
    return ...


check("02.turned_back", turned_back)


# %% tags=["exercise"]
def for_halves(x):
    """x (64,) f32, neighbours are pairs -> (64,) f32, channels i and i + 32 are pairs"""
    return ...


check("02.for_halves", for_halves)

# %% [markdown]
# ## What we learned
#
# - RMSNorm divides by the root of the mean square; $\epsilon = 10^{-20}$. V4.1 norms the low-rank
#   query vector, not each head.
# - 32 pairs of neighbouring channels turn, each at its own speed. Scores depend on distances.
# - Pairing halves passes every property and is another model.
# - Keys are also values, so the output is turned back by the query's position.
# - Two layers use base 10,000. The others use 160,000 with YaRN: wavelengths kept below pair 16,
#   sixteen times as long from pair 25, no factor on the scores.
# - Angles are float32 products. At a million, float64 is a different model too.
#
# Worked solutions: [solutions/02_rmsnorm_rope_yarn.py](solutions/02_rmsnorm_rope_yarn.py). Next:
# [03 Window attention](03_window_attention.ipynb). All chapters: [README.md](README.md).
