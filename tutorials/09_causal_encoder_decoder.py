# %% [markdown]
# # 09 · The causal encoder–decoder
#
# **Both halves of the model are causal. What is the cut between them for, and why does reading a
# prompt cost half?**
#
# DeepSeek-V4.1-Flash calls its layers 0–19 an encoder and its layers 20–39 a decoder. The name
# suggests that the encoder looks both ways. It does not. The cut marks where the global KV of the
# upper half is made. This chapter shows which states of a prompt anybody reads later, and leaves
# the others out.
#
# You need NumPy, window attention (chapter 03) and the idea of a KV source (chapter 07). 25
# minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/09_causal_encoder_decoder.py`.
#
# Sources: the V4.1 report, §2.2 for the two halves, §3.2.2 for the bounded replay; `Transformer` in
# the released inference/model.py for what lies between them. The modules that this page arrives
# at: [ced.py](../dsv41/ced.py) and [replay.py](../dsv41/replay.py).

# %%
from dataclasses import replace
from unittest import mock

import numpy as np

import lib.page as page
from lib.page import BLUE, FAINT, GREEN, GREY, INK, ORANGE, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## Where is the cut?
#
# At the last layer that makes global KV. With $K$ the list of KV sources in the config:
#
# $$\text{layer } L \text{ is in the encoder} \iff L < \max K$$
#
# The model of this page has nine layers and stored random weights. Its window is $W = 8$ tokens.

# %%
import dsv41
from dsv41 import ced, csa2, ledger
from dsv41.batch import make_batch
from dsv41.call import Call
from dsv41.init import random_params
from dsv41.mhc import hc_collapse, initial_streams
from dsv41.model import Model, engram_rows
from dsv41.ops import matmul_rows, rmsnorm, rows
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.replay import decoder_start
from dsv41.window import window_index


def cut(kv_sources, layers):
    """-> layer numbers of the encoder, of the decoder."""
    last = max(kv_sources)
    return list(range(last)), list(range(last, layers))


model = dsv41.load(page.ROOT / "tests/golden/v41_tiny_a")
config, W = model.config, model.config.sliding_window
for name, c in (("tiny", config), ("V4.1-Flash", preset("v4.1-flash"))):
    encoder, decoder = cut(c.kv_source_layer_ids, c.num_hidden_layers)
    print(f"{name:10}  KV sources {c.kv_source_layer_ids}  window {c.sliding_window}")
    print(f"{'':10}  encoder {encoder[0]}..{encoder[-1]}  decoder {decoder[0]}..{decoder[-1]}")
    same(f"{name}: ced.halves cuts there too", [len(half) for half in ced.halves(c.plan)],
         [len(encoder), len(decoder)])  # fmt: skip
assert (len(encoder), len(decoder)) == (20, 20), "the released model is cut in the middle"

# %% [markdown]
# ## Both halves are causal
#
# Take a prompt of 48 tokens, and 48 copies of it. Copy $r$ has another token at place $r$. If a
# layer is causal, its output in copy $r$ equals the original's in all places before $r$, bit for
# bit. (`batch_invariant` makes every row's arithmetic independent of the other rows.)

# %%
N = 48
ids = np.random.default_rng(0).integers(3, 280, N)
changed = np.repeat(ids[None], N, axis=0)  # (N, N), copy r in row r
changed[np.arange(N), np.arange(N)] = (ids + 7) % 200 + 3
numerics = OFFICIAL.but(batch_invariant=True)

trace = {}
base = model.logits(ids, numerics, trace)  # (N, V)
other = {}
moved_logits = model.logits(changed, numerics, other) != base  # (N, N, V)


def first_moved(moved):
    """moved (R, T, ...) bool -> (R,) the first place that moved in each copy."""
    return moved.reshape(*moved.shape[:2], -1).any(axis=2).argmax(axis=1)


for layer in config.plan:
    key = f"L{layer.index:02d}.x_out"
    moved = other[key].reshape(N, N, *trace[key].shape[1:]) != trace[key]
    first = first_moved(moved)
    print(f"layer {layer.index} ({layer.half}): token 20 changes, first state that moves: "
          f"{first[20]}")  # fmt: skip
    assert np.array_equal(first, np.arange(N)), "no layer moves a state before the change"
same("logits: a future token changes nothing earlier", first_moved(moved_logits), np.arange(N))

