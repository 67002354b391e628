"""Looking inside changes nothing, shows all under its reference name, and only then costs."""

from pathlib import Path

import numpy as np
import oracles
import pytest
from compare import assert_same

from dsv41 import selection, trace
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a"
CONFIG = oracles.small_config()
MODEL = Model(
    CONFIG, random_params(CONFIG, np.random.default_rng(3)), oracles.small_classes(CONFIG)
)
EXACT = FLOAT32.but(batch_invariant=True)


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(0, 60, length)


def traced(ids, numerics=EXACT, model=MODEL):
    found = {}
    model.logits(ids, numerics, found)
    return found


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
def test_looking_changes_no_bit(numerics):
    ids = tokens(21)
    assert_same("logits", MODEL.logits(ids, numerics, trace={}), MODEL.logits(ids, numerics))


def test_every_intermediate_of_the_reference_is_there_under_its_name():
    """The golden arrays of the prompt, apart from inputs, results and the second sequence."""
    tiny = preset("tiny")
    params = random_params(tiny, np.random.default_rng(0))
    model = Model(tiny, params, np.arange(tiny.vocab_size) % tiny.engram_compressed_vocab_size)
    got = traced(tokens(72), FLOAT32, model)
    golden = np.load(GOLDEN / "prompt_fp32.npz")
    aside = {"ids", "logits", "margin", "x_pos"}
    names = {n for n in golden.files if n not in aside and not n.startswith("seq1.")}
    assert names <= set(got), f"missing: {sorted(names - set(got))}"
    assert set(got) <= names, f"unknown to the reference: {sorted(set(got) - names)}"
    for name in names:
        assert got[name].shape == golden[name].shape, name
        assert got[name].dtype.kind == golden[name].dtype.kind, name


def test_what_is_collected_is_a_copy():
    found, reused = {}, np.ones(3)
    trace.put(found, None, "x", lambda: reused)
    reused[:] = 0
    assert found["x"].tolist() == [1, 1, 1]
    found = {}
    cache = MODEL.new_cache(EXACT)
    slot = MODEL.open(cache)
    MODEL.step(cache, [slot], [tokens(9)], trace=found)
    before = {name: array.copy() for name, array in found.items()}
    MODEL.step(cache, [slot], [tokens(9, 1)])
    for name, array in found.items():
        assert_same(name, array, before[name])


def test_nothing_is_computed_for_nobody():
    trace.put(None, CONFIG.plan[0], "x", lambda: pytest.fail("made although nobody looks"))
    assert trace.watch_scores(None, CONFIG.plan[1], None) is None
    trace.put_pool(None, CONFIG.plan[7], None, None, CONFIG)


def test_names_carry_the_layer_in_two_digits():
    found = {}
    trace.put(found, CONFIG.plan[3], "a.b", lambda: 1)
    trace.put(found, CONFIG.plan[10], "a.b", lambda: 2)
    trace.put(found, None, "c", lambda: 3)
    assert {name: int(value) for name, value in found.items()} == {
        "L03.a.b": 1,
        "L10.a.b": 2,
        "c": 3,
    }


def test_scores_show_visible_entries_and_minus_infinity_elsewhere():
    found = traced(tokens(15))
    for layer, entries in ((1, 15), (3, 7), (4, 7)):
        score = found[f"L{layer:02d}.idx.score"]
        ratio = CONFIG.compress_ratios[layer]
        assert score.shape == (15, entries) and score.dtype == np.float32
        visible = np.arange(entries) < ((np.arange(15) + 1) // ratio)[:, None]
        assert np.array_equal(score > -np.inf, visible), f"layer {layer}"


def test_scores_behind_the_pool_are_minus_infinity_outside_it():
    found = traced(tokens(30))
    mask, score = found["L07.cand.mask"], found["L09.idx.score"]
    assert mask.dtype == bool and mask.shape == score.shape == (30, 30)
    visible = np.tri(30, dtype=bool)
    assert np.array_equal(score > -np.inf, mask & visible)
    # a whole block is in the pool or none of it, and the newest always is
    blocks = mask.reshape(30, 15, 2)
    assert np.array_equal(blocks[:, :, 0], blocks[:, :, 1])
    assert blocks[np.arange(30), np.arange(30) // 2].all()
    assert (blocks[:, :, 0].sum(axis=1) <= CONFIG.candidate_topk_blocks).all()
    best = found["L07.cand.block_score"]
    assert best.shape == (30, 15) and (best[np.arange(30), np.arange(30) // 2] == np.inf).all()


def test_a_selection_holds_the_best_of_the_traced_scores():
    found = traced(tokens(30))
    for layer in CONFIG.index_source_layer_ids:
        score, chosen = (found[f"L{layer:02d}.idx.{name}"] for name in ("score", "topk"))
        for t in range(30):
            best = oracles.best(dict(enumerate(score[t].tolist())), CONFIG.index_topk)
            assert [j for j in chosen[t].tolist() if j >= 0] == best, f"layer {layer}, token {t}"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_without_any_entry_can_be_looked_at(length):
    found = traced(tokens(length))
    for layer in (3, 4):
        assert found[f"L{layer:02d}.idx.score"].shape == (length, length // 2)
    assert found["L07.cand.mask"].shape == (length, length)


def test_queries_in_blocks_fill_one_array(monkeypatch):
    """Long prompts are scored block by block of queries, and early blocks see fewer entries."""
    ids = tokens(33)
    at_once = traced(ids)
    monkeypatch.setattr(selection, "block_elements", lambda x: 400)
    in_blocks = traced(ids)
    assert set(at_once) == set(in_blocks)
    for name, want in at_once.items():
        assert_same(name, in_blocks[name], want)


def test_rows_of_a_batch_are_those_of_each_request_alone():
    """Scores are as wide as the longest request; the shorter one's rest is minus infinity."""
    requests = [tokens(5, 1), tokens(12, 2), tokens(1, 3)]
    together, begin = traced(requests), 0
    for ids in requests:
        rows = slice(begin, begin + len(ids))
        alone = traced(ids)
        for layer in CONFIG.index_source_layer_ids:
            name = f"L{layer:02d}.idx.score"
            width = alone[name].shape[1] if name in alone else 0
            if width:
                assert_same(name, together[name][rows, :width], alone[name])
            assert (together[name][rows, width:] == -np.inf).all()
        for name in ("L00.x_out", "L10.x_out", "L09.idx.topk", "L03.engram.rows", "final_x"):
            assert_same(name, together[name][rows], alone[name])
        begin += len(ids)


def test_a_dict_used_again_shows_the_last_call_only():
    ids = tokens(14)
    cache, found = MODEL.new_cache(EXACT), {}
    slot = MODEL.open(cache)
    MODEL.step(cache, [slot], [ids[:9]], trace=found)
    MODEL.step(cache, [slot], [ids[9:]], trace=found)
    fresh = {}
    cache = MODEL.new_cache(EXACT)
    slot = MODEL.open(cache)
    MODEL.step(cache, [slot], [ids[:9]])
    MODEL.step(cache, [slot], [ids[9:]], trace=fresh)
    assert set(found) == set(fresh)
    for name, want in fresh.items():
        assert_same(name, found[name], want)
