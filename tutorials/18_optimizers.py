# %% [markdown]
# # 18 · Muon, head-wise Muon, Sinkhorn-balanced updates
#
# **How far does a weight move, when its gradient only says where to?**
#
# DeepSeek-V4.1-Flash trains its matrices and its tables with rules that throw the size of the
# gradient away. Muon makes every singular value of the update 1. The Sinkhorn-balanced update
# makes every row equally long. Both remember one number per weight, Adam remembers two. This
# chapter builds both from loops, and then asks what happens to a row that nobody reads any more.
#
# You need NumPy and singular values. 25 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/18_optimizers.py`.
#
# Sources: the V4.1 report, §2.5 with Algorithm 1, and §4.2.2 for the constants; the V4 report for
# Muon's coefficients. The modules that this page arrives at: [muon.py](../dsv41/train/muon.py),
# [sinkhorn_update.py](../dsv41/train/sinkhorn_update.py) and
# [optimizer.py](../dsv41/train/optimizer.py).

# %%
import math

import numpy as np

from lib.page import BLUE, GREEN, GREY, ORANGE, PURPLE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## Muon: every singular value becomes 1
#
# A gradient matrix is $G = \sum_i s_i\, u_i v_i^T$: directions with sizes $s_i$. A few sizes are
# large, most are small. Muon wants $\sum_i u_i v_i^T$, the same directions at size 1. It needs no
# decomposition for that. Divide by the Frobenius norm, so that all $s_i \le 1$. Then repeat
#
# $$Y \leftarrow a Y + (b A + c A^2)\, Y, \qquad A = Y Y^T$$
#
# $A$ has the $u_i$ as eigenvectors, with values $s_i^2$. So a step keeps every $u_i$ and $v_i$,
# and changes each size by itself: $s \leftarrow a s + b s^3 + c s^5$. Eight *steep* steps lift
# small sizes quickly, two *flat* ones come to rest at 1. First the sizes alone, one number at a
# time:

# %%
G = np.array([[1.0, 2], [3, 4], [5, 6]])
STEEP, FLAT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)

sizes = [float(s) for s in np.linalg.svd(G)[1]]
frobenius = math.sqrt(sum(s * s for s in sizes))
sizes = [s / frobenius for s in sizes]
history = [sizes]
print(f"start   {sizes[0]:.4f}  {sizes[1]:.4f}")
for step in range(10):
    a, b, c = STEEP if step < 8 else FLAT
    sizes = [a * s + b * s**3 + c * s**5 for s in sizes]
    history.append(sizes)
    print(f"{'steep' if step < 8 else 'flat'} {step + 1:2} {sizes[0]:.4f}  {sizes[1]:.4f}")
close("flat steps end at 1", sizes, [1, 1], within=2e-5)

# %% [markdown]
# Sizes 0.9985 and 0.0539 start a factor of 18 apart. The steep steps never come to rest, they jump
# about between 0.69 and 1.2. Now the same on the matrix, without knowing its sizes. A tall matrix
# is turned first: $A$ then has the shorter side.


# %%
def newton_schulz(g, steps=(STEEP,) * 8 + (FLAT,) * 2):
    """g (..., n, m) -> (..., n, m), the same directions, sizes near 1"""
    tall = g.shape[-2] > g.shape[-1]
    y = np.swapaxes(g, -1, -2) if tall else g  # (..., short, long)
    y = y / (np.sqrt((y * y).sum(axis=(-2, -1), keepdims=True)) + 1e-7)
    for a, b, c in steps:
        A = y @ np.swapaxes(y, -1, -2)  # (..., short, short)
        y = a * y + (b * A + c * (A @ A)) @ y
    return np.swapaxes(y, -1, -2) if tall else y


U, _, Vt = np.linalg.svd(G, full_matrices=False)
for count in (1, 5, 8):
    y = newton_schulz(G, (STEEP,) * count)
    close(f"{count} steep: sizes follow the polynomial", (U.T @ y @ Vt.T).diagonal(),
          history[count], within=1e-6)  # fmt: skip
close("8 + 2 steps: U V^T, without a decomposition", newton_schulz(G), U @ Vt, within=2e-5)
close("wide = tall, turned", newton_schulz(G.T), newton_schulz(G).T, within=1e-12)
close("1000 G moves as far as G", newton_schulz(1000 * G), newton_schulz(G), within=1e-6)
print(newton_schulz(G).round(4))

