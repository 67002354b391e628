# %% [markdown]
# # 17 · Gradients by hand
#
# **Which way must every number move, when some are shared, some mix themselves, and some have only
# sixteen values?**
#
# This package has no automatic differentiation. Every module of the model has a second one beside
# it that walks back. This chapter derives the three that are worth it: attention, where key, value
# and sink share one softmax; hyper-connections, where the streams decide how they are mixed; and
# rounding to four bits, whose slope is zero, and which learns nevertheless. A small question
# accompanies every formula: how do you know that it is right?
#
# You need NumPy, the chain rule, chapters 03 and 10; chapter 01 for FP4. 25 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/17_gradients.py`.
#
# Sources: the chain rule; for rounding, Bengio, Léonard and Courville (arXiv 1308.3432); the V4.1
# report, §2.4.4, for what is stored in FP4. The modules that this page arrives at:
# [sparse_attn.py](../dsv41/train/sparse_attn.py), [mhc.py](../dsv41/train/mhc.py) and
# [ops.py](../dsv41/train/ops.py) in dsv41/train.

# %%
import math

import numpy as np

from lib.page import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    ROOT,
    check,
    close,
    figure,
    same,
    versions,
)

versions("matplotlib")

# %% [markdown]
# ## One query, two records and a sink
#
# A record $K_i$ is key and value at once. One query $q$ of $C$ channels, with $c = 1/\sqrt C$:
#
# $$s_i = c\, q \cdot K_i, \qquad p_i = \frac{e^{s_i}}{\sum_j e^{s_j} + e^{\mathrm{sink}}}, \qquad
# o = \sum_i p_i K_i$$
#
# Somebody behind us says how the loss $L$ changes with $o$: the vector $D = \partial L/\partial o$.
# What follows for $q$, $K$ and the sink? A softmax pays each entry by how much better its value is
# than the mean, $\delta = \sum_i p_i\, (D \cdot K_i) = D \cdot o$:
#
# $$ds_i = p_i\,(D \cdot K_i - \delta), \qquad dq = c \sum_i ds_i\, K_i, \qquad
# dK_i = p_i D + c\, ds_i\, q, \qquad d\,\mathrm{sink} = -p_{\mathrm{sink}}\, \delta$$
#
# $dK_i$ has two parts: once as value, once as key. The sink brings the value 0, so $0 - \delta$ is
# its pay.

# %%
q, sink, D = [2.0, 0, 0, 0], 0.0, [1.0, -1, 0, 0]
K = [[1.0, 0, 1, 0], [0, 1, 0, 2]]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


c = 1 / math.sqrt(4)
weight = [math.exp(c * dot(q, k)) for k in K]  # e^1, e^0
total = sum(weight) + math.exp(sink)
p, p_sink = [w / total for w in weight], math.exp(sink) / total
delta = sum(p[i] * dot(D, K[i]) for i in range(2))
ds = [p[i] * (dot(D, K[i]) - delta) for i in range(2)]
dq = [c * sum(ds[i] * K[i][x] for i in range(2)) for x in range(4)]
dK = [[p[i] * D[x] + c * ds[i] * q[x] for x in range(4)] for i in range(2)]
dsink = -p_sink * delta
print(f"delta = {delta:.4f}")
for i in range(2):
    print(f"record {i}: p {p[i]:.4f}   D.K {dot(D, K[i]):4.1f}   ds {ds[i]:+.4f}")
print(f"sink:     p {p_sink:.4f}   0 - delta       {dsink:+.4f}")
close("all scores pushed up at once change nothing", sum(ds) + dsink, 0, within=1e-15)

# %% [markdown]
# ## Ask the forward text
#
# A formula of gradients is easy to get nearly right. So ask the forward code itself. Move one
# input by $h$ to both sides and look at what $L$ does:
#
# $$\frac{\partial L}{\partial x} \approx \frac{L(x + h) - L(x - h)}{2h}$$
#
# It knows nothing of our derivation, and it takes two runs for *each* number. Good for a check, no
# good for training.


# %%
def difference(loss, x, h=1e-5):
    """loss() reads x -> its slope by every element of x, which is moved in place."""
    slope = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        kept = x[at]
        x[at] = kept + h
        high = loss()
        x[at] = kept - h
        slope[at] = (high - loss()) / (2 * h)
        x[at] = kept
    return slope


def shares(q, K, sink):
    """q (H, C), K (n, C), sink (H,) -> p (H, n), and the sink's share (H, 1)."""
    s, sink = q @ K.T / math.sqrt(q.shape[1]), sink[:, None]
    top = np.maximum(s.max(axis=1, keepdims=True, initial=-np.inf), sink)
    weight, rest = np.exp(s - top), np.exp(sink - top)
    total = weight.sum(axis=1, keepdims=True) + rest
    return weight / total, rest / total


def attend(q, K, sink):
    return shares(q, K, sink)[0] @ K  # (H, C)


