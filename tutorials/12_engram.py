# %% [markdown]
# # 12 · Engram
#
# **What does the model remember about the last two, three and four tokens, and where does it
# look?**
#
# Some phrases come back again and again: "Alexander the" is often followed by "Great". Engram
# looks them up. The last tokens are hashed to row numbers, the rows of a huge table are read, and
# a gate decides how much of them is used. The table is addressed by n-grams. It holds learned
# weights, no examples and no texts: this is not retrieval.
#
# You need NumPy, and RMSNorm for the gate. 25 minutes. Two exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/12_engram.py`.
#
# Sources: the V4.1 report, §2.4.2; inference/engram.py of the release; the Engram paper (arXiv
# 2601.07372), which has a convolution more. The modules that this page arrives at:
# [engram.py](../dsv41/engram.py) and [token_classes.py](../dsv41/token_classes.py).

# %%
import re
import unicodedata
from unittest.mock import patch

import numpy as np

from lib.page import BLUE, GREY, ORANGE, ROOT, check, close, figure, same, versions

versions("matplotlib")

# %% [markdown]
# ## Fold the tokens
#
# A tokenizer has several ids for one word: with a space, with a capital, in capitals. For a
# phrase memory they are one. So every id gets a *class*: decode it alone, normalise the text,
# and number the texts in order of first appearance. The steps: NFKC, NFD, drop marks (accents),
# lowercase, runs of blanks to one space, strip.

# %%
from dsv41.token_classes import SPACES

texts = ["the", " The", "THE", "café", " Cafe", "ﬁn", "fin", " ", "\n\n", "e", "\u0301"]


def fold(text):
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c.lower() for c in folded if unicodedata.category(c)[0] != "M")
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    folded = folded if folded == " " else folded.strip(SPACES)
    return folded or text  # nothing left: keep what was there


seen, classes = {}, []
for text in texts:
    classes.append(seen.setdefault(fold(text), len(seen)))
    print(f"{text!a:10} -> {fold(text)!a:10} class {classes[-1]}")
assert classes == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5], "five spellings disappear, blanks stay a word"

# %% [markdown]
# The last line is a lone accent. It would fold to nothing, so it keeps its own text. A token
# that is a broken piece of UTF-8 has no text and is known by its spelling. And a trap: Python's
# `strip` also takes U+001C to U+001F, which the library of the release leaves alone. `SPACES`
# are the ones it takes.
#
# The same for a whole vocabulary of 4,096 tokens. The released model has 129,280 ids and 99,092
# classes (inference/engram.py).

# %%
import json

from dsv41.token_classes import decode_vocabulary, load_token_classes

tokenizer = json.loads((ROOT / "data/tokenizer/tokenizer.json").read_text(encoding="utf-8"))
texts, spellings = decode_vocabulary(tokenizer)
seen, own = {}, []
for text, spelling in zip(texts, spellings, strict=True):
    key = spelling if "\ufffd" in text else fold(text)
    own.append(seen.setdefault(key, len(seen)))
same("classes of 4,096 tokens = the module's", own, load_token_classes(ROOT / "data/tokenizer"))
print(f"{len(own)} ids in {len(seen)} classes, {1 - len(seen) / len(own):.3f} of the ids saved")
for word in (" the", " in", " "):
    alike = [texts[i] for i in range(len(texts)) if own[i] == own[texts.index(word)]]
    print(f"{word!r}:", ascii(alike[:6]), f"{len(alike)} ids")
assert len(seen) == 3111, "classes of the small tokenizer"
assert "\x1c".strip() == "" != fold("\x1c"), "a separator is no blank"

# %% [markdown]
# ## From an n-gram to rows
#
# Take the classes $x_0$ (newest), $x_1$, $x_2$, $x_3$ and four odd multipliers. Multiply, and
# XOR:
#
# $$\mathrm{mix}_2 = x_0 m_0 \oplus x_1 m_1, \qquad \mathrm{mix}_3 = \mathrm{mix}_2 \oplus x_2 m_2,
# \qquad \mathrm{mix}_4 = \mathrm{mix}_3 \oplus x_3 m_3$$
#
# Multiplying by a different number per place makes "dog bites" and "bites dog" two phrases. Each
# order 2, 3, 4 has several *heads*. They share the mix and differ in the modulus, a prime:
#
# $$\mathrm{row}_{n,h} = (\mathrm{mix}_n \bmod p_{n,h}) + \mathrm{offset}_{n,h}$$
#
# Two heads, small primes, multipliers 3, 5, 7, 11. Before the first token stands the pad class,
# 2.

