# %% [markdown]
# # 05 · The lightning indexer and top-k
#
# **Which 512 of half a million entries does a token read, and what does it cost to find them?**
#
# A global layer of DeepSeek-V4.1-Flash attends to 512 compressed entries, however long the text
# is. A small network, the indexer, scores all of them first. This chapter computes a score by
# hand, picks the best k with a rule for ties, counts bytes and FLOPs, and trains the indexer
# although picking has no gradient.
#
# You need NumPy and [chapter 01](01_number_formats.ipynb) for bf16 and MXFP4. 25 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/05_indexer_topk.py`.
#
# Sources: the V4.1 report, §2.3, and `Indexer` in the released `inference/model.py`; the V3.2
# report for the loss. The module that this page arrives at: [indexer.py](../dsv41/indexer.py).

# %%
import numpy as np

from lib.page import BLUE, FAINT, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One score, by hand
#
# Query $t$ has a few small heads $q_{t,a}$ and a weight $w_{t,a}$ for each. Entry $j$ has
# **one** key $k_j$, shared by all heads. The score is
#
# $$I_{t,j} = \sum_a w_{t,a} \cdot \mathrm{relu}(q_{t,a} \cdot k_j)$$
#
# A head is a detector: it is silent (0) or says how strongly it matches. The weight says whether
# a match is wanted. Weights are plain linear outputs, so **they may be negative**: such a head
# votes against what it finds. Two heads, six keys:

# %%
q = [[1, -1], [2, 1]]
w = [1, -0.5]
keys = {"A": [-1, 1], "B": [1, 1], "C": [2, 0], "D": [1, -2], "E": [0, -1], "F": [-2, -2]}

by_hand = []
print("key        dots      after relu   score")
for name, k in keys.items():
    dots = [sum(a * b for a, b in zip(head, k, strict=True)) for head in q]
    matched = [max(0, d) for d in dots]
    by_hand.append(sum(weight * d for weight, d in zip(w, matched, strict=True)))
    numbers = f"{dots[0]:3} {dots[1]:3}    {matched[0]:3} {matched[1]:3}"
    print(f"{name} {k!s:8}  {numbers}    {by_hand[-1]:6}")

assert by_hand == [0, -1.5, 0, 3, 1, 0], "six scores by hand"

# %% [markdown]
# A, C and F tie at exactly 0, for two reasons: A and F match nothing, in C the heads cancel. B
# is matched only by the head that votes against it, and falls below all three.
#
# All queries, heads and keys at once: one matrix product, then a weighted sum over heads.


# %%
def scores(q, w, k):
    """q (T, I, J), w (T, I), k (N, J) -> (T, N) f32"""
    dots = q @ k.T  # (T, I, N)
    return np.sum(np.maximum(dots, np.float32(0)) * w[:, :, None], axis=1)


q2, w2 = np.float32([q]), np.float32([w])  # (1, 2, 2), (1, 2)
k2 = np.float32(list(keys.values()))  # (6, 2)
same("all keys at once = one by one", scores(q2, w2, k2)[0], by_hand)

# %% [markdown]
# **Break it, twice.** Drop the relu, and $\sum_a w_a q_a$ becomes one vector: all heads together
# are one dot product, and 32 heads are worth as much as one. F is now chosen, which no head
# matches: a negative weight times a negative dot. Or move the relu behind the sum: a vote
# against B then ends at 0, like no match at all.


# %% tags=["break"]
def best_two(row):
    return "".join(sorted("ABCDEF"[j] for j in np.argsort(-row, kind="stable")[:2]))


dots = q2 @ k2.T  # (1, 2, 6)
right = np.array(by_hand)
without = np.sum(dots * w2[:, :, None], axis=1)[0]  # (6,)
behind = np.maximum(without, 0)
print("key              " + "".join(f"{name:>6}" for name in keys))
for title, row in (("right", right), ("no relu", without), ("relu behind sum", behind)):
    numbers = "".join(f"{number + 0.0:6}" for number in row)
    print(f"{title:17}{numbers}   best two {best_two(row)}")

