# %% [markdown]
# # 11 · DeepSeekMoE and balance by bias, per modality
#
# **How does a router choose 6 of 384 experts, and what keeps the 384 equally busy?**
#
# Every layer of DeepSeek-V4.1-Flash holds 384 routed experts and one shared one. A token visits six
# of the 384. If all tokens like the same six, the others learn nothing and the machines that hold
# the six are late. A bias fixes that. It takes part in the choice and stays out of the
# result. Text and images have a bias each. This chapter builds the score, the choice, the expert
# and the rule that moves the bias.
#
# You need NumPy and what a matrix product is. 25 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/11_moe_balance.py`.
#
# Sources: the V4.1 report, §2.1.1 (experts) and §4.2.2 (speed of the bias); DeepSeek-V3's report,
# §2.1.2 (the rule); `Gate`, `Expert` and `MoE` of the released inference/model.py. The modules that
# this page arrives at: [moe.py](../dsv41/moe.py) and
# [balance_bias](../dsv41/train/schedule.py#balance_bias).

# %%
import math

import numpy as np

from lib.page import BLUE, GREY, ORANGE, ROOT, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## The score
#
# One dot product $l_e = x \cdot g_e$ per expert gives a logit. The score is the square root of its
# softplus:
#
# $$s = \sqrt{\log(1 + e^{l})}$$
#
# It is always positive, near $e^{l/2}$ for small logits and near $\sqrt{l}$ for large ones.
# Python's floats have 64 bits, so a loop over `math` gives the truth for ten logits.

# %%
logits = [-100, -20, -16.64, -1, 0, 1, 20, 88.8, 100, 1000]
truth = []
for l in logits:
    softplus = math.log1p(math.exp(l)) if l < 40 else l  # e^-40 more is nothing
    truth.append(math.sqrt(softplus))
    print(f"l {l:8}   score {truth[-1]:.9g}")
close("at 0 the score is the root of log 2", truth[4], math.log(2) ** 0.5, within=1e-15)


# %% [markdown]
# The model works in float32, where both ends need care. Above, take $l$ out of the logarithm:
# $\log(1 + e^l) = \max(l, 0) + \log(1 + e^{-|l|})$, which never sees a large exponential. `log1p`
# keeps the small ones. Far below, $e^l$ leaves the normal range of float32, so take the root before
# the exponential: $e^{l/2}$.


# %%
def score(l):
    softplus = np.maximum(l, np.float32(0)) + np.log1p(np.exp(-np.abs(l)))
    half = np.exp(np.minimum(l, np.float32(0)) * np.float32(0.5))
    return np.where(l < -20, half, np.sqrt(softplus))


s = score(np.float32(logits))
assert s.dtype == np.float32, "float32 in, float32 out"
close("ten scores, relative to the truth", s / np.float64(truth), np.ones(10), within=1e-6)

# %% [markdown]
# **Break it, twice.** Write the equation as it stands. $1 + e^{-16.64}$ is 1 in float32, so the
# score becomes 0. $e^{88.8}$ is infinite, so the score does too. Then `log1p`, without the two
# rearrangements: it repairs most of the lower end and nothing of the upper.

# %% tags=["break"]
l = np.float32(logits)
with np.errstate(over="ignore"):
    naive = np.sqrt(np.log(1 + np.exp(l)))
    only_log1p = np.sqrt(np.log1p(np.exp(l)))
print("       l         right    log(1 + exp)    log1p(exp)")
for row in zip(logits, s, naive, only_log1p, strict=True):
    print("{:8} {:13.4g} {:15.4g} {:13.4g}".format(*row))
assert (naive[:3] == 0).all() and np.isinf(naive[-3:]).all(), "naive: three zeros, three inf"
assert abs(only_log1p[0] / truth[0] - 1) > 1e-3, "at -100 e^l has too few bits left"

with np.errstate(invalid="ignore"):
    weights = naive[-3:] / naive[-3:].sum()
print("weights of three experts with infinite scores:", weights)
assert np.isnan(weights).all(), "and one division later the token is lost"