# %%
tokens, m = [5, 7, 11, 13, 17], [3, 5, 7, 11]
primes = [17, 19, 23, 29, 31, 37]  # orders 2, 2, 3, 3, 4, 4
offsets = [sum(primes[:c]) for c in range(6)]
print("offsets", offsets)
by_hand = []
for t in range(5):
    x = [tokens[t - back] if t >= back else 2 for back in range(4)]
    mix, rows = x[0] * m[0], []
    for order in (2, 3, 4):
        mix ^= x[order - 1] * m[order - 1]
        for head in (0, 1):
            column = 2 * (order - 2) + head
            rows.append(mix % primes[column] + offsets[column])
    by_hand.append(rows)
    print(f"{x!s:16} -> {rows}")
print(f"first token: {5 * 3:07b} ^ {2 * 5:07b} = {(5 * 3) ^ (2 * 5):07b} = 5")
assert by_hand[0] == [5, 17 + 5, 36 + 11, 59 + 11, 88 + 29, 119 + 29], "5, then 11, then 29"
for places in ((3, 5), (3, 3)):
    both = [(a * places[0]) ^ (b * places[1]) for a, b in ((7, 5), (5, 7))]
    print(f"multipliers {places}: mix of 5, 7 is {both[0]}, of 7, 5 it is {both[1]}")
    assert (both[0] == both[1]) == (places == (3, 3)), "different multipliers see the order"


# %%
def windows_of(classes, pad, size=4):
    """classes (T,) -> (T, size), newest first."""
    line = np.concatenate([np.full(size - 1, pad), classes])
    return np.stack([line[size - 1 - s : len(line) - s] for s in range(size)], axis=1)


def rows_of(windows, multiplier, primes, heads):
    """windows (T, n) int64 -> (T, columns) int64."""
    mixes = np.bitwise_xor.accumulate(windows * multiplier, axis=1)[:, 1:]  # (T, n - 1)
    offsets = np.cumsum(primes) - primes
    return mixes.repeat(heads, axis=1) % primes + offsets


hand_windows = windows_of(np.array(tokens), pad=2)
same(
    "all tokens at once = by hand", rows_of(hand_windows, np.array(m), np.array(primes), 2), by_hand
)

# %% [markdown]
# ## Why several heads, and why different primes
#
# A hash collides: two phrases share a row. With one head they cannot be told apart. A second
# head with *another* prime separates most of them. With the same modulus twice, the second head
# collides exactly where the first does. Powers of two are no better: equal modulo 64 follows
# from equal modulo 128, so a head of 64 rows adds nothing to one of 128.

# %%
pairs = np.random.default_rng(1).integers(0, 3111, (4000, 2))
mix = np.bitwise_xor.reduce(pairs * np.array([7_654_321, 1_234_567]), axis=1)
mix = np.unique(mix)
print(f"{len(mix):,} different phrases; with a double after 1, 2, 3, 4 heads:")


def lost(moduli):
    """Share of phrases that share all their rows with another phrase."""
    rows = np.stack([mix % p for p in moduli], axis=1)
    _, inverse, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    return np.mean(counts[inverse.ravel()] > 1)


series = (
    ("different primes", BLUE, [1009, 1013, 1019, 1021]),
    ("powers of two", ORANGE, [1024, 512, 256, 128]),
)
shares = {}
with figure("Share of 3,999 phrases that have a double in all heads") as ax:
    for name, colour, moduli in series:
        shares[name] = [lost(moduli[: h + 1]) for h in range(4)]
        ax.plot(range(1, 5), shares[name], color=colour, marker="o")
        ax.text(2.5, shares[name][2] + 0.04, name, color=colour, fontweight="bold", ha="center")
        print(f"{name:17}", "".join(f"{share:8.3f}" for share in shares[name]))
    ax.set(xticks=range(1, 5), ylim=(-0.03, 1.12), xlabel="heads", ylabel="share of phrases")
    ax.grid(axis="y")
assert shares["different primes"][1] < 0.02 < 0.9 < shares["different primes"][0], "two heads do it"
assert lost([1009, 1009]) == lost([1009]), "the same modulus twice adds nothing"
assert shares["powers of two"][3] == shares["powers of two"][0], "nested moduli add nothing"

# %% [markdown]
# ## The primes and multipliers of the real model
#
# 2 modules, 3 orders, 8 heads: 48 primes. Every (module, order) starts its search at 16,000,000,
# and no prime is used twice. The multipliers are drawn from a generator seeded by the layer,
# small enough that class times multiplier stays below $2^{63}$. A wrong constant raises no error,
# it reads other rows. So compare all of them.

