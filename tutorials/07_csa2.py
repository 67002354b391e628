# %% [markdown]
# # 07 · CSA2: Full, Reindex, Reuse
#
# **38 layers read compressed entries of the whole context. Who owns the KV, and who owns the
# indices?**
#
# DeepSeek-V4.1-Flash has 40 layers. Two see a window only. The other 38 also read entries from far
# back. If each stored its own entries, a token would cost 10,324 bytes. It costs 890. This chapter
# shows which layer writes, which layer chooses, and which layer only reads.
#
# You need NumPy and the idea of attention. Chapters 05 and 06 explain the score and the gather;
# here both are imported. 20 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/07_csa2.py`.
#
# Sources: the V4.1 report, §2.3.1, for the three modes; config.json and `Attention` in the released
# inference/model.py for the plan. The modules that this page arrives at:
# [plan.py](../dsv41/plan.py) and [csa2.py](../dsv41/csa2.py).

# %%
from unittest import mock

import numpy as np

from lib.page import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    ROOT,
    check,
    close,
    figure,
    same,
    versions,
)

versions("matplotlib")

# %% [markdown]
# ## Two lists and one rule
#
# The config names two sets of layers: $K$, which make KV, and $I$, which make a choice of entries.
# A layer $L$ that compresses ($m_L > 0$ tokens per entry) reads from the nearest one at or before
# it:
#
# $$\text{KV}(L) = \max\{s \in K : s \le L\}, \qquad
# \text{top-k}(L) = \max\{s \in I : s \le L\}$$
#
# The mode follows. Both are $L$ itself: **Full**. Only the choice is its own: **Reindex**.
# Neither: **Reuse**. No ratio: window only.
#
# Start with a model of nine layers that has every mode.

# %%
import dsv41
from dsv41 import ced, csa2, ledger
from dsv41.cache import Cache
from dsv41.indexer import index_topk
from dsv41.presets import preset
from dsv41.projections import grouped_output, low_rank_queries
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rope import frequencies, rotate
from dsv41.sparse_attn import rope_sparse_attn
from dsv41.window import window_kv, window_records


def sources(layer, ratios, kv_sources, index_sources):
    """-> the layer whose KV is read, and the layer whose choice is read."""
    if ratios[layer] == 0:
        return None, None
    kv = index = None
    for s in kv_sources:
        if s <= layer:
            kv = s
    for s in index_sources:
        if s <= layer:
            index = s
    return kv, index


def mode(layer, kv, index):
    if kv is None:
        return "swa"
    return "full" if kv == layer else "reindex" if index == layer else "reuse"


tiny = preset("tiny")
lists = (tiny.compress_ratios, tiny.kv_source_layer_ids, tiny.index_source_layer_ids)
print(f"KV sources {lists[1]}   index sources {lists[2]}")
print("layer  ratio  KV of  top-k of  mode")
for layer in range(9):
    kv, index = sources(layer, *lists)
    print(f"{layer:5}  {lists[0][layer]:5}  {kv!s:>5}  {index!s:>8}  {mode(layer, kv, index)}")
assert sources(8, *lists) == (5, 7), "layer 8 reads KV and choice from two different layers"

# %% [markdown]
# Keep layer 8 in mind. It reads the KV of layer 5 through the choice of layer 7.
#
# Now the released model, all 40 layers at once. `searchsorted` finds the nearest source.

# %%
real = preset("v4.1-flash")


def sources_of_all(ratios, kv_sources, index_sources):
    """-> (L, 2) int, KV source and index source of every layer, -1 for none."""
    layers = np.arange(len(ratios))
    found = []
    for ids in (np.array(kv_sources), np.array(index_sources)):
        at = np.searchsorted(ids, layers, side="right") - 1
        found.append(np.where((np.array(ratios) > 0) & (at >= 0), ids[at], -1))
    return np.stack(found, axis=1)


ratios = real.compress_ratios[:40]
lists = (ratios, real.kv_source_layer_ids, real.index_source_layer_ids)
plan = sources_of_all(*lists)  # (40, 2)
loop = [[-1 if s is None else s for s in sources(layer, *lists)] for layer in range(40)]
same("all layers at once = one by one", plan, loop)

