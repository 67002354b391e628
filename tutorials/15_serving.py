# %% [markdown]
# # 15 · Serving: chunks, batches, bounded replay, the prefix store
#
# **Does an answer depend on how the prompt was cut, on who else is served, on what was stored?**
#
# A server reads prompts in pieces, runs many requests in one call and keeps the work on a prompt
# for the next one. Each of the three can change the numbers. This chapter finds out which do, why,
# and by how much: two change nothing, one is an approximation on purpose.
#
# You need NumPy and chapters 03 (the window) and 14 (what a cache holds). 25 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/15_serving.py`.
#
# Sources: the V4.1 report, §3.2.1 for what is kept and §3.2.2 for bounded replay; the V4 report,
# §3.5.2, for the three older strategies. The modules that this page arrives at:
# [engine.py](../dsv41/engine.py), [replay.py](../dsv41/replay.py) and
# [prefix.py](../dsv41/prefix.py).

# %%
import hashlib

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
    figure,
    same,
    versions,
)

versions("matplotlib")

# %% [markdown]
# ## One call for everything
#
# A request is a list of tokens, of which the first $n$ have been run. A step feeds it the next
# $t$ tokens and appends to its cache:
#
# $$\text{logits}_{n..n+t-1},\ \text{cache}_{n+t} = \text{step}(\text{cache}_n,\ x_{n..n+t-1})$$
#
# All of a prompt at once is prefill, a part of it is a chunk, one token is decode. If the step is
# right, cutting a prompt must change nothing, and "nothing" means no bit. Try it on a model of
# nine layers with a window of $W = 8$, in the released number formats. 13 splits pairs; 8 is a
# window; 1 is decode.

# %%
import dsv41
from dsv41.quant import FLOAT32, OFFICIAL

model = dsv41.load(ROOT / "tests/golden/v41_tiny_a")
config = model.config
W, LAYERS, PAGE = config.sliding_window, config.num_hidden_layers, 8
INVARIANT = OFFICIAL.but(batch_invariant=True)


def in_chunks(ids, chunk, numerics):
    """ids (T,) -> logits (T, V), `chunk` tokens per step."""
    cache = model.new_cache(numerics, PAGE)
    slot = model.open(cache)
    pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
    return np.concatenate([model.step(cache, [slot], [piece]) for piece in pieces])


ids = np.random.default_rng(1).integers(3, 280, 40)
one_call = in_chunks(ids, 40, INVARIANT)  # (40, 288)
for chunk in (1, 8, 13):
    same(
        f"40 tokens in chunks of {chunk} = in one call", in_chunks(ids, chunk, INVARIANT), one_call
    )

# %% [markdown]
# ## What a row product may round
#
# This is not free. A linear layer is a sum of products, and a float32 sum depends on its order.
# Add the same 64 products front to back, then in eight lanes that are added at the end, as a
# vector unit does.

# %%
rng = np.random.default_rng(2)
a, b = rng.standard_normal((2, 64)).astype(np.float32)
products = a * b

in_order = np.float32(0)
for p in products:
    in_order = in_order + p

lanes = np.zeros(8, np.float32)
for p in products.reshape(8, 8):
    lanes = lanes + p
in_lanes = np.float32(0)
for lane in lanes:
    in_lanes = in_lanes + lane

print(f"in order  {in_order:.9f}")
print(f"in lanes  {in_lanes:.9f}")
print(f"float64   {np.sum(products.astype(np.float64)):.9f}")
assert in_order != in_lanes, "the same 64 products, two orders, two sums"

# %% [markdown]
# Neither is wrong. But a BLAS library picks its order by the *shape* of the product: one row goes
# through another routine than forty. So a row's bits would depend on how many rows came with it.
#
# The cure: always the same shape. Send the rows in blocks of eight and pad the last block with
# zeros. A row in a block is summed like every row in every block.


# %%
from dsv41.ops import matmul_rows