# %% [markdown]
# ## The bias chooses, it does not weigh
#
# Each expert has a bias $b_e$. The best $k$ of $s + b$ are chosen. Their weights come from $s$
# alone and are made to sum to 1.5:
#
# $$S = \mathrm{top}_k(s + b), \qquad
# w_e = 1.5 \cdot \frac{s_e}{\sum_{j \in S} s_j}, \quad e \in S$$
#
# Four experts, $k = 2$, by hand. Without the bias, experts 0 and 1 win.

# %%
four_logits, four_bias = [2, 1, 0, -1], [0, 0, 1, 2]
four = [math.sqrt(math.log1p(math.exp(l))) for l in four_logits]
for e in range(4):
    print(f"expert {e}: score {four[e]:.4f}   + bias {four_bias[e]} = {four[e] + four_bias[e]:.4f}")
order = sorted(range(4), key=lambda e: -(four[e] + four_bias[e]))  # stable: lower expert first
chosen_by_hand = order[:2]
total = sum(four[e] for e in chosen_by_hand)
weight_by_hand = [1.5 * four[e] / total for e in chosen_by_hand]
print("chosen", chosen_by_hand, "  weights", [f"{w:.6f}" for w in weight_by_hand])
assert sorted(chosen_by_hand) == [2, 3], "the bias brings in 2 and 3"
close("weights of 3 and 2", weight_by_hand, [0.6030133196, 0.8969866804], within=1e-9)


# %% [markdown]
# Expert 3 is chosen first and weighs least: the order of choice and the order of weights differ.
# For $T$ tokens, a row of biases is picked by the kind of token. A stable sort gives equal sums to
# the lower expert.


# %%
def choose(s, bias, is_image, k):
    """s (T, E) f32, bias (2, E) for text and images, is_image (T,) bool -> (T, k) experts"""
    biased = s + bias[is_image.astype(int)]  # (T, E)
    return np.argsort(-biased, axis=1, kind="stable")[:, :k]


def weigh(s, chosen):
    w = np.take_along_axis(s, chosen, axis=1)  # (T, k), no bias
    return w / w.sum(axis=1, keepdims=True) * np.float32(1.5)


s = score(np.float32([four_logits, four_logits]))  # the same logits as text and as image
bias = np.float32([four_bias, [0, 0, 0, 0]])
chosen = choose(s, bias, np.array([False, True]), 2)
same("text takes the biased experts, the image the others", chosen, [[3, 2], [0, 1]])
close("vectorised weights = by hand", weigh(s, chosen)[0], weight_by_hand, within=1e-6)
ties = choose(np.ones((1, 3), "f4"), np.zeros((2, 3), "f4"), np.array([False]), 2)
same("equal sums: the lower expert", ties[0], [0, 1])

# %% [markdown]
# **Break it.** Let the bias weigh as well. The choice is the same, the weights still sum to 1.5,
# and the order of the two is reversed. Raise both biases by half: the right weights do not
# move, the wrong ones do. Every step of balancing would change what the model says.


# %% tags=["break"]
def weigh_biased(s, bias, chosen):
    w = np.take_along_axis(s + bias, chosen, axis=1)
    return w / w.sum(axis=1, keepdims=True) * np.float32(1.5)


text = np.array([False])
print("bias                  chosen   right            wrong")
rights, wrongs = [], []
for text_bias in ([0, 0, 1, 2], [0, 0, 1.5, 3]):
    b = np.float32([text_bias, text_bias])
    c = choose(s[:1], b, text, 2)
    rights.append(weigh(s[:1], c)[0])
    wrongs.append(weigh_biased(s[:1], b[:1], c)[0])
    print(f"{text_bias!s:21} {c[0]}   ", "  ".join(f"{w:.4f}" for w in rights[-1]), end="   ")
    print("  ".join(f"{w:.4f}" for w in wrongs[-1]))
same("same choice, same weights", rights[0], rights[1])
assert abs(wrongs[0].sum() - 1.5) < 1e-6, "the sum does not notice"
assert wrongs[0][0] > wrongs[0][1] and rights[0][0] < rights[0][1], "the order is reversed"
assert abs(wrongs[0] - wrongs[1]).max() > 0.01, "the wrong weights follow the bias"