# %% [markdown]
# **Break it.** Take the name literally: let each encoder layer's window reach one token ahead. The
# decoder stays as it is. Five encoder layers now carry a change five tokens back, into stored
# records that the decoder half reads as global KV. (In float32: no rounding hides a small change.)


# %% tags=["break"]
fine = FLOAT32.but(batch_invariant=True)


def looking_ahead(x, p, layer, call):
    if layer.half == "encoder":
        seen = window_index(call.here, W)  # (T, W) rows
        last = W + len(x) - 1
        call = replace(call)
        call.__dict__["window_rows"] = np.where(seen < 0, -1, np.minimum(seen + 1, last))
    return csa2.attention(x, p, layer, call)


def first_changes(at):
    """-> first logit, and first entry of the decoder's global KV, that move with token `at`."""
    traces = ({}, {})
    a, b = (model.logits(x, fine, t) for x, t in zip((ids, changed[at]), traces, strict=True))
    kv = [t["L05.cmp.main_kv"] for t in traces]
    return [int(first_moved((x != y)[None])[0]) for x, y in ((a, b), kv)]


places = (12, 20, 31, 40)
causal = [first_changes(at) for at in places]
with mock.patch.object(ced, "attention", looking_ahead):
    ahead = [first_changes(at) for at in places]
print("changed token                   ", "  ".join(f"{at:3}" for at in places))
for name, found in (("causal", causal), ("one ahead", ahead)):
    for column, what in enumerate(("first logit", "first KV entry")):
        print(f"{name:10} {what:14} moves", "  ", "  ".join(f"{f[column]:3}" for f in found))
same("causal: nothing before the change", causal, [[at, at] for at in places])
assert ahead == [[at - 5, at - 5] for at in places], "five layers ahead: five entries are stale"

# %% [markdown]
# With such an encoder every new token would make the last five stored entries wrong. A cache that
# only appends needs causal layers below it.
#
# ## One vector per token
#
# Layer 5 is the decoder's only KV source (layer 20 in the released model). All global KV of the
# decoder half is made from its attention input:
#
# $$x_{20} = \mathrm{RMSNorm}\Big( \sum_{i=1}^{4} A_i X_i \Big)$$
#
# $X$ are the four residual streams that the encoder leaves behind, $A$ the weights through which
# they are read (chapter 10). There is no other layer, norm or projection between the halves. Two
# tokens, four channels, by hand:

# %%
X, A = trace["L04.x_out"], trace["L04.hc_ffn.pre"]  # (N, 4, D), (N, 4)
hand = np.zeros((2, 4))
for row, t in enumerate((0, 47)):
    for c in range(4):
        for i in range(4):
            hand[row, c] += float(A[t, i]) * float(X[t, i, c])
    print(f"token {t:2}:", "  ".join(f"{value:8.4f}" for value in hand[row]))

first = config.plan[5]
layers = model.params["layers"]


def cut_vector(X, A):
    """X (T, 4, D), A (T, 4) -> x (T, D), what the decoder's global KV is made from."""
    mixed = numerics.store(np.einsum("ti,tic->tc", A, X))  # bf16
    return rmsnorm(mixed, layers[5]["attn_norm"]["weight"], config.rms_norm_eps, numerics)


x = cut_vector(X, A)
mixed = np.einsum("ti,tic->tc", A, X)
close("all at once = by hand", mixed[[0, 47], :4], hand, within=1e-5)

# %% [markdown]
# Now make the KV from `x` in an empty cache, which has seen nothing else. Compare with the cache
# of a model that ran all nine layers.