# %%
import dsv41
from dsv41 import engram

real = dsv41.preset("v4.1-flash")
sizes = real.vocab_size, real.engram_compressed_vocab_size
assert sizes == (129_280, 99_092), "ids and classes of the released model"
divisors = np.arange(2, 4002)  # up to the root of 16,000,889
used, modules = set(), []
for _ in range(2):
    columns = []
    for _ in range(3):
        candidate, found = 16_000_000, 0
        while found < 8:
            if candidate not in used and np.all(candidate % divisors):
                columns.append(candidate)
                used.add(candidate)
                found += 1
            candidate += 1
    modules.append(columns)
for columns in modules:
    print("first", columns[0], " last", columns[-1], " rows", f"{sum(columns):,}")
same("48 primes = the module's", modules, np.array(engram.table_primes(real)))
same("their sums are the table sizes of the config", np.sum(modules, 1), real.engram_num_embeddings)

bound = (2**63 - 1) // 99_092 // 2
for layer in (1, 14):
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64) * 2 + 1
    print(f"layer {layer:2}:", *drawn)
    same(f"multipliers of layer {layer}", engram.multipliers(real, layer), drawn)

# %% [markdown]
# **Break it.** Hash raw token ids, up to 129,279, instead of classes. The product leaves 63 bits
# and wraps around. Python's `%` hides it: a negative number still gives a legal row. C's `%`
# would give a negative one. Either way it is not the row that was trained.

# %% tags=["break"]
m0 = engram.multipliers(real, 1)[:1]
for kind, largest in (("class", 99_091), ("raw id", 129_279)):
    exact = largest * int(m0[0])
    wrapped = int((np.array([largest]) * m0)[0])
    print(f"{kind:6} {largest:7,}: exact {exact:20d}   in int64 {wrapped:20d}")
    like_c = int(np.fmod(np.int64(wrapped), 16_000_057))
    python = wrapped % 16_000_057
    print(f"   row {exact % 16_000_057:8} exact;   wrapped: {python:8} in Python, {like_c:9} in C")
assert like_c < 0 <= python, "only C shows that something is wrong"
assert wrapped < 0 and wrapped % 16_000_057 != exact % 16_000_057, "raw ids overflow"
assert 99_091 * max(max(engram.multipliers(real, layer)) for layer in (1, 14)) < 2**63, (
    "classes fit"
)

# %% [markdown]
# ## Where the look-back stops
#
# At the start of the request, and at an image. An image position hides itself **and everything
# older**; stopped places count as pad. First a loop for one position.


# %%
def one_window(classes, is_image, t, pad):
    window, stopped = [], False
    for back in range(4):
        stopped = stopped or t - back < 0 or is_image[t - back]
        window.append(pad if stopped else int(classes[t - back]))
    return window


classes = np.array([5, 7, 99, 11, 13])
is_image = np.array([False, False, True, False, False])
history = np.full(3, 2)  # the pad class
by_loop = [one_window(classes, is_image, t, pad=2) for t in range(5)]
for t, window in enumerate(by_loop):
    print(f"token {t}: {'image' if is_image[t] else classes[t]!s:5}   window {window}")
same("the module's look-back", engram.look_back(classes, is_image, history, 2)[0], by_loop)

# %% [markdown]
# **Break it, twice.** Hide only the image itself, and the look-back climbs over it: token 4 sees
# 7 again. And keep one history for all requests: the first three tokens of the second request
# look into the first one. Only three tokens are wrong, so averages do not show it.

# %% tags=["break"]
over = np.where(is_image, 2, classes)
wrong = windows_of(over, pad=2)
print("token 4: right", by_loop[4], "  wrong", wrong[4].tolist())
assert wrong[4].tolist() == [13, 11, 2, 7] != by_loop[4], "7 stands behind the image"

first, second = np.array([5, 7, 11, 13, 17]), np.array([19, 23, 29, 31])
text = np.zeros(9, bool)
_, left_over = engram.look_back(first, text[:5], history, 2)
right = engram.look_back(second, text[:4], history, 2)[0]
leaked = engram.look_back(second, text[:4], left_over, 2)[0]
for t in range(4):
    print(f"second request, token {t}: right {right[t]}   leaked {leaked[t]}")
assert (right != leaked).any(axis=1).tolist() == [True] * 3 + [False], "exactly three tokens"

