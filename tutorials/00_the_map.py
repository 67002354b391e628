# %% [markdown]
# # 00 · The map: one token through the whole model
#
# **What happens to one token between its text and the next one?**
#
# DeepSeek-V4.1-Flash is a language model: it reads tokens and says which token may come next. This
# chapter follows a single token through all of it, once, with every number written out. No part is
# explained to the end here. You get the map: what there is, in which order it runs, who reads from
# whom, and which chapter opens each box.
#
# You need NumPy, and matrix products. No DeepSeek, no framework. 30 minutes. Three exercises at the
# end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/00_the_map.py`.
#
# Sources: config.json and inference/model.py of the release; the V4.1 report, §2; the prompt format
# from encoding/encoding.py of the release. The modules that this page arrives at:
# [model.py](../dsv41/model.py), [plan.py](../dsv41/plan.py) and [prompt.py](../dsv41/prompt.py).

# %%
import json
from itertools import pairwise

import numpy as np

from lib.page import (
    BLUE,
    FAINT,
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
# ## The whole model in one figure
#
# A token is a vector of 5,120 numbers, kept four times, in four *streams*. Forty layers change the
# streams. A layer has two parts: **attention** looks at other tokens, **experts** think about this
# one. The figure is drawn from the released config: [the plan](../dsv41/plan.py#build_plan) says
# what each layer does.

# %%
from dsv41.presets import preset

config = preset("v4.1-flash")
plan = config.plan
colours = {"swa": GREY, "full": BLUE, "reindex": ORANGE, "reuse": "#9CC9E6"}


def box(ax, x, y, width, height, colour, text="", ink="white", size=8):
    ax.bar(x, height, width, y, align="edge", color=colour, edgecolor="white", linewidth=0.8)
    ax.text(x + width / 2, y + height / 2, text, color=ink, fontsize=size, ha="center", va="center")


def runs(values):
    """Neighbours with equal values -> [(first, length, value)], None left out."""
    cuts = [n for n, v in enumerate(values) if n == 0 or v != values[n - 1]] + [len(values)]
    return [(a, b - a, values[a]) for a, b in pairwise(cuts) if values[a] is not None]


def draw_map(ax):
    ax.figure.set_size_inches(11.5, 5.5)
    for y in (0.15, 0.35, 0.55, 0.75):
        ax.plot([-4, 41.5], [y, y], color=INK, linewidth=0.8)
    for layer in plan:
        ink = INK if layer.mode == "reuse" else "white"
        box(ax, layer.index, 1.2, 1, 0.9, colours[layer.mode], str(layer.index), ink)
        box(ax, layer.index, -0.9, 1, 0.6, FAINT)
        if layer.engram is not None:
            ax.plot(layer.index, 0.45, "D", color=PURPLE, markersize=7)
            ax.text(layer.index + 0.7, 0.95, "Engram", color=PURPLE, fontsize=8, va="center")
    for first, length, source in runs([layer.kv_source for layer in plan]):
        each = {1: "1 per token", 2: "1 per 2 tokens"}[config.compress_ratios[source]]
        box(ax, first, 3.2, length, 0.5, BLUE, f"of {source}: {each}", size=7.5)
    for first, length, source in runs([layer.index_source for layer in plan]):
        box(ax, first, 2.4, length, 0.5, ORANGE, f"by {source}")
    box(ax, 20, 4.0, 20, 0.4, GREEN, "pool by 20: 24 to 36 choose from 2,048 blocks of 8")
    for a, b, text in ((0, 20, "encoder half"), (20, 40, "decoder half")):
        ax.plot([a + 0.1, b - 0.1], [4.8, 4.8], color=INK)
        ax.text((a + b) / 2, 4.95, text, ha="center", fontweight="bold", color=INK)
    box(ax, -7.4, -0.1, 3.4, 1.1, INK, "embed")
    ax.text(-5.7, 1.3, "text → ids", ha="center", fontsize=8)
    ax.text(-5.7, -0.3, "image → ViT", ha="center", va="top", fontsize=8)
    box(ax, 41.5, -0.1, 3.4, 1.1, INK, "head")
    ax.text(43.2, -0.3, "next token", ha="center", va="top", fontsize=8)
    box(ax, 41.5, 1.7, 3.4, 1.1, PURPLE, "DSpark")
    for layer in config.dspark_target_layer_ids:
        ax.plot([layer, layer, 43.2, 43.2], [0.75, 1.1, 1.1, 1.7], color=PURPLE, linewidth=1)
    ax.text(43.2, 2.9, "5 drafts", ha="center", fontsize=8)
    rows = {1.65: "attention", 0.92: "4 streams", -0.6: "experts", 2.65: "512 chosen",
            3.45: "global entries", 4.2: "candidates"}  # fmt: skip
    note = "384 in each layer: 6 for this token, and a shared one"
    ax.text(20, -0.6, note, ha="center", va="center", fontsize=8, color=INK)
    for y, text in rows.items():
        ax.text(-0.3, y, text, ha="right", va="center", fontsize=9, color=INK)
    names = ("window only", "Full: writes, chooses", "Reindex: chooses", "Reuse: only reads")
    for x, name, colour in zip((0, 8.5, 20, 30), names, colours.values(), strict=True):
        box(ax, x, -1.75, 1, 0.45, colour)
        ax.text(x + 1.4, -1.53, name, fontsize=8, va="center", color=INK)
    ax.set(xlim=(-7.6, 45.2), ylim=(-1.9, 5.4), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


with figure("DeepSeek-V4.1-Flash: forty layers, and who reads from whom") as ax:
    draw_map(ax)

# %% [markdown]
# Read it from the left. A text becomes ids, an id becomes a vector, four times: the
# [streams](10_hyper_connections.ipynb). Each layer's attention sees the
# [window](03_window_attention.ipynb), the last 128 tokens. From layer 2 on it
# [also sees](06_sparse_attention.ipynb) 512 chosen *entries* of the far past; an entry
# [stands for](04_compressor.ipynb) one or two tokens. Four *Full* layers write entries. Eight
# layers [choose](05_indexer_topk.ipynb) among them: the four that write, and four *Reindex* layers,
# which choose anew among layer 20's, out of a [pool](08_candidate_pool.ipynb). All others
# [reuse](07_csa2.ipynb) somebody's entries and somebody's choice. Behind attention come the
# [experts](11_moe_balance.ipynb). At two places [Engram](12_engram.ipynb) adds what a table knows
# about the last few tokens. At the right end the head turns the vector into one number for each of
# 129,280 possible next tokens, and [DSpark](16_dspark.ipynb) guesses five more.
#
# *The list of compress ratios has 43 numbers. Are there 43 layers?* Forty. The last three belong to
# the drafter's own blocks.

# %%
counts = {mode: sum(layer.mode == mode for layer in plan) for mode in colours}
print("layers by mode:", counts)
print("writes entries:", *(n.index for n in plan if n.mode == "full"))
print("chooses:       ", *(n.index for n in plan if n.selects))
print("Engram in front of:", *(n.index for n in plan if n.engram is not None))
ratios = config.compress_ratios
print(f"{len(ratios)} ratios, {config.num_hidden_layers} layers, the last ratios are {ratios[40:]}")
assert counts == {"swa": 2, "full": 4, "reindex": 4, "reuse": 30}, "forty layers in four modes"
assert len(ratios) == 40 + config.num_nextn_predict_layers == 43, "three blocks of the drafter"

# %% [markdown]
# ## 552 or 748 billion?
#
# Both numbers are quoted for the same model. The *backbone* has 552 billion: nearly all of it in
# experts. Engram's tables have another 197 billion, but nobody multiplies by them: a token looks up
# 48 of their 768 million rows. Together 748. And what computes for one token is far less than
# either: 6 of 384 experts, and for most prompt tokens only the encoder half.

# %%
from dsv41 import ledger

expert = 3 * 5120 * 2304  # gate, up and down
rows = sum(config.engram_num_embeddings)  # of both tables
tables = rows * config.engram_head_dim
looked_up = 2 * (config.engram_max_ngram_size - 1) * config.engram_n_heads
sizes = ledger.parameters(config)
print(f"experts    40 x 384 x {expert:,} = {40 * 384 * expert / 1e9:6.1f} billion")
print(f"backbone   {sizes.backbone / 1e9:6.1f}   + Engram's tables {tables / 1e9:.1f}", end="")
print(f" = {(sizes.backbone + tables) / 1e9:.1f}")
print(f"looked up  {looked_up} of {rows:,} rows")
beside = [sizes.parts[part][0] / 1e9 for part in ("DSpark drafter", "vision tower")]
print(f"in neither: drafter {beside[0]:.1f}, vision tower {beside[1]:.1f}")
print(f"all files  {sum(ledger.stored_bytes(config).values()) / 1e9:6.1f} GB, experts in 4 bits")
print(f"computing: {sizes.decode / 1e9:.1f} for a generated token, {sizes.prefill / 1e9:.1f} "
      "for a prompt token")  # fmt: skip
assert (looked_up, tables) == (48, sizes.engram), "the tables, row by row"
assert sizes.parts["routed experts"][0] == 40 * 384 * expert, "the experts, matrix by matrix"
assert round(sizes.backbone / 1e9) == 552, "552 without the tables"
assert round((sizes.backbone + sizes.engram) / 1e9) == 748, "748 with them"
assert sizes.decode < sizes.backbone / 30, "a token meets less than a thirtieth"

# %% [markdown]
# ## From a text to ids
#
# A conversation is written out as one text, with special tokens between the turns. A tokenizer
# cuts it into pieces from a list, and each piece has a number. This one was made for the small
# model of this package, with 4,096 pieces.
#
# *What is "effort"?* One line of text. It is a number from 1 to 100: `low`, `high` and `max` are
# names for 50, 75 and 100. Whether the model thinks at all is another switch: the last token,
# `<think>` or `</think>`. And old reasoning is left out of the next prompt, except when there are
# tools: a chain of calls must find its own reasons again.
#
# *My client says `medium` or `xhigh`.* Names of other APIs are aliases of the three numbers. They
# are not those of V4: its first release had two efforts, so `low` meant `high` and `xhigh` meant
# `max` (DeepSeek's API guide "thinking mode", June 2026), and `max` was a fixed instruction in
# front of the system prompt, no number (V4 report, post-training). Map names for V4.1 anew.

# %%
from dsv41.prompt import EFFORTS, encode_prompt, render
from dsv41.tokenizer import load_tokenizer

tokenizer = load_tokenizer(ROOT / "data/tokenizer")
question = [{"role": "user", "content": "What is a prime?"}]
print(render(question, effort="low"))
pieces = encode_prompt(tokenizer, question)
print(f"{len(pieces)} ids, the last nine:", pieces[-9:])
print([tokenizer.decode([i]) for i in pieces[-9:]])

lines = {effort: render(question, effort=effort) for effort in ("low", "high", "max", 50, 62)}
assert lines["low"] == lines[50] != lines["high"], "low is 50"
assert "Effort: 62 (" in lines[62], "any integer works"
print("aliases:", *(f"{name} {number}" for name, number in EFFORTS.items()))
assert render(question, effort="xhigh") == lines["high"] != lines["max"], "xhigh is high, not max"
assert render(question, effort="minimal") == lines["low"] != lines["high"], "and low is not high"
silent = render(question, thinking=False)
assert silent.endswith("</think>") and "Effort" not in silent, "no thinking: no line, </think>"
again = [*question, {"role": "assistant", "content": "2.", "reasoning": "The first."}, *question]
tool = {"name": "lookup", "description": "", "parameters": {}}
assert "The first." not in render(again), "old reasoning is dropped"
assert "The first." in render(again, tools=[tool]), "with tools it is passed back"

# %% [markdown]
# ## A model that fits on a page
#
# From here on we compute. The released model has 510 GB; this one has 2.4 MB and every mechanism:
# nine layers, width 64, a window of 8, 6 chosen entries, 8 experts of which 2 are used. Its weights
# are random, so what it says is nonsense. The arithmetic is not: the released code has run it too,
# and left its numbers in a file.
#
# 72 tokens have been read. We follow the last one, at position $t = 71$. What the 71 before it have
# left behind, the *notes*, is taken from a run of the package.

# %%
import dsv41
from dsv41 import FLOAT32
from dsv41.ops import dense

directory = ROOT / "tests/golden/v41_tiny_a"
model = dsv41.load(directory)
tiny, params = model.config, model.params
texts = json.loads((directory / "tokens.json").read_text("utf-8"))["text"]
with np.load(directory / "prompt_fp32.npz") as archive:
    released = {name: archive[name] for name in archive.files}
ids = released["ids"][0, :72]
notes = {}
logits = model.logits(ids, FLOAT32, trace=notes)  # (72, 288)

t = 71
print(f"{(directory / 'model.safetensors').stat().st_size / 1e6:.1f} MB")
print("layer  half     mode     entries of  choice of  Engram")
for n in tiny.plan:
    cells = (n.kv_source, n.index_source, n.engram)
    print(
        f"{n.index:5}  {n.half}  {n.mode:8}",
        *("         -" if c is None else f"{c:10}" for c in cells),
    )
print("the last tokens:", *(repr(texts[i]) for i in ids[66:]))
close("the package = the released code", logits, released["logits"][0], within=5e-5)

# %% [markdown]
# ## An id becomes four streams
#
# The embedding is a table with one row per id. The row is copied four times. The streams start
# equal and drift apart from the first layer on.

# %%
embedding = dense(params["embed"]["weight"])[ids[t]]  # (64,)
X = np.stack([embedding] * 4)  # (4, 64)
print(f"id {ids[t]}, text {texts[ids[t]]!r}: {embedding[0]:.3f} {embedding[1]:.3f} ... "
      f"{embedding[63]:.3f}, four times")  # fmt: skip
same("the row is what the released code starts from", embedding, released["embedding"][t])

# %% [markdown]
# ## In and out of the streams
#
# A sublayer cannot read four streams, it reads one vector: $x = \sum_i A_i X_i$, divided by its
# own root mean square. Its output $y$ goes back to all four, which are mixed on the way:
# $X'_k = C_k\, y + \sum_j B_{jk} X_j$. The 24 numbers $A$, $C$ and $B$ are predicted from the
# streams. $A$ is used one sublayer late. That is all of *hyper-connections*; chapter 10 says why.


# %%
def rms(x, weight=1):
    return x / np.sqrt(np.mean(x * x) + np.float32(tiny.rms_norm_eps)) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def coefficients(X, fn, base, scale):
    """X (4, 64) -> A for the next sublayer, C, and B [from, to]."""
    u = fn @ rms(X.ravel())
    a, c, b = np.split(u * np.repeat(scale, [4, 4, 16]) + base, [4, 8])
    B = np.exp(b.reshape(4, 4))
    B = B / B.sum(axis=1, keepdims=True) + 1e-6
    B = B / (B.sum(axis=0) + 1e-6)
    for _ in range(19):  # rows and columns in turn, until both sum to 1
        B = B / (B.sum(axis=1, keepdims=True) + 1e-6)
        B = B / (B.sum(axis=0) + 1e-6)
    return sigmoid(a) + 1e-6, 2 * sigmoid(c), B


p = params["layers"][2]
before = notes["L01.x_out"][t]  # the streams that enter layer 2
A, C, B = coefficients(before, *(p[f"hc_attn_{part}"] for part in ("fn", "base", "scale")))
print("A", A.round(3), " C", C.round(3))
print("B\n", B.round(3))
for name, got in (("pre", A), ("post", C), ("comb", B)):
    close(f"hyper-connections: {name}", got, released[f"L02.hc_attn.{name}"][t], within=1e-5)

# %% [markdown]
# ## Attention: which notes does the token read?
#
# Every token leaves one record in every layer: a vector of 64 numbers (512 in the real model). A
# query $q$ compares itself with records $K_i$ and takes their weighted mean:
#
# $$p_i = \frac{e^{\,q \cdot K_i / \sqrt{C}}}{\sum_j e^{\,q \cdot K_j / \sqrt{C}} +
# e^{\mathrm{sink}}}, \qquad o = \sum_i p_i K_i$$
#
# Four heads ask four questions of the same records. The *sink* lets a head answer "nothing here".
# Positions enter by turning pairs of numbers: queries and records by their position, the result
# back again. Read are the window of 8 records, and 6 entries that an indexer has chosen (chapters
# 04 to 08 make and choose them; here they are taken from the notes).


# %%
from dsv41.rope import frequencies


def turn(x, position, layer, sign=1):
    """Turn the last channels of x (..., 64), pair by pair."""
    speed = frequencies(tiny, layer.ratio)
    pairs = x[..., -2 * len(speed) :].reshape(*x.shape[:-1], -1, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(sign * 1j * position * speed)
    turned = np.stack([z.real, z.imag], axis=-1).reshape(*x.shape[:-1], -1)
    return np.concatenate([x[..., : -2 * len(speed)], turned], axis=-1)


def chosen(layer, t):
    """Numbers of the entries that position t reads in this layer."""
    if layer.mode == "swa":
        return np.zeros(0, int)
    entries = notes[f"L{layer.index_source:02d}.idx.topk"][t]
    return entries[entries >= 0]


def attention(x, p, layer, t, show=False, without=""):
    """x (64,) -> y (64,)"""
    W = {name: dense(leaf["weight"]) for name, leaf in p.items() if "weight" in leaf}
    q = (W["wq_b"] @ rms(W["wq_a"] @ x, W["q_norm"])).reshape(4, 64)
    own = turn(rms(W["wkv"] @ x, W["kv_norm"]), t, layer)  # the record this token leaves
    window = notes[f"L{layer.index:02d}.attn.swa_kv"][max(0, t - 7) : t]
    records = [*window, own] if without != "window" else [own]
    entries = chosen(layer, t)
    if len(entries) and without != "entries":
        records += [*notes[f"L{layer.kv_source:02d}.cmp.main_kv"][entries]]
    K = np.stack(records)  # (up to 8 + 6, 64)
    s, sink = turn(q, t, layer) @ K.T / 8, p["attn_sink"][:, None]
    nothing = np.exp(sink) if without != "sinks" else 0
    weight = np.exp(s) / (np.exp(s).sum(axis=1, keepdims=True) + nothing)
    if show:
        for name, part in (("window", weight[:, :8]), ("entries", weight[:, 8:])):
            print(f"{name:8}", *(f"{w:.2f}" for w in part.mean(axis=0)))
        print(f"sinks    {1 - weight.sum(axis=1).mean():.2f}")
    o = turn(weight @ K, t, layer, sign=-1)  # (4, 64)
    groups = W["wo_a"].reshape(2, 32, 128)  # two heads together, then one matrix
    return W["wo_b"] @ np.concatenate([groups[g] @ o.reshape(2, 128)[g] for g in range(2)])


layer = tiny.plan[2]
A_before = notes["L01.hc_ffn.pre"][t]
x = rms(A_before @ before, p["attn_norm"]["weight"])
print("mean weight over four heads")
y = attention(x, p["attn"], layer, t, show=True)
close("attention of layer 2", y, released["L02.attn.out"][t], within=5e-5)

# %%
with figure("What token 71 reads, layer by layer") as ax:
    ax.figure.set_size_inches(8, 3)
    for n in tiny.plan:
        for position in range(t - 7, t + 1):
            ax.plot(position, n.index, "s", color=GREY, markersize=6)
        for entry in chosen(n, t):
            start = entry * n.ratio
            ax.plot([start, start + n.ratio - 1], [n.index] * 2, "s-", color=ORANGE, markersize=5)
        if n.engram is not None:
            ax.plot(range(t - 3, t + 1), [n.index + 0.4] * 4, "D", color=PURPLE, markersize=3.5)
    ax.text(62.5, 0, "window: the last 8", color=INK, ha="right", va="center")
    ax.text(62.5, 1.2, "Engram: the last 4", color=PURPLE, ha="right", va="center")
    note = "entries: pairs of tokens up to layer 4, single ones behind"
    ax.text(2, 0.5, note, color=ORANGE, va="center")
    ax.set(xlim=(-1, 73), ylim=(8.6, -0.6), xlabel="position of the token that is read")
    ax.set_yticks(range(9), [f"{n.index} {n.mode}" for n in tiny.plan])
read = [8 + len(chosen(n, t)) for n in tiny.plan]
print("records read in each layer:", *read)
assert max(read) == 14 < 72, "never more than 14 of 72, however long the text"
assert chosen(tiny.plan[3], t).tolist() == chosen(tiny.plan[2], t).tolist(), "3 reuses 2's choice"
assert chosen(tiny.plan[7], t).tolist() != chosen(tiny.plan[5], t).tolist(), "7 chooses anew"

# %% [markdown]
# ## Experts: what does the token think?
#
# Eight small networks (384 in the real model), and a router that scores them. The best 2 (6) run,
# weighted by their scores, and a shared one runs always. The router's bias takes part in choosing
# but not in weighing.


# %%
def network(x, p, weight=1):
    """One expert: x (64,) -> (64,)"""
    gate, up = (dense(p[name]["weight"]) @ x for name in ("w1", "w3"))
    gate, up = (
        np.minimum(gate, tiny.swiglu_limit),
        np.clip(up, -tiny.swiglu_limit, tiny.swiglu_limit),
    )
    return dense(p["w2"]["weight"]) @ (gate * sigmoid(gate) * up * weight)


def experts(x, p, show=False, without=""):
    score = np.sqrt(np.log1p(np.exp(dense(p["gate"]["weight"]) @ x)))
    best = np.argsort(-(score + p["gate"]["bias"]))[:2]
    share = score[best] / score[best].sum() * tiny.routed_scaling_factor
    if show:
        print("scores ", *(f"{v:.2f}" for v in score))
        print("chosen ", *best, "  with weights", *(f"{v:.2f}" for v in share))
    y = sum(network(x, p["experts"][e], w) for e, w in zip(best, share, strict=True))
    shared = network(x, p["shared_experts"])
    return {"chosen experts": shared, "shared expert": y}.get(without, y + shared)


X = np.outer(C, y) + B.T @ before  # attention's output goes into the streams
x = rms(A @ X, p["ffn_norm"]["weight"])  # read through the A that attention's turn predicted
close("experts of layer 2", experts(x, p["ffn"], show=True), released["L02.ffn.out"][t], 5e-5)

# %% [markdown]
# ## Engram: what does a table know?
#
# In front of two layers, the last two, three and four tokens are hashed to row numbers of a large
# table (chapter 12 hashes by hand). The rows become a value, and a key for each stream. The better
# key and stream agree, the more of the value is added:
#
# $$g_s = \sigma(\pm\sqrt{|a_s|}), \qquad
# a_s = \frac{\mathrm{rms}(X_s) \cdot \mathrm{rms}(\mathrm{key}_s)}{\sqrt D}, \qquad
# X_s \leftarrow X_s + g_s \cdot \mathrm{value}$$


# %%
from dsv41.engram import read_rows


def engram(X, p, layer, t):
    memory = read_rows(p["embed"], notes[f"L{layer.index:02d}.engram.rows"][t : t + 1])[0]
    kv = dense(p["wkv"]["weight"]) @ memory  # (4 * 64 + 64,)
    keys, value = kv[:256].reshape(4, 64), kv[256:]
    weights = dense(p["q_weight"]) * dense(p["k_weight"])
    a = np.array([rms(X[s]) @ (weights[s] * rms(keys[s])) / 8 for s in range(4)])
    gate = sigmoid(np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6)))
    return X + np.outer(gate, value)


table = params["layers"][1]["engram"]
print("rows", *notes["L01.engram.rows"][t], "of a table of", len(table["embed"]["weight"]))
X = engram(notes["L00.x_out"][t], table, tiny.plan[1], t)
close("Engram in front of layer 1", X, released["L01.engram.x"][t], within=5e-5)

# %% [markdown]
# ## All layers, and the head
#
# Nothing new is needed. Nine times: Engram where there is one, attention, experts. Then the last
# $A$ makes one vector of the streams, and the head compares it with one row for each of 288 tokens.


# %%
def one_token(t, without=""):
    """-> logits (288,) behind position t, and the streams behind every layer."""
    X = np.stack([dense(params["embed"]["weight"])[ids[t]]] * 4)
    A, streams = np.float32([1, 0, 0, 0]), []
    for layer in tiny.plan:
        p = params["layers"][layer.index]
        if layer.engram is not None and without != "Engram":
            X = engram(X, p["engram"], layer, t)
        for name in ("attn", "ffn"):
            parts = (p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale"))
            next_A, C, B = coefficients(X, *parts)
            x = rms(A @ X, p[f"{name}_norm"]["weight"])
            if name == "attn":
                y = attention(x, p["attn"], layer, t, without=without)
            else:
                y = experts(x, p["ffn"], without=without)
            mixed = B.T @ X if without != "mixing" else X
            X, A = np.outer(C, y) + mixed, next_A
        streams.append(X)
    return dense(params["head"]["weight"]) @ rms(A @ X, params["norm"]["weight"]), streams


ours, streams = one_token(t)
for n in (0, 4, 8):
    close(f"streams behind layer {n}", streams[n], released[f"L{n:02d}.x_out"][t], within=1e-4)
close("288 logits by hand = the released code", ours, released["logits"][0, t], within=5e-5)
chance = np.exp(ours - ours.max()) / np.exp(ours - ours.max()).sum()
for v in np.argsort(-ours)[:3]:
    print(f"next token {texts[v]!r:10} with probability {chance[v]:.2f}")

# %% [markdown]
# **Break it, seven times.** For this token, leave out one part after the other. The shapes fit,
# nothing raises, the logits keep about their size. A model with a part missing *runs*, and only a
# comparison of numbers tells that it is another one. (How far a part moves the numbers here says
# nothing of its worth: these weights are random.)

# %% tags=["break"]
parts = ("sinks", "Engram", "entries", "window", "mixing", "shared expert", "chosen experts")
moved = {}
print("without          std   the best three                the largest change of a logit")
for part in ("", *parts):
    found, _ = one_token(t, without=part)
    moved[part] = np.abs(found - ours).max()
    best = " ".join(repr(texts[v]) for v in np.argsort(-found)[:3])
    print(f"{part or 'nothing':15} {found.std():.2f}   {best:30} {moved[part]:.2f}")
    assert 0.7 < found.std() / ours.std() < 1.4, "the size looks right"
assert moved.pop("") == 0 and min(moved.values()) > 0.1, "each part moves the numbers"

with figure("Without one part the model runs, and says something else") as ax:
    for y, part in enumerate(parts):
        ax.plot(moved[part], y, "o", color=BLUE, markersize=8)
    ax.set_yticks(range(len(parts)), parts)
    ax.axvline(5e-5, color=ORANGE)
    ax.text(6e-5, 6.9, "limit of the comparison above", color=ORANGE, va="center")
    ax.set(xscale="log", xlim=(1e-5, 10), ylim=(-0.5, 7.3), xlabel="largest change of a logit")
    ax.grid(axis="y")

# %% [markdown]
# ## Does anybody look ahead?
#
# "Encoder" and "decoder" sound like a model whose first half reads the whole text in both
# directions. Not here. Both halves look back only. The names say where global entries are made: all
# entries of the decoder half are made in its first layer, 20 (5 in the small model), from what the
# encoder half has left. So a prompt can be read by the first half alone, up to its last window
# (chapter 09).
#
# Exchange one token, and see which logits move.

# %%
numerics = FLOAT32.but(batch_invariant=True)  # rows do not depend on their neighbours' bits
usual = model.logits(ids, numerics)
print("token changed   first logits that move   logits behind token 71 move by")
for changed in (3, 30, 60, 71):
    other = ids.copy()
    other[changed] = 100
    moved = np.abs(model.logits(other, numerics) - usual).max(axis=1)
    first = int(np.argmax(moved > 0))
    print(f"{changed:8}   {first:18}   {moved[71]:24.2f}")
    assert first == changed and moved[71] > 0, "nothing before the change, and token 71 feels it"

# %% [markdown]
# ## What stays behind
#
# The token is done, but not gone: later tokens will read its notes. In every layer its record stays
# in a ring of 128. Its entries, with a key each for the indexer, stay for good, in few bits. In the
# real model that is 890 bytes a token, as a mean. A ring costs the same for any text.

# %%
from dsv41.cache import Cache
from dsv41.quant import OFFICIAL

cache = Cache(config, OFFICIAL)
by_hand = 0
for source in config.kv_source_layer_ids:
    record, key, m = 512 // 2 + 512 // 16, 128 // 2 + 128 // 32, config.compress_ratios[source]
    by_hand += (record + key) / m
    print(f"layer {source:2}: {record} + {key} bytes for {m} token{'s' * (m > 1)}")
print(f"a token of context: {by_hand:.0f} bytes; a request besides: "
      f"{cache.bytes_per_request():,}")  # fmt: skip
same("bytes per token, measured on the arrays", cache.bytes_per_token(), by_hand)
assert by_hand == 890, "a million tokens: 890 MB"

# %% [markdown]
# ## And the next token
#
# The best token is appended and takes the same way, with notes one longer. So writing costs one
# pass of one token each. It gives the same text as reading everything again for every token.

# %%
cache = model.new_cache(numerics)
slot, text = model.open(cache), ids.tolist()
answer = model.step(cache, [slot], [ids])[-1]
written = []
for _ in range(5):
    written.append(int(answer.argmax()))
    answer = model.step(cache, [slot], [[written[-1]]])[-1]  # one token, with the notes
print("written:", *(repr(texts[i]) for i in written))
again = []
for _ in range(5):
    again.append(int(model.logits([*text, *again], numerics)[-1].argmax()))  # everything again
same("one token a pass = everything again", written, np.array(again))

# %% [markdown]
# ## The module gives the same numbers
#
# `one_token` is this page's. [Model.logits](../dsv41/model.py#Model.logits) does the same for all
# tokens of all requests at once. Tokens at the beginning have short windows and few entries, so
# they are worth a look.

# %%
for position in (0, 1, 7, 8, 40, 71):
    by_page, _ = one_token(position)
    close(f"position {position}: this page = Model.logits", by_page, logits[position], within=5e-5)
in_cache = model.new_cache(FLOAT32)
last = model.step(in_cache, [model.open(in_cache)], [ids])[-1]
close("the serving path gives them too", last, ours, within=5e-5)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Which tokens does a query at position $t$ read? The last `window` ones, itself included, and
#    the $m$ tokens behind each entry. An entry number of −1 is none. Each token once, ascending.
# 2. By how many numbers is a token multiplied in the expert half of one layer? Count the router,
#    the chosen experts and the shared one.
# 3. Draw the next token: temperature 0 takes the best, the first one of equals. Otherwise the
#    probabilities are those of logits / temperature, and $u \in [0, 1)$ picks the first token whose
#    cumulative sum is above $u$.


# %% tags=["exercise"]
def tokens_read(t, window, entries, m):
    """t, window, m int, entries (K,) int -> ascending positions, int array"""
    return ...


check("00.tokens_read", tokens_read)


# %% tags=["exercise"]
def multiplied(hidden, width, experts, active):
    """sizes of the vector and of an expert's inside, how many experts, how many chosen -> int"""
    return ...


check("00.multiplied", multiplied)


# %% tags=["exercise"]
def next_token(logits, temperature, u):
    """logits (V,) f64 -> int"""
    return ...


check("00.next_token", next_token)

# %% [markdown]
# ## What we learned
#
# - Embed, forty layers of attention and experts on four streams, head. Two tables on the way.
# - Attention reads a window and a few chosen entries. Four layers write them, 38 read them.
# - 552 billion without Engram's tables, 748 with them, 16 for a generated token.
# - Both halves look back only. What a token leaves behind is 890 bytes.
# - Thinking is a token, effort is a line of text.
#
# Worked solutions: [solutions/00_the_map.py](solutions/00_the_map.py). Next:
# [01 number formats](01_number_formats.ipynb), or a path through the chapters:
# [README.md](README.md).