# %% [markdown]
# The first version of Muon runs five steep steps and stops. For the sizes of $G$ that means 0.8176
# and 0.6980. How small may a size be, and what comes out?


# %%
def run(s, steps):
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return s


s = np.geomspace(1e-4, 1, 2000)
five, hybrid = run(s, (STEEP,) * 5), run(s, (STEEP,) * 8 + (FLAT,) * 2)
with figure("Five steep steps jump about, eight steep and two flat ones end at 1") as ax:
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.plot(s, run(s, (STEEP,)), color=GREY)
    ax.plot(s, five, color=ORANGE)
    ax.plot(s, hybrid, color=BLUE, linewidth=2)
    ax.text(0.03, 0.17, "1 step", color=GREY, ha="right")
    ax.text(3.5e-4, 0.32, "5 steep", color=ORANGE, fontweight="bold", ha="right")
    ax.text(1.2e-4, 1.06, "8 steep + 2 flat", color=BLUE, fontweight="bold")
    ax.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1.3))
    ax.set(xlabel="size s before, as a share of the Frobenius norm", ylabel="size after")

common = s >= 0.01
for name, after in (("5 steep", five), ("8 + 2", hybrid)):
    low, high = after[common].min(), after[common].max()
    print(f"{name:8} s from 0.01: {low:.3f} .. {high:.3f}    s = 1e-4: {after[0]:.3f}")
assert five[0] < 0.1, "five steps leave a size of 1e-4 behind"
assert np.abs(hybrid - 1).max() < 3e-3, "8 + 2: all sizes from 1e-4 on are 1 within 0.3%"

# %% [markdown]
# **Break it.** Two guards sit in one line, the division by $\|G\|_F + 10^{-7}$. Without the
# division a size above 1 explodes. Without the $10^{-7}$ a zero gradient is 0/0, and an expert
# without tokens has a zero gradient.

# %% tags=["break"]
exploding = [9.5]
for _ in range(3):
    exploding.append(run(exploding[-1], (STEEP,)))
print("no division:", "  ".join(f"{s:.3g}" for s in exploding))
zero = np.zeros((3, 2))
with np.errstate(invalid="ignore"):
    wrong = newton_schulz(zero / np.sqrt((zero * zero).sum()))
print("zero gradient, 0/0:   ", wrong[0])
print("zero gradient, + 1e-7:", newton_schulz(zero)[0])
assert exploding[-1] > 1e100, "three steps without the division"
assert np.isnan(wrong).all(), "one zero gradient, and the weight is gone"
same("zero stays zero", newton_schulz(zero), zero)

# %% [markdown]
# ## One size for all shapes
#
# With all sizes at 1, an $(n, m)$ matrix has $\min(n, m)$ as the sum of its squares. So its RMS is
# $1 / \sqrt{\max(n, m)}$: a larger matrix would get a smaller step. Multiply by
# $0.18 \sqrt{\max(n, m)}$, and every matrix moves with RMS 0.18 times the learning rate.
#
# The trap is the other side: $\min$ is the same for a square matrix, and fine in a test on one.

# %%
rng = np.random.default_rng(1)
print("shape        RMS of Y   x 0.18 sqrt(max)   x 0.18 sqrt(min)")
for shape in ((128, 512), (512, 64), (256, 256)):
    rms = float(np.sqrt(np.mean(newton_schulz(rng.standard_normal(shape)) ** 2)))
    right, wrong = 0.18 * math.sqrt(max(shape)) * rms, 0.18 * math.sqrt(min(shape)) * rms
    print(f"{shape!s:12} {rms:.4f}     {right:.4f}             {wrong:.4f}")
    assert abs(right - 0.18) < 1e-3, f"{shape}: RMS 0.18"
    assert shape[0] == shape[1] or wrong < 0.1, f"{shape}: the other side is not 0.18"