# %% [markdown]
# Within a request the history must be kept, or the same happens at every chunk edge. Three
# classes a request are enough:

# %%
whole = engram.look_back(first, text[:5], history, 2)[0]
parts, carried = [], history
for piece in (first[:2], first[2:3], first[3:]):
    windows, carried = engram.look_back(piece, text[: len(piece)], carried, 2)
    parts.append(windows)
same("chunks of 2, 1 and 2 = one call", np.concatenate(parts), whole)
same("the history after it", carried, first[-3:])

# %% [markdown]
# ## The gate
#
# 24 rows of 256 numbers are laid side by side, 6,144 in all. One projection turns them into a
# key per stream (chapter 10 has the four streams) and one value for all. The hash knows nothing
# about the context, so each stream checks whether the memory fits:
#
# $$a_s = \frac{\mathrm{RMSNorm}(X_s) \cdot \mathrm{RMSNorm}(k_s)}{\sqrt D}, \qquad
# g_s = \sigma\left(\mathrm{sign}(a_s) \sqrt{\max(|a_s|, 10^{-6})}\right), \qquad
# X_s \mathrel{+}= g_s\, v$$
#
# The norm is taken for each stream alone. In an image the gate is 0. Two streams of four
# numbers, norm weights 1:

# %%
streams, keys = [[1, 2, 3, 4], [2, 0, -2, 0]], [[1, 0, 1, 0], [-1, 0, 1, 0]]
value = [0.5, -0.5, 1, 2]


def rms(v):
    return (sum(number**2 for number in v) / len(v)) ** 0.5


gates, added = [], []
for x, key in zip(streams, keys, strict=True):
    a = sum(p * q for p, q in zip(x, key, strict=True)) / rms(x) / rms(key) / 4**0.5
    root = max(abs(a), 1e-6) ** 0.5
    gates.append(float(1 / (1 + np.exp(-np.sign(a) * root))))
    added.append([p + gates[-1] * q for p, q in zip(x, value, strict=True)])
    print(f"a = {a:7.4f}   gate {gates[-1]:.4f}   stream", " ".join(f"{v:.3f}" for v in added[-1]))


def gate(streams, key, weight=1):
    """streams, key (T, S, D), weight (S, D): both norm weights, multiplied -> (T, S)"""
    a = np.sum(streams * weight * key, axis=-1)
    for x in (streams, key):
        a = a / np.sqrt(np.mean(x * x, axis=-1) + np.float32(1e-20))  # a zero stream is legal
    a = a / np.float32(np.sqrt(streams.shape[-1]))
    return 1 / (1 + np.exp(-np.sign(a) * np.sqrt(np.maximum(np.abs(a), np.float32(1e-6)))))


X, K = np.float32([streams]), np.float32([keys])
close("both streams at once = by hand", gate(X, K)[0], gates, within=1e-6)
ones, nowhere = np.ones((2, 4), np.float32), np.zeros(1, bool)
official = engram.engram_gate(X, K, np.float32([value]), ones, ones, nowhere, 1e-20, dsv41.FLOAT32)
close("the module's gate", official[1][0], gates, within=1e-6)
close("the module's streams", official[0][0], added, within=1e-6)
image = engram.engram_gate(X, K, np.float32([value]), ones, ones, ~nowhere, 1e-20, dsv41.FLOAT32)
same("an image's streams stay as they are", image[0], X)

# %% [markdown]
# **Break it.** One norm over both streams together. The first gate still looks like a gate.

# %% tags=["break"]
joint = np.float32([rms(streams[0] + streams[1]), rms(keys[0] + keys[1])])
a = np.sum(X * K, axis=-1)[0] / joint[0] / joint[1] / 2
wrong = 1 / (1 + np.exp(-np.sign(a) * np.sqrt(np.abs(a))))
print(f"right {gates[0]:.4f} {gates[1]:.4f}   wrong {wrong[0]:.4f} {wrong[1]:.4f}")
assert np.abs(wrong - gates).min() > 0.02, "both gates are others"

# %% [markdown]
# What is the signed root for? Look at it next to a plain sigmoid.

# %%
a = np.linspace(-8, 8, 801)
rooted = 1 / (1 + np.exp(-np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6))))
plain = 1 / (1 + np.exp(-a))
with figure("The signed root opens fast around 0 and saturates late") as ax:
    ax.plot(a, rooted, color=BLUE, linewidth=2)
    ax.plot(a, plain, color=GREY)
    ax.text(4.6, 0.80, "with the root", color=BLUE, fontweight="bold")
    ax.text(3.1, 1.03, "plain sigmoid", color=GREY, fontweight="bold")
    ax.set(xlabel="a, how well the memory fits", ylabel="gate", ylim=(0, 1.12), xlim=(-8, 8))
    ax.grid()