# %% [markdown]
# ## One expert
#
# An expert is a gated network: two matrices up, a product, one matrix down. Both halves are clamped
# at $L = 10$ before the product, **up on both sides, the gate only from above**:
#
# $$h = \mathrm{silu}(\min(a, L)) \cdot \mathrm{clip}(u, -L, L), \qquad
# \mathrm{silu}(a) = \frac{a}{1 + e^{-a}}$$
#
# The gate needs no lower clamp: silu of a very negative number is nearly 0.

# %%
pairs = [(20, -15), (-30, 25), (12, 3), (5, 11), (-15, -15)]
swiglu_by_hand = []
for a, u in pairs:
    a_kept, u_kept = min(a, 10), max(-10, min(u, 10))
    swiglu_by_hand.append(a_kept / (1 + math.exp(-a_kept)) * u_kept)
    print(f"gate {a:4} -> {a_kept:4}   up {u:4} -> {u_kept:4}   {swiglu_by_hand[-1]:16.8g}")


def swiglu(a, u, limit):
    a = np.minimum(a, np.float32(limit))
    u = np.clip(u, -np.float32(limit), np.float32(limit))
    return a / (1 + np.exp(-a)) * u


a, u = np.float32(pairs).T
ratio = swiglu(a, u, 10) / np.float64(swiglu_by_hand)
close("vectorised, relative to by hand", ratio, np.ones(5), within=1e-6)

# %% [markdown]
# **Break it.** Clamp the gate on both sides, as it looks more orderly. Now a gate of −30 is one of
# −10, and silu of −10 is no longer nothing. Only pairs with a very negative gate notice.

# %% tags=["break"]
symmetric = swiglu(np.maximum(a, np.float32(-10)), u, 10)
print("  gate     up         right         wrong")
for row in zip(a, u, swiglu_by_hand, symmetric, strict=True):
    print("{:6.0f} {:6.0f} {:13.4g} {:13.4g}".format(*row))
off = np.abs(symmetric - np.float64(swiglu_by_hand))
assert off[[0, 2, 3]].max() < 1e-4, "three of five agree"
assert abs(symmetric[1] / swiglu_by_hand[1]) > 1e8, (
    "the second is a hundred million times too large"
)
assert symmetric[4] / swiglu_by_hand[4] > 90, "the last about a hundred times"

# %% [markdown]
# ## All tokens through their experts
#
# The router's weight multiplies $h$, before the down matrix. Experts are summed in ascending
# order, the shared expert comes last and has no weight:
#
# $$y = \sum_{e \in S} D_e (w_e h_e) + D_0 h_0$$
#
# A loop over tokens reads each matrix again for every token. Grouped by expert, each matrix
# is read once. Both run here on one layer of a tiny model (8 experts, 2 chosen, $L = 1$). Its
# choices, weights and outputs were stored by the released code.
#
# *Is the router in four bits as well?* No. Its matrix stays bf16 and its scores float32. A wrong
# last bit of an expert is a wrong last bit; a wrong last bit of a score may be another expert.

# %%
import dsv41
from dsv41.formats import round_bf16
from dsv41.mhc import hc_collapse, hc_update
from dsv41.ops import rmsnorm
from dsv41.quant import FLOAT32, WEIGHT_FP4

model = dsv41.load(ROOT / "tests/golden/v41_tiny_a")
stored = np.load(ROOT / "tests/golden/v41_tiny_a/prompt_fp32.npz")  # from the released code
trace = {}
model.logits(stored["ids"][0, :72], FLOAT32, trace=trace)
p = model.params["layers"][3]
attn = {name: trace[f"L03.hc_attn.{name}"] for name in ("pre", "post", "comb")}
streams = hc_update(trace["L02.x_out"], trace["L03.attn.out"], attn["post"], attn["comb"], FLOAT32)
x = hc_collapse(streams, attn["pre"], FLOAT32)  # chapter 10
x = rmsnorm(x, p["ffn_norm"]["weight"], model.config.rms_norm_eps, FLOAT32)  # (72, 64)
ffn, LIMIT = p["ffn"], model.config.swiglu_limit
tiny_bias = np.stack([ffn["gate"]["bias"], ffn["gate"]["bias_vl"]])  # (2, 8)