# %%
def global_kv(cache, slot, source):
    """-> main KV (E, Z) and index keys (E, Z) of a request, as stored bytes."""
    entries = np.arange(cache.written[source][slot] // cache.ratio[source])
    at = cache.rows(source, slot, entries)
    return cache.main_kv[source][at], cache.index[source][at]


def prefill(ids, decoder_from=0):
    """Feed one prompt -> logits of the decoded tokens, the cache, the request's slot."""
    cache = model.new_cache(numerics)
    slot = model.open(cache)
    return model.step(cache, [slot], [ids], decoder_from=[decoder_from]), cache, slot


_, full, full_slot = prefill(ids)
empty = model.new_cache(numerics)
slot = model.open(empty)
empty.reserve(slot, N)
call = Call(make_batch([ids], [0], [slot]), empty, config, numerics)
csa2.write_global_kv(x, layers[5]["attn"], first, call)
for name, ours, theirs in zip(("main KV", "index keys"), global_kv(empty, slot, 5),
                              global_kv(full, full_slot, 5), strict=True):  # fmt: skip
    same(f"{name} from x alone: {ours.shape[0]} x {ours.shape[1]} bytes", ours, theirs)
owners = [i for i in range(9) if "compressor" in layers[i]["attn"]]
print("layers that own a compressor:", owners)
assert owners == [2, 4, 5], "in the decoder half only its first layer"

# %% [markdown]
# So a token's states *above* the cut leave no global KV. What do they leave? Each decoder layer
# makes window KV from its own input. A later token reads it only if it comes within $W$ tokens.
#
# ## Who reads a deep state?
#
# Measure it. Flip the sign of one state, token $j$ behind layer $L$, and look at two things: the
# stored global KV, and the logits behind the prompt's last token. Again 48 copies at a time, in
# float32.

# %%
block = ced.block


def flip(after):
    """In copy j, flip token j's state behind layer `after` -> last logits, all global KV."""

    def flipped(streams, pre, p, layer, call):
        streams, pre = block(streams, pre, p, layer, call)
        if layer.index == after:
            streams = streams.copy()
            streams[np.arange(N) * N + np.arange(N)] *= -1
        return streams, pre

    cache = model.new_cache(fine)
    slots = [model.open(cache) for _ in range(N)]
    with mock.patch.object(ced, "block", flipped):
        last = model.step(cache, slots, [ids] * N, tails=[1] * N)  # (N, V)
    kv = [np.concatenate([a.ravel() for s in cache.ratio for a in global_kv(cache, slot, s)])
          for slot in slots]  # fmt: skip
    return last, np.array(kv)


untouched = flip(None)
in_kv, in_logits = np.zeros((9, N), bool), np.zeros((9, N), bool)
for L in range(9):
    last, kv = flip(L)
    in_kv[L], in_logits[L] = (kv != untouched[1]).any(axis=1), (last != untouched[0]).any(axis=1)
    marks = np.where(in_kv[L], "G", np.where(in_logits[L], "w", "."))
    print(f"layer {L} {config.plan[L].half}", "".join(marks))

state = np.where(in_kv, 2, np.where(in_logits, 1, 0))
with figure("Most decoder states of a prompt are read by nobody") as ax:
    for value, colour in ((0, FAINT), (1, ORANGE), (2, GREEN)):
        L, j = np.nonzero(state == value)
        ax.bar(j, np.full(len(j), 0.86), 0.86, bottom=L - 0.43, color=colour)
    ax.plot([-0.5, 47.5], [4.5, 4.5], color=INK, linewidth=1)
    for j, L, text, colour in ((23.5, 2, "reaches global KV: read for ever", GREEN),
                               (12.5, 6.5, "read by nobody", FAINT),
                               (40.5, 5, "read in windows", ORANGE)):  # fmt: skip
        ax.text(j, L, text, color=INK if colour == FAINT else "white", fontweight="bold",
                ha="center", va="center", fontsize=8,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5})  # fmt: skip
    ax.text(48.2, 4.5, "cut", color=INK, va="center")
    ax.set(xlabel="token of the prompt", ylabel="state behind layer", yticks=range(9),
           xlim=(-1, 50.5), ylim=(-0.6, 8.6))  # fmt: skip
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)

# %% [markdown]
# The orange staircase is as long as windows can carry. Behind the last layer only the last token is
# read, by the output head. Each layer below it reaches $W - 1$ tokens further back. With
# $D$ decoder layers, a state $d$ layers below the top is read for
#
# $$1 + d\,(W - 1) \text{ tokens}, \qquad d = 0 \dots D - 1$$
#
# It does not depend on the length of the prompt.

# %%
stairs = [1 + d * (W - 1) for d in range(4)]
same("states read behind layers 8, 7, 6, 5", in_logits[[8, 7, 6, 5]].sum(axis=1), stairs)
assert in_kv[:5].all() and not in_kv[5:].any(), "global KV: all encoder states, no decoder state"
print(f"decoder states of this prompt: {4 * N}, read: {sum(stairs)}")
real = sum(1 + d * 127 for d in range(20))
print(f"released model, 65,536 tokens: {20 * 65_536:,}, read: {real:,}", end="")
print(f" = {real / (20 * 65_536):.1%}")
print(f"tokens at the cut that all of these need: {20 * 127 + 1:,}")
assert real == 24_150, "read states of 20 layers with a window of 128"

