# %% [markdown]
# # 19 · Training the miniature, and what each part is worth
#
# **The architecture is all there. Does it learn, and which part earns its keep?**
#
# `data/mini` is V4.1's plan in twelve layers, trained from nothing on 15 million tokens of manuals
# and novels: 3,400 steps, and 1,800 more for the drafter, on one H200. This chapter builds what
# such a run needs, takes real steps with a much smaller model, reads the run's log, and then takes
# the trained model apart: bits per byte and recall with and without a part.
#
# You need chapters 07 and 17 in outline. 30 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/19_training_the_miniature.py`.
#
# Sources: the V4.1 report, §2.5, §4.1 and §4.2.2, for the rules; the sizes of the run are ours, in
# [run.json](../data/runs/mini/run.json). The modules that this page arrives at:
# [loop.py](../dsv41/train/loop.py), [packing.py](../dsv41/train/packing.py),
# [gradients.py](../dsv41/train/gradients.py), [schedule.py](../dsv41/train/schedule.py),
# [recall.py](../dsv41/train/recall.py) and [worth.py](../dsv41/worth.py).

# %%
import json
import lzma
import math
import re
import tempfile

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
# ## One number: bits per byte
#
# A loss per token depends on how long the tokens are. So add up $-\log_2 p$ over the tokens of a
# text and divide by its **bytes**:
#
# $$\frac{1}{\text{bytes}} \sum_t -\log_2 p_t$$
#
# The end of a document (eos) is not text: it has no bytes, and its bits do not count. Three tokens
# and an eos, by hand. Then a scale to read such numbers on, where 8 is no compression: two tables
# by counting, `xz` on the same text, and a 5-gram as
# [the corpus's README](../data/corpus/README.md) has it.

# %%
import dsv41
from dsv41 import FLOAT32, OFFICIAL, worth
from dsv41.dispatch import replaced
from dsv41.presets import preset
from dsv41.tensors import flatten
from dsv41.train import gradients, packing, recall, schedule
from dsv41.train.data import read_documents

p = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 16])  # of "the", " cat", "s", eos
in_bits = [-math.log2(x) for x in p]
text_bytes = len("the cats")
print("bits:", *in_bits, f"  bytes: {text_bytes}")
print("bits per byte:", sum(in_bits[:3]) / text_bytes)


def bits_per_byte(logits, targets, eos, text_bytes):
    """logits (n, V), targets (n,) -> bits per byte"""
    z = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    found = log_p[np.arange(len(targets)), targets]
    return -found[targets != eos].sum() / math.log(2) / text_bytes


logits = np.log(np.tile([1 / 16, 1 / 16, 1 / 2, 1 / 4, 1 / 8], (4, 1)))  # ids 0, eos, 2, 3, 4
by_hand = bits_per_byte(logits, np.array([2, 3, 4, 1]), 1, text_bytes)
close("6 bits in 8 bytes", by_hand, 0.75, within=1e-12)

corpus = ROOT / "data/corpus"
train_texts = list(read_documents(corpus / "train.txt"))
heldout_texts = list(read_documents(corpus / "heldout.txt"))
told = (corpus / "README.md").read_text(encoding="utf-8")
baseline = {
    name: float(re.search(rf"{name}.*\| (\d\.\d+) \|", told)[1]) for name in ("xz -9`", "5-gram")
}
train, heldout = (
    np.frombuffer("".join(texts).encode(), np.uint8).astype(np.int64)
    for texts in (train_texts, heldout_texts)
)
one = np.bincount(train, minlength=256) + 0.5
two = np.bincount(256 * train[:-1] + train[1:], minlength=65_536).reshape(256, 256) + 0.05
scale = {
    "a byte, by its frequency": -np.log2(one / one.sum())[heldout].mean(),
    "a byte, by the one before": -np.log2(two / two.sum(1, keepdims=True))[
        heldout[:-1], heldout[1:]
    ].mean(),
    "xz -9": 8 * len(lzma.compress((corpus / "heldout.txt").read_bytes(), preset=9)) / len(heldout),
    "5-gram of tokens": baseline["5-gram"],
}
for name, bits in scale.items():
    print(f"{name:26} {bits:.4f} bits per byte")
close("xz: as the README says", scale["xz -9"], baseline["xz -9`"], within=0.005)

# %% [markdown]
# **Break it.** Three ways to a wrong number: counting eos, dividing by tokens, and averaging the
# documents' numbers. A document of 2 bytes at 4 bits each weighs as much as a book then.