def expert(x, p, weight):
    """x (t, D), weight (t, 1) -> (t, D)"""
    up, gate = x @ p["w3"]["weight"].T, x @ p["w1"]["weight"].T  # (t, F)
    return (swiglu(gate, up, LIMIT) * weight) @ p["w2"]["weight"].T


def token_by_token(x, ffn, chosen, weight):
    y = []
    for t in range(len(x)):
        total = 0
        for slot in np.argsort(chosen[t]):  # ascending expert number
            total = total + expert(x[t], ffn["experts"][chosen[t, slot]], weight[t, slot])
        y.append(total + expert(x[t], ffn["shared_experts"], np.float32(1)))
    return np.stack(y)


def grouped(x, ffn, chosen, weight):
    y = np.zeros_like(x)
    for e in range(len(ffn["experts"])):
        row, slot = np.nonzero(chosen == e)
        y[row] += expert(x[row], ffn["experts"][e], weight[row, slot][:, None])
    return y + expert(x, ffn["shared_experts"], np.float32(1))


s = score(x @ ffn["gate"]["weight"].T)  # (72, 8)
chosen = choose(s, tiny_bias, np.zeros(72, bool), 2)
weight = weigh(s, chosen)
y = grouped(x, ffn, chosen, weight)
close("grouped = token by token", y, token_by_token(x, ffn, chosen, weight), within=1e-5)
assert (chosen == stored["L03.moe.expert"]).all(), "the released code chooses the same experts"
close("its weights", weight, stored["L03.moe.weight"], within=1e-5)
close("its output", y, stored["L03.ffn.out"], within=1e-4)
print("tokens per expert:", np.bincount(chosen.ravel(), minlength=8))

rng = np.random.default_rng(0)
matrix = round_bf16(rng.standard_normal((384, 5120)).astype(np.float32) / np.float32(72))
tokens, no_bias = rng.standard_normal((500, 5120)), np.zeros((2, 384))  # float64
six, in_fp4 = (
    np.sort(choose(score(tokens @ w.T), no_bias, np.zeros(500, bool), 6), axis=1)
    for w in (matrix, WEIGHT_FP4.fake(matrix))
)
other = np.mean((six != in_fp4).any(axis=1))
print(f"384 random rows: a router in FP4 sends {other:.0%} of 500 tokens to another six")
assert other > 0.25, "a rounded score is another choice"

# %% [markdown]
# ## The rule that moves the bias
#
# Count how many choices fell on each expert in a step: its load. An expert below the mean gets
# a little more bias, one above it a little less. The step is 0.001, whatever the gap:
#
# $$b_e \leftarrow b_e + 0.001 \cdot \mathrm{sign}(\overline{\mathrm{load}} - \mathrm{load}_e)$$
#
# There is no gradient here and no learning rate. Text and image tokens are counted apart, and each
# kind moves its own bias (report, §4.2.2). By hand: six tokens, four experts, two choices each.

# %%
six = [[0, 1], [0, 3], [0, 1], [0, 2], [2, 3], [2, 3]]
image = [False, False, False, False, True, True]
loads_by_hand = [[0] * 4, [0] * 4]
for experts, kind in zip(six, image, strict=True):
    for e in experts:
        loads_by_hand[kind][e] += 1
moves_by_hand = []
for name, load in zip(("text", "image"), loads_by_hand, strict=True):
    mean = sum(load) / 4
    moves_by_hand.append([(mean > n) - (mean < n) for n in load])
    print(f"{name:6} loads {load}   mean {mean}   moves {moves_by_hand[-1]}")
assert moves_by_hand == [[-1, 0, 1, 1], [1, 1, -1, -1]], "on the mean: no move"


def loads_of(chosen, is_image, experts):
    """-> (2, E): text, images"""
    kinds = (chosen[~is_image], chosen[is_image])
    return np.stack([np.bincount(c.ravel(), minlength=experts) for c in kinds])


def moved(bias, loads):
    """bias (2, E) f32, loads (2, E) int -> (2, E) f32"""
    missing = loads.sum(axis=1, keepdims=True) - loads.shape[1] * loads  # integers, no rounding
    return bias + np.float32(0.001) * np.sign(missing).astype(np.float32)


