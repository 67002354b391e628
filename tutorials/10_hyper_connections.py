# %% [markdown]
# # 10 · Hyper-connections
#
# **How do four residual streams meet one sublayer, and why is reading them once enough?**
#
# A plain transformer has one residual stream: $x \leftarrow x + F(x)$. DeepSeek-V4.1-Flash has
# four. Before every sublayer (attention or MoE) they are collapsed to one vector, after it they
# are updated and mixed. What costs is moving them: four streams of 5,120 numbers, 80 times a
# token. This chapter builds the mixing (mHC), its normalisation (Sinkhorn) and the shift that
# makes one pass enough (Single-Pass mHC).
#
# You need NumPy and what RMSNorm is. 25 minutes. Two exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/10_hyper_connections.py`.
#
# Sources: the V4.1 report, §2.4.1, equations 2 to 6; `Block.hc_pre` and `hc_post` of the released
# inference/model.py. The module that this page arrives at: [mhc.py](../dsv41/mhc.py), used by
# [ced.sublayers](../dsv41/ced.py#sublayers).

# %%
from unittest.mock import patch

import numpy as np

from lib.page import BLUE, GREEN, GREY, ORANGE, ROOT, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## Collapse, run, update
#
# $X_0 \ldots X_3$ are the streams of one token. Three sets of coefficients belong to a sublayer:
#
# $$x = \sum_i A_i X_i \qquad y = F(\mathrm{norm}(x)) \qquad X'_k = C_k\, y + \sum_j B_{jk} X_j$$
#
# $A$ (*pre*) says how much of each stream is read. $C$ (*post*) says how much of the output each
# stream gets. $B$ (*comb*) says how old streams flow into new ones: first index from, second index
# to. The code stores it this way; the report writes the transpose, $B_{kj}$.
#
# Four streams of two numbers. $F$ swaps the two and there is no norm yet.

# %%
X = [[1, 0], [0, 1], [2, 0], [0, 4]]  # (4, 2)
A = [0.5, 0.25, 0, 0.25]
C = [1, 2, 0, 1]
B = [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0.5, 0, 0, 0.5]]  # from, to

x = [sum(A[i] * X[i][c] for i in range(4)) for c in range(2)]
y = x[::-1]
by_hand = []
for k in range(4):
    by_hand.append([C[k] * y[c] + sum(B[j][k] * X[j][c] for j in range(4)) for c in range(2)])
    print(f"stream {k}: {X[k]} -> {by_hand[-1]}")
print("x =", x, "  y =", y)
assert by_hand[0] == [1.25 + 0.5, 0.5 + 2.0], "stream 0 gets y, half of itself, half of stream 3"

# %% [markdown]
# For $T$ tokens, all coefficients differ by token. Both steps are small matrix products.


# %%
def collapse(streams, pre):
    return (pre[:, None, :] @ streams)[:, 0]  # (T, 1, S) (T, S, D) -> (T, D)


def update(streams, y, post, comb):
    mixed = comb.transpose(0, 2, 1) @ streams  # (T, S, D)
    return post[:, :, None] * y[:, None, :] + mixed


one = [np.float32(v)[None] for v in (X, A, C, B)]  # one token: (1, 4, 2), (1, 4), ...
y_all = collapse(one[0], one[1])[:, ::-1]
same("collapse of all tokens = by hand", y_all[0], y)
same("update of all tokens = by hand", update(one[0], y_all, one[2], one[3])[0], by_hand)

# %% [markdown]
# **Break it.** Contract `comb` over the other axis. The shape is right. Rows and columns of this
# $B$ both sum to 1, so the sum of the streams is right as well, and a test of the sum passes.

# %% tags=["break"]
right = update(one[0], y_all, one[2], one[3])[0]
wrong = update(one[0], y_all, one[2], one[3].transpose(0, 2, 1))[0]
for k in range(4):
    print(f"stream {k}:  right {right[k]}   wrong {wrong[k]}")