at = {v: rooted[np.argmin(np.abs(a - v))] for v in (-8, 0.02, 8)}
print("   ".join(f"a = {v}: gate {g:.3f}" for v, g in at.items()))
assert 0.05 < at[-8] and at[8] < 0.95 < plain[-1], "far out it is still open, or not yet full"

# %% [markdown]
# ## 196 billion parameters, 12,672 bytes a token
#
# A row is 256 E4M3 codes and 8 scale bytes (chapter 01). A token reads 24 rows in each of two
# modules, whatever the size of the table. The addresses depend on token ids only, so the rows
# can be fetched before the layers run (report, §2.4.2).
#
# *CPU, GPU or disk?* The rows are the same (shown below), the time is not. The release fetches
# from host memory over RDMA while the first layers run; in RL rollouts the tables stay on the GPUs
# (report, §3.1.3), on two at least. Below are the links as their standards name them, for the
# module in front of layer 1, which has the least time: 64 requests that write a token each, and
# 8,192 tokens of a prompt. Against them stands what the experts of layer 0 take at best, on an
# H200 as in its data sheet: reading weights at 4.8 TB/s, or 1,979 TFLOP/s in FP8. A disk reads
# 4,096 bytes for a row of 264.

# %%
from dsv41.ledger import engram_row_bytes, expert_bytes

row, rows = 256 + 256 // 32, sum(real.engram_num_embeddings)
per_token = 2 * 24 * row
print(f"row {row} bytes, {rows:,} rows, {rows * 256 / 1e9:.1f} billion parameters")
print(f"tables {rows * row / 1e9:.1f} GB = {rows * row / 2**30:.1f} GiB")
print(f"a token reads {2 * 24} rows, {per_token:,} bytes, one part in {rows * row // per_token:,}")
same("the ledger counts the same bytes", engram_row_bytes(real), row)
assert (row, per_token) == (264, 12_672), "bytes of a row and of a token"
close("196.6 billion parameters", rows * 256 / 1e9, 196.6, within=0.05)
close("188.8 GiB", rows * row / 2**30, 188.8, within=0.05)

links = {  # GB/s, and the bytes that a row costs
    "GPU memory": (4800, row),
    "host, PCIe 5.0 x16": (32 * 16 * 128 / 130 / 8, row),
    "RDMA, 400 Gbit/s": (400 / 8, row),
    "disk, PCIe 4.0 x4": (16 * 4 * 128 / 130 / 8, 4096),
}
met = 384 * (1 - (378 / 384) ** 64)  # different experts of 64 tokens, chosen evenly
decode, prompt = met * expert_bytes(real) / 4.8e12, 8192 * 7 * 2 * 3 * 5120 * 2304 / 1979e12
print(f"layer 0's experts   decode {1e6 * decode:6.1f} µs   prompt {1e3 * prompt:6.2f} ms")
for name, (rate, cost) in links.items():
    times = [tokens * 24 * cost / rate / 1e9 for tokens in (64, 8192)]
    print(f"{name:19} decode {1e6 * times[0]:6.1f} µs   prompt {1e3 * times[1]:6.2f} ms")
    hidden = times[0] < decode and times[1] < prompt
    assert hidden == (cost == row), f"{name}: " + ("hidden" if hidden else "layer 0 waits")
assert 141e9 < rows * row < 2 * 141e9, "more than one H200 holds"

# %% [markdown]
# ## The module reads only these rows
#
# A table may lie in memory or stay a mapped file. [read_rows](../dsv41/engram.py#read_rows)
# indexes it and decodes what it gets. Wrap a table so that it counts. The model is a tiny one
# with random weights: nine layers, Engram at layers 1 and 4, six columns of 32 numbers, and
# outputs of the released code in a file.


# %%
class Counted:
    """A table that counts the bytes handed out."""

    def __init__(self, array):
        self.array, self.handed_out = array, 0

    def __getitem__(self, at):
        got = self.array[at]
        self.handed_out += got.nbytes
        return got


model = dsv41.load(ROOT / "tests/golden/v41_tiny_a")
stored = np.load(ROOT / "tests/golden/v41_tiny_a/prompt_fp32.npz")
ids = stored["ids"][0, :72]
tiny, config = model.params["layers"][1]["engram"], model.config
mapped = tiny["embed"]["weight"]
while not isinstance(mapped, np.memmap) and getattr(mapped, "base", None) is not None:
    mapped = mapped.base