loads = loads_of(np.array(six), np.array(image), 4)
same("loads = by hand", loads, loads_by_hand)
close("moves = by hand", moved(np.zeros((2, 4), "f4"), loads) * 1000, moves_by_hand, within=1e-6)
only_text = loads * [[1], [0]]
same("a step without images leaves their bias", moved(bias, only_text)[1], bias[1])

# %% [markdown]
# ## A router out of balance
#
# A toy: 16 experts, 2 chosen, tokens of 16 numbers. Text and image tokens are normal numbers
# around two different centres, so each kind prefers experts of its own. The router's matrix stays
# fixed. A step sees 2,000 text and 500 image tokens, then the bias moves. 1,000 steps.

# %%
E, STEPS = 16, 1000
rng = np.random.default_rng(1)
toy_gate = rng.standard_normal((E, 16)) / 4  # float64: the same choices on every machine
centres = 0.6 * rng.standard_normal((2, 16))  # text, images


def batch(rng, text, images):
    is_image = np.arange(text + images) >= text
    x = centres[is_image.astype(int)] + rng.standard_normal((len(is_image), 16))  # (T, 16)
    return score(x @ toy_gate.T), is_image  # (T, E)


def train(apart):
    """Biases after STEPS steps and the worst load / mean of each kind at each step."""
    rng, bias, worst = np.random.default_rng(2), np.zeros((2, E), np.float32), []
    for _ in range(STEPS):
        s, is_image = batch(rng, 2000, 500)
        loads = loads_of(choose(s, bias, is_image, 2), is_image, E)
        worst.append(loads.max(axis=1) / loads.mean(axis=1))
        counted = loads if apart else np.repeat(loads.sum(axis=0, keepdims=True), 2, axis=0)
        bias = moved(bias, counted)
    return bias, np.array(worst)


bias, worst = train(apart=True)
print("largest load / mean     text   image")
for step in (0, 100, 200, 400, 999):
    print(f"step {step:4}             {worst[step, 0]:7.2f} {worst[step, 1]:7.2f}")
print(f"biases from {bias.min():.3f} to {bias.max():.3f}")
assert worst[0].min() > 2, "at first one expert gets more than twice its share"
assert worst[-100:].mean() < 1.2, "in the end the fullest expert is near the mean"

# %% [markdown]
# Measure before and after on tokens that the rule has not seen. A load of 1 is an equal share.

# %%
s, is_image = batch(np.random.default_rng(3), 20_000, 20_000)
before, after = (choose(s, b, is_image, 2) for b in (0 * bias, bias))
relative = [8 * loads_of(c, is_image, E) / 20_000 for c in (before, after)]  # mean 1
with figure("The bias levels the loads of both kinds", columns=2, sharey=True) as axes:
    for kind, (ax, name) in enumerate(zip(axes, ("text", "images"), strict=True)):
        ax.bar(np.arange(E) - 0.2, relative[0][kind], 0.4, color=ORANGE)
        ax.bar(np.arange(E) + 0.2, relative[1][kind], 0.4, color=BLUE)
        ax.axhline(1, color=GREY, linewidth=0.8)
        ax.set(title=name, xlabel="expert", xticks=range(0, E, 5))
    axes[0].set(ylabel="load / mean")
    axes[1].text(
        0.97,
        0.92,
        "before",
        color=ORANGE,
        fontweight="bold",
        ha="right",
        transform=axes[1].transAxes,
    )
    axes[1].text(
        0.97, 0.82, "after", color=BLUE, fontweight="bold", ha="right", transform=axes[1].transAxes
    )
for name, r in zip(("before", "after"), relative, strict=True):
    print(f"{name:6}  text {r[0].min():.2f} to {r[0].max():.2f}", end="")
    print(f"   images {r[1].min():.2f} to {r[1].max():.2f}")
kept = np.mean((before[:, :, None] == after[:, None, :]).any(axis=2))
print(f"choices that the bias leaves as they were: {kept:.2f}")
assert np.abs(relative[1] - 1).max() < 0.15, "every expert is within 15% of its share"
assert kept > 1 / 8, "the tokens still decide: chance would keep 2 of 16"