print("sum:      ", right.sum(axis=0), "        ", wrong.sum(axis=0))
same("the sum of the streams does not notice", wrong.sum(axis=0), right.sum(axis=0))
assert not np.allclose(right, wrong), "the streams themselves are mixed up"

# %% [markdown]
# ## Twenty-four numbers from the streams
#
# The coefficients are predicted from the streams. Lay the four out as one long vector $v$, stream
# 0 first. One matrix gives 24 numbers, divided by one RMS over all four streams:
#
# $$u = \frac{\mathrm{fn}\, v}{\mathrm{rms}(v)}, \qquad A_i = \sigma(s_0 u_i + b_i) + \varepsilon,
# \qquad C_k = 2\sigma(s_1 u_{4+k} + b_{4+k}), \qquad Z_{jk} = s_2 u_{8+4j+k} + b_{8+4j+k}$$
#
# $\varepsilon = 10^{-6}$ stands in $A$ only. $C$ is centred on 1: an untrained sublayer adds its
# output to every stream, as a plain residual does. $Z$ becomes $B$ in the next section. Nothing
# here is fixed at load time: fn, $b$ and $s$ are weights, the 24 numbers belong to one token and
# one sublayer.


# %%
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def predict(streams, fn, base, scale):
    """streams (T, S, D) -> pre (T, S), post (T, S), logits of comb (T, S, S)."""
    tokens, s, width = streams.shape
    v = streams.reshape(tokens, s * width)  # stream-major
    u = v @ fn.T / np.sqrt(np.mean(v * v, axis=1, keepdims=True))  # (T, S + S + S*S)
    pre = sigmoid(scale[0] * u[:, :s] + base[:s]) + np.float32(1e-6)
    post = 2 * sigmoid(scale[1] * u[:, s : 2 * s] + base[s : 2 * s])
    return pre, post, (scale[2] * u[:, 2 * s :] + base[2 * s :]).reshape(tokens, s, s)


rng = np.random.default_rng(1)
streams = rng.standard_normal((3, 4, 8)).astype(np.float32)  # (T, S, D)
fn = rng.standard_normal((24, 32)).astype(np.float32) / 6
zeros, scale = np.zeros(24, np.float32), np.float32([0.5, 0.5, 2])
pre, post, Z = predict(streams, fn, zeros, scale)
t, j, k = 2, 1, 3  # one logit by a loop
v = [float(number) for stream in streams[t] for number in stream]
rms = (sum(number**2 for number in v) / 32) ** 0.5
by_loop = 2 * sum(float(w) * number for w, number in zip(fn[8 + 4 * j + k], v, strict=True)) / rms
close("from stream 1 to stream 3 of token 2", Z[t, j, k], by_loop, within=1e-5)

for name, numbers in (("A", pre), ("C", post), ("Z", Z)):
    assert np.ptp(numbers, axis=0).min() > 0.01, f"{name}: another token, other numbers"
neutral = predict(streams, 0 * fn, zeros, scale)
print(f"u = 0:  A = {neutral[0][0, 0]:.6f}   C = {neutral[1][0, 0]:.6f}")
close("A is a half plus eps, C is 1", [neutral[0][0, 0], neutral[1][0, 0]], [0.500001, 1], 1e-7)

# %% [markdown]
# ## Sinkhorn: nothing is amplified
#
# $B$ is applied 80 times in a row. If its columns sum to 1.1, a stream grows by $1.1^{80} = 2048$.
# mHC makes $B$ nearly *doubly stochastic*: no negative entries, every row and every column sums
# to 1. Sinkhorn's recipe is to divide each row by its sum, each column by its sum, and repeat. The
# first row pass is a softmax. Twenty passes each, and columns come last:
#
# $$B \leftarrow \mathrm{softmax}_k(Z) + \varepsilon, \qquad
# B \leftarrow \frac{B}{\sum_j B + \varepsilon}, \qquad
# 19\times:\; B \leftarrow \frac{B}{\sum_k B + \varepsilon},\;
# B \leftarrow \frac{B}{\sum_j B + \varepsilon}$$
#
# A 2×2 matrix, one entry at a time.