modes = [mode(layer, *sources(layer, *lists)) for layer in range(40)]
counts = {name: modes.count(name) for name in ("swa", "full", "reindex", "reuse")}
print(f"KV sources {lists[1]}   index sources {lists[2]}")
print("layers by mode:", counts)
assert counts == {"swa": 2, "full": 4, "reindex": 4, "reuse": 30}, "modes of the 40 layers"
assert modes == [layer.mode for layer in real.plan], "the module's plan has the same modes"

# %%
COLOUR = {"full": ORANGE, "reindex": PURPLE, "reuse": GREY}
with figure("KV comes from 4 layers, the choice of entries from 8") as ax:
    x = np.arange(2, 40)
    ax.plot([2, 39], [2, 39], color=GREY, linewidth=0.6, linestyle=":")
    ax.step(x, plan[2:, 1], where="post", color=BLUE, linewidth=2)
    ax.step(x, plan[2:, 0], where="post", color=GREEN, linewidth=2)
    for layer, name in enumerate(modes):
        if name in ("full", "reindex"):
            ax.plot(layer, layer, "o", color=COLOUR[name], markersize=7)
    ax.text(39.4, 36, "top-k of", color=BLUE, fontweight="bold", va="center")
    ax.text(39.4, 20, "KV of", color=GREEN, fontweight="bold", va="center")
    ax.text(19.3, 21, "Full", color=ORANGE, fontweight="bold", ha="right")
    ax.text(27.3, 29, "Reindex", color=PURPLE, fontweight="bold", ha="right")
    ax.text(11, 6.6, "flat: Reuse", color=INK, ha="center", va="top")
    ax.set(xlabel="layer that reads", ylabel="layer it reads from", xlim=(0, 45), ylim=(0, 40))
    ax.set_xticks([0, 2, 8, 14, 20, 24, 28, 32, 36], [0, 2, 8, 14, 20, 24, 28, 32, 36])
    ax.set_yticks([2, 8, 14, 20, 24, 28, 32, 36], [2, 8, 14, 20, 24, 28, 32, 36])
    ax.grid(axis="y")

# %% [markdown]
# Up to layer 23 the two staircases coincide. From 24 on the choice moves every four layers, the KV
# stays at layer 20. So a program that mixes the two up is right for 24 layers.
#
# ## One token through three kinds of layer
#
# Load the nine-layer model with its stored random weights and run 72 tokens. A trace collects what
# each layer computed. A layer is called with its input, its weights, its line of the plan and
# `call`: what all layers of one pass are given, such as config, cache and positions. `watched`
# keeps these four. What does a layer leave behind, by mode?

# %%
checkpoint = ROOT / "tests/golden/v41_tiny_a"
model = dsv41.load(checkpoint)
ids = np.load(checkpoint / "prompt_bf16q.npz")["ids"][0, :72]
seen = {}  # layer -> what its attention was called with


def watched(x, p, layer, call):
    seen[layer.index] = (x, p, layer, call)
    return csa2.attention(x, p, layer, call)


trace = {}
with mock.patch.object(ced, "attention", watched):
    logits = model.logits(ids, trace=trace)

print(f"{len(ids)} tokens")
for layer in model.config.plan:
    prefix = f"L{layer.index:02d}."
    names = sorted(key[4:] for key in trace if key.startswith((prefix + "cmp", prefix + "idx")))
    print(f"{layer.index} {layer.mode:8}", ", ".join(names) or "-")
assert not any(key.startswith(("L03.idx", "L06.idx", "L08.cmp")) for key in trace), "Reuse: none"
assert "L07.idx.topk" in trace and "L07.idx.k" not in trace, "Reindex: a choice, but no keys"

