"""How does a request go on from a stored prefix whose windows are gone? (SWA bounded replay)

The global KV of a prefix of H tokens is back in the cache, its window KV is not. Rebuilding the
windows exactly would take W tokens per layer, W times the number of layers in all. Bounded replay
takes W:

    start s = max(0, H - W)         tokens s .. H - 1 run again, in front of the new ones
    query i sees window keys        max(s, i - W + 1) .. i, so the first rows see a shorter window
    replayed tokens write           window KV only; their main KV and index keys stay untouched
    Engram looks back at            the true tokens before s, not at padding
    H is even                       so no pair is open at the hit

The decoder half does the same at every prefill, hit or not: only the last W tokens of the prompt
run through it, with nothing before them in its windows. Prompts up to W are not changed at all.
Both are approximations that the model was trained with. `exact` windows start layers * W tokens
back, which gives every layer its full window. Source: report, section 3.2.2. Left out: sharing a
replay between requests.
"""

import numpy as np

from .batch import TEXT
from .engram import BARRIER


def hit_length(tokens, config):
    """The usable part of a stored prefix of `tokens` tokens: cut so that no group is open."""
    step = max((ratio for ratio in config.compress_ratios), default=1) or 1
    return tokens // step * step


def replay_start(hit, config, exact=False):
    """First token to run again behind a hit of `hit` tokens."""
    back = config.sliding_window * (config.num_hidden_layers if exact else 1)
    return max(0, hit - back)


def decoder_start(total, start, config):
    """First token of a prefill of `total` tokens that runs through the decoder half."""
    return max(start, total - config.sliding_window, 0)


def begin_replay(model, cache, slot, ids, hit, exact=False, types=None):
    """Set a request, whose global KV of `hit` tokens is in the cache, back to where it replays.

    ids: the prompt; types: its token types or None. -> the start s: feed ids[s:] next.
    """
    start = replay_start(hit, model.config, exact)
    resume_at(model, cache, slot, ids, hit, start, {"encoder": start, "decoder": start}, types)
    return start


def resume_at(model, cache, slot, ids, hit, start, floor, types=None):
    """The request has global KV of `hit` tokens, and window KV from floor[half] up to `start`."""
    cache.require_open(slot)
    if hit != hit_length(hit, model.config) or not 0 <= start <= hit <= len(ids):
        raise ValueError(f"hit: expected an even number up to {len(ids)}, got {hit}")
    for written in cache.written.values():
        written[slot] = hit
    for half, first in floor.items():
        cache.floor[half][slot] = first
    cache.length[slot] = start
    cache.history[slot] = true_history(model, cache, slot, ids, start, types)


def true_history(model, cache, slot, ids, start, types=None):
    """Engram classes of the tokens before `start`, as a request that had run them would hold."""
    if not model.config.engram_layer_ids:
        return cache.history[slot]
    size = cache.history.shape[1]
    before = np.asarray(ids[max(0, start - size) : start], np.int64)
    classes = model.classes[before]
    if types is not None:
        inside = np.asarray(types[max(0, start - size) : start]) > TEXT
        classes = np.where(inside, BARRIER, classes)
    pad = model.classes[model.config.engram_pad_token_id]
    return np.concatenate([np.full(size - len(classes), pad), classes])