# %% [markdown]
# ## Why head by head
#
# The matrix that makes queries stacks 64 heads of 512 rows, each row 1,280 long. Orthogonalised as
# a whole, its 32,768 rows share 1,280 directions: heads compete. A head with a large gradient
# takes the directions that it wants, and a head with a small one gets what is left. So the report
# (§2.5) splits by head first. Keys have one head for all queries here: that matrix stays whole.
#
# A small case: 4 heads of 8 rows, 24 columns. Gradients differ by a factor of 10 from head to
# head.

# %%
rng = np.random.default_rng(2)
strength = np.array([0.01, 0.1, 1, 10])
heads = rng.standard_normal((4, 8, 24)) * strength[:, None, None]  # (4, 8, 24)
whole = newton_schulz(heads.reshape(32, 24)).reshape(4, 8, 24)
alone = newton_schulz(heads)  # leading axes are matrices of their own


def singular(x):
    return np.linalg.svd(x, compute_uv=False)


print("head  gradient   singular values: as one matrix      head by head")
print("       x          largest  median  smallest         largest  smallest")
for head in range(4):
    s, t = singular(whole[head]), singular(alone[head])
    print(f"{head:3}   {strength[head]:5}       {s[0]:.3f}   {np.median(s):.3f}", end="")
    print(f"   {s[-1]:.3f}            {t[0]:.3f}    {t[-1]:.3f}")

assert np.median(singular(whole[0])) < 0.5, "as one matrix, the weak head hardly moves"
close("head by head, all sizes are 1", singular(alone), np.ones((4, 8)), within=1e-3)

# %%
with figure("As one matrix the weak head loses its directions, alone it keeps all 8") as ax:
    for head, colour in enumerate((ORANGE, PURPLE, GREEN, BLUE)):
        at = 9 * head + np.arange(8)
        ax.plot(at, singular(alone[head]), "o", color=colour, markerfacecolor="white")
        ax.plot(at, singular(whole[head]), "o", color=colour)
        label = f"head {head}\ngradient x {strength[head]:g}"
        ax.text(9 * head + 3.5, -0.16, label, color=colour, ha="center", va="top")
    ax.text(8.3, 1.12, "open: head by head", color=GREY)
    ax.text(9, 0.3, "filled: as one matrix", color=GREY)
    ax.set(xticks=[], ylim=(-0.05, 1.25), ylabel="singular values of the update")

# %% [markdown]
# It costs less, too. A step is three products: $A$, $A^2$ and the last one, with $2s^2l$, $2s^3$
# and $2s^2l$ operations for sides $s \le l$. Short sides of 512 instead of 1,280 halve that.

# %%
flops = {}
for name, count, (short, long) in (("whole", 1, (1280, 32_768)), ("heads", 64, (512, 1280))):
    flops[name] = 10 * count * (4 * short**2 * long + 2 * short**3)
    print(f"{name}: {count:2} x ({short}, {long}), 10 steps: {flops[name] / 1e12:.2f} TFLOP")
assert 0.45 < flops["heads"] / flops["whole"] < 0.5, "head by head takes less than half"

# %% [markdown]
# ## The Sinkhorn-balanced update
#
# In a table, a row is a token or an n-gram, and most rows have no gradient in most steps. Singular
# vectors of 384 million rows are out of reach. Algorithm 1 of the report normalises rows and
# columns in turn:
#
# $$U_i \leftarrow 0 \ \text{ where } \ \|U_i\| \le \tau \cdot \mathrm{mean}_j \|U_j\|, \qquad
# U \leftarrow U / (\text{row norms} + \varepsilon), \ U / (\text{column norms} + \varepsilon),
# \ \ldots$$
#
# $K = 11$ passes, rows first and last, $\tau = 10^{-3}$, $\varepsilon = 10^{-20}$. At the end
# $\sqrt n\, U$ has rows of RMS 1. Five rows by hand, the last one near the threshold:


# %%
def norm(numbers):
    return math.sqrt(sum(v * v for v in numbers))


def balance_by_hand(rows, K=11, tau=1e-3):
    norms = [norm(row) for row in rows]
    mean = sum(norms) / len(norms)
    U = [list(row) if norms[i] > tau * mean else [0.0] * len(row) for i, row in enumerate(rows)]
    for k in range(1, K + 1):
        if k % 2 == 1:
            U = [[v / (norm(row) + 1e-20) for v in row] for row in U]
        else:
            columns = [norm(column) for column in zip(*U, strict=True)]
            U = [[v / (c + 1e-20) for v, c in zip(row, columns, strict=True)] for row in U]
    n = len(rows[0])
    return [[math.sqrt(n) * v for v in row] for row in U], [x / mean for x in norms]