# %% [markdown]
# Follow token 61 through layers 5, 6, 7 and 8. Far back a query reads *entries*, not tokens. An
# entry of $m$ tokens becomes visible when its last token is there:
#
# $$\text{visible}(t) = \lfloor (t + 1) / m \rfloor$$
#
# **Full** (layer 5) scores all 62 visible entries and takes the best 6. The loop is short: best
# score first, the lower number on a tie, then ascending. For all queries at once take
# [index_topk](../dsv41/indexer.py#index_topk), which chapter 05 arrives at.


# %%
def choose(scores, visible, k):
    """scores (N,) of one query -> (k,) entry numbers, ascending, padded with -1."""
    order = sorted((-scores[j], j) for j in range(visible) if scores[j] > -np.inf)
    best = sorted(j for _, j in order[:k])
    return best + [-1] * (k - len(best))


t, k = 61, tiny.index_topk
score = trace["L05.idx.score"]  # (T, N)
print(f"token {t}: {np.sum(score[t] > -np.inf)} scored, chosen {choose(score[t], t + 1, k)}")
print(f"token  3: {np.sum(score[3] > -np.inf)} scored, chosen {choose(score[3], 4, k)}")
tokens = np.arange(len(ids))
loop = [choose(score[t], t + 1, k) for t in tokens]
same("all queries at once = one by one", index_topk(score, tokens + 1, k), loop)
same("Full, m = 1: layer 5's choice", trace["L05.idx.topk"], loop)
same("Full, m = 2: layer 2's choice", trace["L02.idx.topk"],
     index_topk(trace["L02.idx.score"], (tokens + 1) // 2, k))  # fmt: skip

# %% [markdown]
# **Reindex** (layer 7) has queries of its own and no keys. It scores layer 5's keys, but only in
# the pool: blocks of entries that layer 5 found promising for this token. Here that is 4 blocks of
# 4, in the released model 2,048 blocks of 8. Chapter 08 is about the pool.
#
# The score is $\sum_a w_a \,\mathrm{relu}(q_a \cdot k_j)$.

# %%
t = 61
q, w = trace["L07.idx.q"][t], trace["L07.idx.w"][t]  # (I, J), (I,)
keys = trace["L05.idx.k"]  # (N, J): another layer's
pool = np.flatnonzero(trace["L05.cand.mask"][t])
own = np.full(len(keys), -np.inf)
for j in pool:
    own[j] = sum(w[a] * max(q[a] @ keys[j], 0) for a in range(len(w)))

print("pool:         ", *pool)
print("layer 5 chose:", *trace["L05.idx.topk"][t])
print("layer 7 chose:", *trace["L07.idx.topk"][t])
rounded = trace["L07.idx.score"][t]
finite = np.flatnonzero(rounded > -np.inf)
same("layer 7 scored the pool and nothing else", finite, pool[pool <= t])
size = np.abs(rounded[finite]).max()
close("from layer 5's keys, up to bf16", rounded[finite] / size, own[finite] / size, within=0.02)
same("its choice", trace["L07.idx.topk"][t], choose(own, t + 1, k))
assert t in pool, "the newest block is always in the pool, so recent entries stay eligible"

# %% [markdown]
# **Reuse** (layer 8) computes its own attention queries and its own window KV. Then it looks up
# rows: entry numbers from layer 7, records from layer 5. `rope_sparse_attn` is the gather of
# chapter 06 with the two rotations of chapter 02 around it. That is the whole layer:


# %%
def reuse(x, p, layer, call, chosen):
    """x (T, D), chosen (T, k) entry numbers -> y (T, D)."""
    config, numerics, cache = call.config, call.numerics, call.cache
    positions, freqs = call.batch.positions, frequencies(config, layer.ratio)
    _, queries = low_rank_queries(x, p, config, numerics)  # (T, H, C): its own
    own = window_kv(x, p, positions, freqs, config, numerics)
    window = window_records(cache.window[layer.index][call.batch.slots], own)
    records = cache.main_kv[layer.kv_source]  # somebody else's
    rows = cache.rows(layer.kv_source, 0, chosen)  # (T, k)
    o = rope_sparse_attn(queries, positions, freqs, window, call.window_rows, records, rows,
                         p["attn_sink"], numerics)  # fmt: skip
    return grouped_output(o, p, config, numerics)


for layer, index_source in ((3, 2), (6, 5), (8, 7)):
    y = reuse(*seen[layer], trace[f"L{index_source:02d}.idx.topk"])
    same(f"layer {layer} by hand = in the model", y, trace[f"L{layer:02d}.attn.out"])

# %% [markdown]
# Now all 72 queries, a row each. From layer 5 on an entry is one token, so entries and the window
# share one axis. Grey is the window. Orange is a chosen entry, drawn over the window where a token
# is read in both ways. Pale is what was scored and not chosen.

# %%
from matplotlib.colors import ListedColormap

recent = tokens[:, None] - tokens  # how far back, by query and token
scored = {"full": trace["L05.idx.score"] > -np.inf, "reindex": trace["L07.idx.score"] > -np.inf}
patterns = {}
for layer in (1, 5, 7, 8):
    plan_of = model.config.plan[layer]
    cells = scored.get(plan_of.mode, np.zeros_like(recent)).astype(int)  # 1: scored
    cells[(recent >= 0) & (recent < tiny.sliding_window)] = 2
    if plan_of.ratio:
        chosen = trace[f"L{plan_of.index_source:02d}.idx.topk"]  # (T, k)
        query, place = np.nonzero(chosen >= 0)
        cells[query, chosen[query, place]] = 3
    patterns[f"layer {layer}: {plan_of.mode}"] = cells

shades = ListedColormap(["white", "#fad7b5", GREY, ORANGE])  # nothing, scored, window, chosen
with figure("What each mode reads, and scores first", 2, 2, sharex=True, sharey=True) as axes:
    axes[0, 0].figure.set_size_inches(6.4, 6.2)
    for ax, (name, cells) in zip(axes.flat, patterns.items(), strict=True):
        ax.imshow(cells, cmap=shades, vmin=0, vmax=3, interpolation="nearest")
        ax.set(title=name, xticks=[0, 35, 71], yticks=[0, 35, 71])
    for end in (0, 1):
        axes[1, end].set_xlabel("token that is read")
        axes[end, 0].set_ylabel("query")
assert all(np.triu(cells, 1).sum() == 0 for cells in patterns.values()), "nobody reads ahead"
same("Full scores all that came before", scored["full"], recent >= 0)
same("Reindex its pool, as far as it came before", scored["reindex"],
     trace["L05.cand.mask"] & (recent >= 0))  # fmt: skip
for layer, mode in ((5, "full"), (7, "reindex")):
    chosen = patterns[f"layer {layer}: {mode}"] == 3
    assert not (chosen & ~scored[mode]).any(), f"{mode}: nothing is chosen that was not scored"

# %% [markdown]
# ## What does a Reuse layer read? Count
#
# Put a counter around the stored arrays, and decode one token behind 61 others. The counter is an
# array that notes how many records each `[...]` touches.
#
# *Fifteen kernels in prefill, eleven in decode: of a layer?* Of a Reuse layer (report, §1). Of the
# other ten, eight do more, and the count shows what: they score keys, and four write. Two do less.


# %%
class Counted(np.ndarray):
    def __getitem__(self, at):
        got = np.asarray(self)[at]
        log.append((current[0], "read " + self.kind, got.size // self.shape[-1], self.owner))
        return got

    def __setitem__(self, at, value):
        log.append((current[0], "write " + self.kind, len(value), self.owner))
        np.asarray(self)[at] = value


def counted(array, kind, owner):
    array = array.view(Counted)
    array.kind, array.owner = kind, owner
    return array


def note_layer(x, p, layer, call):
    current[0] = layer.index
    return csa2.attention(x, p, layer, call)


log, current, cache = [], [None], model.new_cache()
slot = model.open(cache)
model.step(cache, [slot], [ids[:61]])
cache.main_kv = {s: counted(a, "KV", s) for s, a in cache.main_kv.items()}
cache.index = {s: counted(a, "keys", s) for s, a in cache.index.items()}
with mock.patch.object(ced, "attention", note_layer):
    model.step(cache, [slot], [ids[61:62]])

table = np.zeros((9, 4), int)
columns = ["read keys", "read KV", "write keys", "write KV"]
print("layer mode     ", "  ".join(f"{name:>10}" for name in columns), "  owner")
for layer in model.config.plan:
    mine = [event for event in log if event[0] == layer.index]
    for _, what, count, _ in mine:
        table[layer.index, columns.index(what)] += count
    owners = sorted({owner for *_, owner in mine})
    print(f"{layer.index:5} {layer.mode:8} ", "  ".join(f"{n:10}" for n in table[layer.index]),
          f"  {owners or '-'}")  # fmt: skip

# %% [markdown]
# Token 61 closes a pair, so both $m = 2$ sources write an entry too. Read the rows by mode. A Full
# layer reads every visible key: this is the only count that grows with the context. A Reindex layer
# reads the pool's keys. A Reuse layer reads six records and no key.

# %%
same("Full reads all visible keys", table[[2, 4, 5], 0], [31, 31, 62])
same("Reindex reads the keys of the pool: 4 x 4", table[7, 0], 16)
nothing = np.zeros((3, 3), int)
same("Reuse reads no key and writes nothing", table[[3, 6, 8]][:, [0, 2, 3]], nothing)
same("every compressing layer reads k records of KV", table[2:, 1], [k] * 7)
same("only Full writes, one record and one key", table[[2, 4, 5], 2:], np.ones((3, 2), int))
assert table[:, 2:].sum() == 6, "and nobody else writes"
print(f"11 kernels x {counts['reuse']} Reuse layers = {11 * counts['reuse']}, the rest is unknown")

# %% [markdown]
# ## Why share indices, but not queries?
#
# A choice says *where* to look, and finding it costs a scan. What to take from there is the layer's
# own business, and costs no more than its queries. Layers 5 and 6 read the same six records. Their
# weights over these records, window and sink left out:

# %%
t, weights = 61, {}
records = trace["L05.cmp.main_kv"][trace["L05.idx.topk"][t]]  # (k, C)
for layer in (5, 6):
    x, p, plan_of, call = seen[layer]
    freqs = frequencies(call.config, plan_of.ratio)
    _, queries = low_rank_queries(x, p, call.config, call.numerics)
    rotated = rotate(queries[t : t + 1], np.array([t]), freqs)[0]  # (H, C)
    s = rotated @ records.T / np.sqrt(np.float32(64))  # (H, k)
    weights[layer] = np.exp(s - s.max(axis=1, keepdims=True))
    weights[layer] /= weights[layer].sum(axis=1, keepdims=True)
print("entry       ", "  ".join(f"{j:5}" for j in trace["L05.idx.topk"][t]))
for layer, of_head in weights.items():
    for head in (0, 1):
        print(f"layer {layer}, head {head}", "  ".join(f"{v:5.2f}" for v in of_head[head]))
assert np.abs(weights[5] - weights[6]).max() > 0.1, "the same records, other weights"

# %% [markdown]
# **Break it.** Read the choice of the *KV source* instead of the *index source*. All numbers are
# legal entries of the right pool, and they were made in this very call. Layers 3 and 6 do not
# notice: their two sources coincide. Layer 8 does.

# %% tags=["break"]
right = trace["L08.attn.out"]
wrong = reuse(*seen[8], trace["L05.idx.topk"])  # stale: layer 7 has chosen anew
same("layer 6 cannot tell", reuse(*seen[6], trace["L05.idx.topk"]), trace["L06.attn.out"])
error = np.linalg.norm(wrong - right, axis=1) / np.linalg.norm(right, axis=1)
shared = [len(set(a) & set(b) - {-1}) for a, b in
          zip(trace["L05.idx.topk"], trace["L07.idx.topk"], strict=True)]  # fmt: skip
for t in (3, 5, 8, 20, 40, 61, 71):
    print(f"token {t:2}: {shared[t]} of {min(t + 1, k)} entries in common, error {error[t]:.3f}")
same("right as long as everything visible is chosen", error[:k], np.zeros(k, np.float32))
print(f"median from token 20 on: {np.median(error[20:]):.2f} of the output's size")
assert np.median(error[20:]) > 0.3, "and then far off"

# %%
with figure("Stale choice: right for k tokens, then wrong at nearly every one") as ax:
    ax.plot(tokens[:k], error[:k], "o", color=GREEN, markersize=5, clip_on=False)
    ax.bar(tokens[k:], error[k:], color=ORANGE, width=0.8)
    ax.text(-0.5, 0.08, "error 0", color=GREEN, fontweight="bold")
    ax.set(xlabel="token", ylabel="error of layer 8's output / size", xlim=(-1, 72))
    ax.grid(axis="y")

# %% [markdown]
# With $k = 512$ the released model is right for the first 512 tokens behind layer 24. A test with a
# short prompt passes.
#
# ## The mask is a count
#
# There is no mask matrix. Causality is `visible`, and it has an edge: at $m = 2$ an even token sits
# in a pair that is not closed.
#
# **Break it.** Count one entry too many, as `j <= visible` does in place of `j < visible`. The
# number that gives it away: change a token, and look at the logits *before* it. They must not move
# at all. (`batch_invariant` makes every row's arithmetic independent of the other rows, so equal
# means equal bits.)


# %% tags=["break"]
def too_many(scores, visible, k):
    return index_topk(scores, visible + 1, k)


def change_before(p):
    """Largest change of a logit before position p when token p changes."""
    other = ids.copy()
    other[p] = (other[p] + 7) % 200 + 3
    a, b = (model.logits(each, FLOAT32, batch_invariant=True) for each in (ids, other))
    return np.abs(a - b)[:p].max()


places = (12, 25, 38, 51)
causal = [change_before(p) for p in places]
with mock.patch.object(csa2.indexer, "index_topk", too_many):
    leaking = [change_before(p) for p in places]
print("changed token      ", "  ".join(f"{p:5}" for p in places))
print("j < visible        ", "  ".join(f"{v:5.2f}" for v in causal))
print("j <= visible       ", "  ".join(f"{v:5.2f}" for v in leaking))
same("the past does not move", np.float32(causal), np.zeros(4, np.float32))
assert max(leaking) > 0.1, "the past knows the future"
t = np.arange(8)
for m in (1, 2):
    newest = (t + 1) // m * m - 1  # last token of the newest visible entry
    print(f"m = {m}: tokens {t}  see entries up to token {newest}")
    assert np.all(newest <= t), "no entry reaches beyond its reader"

# %% [markdown]
# ## No choice outlives its call
#
# A choice is an array in the middle of a forward pass. Kept on the layer object, it would still be
# there for the next request. Here it lives in [Shared](../dsv41/call.py#Shared), made anew for
# every call. Request A leaves nothing for request B, in one cache:

# %%
exact = OFFICIAL.but(batch_invariant=True)
cache = model.new_cache(exact)
a = model.open(cache)
model.step(cache, [a], [ids[:40]])
b = model.open(cache)
behind = model.step(cache, [b], [ids[40:49]])
same("B behind A = B alone", behind, model.logits(ids[40:49], batch_invariant=True))
together = [ids[:40], ids[40:49]]
same("B beside A = B alone", model.logits(together, batch_invariant=True)[40:], behind)

# %% [markdown]
# ## Count the bytes
#
# A Full layer stores, per entry, 288 bytes of KV and a 68-byte key (chapter 01). Compare with a
# model in which every compressing layer is Full. The cache's own arrays give the same numbers.
#
# Sharing KV saves memory, not reading: each of the 38 layers still reads its 512 records. What
# sharing the *choice* saves is scoring: keys read to decode one token.

# %%
everyone = tuple(range(2, 40))
all_full = real.but(kv_source_layer_ids=everyone, index_source_layer_ids=everyone,
                    candidate_source_layer_id=None)  # fmt: skip
owned = {"4 owners": 3 / 2 + 1 / 1, "38 owners": 18 / 2 + 20 / 1}  # entries per token
for (name, entries), config in zip(owned.items(), (real, all_full), strict=True):
    total = entries * (288 + 68)
    print(f"{name:9}  {entries:4} entries a token x 356 = {total:7,.0f} bytes")
    same("as the cache's arrays say", Cache(config, OFFICIAL).bytes_per_token(), total)
print(f"sharing saves a factor of {29 / 2.5}")
same("the report's number", ledger.kv_bytes("V4.1-Flash").hbm, 890.0)

n = 1 << 20
every = 18 * n // 2 + 20 * n
choosing = 3 * n // 2 + n + 4 * min(n, 2048 * 8)
print(f"KV records read for one token, any long context: 38 x 512 = {38 * 512:,}")
print(f"keys read for one token at 1M: all choose {every:,}, 8 choose {choosing:,}")
same("the ledger counts the same keys", ledger.index_entries(real, n), choosing)
same("also when everyone chooses", ledger.index_entries(all_full, n), every)

# %% [markdown]
# ## The module gives the same numbers
#
# [build_plan](../dsv41/plan.py#build_plan) is our rule,
# [global_rows_of](../dsv41/csa2.py#global_rows_of) is the look-up in `reuse`, and
# [select](../dsv41/csa2.py#select) makes the choices. A plan in which a Reuse layer has nothing to
# reuse is refused.

# %%
module = [[-1 if s is None else s for s in (layer.kv_source, layer.index_source)]
          for layer in real.plan]  # fmt: skip
same("build_plan = our rule, 40 layers", module, plan)
x, p, layer, call = seen[8]
pool_of_records, rows = csa2.global_rows_of(layer, call)
same("global_rows_of: rows", rows, call.cache.rows(5, 0, trace["L07.idx.topk"]))
same("global_rows_of: records", pool_of_records, call.cache.main_kv[5])
same("csa2.attention = reuse", csa2.attention(x, p, layer, call),
     reuse(x, p, layer, call, trace["L07.idx.topk"]))  # fmt: skip
try:
    tiny.but(kv_source_layer_ids=(4, 5), index_source_layer_ids=(4, 5, 7))
except ValueError as refusal:
    message = str(refusal)
print(message)
assert "layer 2 reuses compressed KV before any Full layer" in message, "the error names the layer"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Find the two sources of a layer, -1 for none. The inputs include layers without a ratio, layers
#    before the first source, and layers whose two sources differ.
# 2. Choose the entries of one query from its scores, its position and its ratio. The inputs include
#    ties and unclosed pairs.
# 3. Count the index keys that the released model reads for the next token when $n$ tokens are
#    cached, that one included. Mind odd $n$, and the pool in short contexts.


# %% tags=["exercise"]
def two_sources(layer, ratios, kv_sources, index_sources):
    """int, list, list, list -> [KV source, index source]"""
    return ...


check("07.two_sources", two_sources)


# %% tags=["exercise"]
def entries_of(scores, position, ratio, k):
    """scores (N,) f32, also of entries that are not visible -> (k,) int, ascending, -1 padded"""
    return ...


check("07.entries_of", entries_of)


# %% tags=["exercise"]
def keys_read(n):
    """n tokens -> int"""
    return ...


check("07.keys_read", keys_read)

# %% [markdown]
# ## What we learned
#
# - Two lists in the config say everything: the nearest source at or before a layer, for KV and for
#   the choice. 4 Full, 4 Reindex, 30 Reuse, 2 window only.
# - Full writes and scans all keys. Reindex scans a pool of somebody's keys. Reuse reads k records.
# - Indices are shared, queries are not: the same records get other weights.
# - The wrong source's choice is right until more than k entries are visible, and in every layer
#   whose two sources coincide.
# - The mask is a count, $\lfloor (t + 1) / m \rfloor$. Change a token: the past must not move.
# - 890 bytes a token instead of 10,324.
#
# Worked solutions: [solutions/07_csa2.py](solutions/07_csa2.py). Next: [08 The candidate
# pool](08_candidate_pool.ipynb). All chapters: [README.md](README.md).