def attend_back(D, q, K, sink):
    """D (H, C) -> dq (H, C), dK (n, C) summed over the heads, dsink (H,)."""
    p, rest = shares(q, K, sink)
    gain = D @ K.T  # (H, n)
    delta = np.sum(p * gain, axis=1, keepdims=True)
    ds = p * (gain - delta) / math.sqrt(q.shape[1])
    return ds @ K, p.T @ D + ds.T @ q, -(rest * delta)[:, 0]


one = [np.array(v) for v in ([D], [q], K, [sink])]
for name, got, want in zip(("dq", "dK", "dsink"), attend_back(*one), (dq, dK, dsink), strict=True):
    close(f"one head: {name} = by hand", got.ravel(), np.ravel(want), within=1e-15)

rng = np.random.default_rng(1)
D, q, K, sink = (rng.standard_normal(shape) for shape in ((3, 8), (3, 8), (5, 8), 3))
grads = attend_back(D, q, K, sink)
for name, x, got in zip(("q", "K", "sink"), (q, K, sink), grads, strict=True):
    want = difference(lambda: np.sum(D * attend(q, K, sink)), x)
    close(f"three heads, one latent: d{name} = differences", got, want, within=1e-9)

# %% [markdown]
# *How small should $h$ be?* A large $h$ sees the curve, not the slope. A small $h$ subtracts two
# equal numbers and keeps their rounding. In between lies a best value, and how good it is depends
# on the type. In float32 it is so poor that a factor of 1.000001 in a formula goes unnoticed. All
# gradients of this package are checked in float64.

# %%
steps = 10.0 ** np.arange(-12, 0.5, 0.5)
right, errors = grads[0], {}
for dtype in (np.float64, np.float32):
    inputs = [x.astype(dtype) for x in (D, q, K, sink)]
    errors[dtype] = []
    for h in steps:
        moved = inputs[1]
        slope = difference(lambda i=inputs: np.sum(i[0] * attend(*i[1:])), moved, dtype(h))
        errors[dtype].append(np.abs(slope - right).max() / np.abs(right).max())
with figure("Too large sees the curve, too small sees the rounding") as ax:
    for dtype, colour, at in ((np.float64, BLUE, 4e-8), (np.float32, ORANGE, 1e-4)):
        ax.plot(steps, errors[dtype], "o-", color=colour, markersize=3)
        ax.text(at, min(errors[dtype]) / 8, dtype.__name__, color=colour, fontweight="bold")
    ax.axhline(1e-6, color=GREY, linestyle=":")
    ax.text(1, 1e-11, "dotted: a wrong\nfactor of 1.000001", color=GREY, ha="right")
    ax.set(xscale="log", yscale="log", ylim=(1e-13, 30), xlabel="h", ylabel="relative error")
best = {dtype.__name__: min(found) for dtype, found in errors.items()}
assert best["float64"] < 1e-8, "float64 shows eight digits"
assert best["float32"] > 1e-6, "float32 never shows six"

# %% [markdown]
# ## One record, many readers
#
# A record is written once and read by every query that sees it. A window record: by its own token
# and the 127 behind it. A global record of layer 20: by any token behind it, in all twenty layers
# of the decoder half. Gradients of a shared number add up. Queries bring lists of rows, −1 for
# none, and a row may stand in many lists.
#
# **Break it.** NumPy's `dK[rows] += d` looks like adding. It reads, adds and writes once per row:
# of several queries in one list the last one wins. The shape is right, every number is finite.

# %% tags=["break"]
rows = np.array([[0, 1], [1, 2], [2, 1], [2, -1]])  # (T, n): what each of four queries reads
records, heads = rng.standard_normal((3, 8)), rng.standard_normal((4, 3, 8))  # (N, C), (T, H, C)
Ds = rng.standard_normal(heads.shape)


def read_all():
    return sum(
        np.sum(Ds[t] * attend(heads[t], records[rows[t][rows[t] >= 0]], sink)) for t in range(4)
    )


right, wrong = np.zeros_like(records), np.zeros_like(records)
parts = np.zeros((*rows.shape, 8))  # (T, n, C): what each query wants of each of its rows
for t in range(4):
    seen = rows[t] >= 0
    parts[t, seen] = attend_back(Ds[t], heads[t], records[rows[t, seen]], sink)[1]
np.add.at(right, rows[rows >= 0], parts[rows >= 0])
wrong[rows] += parts
print("record  readers   gradient, channel 0:  added up   [rows] +=   difference of the loss")
want = difference(read_all, records)
for n in range(3):
    readers = int((rows == n).sum())
    print(f"{n:4}  {readers:7}    {right[n, 0]:28.4f}{wrong[n, 0]:12.4f}{want[n, 0]:22.4f}")
close("added up = differences", right, want, within=1e-9)
assert np.abs(wrong - want).max() > 0.5, "the other readers are lost"
same("a record with one reader hides it", wrong[0], right[0])
same("−1 is a legal row, the last: its nothing wins", wrong[2], np.zeros(8))