four = [[1, 2, 0], [0, 0, 0], [3, -1, 2], [0.5, 0.5, 4]]
for small in (0.002, 0.004):
    update, share = balance_by_hand([*four, [small, 0, 0]])
    print(f"fifth row [{small}, 0, 0]")
    for x, row in zip(share, update, strict=True):
        print(f"   norm / mean {x:.6f} ->", "".join(f"{v + 0:8.4f}" for v in row))
    if small == 0.002:
        want = [[0.73116656, 1.57015778, 0], [0, 0, 0], [1.520066, -0.54404919, 0.6272239],
                [0.33538433, 0.36011379, 1.66067318], [0, 0, 0]]  # fmt: skip
        close("0.002: the fifth row is masked", update, want, within=1e-8)
    else:
        assert abs(update[4][0] - math.sqrt(3)) < 1e-8, "0.004: full size"

# %% [markdown]
# A row just below the threshold stands still. Twice as large, it moves as far as the row with
# 1,000 times its gradient. There is nothing between.
#
# All rows at once is shorter:


# %%
def balance(U, K=11, tau=1e-3):
    """U (m, n) -> (m, n), rows of RMS 1 or 0"""
    norms = np.sqrt((U * U).sum(axis=1, keepdims=True))  # (m, 1)
    U = U * (norms > tau * norms.mean())
    for k in range(K):
        axis = 1 - k % 2
        U = U / (np.sqrt((U * U).sum(axis=axis, keepdims=True)) + 1e-20)
    return math.sqrt(U.shape[1]) * U


for small in (0.002, 0.004):
    example = np.array([*four, [small, 0, 0]])
    by_hand = balance_by_hand(example.tolist())[0]
    close(f"{small}: all rows at once = by hand", balance(example), by_hand, within=1e-12)
same("no gradient at all: zeros, no NaN", balance(np.zeros((5, 3))), np.zeros((5, 3)))

table = np.random.default_rng(3).standard_normal((200, 16)) * np.geomspace(0.05, 20, 16)
print("passes   row RMS           column RMS")
for K in (1, 2, 3, 11):
    update = balance(table, K)
    row, column = (np.sqrt((update**2).mean(axis=axis)) for axis in (1, 0))
    if K == 2:  # columns came last: any size, so look at the spread
        row, column = row / row.mean(), column / column.mean()
    spreads = [f"{x.min():.3f} .. {x.max():.3f}" for x in (row, column)]
    print(f"{K:4}     {spreads[0]}    {spreads[1]}")
close("K odd: rows are exact", row, np.ones(200), within=1e-12)

# %% [markdown]
# Columns are drawn a factor of 400 apart. After eleven passes they are equal to three digits. With
# an even number of passes (the second line, divided by its mean) the rows would differ instead.
#
# ## Two vectors instead of a table
#
# All passes only scale rows and columns. So $U = \mathrm{diag}(r)\; G\; \mathrm{diag}(c)$ at every
# moment: keep $G$ as it is and update the $m + n$ numbers in $r$ and $c$. A row pass knows $r_i$
# as soon as it has seen row $i$. In the same sweep it adds up the column sums for the next pass.
#
# `Sweeps` counts how often each element is read or written.


# %%
class Sweeps:
    """A table in slow memory that counts what is moved."""

    def __init__(self, table):
        self.table, self.read, self.written = table, 0, 0

    def __getitem__(self, at):
        self.read += self.table[at].size
        return self.table[at]

    def __setitem__(self, at, value):
        self.written += self.table[at].size
        self.table[at] = value


def explicit(G, K=11, tau=1e-3):
    norms = np.sqrt((G[:] ** 2).sum(axis=1, keepdims=True))
    mask = norms > tau * norms.mean()
    for k in range(K):
        U = G[:] * mask
        G[:] = U / (np.sqrt((U * U).sum(axis=1 - k % 2, keepdims=True)) + 1e-20)