# %% [markdown]
# **Break it.** One bias for both kinds, moved by the sum of both loads. The sum is level, so a
# monitor that shows total loads is content. Text is most of the batch and comes
# out nearly level. Images, a fifth of it, do not.
#
# The lower curve does not reach 1. A step sees 500 images, and the fullest of 16 experts is above
# the mean by chance. On 20,000 images the same biases give the number in the table.

# %% tags=["break"]
shared, shared_worst = train(apart=False)
loads = loads_of(choose(s, shared, is_image, 2), is_image, E) / 20_000 * 8
total = 0.8 * loads[0] + 0.2 * loads[1]  # 2,000 text and 500 image tokens a step
print("fullest / mean       sum    text  images")
print(f"a bias each      {(0.8 * relative[1][0] + 0.2 * relative[1][1]).max():7.2f}", end="")
print(f" {relative[1][0].max():7.2f} {relative[1][1].max():7.2f}")
print(f"one for both     {total.max():7.2f} {loads[0].max():7.2f} {loads[1].max():7.2f}")
with figure("With one bias for both kinds, images stay uneven") as ax:
    window = np.ones(20) / 20  # mean of 20 steps
    for curve, colour in ((worst, BLUE), (shared_worst, ORANGE)):
        ax.plot(np.convolve(curve[:, 1], window, "valid"), color=colour)
    ax.text(600, 2.7, "one bias", color=ORANGE, fontweight="bold")
    ax.text(600, 1.3, "a bias each", color=BLUE, fontweight="bold")
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set(xlabel="step", ylabel="images: fullest / mean", xlim=(0, STEPS), ylim=(0.8, 3))
assert total.max() < 1.15, "the sum is balanced"
assert loads[1].max() > 1.5 > 1.15 > relative[1][1].max(), "only a bias each balances images"

# %% [markdown]
# ## Count parameters and bytes
#
# An expert has three matrices of $5120 \times 2304$. In the checkpoint they are MXFP4: half a byte
# a number and one scale byte for 32 ([chapter 01](01_number_formats.ipynb)). A token uses six of
# 384 routed experts, and the shared one always.
#
# *Where are the layers that route by a hash?* In V4 the first three chose experts by the token's id
# alone (config.json, `num_hash_layers`). V4.1 has none: all 40 layers, and the drafter's three
# blocks, own a router and both of its biases.

# %%
from dsv41.ledger import expert_bytes, parameters
from dsv41.presets import preset
from dsv41.tensors import expected_tensors

FLASH = preset("v4.1-flash")
one = 3 * 5120 * 2304
size = one // 2 + one // 32
print(f"one expert: {one:,} parameters, {one // 2:,} + {one // 32:,} = {size:,} bytes")
stored_experts, used = 40 * 384 * one, 40 * 6 * one
print(f"routed, 40 layers: {stored_experts / 1e9:.1f} B stored, {used / 1e9:.2f} B used by a token")
print(f"shared, 40 layers: {40 * one / 1e9:.2f} B, used by all")
print(f"bytes of routed experts: {40 * 384 * size / 1e9:.1f} GB stored,", end="")
print(f" {40 * 6 * size / 1e9:.2f} GB read for one token")
ledger = parameters("V4.1-Flash")
print(f"whole backbone: {ledger.backbone / 1e9:.1f} B stored, {ledger.decode / 1e9:.1f} B active")
print(f"share of routed parameters 6 / 384 = {6 / 384:.4f}, of the backbone", end="")
print(f" {ledger.decode / ledger.backbone:.4f}")
assert size == 18_800_640, "bytes of an expert"
same("the ledger's expert", expert_bytes(FLASH), size)
parts = (ledger.parts["routed experts"][:2], ledger.parts["shared expert"][1])
assert parts == ((stored_experts, used), 40 * one), "the ledger counts the same parameters"
tensors = expected_tensors(FLASH)
for part, kind in (("weight", "BF16"), ("bias", "F32"), ("bias_vl", "F32")):
    kinds = [spec.dtype for name, spec in tensors.items() if name.endswith(f".ffn.gate.{part}")]
    print(f"router {part:8} {len(kinds)} tensors, {kinds[0]}")
    assert kinds == [kind] * (40 + 3), "every layer and every block of the drafter"