def in_blocks(x, w, block=8):
    """x (T, K), w (N, K) -> x w^T (T, N), every BLAS call of the same shape."""
    out = np.zeros((len(x), len(w)), np.float32)
    for begin in range(0, len(x), block):
        rows = x[begin : begin + block]
        padded = np.zeros((block, x.shape[1]), np.float32)
        padded[: len(rows)] = rows
        out[begin : begin + block] = (padded @ w.T)[: len(rows)]
    return out


rng = np.random.default_rng(3)
x = rng.standard_normal((40, 512)).astype(np.float32)
w = rng.standard_normal((288, 512)).astype(np.float32)
whole = in_blocks(x, w)
one_by_one = np.concatenate([in_blocks(row[None], w) for row in x])
same("in blocks: 40 rows together = one by one", whole, one_by_one)
same("the module's row product = blocks by hand", matmul_rows(x, w, INVARIANT), whole)

# %% [markdown]
# **Break it.** Give the rows to BLAS as they come, and run the model that way. With OpenBLAS, which
# most of NumPy's wheels carry, rows change with their number, and so do the model's logits. A last
# bit can move a value to the next FP8 code, or a token to another expert; then the end differs by
# more. Another library may sum one row as it sums forty; it has promised nothing.

# %% tags=["break"]
plain = x @ w.T
plain_one_by_one = np.concatenate([row[None] @ w.T for row in x])
print("one product, rows alike:   plain", np.array_equal(plain, plain_one_by_one), end="")
print("   blocks", np.array_equal(whole, one_by_one))
library = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
is_open = "openblas" in library.lower()
alike = np.array_equal(plain, plain_one_by_one)
assert not (is_open and alike), "plain BLAS rows depend on the row count"

at_once, cut = in_chunks(ids, 40, OFFICIAL), in_chunks(ids, 1, OFFICIAL)
print("the model, logits alike:   plain", np.array_equal(at_once, cut), end="")
print("   blocks", np.array_equal(one_call, in_chunks(ids, 1, INVARIANT)))
alike = np.array_equal(at_once, cut)
assert not (is_open and alike), "without batch invariance chunks change the logits"

# %% [markdown]
# ## Requests join and leave
#
# With that, company is harmless too: a step lays the new tokens of all requests end to end.
# Between steps requests may come and go. Serve four of them. Each step feeds every writer its
# newest token and every reader the next piece of its prompt.
#
# Global KV lives in pages of 8 tokens here. A request is a list of page numbers. Free pages stand
# in a queue: whoever grows takes from its front, whoever leaves puts its pages at its end.


# %%
def serve(requests, chunk):
    """requests: {name: (step of arrival, prompt, tokens to write)} -> texts, diary.

    diary: one dict per step, {name: (tokens fed, pages owned)}.
    """
    cache = model.new_cache(INVARIANT, PAGE)
    slots, texts, diary = {}, {name: [] for name in requests}, []
    while any(len(texts[n]) < requests[n][2] for n in requests):
        for name, (arrival, _, _) in requests.items():
            if arrival == len(diary):
                slots[name] = model.open(cache)
        feeds = {}
        for name, slot in slots.items():
            done, prompt = cache.length[slot], requests[name][1]
            feeds[name] = prompt[done : done + chunk] if done < len(prompt) else texts[name][-1:]
        logits = model.step(cache, [*slots.values()], [*feeds.values()], tails=[1] * len(slots))
        diary.append({n: (len(f), list(cache.pages[slots[n]])) for n, f in feeds.items()})
        for name, row in zip(list(slots), logits, strict=True):
            _, prompt, most = requests[name]
            if cache.length[slots[name]] >= len(prompt):
                texts[name].append(int(np.argmax(row)))
            if len(texts[name]) == most:
                cache.release(slots.pop(name))
    return texts, diary


rng = np.random.default_rng(4)
plan = {"A": (0, 21, 8), "B": (1, 37, 4), "C": (4, 29, 4), "D": (9, 31, 3)}
requests = {n: (at, rng.integers(3, 280, t).tolist(), most) for n, (at, t, most) in plan.items()}
texts, diary = serve(requests, chunk=8)

print("step   " + "".join(f"{name:>4}" for name in requests) + "   tokens fed")
for step, fed in enumerate(diary):
    print(f"{step:4}   " + "".join(f"{fed.get(name, ('',))[0]:>4}" for name in requests))

