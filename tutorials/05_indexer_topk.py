# %% [markdown]
# # 05 · The lightning indexer and top-k
#
# **Which 512 of half a million entries does a token read, and what does it cost to find them?**
#
# A global layer of DeepSeek-V4.1-Flash attends to 512 compressed entries, however long the text is.
# A small network, the indexer, scores all of them first. This chapter computes a score by hand,
# picks the best k with a rule for ties, counts bytes and FLOPs, and trains the indexer although
# picking has no gradient.
#
# You need NumPy and [chapter 01](01_number_formats.ipynb) for bf16 and MXFP4. 25 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/05_indexer_topk.py`.
#
# Sources: the V4.1 report, §2.3, and `Indexer` in the released `inference/model.py`; the V3.2 report
# for the loss. The module that this page arrives at: [indexer.py](../dsv41/indexer.py).

# %%
import numpy as np

from lib.page import BLUE, FAINT, GREEN, GREY, INK, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## One score, by hand
#
# Query $t$ has a few small heads $q_{t,a}$ and a weight $w_{t,a}$ for each. Entry $j$ has **one**
# key $k_j$, shared by all heads. The score is
#
# $$I_{t,j} = \sum_a w_{t,a} \cdot \mathrm{relu}(q_{t,a} \cdot k_j)$$
#
# A head is a detector: it is silent (0) or says how strongly it matches. The weight says whether a
# match is wanted. Weights are plain linear outputs, so **they may be negative**: such a head votes
# against what it finds. Two heads, five keys:

# %%
q = [[1, -1], [2, 1]]
w = [1, -0.5]
keys = {"A": [-1, 1], "B": [1, 1], "C": [2, 0], "D": [1, -2], "E": [-2, -3]}

by_hand = []
print("key        dots      after relu   score")
for name, k in keys.items():
    dots = [sum(a * b for a, b in zip(head, k, strict=True)) for head in q]
    matched = [max(0, d) for d in dots]
    by_hand.append(sum(weight * d for weight, d in zip(w, matched, strict=True)))
    print(f"{name} {k!s:8}  {dots[0]:3} {dots[1]:3}    {matched[0]:3} {matched[1]:3}    {by_hand[-1]:6}")

assert by_hand == [0, -1.5, 0, 3, 1], "five scores by hand"

# %% [markdown]
# A and C tie at exactly 0, for two reasons: A matches nothing, in C the heads cancel. B is matched
# only by the head that votes against it and falls below both.
#
# All queries, heads and keys at once: one matrix product, then a weighted sum over heads.


# %%
def scores(q, w, k):
    """q (T, I, J), w (T, I), k (N, J) -> (T, N) f32"""
    dots = q @ k.T  # (T, I, N)
    return np.sum(np.maximum(dots, np.float32(0)) * w[:, :, None], axis=1)


q2, w2 = np.float32([q]), np.float32([w])  # (1, 2, 2), (1, 2)
k2 = np.float32(list(keys.values()))  # (5, 2)
same("all keys at once = one by one", scores(q2, w2, k2)[0], by_hand)

# %% [markdown]
# **Break it, twice.** Drop the relu, and $\sum_a w_a q_a$ becomes one vector: all heads together are
# one dot product, 32 heads worth as much as one. Or move the relu behind the sum: a vote against an
# entry then ends at 0 like no match at all, and the two can no longer be told apart.

# %% tags=["break"]
dots = q2 @ k2.T  # (1, 2, 5)
without = np.sum(dots * w2[:, :, None], axis=1)[0]
behind = np.maximum(without, 0)
print("key              " + "".join(f"{name:>6}" for name in keys))
for title, row in (("right", np.array(by_hand)), ("no relu", without), ("relu behind sum", behind)):
    best = sorted(np.argsort(-row, kind="stable")[:2])
    print(f"{title:16} " + "".join(f"{v + 0.0:6}" for v in row) + "   best two " + "ABCDE"[best[0]]
          + "ABCDE"[best[1]])  # fmt: skip

one_vector = np.float32(w) @ np.float32(q)  # (2,)
same("without relu the heads are one vector", without, k2 @ one_vector)
assert sorted(np.argsort(-without)[:2]) != [3, 4], "another entry is chosen, and nothing fails"
assert by_hand[1] < by_hand[0] and behind[1] == behind[0], "a vote against looks like no match"

# %% [markdown]
# With few entries you do not notice: top-k takes all of them, whatever their scores. The ranking
# counts only when there is something to leave out.
#
# ## What a query may see
#
# Entry $j$ is made of tokens $jm \ldots jm+m-1$. Query $t$ may see it when its last token is not in
# the future:
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

t, j = np.arange(12)[:, None], np.arange(12)
with figure("A query sees an entry once its last token is there", columns=2) as ax:
    for axis, m in zip(ax, (1, 2), strict=True):
        entries = 12 // m
        seen = j[:entries] < visible(t, m)  # (12, 12 / m)
        for row, column in np.ndindex(seen.shape):
            x, colour = column * m, BLUE if seen[row, column] else FAINT
            axis.add_patch(_box := __import__("matplotlib").patches.Rectangle(
                (x + 0.06, row + 0.08), m - 0.12, 0.84, color=colour, lw=0))  # fmt: skip
