# %% [markdown]
# # 13 · The whole model
#
# **How do you know that a second implementation computes the same model?**
#
# The chapters before this one build the parts. This one puts them in order, from a directory of
# files to logits. Then it compares with numbers that the released code produced: every layer, every
# choice. Where bf16 and FP8 round, "nearly equal" is not a useful answer. One rounding that falls
# the other way changes everything behind it. So you also see how to find the layer that is wrong.
#
# You need NumPy; chapters 01, 07 and 10 help. 25 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/13_whole_model.py`.
#
# Sources: `Transformer.forward` and `Block.forward` of the released inference/model.py; the V4.1
# report, §2; [the reference arrays](../tests/golden/v41_tiny_a/README.md), a random model of nine
# layers with every mechanism of the real one, and what the released code computes with it. The
# modules that this page arrives at: [model.py](../dsv41/model.py), [ced.py](../dsv41/ced.py) and
# [verify.py](../dsv41/verify.py).

# %%
from itertools import pairwise
from unittest import mock

import numpy as np

from lib.page import BLUE, GREY, INK, ORANGE, ROOT, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## A directory
#
# A release is `config.json` and tensors. The config says which tensors there must be, with which
# shape and type. `check` compares. Count the bytes: all tensors and the header make up the file.

# %%
import dsv41
from dsv41.checkpoint import Checkpoint, inventory
from dsv41.quant import ACTIVATION_FP8, FLOAT32, INDEX_FP4, MAIN_KV_FP4, OFFICIAL, WINDOW_KV_FP8

directory = ROOT / "tests/golden/v41_tiny_a"
checkpoint = Checkpoint(directory)
checkpoint.check()
table = inventory(checkpoint)
print("group                tensors  type        bytes")
for group, tensors, dtype, size in table[:8]:
    print(f"{group:20} {tensors:7}  {dtype:7} {size:9,}")
print(f"and {len(table) - 8} smaller rows")

whole = (directory / "model.safetensors").read_bytes()
header = 8 + int.from_bytes(whole[:8], "little")
assert header + sum(row[3] for row in table) == len(whole), "header and tensors fill the file"
assert not checkpoint.extra, "and no tensor is left over"

model = dsv41.load(directory)
config, params = model.config, model.params
print(f"{config.num_hidden_layers} layers, width {config.hidden_size}, "
      f"vocabulary {config.vocab_size}, {config.hc_mult} streams")  # fmt: skip

# %% [markdown]
# ## The last step, by loops
#
# A token leaves the last layer as four streams $X_i$ and four weights $A_i$. Its logits are:
#
# $$x = \sum_i A_i X_i, \qquad \hat x = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \varepsilon}} \odot w,
# \qquad \text{logit}_v = \hat x \cdot \text{head}_v$$
#
# There is no learned collapse: $A$ is what the last MoE sublayer predicted for its successor, and
# the head is that successor. One logit of token 71, one number at a time:

# %%
reference = {}
for name in ("fp32", "bf16q"):
    with np.load(directory / f"prompt_{name}.npz") as archive:
        reference[name] = {key: archive[key] for key in archive.files}
ids = reference["fp32"]["ids"][0, :72]

t, v = 71, 100
X, A = reference["fp32"]["L08.x_out"][t].tolist(), reference["fp32"]["L08.hc_ffn.pre"][t].tolist()
w, head = params["norm"]["weight"].tolist(), params["head"]["weight"][v].tolist()
x = [sum(A[i] * X[i][c] for i in range(4)) for c in range(64)]
rms = (sum(number**2 for number in x) / 64 + config.rms_norm_eps) ** 0.5
logit = sum(number / rms * w[c] * head[c] for c, number in enumerate(x))
print(f"A = {A[0]:.3f} {A[1]:.3f} {A[2]:.3f} {A[3]:.3f}   rms {rms:.4f}   logit {logit:.4f}")
close("one logit by loops = the reference", logit, reference["fp32"]["logits"][0, t, v], 5e-5)