# %% [markdown]
# ## A rotation is its own walk back
#
# Queries and records are rotated by their position, the output is turned back (chapter 02). A
# rotation is a matrix whose transpose is the opposite rotation. So $D$ is turned *forward* where
# $o$ was turned back, and $dq$ is turned back where $q$ was turned forward. Nothing else changes.

# %%
from dsv41.rope import rotate
from dsv41.train.rope import rotate_backward

freqs, at = np.array([0.7, 0.1]), np.array([5])


def turned():
    o = attend(rotate(q[None], at, freqs)[0], K, sink)
    return rotate(o[None], at, freqs, inverse=True)[0]


turned_D = rotate(D[None], at, freqs)[0]  # o was turned back
by_turned = attend_back(turned_D, rotate(q[None], at, freqs)[0], K, sink)[0]
got = rotate(by_turned[None], at, freqs, inverse=True)[0]
want = difference(lambda: np.sum(D * turned()), q)
close("dq through both rotations = differences", got, want, within=1e-9)
same("the module's walk back is the other rotation", rotate_backward(D[None], at, freqs, True)[0],
     turned_D)  # fmt: skip

# %% [markdown]
# ## Streams: reading and mixing
#
# Four streams $X_i$ meet a sublayer through $A$, $C$ and $B$ (chapter 10):
#
# $$x = \sum_i A_i X_i, \qquad X'_k = C_k\, y + \sum_j B_{jk} X_j$$
#
# Both are products of two things, so each thing gets the gradient times the other:
#
# $$dX_j = \sum_k B_{jk}\, dX'_k + A_j\, dx, \qquad dy = \sum_k C_k\, dX'_k, \qquad
# dA_i = X_i \cdot dx, \qquad dC_k = y \cdot dX'_k, \qquad dB_{jk} = X_j \cdot dX'_k$$
#
# $A$, $B$ and $C$ are made from $X$ by one matrix and one RMS: $u = \mathrm{fn}\,v / r$. The matrix
# is plain. The RMS takes away whatever would only lengthen $v$:
#
# $$d\,\mathrm{fn} = \frac{du\, v^T}{r}, \qquad
# dv = \frac{\mathrm{fn}^T du}{r} - \frac{v\,(du \cdot u)}{n\, r^2}$$
#
# What remains is Sinkhorn, twenty rounds of dividing. One division $b' = b / (\Sigma b +
# \varepsilon)$, with the sum over a row or a column, goes back as
#
# $$db = \frac{db' - \Sigma\,(db'\, b')}{\Sigma b + \varepsilon}$$
#
# and the whole is undone in reverse, from the last pass to the softmax that was the first.


# %%
def sinkhorn(Z, rounds=20, eps=1e-6):
    """Z (S, S) -> B, and what the way back needs: the softmax and every division."""
    softmax = np.exp(Z - Z.max(axis=1, keepdims=True))
    softmax = softmax / softmax.sum(axis=1, keepdims=True)
    b, passes = softmax + eps, []
    for axis in [0] + [1, 0] * (rounds - 1):
        divisor = b.sum(axis=axis, keepdims=True) + eps
        b = b / divisor
        passes.append((b, divisor, axis))
    return b, softmax, passes


def sinkhorn_back(dB, Z, rounds=20, eps=1e-6):
    _, softmax, passes = sinkhorn(Z, rounds, eps)
    for b, divisor, axis in reversed(passes):
        dB = (dB - np.sum(dB * b, axis=axis, keepdims=True)) / divisor
    return softmax * (dB - np.sum(dB * softmax, axis=1, keepdims=True))