# %% [markdown]
# ## The bounded prefill, step by step
#
# Computing the staircase exactly needs $(W - 1) D + 1$ tokens at the cut, 2,541 in the released
# model. The report's exact rebuild takes 20 · 128 = 2,560. The bounded prefill takes $W = 128$:
#
# 1. All tokens run through the encoder.
# 2. The decoder's global KV is written for *all* tokens, from $x_{20}$.
# 3. The last $W$ tokens alone run through the decoder. They see all global KV, but their windows
#    begin at the first of them, $s = \max(0, N - W)$:
#
# $$\text{query } i \text{ sees window keys } j: \quad \max(s,\ i - W + 1) \le j \le i$$


# %%
def bounded(ids):
    """-> logits of the last W tokens, the cache, the slot."""
    n, cache = len(ids), model.new_cache(numerics)
    slot = model.open(cache)
    cache.reserve(slot, n)
    batch = make_batch([ids], [0], [slot])
    call = Call(batch, cache, config, numerics, engram_rows(config, model.classes, batch, cache))
    encoder, decoder = ced.halves(config.plan)
    embedding = numerics.store(rows(model.params["embed"]["weight"], batch.ids))
    X, A = initial_streams(embedding, 4)  # (n, 4, D), (n, 4)
    for layer in encoder:  # 1
        X, A = ced.block(X, A, layers[layer.index], layer, call)
    csa2.write_global_kv(cut_vector(X, A), layers[5]["attn"], decoder[0], call)  # 2
    s = max(0, n - W)  # 3
    cache.floor["decoder"][slot] = s
    tail = np.arange(n) >= s
    X, A, call = X[tail], A[tail], call.only(tail).with_floors("decoder")  # (W, 4, D), (W, 4)
    for layer in decoder:
        X, A = ced.block(X, A, layers[layer.index], layer, call)
    cache.advance(batch)
    x = rmsnorm(hc_collapse(X, A, numerics), model.params["norm"]["weight"],
                config.rms_norm_eps, numerics)  # fmt: skip
    return matmul_rows(x, model.params["head"]["weight"], numerics), cache, slot


logits, ours, slot = bounded(ids)
module, theirs, other_slot = prefill(ids, decoder_start(N, 0, config))
print(f"{N} tokens, logits of {len(logits)}")
same("by hand = the module: logits", logits, module)
for layer in range(9):
    assert np.array_equal(ours.window[layer][slot], theirs.window[layer][other_slot]), "rings"
same("by hand = the module: window floor", ours.floor["decoder"], theirs.floor["decoder"])

# %% [markdown]
# The floor is the detail that a test with round numbers misses. Four keys on a page: $W = 4$, a
# prompt of 10, so $s = 6$. The tail's window is a lower triangle whatever $N$ is.

# %%
print("query   exact window   bounded window")
for i in range(6, 10):
    exact_keys, bounded_keys = list(range(i - 3, i + 1)), list(range(max(6, i - 3), i + 1))
    print(f"{i:5}   {exact_keys!s:12}   {bounded_keys}")
    tail = make_batch([ids[6:10]], [6], [0]).with_floors([6])
    at = window_index(tail, 4)[i - 6]  # 4 ring rows come first
    assert (at[at >= 0] - 4 + 6).tolist() == bounded_keys, "window.py sees the same keys"

# %% [markdown]
# ## What stays exact, what does not
#
# Global KV: all bytes of all sources, at any length. It comes from the encoder, and the encoder ran
# on everything.

# %%
for n in (1, 7, 8, 9, 21, 45, 130):
    prompt = np.random.default_rng(n).integers(3, 280, n)
    exact, a, slot_a = prefill(prompt)
    short, b, slot_b = bounded(prompt)
    count = 0
    for source in a.ratio:
        for x, y in zip(global_kv(a, slot_a, source), global_kv(b, slot_b, source), strict=True):
            assert np.array_equal(x, y), "global KV differs"
            count += x.size
    equal = np.array_equal(short, exact[-W:])
    error = np.linalg.norm(short[-1] - exact[-1]) / np.linalg.norm(exact[-1])
    print(f"{n:4} tokens: {count:6} bytes of global KV equal, logits "
          f"{'equal' if equal else 'differ'}, error of the last {error:.3f}")  # fmt: skip
    assert equal == (n <= W), "exact up to the window, and not beyond"

