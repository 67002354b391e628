# %% [markdown]
# # 16 · DSpark: five drafts in one pass
#
# **How can a model write several tokens per step, and still write the very same text?**
#
# A decode step reads a model's weights to write a single token. Six tokens in one step share some
# of that reading; how much, this page counts near its end. So a small drafter guesses the next
# five, and the main model checks all of them in one step. This chapter builds the drafter's block,
# the rule that keeps or refuses a draft, the rule that says how many are worth checking, and the
# way back.
#
# You need NumPy, attention (chapters 03 and 06) and probability of three tokens. 25 minutes. Three
# exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks]"`. Then open this page in Jupyter, or run
# `python tutorials/16_dspark.py`.
#
# Sources: the V4.1 report, §2.4.3; the DSpark paper (arXiv 2607.05147), scheduling and appendix A;
# speculative sampling (arXiv 2302.01318). The modules that this page arrives at:
# [draft.py](../dsv41/draft.py), [sampling.py](../dsv41/sampling.py),
# [schedule.py](../dsv41/schedule.py) and [rollback.py](../dsv41/rollback.py).

# %%
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np

from lib.page import (
    BLUE,
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
# ## What the drafter sees
#
# The main model carries four streams from layer to layer. At the **inputs** of its last three
# layers (37, 38 and 39 of the released model) take the plain mean over the streams, and put the
# three means side by side:
#
# $$f_p = [\bar x_{37} \mid \bar x_{38} \mid \bar x_{39}]_p, \qquad
# \mathrm{ctx}_p = \mathrm{RMSNorm}(W_{\mathrm{main}} f_p)$$
#
# Each of the drafter's three blocks makes window KV of $\mathrm{ctx}_p$ and keeps it in a ring:
# position $p$ lies in row $p \bmod W$. A committed token costs no query and no expert here.
#
# A nine-layer model with random weights has everything in small: features of layers 6, 7 and 8, a
# window of 8, blocks of 4. The released code has run it too; its arrays are the reference.
#
# Below, `features=seen` makes `model.step` put the means into a list, as it would for a drafter,
# and `Drafter.observe` is the way from $f_p$ to the rings. All in between is redone by hand with
# functions of the earlier chapters; names that are needed further down are imported here, too.

# %%
import dsv41
from dsv41 import FLOAT32, ledger, rollback
from dsv41.draft import Draft, Drafter, _Pass
from dsv41.engine import Engine
from dsv41.ops import linear_fp8, matmul_rows, rmsnorm, rows, sigmoid
from dsv41.presets import preset
from dsv41.projections import grouped_output, low_rank_queries
from dsv41.rope import frequencies, rotate
from dsv41.sampling import Sampling, distribution, draw, verify
from dsv41.schedule import draft_lengths
from dsv41.train.data import read_documents
from dsv41.window import window_kv

checkpoint = ROOT / "tests/golden/v41_tiny_a"
model = dsv41.load(checkpoint, parts=("text", "dspark"))
config, stages = model.config, [model.params["mtp"][n] for n in range(3)]
with np.load(checkpoint / "dspark.npz") as stored:
    reference = {n.removeprefix("fp32."): a for n, a in stored.items() if n.startswith("fp32.")}
with np.load(checkpoint / "prompt_fp32.npz") as stored:
    ids = stored["ids"][0]

cache, trace, seen = model.new_cache(FLOAT32), {}, []
slot, drafter = model.open(cache), Drafter(model, cache)
model.step(cache, [slot], [ids[:72]], features=seen, trace=trace)
features = np.concatenate(seen, axis=1)  # (72, 3 * 64)

by_hand = np.concatenate([trace[f"L{n:02d}.x_out"].mean(axis=1) for n in (5, 6, 7)], axis=1)
same("input of 6, 7, 8 = output of 5, 6, 7: mean of the streams", features, by_hand)
close("features, as released", features, reference["features"], within=5e-5)

context = linear_fp8(features, stages[0]["main_proj"]["weight"], FLOAT32)  # (72, 64)
context = rmsnorm(context, stages[0]["main_norm"]["weight"], config.rms_norm_eps, FLOAT32)
freqs, W = frequencies(config, 0), config.sliding_window
kv = window_kv(context, stages[0]["attn"], np.arange(72), freqs, config, FLOAT32)
close("context, as released", context, reference["main_x"], within=5e-5)
close("its KV in block 0, as released", kv, reference["M0.ctx_kv"], within=5e-5)

drafter.observe(slot, np.arange(72), features)
print("ring row of positions 64 .. 71:", *(p % W for p in range(64, 72)))
same("the ring holds the last window", drafter.rings[0][slot], kv[64:])

# %% [markdown]
# ## One block, one key set
#
# Let $L$ positions have features. The newest token, the *anchor*, has been chosen but not yet run:
# it stands at position $L$. The drafter runs one pass over
#
# $$[\text{anchor}, \text{noise}, \text{noise}, \dots] \quad \text{at} \quad L, L+1, \dots, L+B-1$$
#
# A noise token says only "fill me in". All $B$ queries read **one** key set: the ring, positions
# $\max(0, L - W)$ to $L - 1$, and the whole block. Inside the block everyone sees everyone, also
# to the right, and the lower edge does not slide. Slot $k$ predicts the token at $L + 1 + k$: the
# anchor's slot already gives the first draft.


# %%
def key_positions(length, first, window, block):
    """Positions that every query of the block reads; features exist from `first` on."""
    ring = [p for p in range(length - window, length) if p >= first]
    return ring + [length + k for k in range(block)]


def module_positions(length, first, window, block):
    """The same, from the row numbers that the module gathers. -> (B, at most W + B), -1 unused"""
    size = {"sliding_window": window, "dspark_block_size": block}
    owner = SimpleNamespace(config=SimpleNamespace(**size), first={0: first})
    owner.cache = SimpleNamespace(numerics=None)
    read = _Pass(owner, [0], length + np.arange(block), None).key_rows()
    return np.where(read >= 0, np.arange(length - window, length + block), -1)


for length in (1, 7, 8, 9):
    print(f"L = {length}: queries {length} .. {length + 3}, keys", *key_positions(length, 0, 8, 4))
for length, first in product((1, 7, 127, 128, 129), (0, 1)):
    for got in module_positions(length, first, 128, 5):
        assert got[got >= 0].tolist() == key_positions(length, first, 128, 5), "one key set"
same("at most 133 keys", len(key_positions(1000, 0, 128, 5)), 133)

# %%
with figure("One shared key set: the ring and the block, both directions") as ax:
    L, B = 20, 4
    for query, key in product(range(B), range(L - W - 1, L + B)):
        usual = L + query - W < key <= L + query
        if key in key_positions(L, 0, W, B):
            colour = GREEN if key >= L else BLUE
            ax.plot(key, query, "s", color=colour, markersize=15, alpha=1 if usual else 0.4)
    ax.text(L - W / 2 - 0.5, -0.85, "ring: main model's context", color=BLUE, ha="center")
    ax.text(L + B / 2 - 0.5, -0.85, "block", color=GREEN, ha="center")
    note = "pale: a causal\nwindow would\nnot read it"
    ax.text(L + B - 0.2, 1.5, note, color=INK, va="center")
    ax.set(xlim=(L - W - 0.7, L + B + 3), ylim=(3.6, -1.3), xlabel="key position (L = 20)")
    ax.set_xticks(range(L - W, L + B))
    ax.set_yticks(range(B), ["anchor", "noise", "noise", "noise"])
    ax.set_ylabel("query")

# %% [markdown]
# Now the attention of the first block, query by query. Run token 72, so that $L = 73$. The main
# model's best next token is the anchor. One softmax over all keys, with the head's sink in the
# denominator; then the output is turned back (chapters 02 and 03).
#
# **Break it.** Give the same queries the usual causal window instead. Nothing fails: the drafts
# are merely worse, and no test of the text can see it. Only the reference's arrays can.

# %% tags=["break"]
seen = []
best = int(np.argmax(model.step(cache, [slot], [ids[72:73]], features=seen)[-1]))
drafter.observe(slot, np.array([72]), np.concatenate(seen, axis=1))
L, B, noise = 73, config.dspark_block_size, config.dspark_noise_token_id
block_ids, at = np.array([best] + [noise] * (B - 1)), np.arange(L, L + B)
print("block:", *block_ids, " positions:", *at)

p = stages[0]["attn"]
x = rows(model.params["embed"]["weight"], block_ids)  # (B, D)
x = rmsnorm(x, stages[0]["attn_norm"]["weight"], config.rms_norm_eps, FLOAT32)
queries = rotate(low_rank_queries(x, p, config, FLOAT32)[1], at, freqs)  # (B, H, C)
own = window_kv(x, p, at, freqs, config, FLOAT32)  # (B, C)
records = dict(zip(at.tolist(), own, strict=True))  # position -> (C,)
records |= {t: drafter.rings[0][slot][t % W] for t in range(L - W, L)}


def attend(query, sink, keys):
    """query (C,), keys (N, C) -> (C,)"""
    weight = np.exp(keys @ query / np.sqrt(np.float32(len(query))))
    return weight @ keys / (weight.sum() + np.exp(sink))


def attention(positions_of):
    """positions_of(query position) -> y (B, D)"""
    o = np.zeros_like(queries)
    for k, head in np.ndindex(queries.shape[:2]):
        keys = np.stack([records[position] for position in positions_of(L + k)])
        o[k, head] = attend(queries[k, head], p["attn_sink"][head], keys)
    return grouped_output(rotate(o, at, freqs, inverse=True), p, config, FLOAT32)


want = reference["step0.M0.attn.out"]
shared = attention(lambda t: key_positions(L, 0, W, B))
causal = attention(lambda t: range(t - W + 1, t + 1))
close("shared key set, as released", shared, want, within=5e-5)
error = np.linalg.norm(causal - want, axis=1) / np.linalg.norm(want, axis=1)
print("causal window: error of each query", "  ".join(f"{e:.2f}" for e in error))
assert error.min() > 0.05, "a causal window is another drafter"

# %% [markdown]
# ## The Markov head, left to right
#
# The pass gives $h_k$ for all slots at once. So slot 2 does not know what slot 1 said, and two good
# guesses can make a bad pair. A cheap table repairs it: with $e_k = W_1[\mathrm{prev}_k]$,
#
# $$z_k = \mathrm{head}\,\mathrm{RMSNorm}(h_k) + W_2\, e_k, \qquad
# c_k = w \cdot [h_k \mid e_k]$$
#
# $\mathrm{prev}_0$ is the anchor, $\mathrm{prev}_{k+1}$ the draft just chosen. $\sigma(c_k)$
# estimates that draft $k$ is kept, given that all before it are; note that $e_k$ holds the token
# *before* the draft, so $c_k$ cannot depend on the draft itself.

# %%
last = stages[2]
W1, W2 = (last["markov_head"][name]["weight"] for name in ("embed", "head"))  # (V, r) each
judge = last["confidence_head"]["proj"]["weight"]  # (1, D + r)
hidden = drafter.hidden([slot], [best])[0]  # (B, D)
base = drafter.base_logits(hidden)  # (B, V), without the table

z, c, drafts, prev = [], [], [], best
for h, u in zip(hidden, base, strict=True):
    e = rows(W1, np.array([prev]))  # (1, r)
    z.append(u + matmul_rows(e, W2, FLOAT32)[0])
    c.append(matmul_rows(np.concatenate([h[None], e], axis=1), judge, FLOAT32)[0, 0])
    prev = int(np.argmax(z[-1]))
    drafts.append(prev)

alone = base.argmax(axis=1).tolist()
print("anchor", best)
print("without the table:", alone)
print("left to right:    ", drafts)
same("drafts, as released", [best, *drafts], reference["step.drafts"][0].astype(int))
close("logits z, as released", z, reference["step.logits"][0], within=5e-5)
close("confidence c, as released", c, reference["step.confidence"][0], within=5e-5)
assert alone != drafts, "the token before matters"

module = drafter.propose([slot], [best], lambda i, logits: int(np.argmax(logits)))[0]
same("Drafter.propose: drafts", module.tokens, drafts)
same("Drafter.propose: logits", module.logits, np.stack(z))

# %% [markdown]
# ## Keep or refuse: three tokens, in fractions
#
# The main model runs [anchor, drafts] in one step and has a law $p$ at every place. The draft $d$
# was drawn from $q$. Keep it with probability $\min(1, p(d)/q(d))$. If it is refused, draw from
# what $q$ left out, $\max(p - q, 0)$ normalised. For every token $v$ the law of what comes out is
#
# $$\min(p_v, q_v) + \Big(1 - \sum_w \min(p_w, q_w)\Big)
# \frac{\max(p_v - q_v, 0)}{\sum_w \max(p_w - q_w, 0)} = p_v$$
#
# because the last denominator *is* the refused mass. By hand:


# %%
def keep_chance(p, q, d):
    return min(Fraction(1), p[d] / q[d])


def replacement(p, q):
    """-> the law of the token in a refused draft's place."""
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [r / sum(rest) for r in rest]


def law_behind(p, q, d):
    """Law of what comes out when d was drafted and q is said to be its law."""
    kept = keep_chance(p, q, d)
    rest = [0] * len(p) if kept == 1 else replacement(p, q)
    return [kept * (v == d) + (1 - kept) * r for v, r in enumerate(rest)]


def show(law):
    return "(" + ", ".join(str(v) for v in law) + ")"


p = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
q = [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]
print("p =", show(p), "  q =", show(q))
print("kept with:", show(keep_chance(p, q, d) for d in range(3)))
print("refused:", 1 - sum(map(min, p, q)), "  in its place:", show(replacement(p, q)))
law = [sum(q[d] * law_behind(p, q, d)[v] for d in range(3)) for v in range(3)]
print("comes out:", show(law))
assert law == p, "the law that comes out is exactly p"

a, b = np.random.default_rng(1).dirichlet(np.ones(50), (2, 1000))  # (1000, 50) each
kept, rest = np.minimum(a, b), np.maximum(a - b, 0)
out = kept + (1 - kept.sum(axis=1, keepdims=True)) * rest / rest.sum(axis=1, keepdims=True)
close("1,000 pairs of laws over 50 tokens at once", out, a, within=1e-12)

# %% [markdown]
# **Break it.** The drafter takes its best token, and the verifier still divides by the soft $q$.
# Token 1 is always drafted, kept in 3 of 5 cases, and the place of a refusal goes to token 0.
# Acceptance doubles against the right rule, so it looks like a success. A draft by argmax was
# drawn from the one-point law, and that is the $q$ to divide by.

# %% tags=["break"]
point = [Fraction(0), Fraction(1), Fraction(0)]
wrong, right = law_behind(p, q, 1), law_behind(p, point, 1)
print("soft q:      kept", keep_chance(p, q, 1), "  comes out", show(wrong))
print("one-point q: kept", keep_chance(p, point, 1), " comes out", show(right))
print("in place of a refusal:", show(replacement(p, point)))
assert wrong == [Fraction(2, 5), Fraction(3, 5), 0] != p, "token 2 can never be written again"
assert right == p, "with the one-point law it is exact"

# %% [markdown]
# ## A run of drafts
#
# Drafts are judged left to right, and the first refusal ends the run: what follows stood behind
# another token. If all are kept, the main model's last row gives one token more for free. So a step
# writes 1 to $n + 1$ tokens. With acceptance $c$ at every place:
#
# $$E = 1 + c + c^2 + \dots + c^n = \frac{1 - c^{n+1}}{1 - c}$$


# %%
def judge_run(target, drafted, tokens, generator):
    """target (n + 1, V), drafted (n, V), tokens (n,) -> how many are kept, the token behind."""
    for k, d in enumerate(tokens):
        if generator.random() * drafted[k][d] >= target[k][d]:  # u in [0, 1), no division
            rest = np.maximum(target[k] - drafted[k], 0)
            return k, draw(rest, generator)
    return len(tokens), draw(target[-1], generator)


rng = np.random.default_rng(2)
for trial in range(200):
    target, drafted = rng.dirichlet(np.ones(6), 6), rng.dirichlet(np.ones(6), 5)
    tokens = [draw(row, rng) for row in drafted]
    got, want = (f(target, drafted, tokens, np.random.default_rng(trial)) for f in
                 (judge_run, verify))  # fmt: skip
    assert got == want, "run by run the module's verdict"
rng, measured = np.random.default_rng(3), {}
print("   c  drafts  expected  measured in 4,000 steps")
for c, n in product((0.5, 0.8, 0.95), (1, 5)):
    target, drafted = np.array([[c, 1 - c]] * (n + 1)), np.array([[1.0, 0.0]] * n)
    total = sum(1 + verify(target, drafted, [0] * n, rng)[0] for _ in range(4000))
    measured[c, n] = total / 4000
    expected = (1 - c ** (n + 1)) / (1 - c)
    print(f"{c:4.2f}  {n:6}  {expected:8.3f}  {measured[c, n]:8.3f}")
    assert abs(measured[c, n] - expected) < 0.15, "measured tokens per step"

# %%
with figure("Tokens per step: five drafts pay when nearly all are kept") as ax:
    c = np.linspace(0, 1, 201)
    for n, colour in ((1, GREY), (2, ORANGE), (5, BLUE)):
        ax.plot(c, sum(c**k for k in range(n + 1)), color=colour)
        name = f"{n} draft" + "s" * (n > 1)
        ax.text(1.015, n + 1, name, color=colour, va="center", fontweight="bold")
    for (at_c, n), tokens in measured.items():
        ax.plot(at_c, tokens, "o", color=BLUE if n == 5 else GREY, markersize=5)
    ax.text(0.36, 2.5, "dots: measured", color=INK, ha="center")
    ax.set(xlabel="acceptance of one draft", ylabel="tokens per step", xlim=(0, 1.2))
    ax.set(ylim=(0.8, 6.3), yticks=range(1, 7), xticks=np.arange(0, 1.01, 0.2))
    ax.grid(axis="y")

# %% [markdown]
# At $c = 0.5$ five drafts give under 2 tokens, one gives 1.5. The last places are rarely reached.
#
# ## Which $c$ should I expect, and why not ten drafts?
#
# The report publishes no acceptance, and it depends on the text. Measure it: `data/mini` has a
# drafter that was trained, if shortly (chapter 19). Four kinds of held-out text, continued
# greedily; after every token a block of five drafts is laid against what the model then writes.
#
# **Break it.** Ask for ten. Places six to ten are noise tokens at positions that no training block
# had. And since a block reads itself in both directions, the first five see five more of them.


# %% tags=["break"]
def kept_drafts(text, sizes=(5, 10), count=32):
    """Continue 96 tokens of text -> {size: (count - 10, size) which drafts are kept}, drafts."""
    cache = mini.new_cache(FLOAT32)
    slot, drafters = mini.open(cache), {size: Drafter(mini, cache) for size in sizes}
    drafts, written = {size: [] for size in sizes}, []
    feed = [mini.config.bos_token_id, *mini.tokenizer.encode(text)][:96]
    for _ in range(count):
        seen, at = [], cache.length[slot] + np.arange(len(feed))
        feed = [int(np.argmax(mini.step(cache, [slot], [feed], features=seen, tails=[1])))]
        written += feed
        for size, drafter in drafters.items():
            drafter.config = mini.config.but(dspark_block_size=size)
            drafter.observe(slot, at, np.concatenate(seen, axis=1))
            (best,) = drafter.propose([slot], feed, lambda i, z: int(np.argmax(z)))
            drafts[size].append(best.tokens)
    kept = {}
    for size, tokens in drafts.items():
        right = [tokens[n] == written[n + 1 : n + 1 + size] for n in range(count - 10)]
        kept[size] = np.cumprod(right, axis=1)  # behind a wrong one nothing is kept
    return kept, drafts


mini = dsv41.load(ROOT / "data/mini")
heldout = list(read_documents(ROOT / "data/corpus/heldout.txt"))
texts = {"manual": 1, "novel": 6, "verse": 3, "scripture": 2}
runs = {name: kept_drafts(heldout[n]) for name, n in texts.items()}
by_text = {name: kept[5].sum(axis=1).mean() for name, (kept, _) in runs.items()}
by_place = {n: np.mean([kept[n] for kept, _ in runs.values()], axis=(0, 1)) for n in (5, 10)}
with figure("Drafts kept: it depends on the text, and ten are no better", columns=2) as ax:
    ax[0].barh(range(4), list(by_text.values()), color=BLUE, height=0.6)
    ax[0].set_yticks(range(4), list(by_text))
    ax[0].set(xlabel="kept of five drafts")
    for n, colour, up in ((5, BLUE, 0.06), (10, ORANGE, -0.06)):
        ax[1].plot(np.arange(1, n + 1), by_place[n], "o-", color=colour, markersize=4)
        ax[1].text(0.4, 0.7 + up, f"blocks of {n}", color=colour, transform=ax[1].transAxes)
    ax[1].set(xlabel="place of the draft", ylabel="share kept", xticks=range(1, 11), ylim=(0, None))
print(f"{len(runs['verse'][0][5])} blocks of drafts behind each of {len(texts)} texts")
assert max(by_text.values()) > 1.2 * min(by_text.values()), "acceptance depends on the text"
assert by_place[10].sum() < by_place[5].sum() + 0.05, "eleven rows keep no more than six"
assert by_place[10][5:].max() < 0.05, "places six to ten add nothing"
changed = sum((np.array(d[5]) != np.array(d[10])[:, :5]).any() for _, d in runs.values())
assert changed > 0, "and the first five are others than before"

# %% [markdown]
# How fast the curve falls is this drafter's training; that more places do not lift it is the block.
# A release fixes the number of drafts with the drafter. What may vary is how many are *checked*.
#
# ## How many are worth checking?
#
# Each checked draft takes a place in the batch. With $B$ tokens in it, the main model makes
# $\mathrm{SPS}(B)$ steps a second. Draft $j$ of request $r$ survives with
# $a_{rj} = \prod_{i \le j} \sigma(c_{ri})$. With $l_r$ drafts each, the tokens per second are
#
# $$\Theta = \tau \cdot \mathrm{SPS}(B), \qquad \tau = \sum_r \Big(1 + \sum_{j \le l_r} a_{rj}\Big),
# \qquad B = \sum_r (1 + l_r)$$
#
# Take the candidate with the best survival, one at a time, and stop at the first that does not
# raise $\Theta$. Survival never rises along a request, so what is taken is always a prefix.


# %%
def schedule(survival, speed):
    """survival: a list per request; speed(tokens) -> steps a second. -> drafts per request"""
    order = sorted((-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row))
    lengths, tau, tokens = [0] * len(survival), float(len(survival)), len(survival)
    best = tau * speed(tokens)
    for minus_a, j, r in order:
        tau, tokens = tau - minus_a, tokens + 1
        rate = tau * speed(tokens)
        print(f"request {r}, draft {j}: survival {-minus_a:.3f}  rate {rate:6.2f}", end="  ")
        print("take" if rate > best else "stop")
        if rate <= best:
            break
        lengths[r], best = lengths[r] + 1, rate
    return lengths


def speed(tokens):
    return 100 / (10 + tokens)


sure = np.cumprod([0.95, 0.9, 0.9, 0.85, 0.8])
doubtful = np.cumprod([0.5, 0.4, 0.4, 0.3, 0.3])
lengths = schedule([sure, doubtful], speed)
print("drafts to check:", lengths)
same("the module's choice", lengths, draft_lengths([sure, doubtful], speed).tolist())
assert lengths == [5, 1], "the sure request gets the places"
same("survival of a Draft", module.survival, np.cumprod(sigmoid(module.confidence)))

# %% [markdown]
# **Break it.** Why stop at the first loss? A later draft may bring $\Theta$ back up. The paper's
# counter-example has two tokens, A and B, and $\mathrm{SPS} = 1, 0.5, 0.45$. The first draft has
# survival 0.8; the second has confidence 0.9 behind A and 0 behind B. Looking ahead, the rule
# checks the draft when it is A, and does not when it is B. Then A is always kept, and B gets a
# second chance to become A. The choice depended on the draft's value.

# %% tags=["break"]
steps, p, q = (1, 0.5, 0.45), [Fraction(7, 10), Fraction(3, 10)], [Fraction(1, 2)] * 2
ahead, stops = {}, {}
for d, name in enumerate("AB"):
    survival = np.array([0.8, 0.8 * (0.9, 0)[d]])
    rates = [(1 + survival[:n].sum()) * steps[n] for n in range(3)]
    ahead[d] = int(np.argmax(rates))
    stops[d] = int(draft_lengths([survival], lambda tokens: steps[tokens - 1])[0])
    shown = "  ".join(f"{rate:.3f}" for rate in rates)
    print(f"draft {name}: rates {shown}   ahead checks {ahead[d]}, stopping checks {stops[d]}")


def first_token(lengths):
    """Law of the next token; an unchecked draft is dropped and the token drawn from p."""
    behind = [law_behind(p, q, d) if lengths[d] else p for d in range(2)]
    return [sum(q[d] * behind[d][v] for d in range(2)) for v in range(2)]


for name, lengths in (("looking ahead", ahead), ("stopping", stops), ("always", {0: 1, 1: 1})):
    law = first_token(lengths)
    print(f"{name:13}  P(A) = {law[0]!s:5} = {float(law[0]):.2f}")
assert first_token(ahead) == [Fraction(17, 20), Fraction(3, 20)], "0.85: another law"
assert first_token(stops) == p, "0.70: the model's law"

# %% [markdown]
# ## The way back
#
# Checking has run the main model on tokens that may be refused. Compressed entries behind the kept
# length hurt nobody: no one reads them, and the next tokens overwrite them. Three things must be
# put back: the window rings (token $j$ overwrote token $j - W$), the compressor's open pair, and
# Engram's last tokens.
#
# **Break it.** Feed five tokens, of which the last ones are wrong, go back, and run the next six
# right tokens. Compare their logits with a run that never went astray. Then leave one of the three
# as the refused tokens left it.

# %% tags=["break"]
exact = FLOAT32.but(batch_invariant=True)
straight = model.logits(ids[:72], exact)


def next_logits(kept, leave=None):
    """61 tokens, then 5 of which `kept` are right -> error of the next 6 right tokens' logits."""
    cache = model.new_cache(exact)
    slot = model.open(cache)
    model.step(cache, [slot], [ids[:61]])
    rollback.mark(cache, slot, 5)
    wrong = (ids[61 + kept : 66] + 7) % 200 + 3
    model.step(cache, [slot], [np.concatenate([ids[61 : 61 + kept], wrong])])
    parts = {"rings": cache.window, "open pair": list(cache.carry.values()),
             "history": [cache.history]}  # fmt: skip
    left = [array[slot].copy() for array in parts.get(leave, [])]
    rollback.rollback(cache, slot, 61 + kept)
    for array, old in zip(parts.get(leave, []), left, strict=True):
        array[slot] = old
    got = model.step(cache, [slot], [ids[61 + kept :][:6]])
    return np.abs(got - straight[61 + kept :][:6]).max()


table = {name: [next_logits(kept, name) for kept in range(5)]
         for name in (None, "rings", "open pair", "history")}  # fmt: skip
print("largest error, kept of 5:", "  ".join(f"{kept:5}" for kept in range(5)))
for name, errors in table.items():
    print(f"not put back: {name or 'nothing':11}", "  ".join(f"{e:5.2f}" for e in errors))
same("put back: equal to the last bit", np.float32(table[None]), np.zeros(5, np.float32))
assert min(table["rings"][:4]) > 0.01, "rings left dirty: wrong logits"
assert table["rings"][4] == 0, "and invisible when a single token is taken back"
assert np.flatnonzero(table["open pair"]).tolist() == [2, 4], "the pair: lengths 63 and 65"

# %% [markdown]
# One refused token is no test of the rings: its row is the very row that the next token writes.
# The open pair is quieter still. It exists at odd lengths only, here 61, 63 and 65; and at 61 it is
# untouched, because the run of five closed all its pairs.
#
# ## The text does not change
#
# At temperature 0 both laws are one-point: a draft is kept exactly when it is the main model's
# best. Right, wrong and random drafts change the number of steps and nothing else.

# %%
prompt, count, V = ids[:19].tolist(), 41, config.vocab_size


def write(guess=None, draft=True):
    """guess(text so far) -> B tokens, in place of the drafter's -> text, steps, drafts kept"""
    engine = Engine(model, exact, exact=True, draft=draft)
    request = engine.submit(prompt, max_tokens=count, stop=())

    def propose(slots, anchors, choose):
        logits = np.eye(V, dtype=np.float32)[guess(request.tokens)]
        tokens = np.array([choose(0, row) for row in logits])
        return [Draft(tokens, logits, np.zeros(B, np.float32))]

    if guess:
        engine.drafter.propose = propose
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return request.tokens, steps, sum(request.accepted)


def right(text):
    return [*plain[len(text) :], *[0] * B][:B]


rng = np.random.default_rng(4)
plain, steps, _ = write(draft=False)
print(f"no drafts: {count} tokens in {steps} steps")
for name, guess in {
    "right": right,
    "wrong": lambda text: [(t + 1) % V for t in right(text)],
    "coin": lambda text: [(t + int(rng.random() < 0.4)) % V for t in right(text)],
}.items():
    text, steps, kept = write(guess)
    same(f"{name} drafts: the same text", text, plain)
    print(f"  {steps} steps, {kept} drafts kept")
same("the model's own, random drafter: the same text", write()[0], plain)
assert write(right)[1:] == (9, 32), "1 token from the prompt, then 8 steps of 4 drafts and 1 more"

# %% [markdown]
# ## Count the bytes
#
# The released drafter keeps three rings of 128 records of 528 bytes (chapter 01), for a request
# that drafts. The tables of the Markov head have 129,280 rows of 256.
#
# And what do six tokens in one step share? Attention, shared experts and head are read once,
# whatever the number of tokens. Of 384 routed experts each token chooses 6. Chosen evenly, $n$
# tokens meet a share of $1 - (1 - 6/384)^n$ of them, and every expert that is met must be read.

# %%
real = preset("v4.1-flash")
ring = real.num_nextn_predict_layers * real.sliding_window * (512 + 512 // 32)
print(f"rings: 3 x 128 x 528 = {ring:,} bytes a request")
same("the ledger counts the same bytes", ledger.kv_bytes("V4.1-Flash").draft, ring)
main_proj = 3 * real.hidden_size * real.hidden_size
markov = 2 * real.vocab_size * real.dspark_markov_rank
print(f"main_proj 5120 x 15360 = {main_proj / 1e6:.1f}M   Markov head {markov / 1e6:.1f}M weights")
assert (round(main_proj / 1e5), round(markov / 1e5)) == (786, 662), "78.6M and 66.2M"

stored = ledger.stored_bytes(real)
always = ("attention", "head", "shared expert", "router", "mHC", "compressor", "indexer")


def read_by(tokens):
    """Bytes of weights that a step of so many tokens reads."""
    met = 1 - (1 - real.num_experts_per_tok / real.n_routed_experts) ** tokens
    return sum(stored[part] for part in always) + met * stored["routed experts"]


print("requests   a token each   six tokens each")
for requests in (1, 8, 64, 512):
    one, six = read_by(requests), read_by(6 * requests)
    print(f"{requests:8} {one / 1e9:11.1f} GB {six / 1e9:14.1f} GB, {six / one:.2f} x as much")
assert 2.5 < read_by(6) / read_by(1) < 3, "alone: not six times the bytes, but not the same either"
assert read_by(6 * 8) / read_by(8) > 3.5, "a few requests share least: they meet other experts"
assert read_by(6 * 512) / read_by(512) < 1.01, "in a large batch every expert is read anyway"

# %% [markdown]
# Checking five drafts is no free lunch: alone it takes 2.7 times the bytes of one token, and at
# $c = 0.5$ writes under two. This is one more reason to check few drafts when they are doubtful,
# and it is what $\mathrm{SPS}(B)$ stands for.
#
# ## The module gives the same laws
#
# [verify](../dsv41/sampling.py#verify) takes its numbers from a generator. Replace that by
# midpoints of equal parts, and counting runs integrates exactly: the module's law as fractions. A
# greedy law is one-point, so [distribution](../dsv41/sampling.py#distribution) makes the right $q$
# for argmax drafts by itself.


# %%
def module_law(p, q, d, parts=70):
    """Law of the token that `verify` writes, when all steps are multiples of 1 / parts."""
    counts, middles = [0] * len(p), (np.arange(parts) + 0.5) / parts
    target, drafted = np.array([p, p], float), np.array([q], float)
    for numbers in product(middles, repeat=2):
        generator = mock.Mock(random=mock.Mock(side_effect=numbers))
        kept, token = verify(target, drafted, [d], generator)
        counts[d if kept else token] += 1
    return [Fraction(n, parts**2) for n in counts]


p = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
q = [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]
assert module_law(p, q, 1, 10) == law_behind(p, q, 1), "draft 1 from q, law by law"
assert module_law(p, point, 1) == p, "the one-point draft leaves p"
greedy = distribution(np.float32([1, 3, 2]), Sampling(temperature=0))
same("greedy is the one-point law", greedy, np.array([0.0, 1.0, 0.0]))
print("verify, draft 1 from the one-point law:", show(module_law(p, point, 1)))

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Give the law of what comes out when token $d$ was drafted and $q$ is its law, as floats. The
#    inputs include $p = q$ and one-point laws.
# 2. Choose the number of drafts of a single request. `steps[n]` is the speed with $n + 1$ tokens.
#    The inputs include rates that only stay equal, and rates that fall and rise again.
# 3. List the key positions of a block behind `length` tokens when features exist from `first` on.


# %% tags=["exercise"]
def comes_out(p, q, d):
    """p (V,), q (V,) f64 with q[d] > 0, d int -> (V,) f64"""
    return ...


check("16.comes_out", comes_out)


# %% tags=["exercise"]
def how_many(survival, steps):
    """survival (B,) non-increasing, steps (B + 1,) -> int"""
    return ...


check("16.how_many", how_many)


# %% tags=["exercise"]
def keys_of(length, first, window, block):
    """four ints -> (at most window + block,) int, ascending"""
    return ...


check("16.keys_of", keys_of)

# %% [markdown]
# ## What we learned
#
# - The drafter reads stream means at the inputs of three layers. One pass over [anchor, noise, …]
#   gives five places, and the Markov head ties neighbours together, left to right.
# - All queries of a block share one key set. A mistake there costs speed, never text.
# - Keep with $\min(1, p/q)$, replace from $\max(p - q, 0)$: the law is exactly $p$. An argmax
#   draft has a one-point $q$; with the soft one, token 2 vanished.
# - Check drafts by survival while the rate rises, and stop at the first loss. Looking ahead gives
#   0.85 in place of 0.70.
# - Going back restores rings, open pair and Engram history. Test with two refused tokens or more.
#
# Worked solutions: [solutions/16_dspark.py](solutions/16_dspark.py). Next: [17 Gradients by
# hand](17_gradients.ipynb). All chapters: [README.md](README.md).