def random(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


Z, dB = random(4, 4, seed=2), random(4, 4, seed=3)
dZ = sinkhorn_back(dB, Z)
close("39 divisions and a softmax = differences", dZ,
      difference(lambda: np.sum(dB * sinkhorn(Z)[0]), Z), within=1e-9)  # fmt: skip
print("dZ\n", dZ.round(4))
close("a whole row or column pushed up is divided out", dZ.sum(axis=1), np.zeros(4), within=1e-4)
close("and so for columns", dZ.sum(axis=0), np.zeros(4), within=1e-4)

# %% [markdown]
# **Break it.** Treat every divisor as a constant, since it "only normalises". The code gets
# shorter. The gradient points elsewhere.

# %% tags=["break"]
_, softmax, passes = sinkhorn(Z)
wrong = dB
for _, divisor, _ in reversed(passes):
    wrong = wrong / divisor
wrong = softmax * wrong
angle = np.sum(wrong * dZ) / np.linalg.norm(wrong) / np.linalg.norm(dZ)
print(f"right: largest {np.abs(dZ).max():.4f}   sum of row 0 {dZ[0].sum():+.4f}")
print(f"wrong: largest {np.abs(wrong).max():.4f}   sum of row 0 {wrong[0].sum():+.4f}")
print(f"cosine between the two {angle:.2f}")
assert np.abs(wrong.sum(axis=1)).max() > 0.05, "it pushes whole rows, which nothing can feel"
assert angle < 0.95, "and it is another direction"

# %% [markdown]
# ## The A that comes late
#
# $A$ is used by the sublayer *behind* the one that predicted it. Walking back, the rule turns
# around by itself: a sublayer computes $dA_i = X_i \cdot dx$ for the $A$ that it read, and hands it
# to the sublayer in front. Three sublayers and a head in full, with $F(x) = \tanh(Wx)$. A model of
# forty layers is this, with other $F$.


# %%
S, WIDTH = 4, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def predict(X, fn, base):
    v = X.ravel()
    r = math.sqrt(np.mean(v * v))
    z = fn @ v / r + base  # (S + S + S*S,)
    B = sinkhorn(z[2 * S :].reshape(S, S))[0]
    return sigmoid(z[:S]) + 1e-6, 2 * sigmoid(z[S : 2 * S]), B


def predict_back(dA, dC, dB, X, fn, base):
    v = X.ravel()
    r = math.sqrt(np.mean(v * v))
    u = fn @ v / r
    slope = sigmoid(u + base) * (1 - sigmoid(u + base))
    dZ = sinkhorn_back(dB, (u + base)[2 * S :].reshape(S, S))
    du = np.concatenate([dA * slope[:S], 2 * dC * slope[S : 2 * S], dZ.ravel()])
    dv = fn.T @ du / r - v * (du @ u) / (len(v) * r * r)
    return dv.reshape(X.shape), np.outer(du, v) / r, du


def run(embedding, layers):
    """-> what the head reads (WIDTH,), and what every sublayer saw."""
    X, A, kept = np.tile(embedding, (S, 1)), np.eye(S)[0], []
    for fn, base, W in layers:
        next_A, C, B = predict(X, fn, base)
        y = np.tanh(W @ (A @ X))
        kept.append((X, A, y, C, B))
        X, A = np.outer(C, y) + B.T @ X, next_A
    return A @ X, [*kept, (X, A)]


def walk_back(G, layers, kept, late=True):
    """G (WIDTH,) by what the head read -> the gradient of the embedding, and of every layer."""
    X, A = kept[-1]
    dX, dA, found = np.outer(A, G), X @ G, []
    for (fn, base, W), (X, A, y, C, B) in reversed(list(zip(layers, kept[:-1], strict=True))):
        dy, dC, dB = C @ dX, dX @ y, X @ dX.T
        dx_inside = dy * (1 - y * y)
        dx = W.T @ dx_inside
        own, from_behind = X @ dx, dA
        mixing = predict_back(from_behind if late else own, dC, dB, X, fn, base)
        found.append((mixing[1], mixing[2], np.outer(dx_inside, A @ X)))
        dX, dA = B @ dX + np.outer(A, dx) + mixing[0], own  # three ways into the streams
    return dX.sum(axis=0), found[::-1]


layers = [(random(24, 12, seed=i) / 3, random(24, seed=i + 9), random(3, 3, seed=i + 5))
          for i in range(3)]  # fmt: skip
embedding, G = random(WIDTH, seed=20), random(WIDTH, seed=21)
d_embedding, found = walk_back(G, layers, run(embedding, layers)[1])


def loss():
    return G @ run(embedding, layers)[0]


close("embedding, read four times", d_embedding, difference(loss, embedding), within=1e-8)
for n, (parameters, grads) in enumerate(zip(layers, found, strict=True)):
    for name, x, got in zip(("fn", "base", "W"), parameters, grads, strict=True):
        close(f"sublayer {n}: {name}", got, difference(loss, x), within=1e-8)

# %% [markdown]
# **Break it.** Give every sublayer the $dA$ of its own reading, as if $A$ were used at once. Only
# the first rows of fn are wrong, and what flows on from there. Everything has its size.

# %% tags=["break"]
_, wrong = walk_back(G, layers, run(embedding, layers)[1], late=False)
print("sublayer  largest gradient of fn   error in rows of A   of C and B")
for n in range(3):
    right_fn, wrong_fn = found[n][0], wrong[n][0]
    gaps = [np.abs(wrong_fn[part] - right_fn[part]).max() for part in (slice(S), slice(S, 24))]
    print(f"{n:5}  {np.abs(right_fn).max():21.3f}{gaps[0]:21.3f}{gaps[1]:13.3f}")
last = np.abs(wrong[2][0] - found[2][0])
assert last[:S].max() > 0.01, "the last sublayer's A belongs to the head"
same("C and B of the last sublayer do not notice", wrong[2][0][S:], found[2][0][S:])

# %% [markdown]
# ## Eighty sublayers
#
# Forwards, a new stream receives a *column* of $B$. Backwards, an old stream collects a *row*:
# $dX_j = \sum_k B_{jk} dX'_k$. So both sums count, and a plain softmax takes care of one of them.
# The product of 80 $B$, and the largest factor on each way:

# %%
draws = np.random.default_rng(3).standard_normal((80, S, S))
exps = np.exp(draws)
choices = (
    ("free", np.eye(S) + draws / 4),
    ("softmax of rows", exps / exps.sum(axis=2, keepdims=True)),
    ("softmax of columns", exps / exps.sum(axis=1, keepdims=True)),
    ("Sinkhorn", np.stack([sinkhorn(Z)[0] for Z in draws])),
)
print("                       forwards    backwards")
gains = {}
for name, matrices in choices:
    product = np.abs(np.linalg.multi_dot(matrices))
    gains[name] = product.sum(axis=0).max(), product.sum(axis=1).max()
    print(f"{name:20} {gains[name][0]:10.4f} {gains[name][1]:12.4f}")
assert gains["free"][1] > 100, "without a constraint gradients explode like activations"
assert gains["softmax of rows"][0] > 1.1 > gains["softmax of rows"][1], "safe on the way back only"
assert gains["softmax of columns"][1] > 1.1 > gains["softmax of columns"][0], "or forwards only"
close("Sinkhorn: both ways", gains["Sinkhorn"], [1, 1], within=1e-3)

# %% [markdown]
# ## Four bits have no slope
#
# E2M1 knows 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Main KV stores it with an E4M3 scale for 16 neighbours.
# Put a 6 next to our number, so that the scale is 1, and look at what a reader of the cache sees.
# Move the number a little: nothing happens. The true derivative is 0, except at seven edges where
# there is none. By the chain rule, all learning stops here.
#
# But sum up what the staircase does over its whole range: it climbs 6 in 6. Its mean slope is 1,
# exactly that of no rounding at all. That is what is used: the gradient by the rounded number
# counts as the gradient by the number. It passes *straight through*.

# %%
from dsv41.quant import MAIN_KV_FP4, WINDOW_KV_FP8


def beside_a_six(x):
    """x (n,) -> the stored value of each, in a block with a 6 and fourteen zeros."""
    block = np.zeros((len(x), 16), np.float32)
    block[:, 0], block[:, 1] = x, 6
    return MAIN_KV_FP4.fake(block)[:, 0].astype(float)


h = 1e-3
x = (np.arange(6000) + 0.5) / 1000  # 0 .. 6
slope = (beside_a_six(x + h) - beside_a_six(x - h)) / (2 * h)
print(f"slope 0 at {np.mean(slope == 0):.2%} of the places, mean slope {slope.mean():.3f}")
assert np.mean(slope == 0) > 0.99, "almost everywhere the true derivative is 0"
close("its mean is 1", slope.mean(), 1, within=1e-3)


def alone(x):
    block = np.zeros((len(x), 16), np.float32)
    block[:, 0] = x
    return MAIN_KV_FP4.fake(block)[:, 0].astype(float)


with figure("A staircase climbs as fast as its number, up to the format's end", columns=2) as ax:
    x = np.linspace(0, 6, 1201)
    ax[0].plot(x, x, color=GREY, linestyle=":")
    ax[0].plot(x, beside_a_six(x), color=BLUE)
    ax[0].text(3.1, 1.2, "stored, beside a 6", color=BLUE, fontweight="bold")
    x = np.linspace(0, 5000, 1201)
    ax[1].plot(x, x, color=GREY, linestyle=":")
    ax[1].plot(x, alone(x), color=BLUE)
    ax[1].axvline(2688, color=ORANGE, linewidth=0.8)
    ax[1].text(2750, 400, "448 × 6 = 2,688", color=ORANGE, fontweight="bold")
    ax[1].text(2500, 4300, "slope 1\nup to here", color=INK, ha="right")
    for axis in ax:
        axis.set(xlabel="number")
    ax[0].set_ylabel("what a reader sees")

# %% [markdown]
# On the right a number is alone in its block, so the scale follows it, until E4M3 has no larger
# one: $448 \cdot 6 = 2688$. Beyond, the stored value stays the same however far the number goes,
# on average too. There the gradient is 0. Formats with power-of-two scales (the window's FP8,
# index keys, FP4 weights) reach past every activation, and nothing is cut.

# %%
from dsv41.train.ops import straight_through

x = np.float32([[0.1, 2, 2688, -2688, 2689, -9000, *[1] * 10]])
dy = np.full(x.shape, 2.0)
by_rule = np.where(np.abs(x) <= 448 * 6, dy, 0)
same("main KV: 0 beyond 2,688 only", straight_through(dy, x, MAIN_KV_FP4), by_rule)
print("passed on:", *by_rule[0, :7])
same("main KV really ends there", alone(np.float32([2688, 9000])), [2688.0, 2688.0])
huge = np.float32([[1e30] + [0] * 31])
seen = WINDOW_KV_FP8.fake(huge)[0, 0]
print(f"FP8 with a power-of-two scale: 1e30 is stored as {seen:.3e}")
assert abs(seen / 1e30 - 1) < 1 / 16, "no end in sight"
dy = np.full(huge.shape, 2.0)
same("so nothing is cut", straight_through(dy, huge, WINDOW_KV_FP8), dy)

# %% [markdown]
# ## Does it learn?
#
# A wrong gradient on purpose deserves doubt. Fit $y = Wx$ with $W$ in MXFP4, 8 rows of 32. Four
# ways: without rounding; with FP4 and the true slope; with *masters*, float copies that take the
# step while the forward pass reads their FP4 values; and the last one.
#
# **Break it.** Why keep masters at all? Round $W$ after each step and go on from there. A step
# smaller than half a stair is rounded away, and most steps are.

# %% tags=["break"]
from dsv41.quant import WEIGHT_FP4

rng = np.random.default_rng(7)
inputs, truth = rng.standard_normal((256, 32)), rng.standard_normal((8, 32))
targets, start = inputs @ truth.T, rng.standard_normal((8, 32)) / 2


def fp4(W):
    return WEIGHT_FP4.fake(np.float32(W)).astype(float)


def fit(way, steps=400):
    W, losses = start.copy(), []
    for step in range(steps):
        read = W if way == "no rounding" else fp4(W)
        gap = inputs @ read.T - targets
        losses.append(np.mean(gap**2) / 2)
        gradient = gap.T @ inputs / len(inputs)  # by the numbers that were read
        W = W - 0.1 * (1 - step / steps) * (0 if way == "true slope" else gradient)
        if way == "rounded in place":
            W = fp4(W)
    return np.array(losses), W


ways = ("true slope", "rounded in place", "straight through", "no rounding")
curves = {}
print("                    first    last")
for way in ways:
    curves[way], W = fit(way)
    print(f"{way:18} {curves[way][0]:6.2f}  {curves[way][-1]:6.3f}")
rounded_once = np.mean((inputs @ fp4(W).T - targets) ** 2) / 2
print(f"fitted without rounding, rounded once at the end: {rounded_once:.3f}")
end = {way: curves[way][-1] for way in ways}
assert end["true slope"] == curves["true slope"][0], "the true slope teaches nothing"
assert end["rounded in place"] > 10 * end["straight through"], "in place it gets stuck"
assert end["straight through"] < curves["straight through"][0] / 40, "masters learn"

# %%
with figure("Masters and a straight-through slope learn, rounding in place gets stuck") as ax:
    colours = dict(zip(ways, (GREY, ORANGE, BLUE, GREEN), strict=True))
    places = dict(zip(ways, ((200, 23), (200, 8.4), (200, 0.62), (80, 3e-3)), strict=True))
    for way in ways:
        ax.plot(curves[way], color=colours[way])
        ax.text(*places[way], way, color=colours[way], fontweight="bold")
    ax.set(yscale="log", xlim=(0, 400), ylim=(1e-3, 60), xlabel="step", ylabel="loss")

# %% [markdown]
# The last printed line is fair warning: in this small case, rounding a finished fit once does as
# well as training through the rounding. What the figure shows is that masters get there, and that
# the two ways without them do not.
#
# ## The whole model
#
# [loss_and_grads](../dsv41/train/model.py#loss_and_grads) chains all modules: nine layers, every
# mechanism, 72 tokens. A check of every number would take 3.5 million runs; a check along a
# direction takes two. Walk along the gradient itself: the loss must fall by the gradient's length.
#
# The step must be small for a new reason. The model *chooses* experts and entries. A choice is a
# constant to the gradient, and a step that changes one sees a jump beside the slope. For the same
# reason the indexers, which only choose, get nothing from the next token. They have a loss of their
# own (chapter 05). Its target is what attention gave to each chosen entry, out of the one softmax
# over window, entries and sink: the mean over heads, summed over all layers that read the choice.

# %%
from dataclasses import replace

import dsv41
from dsv41.init import random_params
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.tensors import flatten, nest
from dsv41.train.loop import to_masters
from dsv41.train.model import Options, evaluate, loss_and_grads, stored_weights

directory = ROOT / "tests/golden/v41_tiny_a"
model = dsv41.load(directory, parts=("text",))
with np.load(directory / "prompt_fp32.npz") as archive:
    documents = [archive["ids"][0, :72]]
config, options = model.config, Options(model.classes, balance=0, index=0)
drawn = flatten(to_masters(random_params(config, np.random.default_rng(6))))
text = ("embed.", "layers.", "norm.", "head.")
masters = {name: leaf for name, leaf in drawn.items() if name.startswith(text)}


def read_as(leaves, numerics):
    return nest(leaves) if numerics is FLOAT32 else stored_weights(nest(leaves), config)


def total(leaves, numerics):
    nats, count = evaluate(read_as(leaves, numerics), config, documents, numerics, options)
    return nats / count


def gradient(leaves, numerics, index=0):
    """-> loss, {tensor name: gradient}, Engram's rows laid out in their table."""
    read, weights = read_as(leaves, numerics), replace(options, index=index)
    loss, grads, _ = loss_and_grads(read, config, documents, numerics, weights)
    laid_out = {}
    for name, g in flatten(grads).items():
        laid_out[name] = g
        if isinstance(g, tuple):
            laid_out[name] = np.zeros_like(leaves[name])
            laid_out[name][g[0]] = g[1]
    return loss, laid_out


def length(grads):
    return math.sqrt(sum(float(np.sum(g * g)) for g in grads.values()))


def step_along(leaves, grads, far):
    """Go `far` downhill: a step of that length against the gradient."""
    each = np.float32(far / length(grads))
    return {k: v - each * grads[k] if k in grads else v for k, v in leaves.items()}


loss, grads = gradient(masters, FLOAT32)
print(f"{sum(g.size for g in grads.values()):,} numbers have a gradient")
print(f"its length              {length(grads):.2f}")
for h in (1e-2, 1e-3, 3e-4):
    up, down = (total(step_along(masters, grads, side * h), FLOAT32) for side in (-1, 1))
    slope = (up - down) / (2 * h)
    print(f"difference, h = {h:<8g}{slope:.2f}")
close("nine layers, to 2%", slope / length(grads), 1, within=0.02)
left_out = {name.rpartition(".attn.")[2] for name in masters if ".attn." in name} - {
    name.rpartition(".attn.")[2] for name in grads
}
print("no gradient from the next token:", *sorted(left_out), sep="\n  ")
assert all("indexer" in name for name in left_out), "choosing has no slope"

_, with_index = gradient(masters, FLOAT32, index=1)
changed = [k for k, g in with_index.items() if k not in grads or (g != grads[k]).any()]
print(f"moved by the index loss: {len(changed)} tensors")
assert all(".indexer." in name for name in changed), "their own loss moves the indexers only"

# %% [markdown]
# ## The whole model in FP4
#
# Now with everything rounded as in the release: weights, activations, caches. What does a
# difference say here? The loss is a staircase of staircases, and every choice of experts and
# entries adds a jump. So a *small* step measures one jump divided by nearly nothing. The
# straight-through gradient is no derivative of this function at any point. It is a slope for the
# whole hillside. To see what it is worth, take 16 steps of length 0.3 along it: float masters
# move, the forward pass reads FP4.

# %%
rounded_loss, rounded = gradient(masters, OFFICIAL)
cosine = sum(float(np.sum(grads[k] * rounded[k])) for k in grads) / length(grads) / length(rounded)
wide, near = np.linspace(-0.4, 0.4, 17), np.linspace(-1e-3, 1e-3, 25)
walked = {
    (numerics.name, way.max()): np.array(
        [total(step_along(masters, own, f), numerics) for f in way]
    )
    for numerics, own in ((FLOAT32, grads), (OFFICIAL, rounded))
    for way in (wide, near)
}
with figure("Along its gradient the rounded loss falls too, in jumps", columns=2) as ax:
    for axis, way in zip(ax, (wide, near), strict=True):
        for name, colour in (("FLOAT32", GREY), ("OFFICIAL", BLUE)):
            axis.plot(way, walked[name, way.max()], color=colour)
        line = rounded_loss - length(rounded) * way
        axis.plot(way, line, color=ORANGE, linestyle="--", linewidth=1)
        axis.set(xlabel="way along the gradient", xticks=(-way.max(), 0, way.max()))
    ax[0].set_ylabel("loss")
    ax[0].text(0.41, 7.6, "all rounded", color=BLUE, fontweight="bold", ha="right")
    ax[0].text(0.41, 7.2, "nothing rounded", color=GREY, fontweight="bold", ha="right")
    ax[0].text(-0.41, 4.6, "straight-through slope", color=ORANGE, fontweight="bold")
    ax[1].set_title("zoomed in 400 times")


def roughness(curve):
    """How much neighbouring differences differ: 0 on a straight line."""
    return float(np.std(np.diff(curve, 2)))


rough = {name: roughness(walked[name, near.max()]) for name in ("FLOAT32", "OFFICIAL")}
falls = [walked[name, wide.max()] for name in rough]
print(f"cosine of the two gradients {cosine:.1f}")
assert rough["OFFICIAL"] > 10 * rough["FLOAT32"], "near by, the rounded loss is all jumps"
assert all(curve[-1] < curve[0] - 1 for curve in falls), "far off, both ways lead down"
assert cosine > 0.5, "and they point alike"

leaves, learned = masters, []
for _ in range(16):
    loss, g = gradient(leaves, OFFICIAL)
    learned.append(loss)
    leaves = step_along(leaves, g, 0.3)
learned.append(total(leaves, OFFICIAL))
print(f"loss before {learned[0]:.1f}, and less than half of it behind 16 steps")
assert learned[-1] < learned[0] / 2, "the rounded model learns through its rounding"

# %% [markdown]
# ## The modules give the same numbers
#
# They work on all tokens at once, with lists of rows and stored records, and add shared records up
# in a fixed order ([add_rows](../dsv41/train/ops.py#add_rows)).

# %%
from types import SimpleNamespace

from dsv41.train import mhc
from dsv41.train.ops import add_rows
from dsv41.train.sparse_attn import sparse_attn_backward

nobody = np.zeros((0, 8)), np.zeros((4, 0), int)
records = records.astype(np.float32).astype(float)  # records are kept in float32
of_queries = [np.zeros_like(heads), np.zeros_like(records), np.zeros(3)]
for t in range(4):
    at = rows[t][rows[t] >= 0]
    d_heads, d_records, d_sink = attend_back(Ds[t], heads[t], records[at], sink)
    of_queries[0][t] = d_heads
    np.add.at(of_queries[1], at, d_records)
    of_queries[2] += d_sink
dq, dK, _, dsink, _ = sparse_attn_backward(Ds, heads, records, rows, *nobody, sink, FLOAT32)
theirs = {"queries": dq, "records": dK, "sinks": dsink}
for (name, got), want in zip(theirs.items(), of_queries, strict=True):
    close(f"sparse_attn_backward: {name}", got, want, within=1e-12)
summed = np.zeros_like(records)
add_rows(summed, parts, rows)
close("add_rows = np.add.at, without -1", summed, right, within=1e-12)

near, far = rows[:, :1], rows[:, 1:]  # the same lists, now as window and chosen entries
share = sparse_attn_backward(Ds, heads, records, near, records, far, sink, FLOAT32)[-1]
given = [shares(heads[t], records[rows[t]], sink)[0][:, 1].mean() for t in range(3)]
close("the indexer's target: mean share in the joint softmax", share[:3, 0], given, within=1e-12)

close("sinkhorn_backward", mhc.sinkhorn_backward(dB, Z, 20, 1e-6), dZ, within=1e-12)
constants = SimpleNamespace(rms_norm_eps=0, hc_eps=1e-6, hc_sinkhorn_iters=20)
X, (fn, base, _) = random(S, WIDTH, seed=30), layers[0]
dA, dC = random(S, seed=31), random(S, seed=32)
ours = predict_back(dA, dC, dB, X, fn, base)
theirs = mhc.hc_coefficients_backward(
    dA[None], dC[None], dB[None], X[None], fn, base, np.ones(3), constants, FLOAT32
)
close("hc_coefficients_backward: streams", theirs[0][0], ours[0], within=1e-12)
close("hc_coefficients_backward: fn", theirs[1], ours[1], within=1e-12)
y, new, A, C, B = random(WIDTH, seed=33), random(S, WIDTH, seed=34), *predict(X, fn, base)
theirs = mhc.hc_update_backward(new[None], X[None], y[None], C[None], B[None])
ours = {"streams": B @ new, "y": C @ new, "C": new @ y, "B": X @ new.T}
for (name, want), got in zip(ours.items(), theirs, strict=True):
    close(f"hc_update_backward: {name}", got[0], want, within=1e-14)
theirs = mhc.hc_collapse_backward(y[None], X[None], A[None])
close("hc_collapse_backward: streams", theirs[0][0], np.outer(A, y), within=1e-14)
close("hc_collapse_backward: A", theirs[1][0], X @ y, within=1e-14)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. The gradient of shared records: several queries with several heads, lists of rows with −1 and
#    repetitions. A query may have no row at all.
# 2. One round of Sinkhorn backwards: a softmax over rows, plus $\varepsilon$, then one division by
#    column sums. Inputs include a large $\varepsilon$.
# 3. One training step of an FP4 weight: $y = x W^T$ with $W$ read as FP4, loss
#    $\frac12 \sum (y - t)^2$, a step of size lr on the master.


# %% tags=["exercise"]
def records_gradient(D, q, records, rows, sink):
    """D, q (T, H, C), records (N, C), rows (T, n) int, sink (H,) -> (N, C), all f64"""
    return ...


check("17.records_gradient", records_gradient)


# %% tags=["exercise"]
def one_round(dB, Z, eps):
    """dB, Z (S, S) f64, B = softmax and one column pass -> dZ (S, S)"""
    return ...


check("17.one_round", one_round)


# %% tags=["exercise"]
def master_step(master, x, target, lr):
    """master (n, 32) f64, x (T, 32), target (T, n) -> the new master (n, 32)"""
    return ...


check("17.master_step", master_step)

# %% [markdown]
# ## What we learned
#
# - A softmax pays by value minus mean. The sink's value is 0. A record is paid as key and as value.
# - What is read often is paid often: add up, and never with `[rows] +=`.
# - Sinkhorn goes back division by division. The divisors belong to it.
# - $A$ comes late, so its gradient comes from behind. Rows of $B$ count on the way back, columns on
#   the way there.
# - Rounding has slope 0 and mean slope 1. Masters take the steps, FP4 is what is read.
# - Check in float64, by differences. On a rounded model a difference measures jumps.
#
# Worked solutions: [solutions/17_gradients.py](solutions/17_gradients.py). Next, what to do with a
# gradient: [18 Muon and Sinkhorn-balanced updates](18_optimizers.ipynb). All chapters:
# [README.md](README.md).