# %%
b = [[0.7, 0.3], [0.9, 0.1]]  # softmax done, eps left out
print("            B             row sums        column sums")
for _ in range(4):
    columns = [b[0][k] + b[1][k] for k in range(2)]
    b = [[b[j][k] / columns[k] for k in range(2)] for j in range(2)]
    rows, columns = [sum(row) for row in b], [b[0][k] + b[1][k] for k in range(2)]
    four_rounds = b
    print(" ".join(f"{v:.3f}" for row in b for v in row), " ", end=" ")
    print(" ".join(f"{v:.4f}" for v in rows), " ", " ".join(f"{v:.4f}" for v in columns))
    b = [[b[j][k] / rows[j] for k in range(2)] for j in range(2)]
assert abs(1.1**80 - 2048) < 1, "eighty times ten percent"
assert max(abs(r - 1) for r in rows) < 0.01, "row sums arrive although columns come last"


# %% [markdown]
# Column sums are 1 on every line, row sums only get there. So after 20 rounds the *inexact* side
# is the rows, which is the sum over the streams that one old stream flows to. The exact side is
# what one new stream receives. Every new stream is an average of old ones.
#
# *Why does the report divide in another order?* It does not. It writes $B$ the other way round, to
# and from. There the softmax runs down the columns and a row pass comes last: the same steps.