def fused(G, K=11, tau=1e-3):
    m, n = G.table.shape
    norms = np.array([norm(G[i]) for i in range(m)])  # one sweep, for the mean
    r, c = (norms > tau * norms.mean()).astype(float), np.ones(n)  # (m,), (n,)
    for k in range(0, K, 2):
        columns = np.zeros(n)
        for i in range(m):
            row = G[i]
            r[i] = r[i] / (r[i] * norm(row * c) + 1e-20)
            columns += (r[i] * row) ** 2
        if k + 1 < K:  # the column pass reads nothing
            column = np.sqrt(columns)
            c = np.where(column > 0, c / (c * column + 1e-20), c)
    return r, c


table = np.random.default_rng(4).standard_normal((60, 8)) * np.geomspace(1e-5, 1, 60)[:, None]
slow, fast = Sweeps(table.copy()), Sweeps(table.copy())
explicit(slow)
r, c = fused(fast)
close("r, c = explicit passes", math.sqrt(8) * r[:, None] * table * c, balance(table), within=1e-12)
close("the counted passes are the same", math.sqrt(8) * slow.table, balance(table), within=1e-12)
print("masked rows:", int((r == 0).sum()), "of", len(r))
for name, memory in (("explicit", slow), ("r and c", fast)):
    print(f"{name:8} {memory.read // table.size:2} reads, {memory.written // table.size:2} writes")
same("6 sweeps + 1, no writes", [fast.read, fast.written], [7 * table.size, 0])
same("11 + 1, and 11 writes", [slow.read, slow.written], [12 * table.size, 11 * table.size])

# %% [markdown]
# The one extra read is the mean, in both. On many machines, each with a shard of rows, $r$ stays
# local. Only one sum of norms and five times $n$ column sums travel.
#
# **Break it.** The `np.where` guards a column that is zero in every row. Without it $c$ grows by
# $10^{20}$ a pass, and float32 ends at $10^{38}$. The explicit form has no such trouble: there the
# zero is divided, not the scale.

# %% tags=["break"]
G = np.array([[1.0, 0, 2], [3, 0, 4]])
with np.errstate(all="ignore"):
    c = np.ones(3, np.float32)
    for _ in range(2):  # column sums 1, 0, 1
        c = c / (c * np.float32([1, 0, 1]) + np.float32(1e-20))
    wrong = np.float32(G) * c
print("c without the guard:", c, " U:", wrong[0])
print("with it:            ", balance(G)[0].round(6))
assert np.isinf(c[1]) and np.isnan(wrong[:, 1]).all(), "0 times infinity"
want = [[1.09544508, 0, 1.34164081], [1.34164076, 0, 1.09544515]]
close("a zero column stays zero", balance(G), want, within=1e-8)

# %% [markdown]
# ## What happens to a row that nobody reads
#
# $U$ is not the gradient, it is a Nesterov sum: $M \leftarrow 0.95 M + 0.05\, G$, then
# $U = 0.95 M + 0.05\, G$. Without a gradient, $M$ shrinks by 0.95 a step. It does not become 0.
# As long as the row is above $\tau$ times the mean it is unmasked, and an unmasked row has full
# size. Shrinking to $10^{-3}$ takes $\ln 10^{-3} / \ln 0.95 = 134.7$ steps.
#
# Two tables of 64 rows. All rows get gradients for 100 steps. Then 4 rows go idle in the first, 48
# in the second.


# %%
def train(idle, after=200, tau=1e-3, seed=5):
    """-> (after,) each: row 0's share of the mean norm, the RMS of its update; and its momentum"""
    rng = np.random.default_rng(seed)
    M, share, size = np.zeros((64, 16)), [], []
    for step in range(100 + after):
        G = rng.standard_normal((64, 16))
        G[:idle] *= step < 100
        M = 0.95 * M + 0.05 * G
        U = 0.95 * M + 0.05 * G
        if step >= 100:
            norms = np.sqrt((U * U).sum(axis=1))
            share.append(norms[0] / norms.mean())
            size.append(np.sqrt(np.mean(balance(U, tau=tau)[0] ** 2)))
    return np.array(share), np.array(size), M[0]