# %% tags=["break"]
right = sum(in_bits[:3]) / text_bytes
print(f"right {right}   with eos {sum(in_bits) / text_bytes}   per token {sum(in_bits) / 4}")
nats, sizes = np.array([8.0, 12_000.0]), np.array([2, 10_000])  # in bits here
print(f"two documents: {nats.sum() / sizes.sum():.4f}, averaged {np.mean(nats / sizes):.4f}")
assert sum(in_bits) / text_bytes == 1.25 != right, "eos makes 1.25 of 0.75"
assert np.mean(nats / sizes) > 2 * nats.sum() / sizes.sum(), "averaged: twice the bits"

# %% [markdown]
# ## Packing: documents of any length, samples of one
#
# A document becomes bos, tokens, eos, and is cut at every $L$ tokens. The pieces go, the longest
# first, into the sample where they leave the least room. What stays empty is padding.


# %%
def pack(sizes, length):
    """Sizes of documents, bos and eos included -> lists of piece sizes, one a sample"""
    pieces = [min(length, n - at) for n in sizes for at in range(0, n, length)]
    samples = []
    for piece in sorted(pieces, reverse=True):
        fits = [s for s in samples if sum(s) + piece <= length]
        best = max(fits, key=sum) if fits else []
        if not fits:
            samples.append(best)
        best.append(piece)
    return samples


packed = pack([37, 9, 3, 12, 7, 4], length=16)
print(packed, f"padding {1 - sum(map(sum, packed)) / (16 * len(packed)):.3f}")
documents = [np.arange(n - 2) + 3 for n in (37, 9, 3, 12, 7, 4)]
module = packing.pack(documents, 16, np.random.default_rng(0))
in_sizes = sorted(sorted(p.stop - p.start for p in sample) for sample in module)
same("packing.pack: the same samples", str(in_sizes), str(sorted(map(sorted, packed))))
filled = packing.fill(module, documents, 16)
for row, segments in zip(filled.ids, filled.segments, strict=True):
    print("".join(f"{i:4}" for i in row), "  segments", *(s if s >= 0 else "." for s in segments))
same("no target across an edge", (filled.targets[:, :-1] >= 0), (
    (filled.segments[:, 1:] == filled.segments[:, :-1]) & (filled.segments[:, 1:] >= 0)
))  # fmt: skip

# %% [markdown]
# ## A model small enough to train here
#
# Five layers of the real plan, 64 channels, and no tokenizer: a token is a byte. Its weights are
# random; the text is the beginning of [train.txt](../data/corpus/train.txt).

# %%
from dsv41.init import random_params
from dsv41.train.loop import Trainer, to_masters
from dsv41.train.model import Documents, Options, evaluate, loss_and_grads
from dsv41.train.optimizer import Optimizer
from dsv41.train.run import Run