# %% [markdown]
# ## From ids to logits in one page
#
# Forwards, the whole model is this, with $F$ attention and then MoE, in every layer:
#
# $$A', C, B = H(X), \qquad y = F\Big(\mathrm{norm}\big(\textstyle\sum_i A_i X_i\big)\Big), \qquad
# X_k \leftarrow C_k\, y + \textstyle\sum_j B_{jk} X_j, \qquad A \leftarrow A'$$
#
# At the start $X$ is the embedding four times and $A = (1, 0, 0, 0)$. Two layers add Engram to the
# streams first. The mechanisms are imported; the order is written out. `update` and `late` are
# there to be broken below.

# %%
from dsv41 import ced, csa2, mhc, verify
from dsv41.batch import make_batch
from dsv41.call import Call
from dsv41.mhc import hc_coefficients, hc_collapse, hc_update
from dsv41.model import engram_rows
from dsv41.ops import matmul_rows, rmsnorm

eps = config.rms_norm_eps


def forward(ids, numerics, update=hc_update, late=True, after=None):
    """ids (T,) -> logits (T, V) f32; after: a dict for the streams after every sublayer."""
    cache = model.new_cache(numerics)
    batch = make_batch([ids], starts=[0], slots=[model.open(cache)])
    cache.begin(batch)
    memory = engram_rows(config, model.classes, batch, cache)
    call = Call(batch, cache, config, numerics, memory)

    X = np.repeat(params["embed"]["weight"][ids][:, None], 4, axis=1)  # (T, S, D)
    A = np.tile(np.float32([1, 0, 0, 0]), (len(ids), 1))  # (T, S)
    for layer in config.plan:
        p = params["layers"][layer.index]
        if layer.engram is not None:
            X = ced.remember(X, p["engram"], layer, call)
        for name, F in (("attn", csa2.attention), ("ffn", ced.moe)):
            predictor = [p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")]
            new_A, C, B = hc_coefficients(X, *predictor, config, numerics)
            x = hc_collapse(X, A if late else new_A, numerics)  # (T, D)
            x = rmsnorm(x, p[f"{name}_norm"]["weight"], eps, numerics)
            y = F(x, p[name], layer, call)  # (T, D)
            X, A = update(X, y, C, B, numerics), new_A
            if after is not None:
                after[layer.index, name] = X
    x = rmsnorm(hc_collapse(X, A, numerics), params["norm"]["weight"], eps, numerics)
    return matmul_rows(x, params["head"]["weight"], numerics)  # (T, V)


for numerics in (FLOAT32, OFFICIAL):
    by_hand = forward(ids, numerics)
    same(f"{numerics.name}: this page = Model.logits", by_hand, model.logits(ids, numerics))

# %% [markdown]
# ## Against the released code, without rounding
#
# `FLOAT32` rounds nothing beyond float32 itself. Two programs that add in another order then
# differ by rounding noise. The limit for values is $5 \cdot 10^{-5}$ absolute ($10^{-4}$ for index
# scores). Choices and masks must be equal: which experts, which entries, which candidates.
# [compare_whole](../dsv41/verify.py#compare_whole) runs the ids once and compares every tensor that
# the reference stored. [compare_by_layer](../dsv41/verify.py#compare_by_layer) runs each layer
# alone, from the stored input of that layer.

# %%
rows = verify.compare_whole(model, reference["fp32"], FLOAT32)
alone = verify.compare_by_layer(model, reference["fp32"], FLOAT32)
print("layer    mode     tensors  choices  within the limit   alone")
for layer in config.plan:
    mine = [row for row in rows if row.name.startswith(f"L{layer.index:02d}.")]
    choices = sum(reference["fp32"][row.name].dtype.kind in "ib" for row in mine)
    good, good_alone = sum(r.within for r in mine), sum(r.within for r in alone[layer.index])
    print(f"{layer.index:5}    {layer.mode:8} {len(mine):7}  {choices:7}"
          f"  {good:16}  {good_alone:6}")  # fmt: skip
    assert good == good_alone == len(mine), f"layer {layer.index} agrees"
assert all(row.within for row in rows), "embedding, layers, final norm and logits agree"
assert [row.name for row in rows][-1] == "logits", "the last one compared is the logits"
print(f"{len(rows)} tensors agree")

# %%
streams = [row for row in rows if row.name.endswith("x_out")]
single = [row for found in alone.values() for row in found if row.name.endswith("x_out")]
with figure("All distances to the released code stay below the limit") as ax:
    ax.plot(range(9), [row.distance for row in streams], "o-", color=BLUE)
    ax.plot(range(9), [row.distance for row in single], "o-", color=ORANGE)
    ax.axhline(5e-5, color=GREY, linestyle="--")
    ax.text(0, 5.7e-5, "limit", color=INK)
    ax.text(8.15, streams[-1].distance, "one run", color=BLUE, va="center", fontweight="bold")
    ax.text(8.15, single[-1].distance, "layer alone", color=ORANGE, va="center", fontweight="bold")
    ax.set(yscale="log", ylim=(2e-7, 1e-4), xlim=(-0.3, 9.7), xticks=range(9))
    ax.set(xlabel="layer", ylabel="largest distance of the streams")
    ax.grid(axis="y")
worst = max(row.distance for row in streams)
assert 0 < worst < 5e-5, "not equal bits, but within the limit"

# %% [markdown]
# Noise from earlier layers is carried along in one run. A layer alone shows its own.
#
# ## Against the released code, with its rounding
#
# `OFFICIAL` rounds where the released code does: bf16 for every stored activation, FP8 for inputs
# of quantised linears and for the window, FP4 for main KV and index keys. Rounding hides noise: two
# sums that differ in the last float32 bit mostly give the same bf16. So here the aim is equal bits.
# It is reached for everything that a format has rounded. The logits stay float32 and agree to
# $10^{-6}$. The other float32 tensors (coefficients, gates, router weights) get a wider limit here,
# $10^{-4}$: on another processor one bf16 value inside a layer may fall the other way, shift the
# coefficients made from it, and be rounded away again.

# %%
trace = {}
official = model.logits(ids, trace=trace)
stored = reference["bf16q"]
for name, what in (
    ("x_out", "streams"),
    ("attn.swa_kv", "window KV"),
    ("cmp.main_kv", "main KV"),
    ("idx.k", "index keys"),
    ("idx.topk", "chosen entries"),
    ("moe.expert", "chosen experts"),
):
    names = [key for key in trace if key.endswith(name)]
    ours = np.concatenate([trace[key].ravel() for key in names]).astype(np.float32)
    theirs = np.concatenate([stored[key].ravel() for key in names]).astype(np.float32)
    same(f"{what}: {ours.size:,} values of {len(names)} layers", ours, theirs)
close("logits", official, stored["logits"][0], within=1e-6)
everything = verify.compare_whole(model, stored)
assert max(row.distance for row in everything) < 1e-4, "and every other tensor"

# %% [markdown]
# A warning belongs here. These 72 tokens were drawn so that no rounding and no choice is a near
# tie; the README of the arrays says how. On other tokens a rounding may flip. What happens then?
#
# ## One flipped rounding
#
# Take one number of the streams behind layer 1, and move it by one bf16 step. bf16 is the upper
# half of a float32, so that is an addition in integers. The rest of the model is untouched.
# For every layer, count the tokens whose streams differ.


# %%
def step_away(x):
    """x f32 holding a bf16 value -> the next bf16 value away from zero."""
    return (np.float32(x).reshape(1).view(np.uint32) + np.uint32(1 << 16)).view(np.float32)[0]


def flipped(token, channel, numerics=OFFICIAL):
    """-> logits and trace of a run in which one rounding behind layer 1 fell the other way."""
    done, found = [], {"ids": ids}

    def update(streams, y, post, comb, numerics):
        X = hc_update(streams, y, post, comb, numerics)
        done.append(X)
        if len(done) == 4:  # two sublayers each in layers 0 and 1
            X[token, 0, channel] = step_away(X[token, 0, channel])
        return X

    with mock.patch.object(ced, "hc_update", update), mock.patch.object(mhc, "hc_update", update):
        return model.logits(ids, numerics, found), found


def spread(found):
    """-> (layers, tokens) f32, largest distance of a token's streams from the right ones."""
    keys = [f"L{layer:02d}.x_out" for layer in range(9)]
    return np.stack([np.abs(found[key] - trace[key]).max(axis=(1, 2)) for key in keys])


flips = {(12, 30): "heals", (5, 3): "stays", (5, 20): "spreads"}
maps, runs = {}, {}
print("token channel            tokens that differ, behind layer 0 .. 8      logits move by")
for (token, channel), what in flips.items():
    logits, runs[what] = flipped(token, channel)
    maps[what] = spread(runs[what])
    counts = " ".join(f"{n:3}" for n in (maps[what] > 0).sum(axis=1))
    print(f"{token:5} {channel:7}  {what:8}  {counts}   {np.abs(logits - official).max():12.1f}")
    assert np.all(maps[what][:, :token] == 0), "no token before the flip differs"
same("it heals: the logits are the same bits", flipped(12, 30)[0], official)

# %% [markdown]
# Three numbers, three fates. The first step is lost in a later rounding: layer 4 gives the right
# bits again. The second stays with its token for a while. The third reaches FP8 and FP4 codes that
# other tokens read, then a top-k, and from there a different sum. Every token behind it differs.
# What moves the logits is not the size of the step. Without rounding, the same step:

# %%
exact = model.logits(ids, FLOAT32)
for numerics, base in ((FLOAT32, exact), (OFFICIAL, official)):
    moved = np.abs(flipped(5, 20, numerics)[0] - base).max()
    print(f"{numerics.name:9} logits move by at most {moved:.3f}")
    assert moved > 1 if numerics.bf16 else moved < 0.01, "rounding amplifies, float32 does not"
choices = [key for key in trace if key.endswith(("topk", "expert"))]
changed = sum(np.any(runs["spreads"][key] != trace[key], axis=1).sum() for key in choices)
print(f"choices that differ: {changed} of {len(choices) * len(ids)}")
assert changed > 100, "choices of entries and experts drift apart"

# %%
with figure("The same bf16 step in layer 1 heals, stays, or spreads", columns=3, sharey=True) as ax:
    for axis, ((token, _), what) in zip(ax, flips.items(), strict=True):
        seen = np.where(maps[what] > 0, np.log10(np.maximum(maps[what], 1e-9)), np.nan)
        axis.imshow(seen, origin="lower", aspect="auto", cmap="viridis_r", vmin=-4, vmax=1,
                    interpolation="nearest")  # fmt: skip
        axis.set_title(f"{what} (token {token})")
        axis.set(xlabel="token", xticks=(0, 24, 48, 71), yticks=range(9))
    ax[0].set_ylabel("behind layer")
    ax[0].text(20, 6, "white: equal bits\ndarker: larger", color=INK, fontsize=8)

# %% [markdown]
# ## Which layer is wrong?
#
# Suppose the third run came from another program. You have its intermediates and want to know where
# it departs. Compared in one run, nearly all layers depart. Compared *by layer*, each from its own
# stored input, only the culprit does.

# %%
whole_run = verify.compare_whole(model, runs["spreads"])
by_layer = verify.compare_by_layer(model, runs["spreads"])
print("layer              ", " ".join(f"{layer:3}" for layer in range(9)))
counts = [sum(not r.within for r in whole_run if r.name.startswith(f"L{n:02d}.")) for n in range(9)]
print("departing, one run ", " ".join(f"{n:3}" for n in counts))
counts_alone = [sum(not row.within for row in found) for found in by_layer.values()]
print("departing, alone   ", " ".join(f"{n:3}" for n in counts_alone))
culprit = [row for found in by_layer.values() for row in found if not row.within]
print(f"found: {culprit[0].name} at {culprit[0].index}")
same("alone, one tensor of layer 1 departs", np.array(counts_alone), [0, 1, 0, 0, 0, 0, 0, 0, 0])
assert culprit[0].index == (5, 0, 20), "and it names the very number"
assert min(counts[1:]) > 0, "in one run every layer from 1 on looks wrong"

# %% [markdown]
# ## What does each quantiser change?
#
# Start from FLOAT32 and switch on one rounding at a time with
# [Numerics.but](../dsv41/quant.py#Numerics.but). Measure the RMS change of the logits, once with
# the choices free, once with all choices of entries and experts held at those of the float32 run.


# %%
float_trace = {}
base = model.logits(ids, FLOAT32, float_trace)


def held(numerics):
    """Logits with the float32 run's choices of entries and experts."""
    experts = iter([np.sort(float_trace[f"L{n:02d}.moe.expert"], axis=1) for n in range(9)])

    def select(x, c_q, p, layer, call):
        call.shared.selected[layer.index] = float_trace[f"L{layer.index:02d}.idx.topk"]

    entries = mock.patch.object(csa2, "select", select)
    with entries, mock.patch("dsv41.moe.index_topk", lambda *_: next(experts)):
        return model.logits(ids, numerics)


def rms_change(logits):
    return np.sqrt(np.mean((logits - base) ** 2))


rounding = {
    "bf16 storage": {"bf16": True},
    "FP8 activations": {"activation": ACTIVATION_FP8},
    "FP8 window KV": {"window_kv": WINDOW_KV_FP8},
    "FP4 main KV": {"main_kv": MAIN_KV_FP4},
    "FP4 index": {"index": INDEX_FP4},
}
rounding["all five"] = {key: value for one in rounding.values() for key, value in one.items()}
same("held at its own choices nothing changes", held(FLOAT32), base)
effect = {}
print(f"logits have RMS {np.sqrt(np.mean(base**2)):.1f}\n{'':18}choices held   choices free")
for name, changes in rounding.items():
    numerics = FLOAT32.but(**changes)
    effect[name] = rms_change(held(numerics)), rms_change(model.logits(ids, numerics))
    print(f"{name:18}{effect[name][0]:12.2f}{effect[name][1]:15.1f}")

# %% [markdown]
# Held, only values change: bf16 is nearly free, eight and four bits cost something, and the index
# costs nothing, for it only chooses. Free, every effect at least doubles, and that of the index is
# the largest of the five. A choice is a step function. The weights are random, so this model says
# where the effect comes from, not how large it is in the released one.

# %%
with figure("Most of the change comes through choices, not through values") as ax:
    for y, (fixed, free) in enumerate(reversed(effect.values())):
        ax.barh(y, free, color=ORANGE, height=0.62)
        ax.barh(y, fixed, color=BLUE, height=0.62)
    ax.set_yticks(range(len(effect)), list(reversed(effect)))
    ax.text(0.37, 5.15, "blue: choices held", color=BLUE, va="center", fontweight="bold")
    ax.text(0.37, 4.68, "orange: choices free", color=ORANGE, va="center", fontweight="bold")
    ax.set(xlabel="RMS change of the logits", xlim=(0, 0.58))
    ax.grid(axis="x")
close("the index changes no value", effect["FP4 index"][0], 0, within=1e-9)
assert all(free > 2 * fixed for fixed, free in effect.values()), "free choices at least double it"
five = sorted(list(rounding)[:5], key=lambda name: effect[name][1])
assert (five[0], five[-1]) == ("bf16 storage", "FP4 index"), "free: bf16 least, the index most"
parts = np.sqrt(sum(effect[name][0] ** 2 for name in five))
print(f"root of the sum of squares of the five: {parts:.1f}, all five together: "
      f"{effect['all five'][0]:.1f}")  # fmt: skip
close("held, the five add like independent errors", parts, effect["all five"][0], within=0.04)

# %% [markdown]
# **Break it, twice.** Use the new $A$ at once instead of one sublayer late. And, separately,
# contract $B$ over its second axis. Shapes are right, nothing raises. Compare the streams after
# every sublayer with the right ones.


# %% tags=["break"]
def over_the_other_axis(X, y, C, B, numerics):
    return hc_update(X, y, C, B.transpose(0, 2, 1), numerics)


right, at_once, other_axis = {}, {}, {}
forward(ids, FLOAT32, after=right)
wrong_logits = {
    "A used at once": forward(ids, FLOAT32, late=False, after=at_once),
    "B transposed": forward(ids, FLOAT32, update=over_the_other_axis, after=other_axis),
}
print("after               A used at once   B transposed")
for layer, name in list(right)[:4]:
    key = layer, name
    gaps = [np.abs(run[key] - right[key]).max() for run in (at_once, other_axis)]
    print(f"layer {layer}, {name:10}{gaps[0]:15.1f}{gaps[1]:15.1f}")
print("RMS change of the logits")
print(f"right               {rms_change(forward(ids, FLOAT32)):.1f}")
for name, logits in wrong_logits.items():
    print(f"{name:18}  {rms_change(logits):.1f}")
    assert rms_change(logits) > 0.1, f"{name}: another model"
for run in (at_once, other_axis):
    assert np.abs(run[0, "attn"] - right[0, "attn"]).max() < 0.01, "the first sublayer hides it"
    assert np.abs(run[0, "ffn"] - right[0, "ffn"]).max() > 0.05, "the second one shows it"

# %% [markdown]
# Both hide in the first sublayer. All four streams are equal there. So any $A$ gives a multiple of
# the same vector, and the norm behind it removes the factor. And rows of $B$ sum to nearly 1, just
# as columns do. A test of one sublayer from fresh streams finds neither.
#
# ## How long must a test prompt be?
#
# *My short test agrees to the bit, and the real model is wrong. How?* A prompt tests only what it
# reaches. Make a mistake in one number of the config, and look for the first token that shows it.

# %%
alone = FLOAT32.but(batch_invariant=True)
unchanged = model.logits(ids, alone)
released = dsv41.preset("v4.1-flash")


def first_shown(**mistake):
    """-> tokens until a logit moves, and until layer 2, of pairs, has an entry too many."""
    wrong, found = dsv41.Model(config.but(**mistake), params, classes=model.classes), {}
    gap = np.abs(wrong.logits(ids, alone, found) - unchanged)
    moved = (gap > 1e-3).any(axis=1)  # rounding noise is less
    chosen = (found["L02.idx.topk"] >= 0).sum(axis=1) > config.index_topk
    return int(moved.argmax()) + 1, int(chosen.argmax() + chosen.any())


def reaches(c):
    """-> tokens that must be there: beyond the window, k entries, k pairs, the pool."""
    k, pool = c.index_topk, c.candidate_topk_blocks * c.candidate_block_size
    return c.sliding_window + 1, k + 1, 2 * (k + 1), pool + 1


window, _ = first_shown(sliding_window=config.sliding_window + 1)
entries, pairs = first_shown(index_topk=config.index_topk + 1)
pool, _ = first_shown(candidate_topk_blocks=config.candidate_topk_blocks + 1)
shown = (window, entries, pairs, pool)
print("mistake                    first seen here   needs here   needs in the released model")
names = ("window one too long", "an entry too many", "the same, in pairs", "a block too many")
for name, *row in zip(names, shown, reaches(config), reaches(released), strict=True):
    print("{:20} {:18} {:14} {:14,}".format(name, *row))
assert shown[:3] == reaches(config)[:3], "the first token beyond shows it"
assert pool >= reaches(config)[3], "no prompt within the pool can"

# %% [markdown]
# So a test needs more tokens than each of these numbers, and an odd number of them, so that a pair
# is open at the end (chapter 04). Of the released model, 16,384 tokens say nothing about the pool.
#
# ## Chunks, batches, and equal bits
#
# A row of the model does not depend on how many other rows are computed with it. As mathematics.
# As float32 it does: a matrix product of 72 rows may add in another order than one of 1 row.
# `batch_invariant` sends rows through in blocks of eight, always, and buys equal bits with time.


# %%
def in_chunks(numerics, cuts):
    cache = model.new_cache(numerics)
    slot, pieces = model.open(cache), pairwise([0, *cuts, len(ids)])
    return np.concatenate([model.step(cache, [slot], [ids[a:b]]) for a, b in pieces])


second = reference["fp32"]["ids"][1, :60]
print("                   FLOAT32         batch_invariant")
for name, cuts in (("2 chunks", [40]), ("4 chunks", [5, 6, 33]), ("token by token", range(1, 72)),
                   ("beside another", None)):  # fmt: skip
    says = []
    for numerics in (FLOAT32, FLOAT32.but(batch_invariant=True)):
        once = model.logits(ids, numerics)
        if cuts is None:
            again = model.logits([ids, second], numerics)[: len(ids)]
        else:
            again = in_chunks(numerics, cuts)
        assert np.abs(again - once).max() < 5e-5, f"{name}: the same up to rounding"
        says.append("equal bits" if np.array_equal(again, once) else "rounding noise")
    print(f"{name:17}  {says[0]:14}  {says[1]}")
    assert says[1] == "equal bits", f"{name}: equal bits under batch_invariant"

# %% [markdown]
# **Break it.** Compare chunks without `batch_invariant`, and demand equal bits. The test fails
# although no line of the model is wrong. The same demand with it finds real errors.

# %% tags=["break"]
once, stepwise = model.logits(ids, FLOAT32), in_chunks(FLOAT32, range(1, 72))
try:
    same("chunked = at once", stepwise, once)
    complained = False
except AssertionError:
    complained = True
print("plain:           ", "refused" if complained else "accepted")
assert complained, "a correct model fails a test of bits"
rows_alone = FLOAT32.but(batch_invariant=True)
same("batch_invariant: chunked = at once", in_chunks(rows_alone, range(1, 72)),
     model.logits(ids, rows_alone))  # fmt: skip

# %% [markdown]
# ## The module gives the same numbers
#
# The package has the comparison ready: `compare_whole` and `compare_by_layer`, over any directory
# and any `.npz` with these names. Last, 12 more tokens, one call each, behind the prompt, against
# the released code's own decode steps.

# %%
with np.load(directory / "decode_bf16q.npz") as archive:
    decode = {key: archive[key] for key in archive.files}
cache = model.new_cache()
slot = model.open(cache)
same("prompt again", model.step(cache, [slot], [ids]), official)
steps, streams = [], []
for token in stored["ids"][0, 72:]:
    found = {}
    steps.append(model.step(cache, [slot], [[token]], trace=found)[0])
    streams.append(found["L08.x_out"][0])
same("12 decode steps: the streams behind the last layer", np.stack(streams), decode["L08.x_out"])
close("12 decode steps: logits", np.stack(steps), decode["logits"][0], within=1e-6)
in_one = model.logits(stored["ids"][0])
close("84 tokens in one call = prompt and steps", in_one[72:], np.stack(steps), within=1e-6)

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. From streams to logits, for all tokens at once. One input holds a token whose streams are zero.
# 2. Find the first layer that departs by more than the limit, −1 for none. A NaN agrees with
#    nothing, and −inf agrees with −inf: index scores of invisible entries are −inf on both sides.
# 3. Move bf16 values one step *toward* zero. None of them is zero. The inputs include negative
#    numbers and powers of two.


# %% tags=["exercise"]
def to_logits(streams, pre, weight, head):
    """streams (T, S, D), pre (T, S), weight (D,), head (V, D), all f32 -> (T, V) f32"""
    return ...


check("13.to_logits", to_logits)


# %% tags=["exercise"]
def first_departure(ours, theirs, limit):
    """ours, theirs (layers, T, N) f32 -> int"""
    return ...


check("13.first_departure", first_departure)


# %% tags=["exercise"]
def step_closer(x):
    """x (N,) f32, all bf16 values -> (N,) f32, their neighbours toward zero in bf16"""
    return ...


check("13.step_closer", step_closer)

# %% [markdown]
# ## What we learned
#
# - The whole model is one page: embed, forty times (here nine) two sublayers, collapse, norm, head.
# - Without rounding, two programs agree up to noise, and their choices are equal. With the released
#   rounding they agree in bits, on tokens without near ties.
# - One flipped bf16 step heals, stays or spreads. When it spreads it does so through codes and
#   choices: 0.002 in float32, more than 1 with rounding.
# - Compare layer by layer from stored inputs: one run says *whether*, only this says *where*.
# - A transposed $B$, or an $A$ used too early, does not show while all streams are equal. Test from
#   the middle of the model.
# - A prompt tests what it reaches: more tokens than the window, than k pairs, than the pool.
# - Equal bits for chunks and batches need `batch_invariant`. Without it, ask for closeness.
#
# Worked solutions: [solutions/13_whole_model.py](solutions/13_whole_model.py). Next: [14 The KV
# cache](14_kv_cache.ipynb). All chapters: [README.md](README.md).