# %%
def sinkhorn(logits, iterations=20, eps=1e-6):
    """logits (..., S, S) f32 -> (..., S, S), columns (axis -2) sum to 1, rows nearly."""
    eps = np.float32(eps)
    b = np.exp(logits - logits.max(axis=-1, keepdims=True))  # exp(89) is inf in float32
    b = b / b.sum(axis=-1, keepdims=True) + eps
    b = b / (b.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        b = b / (b.sum(axis=-1, keepdims=True) + eps)
        b = b / (b.sum(axis=-2, keepdims=True) + eps)
    return b


example = np.log(np.float32([[0.7, 0.3], [0.9, 0.1]]))
close("four rounds of the function = by hand", sinkhorn(example, 4), four_rounds, within=3e-6)
report = np.exp(example.T) / np.exp(example.T).sum(axis=0) + np.float32(1e-6)  # [to, from]
for n in range(7):
    report = report / (report.sum(axis=1 - n % 2, keepdims=True) + np.float32(1e-6))
close("the report's rows come last = our columns", report.T, sinkhorn(example, 4), within=1e-6)
quarter = np.full((4, 4), 0.25)
close("equal logits: a quarter each", sinkhorn(0 * quarter), quarter, within=1e-6)
comb = sinkhorn(Z)
print("column sums", comb[0].sum(axis=0), "\nrow sums   ", comb[0].sum(axis=1))
close("what a new stream receives sums to 1", comb.sum(axis=1), np.ones((3, 4)), within=3e-6)
huge = sinkhorn(1000 * np.eye(4, dtype=np.float32))
assert np.isfinite(huge).all(), "logits of 1000 stay finite"

# %% [markdown]
# **Break it.** Where does $\varepsilon$ stand? Inside the division, under the line. Move the
# bracket and add it after each division. At $10^{-6}$ you can hardly see it. At $10^{-2}$ it is
# another matrix. A test of this bracket needs the large one.


# %% tags=["break"]
def outside(logits, iterations, eps):
    b = np.exp(logits - logits.max(axis=-1, keepdims=True))
    for _ in range(iterations):
        b = b / b.sum(axis=-1, keepdims=True) + np.float32(eps)
        b = b / b.sum(axis=-2, keepdims=True) + np.float32(eps)
    return b


logits = np.float32([[1, 0, -1, 2], [0.5, 0.5, 0, -0.5], [3, -2, 1, 0], [0, 1, 2, -3]])
off = {}
for eps in (1e-6, 1e-2):
    inside, wrong = sinkhorn(logits, 20, eps), outside(logits, 20, eps)
    off[eps] = np.abs(inside - wrong).max()
    print(f"eps {eps:g}: column sum {inside[:, 0].sum():.6f} inside,", end="")
    print(f" {wrong[:, 0].sum():.6f} outside, largest difference {off[eps]:.6f}")
assert off[1e-6] < 1e-4 < 1e-2 < off[1e-2], "small eps hides the bracket, large eps shows it"

# %% [markdown]
# ## Is twenty enough?
#
# That depends on the logits. Near-equal ones converge in a few rounds, spread-out ones crawl. The
# grey curve shows the comb logits of a tiny model with random weights, which is used further
# below. The flat part at the bottom is $\varepsilon$.

# %%
import dsv41
from dsv41.quant import FLOAT32

model = dsv41.load(ROOT / "tests/golden/v41_tiny_a")
stored = np.load(ROOT / "tests/golden/v41_tiny_a/prompt_fp32.npz")  # from the released code
ids = stored["ids"][0, :72]
trace = {}
delayed = model.logits(ids, FLOAT32, trace=trace)  # (72, 288)
p = model.params["layers"][3]
model_Z = predict(trace["L02.x_out"], *(p[f"hc_attn_{part}"] for part in ("fn", "base", "scale")))
normal = np.random.default_rng(2).standard_normal((500, 4, 4)).astype(np.float32)
families = (
    ("normal × 1", BLUE, normal, (14, 1e-3)),
    ("normal × 3", GREEN, 3 * normal, (41, 8e-3)),
    ("normal × 10", ORANGE, 10 * normal, (41, 4e-2)),
    ("tiny model", GREY, model_Z[2], (1.2, 1e-5)),
)
rounds = np.arange(1, 41)
with figure("Worst row sum after n rounds: large logits need more than 20") as ax:
    for name, colour, family, place in families:
        error = [np.abs(sinkhorn(family, n).sum(axis=2) - 1).max() for n in rounds]
        ax.plot(rounds, error, color=colour)
        ax.text(*place, name, color=colour, va="center", fontweight="bold")
        print(f"{name:11} worst |row sum - 1| after 1, 5, 20, 40 rounds:", end="")
        print("".join(f"{error[n - 1]:10.1e}" for n in (1, 5, 20, 40)))
    ax.axvline(20, color=GREY, linewidth=0.8, linestyle=":")
    ax.text(20.4, 3e-7, "V4.1 stops here", color=GREY)
    ax.set(yscale="log", xlim=(0, 50), ylim=(1e-7, 4), xticks=range(0, 41, 10))
    ax.set(xlabel="rounds", ylabel="|row sum − 1|")
    ax.grid(axis="y")
worst = np.abs(sinkhorn(10 * normal).sum(axis=2) - 1).max()
assert worst > 0.05, "with logits of size 10 a row can still be off by several percent"
worst = np.abs(sinkhorn(10 * normal).sum(axis=1) - 1).max()
assert worst < 1e-5, "while the columns are 1 up to rounding and eps"

# %% [markdown]
# What does it buy? Multiply the $B$ of 80 sublayers and look at the largest sum of magnitudes, the
# most that a stream can grow. Three choices: no constraint (identity plus noise), softmax
# only, Sinkhorn. The axis of the softmax is the trap: it fixes what an old stream gives, not what a
# new one receives.

# %%
draws = np.random.default_rng(3).standard_normal((80, 4, 4)).astype(np.float32)
shifted = draws - draws.max(axis=2, keepdims=True)
softmax = np.exp(shifted) / np.exp(shifted).sum(axis=2, keepdims=True)
choices = (
    ("free", np.eye(4, dtype=np.float32) + draws / 4),
    ("softmax", softmax),
    ("Sinkhorn", sinkhorn(draws)),
)
gains = {}
for name, combs in choices:
    product = np.eye(4)
    for c in combs:
        product = product @ c
    received, given = np.abs(product).sum(axis=0), np.abs(product).sum(axis=1)
    gains[name] = received.max()
    print(f"{name:9} received {received.min():9.4f} to {received.max():9.4f}", end="")
    print(f"   given {given.min():9.4f} to {given.max():9.4f}")
assert gains["free"] > 100, "unconstrained mixing explodes"
assert gains["softmax"] > 1.1, "softmax alone lets one stream collect more than its share"
close("Sinkhorn neither grows nor fades", gains["Sinkhorn"], 1, within=1e-3)

# %% [markdown]
# ## Single-Pass: read through the A of the sublayer before
#
# In V4, $A$, $B$ and $C$ of a sublayer all come from the streams that enter it. V4.1 delays one of
# the three: **only A**. The $A$ that sublayer $l$ predicts is used by sublayer $l + 1$ (report,
# equation 6). $B$ and $C$ are used at once.
#
# | sublayer | collapses with the A of | updates with B, C of |
# | --- | --- | --- |
# | attention of layer 0 | nobody: (1, 0, 0, 0) | itself |
# | MoE of layer 0 | attention of layer 0 | itself |
# | attention of layer 1 | MoE of layer 0 | itself |
# | head | MoE of the last layer | – |
#
# *Does the head have mixing weights of its own?* No. The A of the last MoE is left over, and it
# collapses the streams. Run the whole residual path of the tiny model, nine layers, with the code
# of this page. Only the outputs of attention and MoE, and the streams after Engram, come from a
# trace. What comes out is compared with numbers that the released code has left in a file.

# %%
embedding = trace["embedding"]  # (72, 64)
streams = np.repeat(embedding[:, None], 4, axis=1)  # four equal streams
pre = np.zeros((72, 4), np.float32)
pre[:, 0] = 1
same("the first attention reads the embedding itself", collapse(streams, pre), embedding)
for layer in range(9):
    p = model.params["layers"][layer]
    streams = trace.get(f"L{layer:02d}.engram.x", streams)  # chapter 12
    for name in ("attn", "ffn"):
        parameters = (p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale"))
        next_pre, post, Z = predict(streams, *parameters)
        x = collapse(streams, pre)  # what the sublayer would read
        streams = update(streams, trace[f"L{layer:02d}.{name}.out"], post, sinkhorn(Z))
        pre = next_pre
x = collapse(streams, pre)
final = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True)) * model.params["norm"]["weight"]
close("18 sublayers: the last streams", streams, stored["L08.x_out"], within=1e-4)
close("the last A collapses them for the head", final, stored["final_x"], within=1e-4)
assert list(model.params["head"]) == ["weight"], "the head has one matrix and no mixing weights"