shares, moves = {}, {}
for idle in (4, 48):
    share, size, _ = train(idle)
    shares[idle], moves[idle] = share, int((size > 0).sum())
    close(f"{idle} idle: size 1 above the threshold, then 0", size, share > 1e-3, within=1e-12)
    print(f"{idle:2} of 64 rows idle: row 0 makes {moves[idle]} steps of full size")
close("134.7 steps of 0.95 make a thousandth", 0.95**134.7, 1e-3, within=1e-5)
assert moves == {4: 131, 48: 157}, "many idle rows pull the mean down, and so the threshold"

with figure("An idle row keeps moving at full size for 131 or 157 steps") as ax:
    for idle, colour in ((4, BLUE), (48, ORANGE)):
        share, end = shares[idle], moves[idle]
        ax.plot(np.arange(end), share[:end], color=colour, linewidth=2)
        ax.plot(np.arange(end, 200), share[end:], color=colour, linestyle=":")
        ax.plot(end, share[end], "o", color=colour)
    ax.axhline(1e-3, color=GREY, linewidth=0.8)
    ax.text(2, 6e-4, "threshold τ", color=GREY, va="top")
    ax.text(40, 0.05, "4 of 64 idle", color=BLUE, ha="right", va="top")
    ax.text(62, 0.3, "48 of 64 idle", color=ORANGE)
    ax.text(120, 0.04, "solid: full size", color=GREY)
    ax.text(164, 1.6e-3, "dotted: size 0", color=GREY)
    ax.set(yscale="log", xlim=(0, 200), ylim=(3e-5, 5))
    ax.set(xlabel="steps since the last gradient", ylabel="|U of row 0| / mean")

# %% [markdown]
# **Break it.** Set $\tau = 0$. A row that never had a gradient is 0 and stays 0, so a test on a
# fresh table passes. A row that had one long ago moves for ever, along a direction that no data
# supports any more.

# %% tags=["break"]
print("600 idle steps        momentum   size of the last update   steps of full size")
travelled = {}
for name, tau in (("with the mask", 1e-3), ("without", 0.0)):
    _, size, momentum = train(4, after=600, tau=tau)
    travelled[name] = int(np.round(size.sum()))
    moved = f"{size[-1]:.3f}                     {travelled[name]}"
    print(f"{name:20}  {norm(momentum):.1e}    {moved}")
never_hit = np.array([*four, [0, 0, 0]])
assert not balance(never_hit, tau=0.0)[4].any(), "the fresh row hides the mistake"
assert travelled["without"] == 600, "no mask: 600 full-size steps without a gradient"

# %% [markdown]
# ## Which rule moves which tensor
#
# [assign](../dsv41/train/optimizer.py#assign) decides by name and shape. Here is the released
# model, counted from its config. Scales follow from their weights, and the vision tower is frozen
# until the learning rate decays.

# %%
from dsv41.presets import preset
from dsv41.tensors import expected_tensors
from dsv41.train.optimizer import RULES, assign

config = preset("v4.1-flash")
tensors = {name: spec.logical_shape for name, spec in expected_tensors(config).items()}
rules = {name: assign(name, shape, config) for name, shape in tensors.items()}
examples = {
    "muon": "attention, experts, projections, mHC",
    "sinkhorn": "embedding, head, Engram tables",
    "adamw": "norms, sinks, biases, scaling factors",
    "bias": "selection biases of the routers",
    "frozen": "scales, vision tower",
}
numbers = {}
print("rule      tensors           numbers  for example")
for rule in RULES:
    chosen = [shape for name, shape in tensors.items() if rules[name] == rule]
    numbers[rule] = sum(math.prod(shape) for shape in chosen)
    print(f"{rule:9} {len(chosen):7,} {numbers[rule]:17,}  {examples[rule]}")
assert rules["layers.1.engram.embed.weight"] == rules["head.weight"] == "sinkhorn"
assert rules["layers.0.attn.attn_sink"] == "adamw", "a sink is no matrix"
assert 100_000 * numbers["adamw"] < numbers["muon"], "Adam is left with almost nothing"

# %% [markdown]
# What Adam's second number per weight would cost, and what the passes over the first Engram table
# cost, in float32:

# %%
saved = 4 * numbers["sinkhorn"]
print(f"second moments of the tables: {saved / 1e9:6.1f} GB that nobody has to keep")
rows, width = tensors["layers.1.engram.embed.weight"]
print(f"table {rows:,} x {width}: {4 * rows * width / 1e9:.1f} GB")
for name, sweeps in (("explicit", 23), ("r and c", 7)):
    print(f"  {name:8} {sweeps:2} x = {sweeps * 4 * rows * width / 1e12:.2f} TB moved")
print(f"  exchanged between shards: 5 x {width} + 1 = {5 * width + 1:,} numbers")
close("792 GB", saved / 1e9, 792.0, within=0.1)

# %% [markdown]
# ## The modules give the same numbers
#
# One difference looks like one and is none. Muon's momentum adds $G$, the table's adds $0.05\, G$.
# All numbers differ by a factor of 20, and both rules throw that factor away.

# %%
from dsv41.train import muon, sinkhorn_update

rng = np.random.default_rng(6)
for shape in ((3, 2), (7, 20), (4, 8, 24)):
    g = rng.standard_normal(shape)
    close(f"newton_schulz {shape}", newton_schulz(g), muon.newton_schulz(g), within=1e-10)
g = rng.standard_normal((50, 6)) * np.geomspace(1e-5, 1, 50)[:, None]
close("balance", balance(g), sinkhorn_update.balance(g), within=1e-12)
shards, c = sinkhorn_update.scaling_vectors([g[:7], g[7:30], g[30:]])
in_shards = math.sqrt(6) * np.concatenate(shards)[:, None] * g * c
close("three shards = one table", in_shards, balance(g), within=1e-12)

added = rng.standard_normal((9, 6))
damped = 0.05 * added
first, second = muon.nesterov(added, g[:9]), sinkhorn_update.damped_nesterov(damped, g[:9])
close("the two momenta differ by 0.05", second, 0.05 * first, within=1e-14)
weight, momentum = np.zeros((5, 3)), np.zeros((5, 3))
example = np.array([*four, [0.002, 0, 0]])
sinkhorn_update.sinkhorn_step(weight, momentum, example, lr=0.01)
close("a first step from zero", weight, -0.01 * 0.18 * balance(example), within=1e-14)
rows = muon.matrix_rows("layers.7.attn.wq_b.weight", (32_768, 1280), config)
same("the release: 64 matrices of 512 rows", rows, [512] * 64)
rows = muon.matrix_rows("layers.7.attn.wkv.weight", tensors["layers.7.attn.wkv.weight"], config)
same("keys: one matrix", len(rows), 1)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. One whole step of Muon: momentum and Nesterov ($M \leftarrow 0.95 M + G$, direction
#    $0.95 M + G$), the update, weight decay 0.1 times the rate. Inputs include a zero gradient.
# 2. A row goes idle. How many steps of full size does it still make?
# 3. One step of a table whose gradient comes as rows and values. A row may be named twice.


# %% tags=["exercise"]
def muon_weight(weight, momentum, g, lr):
    """weight, momentum, g (n, m) f64 -> (n, m), the weight after a step; inputs unchanged"""
    return ...


check("18.muon_weight", muon_weight)


# %% tags=["exercise"]
def idle_steps(ratio, beta, tau):
    """ratio: |U_i| / mean |U| in the first idle step, the mean stays -> int, full-size steps"""
    return ...


check("18.idle_steps", idle_steps)


# %% tags=["exercise"]
def table_step(weight, momentum, rows, values, lr):
    """weight, momentum (m, n), rows (t,) int, values (t, n) f64 -> (m, n); inputs unchanged"""
    return ...


check("18.table_step", table_step)

# %% [markdown]
# ## What we learned
#
# - Muon keeps directions and sets sizes to 1. Eight steep steps lift, two flat ones come to rest.
# - RMS 0.18 for every shape, through the longer side. The guard $10^{-7}$ keeps zero at zero.
# - Heads of one matrix compete for its directions. Apart they all move, for half the operations.
# - Sinkhorn: rows and columns in turn, as two vectors in 7 reads. A row moves fully or not at all.
# - An idle row keeps moving at full size for about 135 steps. Only the mask ever stops it.
#
# Worked solutions: [solutions/18_optimizers.py](solutions/18_optimizers.py). Next: [19 Training the
# miniature](19_training_the_miniature.ipynb). All chapters: [README.md](README.md).