small = preset("tiny").but(
    vision_config=None,
    num_hidden_layers=5,
    compress_ratios=(0, 2, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=preset("tiny").engram_num_embeddings[:1],
    n_routed_experts=4,
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(4,),
)
classes = np.arange(small.vocab_size) % small.engram_compressed_vocab_size
options = Options(classes)


def in_bytes(text, most=400):
    return np.frombuffer(text.encode()[:most], np.uint8).astype(np.int64) + 32


texts = [in_bytes(text) for text in train_texts[:40]]
unseen = Documents([np.concatenate([[0], in_bytes(text, 256)]) for text in heldout_texts[:4]])
params = to_masters(random_params(small, np.random.default_rng(0)))
print(f"{sum(leaf.size for leaf in flatten(params).values()):,} numbers")
nats, count = evaluate(params, small, unseen, FLOAT32, options)
print(f"before a step: {nats / count / math.log(2):.2f} bits per byte of unseen text")
close("288 ids, all alike: log2 288", nats / count / math.log(2), math.log2(288), within=1)

# %% [markdown]
# **Break it.** Put two documents into a sample and forget the edge. The second one now sees the
# first: its loss depends on what happens to lie beside it. As documents of their own, both keep
# the loss they have alone.

# %% tags=["break"]
first, other, second = (np.concatenate([[0], in_bytes(t, 60)]) for t in train_texts[:3])
wanted = [np.zeros(len(first), bool), second != 0]  # the text of the second, without its bos


def loss_of_second(beside, glued):
    if glued:
        documents = Documents([np.concatenate([beside, second])], wanted=[np.concatenate(wanted)])
        return evaluate(params, small, documents, FLOAT32, options)
    documents = Documents([beside, second], wanted=wanted)
    return evaluate(params, small, documents, FLOAT32, options)


alone = evaluate(params, small, Documents([second], wanted=wanted[1:]), FLOAT32, options)
kept = [loss_of_second(beside, glued=False) for beside in (first, other)]
wrong = [loss_of_second(beside, glued=True) for beside in (first, other)]
print(f"alone {alone[0]:.3f} nats   packed {kept[0][0]:.3f}, {kept[1][0]:.3f}"
      f"   glued {wrong[0][0]:.3f}, {wrong[1][0]:.3f}")  # fmt: skip
close("packed: its loss, whoever is beside it", [k[0] for k in kept], [alone[0]] * 2, within=1e-3)
assert abs(wrong[0][0] - wrong[1][0]) > 0.02, "glued: the neighbour moves the loss"
assert wrong[0][1] == alone[1], "the same tokens are predicted"

# %% [markdown]
# ## The rate, the clip, the loop
#
# The learning rate goes up in a line, stays, and comes down along half a cosine. The clip scales
# all gradients by one factor, so that their common norm is at most 1. And a step is five lines:
# documents, gradients, clip, update, router biases.


# %%
def rate(step, peak, final, warmup, decay_from, decay_to):
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < decay_from:
        return peak
    along = min(1, (step - decay_from) / (decay_to - decay_from))
    return final + (peak - final) * (1 + math.cos(math.pi * along)) / 2


def clip(grads, most):
    """One factor for all, in place -> the norm before"""
    leaves = [g[1] if isinstance(g, tuple) else g for g in flatten(grads).values()]
    norm = math.sqrt(sum(float((g * g).sum()) for g in leaves))
    if norm > most:
        for g in leaves:
            g *= np.float32(most / norm)
    return norm


plan = (0.02, 0.002, 3, 12, 24)
want = [schedule.Schedule(*plan).lr(step) for step in range(30)]
same(
    "Schedule: the same rates", np.array([rate(step, *plan) for step in range(30)]), np.array(want)
)
vectors = {"a": {"weight": np.float32([3, 0])}, "b": {"weight": np.float32([[0, 4]])}}
same("3 and 4: norm 5", clip(vectors, 1.0), 5.0)
close("clipped: 0.6 and 0.8", vectors["a"]["weight"], [0.6, 0], within=1e-7)
vectors = {"a": {"weight": np.float32([3, 0])}, "b": {"weight": np.float32([[0, 4]])}}
same("gradients.clip: the same norm", gradients.clip(vectors, 1.0, step=0), 5.0)

# %%
run = Run(length=128, batch=2, steps=24, peak=0.02, final=0.002, warmup=3, decay_from=12)
batches, optimizer, losses, at_six = packing.Batches(texts, 128, 2, seed=0), None, [], None
optimizer = Optimizer(small, params)
for step in range(run.steps):
    sample = batches(step)
    pieces = [
        ids[segments == n]
        for ids, segments in zip(sample.ids, sample.segments, strict=True)
        for n in range(segments.max() + 1)
    ]
    loss, grads, info = loss_and_grads(params, small, pieces, FLOAT32, options)
    norm, lr = clip(grads, 1.0), rate(step, *plan)
    optimizer.step(grads, lr)
    for layer, load in info["load"].items():
        gate, text_load = params["layers"][layer]["ffn"]["gate"], load[0]
        gate["bias"] += np.float32(0.001) * np.sign(text_load.mean() - text_load)
    losses.append(info["next_token"] / math.log(2))
    if step == 5:
        at_six = {name: leaf.copy() for name, leaf in flatten(params).items()}
    if step in (0, 4, 8, 23):
        print(f"step {step + 1:2}  {losses[-1]:.2f} bits per byte  rate {lr:.4f}")

nats, count = evaluate(params, small, unseen, FLOAT32, options)
learnt = nats / count / math.log(2)
print(f"unseen text: {learnt:.2f} bits per byte")
assert learnt < scale["a byte, by its frequency"], "24 steps: better than counting bytes"
assert learnt > scale["a byte, by the one before"], "and not yet as good as counting pairs"

# %% [markdown]
# ## Several passes, one gradient
#
# A batch that does not fit into memory is run in passes. The loss is a mean over all predicted
# tokens, so a pass counts by **its share of the tokens**. With equal shares for passes of 19 and
# 119 tokens, a token of the short one weighs six times as much as one of the long.

# %%
passes = [[texts[0][:20]], [texts[1][:120]]]
fresh = to_masters(random_params(small, np.random.default_rng(1)))
loss, whole, info = loss_and_grads(fresh, small, passes[0] + passes[1], FLOAT32, options)
alone = [loss_and_grads(fresh, small, some, FLOAT32, options) for some in passes]
shares = [part[2]["targets"] / info["targets"] for part in alone]
name = "layers.3.attn.wo_a.weight"
wholly = flatten(whole)[name]
added = sum(share * flatten(part[1])[name] for share, part in zip(shares, alone, strict=True))
equal = sum(flatten(part[1])[name] for part in alone) / 2
size = np.abs(wholly).max()
print("shares:", *(f"{share:.4f}" for share in shares), f"  ratio {shares[1] / shares[0]:.2f}")
print(f"error, half and half: {np.abs(equal - wholly).max() / size:.2f} of the largest entry")
close("two passes = the whole batch", added / size, wholly / size, within=1e-3)
assert np.abs(equal - wholly).max() > 0.1 * size, "equal shares: another gradient"
total = None
for share, part in zip(shares, alone, strict=True):
    total = gradients.accumulate(total, part[1], share)
close("gradients.accumulate: the same", flatten(total)[name] / size, added / size, within=1e-6)

# %% [markdown]
# ## Killed and resumed, to the bit
#
# The batch of a step depends on (seed, step) and nothing else is random. So weights, optimizer
# state and the step's number are all there is to save. [Trainer](../dsv41/train/loop.py#Trainer)
# takes three steps and is thrown away. A second one finds the file and takes three more. Its
# weights have the bits of the loop above, which never stopped.

# %%
with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
        trainer = Trainer(small, run, texts, classes, folder)
        print("begins at step", trainer.done)
        for _ in range(3):
            record = trainer.step()
        trainer.save()
    resumed = flatten(trainer.params)
differing = [name for name in at_six if at_six[name].tobytes() != resumed[name].tobytes()]
print(f"{len(at_six)} tensors, {len(differing)} differ")
assert not differing, "resumed = never stopped = the loop by hand, bit for bit"
close("and the sixth loss", record["loss"] / math.log(2), losses[5], within=1e-9)

# %% [markdown]
# ## The log of the real run
#
# [log.jsonl](../data/runs/mini/log.jsonl) has a line a step, as it was written on the H200. Every
# 200 steps the run was asked for bits per byte of all held-out text, and for recall: facts
# `[set happy turtle = wisdom]` among real text, asked for again so many tokens later. A blind guess
# is right once in 64 times, and naming any value that was shown once in 16. Two shorter runs
# followed: [second.json](../data/runs/mini/second.json) goes on for 400 steps and trains the
# drafter for 1,500 more, [third.json](../data/runs/mini/third.json) moves the routers' biases.

# %%
folder = ROOT / "data/runs/mini"
log, second, third = (
    [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
    for name in ("log", "second", "third")
)
setup, went_on = (
    json.loads((folder / f"{name}.json").read_text("utf-8"))["run"] for name in ("run", "second")
)
main, drafter = log[: setup["steps"]], second[went_on["steps"] :]
tested = [r for r in main if "heldout" in r]
steps = [r["step"] + 1 for r in tested]
bits = [r["heldout"] for r in tested]
print("train split:", re.search(r"\| train \|.*?\| ([\d,]+) \| \w+ \|", told)[1], "tokens")
for name, run_log in (("run", log), ("second", second), ("third", third)):
    minutes = sum(r["seconds"] for r in run_log) / 60
    print(f"{name:6} {sum(r['tokens'] for r in run_log):11,} tokens in {minutes:4.1f} minutes")
print(
    f"of these, steps of the model: {len(main):,}; of the drafter, in the second: {len(drafter):,}"
)
print("steps   bits per byte   recall at", *tested[0]["recall"])
for r in (r for r in tested if r["step"] + 1 in (200, 600, 1000, 1400, 1800, 2000, 2400, 3000)):
    right = "  ".join(f"{share:4.0%}" for share in r["recall"].values())
    print(f"{r['step'] + 1:5}   {r['heldout']:.4f}          {right}")
assert bits == sorted(bits, reverse=True), "held-out bits fall at every look"
assert bits[-1] < scale["5-gram of tokens"] < scale["xz -9"], "and end below the 5-gram's"

with figure("Bits fall smoothly; recall is chance for 1,800 steps, then it is all there",
            columns=2) as (left, right):  # fmt: skip
    left.plot(steps, bits, "o-", color=BLUE, markersize=3)
    for name, colour in (("xz -9", GREY), ("5-gram of tokens", ORANGE)):
        left.axhline(scale[name], color=colour, linewidth=0.8)
        left.text(3000, scale[name] + 0.02, name, color=colour, ha="right")
    left.text(1700, 1.5, "held out", color=BLUE, fontweight="bold")
    left.set(xlabel="step", ylabel="bits per byte", ylim=(1.1, 2.5))
    for distance, colour in (("128", GREEN), ("512", PURPLE), ("2048", BLUE)):
        shares = [r["recall"][distance] for r in tested]
        right.plot(steps, shares, "o-", color=colour, markersize=3, alpha=0.8)
    right.axhline(1 / 16, color=GREY, linewidth=0.8)
    right.text(100, 0.19, "grey: any value that was shown", color=GREY)
    right.text(2080, 0.6, "128, 512 and\n2,048 tokens", color=INK)
    right.set(xlabel="step", ylabel="facts recalled")

# %% [markdown]
# Between two looks, 1,800 and 2,000, recall goes from chance to 100%, at all distances at once:
# what was learnt is to look a fact up, not to reach a bit further. The training loss hardly tells.
# A step has 2 x 256 answers among 32,768 tokens; knowing them instead of guessing one of 64 values
# is worth

# %%
worth_nats = 512 * math.log(64) / 32_768
window = np.array([r["loss"] for r in main[1800:2000]])
print(f"all answers: {worth_nats:.3f} nats of {window.mean():.2f}; ", end="")
print(f"one step to the next scatters by {window.std():.3f}")
at = steps.index(2000)
assert max(tested[at - 1]["recall"].values()) < 0.15, "step 1,800: chance"
assert min(tested[at]["recall"].values()) == 1, "step 2,000: every fact at every distance"
assert worth_nats < window.std(), "the loss of a step cannot show it: ask the question"

# %% [markdown]
# Three more columns. **Loads**: the most loaded expert of any layer, over an even share. **QAT**:
# from step 2,700 on the forward pass reads weights, activations and caches as they will be stored.
# **Wide selections**: until step 400 a query may read 256 entries instead of 64.

# %%
loss, index, seconds = (np.array([r[k] for r in main]) for k in ("loss", "index", "seconds"))
most = np.array([r["load"][1] for r in main])
print("steps           loss    index loss   busiest expert   seconds a step (median)")
for a in (0, 300, 400, 2500, 2600, 2700, 2900):
    b = a + 100
    row = f"{loss[a:b].mean():.3f}   {index[a:b].mean():.3f}        {most[a:b].mean():.2f}"
    print(f"{a:4} .. {b:4}    {row}             {np.median(seconds[a:b]):.2f}")
before, after = slice(2600, 2700), slice(2700, 2800)
noise = math.sqrt((loss[before].var() + loss[after].var()) / 100)
change = loss[after].mean() - loss[before].mean()
print(f"QAT: loss {change:+.3f} +- {noise:.3f}, index loss x "
      f"{index[after].mean() / index[before].mean():.2f}, a step takes x "
      f"{np.median(seconds[after]) / np.median(seconds[before]):.2f}")  # fmt: skip
assert abs(change) < 2 * noise, "no cost in the loss that could be told from chance"
assert index[after].mean() > 1.1 * index[before].mean(), "4-bit index keys: harder to imitate"
assert most[:100].mean() > 2 * most[-100:].mean(), "biases level the load"
assert most[-100:].mean() > 1.5, "but not to even: 16 experts, batches of one step"
moved = [abs(r["heldout"] - second[went_on["steps"] - 1]["heldout"]) for r in third[-1:]]
print(f"the third run's biases move held-out text by {moved[0]:.4f} bits per byte")

# %% [markdown]
# ## What is each part worth?
#
# Now the trained model itself. Take one part away, or make it exact, and ask again. Nothing is
# trained anew: a part that the others rely on looks dearer than it would be in a model that grew
# up without it. And the sample is small, the first 640 tokens of two held-out documents: it cannot
# tell 0.005 from nothing. The pool holds 512 entries, so it has hardly anything to leave out here.

# %%
mini = dsv41.load(ROOT / "data/mini")
config = mini.config
print(f"{len(config.plan)} layers, window {config.sliding_window}, {config.index_topk} entries")
parts, text_bytes = [], 0
for text in heldout_texts[:2]:
    ids = mini.tokenizer.encode(text)[:640]
    parts.append(np.array([config.bos_token_id, *ids]))
    text_bytes += len(mini.tokenizer.decode(ids).encode())


def measure(model, parts, text_bytes, numerics=OFFICIAL, traces=None):
    bits = 0
    for ids in parts:
        trace = None if traces is None else {}
        logits = model.logits(ids[:-1], numerics, trace)
        bits += bits_per_byte(logits, ids[1:], config.eos_token_id, text_bytes)
        if traces is not None:
            traces.append(trace)
    return bits


rng, traces = np.random.default_rng(0), []
exact = worth.CACHES["all caches in float32"]
shipped = measure(mini, parts, text_bytes, traces=traces)
found = {
    "caches in float32": measure(mini, parts, text_bytes, exact),
    "no candidate pool": measure(worth.without_pool(mini), parts, text_bytes),
    "no Engram": measure(worth.without_engram(mini), parts, text_bytes),
}
for name, ops in (("entries by chance", worth.chance(rng)), ("windows only", worth.nothing())):
    with replaced(**ops):
        found[name] = measure(mini, parts, text_bytes)
print(f"{'as shipped':20} {shipped:.2f} bits per byte of {text_bytes:,} bytes")
for name, bits in found.items():
    print(f"{name:20} {bits:.2f}")
assert abs(found["caches in float32"] - shipped) < 0.01, "4-bit and 8-bit caches: next to nothing"
assert abs(found["no candidate pool"] - shipped) < 0.01, "the pool: nothing that counts here"
assert found["no Engram"] > shipped + 0.1, "Engram is missed"
assert shipped < found["entries by chance"] < found["windows only"], "so are chosen entries"
short = [parts[0][:100]]
module = worth.bits_per_byte(mini, short, 300)
close("worth.bits_per_byte: the same", measure(mini, short, 300), module, within=1e-9)

with figure("Bits miss Engram most and a selection little: ask for a fact, too") as ax:
    names, costs = list(found), [bits - shipped for bits in found.values()]
    ax.barh(names[::-1], costs[::-1], color=[ORANGE, ORANGE, PURPLE, BLUE, BLUE], height=0.6)
    for y, cost in enumerate(costs[::-1]):
        ax.text(max(cost, 0) + 0.003, y, f"{cost:+.3f}", va="center", color=INK)
    ax.set(xlabel="bits per byte more than as shipped", xlim=(-0.01, max(costs) * 1.15))

loads = np.array([
    sum(np.bincount(t[f"L{n:02d}.moe.expert"].ravel(), minlength=16) for t in traces)
    for n in range(config.num_hidden_layers)
])  # fmt: skip
share = 16 * loads / loads.sum(axis=1, keepdims=True)
print(f"busiest expert of any layer: {share.max():.0f} times an even share")
assert share.max() < 3 and share.min() < 0.2, "usable, though far from even on a text of one kind"
same("2 experts a token in every layer", loads.sum(axis=1), np.full(12, 2 * 1280))

# %% [markdown]
# ## Recall: what the bits do not show
#
# A document by hand: 16 facts and 16 questions among held-out text, each fact asked once. A key is
# two words and a value one, each a single token. Nothing but the line with `set` tells what the
# line with `get` must say.

# %%
words = recall.words_of(mini.tokenizer)
filler = np.array(mini.tokenizer.encode(heldout_texts[2]))
rng = np.random.default_rng(1)
first, second = (rng.permutation(some)[:16].tolist() for some in (words.first, words.second))
keys = list(zip(first, second, strict=True))
values = rng.permutation(words.values)[:16].tolist()


def line(opening, n):
    return [*opening, *keys[n], *words.equals, values[n], *words.end]


lines = [line(words.set, n) for n in range(16)] + [line(words.get, n) for n in rng.permutation(16)]
text = filler[: 1536 - sum(map(len, lines))]
cuts = np.sort(rng.integers(len(text), size=32))
ids = [config.bos_token_id]
places = []  # of each line's value
for some, one in zip(np.split(text, cuts), [*lines, []], strict=True):
    ids += [*some.tolist(), *one]
    places.append(len(ids) - 1 - len(words.end))
answers = np.array(places[16:32])
said = [values.index(ids[at]) for at in answers]
distances = answers - np.array(places)[said]
print(mini.tokenizer.decode(lines[0]).strip(), "...", mini.tokenizer.decode(lines[16]).strip())
print(f"{len(ids)} tokens, distances {distances.min()} to {distances.max()}")

right = {}
ways = {"learned": {}, "by chance": worth.chance(rng), "none": worth.nothing()}
for name, ops in ways.items():
    with replaced(**ops):
        best = np.argmax(mini.logits(ids[:-1])[answers - 1], axis=1)
    right[name] = best == np.array(ids)[answers]

rows = {"learned": BLUE, "by chance": ORANGE, "none": GREY}
title = (
    f"{right['learned'].sum()}, {right['by chance'].sum()} and {right['none'].sum()} of 16 facts"
)
with figure("Recalled with entries learned, by chance, and without entries") as ax:
    for y, (name, colour) in enumerate(rows.items()):
        for found_it, face in ((False, "white"), (True, colour)):
            at = distances[right[name] == found_it]
            ax.plot(at, np.full(len(at), -y), "o", color=colour, markerfacecolor=face)
    ax.text(distances.min(), 0.4, f"filled: right, open: wrong; {title}", color=INK)
    ax.set(yticks=[0, -1, -2], yticklabels=rows, ylim=(-2.6, 0.8))
    ax.set(xlabel="tokens between the fact and the question")

# %% [markdown]
# **Break it.** The second line is the break: entries by chance, as many as before. In bits per byte
# that costs little, because text is mostly local. Here it costs nearly everything: which 64 of a
# thousand entries hold the fact, only the indexer knows. The learned selection need not be perfect
# either: the log's probes ask one question each, and here are 16 facts so close together.

# %% tags=["break"]
assert right["learned"].sum() >= 11, "learned: most facts"
assert right["by chance"].sum() <= 4, "as many entries, drawn by chance: most are lost"
assert right["none"].sum() <= 2, "windows alone: lost"
probe = recall.probe(np.random.default_rng(3), words, filler, distance=200)
best = np.argmax(mini.logits([config.bos_token_id, *probe.ids[:-1]])[-1])
share = worth.recall(mini, [probe])
print("recall.probe, 200 tokens:", mini.tokenizer.decode([int(best)]), share)
same("worth.recall: the same answer", share[200], float(best == probe.ids[-1]))

# %% [markdown]
# ## Bounded replay: how far from exact?
#
# A stored prefix comes back without its windows. Exact windows would take 12 x 64 tokens again.
# Bounded replay takes the last 64, with nothing before them (chapters 09 and 15). The next 32
# tokens are predicted three ways: exactly, after a replay, and from the last window alone, with
# the rest of the prefix forgotten.

# %%
from dsv41.replay import begin_replay

prefixes = [
    np.array([config.bos_token_id, *mini.tokenizer.encode(heldout_texts[n])[:543]]) for n in (0, 3)
]
hit, after = 512, 32


def last_logits(ids):
    cache = mini.new_cache(OFFICIAL)
    return mini.step(cache, [mini.open(cache)], [ids], tails=[after])


def kl(z, y):
    z, y = (x - x.max(axis=1, keepdims=True) for x in (z.astype(np.float64), y.astype(np.float64)))
    z, y = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (z, y))
    return np.sum(np.exp(z) * (z - y), axis=1)  # (n,)


def replayed_logits(ids):
    cache = mini.new_cache(OFFICIAL)
    slot = mini.open(cache)
    mini.step(cache, [slot], [ids[:hit]], tails=[1])
    start = begin_replay(mini, cache, slot, ids, hit)
    return mini.step(cache, [slot], [ids[start:]], tails=[after]), start


by_hand, curves = [], []
for ids in prefixes:
    replayed, start = replayed_logits(ids)
    exactly, alone = last_logits(ids), last_logits(ids[start:])
    agree = np.mean(exactly.argmax(axis=1) == replayed.argmax(axis=1))
    curves.append([kl(exactly, replayed), kl(exactly, alone)])
    by_hand.append((*np.mean(curves[-1], axis=1), agree))
near, forgotten, agree = np.mean(by_hand, axis=0)
print(f"runs again: {hit - start} tokens; exact windows would take {12 * config.sliding_window}")
with figure("A replay stays near the exact model, for 64 tokens instead of 768") as ax:
    for (replay_kl, alone_kl), style in zip(curves, "-:", strict=True):
        ax.plot(np.arange(after), alone_kl, style, color=ORANGE)
        ax.plot(np.arange(after), replay_kl, style, color=BLUE)
    ax.text(0, 5, f"last window alone, mean {forgotten:.3f}", color=ORANGE)
    ax.text(16, 5, f"replay, mean {near:.3f}, same best token {agree:.0%}", color=BLUE)
    ax.set(yscale="log", ylim=(1e-5, 20), ylabel="KL from exact, nats")
    ax.set(xlabel="tokens behind the stored prefix; solid a manual, dotted a dictionary")

assert 0 < near < forgotten / 2, "an approximation, and much nearer than forgetting"
assert agree > 0.75, "most best tokens stay"
close("worth.replay: the same", worth.replay(mini, prefixes), (near, forgotten, agree), within=1e-9)

# %% [markdown]
# ## DSpark: honest, and small
#
# The drafter had 300 steps in the first run and 1,500 in the second. The log says how far its
# distribution $p$ is from the model's $p^*$ in total variation, $\sum |p - p^*|$. Where tokens are
# drawn, a draft is accepted with probability $1 - \sum |p - p^*| / 2$. And then the real thing:
# four greedy continuations of 32 tokens.

# %%
from dsv41.engine import Engine
from dsv41.sampling import Sampling

tv = np.array([r["tv"] for r in drafter])
print("chance of a draft by the second log, averaged over slots: "
      f"{1 - tv[:50].mean() / 2:.2f} first, {1 - tv[-50:].mean() / 2:.2f} last")  # fmt: skip
ids_of_novel = np.array([config.bos_token_id, *mini.tokenizer.encode(heldout_texts[6])[:95]])
requests = {}
for draft in (True, False):
    engine = Engine(mini, draft=draft)
    prompts = [ids[:96].tolist() for ids in (*parts, *prefixes[1:], ids_of_novel)]
    requests[draft] = [engine.submit(p, 32, Sampling(0.0, 1.0, 0), stop=()) for p in prompts]
    list(engine.run())
accepted = [kept for request in requests[True] for kept in request.accepted]
mean = np.mean(accepted)
counts = np.bincount(accepted, minlength=6)
with figure("Of five drafts, mostly none or one is kept") as ax:
    ax.bar(np.arange(6), counts, color=BLUE, width=0.6)
    ax.text(2.2, counts.max() * 0.8, f"{mean:.2f} kept: {1 + mean:.2f} tokens a verification,\n"
            f"{6 / (1 + mean):.1f} rows run for each", color=INK)  # fmt: skip
    ax.set(xlabel="drafts kept", ylabel="verifications", xlim=(-0.5, 5.5))
for with_drafts, plain in zip(*requests.values(), strict=True):
    assert with_drafts.tokens == plain.tokens, "greedily the same text"
assert 0 < mean < 1, "less than one of five drafts is kept"
assert counts[:2].sum() > 0.6 * counts.sum(), "mostly none or one"
assert tv[-50:].mean() < tv[:50].mean(), "it did learn"

# %% [markdown]
# The text is right whatever the drafter does, and the gain is what it guesses: here less than one
# draft, for six rows of work instead of one. That pays only where a row costs little beside
# reading the weights once (chapter 16).
#
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Bits per byte from logits. Beware of large logits, and of eos.
# 2. The targets of a packed sample: the next token of the same piece, −1 where there is none.
# 3. The gradient of the whole batch from those of its passes.


# %% tags=["exercise"]
def text_bits(logits, targets, eos, text_bytes):
    """logits (n, V) f64, targets (n,) int -> float, bits per byte; eos is not text"""
    return ...


check("19.text_bits", text_bits)


# %% tags=["exercise"]
def next_tokens(ids, segments):
    """ids, segments (L,) int, segment -1 is padding -> targets (L,) int, -1 where none"""
    return ...


check("19.next_tokens", next_tokens)


# %% tags=["exercise"]
def whole_gradient(grads, counts):
    """grads (m, n) f64, each the mean over the counts (m,) tokens of a pass -> (n,)"""
    return ...


check("19.whole_gradient", whole_gradient)

# %% [markdown]
# ## What we learned
#
# - Bits per byte compare models with any tokens. Count neither eos nor averages of documents.
# - Nothing crosses an edge, a pass counts by its tokens, and a resumed run has the same bits.
# - Recall came within 200 steps, at all distances at once, and the loss did not tell.
# - In bits, Engram is worth most here, a learned selection little, rounded caches and the pool next
#   to nothing.
# - In recall the selection is worth nearly everything. DSpark keeps less than one draft of five.
#
# Worked solutions: [solutions](solutions/19_training_the_miniature.py). All chapters:
# [README.md](README.md).