one_vector = np.float32(w) @ np.float32(q)  # (2,)
same("without relu all heads are one vector", without, k2 @ one_vector)
assert best_two(without) != best_two(right), "another entry is chosen, and nothing fails"
assert right[1] < right[0] and behind[1] == behind[0], "a vote against looks like no match"

# %% [markdown]
# With few entries you do not notice: top-k takes all of them, whatever their scores. The ranking
# counts only when there is something to leave out.
#
# ## What a query may see
#
# Entry $j$ is made of tokens $jm \ldots jm+m-1$. Query $t$ may see it when its last token is not
# in the future:
#
# $$(j + 1)\, m \le t + 1 \quad\Leftrightarrow\quad j < \left\lfloor (t + 1) / m \right\rfloor$$
#
# Encoder layers have $m = 2$, decoder layers $m = 1$. Count it token by token, and draw it.


# %%
def visible(t, m):
    return (t + 1) // m


for m in (1, 2):
    counted = [sum((j + 1) * m <= t + 1 for j in range(8)) for t in range(8)]
    print(f"m = {m}: queries 0 to 7 see", *counted, "entries")
    same(f"the formula counts the same, m = {m}", visible(np.arange(8), m), counted)

with figure("A query sees an entry once its last token is there", columns=2) as ax:
    for axis, m in zip(ax, (1, 2), strict=True):
        for t in range(12):
            for j in range(12 // m):
                colour = BLUE if j < visible(t, m) else FAINT
                axis.barh(t, m - 0.15, left=j * m - 0.425, height=0.85, color=colour)
        axis.set(xlabel="entry, drawn over its tokens", xlim=(-0.7, 11.7), ylim=(11.7, -0.7))
        axis.set_xticks([j * m + (m - 1) / 2 for j in range(12 // m)], range(12 // m))
        axis.set_yticks(range(12))
        axis.set_title(f"m = {m}, {'decoder' if m == 1 else 'encoder'}", fontsize=9)
    ax[0].set_ylabel("query t")

# %% [markdown]
# At $m = 1$ a query sees its own entry. At $m = 2$ an even query does not: its pair is still
# open, and it sees itself only through the window.
#
# ## The best k, and what "best" means on a tie
#
# Take the k highest scores. Equal scores: the lower entry number first. List the chosen entries
# in ascending order, and fill up with −1 when fewer than k are visible. By a loop, then with a
# stable sort for all queries at once.


# %%
def best_slowly(row, count, k):
    """row: scores, count: how many are visible -> k entry numbers, ascending, then -1"""
    left, chosen = list(range(count)), []
    while left and len(chosen) < k:
        winner = left[0]
        for j in left:
            if row[j] > row[winner]:  # not >=: the earlier one stays
                winner = j
        left.remove(winner)
        chosen.append(winner)
    return sorted(chosen) + [-1] * (k - len(chosen))


def best(scores, count, k):
    """scores (T, N), count (T,) int -> (T, k) int64"""
    N = scores.shape[1]
    masked = np.where(np.arange(N) < count[:, None], scores, -np.inf)
    order = np.argsort(-masked, axis=1, kind="stable")[:, :k]  # (T, k), best first
    order = np.sort(np.where(order < count[:, None], order, N), axis=1)  # hidden ones go last
    padded = np.full((len(scores), k), -1)
    padded[:, : order.shape[1]] = np.where(order < N, order, -1)
    return padded


row = [1.0, 5, 5, 5, 5, 0]
for count in (6, 3, 1, 0):
    print(f"{count} visible, k = 3:", best_slowly(row, count, 3))
assert best_slowly(row, 6, 3) == [1, 2, 3], "of four equal scores the first three"

draw = np.random.default_rng(1)
many = draw.integers(-3, 4, (50, 40)).astype(np.float32)  # full of ties
counts = draw.integers(0, 41, 50)
slow = [best_slowly(many[i], counts[i], 8) for i in range(50)]
same("all queries at once = one by one", best(many, counts, 8), slow)

# %% [markdown]
# **Break it, twice.** Sort ascending and read from the end, as one often does: the values are
# right, but of equal scores the *last* ones win. Both answers are "the top 3", and two machines
# that break ties differently read different entries.
#
# And −1 means "nothing", but NumPy reads the last row. That row belongs to somebody else.

# %% tags=["break"]
backwards = sorted(np.argsort(row, kind="stable")[::-1][:3].tolist())
print("lower entry first:", best_slowly(row, 6, 3), "  read from the end:", backwards)
assert backwards == [2, 3, 4], "the same scores, other entries"

values = np.float32([[1, 0], [0, 1], [100, 100]])
chosen = np.array([0, -1, -1, -1])
wrong = values[chosen].mean(axis=0)  # equal logits: attention is the mean
right = values[chosen[chosen >= 0]].mean(axis=0)
print("attention over [0, -1, -1, -1]   right:", right, "  with -1 as an index:", wrong)
assert wrong[0] > 70 and right.tolist() == [1, 0], "a plausible number, from another row"

# %% [markdown]
# ## Ties are common: scores are bf16
#
# The released code stores every stage as a bf16 tensor: the dots, each head's share, the sum. A
# bf16 number has 8 significant bits, so 128 values from one power of two to the next. Score
# 16,384 random entries at the real sizes, 32 heads of 128 channels, with keys and queries in
# MXFP4. Count how many different scores are left, and how many entries share the score at the
# edge of the best 512.

# %%
from dsv41.formats import round_bf16
from dsv41.quant import INDEX_FP4


def scores_bf16(q, w, k):
    """The same as scores(), each stage stored as bf16."""
    dots = round_bf16((q.reshape(-1, q.shape[-1]) @ k.T).reshape(*q.shape[:2], len(k)))
    shares = round_bf16(np.maximum(dots, np.float32(0)) * w[:, :, None])
    return round_bf16(np.sum(shares, axis=1))


draw = np.random.default_rng(2)
T, I, J, N, K = 4, 32, 128, 16_384, 512
key = INDEX_FP4.fake(round_bf16(draw.standard_normal((N, J), np.float32)))  # (N, J)
query = INDEX_FP4.fake(round_bf16(draw.standard_normal((T, I, J), np.float32)))  # (T, I, J)
weight = round_bf16(draw.standard_normal((T, I), np.float32) / 64)  # (T, I)
exact, stored = scores(query, weight, key), scores_bf16(query, weight, key)  # (T, N)

print("query   different scores        share the 512th score   of them   same 512 entries")
print("        float32    bf16         float32   bf16          taken     as float32")
shared = []
for t in range(T):
    kth32, kth16 = np.sort(exact[t])[-K], np.sort(stored[t])[-K]
    shared.append(np.sum(stored[t] == kth16))
    taken = K - np.sum(stored[t] > kth16)
    agree = len(np.intersect1d(np.argsort(-exact[t])[:K], best(stored, np.full(T, N), K)[t])) / K
    print(f"{t:5}{len(np.unique(exact[t])):13}{len(np.unique(stored[t])):8}"
          f"{np.sum(exact[t] == kth32):15}{shared[-1]:7}{taken:15}{agree:15.1%}")  # fmt: skip
    assert len(np.unique(stored[t])) < N / 4, "most scores are somebody else's too"
    assert agree > 0.95, "what the rounding exchanges is little"
assert min(shared) > 1, "every query has a tie at the edge"

# %% [markdown]
# So a rule for ties is no luxury. Another kind of tie grows with *fewer* heads: the entry that
# no head matches scores exactly 0. With random signs that happens to about one entry in $2^I$.
# It is why a toy model with two heads ties at 0 all the time and the real one does not.

# %%
for heads in (1, 2, 4, 8, 32):
    zeros = np.mean(scores(query[:, :heads], weight[:, :heads], key) == 0)
    print(f"{heads:2} heads: {zeros:8.4%} of the scores are 0, expected {2.0**-heads:8.4%}")
    close(f"one entry in 2^{heads}", zeros, 2.0**-heads, within=2.0**-heads / 5 + 1e-6)

# %% [markdown]
# The weights carry a factor $(32 \cdot 128)^{-1/2}$. It changes no ranking, and no rounding
# either: it is a power of two.

# %%
same("the scale is 1/64", np.float32(32**-0.5 * 128**-0.5), np.float32(1 / 64))
same("and commutes with bf16", scores_bf16(query, weight * 64, key) / 64, stored)

# %% [markdown]
# ## Bytes and FLOPs of looking at everything
#
# A key is 128 channels in MXFP4: 64 bytes of codes and 4 of scales. Its score is one dot product
# per head. Compare one entry scanned with one entry attended to: 288 bytes, and 64 heads that
# meet 512 channels as a key and again as a value. FLOPs are weighted with the report's prices,
# bf16 1 and FP4 1/4; attention counts as bf16, scores as FP4.

# %%
key_bytes, main_bytes = 128 // 2 + 128 // 32, 512 // 2 + 512 // 16
scan = 2 * 32 * 128 / 4
attend = 2 * 64 * (512 + 512)
print(f"scan    {key_bytes:4} bytes {scan:9,.0f} FLOPs an entry")
print(f"attend  {main_bytes:4} bytes {attend:9,.0f} FLOPs an entry, {attend / scan:.0f} x as many")
same("an index key is 68 bytes", INDEX_FP4.record_bytes(128), key_bytes)
assert attend == 64 * scan, "64 entries are scanned for the price of attending to one"

context = 2 ** np.arange(8, 21)  # tokens, up to 1,048,576
entries = context // 2  # an encoder layer
everything = attend * (entries + 128)
sparse = scan * entries + attend * (np.minimum(entries, 512) + 128)
share = scan * entries / sparse
with figure("Scanning still grows with the text, 64 times slower than attending") as ax:
    for line, colour, name, height in (
        (everything, GREY, "attend to everything", 2.2),
        (sparse, BLUE, "scan all, attend to 512", 0.36),
        (scan * entries, ORANGE, "the scan alone", 0.2),
    ):
        ax.plot(context, line, color=colour, linewidth=2)
        at, side = {GREY: (8, "right"), BLUE: (6, "right"), ORANGE: (7, "left")}[colour]
        ax.text(context[at], line[at] * height, name, color=colour, ha=side, fontweight="bold")
    ax.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="weighted FLOPs")
    ax.set_xticks([2**8, 2**12, 2**16, 2**20], ["256", "4K", "64K", "1M"])
    ax.set_xticks([], minor=True)
    ax.grid(axis="y")
for n in (4096, 131_072, 1_048_576):
    at = int(np.log2(n)) - 8
    print(f"{n:9,} tokens: sparse is {sparse[at] / everything[at]:6.1%} of dense, ", end="")
    print(f"the scan {share[at]:5.1%} of it, {entries[at] * key_bytes / 1e6:5.2f} MB of keys")
assert share[-1] > 0.9 > 0.1 > share[4], "of scan and attention, the scan costs more in the end"

# %% [markdown]
# That is one layer. V4.1 has 40, and two ideas keep the scan small. Only eight layers score at
# all; the others use what a layer before them chose. And four of the eight score a pool of at
# most 16,384 entries that layer 20 picked (report, §2.3.2).

# %%
from dsv41.ledger import decode_flops, index_entries

n = 1_048_576
encoder, decoder, pooled = 3 * (n // 2), n, 4 * min(n, 2048 * 8)
print(f"layers 2, 8, 14       3 x {n // 2:9,} = {encoder:9,}")
print(f"layer 20              1 x {n:9,} = {decoder:9,}")
print(f"layers 24 to 36       4 x {2048 * 8:9,} = {pooled:9,}")
total = encoder + decoder + pooled
print(f"entries scored for one token at {n:,}: {total:,}")
print(f"keys read {total * key_bytes / 1e6:.0f} MB, scores {total * scan / 1e9:.2f} weighted GFLOP")
same("the ledger counts the same entries", index_entries("V4.1-Flash", n), total)
same("and the same FLOPs", decode_flops("V4.1-Flash", n).index, np.float64(total * scan))

# %% [markdown]
# ## How does it learn, when top-k has no gradient?
#
# A frequent question. Move a score a little: the same entries are chosen, attention gives the
# same output, the derivative is 0. Move it further: the choice jumps. Either way there is no
# slope for the language loss to follow.
#
# V3.2 gives the scores a loss of their own. Attention already says how much each chosen entry
# was worth: shares $a_j$ that sum to 1. Read the scores as a second distribution over the same
# entries, and pull it there:
#
# $$L = \sum_j a_j \log \frac{a_j}{\mathrm{softmax}(I)_j}, \qquad
# \frac{\partial L}{\partial I_j} = \mathrm{softmax}(I)_j - a_j$$
#
# Neither the V4 nor the V4.1 report spells out its indexer loss. This package uses V3.2's.
#
# *Must attention be dense first?* V4 was, for 1T tokens (its report, §4.2). V4.1 chooses from the
# first step on (§4.2.2), and so does the miniature of
# [chapter 19](19_training_the_miniature.ipynb).


# %%
def loss(I, a):
    log_p = I - I.max() - np.log(np.sum(np.exp(I - I.max())))
    return np.sum(a * (np.log(a) - log_p))


I = np.array([0.2, 1.5, -0.3, 0.9])
a = np.array([0.4, 0.1, 0.3, 0.2])
step = 1e-6
choice, slope = [], []
for j in range(4):
    up, down = I.copy(), I.copy()
    up[j] += step
    down[j] -= step
    both = [best(x[None], np.array([4]), 2)[0] for x in (up, down)]
    choice.append(np.abs(both[0] - both[1]).sum() / (2 * step))
    slope.append((loss(up, a) - loss(down, a)) / (2 * step))
formula = np.exp(I) / np.exp(I).sum() - a
print("slope of the choice  ", *(f"{c:7.3f}" for c in choice))
print("slope of the loss    ", *(f"{s:7.3f}" for s in slope))
print("softmax(I) - a       ", *(f"{s:7.3f}" for s in formula))
assert choice == [0, 0, 0, 0], "a small step does not change the choice"
near, far = (best((I + d * np.eye(4)[0])[None], np.array([4]), 2)[0] for d in (0.6, 0.8))
print("best two with I[0] + 0.6:", near, "  with I[0] + 0.8:", far)
assert near.tolist() == [1, 3] and far.tolist() == [0, 1], "a larger one makes it jump"
close("the formula is the slope of the loss", slope, formula, within=1e-8)

# %% [markdown]
# Behind $I$ the chain rule is ordinary. With $G_j = \partial L / \partial I_j$, the head's
# weight gets $\sum_j G_j\,\mathrm{relu}(q_a \cdot k_j)$, and its query $\sum_j G_j w_a k_j$ over
# the entries where the relu is open. The gradient stops inside the indexer. Train one query with
# eight heads on 32 chosen entries, and see whether its best 4 become those that attention liked
# best.

# %%
draw = np.random.default_rng(3)
k = draw.standard_normal((32, 16))  # (N, J)
q, w = draw.standard_normal((8, 16)) / 4, draw.standard_normal(8) / 8  # (I, J), (I,)
a = np.exp(2 * draw.standard_normal(32))
a /= a.sum()
wanted = set(np.argsort(-a)[:4].tolist())
losses, hits = [], []
for _ in range(401):
    dots = q @ k.T  # (I, N)
    I = w @ np.maximum(dots, 0)  # (N,)
    losses.append(loss(I, a))
    hits.append(len(wanted & set(np.argsort(-I)[:4].tolist())))
    G = np.exp(I - I.max()) / np.exp(I - I.max()).sum() - a  # (N,)
    ddots = G * w[:, None] * (dots > 0)  # (I, N)
    w, q = w - 0.1 * np.maximum(dots, 0) @ G, q - 0.1 * ddots @ k
for at in (0, 50, 100, 200, 400):
    print(f"step {at:3}: loss {losses[at]:.3f}, {hits[at]} of the 4 best found")
assert losses[-1] < losses[0] / 4, "the scores move toward the attention"
assert hits[0] < hits[-1] == 4, "and the best k with them"

# %% [markdown]
# ## The module gives the same numbers
#
# [index_scores](../dsv41/indexer.py#index_scores) is our `scores_bf16`, read from 68-byte
# records. [index_topk](../dsv41/indexer.py#index_topk) is our `best`, without sorting: it finds
# the k-th score, keeps what is above, and fills up from the left. Then the loss and the
# gradients.

# %%
from dsv41.indexer import index_scores, index_topk
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.train.indexer import index_scores_backward
from dsv41.train.losses import index_loss

records = INDEX_FP4.encode(key)  # (N, 68) uint8
same("scores as the release rounds them", index_scores(query, weight, records, OFFICIAL), stored)
same("six keys by hand", index_scores(q2, w2, k2, FLOAT32)[0], by_hand)
same("top-k of ties", index_topk(many, counts, 8), best(many, counts, 8))
everything_visible = np.full(T, N)
ours = best(stored, everything_visible, K)
same("512 of 16,384", index_topk(stored, everything_visible, K), ours)

valid = np.ones((1, 32), bool)
module_loss, module_G = index_loss(I[None], valid, a[None])
close("the loss", module_loss[0], losses[-1], within=1e-12)
close("its slope", module_G[0], G, within=1e-12)
q1, w1 = draw.standard_normal((8, 16)), draw.standard_normal(8)
dq, dw, _ = index_scores_backward(G[None], q1[None], w1[None], k[None], FLOAT32)
dots = q1 @ k.T
close("gradient of the weights", dw[0], np.maximum(dots, 0) @ G, within=1e-12)
close("gradient of the queries", dq[0], (G * w1[:, None] * (dots > 0)) @ k, within=1e-12)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. A long scan is split over many processors: each finds the best k of its part, then the parts
#    are merged. Merge two. The result must be that of one scan, ties included.
# 2. How many bytes of index keys does the next token read, all eight scoring layers together,
#    when the context is `n` tokens long? Mind odd `n` and short texts.
# 3. A gradient step needs $\partial L / \partial k_j$ as well: one key is shared by all heads.
#    Derive it from $G$ for one query. The relu is closed at a dot of exactly 0.


# %% tags=["exercise"]
def merge(left, left_scores, right, right_scores, k):
    """left, right: entry numbers, ascending, all of left before all of right; scores f32 beside
    them -> (k,) int, the best k of both, ascending"""
    return ...


check("05.merge", merge)


# %% tags=["exercise"]
def scanned_bytes(n):
    """n tokens of context -> int, bytes of index keys"""
    return ...


check("05.scanned_bytes", scanned_bytes)


# %% tags=["exercise"]
def key_gradient(G, q, w, k):
    """G (N,), q (I, J), w (I,), k (N, J), all f64 -> (N, J)"""
    return ...


check("05.key_gradient", key_gradient)

# %% [markdown]
# ## What we learned
#
# - A score is a weighted sum of relus. Weights may be negative; the relu belongs to each head.
# - An entry is visible once its last token is there: $\lfloor (t+1)/m \rfloor$ of them.
# - Scores are bf16 and tie. Higher score, then lower entry, ascending, padded with −1; −1 is no
#   index.
# - 68 bytes and 2,048 weighted FLOPs an entry: 64 times cheaper than attending, and still 93 %
#   of scan and attention in an encoder layer at a million tokens.
# - Choosing has no gradient. The scores learn from the attention that the chosen entries got.
#
# Worked solutions: [solutions/05_indexer_topk.py](solutions/05_indexer_topk.py). Next: [06 Sparse
# attention as a gather](06_sparse_attention.ipynb). All chapters: [README.md](README.md).