# %%
alone = {n: serve({n: (0, prompt, most)}, 100)[0][n] for n, (_, prompt, most) in requests.items()}
for name in requests:
    same(f"{name} writes in company and in chunks what it writes alone", texts[name], alone[name])

last_of_b, last_of_d = diary[8]["B"][1], diary[-1]["D"][1]
assert len(set(last_of_b) & set(last_of_d)) == 2, "D writes on two pages that were B's"

COLOURS = dict(zip(requests, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
with figure("A page goes from a request that left to one that joined") as ax:
    for step, fed in enumerate(diary):
        for name, (_, pages) in fed.items():
            for page in pages:
                ax.bar(step, 0.9, width=0.9, bottom=page - 0.45, color=COLOURS[name])
                ax.text(step, page, name, color="white", ha="center", va="center", fontsize=7)
    most = max(page for fed in diary for _, pages in fed.values() for page in pages)
    ax.set(xlabel="step", ylabel="page", xlim=(-0.6, len(diary) - 0.4), ylim=(-0.6, most + 0.6))
    ax.set_xticks(range(len(diary)))
    ax.set_yticks(range(0, most + 1, 4))

# %% [markdown]
# The module has the same loop with a budget of `chunk` tokens for the whole step, drafts, and
# requests that are put aside: [Engine.step](../dsv41/engine.py#Engine.step). `exact` runs every
# prompt token through every layer, as the loop above does.

# %%
from dsv41.engine import Engine

engine = Engine(model, INVARIANT, chunk=16, exact=True, page_tokens=PAGE, max_batch=2)
held = {n: engine.submit(prompt, most, stop=()) for n, (_, prompt, most) in requests.items()}
for _ in engine.run():
    pass
for name, request in held.items():
    same(f"{name}: the engine, two at a time, = alone", request.tokens, alone[name])

# %% [markdown]
# ## Bounded replay
#
# Now a prompt whose first $H$ tokens were run earlier. Their global KV was stored. Their window KV
# was not: it is large and soon useless (the report, §3.2.1). The next token needs it.
#
# Rebuilding it exactly takes a run back through the layers, since each layer's window reaches
# back $W$ tokens more: $L \cdot W$ tokens. Bounded replay runs $W$ tokens and lets the window begin
# there. Query $i$ sees the window keys
#
# $$j \in [\max(s,\ i - W + 1),\ i], \qquad s = \max(0,\ H - W)$$
#
# Replayed tokens write window KV only. Their global entries are there and stay untouched. A stored
# prefix of odd length loses its last token: $H$ is even, so no pair straddles the hit. One row at a
# time, then all at once:


# %%
from dsv41.batch import make_batch
from dsv41.replay import hit_length, replay_start
from dsv41.window import window_index


def keys_of(i, s, width):
    return list(range(max(s, i - width + 1), i + 1))


def mask_of(total, s, width):
    """(total - s, total) bool: which keys the rows s .. total - 1 see."""
    i, j = np.arange(s, total)[:, None], np.arange(total)
    return (j <= i) & (j > i - width) & (j >= s)


hit, total = 14, 21
s = max(0, hit - W)
print(f"hit {hit}, prompt {total}, window {W}: replay from {s}")
for i in (6, 7, 12, 13, 14, 20):
    kind = "replayed" if i < hit else "new"
    print(f"query {i:2} ({kind:8}) sees {keys_of(i, s, W)}")

mask = mask_of(total, s, W)  # (15, 21)
by_row = [np.flatnonzero(row).tolist() for row in mask]
assert by_row == [keys_of(i, s, W) for i in range(s, total)], "all rows at once = one by one"

batch = make_batch([np.zeros(total - s, int)], [s], [0]).with_floors([s])
read = window_index(batch, W)  # (15, 8), rows of [ring | this call]
positions = np.where(read < 0, -1, read - W + s)
module = np.zeros_like(mask)
for n, row in enumerate(positions):
    module[n, row[row >= 0]] = True
same("the module's window rows = the mask", module, mask)
same("the module starts the replay at the same token", replay_start(hit, config), s)
usable = [hit_length(stored, config) for stored in (14, 13, 2, 1)]
print("of 14, 13, 2 and 1 stored tokens a hit has", *usable)
assert usable == [14, 12, 2, 0], "an open pair is run again"
same("W - 1 rows see less than a window", np.sum(mask.sum(axis=1) < W), W - 1)

# %%
with figure("The first W - 1 = 7 rows of a replay see a shorter window") as ax:
    full = mask_of(total, 0, W)[s:]
    for n, (row, wanted) in enumerate(zip(mask, full, strict=True)):
        ax.plot(np.flatnonzero(wanted & ~row), [s + n] * np.sum(wanted & ~row), "x", color=ORANGE)
        colour = GREY if s + n < hit else BLUE
        ax.plot(np.flatnonzero(row), [s + n] * row.sum(), "s", color=colour, markersize=5)
    ax.axhline(hit - 0.5, color=INK, linewidth=0.6, linestyle=":")
    ax.text(21, 9.5, "replayed: write window KV only", color=INK, va="center", ha="left")
    ax.text(21, 17, "new: write everything", color=BLUE, va="center", ha="left")
    ax.text(-0.5, 12.4, "not seen:\nbefore s", color=ORANGE, va="center")
    ax.set(xlabel="key", ylabel="query", xlim=(-1, 34), ylim=(20.8, 5.2))
    ax.set_xticks([0, 6, 14, 20], ["0", "s = 6", "H = 14", "20"])
    ax.set_yticks([6, 13, 14, 20])

# %% [markdown]
# Neither 14 nor 21 is a multiple of 8. Test at such lengths: at multiples of the window a wrong
# ring row can hide.
#
# The decoder half does the same at *every* prefill, hit or not: only the last $W$ tokens of the
# prompt run through it.
#
# ## Why do answers change after a cache hit?
#
# Because of the orange crosses, and of nothing else. Measure it: the logits after the last token
# of one prompt, computed in several ways, against every token through every layer. The arithmetic
# is float32, so that no other rounding interferes. Behind a hit both halves start at $s$. KL is the
# divergence of the two next-token laws.


# %%
from dsv41.replay import begin_replay

EXACT = FLOAT32.but(batch_invariant=True)
prompt = np.random.default_rng(5).integers(3, 280, 101)


def after_hit(hit, exact=False):
    """The last logits when global KV of `hit` tokens is there -> (V,), tokens run."""
    cache = model.new_cache(EXACT, PAGE)
    slot = model.open(cache)
    model.step(cache, [slot], [prompt[:hit]])  # the earlier request
    start = begin_replay(model, cache, slot, prompt, hit, exact)
    for ring in cache.window:
        ring[slot] = np.nan  # whoever still reads the old windows will show it
    return model.step(cache, [slot], [prompt[start:]], tails=[1])[0], len(prompt) - start


def kl(p, q):
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in np.float64([p, q]))
    return np.sum(p * np.log(p / q))


truth = in_chunks(prompt, 101, EXACT)[-1]
cache = model.new_cache(EXACT, PAGE)
decoder = model.step(
    *(cache, [model.open(cache)], [prompt]), decoder_from=[len(prompt) - W], tails=[1]
)[0]
ways = {"chunks of 13": (in_chunks(prompt, 13, EXACT)[-1], 101)}
ways["decoder replay, no hit"] = decoder, 101
for hit in (40, 90, 98):
    ways[f"hit {hit}, bounded"] = after_hit(hit)
ways["hit 98, exact replay"] = after_hit(98, exact=True)
print("way                     tokens run   largest difference      KL")
for way, (logits, count) in ways.items():
    difference = np.abs(logits - truth).max()
    print(f"{way:23} {count:10}   {difference:18.2f}   {kl(truth, logits):.3f}")

same("chunks change no bit", ways["chunks of 13"][0], truth)
same("an exact replay of L W tokens changes no bit", ways["hit 98, exact replay"][0], truth)
assert kl(truth, ways["hit 98, bounded"][0]) > kl(truth, decoder) > 0, "both replays approximate"
same("a hit within one window changes no bit", after_hit(8)[0], truth)

# %% [markdown]
# So the same prompt has one answer before a hit and another after it, and a third after a hit that
# ended elsewhere. The weights here are random, so the size says nothing about the released model:
# that one is post-trained with the replay simulated (the report, §3.2.2).
#
# **Break it.** Engram looks back three tokens. Behind a hit those are the true tokens before the
# start, not the padding that stands before a sequence. Treat the start as the beginning of the
# sequence and count the table rows that come out wrong. Then do it where everything else is right:
# all windows are there, and only the look-back is lost.

# %% tags=["break"]
from dsv41.engram import hash_rows, look_back, multipliers, table_primes
from dsv41.replay import true_history

pad = model.classes[config.engram_pad_token_id]
start, layer = 90 - W, config.engram_layer_ids[0]
primes, heads = np.array(table_primes(config)[0]), config.engram_n_heads


def table_rows(history, ids):
    windows, _ = look_back(model.classes[ids], np.zeros(len(ids), bool), history, pad)
    return hash_rows(windows, multipliers(config, layer), primes, heads)  # (T, 3 orders x heads)


fresh = table_rows(np.full(3, pad), prompt)[start:90]
right = table_rows(true_history(model, cache, 0, prompt, start), prompt[start:90])
wrong = table_rows(np.full(3, pad), prompt[start:90])
for name, rows in (("true look-back", right), ("padded", wrong)):
    bad = np.sum(rows != fresh, axis=1)
    print(f"{name:15} wrong rows of the 8 replayed tokens {bad}, of {rows.shape[1]} each")
same("true look-back: the rows of a fresh run", right, fresh)
assert np.sum(wrong != fresh) == (3 + 2 + 1) * heads, "padded: 3, 2 and 1 orders are wrong"

for name, history in (("true look-back", None), ("padded", np.full(3, pad))):
    cache = model.new_cache(EXACT, PAGE)
    slot = model.open(cache)
    model.step(cache, [slot], [prompt[:98]])
    if history is not None:
        cache.history[slot] = history
    logits = model.step(cache, [slot], [prompt[98:]], tails=[1])[0]
    print(f"{name:15} windows kept, KL {kl(truth, logits):.3f}")
    if history is None:
        same("true look-back and all windows: no bit changes", logits, truth)
assert kl(truth, logits) > 0.001, "lost history changes the answer even with every window there"

# %% [markdown]
# ## A key hashes everything before it
#
# Global KV of a token depends on all tokens before it. So a block of 8 tokens may be reused only
# where the whole text before it is the same. A chain of hashes says so: the key of a block hashes
# the key of the block before and the block's own tokens.
#
# $$k_0 = h(\text{start},\ x_{0..7}), \qquad k_b = h(k_{b-1},\ x_{8b..8b+7})$$
#
# The start names weights, number formats and replay rule, so a store shared by two models cannot
# mix them up.

# %%
from dsv41.prefix import STRATEGIES, PrefixCache, block_keys


def chain(ids, block, start=b""):
    keys = []
    for begin in range(0, len(ids) // block * block, block):
        tokens = np.array(ids[begin : begin + block], "<i8").tobytes()
        start = hashlib.blake2b(start + tokens, digest_size=32).digest()
        keys.append(start)
    return keys


def shared(a, b):
    return sum(x == y for x, y in zip(chain(a, PAGE), chain(b, PAGE), strict=True))


text = np.random.default_rng(6).integers(3, 280, 43).tolist()
assert chain(text, PAGE, b"model") == block_keys(text, PAGE, b"model"), "the module's chain"
print("one other token at     0    7    8   20   39   42")
print("keys kept of 5    ", end="")
kept = []
for at in (0, 7, 8, 20, 39, 42):
    kept.append(shared(text, [*text[:at], text[at] + 1, *text[at + 1 :]]))
    print(f"{kept[-1]:5}", end="")
print()
assert kept == [0, 0, 1, 2, 4, 5], "every block from the changed one on has another key"
assert chain(text, PAGE, b"a")[-1] != chain(text, PAGE, b"b")[-1], "another model, another key"

# %% [markdown]
# Token 42 is in no whole block; it is in no key and is always run.
#
# ## Four strategies
#
# The store can be a dict. What is kept beside the global KV is the question, and there are four
# answers (V4 had the last three):
#
# | strategy | window KV kept | run again at a hit |
# | --- | --- | --- |
# | bounded | none | $W$ tokens, approximately |
# | zero | none | $L \cdot W$ tokens, exactly |
# | periodic | all rings every $p$ tokens | from the last checkpoint |
# | full | of every token | nothing |
#
# Ask for one text twice and count what the second time runs. 101 prompt tokens, 12 whole blocks:
# 96 tokens can be found, 5 are new.


# %%
class DictStore(dict):
    """All that a PrefixCache asks of a store; `get` is the dict's own."""

    def longest(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self), len(keys))

    def put(self, key, payload):
        self[key] = bytes(payload)

    def put_many(self, items):
        self.update((key, bytes(payload)) for key, payload in items)


def ask(prefix, prompt, count=4, exact=False):
    """-> the finished request."""
    engine = Engine(model, INVARIANT, prefix=prefix, page_tokens=PAGE, exact=exact)
    request = engine.submit(prompt, count, stop=())
    for _ in engine.run():
        pass
    return request


alone = ask(None, prompt, exact=True)
print("strategy    first   again   store bytes")
again = {}
for strategy in STRATEGIES:
    store = DictStore()
    prefix = PrefixCache(model, store, strategy, period=32)
    runs = [ask(prefix, prompt)]
    size = sum(map(len, store.values()))  # after the first
    runs.append(ask(prefix, prompt))
    again[strategy] = runs[1].computed
    print(f"{strategy:9} {runs[0].computed:7} {again[strategy]:7}   {size:11,}")
    if prefix.exact:
        for n, run in enumerate(runs):
            same(f"{strategy}, ask {n + 1}: the text without a store", run.tokens, alone.tokens)
assert again == {"bounded": 5 + W, "zero": 5 + W * LAYERS, "periodic": 5, "full": 5}, "tokens run"

# %% [markdown]
# 96 is a multiple of 32, so the periodic store looks as good as the full one. Hits end anywhere.
# Store a text of 256 tokens once per strategy, then look up prefixes that end at every block from
# 128 on, and count what would have to run again, on average. `resume` fills the cache from the
# dict and runs nothing.

# %%
long = np.random.default_rng(7).integers(3, 280, 256)


def measure(strategy, period=64):
    """-> bytes stored per token, tokens to run again per hit."""
    store = DictStore()
    prefix = PrefixCache(model, store, strategy, period=period)
    ask(prefix, long, count=1)
    replayed = []
    for end in range(129, 257, PAGE):
        cache = model.new_cache(INVARIANT, PAGE)
        found = prefix.resume(cache, model.open(cache), long[:end])
        assert found.hit == end - 1, "whole blocks up to the last token"
        replayed.append(found.hit - found.start)
    return sum(map(len, store.values())) / len(long), np.mean(replayed)


cases = {name: measure(name) for name in ("bounded", "zero", "full")}
cases |= {f"periodic {p}": measure("periodic", p) for p in (64, 32, 16)}
kv, ring_row = 106, 66  # bytes: global KV of a token, one window record of a layer
want = {"bounded": (kv, W), "zero": (kv, W * LAYERS), "full": (kv + LAYERS * ring_row, 0)}
want |= {f"periodic {p}": (kv + W * LAYERS * ring_row / p, (p - PAGE) / 2) for p in (64, 32, 16)}
print("strategy       bytes a token   run again")
for name, (size, tokens) in cases.items():
    print(f"{name:13} {size:14.1f}   {tokens:9.1f}")
    assert (size, tokens) == want[name], "measured = counted by hand"

# %%
with figure("Bounded replay leaves the curve: as small as zero, nearly as quick as full") as ax:
    curve = ["full", "periodic 16", "periodic 32", "periodic 64"]
    ax.plot(*np.transpose([cases[n] for n in curve]), color=BLUE, marker="o", markersize=5)
    ax.plot(*cases["zero"], "o", color=BLUE)
    ax.plot(*cases["bounded"], "D", color=ORANGE, markersize=7)
    for name, (size, tokens) in cases.items():
        colour = ORANGE if name == "bounded" else BLUE
        ax.text(size + 14, tokens + 2, name, color=colour, va="bottom")
    ax.text(250, 55, "blue: exact, as without a store", color=BLUE)
    ax.text(250, 46, "orange: approximate", color=ORANGE)
    ax.set(xlabel="bytes stored per token", ylabel="tokens run again", xlim=(60, 800))
    ax.set_ylim(-3, 85)
    ax.grid(axis="both", color=FAINT)

# %% [markdown]
# In the released plan a window record has 528 bytes, 40 layers have a window of 128, and global KV
# takes 890 bytes a token. The same four, by hand and from the ledger and the config:

# %%
from dsv41.ledger import kv_bytes
from dsv41.presets import preset

real = preset("v4.1-flash")
back, back_exact = replay_start(10**6, real), replay_start(10**6, real, exact=True)
per_token = kv_bytes("V4.1-Flash").hbm
same("global KV of a token is 890 bytes", per_token, 890)
same("bounded replay runs 128 tokens", 10**6 - back, 128)
same("exact replay runs 40 windows", 10**6 - back_exact, 128 * 40)
print("strategy        bytes a token   run again")
print(f"bounded         {per_token:13,.0f}   {10**6 - back:9,}")
print(f"zero            {per_token:13,.0f}   {10**6 - back_exact:9,}")
print(f"periodic 1,024  {per_token + 40 * 128 * 528 / 1024:13,.0f}   {'< 1,024':>9}")
print(f"full            {per_token + 40 * 528:13,.0f}   {0:9}")

# %% [markdown]
# The module's [block_keys](../dsv41/prefix.py#block_keys) is our `chain`,
# [replay_start](../dsv41/replay.py#replay_start) our $s$, and
# [matmul_rows](../dsv41/ops.py#matmul_rows) our `in_blocks`. A real store is a directory
# ([store.py](../dsv41/store.py)); a pool in memory may keep encoder windows for minutes
# ([window_pool.py](../dsv41/window_pool.py)), and then a hit needs no encoder replay.
#
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. How many tokens does a hit of the released model run, with the new ones? $W = 128$, 40 layers.
#    A periodic store has a checkpoint at every multiple of the period up to the hit.
# 2. How many tokens of a prompt can be taken from the work on an earlier text? Whole blocks, and
#    at least one token is left to run, since its logits are wanted.
# 3. In which row of the pool does an entry lie? An entry covers `ratio` tokens, a page 8 tokens,
#    and −1, no entry, stays −1.


# %% tags=["exercise"]
def tokens_run(strategy, total, hit, period):
    """strategy str; total, hit, period int, period <= hit < total -> int"""
    return ...


check("15.tokens_run", tokens_run)


# %% tags=["exercise"]
def usable(prompt, earlier, block):
    """prompt (T,), earlier (N,) lists of ids, block int -> int, tokens of the prompt"""
    return ...


check("15.usable", usable)


# %% tags=["exercise"]
def pool_row(pages, entry, ratio):
    """pages: the request's page numbers in order; entry, ratio int -> int, row of the pool"""
    return ...


check("15.pool_row", pool_row)

# %% [markdown]
# ## What we learned
#
# - Prefill, chunk and decode are one call. Chunks and company change no bit, if every row product
#   has the same shape. Plain BLAS rows may change with their number.
# - A request is a list of pages; pages move on when it leaves.
# - Bounded replay runs $W$ tokens with a window that begins at $s$. It is the reason why answers
#   change after a hit; a replay of $L \cdot W$ tokens changes no bit.
# - Engram's look-back crosses the start of a replay: three tokens, six orders go wrong without it.
# - A block's key hashes all before it. Bounded replay stores 890 bytes a token and runs 128 tokens.
#
# Worked solutions: [solutions/15_serving.py](solutions/15_serving.py). Next: [16
# DSpark](16_dspark.ipynb). All chapters: [README.md](README.md).