# %% [markdown]
# A prompt of up to $W$ tokens is its own tail: nothing changes. One token more, and the first tail
# token lacks a key. The result is an approximation. The report (§3.2.2) simulates the truncation
# in post-training; these random weights have never seen it.
#
# How long does it last? Decode 24 more tokens behind both prefills, over 8 prompts. New tokens run
# through all layers and write exact global KV. Their windows slide off the tail.

# %%
more, many = 24, range(8)


def prefill_many(prompts, tail):
    """8 prompts of one length, the last `tail` tokens decoded -> last logits, cache, slots."""
    n, cache = len(prompts[0]), model.new_cache(numerics)
    slots = [model.open(cache) for _ in many]
    logits = model.step(cache, slots, list(prompts), decoder_from=[max(0, n - tail)] * 8,
                        tails=[W] * 8)  # fmt: skip
    return logits.reshape(8, min(n, W), -1), cache, slots


def error_of(y, x):
    """(..., V), (..., V) -> (...), the difference as a share of the exact x."""
    return np.linalg.norm(y - x, axis=-1) / np.linalg.norm(x, axis=-1)


streams = np.random.default_rng(100).integers(3, 280, (8, 64 + more))
runs = []
for tail in (64, W):
    logits, cache, slots = prefill_many(streams[:, :64], tail)  # (8, W, V)
    new = [model.step(cache, slots, streams[:, t : t + 1]) for t in range(64, 64 + more)]
    runs.append(np.concatenate([logits, np.stack(new, axis=1)], axis=1))  # (8, W + 24, V)
exact_run, short_run = runs
errors = error_of(short_run, exact_run)  # (8, W + 24)
greedy = short_run.argmax(axis=2) == exact_run.argmax(axis=2)
mean = errors.mean(axis=0)
for name, at in (("first of the tail", 0), ("last of the prompt", 7), ("10th new token", 17),
                 ("20th new token", 27), ("21st new token", 28)):  # fmt: skip
    print(f"{name:18}  error {mean[at]:.4f}  same greedy token {greedy[:, at].sum()} of 8")
same("from the 21st new token on: equal bits", short_run[:, 28:], exact_run[:, 28:])
assert (errors[:, :8] > 0).all(), "the whole tail is approximate"

# %%
with figure("The approximation fades, and is gone after (W − 1) D = 28 tokens") as ax:
    at = np.arange(W + more)
    ax.bar(at[:8], mean[:8], color=ORANGE)
    ax.bar(at[8:28], mean[8:28], color=BLUE)
    ax.plot(at[28:], mean[28:], "o", color=GREEN, markersize=5, clip_on=False)
    ax.text(7.6, mean[:8].max() * 0.95, "tail of the prompt", color=ORANGE, fontweight="bold",
            va="top")  # fmt: skip
    ax.text(12, mean[8:28].max() * 1.25, "new tokens", color=BLUE, fontweight="bold")
    ax.text(29.5, mean.max() * 0.1, "equal bits", color=GREEN, fontweight="bold", ha="center")
    ax.set(xlabel="tokens behind the start of the tail", ylabel="error of the logits / size",
           xlim=(-1, 32))  # fmt: skip
    ax.grid(axis="y")

# %% [markdown]
# Layer 5 is wrong for the first $W - 1$ tokens of the tail, whose windows are short. Layer 6 reads
# those, and is wrong for $W - 1$ more. Four layers make 28. In the released model it is 20 · 127 =
# 2,540 tokens, just below the 2,560 of an exact rebuild.
#
# The same number from the other side: give the decoder a longer tail, and look at the last logit.

# %%
exact = prefill(ids)[0][-1]
for tail in (8, 15, 22, 28, 29, 32):
    last = prefill(ids, N - tail)[0][-1]
    print(f"tail of {tail:2}: error {np.linalg.norm(last - exact) / np.linalg.norm(exact):.4f}")
    assert np.array_equal(last, exact) == (tail >= 29), "exact from (W - 1) D + 1 tokens on"

