# %% [markdown]
# # 08 · The candidate pool
#
# **Five layers each choose 512 of a million entries. How do four of them do it without reading a
# million keys?**
#
# In DeepSeek-V4.1-Flash, layer 20 scores every entry that a token can see. Layers 24, 28, 32 and
# 36 choose anew, with queries of their own. They score 16,384 entries at most: the *candidate
# pool*, blocks that layer 20 found promising. This is the hierarchical indexer. This chapter
# builds the pool by hand, shows what its one exception is for, and measures what it can lose.
#
# You need NumPy and the score of [chapter 05](05_indexer_topk.ipynb). Which layer does what is
# [chapter 07](07_csa2.ipynb). 20 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/08_candidate_pool.py`.
#
# Sources: the V4.1 report, §2.3.2; config.json and `Indexer` in the released inference/model.py.
# The module that this page arrives at: [indexer.py](../dsv41/indexer.py).

# %%
import numpy as np

from lib.page import (
    BLUE,
    FAINT,
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
# ## Score blocks, keep the best, choose inside
#
# A query sees the first $v$ entries. Cut all entries into blocks of $n$ neighbours. A block counts
# by its best visible entry, and the block of the newest visible entry counts as infinite:
#
# $$b_B = \max_{j \in B,\ j < v} I_j, \qquad b_{\lfloor (v - 1) / n \rfloor} = \infty$$
#
# The best blocks, as many as the *budget* says, are the pool. A later layer has its own scores
# $I'$ and takes the best $k$ entries of the pool: higher score first, then the lower number.
#
# Twelve scores, blocks of 2, a budget of 2 blocks, $k = 3$. For now $I' = I$. The scores 9.9 at the
# end are bait: no query here sees them.

# %%
SCORES = [0.9, 0.1, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5, -5, -6, 9.9, 9.9]
INF = float("inf")


def best_of(numbers, k):
    """-> where the k best numbers are, ascending; -inf is never taken."""
    order = sorted((-number, i) for i, number in enumerate(numbers) if number > -INF)
    return sorted(i for _, i in order[:k])


def block_list(scores, visible, size, pinned=True):
    """scores of one query -> one number per block."""
    found = []
    for start in range(0, len(scores), size):
        seen = scores[start : min(start + size, visible)]
        found.append(max(seen, default=-INF))
    if pinned and visible:
        found[(visible - 1) // size] = INF
    return found


def choose(own, kept, visible, size, k):
    """The k best visible entries of the blocks `kept`, ascending, padded with -1."""
    entries = [j for block in kept for j in range(block * size, (block + 1) * size) if j < visible]
    chosen = [entries[i] for i in best_of([own[j] for j in entries], k)]
    return chosen + [-1] * (k - len(chosen))


results = {}
for visible in (9, 8, 1):
    b = block_list(SCORES, visible, 2)
    kept = best_of(b, 2)
    results[visible] = kept, choose(SCORES, kept, visible, 2, 3)
    print(f"sees {visible}: block scores", " ".join(f"{x:4}" for x in b), end="")
    print(f"   pool {kept!s:6}  chosen {results[visible][1]}")

assert results[9] == ([0, 4], [0, 1, 8]), "nine visible: the pinned block 4 takes one of two places"
assert results[8] == ([0, 3], [0, 6, 7]), "eight visible: block 3 is pinned"
assert results[1] == ([0], [0, -1, -1]), "one visible: a pool of one block with one legal entry"
everything = choose(SCORES, range(6), 9, 2, 3)
print("without a pool, sees 9:", everything)
assert everything == [0, 3, 5], "the full choice"

# %% [markdown]
# The pool costs something: 3 and 5 are better entries than 1 and 8. It cannot be seen in short
# texts, because there the budget covers all blocks.
#
# Now all queries at once. One trap hides in the pin: with nothing visible, $(v - 1) / n$ rounds to
# −1. Used as an index, −1 pins the *last* block. Compared with block numbers, it matches none.


# %%
from dsv41.indexer import index_topk


def block_scores(scores, visible, size, pinned=True):
    """scores (T, N) f32, visible (T,) -> (T, B) f32"""
    rows, count = scores.shape
    blocks = -(-count // size)
    padded = np.full((rows, blocks * size), -np.inf, np.float32)
    padded[:, :count] = np.where(np.arange(count) < visible[:, None], scores, -np.inf)
    best = padded.reshape(rows, blocks, size).max(axis=2)  # (T, B)
    is_newest = np.arange(blocks) == ((visible - 1) // size)[:, None]
    return np.where(is_newest & pinned, np.float32(np.inf), best)


def top(scores, k):
    """scores (T, N) -> (T, k) ascending, padded with -1; -inf is never taken (chapter 05)"""
    return index_topk(scores, np.full(len(scores), scores.shape[1]), k)


def pool_of(scores, visible, size, budget, pinned=True):
    return top(block_scores(scores, visible, size, pinned), budget)  # (T, budget)


def choose_all(own, kept, visible, size, k):
    """own (T, N), kept (T, budget) -> (T, k) entry numbers"""
    entries = (kept[:, :, None] * size + np.arange(size)).reshape(len(kept), -1)  # (T, budget n)
    legal = (entries >= 0) & (entries < visible[:, None])
    scores = np.take_along_axis(own, np.clip(entries, 0, own.shape[1] - 1), axis=1)
    column = top(np.where(legal, scores, -np.inf), k)
    return np.where(column < 0, -1, np.take_along_axis(entries, np.maximum(column, 0), axis=1))


rng = np.random.default_rng(1)
scores, own = rng.integers(-3, 4, (2, 60, 45)).astype(np.float32)  # full of ties
visible = np.arange(60) % 46  # 0 is among them
kept = pool_of(scores, visible, 4, 3)
chosen = choose_all(own, kept, visible, 4, 5)
for t in range(60):
    blocks = best_of(block_list(scores[t].tolist(), visible[t], 4), 3)
    assert [b for b in kept[t] if b >= 0] == blocks, f"pool of query {t}"
    assert chosen[t].tolist() == choose(own[t], blocks, visible[t], 4, 5), f"choice of query {t}"
print("60 pools and 60 choices, one by one = all at once")
same("nothing visible, nothing kept", kept[visible == 0], np.full((2, 3), -1))

# %% [markdown]
# ## Two masks, for two reasons
#
# An entry from the future must be masked twice. In the block score, or it buys its block a place.
# In the choice, or it is returned: the newest block is kept whole, and reaches beyond the newest
# entry.
#
# **Break it, twice.** Leave out one mask, then the other.

# %% tags=["break"]
unmasked = [max(SCORES[start : start + 2]) for start in range(0, 12, 2)]
unmasked[(9 - 1) // 2] = INF
kept = best_of(unmasked, 2)
stolen = choose(SCORES, kept, 9, 2, 3)
print(f"sees 9   right: pool {results[9][0]} chosen {results[9][1]}")
print(f"         no mask in the block score: pool {kept} chosen {stolen}")
leaked = choose(SCORES, [0], 2, 2, 3)  # as if both entries of block 0 were visible
print(f"sees 1   right: pool {results[1][0]}    chosen {results[1][1]}")
print(f"         no mask in the choice:      pool [0]    chosen {leaked}")
assert stolen == [8, -1, -1], "block 5 is invisible, but its place in the pool is gone"
assert leaked == [0, 1, -1], "entry 1 lies in the future"

rng = np.random.default_rng(2)
scores = rng.standard_normal((200, 96)).astype(np.float32)
visible = rng.integers(0, 97, 200)
future = np.arange(96) >= visible[:, None]
bait = np.where(future, np.float32(1e9), scores)
before, after = (choose_all(s, pool_of(s, visible, 8, 4), visible, 8, 6) for s in (scores, bait))
same("with both masks, the future can score what it likes", after, before)
assert np.all(after < visible[:, None]), "no entry from there on, in 200 queries"

# %% [markdown]
# ## Why pin the newest block?
#
# The later layers have other queries. Whatever they look for, they should find the nearest
# history. Without the pin, layer 20 alone decides whether they may.
#
# **Break it.** No pin. With independent scores the newest block survives as often as any other:
# budget / blocks. So the error grows with the context, and a short test cannot see it.

# %% tags=["break"]
size, budget, queries = 8, 32, 400
without = block_list(SCORES, 9, 2, pinned=False)
print("the twelve scores, sees 9, no pin: pool", best_of(without, 2), end="  ")
print("chosen", choose(SCORES, best_of(without, 2), 9, 2, 3))
assert choose(SCORES, best_of(without, 2), 9, 2, 3) == [0, 2, 3], "entry 8 is out of reach"

print("entries  blocks  newest block in the pool: pinned  not pinned  budget / blocks")
rng = np.random.default_rng(3)
for blocks in (16, 32, 64, 128, 512):
    scores = rng.standard_normal((queries, blocks * size)).astype(np.float32)
    visible = np.full(queries, blocks * size)
    share = {}
    for pinned in (True, False):
        kept = pool_of(scores, visible, size, budget, pinned)
        share[pinned] = np.mean((kept == blocks - 1).any(axis=1))
    expected = min(1, budget / blocks)
    print(f"{blocks * size:7}  {blocks:6}  {share[True]:32.2f}  {share[False]:10.2f}", end="")
    print(f"  {expected:15.2f}")
    assert share[True] == 1, "pinned: always"
    assert abs(share[False] - expected) < 0.1, "not pinned: by chance"

# %% [markdown]
# ## The pool of a model, token by token
#
# A nine-layer model with stored random weights has the same parts: layer 5 publishes a pool of 4
# blocks of 4, layer 7 consumes it, both choose 6. Run 72 tokens and compare the trace with our
# functions. At this ratio every token is one entry, so token $t$ sees $t + 1$.

# %%
import dsv41

checkpoint = ROOT / "tests/golden/v41_tiny_a"
model = dsv41.load(checkpoint)
ids = np.load(checkpoint / "prompt_bf16q.npz")["ids"][0, :72]
trace = {}
model.logits(ids, trace=trace)
score5, score7 = trace["L05.idx.score"], trace["L07.idx.score"]  # (T, N), -inf: not scored
visible = np.arange(72) + 1

same("layer 5: block scores", block_scores(score5, visible, 4), trace["L05.cand.block_score"])
kept = pool_of(score5, visible, 4, 4)  # (T, 4)
mask = (kept[:, :, None] == np.arange(72) // 4).any(axis=1)  # (T, N)
same("layer 5: the pool", mask, trace["L05.cand.mask"])
same("layer 5 chooses among all entries", top(score5, 6), trace["L05.idx.topk"])
same("layer 7 chooses in the pool", choose_all(score7, kept, visible, 4, 6), trace["L07.idx.topk"])
scored = np.array([np.sum(s > -np.inf, axis=1) for s in (score5, score7)])
for t in (3, 15, 16, 17, 61, 71):
    print(f"token {t:2}: layer 5 scores {scored[0, t]:2}, layer 7 {scored[1, t]:2}", end="  ")
    print("pool", kept[t])
assert scored[1].max() == 4 * 4, "layer 7 never scores more than budget x size"
same("13, 14, 15, 16 from token 16 on, again and again", scored[1, 16:],
     np.tile([13, 14, 15, 16], 14))  # fmt: skip

# %% [markdown]
# Layer 7's count stops growing. It moves between 13 and 16, because the newest block fills up one
# entry at a time. Each token has its *own* pool: in the figure a column is a token.

# %%
from matplotlib.colors import to_rgb

with figure("Each token keeps 4 blocks of 4; the newest is always one of them") as ax:
    newest = np.arange(72) // 4 == (np.arange(72) // 4)[:, None]  # (T, N)
    picture = np.ones((72, 72, 3))
    seen = np.arange(72) < visible[:, None]
    for where, colour in ((seen, FAINT), (seen & mask, BLUE), (seen & newest, ORANGE)):
        picture[where] = to_rgb(colour)
    ax.imshow(picture.swapaxes(0, 1), origin="lower", aspect="auto", interpolation="nearest")
    t, at = np.nonzero(trace["L07.idx.topk"] >= 0)
    ax.plot(t, trace["L07.idx.topk"][t, at], ".", color="white", markersize=1.8)
    ax.text(2, 62, "newest block", color=ORANGE, fontweight="bold")
    ax.text(2, 54, "other blocks of the pool", color=BLUE, fontweight="bold")
    ax.text(2, 46, "visible, not in the pool", color=GREY, fontweight="bold")
    ax.text(2, 38, "white dots: layer 7's choice", color=INK)
    ax.set(xlabel="token", ylabel="entry")

# %% [markdown]
# Does the pin matter to this model? Take it away, and count the tokens that lose their newest
# block, among those that see more than 4 blocks.

# %%
free = pool_of(score5, visible, 4, 4, pinned=False)
many = np.arange(72) >= 16
lost = many & ~(free == (np.arange(72) // 4)[:, None]).any(axis=1)
picked = (trace["L07.idx.topk"] // 4 == (np.arange(72) // 4)[:, None]) & (
    trace["L07.idx.topk"] >= 0
)
print(f"{many.sum()} tokens see more than 4 blocks; without the pin {lost.sum()} lose the newest")
print(f"of these, {np.sum(lost & picked.any(axis=1))} have entries of it in layer 7's choice")
assert np.any(lost & picked.any(axis=1)), "the pin changes what layer 7 reads"

# %% [markdown]
# ## Why the best entry, and not the average?
#
# Layer 20 itself chooses among *all* entries, not in its pool. For it the two are the same choice.
# Each block that ranks before the block of a chosen entry holds a better entry (or an equal one
# with a lower number). So the $k$ chosen entries lie in the best $k$ blocks, and with one place for
# the pin:
#
# $$\text{budget} > k \;\Rightarrow\; \text{the source's own top-}k \text{ lies in the pool}$$
#
# Released: 2,048 > 512. In the twelve scores the budget was 2 and $k$ was 3: that is why the pool
# could lose something with $I' = I$.
#
# **Break it.** Rank blocks by their mean. A single strong entry between weak ones drowns.


# %% tags=["break"]
def outside(choice, kept, size):
    """How many chosen entries lie in no kept block."""
    inside = (choice[:, :, None] // size == kept[:, None, :]).any(axis=2)  # (T, k)
    return int(np.sum((choice >= 0) & ~inside))


rng = np.random.default_rng(4)
scores = rng.standard_normal((100, 1024)).astype(np.float32).round(1)  # ties
visible = np.full(100, 1024)
means = scores.reshape(100, 128, 8).mean(axis=2)
means[:, -1] = np.inf  # pinned too
wanted = top(scores, 16)
print("budget  top-16 outside, of 1,600:   by maximum   by mean")
for budget in (8, 16, 17, 32):
    by_max, by_mean = pool_of(scores, visible, 8, budget), top(means, budget)
    counts = outside(wanted, by_max, 8), outside(wanted, by_mean, 8)
    print(f"{budget:6}  {counts[0]:38}  {counts[1]:8}")
    assert counts[0] == 0 or budget <= 16, "by maximum nothing is outside once budget > k"
    assert counts[1] > 100, "by mean, hundreds are"

# %% [markdown]
# ## What does a consumer lose?
#
# A later layer has other scores, so it can lose entries. How many? It depends on two things: how
# much the two layers agree, and whether good entries are neighbours. We have no scores of the
# released model here; make some. *Scattered*: every entry independent. *Clustered*: running means
# of 32 neighbours, so good entries come in runs, and the runs ignore the block edges. The
# consumer's scores are the source's with correlation $\rho$:
#
# $$I' = \rho\, I + \sqrt{1 - \rho^2}\; \text{(fresh scores of the same kind)}$$
#
# Recall is the share of the full top-$k$ of $I'$ that the pool still gives. 8,192 entries, a pool
# of one eighth (128 blocks of 8), $k = 64$.


# %%
def scattered(rng, rows, count):
    return rng.standard_normal((rows, count)).astype(np.float32)


def clustered(rng, rows, count, run=32):
    sums = np.cumsum(rng.standard_normal((rows, count + run)), axis=1)
    return ((sums[:, run:] - sums[:, :-run]) / np.sqrt(run)).astype(np.float32)


def recall_in_pool(scores, own, size, budget, k):
    visible = np.full(len(scores), scores.shape[1])
    full = top(own, k)
    got = choose_all(own, pool_of(scores, visible, size, budget), visible, size, k)
    return np.mean((full[:, :, None] == got[:, None, :]).any(axis=2))


agreement = np.round(np.arange(0, 1.01, 0.1), 1)
recall, blocks_used = {}, {}
rng = np.random.default_rng(5)
for make in (scattered, clustered):
    scores, fresh = make(rng, 64, 8192), make(rng, 64, 8192)
    mixed = [np.float32(r) * scores + np.float32(np.sqrt(1 - r * r)) * fresh for r in agreement]
    blocks_used[make.__name__] = np.mean([len(set(row // 8)) for row in top(scores, 64)])
    recall[make.__name__] = [recall_in_pool(scores, own, 8, 128, 64) for own in mixed]
print("correlation  ", "  ".join(f"{r:4.1f}" for r in agreement), "     blocks")
for name, values in recall.items():
    print(f"{name:12} ", "  ".join(f"{v:4.2f}" for v in values), f"  {blocks_used[name]:9.1f}")
close("no agreement: the pool's share of all entries", [v[0] for v in recall.values()],
      [1 / 8] * 2, within=0.03)  # fmt: skip
same("full agreement: nothing is lost", [v[-1] for v in recall.values()], [1.0, 1.0])
assert blocks_used["scattered"] > 2.5 * blocks_used["clustered"], "runs need fewer blocks"
assert recall["clustered"][8] > recall["scattered"][8] + 0.15, "runs of good entries help at 0.8"

# %%
with figure("Good entries that come in runs survive the pool") as ax:
    for name, colour, place in (
        ("clustered", BLUE, (0.5, 0.78)),
        ("scattered", ORANGE, (0.8, 0.45)),
    ):
        ax.plot(agreement, recall[name], "o-", color=colour, markersize=4)
        ax.text(*place, name, color=colour, fontweight="bold")
    ax.axhline(1 / 8, color=GREY, linewidth=1, linestyle=":")
    ax.text(1, 0.06, "pool / entries", color=GREY, ha="right", va="center")
    ax.set(xlabel="correlation of the two layers' scores", ylabel="recall of the full top-64")
    ax.set(xlim=(-0.02, 1.02), ylim=(0, 1.05))
    ax.grid(axis="y")

# %% [markdown]
# The last column says why: it counts the blocks that hold a top-64 of the source. Scattered, these
# are nearly as many as entries; clustered, a third of that, so the same budget has more places to
# spare. The report (§2.3.2) adds the pool in post-training and uses it in training and inference
# alike: layers 24 to 36 learn with it.
#
# ## Count what is scored
#
# At 1,048,576 tokens. Three encoder layers score an entry per two tokens, layer 20 one per token,
# four consumers the pool.

# %%
from dsv41 import ledger
from dsv41.presets import preset

real = preset("v4.1-flash")
no_pool = real.but(candidate_source_layer_id=None)
size, budget = real.candidate_block_size, real.candidate_topk_blocks
print(f"{budget:,} blocks of {size} = {budget * size:,} entries")
print("  context      with pool   without   share of the pool's layers")
for n in (4096, 16_384, 131_072, 1_048_576):
    consumers = 4 * min(n, budget * size)
    total, other = 3 * (n // 2) + n + consumers, 3 * (n // 2) + n + 4 * n
    print(f"{n:9,}  {total:13,} {other:9,}   {consumers / total:10.1%}")
    same(f"the ledger at {n:,}", [ledger.index_entries(c, n) for c in (real, no_pool)],
         [total, other])  # fmt: skip
same("at 1M: with the pool, and without", [total, other], [2_686_976, 6_815_744])
print(f"bytes of keys read for one token, 68 each: {total * 68:,}, without {other * 68:,}")
print(f"one consumer: {budget * size * 68:,} instead of {n * 68:,}; one block: {size * 68}")

# %%
with figure("The pool ends the growth of four layers out of eight") as ax:
    contexts = np.arange(0, 1_048_577, 8192)
    for config, colour, text, place in (
        (no_pool, ORANGE, "without the pool", (330, 4.4)),
        (real, BLUE, "with the pool", (760, 1.25)),
    ):
        entries = np.array([ledger.index_entries(config, int(n)) for n in contexts[1:]])
        ax.plot(contexts[1:] / 1024, entries / 1e6, color=colour, linewidth=2)
        ax.text(*place, text, color=colour, fontweight="bold")
        ax.text(1034, entries[-1] / 1e6, f"{entries[-1] / 1e6:.2f}M", color=colour, va="center")
    ax.plot(contexts / 1024, 4 * np.minimum(contexts, 16_384) / 1e6, color=GREEN, linewidth=2)
    ax.text(1034, 0.22, "0.07M", color=GREEN, va="center")
    ax.text(500, 0.25, "of these, in the four pooled layers", color=GREEN, fontweight="bold")
    ax.set(xlabel="context, thousands of tokens (1,024)", ylabel="entries scored, millions")
    ax.set(xlim=(0, 1140), ylim=(0, 7.2), xticks=range(0, 1025, 128))
    ax.grid(axis="y")

# %% [markdown]
# Up to 16,384 entries the two lines are one: the pool holds everything. What still grows is
# layer 20 and the encoder.
#
# Blocks instead of single entries make the pool cheap to hand on and to read. A list of 2,048
# numbers per token, not 16,384. And each block is one run of 8 keys, 544 bytes, in place of 8
# reads of 68.
#
# ## The module gives the same numbers
#
# [block_scores](../dsv41/indexer.py#block_scores),
# [candidate_blocks](../dsv41/indexer.py#candidate_blocks),
# [pool_entries](../dsv41/indexer.py#pool_entries) and
# [pool_topk](../dsv41/indexer.py#pool_topk), at the released sizes. 16,384 visible entries are the
# last number at which nothing is dropped.

# %%
from dsv41 import indexer

rng = np.random.default_rng(6)
scores, own = rng.standard_normal((2, 5, 20_000)).astype(np.float32).round(2)  # ties
visible = np.array([0, 1, 16_384, 16_385, 20_000])
kept = pool_of(scores, visible, 8, 2048)
blocks = indexer.candidate_blocks(scores, visible, 8, 2048)
same("block_scores", indexer.block_scores(scores, visible, 8), block_scores(scores, visible, 8))
same("candidate_blocks", blocks, kept)
entries = indexer.pool_entries(blocks, 8)  # (T, 16384)
of_pool = np.take_along_axis(own, np.maximum(entries, 0), axis=1)
chosen = choose_all(own, kept, visible, 8, 512)
same("pool_topk", indexer.pool_topk(of_pool, entries, visible, 512), chosen)
full = indexer.index_topk(own, visible, 512)
same("up to 16,384 entries: the full choice", chosen[:3], full[:3])
used = np.sum((entries >= 0) & (entries < visible[:, None]), axis=1)
print("sees     ", "  ".join(f"{v:6,}" for v in visible))
print("in pool  ", "  ".join(f"{v:6,}" for v in used))
assert used[3] == 16_385 - 8, "one entry more, and a whole block goes"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. How many visible entries are *not* in the pool? All scores are finite. Mind a newest block that
#    is not full: it is in the pool, and it holds fewer entries than the others.
# 2. Recall of one query: the share of `want` that is also in `got`. Both lists are padded with −1,
#    and −1 is no entry. If nothing is wanted, nothing is lost: 1.
# 3. Which entries lie in the pool, without writing the pool's entries out? Both lists may contain
#    −1. Print `-1 // 8` first.


# %% tags=["exercise"]
def dropped(visible, size, budget):
    """int, int, int -> int"""
    return ...


check("08.dropped", dropped)


# %% tags=["exercise"]
def recall_of(got, want):
    """got (k,) int, want (k,) int, both padded with -1 -> float"""
    return ...


check("08.recall_of", recall_of)


# %% tags=["exercise"]
def in_pool(entries, blocks, size):
    """entries (K,) int, -1 among them, blocks (B,) int padded with -1 -> (K,) bool"""
    return ...


check("08.in_pool", in_pool)

# %% [markdown]
# ## What we learned
#
# - A block counts by its best visible entry. The best 2,048 blocks of 8 are a token's pool; four
#   layers choose their 512 there, with their own queries and layer 20's keys.
# - The newest block is pinned. Without the pin the nearest history is lost by chance, and only in
#   long contexts.
# - The future is masked in the block score and again in the choice.
# - The maximum keeps the source's own top-k inside whenever budget > k. The mean does not.
# - What a consumer loses depends on agreement and on runs of good entries.
# - 2,686,976 entries scored at 1M instead of 6,815,744; nothing changes up to 16,384.
#
# Worked solutions: [solutions/08_candidate_pool.py](solutions/08_candidate_pool.py). Next: [09
# Causal encoder–decoder](09_causal_encoder_decoder.ipynb). All chapters: [README.md](README.md).