# %% [markdown]
# ## The module gives the same numbers
#
# [sqrt_softplus](../dsv41/ops.py#sqrt_softplus) is our `score`, and
# [swiglu](../dsv41/ops.py#swiglu) our `swiglu`.
# [route](../dsv41/moe.py#route) is `choose` and `weigh`, and
# [moe_experts](../dsv41/moe.py#moe_experts) is `grouped`. The module adds $10^{-20}$ to the sum of
# the scores, against 0 / 0.
# [expert_load](../dsv41/train/schedule.py#expert_load) and
# [balance_bias](../dsv41/train/schedule.py#balance_bias) move the bias, in place.

# %%
from dsv41 import moe, ops
from dsv41.train import schedule

l = np.linspace(-104, 100, 4081, dtype=np.float32)
same("score", ops.sqrt_softplus(l), score(l))
a, u = np.random.default_rng(4).standard_normal((2, 5000)).astype(np.float32) * 12
close("swiglu", ops.swiglu(a, u, 10), swiglu(a, u, 10), within=1e-4)
mixed = np.arange(72) % 3 == 0  # every third token as if it were of an image
chosen = choose(score(x @ ffn["gate"]["weight"].T), tiny_bias, mixed, 2)
weight = weigh(score(x @ ffn["gate"]["weight"].T), chosen)
got = moe.route(x, ffn["gate"], mixed, 2, 1.5, True, FLOAT32)
same("choice", got[0], chosen)
close("weights", got[1], weight, within=1e-6)
y = moe.moe_experts(x, ffn, chosen, weight, LIMIT, FLOAT32)
close("output", y, grouped(x, ffn, chosen, weight), within=1e-5)

loads = schedule.expert_load(chosen, mixed, 8)
same("loads", loads, loads_of(chosen, mixed, 8))
gate = {"bias": tiny_bias[0].copy(), "bias_vl": tiny_bias[1].copy()}
schedule.balance_bias(gate, loads)
close("moved biases", [gate["bias"], gate["bias_vl"]], moved(tiny_bias, loads), within=1e-7)
assert schedule.BIAS_SPEED == 0.001, "the speed of the report"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Route one token. Return a weight for every expert, 0 for those that are not chosen.
# 2. Balance over machines. Each machine counts the loads of its own tokens. Return the bias after
#    the step: it moves once. The inputs include loads that are exactly on the mean.
# 3. Count the bytes of an MXFP4 expert of any size, scales included.


# %% tags=["exercise"]
def route_one(logits, bias, k):
    """logits (E,) f32, bias (E,) f32 -> (E,) f32; the weights of the k chosen sum to 1.5"""
    s = score(logits)
    return ...


check("11.route_one", route_one)


# %% tags=["exercise"]
def balanced(bias, loads):
    """bias (E,) f32, loads (machines, E) int -> (E,) f32, moved by 0.001, 0 or -0.001"""
    return ...


check("11.balanced", balanced)


# %% tags=["exercise"]
def bytes_of_expert(hidden, width):
    """hidden, width: multiples of 32 -> int; two matrices hidden to width, one back"""
    return ...


check("11.bytes_of_expert", bytes_of_expert)

# %% [markdown]
# ## What we learned
#
# - The score is a root of a softplus. As the equation stands, float32 gives 0 at one end and
#   infinity at the other; two rearrangements give six digits everywhere.
# - The bias chooses and does not weigh. The same choice has the same weights, whatever the bias.
# - The clamp is two-sided for up and one-sided for the gate.
# - Loads steer the bias by their sign only, 0.001 a step, text and images apart. With one bias for
#   both, the sum looks balanced and the images are not.
# - 6 of 384 routed experts and a shared one: 15.8 B of 551.6 B are active. An expert takes
#   18,800,640 bytes.
#
# Worked solutions: [solutions/11_moe_balance.py](solutions/11_moe_balance.py). Next: [12
# Engram](12_engram.ipynb). All chapters: [README.md](README.md).
