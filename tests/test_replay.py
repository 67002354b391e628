"""Bounded replay: what it may change, what it must not, and what it saves."""

from functools import cache as once

import numpy as np
import oracles
import pytest
from reference import MODES, model

from dsv41 import FLOAT32
from dsv41.batch import make_batch
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.presets import preset
from dsv41.replay import (
    begin_replay,
    decoder_start,
    hit_length,
    replay_start,
    resume_at,
    true_history,
)
from dsv41.window import window_index

WINDOW = 8  # of the reference model
EXACT = {name: numerics.but(batch_invariant=True) for name, numerics in MODES.items()}
LENGTHS = [9, 12, 16, 17, 21, 29, 45, 66]  # 130, 190, 258, 322, .. scaled to this window, and odd


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 280, count)


def prefill(ids, numerics, bounded, trace=None, cuts=(), model=model):
    """One request's prompt, in pieces; -> logits of the last row, cache, slot."""
    cache = model().new_cache(numerics)
    slot = model().open(cache)
    start = decoder_start(len(ids), 0, model().config) if bounded else 0
    for piece in np.split(ids, cuts):
        logits = model().step(cache, [slot], [piece], trace=trace, decoder_from=[start], tails=[1])
    return logits, cache, slot


def entries(cache, slot, source):
    rows = cache.rows(source, slot, np.arange(cache.written[source][slot] // cache.ratio[source]))
    return cache.main_kv[source][rows], cache.index[source][rows]


def with_prefix(ids, hit, numerics, model=model):
    """A cache that holds the global KV of the first `hit` tokens and nothing else of them."""
    cache = model().new_cache(numerics)
    donor, slot = model().open(cache), model().open(cache)
    model().step(cache, [donor], [ids[:hit]])
    cache.reserve(slot, hit)
    for source, ratio in cache.ratio.items():
        kv, keys = entries(cache, donor, source)
        count = hit // ratio
        owners = np.full(count, slot)
        cache.write_entries(source, np.arange(count), owners, kv[:count], keys[:count])
    cache.release(donor)
    return cache, slot


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_a_prompt_up_to_the_window_is_not_changed(mode, count):
    ids = some_ids(count)
    bounded, _, _ = prefill(ids, EXACT[mode], True)
    exact, _, _ = prefill(ids, EXACT[mode], False)
    assert np.array_equal(bounded, exact)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("count", LENGTHS)
def test_global_kv_of_all_sources_equals_the_exact_path(mode, count):
    ids = some_ids(count)
    _, bounded, a = prefill(ids, EXACT[mode], True)
    _, exact, b = prefill(ids, EXACT[mode], False)
    for source in bounded.ratio:
        for ours, theirs in zip(
            entries(bounded, a, source), entries(exact, b, source), strict=True
        ):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("count", [n for n in LENGTHS if n > WINDOW + 1])
def test_a_longer_prompt_is_an_approximation(count):
    """If bounded and exact agreed here, nothing would have been left out."""
    bounded, _, _ = prefill(some_ids(count), EXACT["fp32"], True)
    exact, _, _ = prefill(some_ids(count), EXACT["fp32"], False)
    assert not np.array_equal(bounded, exact)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("cuts", [(1,), (5, 6), (36, 37, 38), (37,), (44,), tuple(range(1, 45))])
def test_the_pieces_of_a_bounded_prefill_do_not_matter(mode, cuts):
    ids = some_ids(45)
    whole, cache, slot = prefill(ids, EXACT[mode], True)
    pieces, other, slot_2 = prefill(ids, EXACT[mode], True, cuts=cuts)
    assert np.array_equal(whole, pieces)
    for source in cache.ratio:
        for ours, theirs in zip(
            entries(cache, slot, source), entries(other, slot_2, source), strict=True
        ):
            assert np.array_equal(ours, theirs)
    more = some_ids(12, 1)
    a = [model().step(cache, [slot], [[i]]) for i in more]
    b = [model().step(other, [slot_2], [[i]]) for i in more]
    assert np.array_equal(a, b)


@pytest.mark.parametrize("count", LENGTHS)
def test_the_decoder_sees_a_lower_triangle_and_its_ring_is_in_place(count):
    """Row r of the tail lives in ring row (start + r) mod W, and no window reaches before start."""
    numerics, trace = EXACT["fp32"], {}
    ids = some_ids(count)
    _, cache, slot = prefill(ids, numerics, True, trace)
    start = count - WINDOW
    layer = next(layer for layer in model().config.plan if layer.half == "decoder")
    own = trace[f"L{layer.index:02d}.attn.swa_kv"]
    assert len(own) == WINDOW
    ring = cache.window[layer.index][slot]
    assert np.array_equal(ring[(start + np.arange(WINDOW)) % WINDOW], own)
    assert cache.floor["decoder"][slot] == start
    for layer in (layer for layer in model().config.plan if layer.half == "decoder"):
        cache.window[layer.index][slot] = np.nan  # what a tail's window may not read
    batch = make_batch([ids[start:]], [start], [slot]).with_floors(cache.floor["decoder"])
    rows = window_index(batch, WINDOW)
    seen = np.where(rows < 0, -1, rows - WINDOW)  # row numbers of the call itself
    for row in range(WINDOW):
        assert seen[row].tolist() == [*range(row + 1), *[-1] * (WINDOW - row - 1)]


@pytest.mark.parametrize("count", LENGTHS)
def test_the_work_saved_is_what_the_formula_says(count):
    config, ids = model().config, some_ids(count)
    encoder = sum(layer.half == "encoder" for layer in config.plan)
    decoder = len(config.plan) - encoder
    _, bounded, _ = prefill(ids, FLOAT32, True)
    assert bounded.work == {"encoder": encoder * count, "decoder": decoder * WINDOW}
    _, exact, _ = prefill(ids, FLOAT32, False)
    assert exact.work == {"encoder": encoder * count, "decoder": decoder * count}


@pytest.mark.parametrize(
    ("tokens", "hit", "start"), [(3, 2, 0), (4, 4, 0), (8, 8, 0), (9, 8, 0), (13, 12, 4)]
)
def test_a_hit_is_cut_to_whole_pairs_and_replays_one_window(tokens, hit, start):
    assert hit_length(tokens, model().config) == hit
    assert replay_start(hit, model().config) == start
    assert replay_start(1000, model().config, exact=True) == 1000 - 9 * WINDOW


def test_an_odd_or_too_long_hit_is_refused():
    cache = model().new_cache(FLOAT32)
    slot = model().open(cache)
    for hit in (3, 12):
        with pytest.raises(ValueError, match="hit: expected an even number up to 11"):
            begin_replay(model(), cache, slot, some_ids(11), hit)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    ("hit", "total"), [(2, 5), (8, 11), (10, 13), (20, 23), (32, 35), (44, 75)]
)
def test_encoder_replay_against_the_rule_in_a_loop(mode, hit, total):
    """The replayed rows' own windows begin at the replay's start, nothing else differs from a run
    whose older window rows were taken away by hand."""
    numerics, ids = EXACT[mode], some_ids(total)
    cache, slot = with_prefix(ids, hit, numerics)
    start = begin_replay(model(), cache, slot, ids, hit)
    assert start == max(0, hit - WINDOW) == cache.length[slot]
    before = {s: [a.copy() for a in entries(cache, slot, s)] for s in cache.ratio}
    got = model().step(cache, [slot], [ids[start:]])
    for source, ratio in cache.ratio.items():
        now = entries(cache, slot, source)
        for kind in (0, 1):
            assert np.array_equal(now[kind][: hit // ratio], before[source][kind])
            assert len(now[kind]) == total // ratio
    by_hand, again = with_prefix(ids, hit, numerics)
    by_hand.length[again] = start
    by_hand.history[again] = true_history(model(), by_hand, again, ids, start)
    for written in by_hand.written.values():
        written[again] = hit
    for ring in by_hand.window:  # rows before the start hold NaN: whoever reads them is caught
        ring[again] = 0xFF if ring.dtype == np.uint8 else np.nan
    for half in by_hand.floor:
        by_hand.floor[half][again] = start
    rows = [model().step(by_hand, [again], [[token]]) for token in ids[start:]]
    assert np.array_equal(got, np.concatenate(rows))


def test_replay_from_the_very_beginning_equals_no_hit():
    """A hit of at most one window replays everything: the result is that of a fresh prefill."""
    ids = some_ids(23)
    cache, slot = with_prefix(ids, WINDOW, EXACT["fp32"])
    start = begin_replay(model(), cache, slot, ids, WINDOW)
    got = model().step(cache, [slot], [ids[start:]])
    assert np.array_equal(got, model().logits(ids, EXACT["fp32"]))


@pytest.mark.parametrize("mode", list(MODES))
def test_exact_replay_rebuilds_every_window(mode):
    """layers * W tokens back every layer's window is full again, so nothing differs."""
    ids = some_ids(120)
    cache, slot = with_prefix(ids, 100, EXACT[mode])
    start = begin_replay(model(), cache, slot, ids, 100, exact=True)
    assert start == 100 - 9 * WINDOW
    got = model().step(cache, [slot], [ids[start:]])
    whole = model().logits(ids, EXACT[mode])
    assert np.array_equal(got[100 - start :], whole[100:])


def test_engram_looks_back_at_the_true_tokens():
    ids, cache = some_ids(20), model().new_cache(FLOAT32)
    slot = model().open(cache)
    pad = model().classes[2]
    classes = model().classes[ids]
    types = np.full(20, -1)
    types[10] = 0
    assert true_history(model(), cache, slot, ids, 12).tolist() == classes[9:12].tolist()
    assert true_history(model(), cache, slot, ids, 1).tolist() == [pad, pad, classes[0]]
    assert true_history(model(), cache, slot, ids, 12, types).tolist() == [
        *(classes[9], -1, classes[11])
    ]
    resume_at(model(), cache, slot, ids, 12, 12, {"encoder": 0, "decoder": 12})
    assert cache.history[slot].tolist() == classes[9:12].tolist()


def test_replay_is_closer_to_exact_than_the_last_window_alone():
    """KL(exact, replay) < KL(exact, last window only), summed over prompts of awkward lengths."""

    def law(logits):
        shifted = logits[-1].astype(np.float64) - logits[-1].max()
        return np.exp(shifted) / np.exp(shifted).sum()

    replayed = truncated = 0.0
    for seed, count in enumerate([17, 25, 33, 41, 57, 73] * 3):
        ids = some_ids(count, seed)
        exact = law(model().logits(ids, FLOAT32))
        bounded, _, _ = prefill(ids, FLOAT32, True)
        replayed += np.sum(exact * np.log(exact / law(bounded)))
        truncated += np.sum(exact * np.log(exact / law(model().logits(ids[-WINDOW:], FLOAT32))))
    assert 0 < replayed < truncated


# ---- the released window of 128, at tiny widths -----------------------------------------------

WIDE = 128
LONG = [130, 190, 258, 322, 450, 706, 1030]


@once
def wide():
    config = preset("tiny").but(sliding_window=WIDE)
    params = random_params(config, np.random.default_rng(3))
    return Model(config, params, oracles.small_classes(config))


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("count", [1, 2, 126, 127, 128])
def test_a_prompt_up_to_128_is_not_changed(mode, count):
    ids = some_ids(count)
    bounded, a, slot = prefill(ids, EXACT[mode], True, model=wide)
    exact, b, slot_2 = prefill(ids, EXACT[mode], False, model=wide)
    assert np.array_equal(bounded, exact)
    for ours, theirs in zip(a.window, b.window, strict=True):
        assert np.array_equal(ours[slot], theirs[slot_2])


@pytest.mark.parametrize("count", LONG)
def test_a_window_of_128_keeps_the_source_and_cuts_the_decoder(count):
    """The decoder's source holds every token's exact entries; its windows hold the last 128."""
    ids, trace = some_ids(count), {}
    bounded_logits, bounded, a = prefill(ids, EXACT["fp32"], True, trace, model=wide)
    exact_logits, exact, b = prefill(ids, EXACT["fp32"], False, model=wide)
    for source in bounded.ratio:
        ours, theirs = entries(bounded, a, source), entries(exact, b, source)
        assert len(ours[0]) == count // bounded.ratio[source]
        assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])
    assert not np.array_equal(bounded_logits, exact_logits)
    start = count - WIDE
    assert bounded.floor["decoder"][a] == start
    assert bounded.work == {"encoder": 5 * count, "decoder": 4 * WIDE}
    decoder = [layer.index for layer in wide().config.plan if layer.half == "decoder"]
    for layer in decoder:
        own = trace[f"L{layer:02d}.attn.swa_kv"]
        assert len(own) == WIDE
        assert np.array_equal(bounded.window[layer][a][(start + np.arange(WIDE)) % WIDE], own)
    # after layer 5, whose inputs are the exact ones, a decoder layer's inputs differ
    first = exact.window[decoder[0]][b]
    assert np.array_equal(bounded.window[decoder[0]][a], first)
    assert not np.array_equal(bounded.window[decoder[1]][a], exact.window[decoder[1]][b])


@pytest.mark.parametrize("count", LONG)
def test_the_tail_of_128_sees_a_lower_triangle(count):
    start = count - WIDE
    batch = make_batch([some_ids(count)[start:]], [start], [0]).with_floors([start])
    rows = window_index(batch, WIDE)
    seen = np.where(rows < 0, -1, rows - WIDE)
    columns = np.arange(WIDE)
    assert np.array_equal(seen, np.where(columns <= columns[:, None], columns, -1))


@pytest.mark.parametrize(
    ("tokens", "hit", "replayed"),
    [(3, 2, range(0, 2)), (4, 4, range(0, 4)), (8, 8, range(4, 8)), (9, 8, range(4, 8))],
)
def test_hits_of_a_window_of_four(tokens, hit, replayed):
    config = preset("tiny").but(sliding_window=4)
    assert hit_length(tokens, config) == hit
    assert range(replay_start(hit, config), hit) == replayed


@pytest.mark.parametrize("mode", list(MODES))
def test_a_hit_of_255_replays_126_to_253_and_keeps_its_127_pairs(mode):
    ids = some_ids(262)
    hit = hit_length(255, wide().config)
    assert hit == 254
    cache, slot = with_prefix(ids, hit, EXACT[mode], wide)
    start = begin_replay(wide(), cache, slot, ids, hit)
    assert range(start, hit) == range(126, 254) and cache.length[slot] == 126
    before = {s: [a.copy() for a in entries(cache, slot, s)] for s in cache.ratio}
    for s, ratio in cache.ratio.items():
        assert len(before[s][0]) == {1: 254, 2: 127}[ratio]
    wide().step(cache, [slot], [ids[start:hit]])
    for s in cache.ratio:
        for ours, theirs in zip(entries(cache, slot, s), before[s], strict=True):
            assert np.array_equal(ours, theirs)
    rings = [ring[slot].copy() for ring in cache.window]
    wide().step(cache, [slot], [ids[hit:]])
    for s, ratio in cache.ratio.items():
        now = entries(cache, slot, s)
        assert len(now[0]) == 262 // ratio
        for ours, theirs in zip(now, before[s], strict=True):
            assert np.array_equal(ours[: len(theirs)], theirs)
    # positions 126 .. 253 lie in row position mod 128: 254 .. 261 replaced rows 126, 127, 0 .. 5
    for ring, old in zip(cache.window, rings, strict=True):
        changed = (ring[slot] != old).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [*range(6), 126, 127]
