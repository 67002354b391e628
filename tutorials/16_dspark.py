# %% [markdown]
# # 16 · DSpark: five drafts in one pass
#
# **How can a model write several tokens per step, and still write the very same text?**
#
# A large model spends most of a decode step on reading its weights. Reading them for six tokens
# costs little more than for one. So a small drafter guesses the next five, and the main model
# checks all of them in one step. This chapter builds the drafter's block, the rule that keeps or
# refuses a draft, the rule that says how many are worth checking, and the way back.
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
L, B = 20, 4
with figure("One shared key set: the ring and the block, in both directions") as ax:
    for query in range(B):
        for key in range(L - W - 1, L + B):
            usual = L + query - W < key <= L + query
            shown = key >= L - W
            colour = (GREEN if key >= L else BLUE) if shown else "white"
            ax.add_patch(_ := __import__("matplotlib").patches.Rectangle(
                (key - 0.45, query - 0.45), 0.9, 0.9, facecolor=colour, edgecolor=GREY, lw=0.4))
            if shown and not usual:
                ax.text(key, query, "×", ha="center", va="center", color="white", fontsize=12)
    ax.set(xlim=(L - W - 1.6, L + B + 3.5), ylim=(3.6, -1.3), xlabel="key position")
    ax.set_xticks(range(L - W, L + B))
    ax.set_yticks(range(B), ["anchor", "noise", "noise", "noise"])