print(
    "the table of layer 1 is a", type(mapped).__name__, "of", len(tiny["embed"]["weight"]), "rows"
)
assert isinstance(mapped, np.memmap), "the model was loaded, the table was not"

own_rows = {}
for module, layer in enumerate(config.engram_layer_ids):
    p = np.array(engram.table_primes(config)[module])
    windows = windows_of(model.classes[ids], pad=model.classes[2])
    own_rows[layer] = rows_of(windows, engram.multipliers(config, layer), p, config.engram_n_heads)
    name = f"L{layer:02d}.engram.rows"
    same(
        f"layer {layer}: rows of this page = the released code",
        own_rows[layer],
        stored[name].astype(int),
    )

counted = {part: Counted(array) for part, array in tiny["embed"].items()}
from_file = engram.read_rows(counted, own_rows[1])  # (72, 192)
handed_out = sum(table.handed_out for table in counted.values())
print(f"{own_rows[1].size} rows of 32 + 1 bytes: {handed_out:,} bytes handed out")
same("nothing but the rows", handed_out, own_rows[1].size * 33)
in_memory = {part: np.array(array) for part, array in tiny["embed"].items()}
same("a copy in memory gives the same", engram.read_rows(in_memory, own_rows[1]), from_file)

# %% [markdown]
# From rows to gates and streams of the tiny model, in float32:

# %%
from dsv41.quant import FLOAT32

trace = {}
right = model.logits(ids, FLOAT32, trace=trace)
kv = from_file @ tiny["wkv"]["weight"].T  # (72, 5 * 64): four keys, one value
key, value = kv[:, :256].reshape(72, 4, 64), kv[:, 256:]
before = trace["L00.x_out"]  # (72, 4, 64)
own_gate = gate(before, key, tiny["q_weight"] * tiny["k_weight"])
close("gates of layer 1 = the released code", own_gate, stored["L01.engram.gate"], within=1e-5)
after = before + own_gate[:, :, None] * value[:, None]
close("streams after Engram = the module", after, trace["L01.engram.x"], within=1e-5)

# %% [markdown]
# **Break it.** *Does the model run without Engram?* It runs, nothing fails, the logits have the
# right size. They belong to another model.

# %% tags=["break"]
from dsv41 import ced

with patch.object(ced, "remember", lambda streams, p, layer, call: streams):
    without = model.logits(ids, FLOAT32)
agree = np.mean(without.argmax(axis=1) == right.argmax(axis=1))
print(f"logits with: std {right.std():.2f}   without: std {without.std():.2f}")
print(f"same first choice at {agree:.1f} of the positions")
assert abs(without.std() / right.std() - 1) < 0.1, "the size of the logits looks right"
assert agree < 0.9, "it runs without Engram, and answers something else"

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. The window of all positions at once, without a loop over positions, images included.
# 2. A phrase memory of orders 2 and 3 with one head each: the two rows of one window. The offset
#    is part of the answer.


# %% tags=["exercise"]
def all_windows(classes, is_image, pad):
    """classes (T,) int64, is_image (T,) bool -> (T, 4) int64, newest first"""
    line = np.concatenate([np.full(3, -1), np.where(is_image, -1, classes)])  # -1 stops
    windows = np.stack([line[3 - s : len(line) - s] for s in range(4)], axis=1)
    return ...


check("12.all_windows", all_windows)


# %% tags=["exercise"]
def two_rows(window, multiplier, primes):
    """window (3,) int64 newest first, multiplier (3,) int64, primes (2,) int64 -> two rows"""
    x, m, p = window.tolist(), multiplier.tolist(), primes.tolist()
    return ...


check("12.two_rows", two_rows)

# %% [markdown]
# ## What we learned
#
# - Ids fold to classes, classes hash to rows: multiply, XOR, modulo a prime, plus an offset.
# - Different primes per head separate what collides. All 48 and the multipliers must match exactly.
# - The look-back stops at the start of the request and at images, and does not climb over them.
# - The gate compares each stream with its key: normalised alone, signed root, sigmoid.
# - 196.6 billion parameters in 188.8 GiB; 48 rows and 12,672 bytes a token, from memory or a file.
#
# Worked solutions: [solutions/12_engram.py](solutions/12_engram.py). Next: [13 The whole
# model](13_whole_model.ipynb). All chapters: [README.md](README.md).