# %% [markdown]
# **Break it.** Forget step 2. The tail runs through layer 20 anyway, which writes its own global
# KV, so code without `write_decoder_kv` looks complete. But then only the *tail* has entries.
# Prompts up to the window still pass.


# %% tags=["break"]
def tail_only(prompts):
    with mock.patch.object(ced, "write_decoder_kv", lambda *ignored: None):
        return prefill_many(prompts, W)


print("tokens  empty entries  error, bounded  error, tail only")
for n in (7, 8, 9, 20, 200, 64):
    prompts = streams[:, :n] if n <= 64 else np.random.default_rng(n).integers(3, 280, (8, n))
    exact = prefill_many(prompts, n)[0][:, -1]  # (8, V)
    wrong, cache, slots = tail_only(prompts)
    missing = int((global_kv(cache, slots[0], 5)[0] == 0).all(axis=1).sum())
    right_error = error_of(prefill_many(prompts, W)[0][:, -1], exact).mean()
    wrong_error = error_of(wrong[:, -1], exact).mean()
    print(f"{n:6}  {missing:13}  {right_error:14.3f}  {wrong_error:16.3f}")
    assert missing == max(0, n - W), "an entry is empty for every token before the tail"
    assert (wrong_error == 0) == (n <= W), "right up to the window, wrong beyond"

new = [model.step(cache, slots, streams[:, t : t + 1]) for t in range(64, 64 + more)]
stays = error_of(np.stack(new, axis=1), exact_run[:, W:]).mean(axis=0)
for at in (0, 9, 19, 20, 23):
    print(f"new token {at + 1:2}: error, bounded {mean[W + at]:.3f}, tail only {stays[at]:.3f}")
assert stays[20:].min() > 0.1, "the bounded prefill's error is gone, this one stays"

# %% [markdown]
# Zeros are legal records. Nothing fails, and the top-k may choose them. The bounded prefill's error
# ends. This one stays: global entries are never written again.
#
# ## Count the work
#
# One unit is one token through one layer. With $N$ tokens, 20 layers in each half and $W = 128$:
#
# $$\text{share} = \frac{20 N + 20 \cdot \min(N, 128)}{40 N}$$
#
# The cache counts what ran. To check the formula take the released model's plan, 40 layers and a
# window of 128, with tiny widths and random weights.

# %%
flash = preset("v4.1-flash")
plan = ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids",
        "candidate_source_layer_id", "sliding_window", "dspark_target_layer_ids")  # fmt: skip
thin = preset("tiny").but(**{name: getattr(flash, name) for name in plan},
                          engram_layer_ids=(), engram_num_embeddings=())  # fmt: skip
deep = Model(thin, random_params(thin, np.random.default_rng(9)))


def share(n):
    return (20 * n + 20 * np.minimum(n, 128)) / (40 * n)


counted = {}
print("tokens  encoder  decoder  share")
for n in (64, 128, 200, 512, 1536):
    cache = deep.new_cache()
    slot = deep.open(cache)
    prompt = np.random.default_rng(n).integers(3, 280, n)
    deep.step(cache, [slot], [prompt], decoder_from=[decoder_start(n, 0, thin)], tails=[1])
    counted[n] = sum(cache.work.values()) / (40 * n)
    print(f"{n:6}  {cache.work['encoder']:7}  {cache.work['decoder']:7}  {counted[n]:.3f}")
same("counted = formula", np.array(list(counted.values())), share(np.array(list(counted))))
print(f"formula at 65,536: {share(65_536):.3f}")
assert (round(share(1536), 3), round(share(65_536), 3)) == (0.542, 0.501), "toward one half"

with figure("Up to 128 tokens nothing is saved, from a few thousand on half") as ax:
    n = np.geomspace(16, 1 << 17, 300)
    ax.plot(n, share(n), color=BLUE)
    ax.plot(list(counted), list(counted.values()), "o", color=ORANGE, markersize=6)
    ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    ax.text(230, 0.83, "counted", color=ORANGE, fontweight="bold")
    ax.text(3000, 0.55, "formula", color=BLUE, fontweight="bold")
    ax.annotate("0.542 at 1,536", (1536, share(1536)), (1700, 0.68), color=INK,
                arrowprops={"arrowstyle": "-", "color": GREY})  # fmt: skip
    ax.annotate("0.501 at 64K", (65_536, share(65_536)), (30_000, 0.62), color=INK,
                arrowprops={"arrowstyle": "-", "color": GREY})  # fmt: skip
    ax.set(xscale="log", xlabel="tokens in the prompt", ylabel="layers run / all layers",
           ylim=(0.4, 1.04), xlim=(16, 1 << 18))  # fmt: skip
    ax.set_xticks([16, 128, 1024, 8192, 65_536], ["16", "128", "1K", "8K", "64K"])
    ax.set_xticks([], minor=True)
    ax.grid(axis="y")