# %% [markdown]
# **Break it.** Use the fresh A, as V4 does: off by one sublayer. All shapes fit, all values are
# finite, the logits have the right size. It is another model.

# %% tags=["break"]
from dsv41 import ced
from dsv41.mhc import hc_coefficients, hc_collapse, hc_update
from dsv41.ops import rmsnorm


def undelayed(streams, pre, functions, p, layer, call):
    """ced.sublayers, each with an A of its own instead of that of the one before."""
    for name, function in zip(("attn", "ffn"), functions, strict=True):
        parts = [p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")]
        pre, post, comb = hc_coefficients(streams, *parts, call.config, call.numerics)
        x = hc_collapse(streams, pre, call.numerics)
        x = rmsnorm(x, p[f"{name}_norm"]["weight"], call.config.rms_norm_eps, call.numerics)
        y = function(x, p[name], layer, call)
        streams = hc_update(streams, y, post, comb, call.numerics)
    return streams, pre, ()


with patch.object(ced, "sublayers", undelayed):
    wrong = model.logits(ids, FLOAT32)
agree = np.mean(wrong.argmax(axis=1) == delayed.argmax(axis=1))
print(f"logits right: std {delayed.std():.2f}   largest {delayed.max():.2f}")
print(f"logits wrong: std {wrong.std():.2f}   largest {wrong.max():.2f}")
print(f"correlation {np.corrcoef(wrong.ravel(), delayed.ravel())[0, 1]:.2f}", end="")
print(f"   same first choice at {agree:.1f} of the positions")
assert abs(wrong.std() / delayed.std() - 1) < 0.1, "the size of the logits looks right"
assert agree < 0.9, "and the choices are others"

# %% [markdown]
# ## Count the traffic
#
# Why delay anything? Because the streams have to be moved. The report counts the activations that
# are read and written between two sublayers: $(4n+4)d$ for the original kernels, $(3n+2)d$ in two
# passes, $(2n+2)d$ for Single-Pass. Do not trust it, count.
#
# `Memory` is an array that counts every element read or written. Local variables are free: they
# stand for registers and on-chip memory. A kernel works through the width in tiles.


# %%
class Memory:
    """An array in slow memory; `traffic` counts elements by direction."""

    def __init__(self, array, traffic):
        self.array, self.traffic = array, traffic

    def __getitem__(self, at):
        self.traffic["read"] += self.array[at].size
        return self.array[at]

    def __setitem__(self, at, value):
        self.traffic["written"] += self.array[at].size
        self.array[at] = value


n, d, TILE = 4, 5120, 512
tiles = [slice(start, start + TILE) for start in range(0, d, TILE)]
rng = np.random.default_rng(4)
old, y = rng.standard_normal((n, d), "f4"), rng.standard_normal(d, "f4")
A, C = rng.uniform(0, 1, n).astype("f4"), rng.uniform(0, 2, n).astype("f4")
B = sinkhorn(rng.standard_normal((n, n), "f4"))
fn = rng.standard_normal((24, n, d), "f4") / np.float32(n * d) ** 0.5  # weights, not activations


def new_memory():
    traffic = {"read": 0, "written": 0}
    arrays = (old, y, np.zeros((n, d), "f4"), np.zeros(d, "f4"), np.zeros(d, "f4"))
    return traffic, *(Memory(array, traffic) for array in arrays)


def totals(u, squares):
    """What prediction needs: 24 numbers, from sums over all tiles."""
    return u / np.sqrt(squares / (n * d))


def first_coefficients(u):
    return sigmoid(u[:n]) + np.float32(1e-6)


# %% [markdown]
# The original: three kernels and the norm in front of the sublayer. Each reads what the one before
# wrote.


# %%
def four_kernels():
    traffic, X, Y, X_new, x, x_norm = new_memory()
    for at in tiles:  # 1. residual update
        X_new[:, at] = B.T @ X[:, at] + C[:, None] * Y[at]
    u, squares = 0, 0
    for at in tiles:  # 2. coefficients
        tile = X_new[:, at]  # (n, TILE)
        u, squares = u + np.einsum("und,nd->u", fn[:, :, at], tile), squares + (tile**2).sum()
    A_new = first_coefficients(totals(u, squares))  # known only now
    for at in tiles:  # 3. input mixing
        x[at] = A_new @ X_new[:, at]
    whole = x[:]  # 4. norm
    x_norm[:] = whole / np.sqrt(np.mean(whole**2))
    return x_norm.array, X_new.array, traffic


def two_passes():
    traffic, X, Y, X_new, _, x_norm = new_memory()
    u, squares = 0, 0
    for at in tiles:  # 1. update and coefficients
        tile = B.T @ X[:, at] + C[:, None] * Y[at]
        X_new[:, at] = tile
        u, squares = u + np.einsum("und,nd->u", fn[:, :, at], tile), squares + (tile**2).sum()
    A_new = first_coefficients(totals(u, squares))  # known only now: X_new is read again
    kept = np.concatenate([A_new @ X_new[:, at] for at in tiles])  # 2. mixing and norm
    x_norm[:] = kept / np.sqrt(np.mean(kept**2))
    return x_norm.array, X_new.array, traffic


def single_pass(A_before):
    traffic, X, Y, X_new, _, x_norm = new_memory()
    u, squares, kept = 0, 0, []
    for at in tiles:  # update, coefficients and mixing of one tile
        tile = B.T @ X[:, at] + C[:, None] * Y[at]
        X_new[:, at] = tile
        u, squares = u + np.einsum("und,nd->u", fn[:, :, at], tile), squares + (tile**2).sum()
        kept.append(A_before @ tile)  # A is known already
    kept = np.concatenate(kept)
    x_norm[:] = kept / np.sqrt(np.mean(kept**2))
    return x_norm.array, X_new.array, traffic, first_coefficients(totals(u, squares))


*slow, slow_traffic = four_kernels()
*fast, fast_traffic = two_passes()
*single, single_traffic, A_next = single_pass(A)
same("two passes: the same input of the sublayer", fast[0], slow[0])
same("single pass: the same streams", single[1], slow[1])
assert not np.allclose(single[0], slow[0]), "single pass reads through another A, on purpose"
replayed = single_pass(A_next)[0]
same("given V4's A, single pass would be V4", replayed, slow[0])

counted = {}
formulas = ((4, 4), (3, 2), (2, 2))
variants = (("four kernels", slow_traffic), ("two passes", fast_traffic))
for (name, traffic), (a, b) in zip((*variants, ("single", single_traffic)), formulas, strict=True):
    counted[name] = traffic["read"] + traffic["written"]
    reads, writes = traffic["read"] // d, traffic["written"] // d
    print(f"{name:12} read {reads:2} d, written {writes} d", end="")
    print(f" = ({a}n+{b})d = {counted[name]:7,} values")
    assert counted[name] == (a * n + b) * d, f"{name}: the formula counts what was moved"

# %% [markdown]
# The count hides one thing: `kept`, the $d$ numbers of the sublayer's input, wait on the chip for
# their RMS. The four streams do not have to.
#
# $(n+1)d$ must be read (old streams, y) and $(n+1)d$ written (new streams, x): Single-Pass is at
# the floor. In bf16, over 80 sublayers:

# %%
megabytes = {name: 80 * 2 * values / 1e6 for name, values in counted.items()}
for name, amount in megabytes.items():
    print(f"{name:12} {amount:5.1f} MB a token")
close("16.4, 11.5 and 8.2 MB", list(megabytes.values()), [16.4, 11.5, 8.2], within=0.05)
assert 2 * counted["single"] == counted["four kernels"], "half of the original traffic"

parts = {  # in units of d, in the order they happen; width 1 = one vector
    "four kernels": [("X, y", 5, BLUE), ("X'", 4, ORANGE), ("X'", 4, BLUE), ("X'", 4, BLUE),
                     ("x", 1, ORANGE), ("x", 1, BLUE), ("x", 1, ORANGE)],
    "two passes": [("X, y", 5, BLUE), ("X'", 4, ORANGE), ("X'", 4, BLUE), ("x", 1, ORANGE)],
    "single": [("X, y", 5, BLUE), ("X'", 4, ORANGE), ("x", 1, ORANGE)],
}  # fmt: skip
with figure("One sublayer, one token: 20 d, 14 d, 10 d moved") as ax:
    for row, segments in enumerate(parts.values()):
        at = 0
        for text, width, colour in segments:
            ax.barh(-row, width, left=at, height=0.6, color=colour, edgecolor="white", linewidth=2)
            ax.text(at + width / 2, -row, text, ha="center", va="center", color="white")
            at += width
        ax.text(at + 0.2, -row, f"{at} d", va="center")
    ax.text(15.2, -2, "read", color=BLUE, fontweight="bold", va="center")
    ax.text(17.7, -2, "written", color=ORANGE, fontweight="bold", va="center")
    ax.set(yticks=[0, -1, -2], yticklabels=list(parts), xlim=(0, 22), xticks=range(0, 21, 4))
    ax.set_xlabel("vectors of d numbers")
drawn = [sum(width for _, width, _ in segments) * d for segments in parts.values()]
same("the figure adds up to the count", drawn, list(counted.values()))

# %% [markdown]
# ## The module gives the same numbers
#
# [hc_collapse](../dsv41/mhc.py#hc_collapse) and [hc_update](../dsv41/mhc.py#hc_update) are equal to
# the last bit. [hc_coefficients](../dsv41/mhc.py#hc_coefficients) and
# [sinkhorn](../dsv41/mhc.py#sinkhorn) add up in another order. In the released numerics the streams
# are stored as bf16 after each update, while the coefficients stay in float32.

# %%
from dsv41 import mhc
from dsv41.formats import round_bf16
from dsv41.quant import OFFICIAL

rng = np.random.default_rng(5)
streams = rng.standard_normal((9, 4, 64)).astype(np.float32)
y = rng.standard_normal((9, 64)).astype(np.float32)
parameters = [p[f"hc_attn_{part}"] for part in ("fn", "base", "scale")]
pre, post, Z = predict(streams, *parameters)
comb = sinkhorn(Z)
theirs = mhc.hc_coefficients(streams, *parameters, model.config, FLOAT32)
for name, mine, other in zip(("pre", "post", "comb"), (pre, post, comb), theirs, strict=True):
    close(f"module's {name}", mine, other, within=2e-6)
close("module's sinkhorn", sinkhorn(logits), mhc.sinkhorn(logits, 20, 1e-6), within=1e-6)
same("module's collapse", mhc.hc_collapse(streams, pre, FLOAT32), collapse(streams, pre))
new = update(streams, y, post, comb)
same("module's update", mhc.hc_update(streams, y, post, comb, FLOAT32), new)
same("released numerics: bf16", mhc.hc_update(streams, y, post, comb, OFFICIAL), round_bf16(new))

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Predict pre and post of one token, without calling `predict`. Mind what $\varepsilon$ and the
#    factor 2 belong to, and over what the RMS is taken: the four streams differ in size.
# 2. Run a chain of sublayers with $F(x)$ = `x[::-1]`, delayed A, and return what the head reads.
#    Each sublayer $l$ has predicted `pres[l]`, `posts[l]`, `combs[l]`.


# %% tags=["exercise"]
def pre_post(streams, fn, base, scale):
    """streams (4, D), fn (24, 4 D), base (24,), scale (3,), all f32 -> (2, 4): pre, post"""
    v = streams.reshape(-1)  # stream 0 first
    return ...


check("10.pre_post", pre_post)


# %% tags=["exercise"]
def head_input(embedding, pres, posts, combs):
    """embedding (D,), pres (L, 4), posts (L, 4), combs (L, 4, 4) [from, to] -> (D,)"""
    streams = np.repeat(embedding[None], 4, axis=0)  # (4, D)
    return ...


check("10.head_input", head_input)

# %% [markdown]
# ## What we learned
#
# - Collapse with A, run, update with C and B. All 24 coefficients belong to one token and sublayer.
# - B is [from, to] and is contracted over its first index. The sum of the streams cannot tell.
# - Sinkhorn: columns exact, rows nearly; $\varepsilon$ under the line. 80 products stay at 1.
# - Only A is delayed, by one sublayer; the first is (1, 0, 0, 0), the last feeds the head.
# - 20 d, 14 d, 10 d values moved, counted. The delay saves the second read of the streams.
#
# Worked solutions: [solutions/10_hyper_connections.py](solutions/10_hyper_connections.py). Next:
# [11 DeepSeekMoE and balance by bias](11_moe_balance.ipynb). All chapters: [README.md](README.md).