# %% [markdown]
# Layers are not FLOPs. The ledger weighs the operators (FP8 counts half, FP4 a quarter). Linear
# layers halve. Attention shrinks a little further, index scores much further: the decoder has only
# $m = 1$ layers, which read and score more entries than the encoder's.

# %%
print("tokens   linear  attention  index  total")
for n in (128, 1536, 65_536):
    whole, half = (ledger.prefill_flops("V4.1-Flash", n, exact=e) for e in (True, False))
    parts = [getattr(half, k) / getattr(whole, k) for k in ("linear", "attention", "index")]
    total = half.total / whole.total
    print(f"{n:6}   {parts[0]:6.3f}  {parts[1]:9.3f}  {parts[2]:5.3f}  {total:.3f}")
    same(f"the ledger's share of layers at {n:,}", ledger.prefill_share("V4.1-Flash", n), share(n))
assert abs(total - 0.5) < 0.01, "half of the FLOPs at 64K"

# %% [markdown]
# ## The module gives the same numbers
#
# [run_layers](../dsv41/ced.py#run_layers) is `bounded` for any batch of requests,
# [write_decoder_kv](../dsv41/ced.py#write_decoder_kv) is step 2,
# [decoder_start](../dsv41/replay.py#decoder_start) is $s$. The pieces in which a prompt arrives do
# not matter, as long as $s$ is known.

# %%
whole, _, _ = bounded(ids)
for cuts in ((5, 6), (39,), (40,), (43, 47)):
    cache = model.new_cache(numerics)
    slot = model.open(cache)
    s = decoder_start(N, 0, config)
    for piece in np.split(ids, cuts):
        last = model.step(cache, [slot], [piece], decoder_from=[s])
    same(f"in pieces, cut at {cuts}", last[-1], whole[-1])
two = model.new_cache(numerics)
slots = [model.open(two) for _ in range(2)]
both = model.step(two, slots, [ids, ids[:21]], decoder_from=[N - W, 21 - W])
same("two requests in one call", both, np.concatenate([whole, bounded(ids[:21])[0]]))
work = {"encoder": 5 * (N + 21), "decoder": 4 * (W + W)}
print("work:", two.work)
assert two.work == work, "the decoder half has run for two tails"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. The share of layers that a prefill of $n$ tokens runs in the released model. The inputs include
#    prompts shorter than a window.
# 2. The first token that runs through the decoder, when tokens before `start` have run in an
#    earlier turn. The inputs include new parts that are shorter than the window.
# 3. The window keys that query $i$ sees in a replay that begins at $s$, as positions, ascending.


# %% tags=["exercise"]
def layers_run(n):
    """n tokens -> float"""
    return ...


check("09.layers_run", layers_run)


# %% tags=["exercise"]
def first_decoded(total, start, window):
    """tokens in all, first new token, window -> int"""
    return ...


check("09.first_decoded", first_decoded)


# %% tags=["exercise"]
def window_keys(i, s, window):
    """query, start of the replay, window -> (up to window,) int"""
    return ...


check("09.window_keys", window_keys)

# %% [markdown]
# ## What we learned
#
# - Both halves are causal. The cut is the last KV source; it says where global KV is made.
# - All global KV of the decoder half comes from one vector per token, $x_{20}$.
# - States above the cut are read through windows only: $1 + d\,(W - 1)$ tokens, at any length.
# - The bounded prefill runs $W$ tokens through the decoder. Global KV keeps its bits; logits are
#   equal up to $W$ tokens and approximate beyond, until $(W - 1) D$ tokens have passed.
# - Step 2 is for all tokens. Without it short prompts pass and long ones are wrong for good.
# - Work: 0.542 at 1,536 tokens, 0.501 at 64K.
#
# Worked solutions: [the same cells, filled](solutions/09_causal_encoder_decoder.py). Next: [10
# Hyper-connections](10_hyper_connections.ipynb). All chapters: [README.md](README.md).
