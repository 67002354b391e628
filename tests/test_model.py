"""What a user relies on: causality, batches, any chunking, long positions, bounded memory."""

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import GOLDEN, MODES, arrays, model

import dsv41
from dsv41 import FLOAT32, OFFICIAL

EXACT = {name: numerics.but(batch_invariant=True) for name, numerics in MODES.items()}


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 280, count)


def run_in_chunks(ids, cuts, numerics):
    cache = model().new_cache(numerics)
    slot = model().open(cache)
    pieces = np.split(ids, np.cumsum(cuts)[:-1])
    return np.concatenate([model().step(cache, [slot], [piece]) for piece in pieces])


@functools.cache
def whole(mode, count):
    return model().logits(some_ids(count), EXACT[mode])


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("at", [0, 1, 7, 8, 29, 30, 58])
def test_a_changed_token_changes_no_earlier_logit(mode, at):
    ids = some_ids(60)
    before = model().logits(ids, EXACT[mode])
    ids[at] = (ids[at] + 17) % 250 + 3
    after = model().logits(ids, EXACT[mode])
    assert np.array_equal(before[:at], after[:at])
    assert not np.array_equal(before[at], after[at])


def test_a_changed_token_reaches_far_beyond_every_window():
    """Windows of 8 in 9 layers reach 64 tokens back; what acts 130 later came through entries."""
    ids = some_ids(150)
    before = model().logits(ids, EXACT["fp32"])
    changed = 0
    for at in range(0, 12):
        other = ids.copy()
        other[at] = (other[at] + 17) % 250 + 3
        changed += not np.array_equal(before[-1], model().logits(other, EXACT["fp32"])[-1])
    assert changed > 0


@pytest.mark.parametrize("mode", list(MODES))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_chunking_gives_the_same_bits(mode, cuts):
    total = sum(cuts)
    assert np.array_equal(run_in_chunks(some_ids(total), cuts, EXACT[mode]), whole(mode, total)), (
        cuts
    )


@pytest.mark.parametrize("mode", list(MODES))
def test_token_by_token_gives_the_same_bits(mode):
    assert np.array_equal(run_in_chunks(some_ids(75), [1] * 75, EXACT[mode]), whole(mode, 75))


@pytest.mark.parametrize("mode", list(MODES))
def test_requests_end_to_end_give_the_bits_that_each_gives_alone(mode):
    requests = [some_ids(n, seed=n) for n in (1, 40, 2, 9, 33)]
    together = model().logits(requests, EXACT[mode])
    alone = np.concatenate([model().logits(r, EXACT[mode]) for r in requests])
    assert np.array_equal(together, alone)


def test_requests_end_to_end_agree_to_rounding_by_default():
    requests = [some_ids(n, seed=n) for n in (1, 40, 2, 9, 33)]
    together = model().logits(requests, FLOAT32)
    alone = np.concatenate([model().logits(r, FLOAT32) for r in requests])
    error = np.sqrt(np.mean((together - alone) ** 2) / np.mean(alone**2))
    assert error < 1e-5


def test_requests_join_leave_and_swap_rows_between_steps():
    numerics = EXACT["bf16q"]
    first, second = some_ids(40, 1), some_ids(23, 2)
    cache = model().new_cache(numerics)
    a, b = model().open(cache), model().open(cache)
    got = {a: [model().step(cache, [a], [first[:20]])], b: []}
    model_rows = model().step(cache, [b, a], [second[:5], first[20:27]])
    got[b].append(model_rows[:5])
    got[a].append(model_rows[5:])
    model_rows = model().step(cache, [a, b], [first[27:40], second[5:6]])
    got[a].append(model_rows[:13])
    got[b].append(model_rows[13:])
    cache.release(a)
    c = model().open(cache)
    assert c == a
    got[b].append(model().step(cache, [b], [second[6:]]))
    third = model().step(cache, [c], [second])
    assert np.array_equal(np.concatenate(got[a]), model().logits(first, numerics))
    assert np.array_equal(np.concatenate(got[b]), model().logits(second, numerics))
    assert np.array_equal(third, np.concatenate(got[b]))


def test_position_one_million():
    """A decode step behind 1,000,000 tokens reads the right entries of a cache that large."""
    numerics, length = OFFICIAL, 1_000_000
    cache = model().new_cache(numerics)
    slot = model().open(cache)
    cache.reserve(slot, length + 2)
    rng = np.random.default_rng(0)
    for source, ratio in cache.ratio.items():
        rows = cache.rows(source, slot, np.arange(length // ratio))
        assert len(np.unique(rows)) == length // ratio
        for pool, fmt, channels in (
            (cache.main_kv, numerics.main_kv, 64),
            (cache.index, numerics.index, 32),
        ):
            some = rng.standard_normal((1000, channels), dtype=np.float32)
            pool[source][rows] = np.tile(fmt.encode(some), (length // ratio // 1000, 1))
    cache.length[slot] = length
    trace = {}
    logits = model().step(cache, [slot], [[5]], trace=trace)
    assert np.isfinite(logits).all()
    for layer in (layer for layer in model().config.plan if layer.mode == "full"):
        name = f"L{layer.index:02d}"
        scores = trace[f"{name}.idx.score"][0]
        assert len(scores) == (length + 1) // layer.ratio
        best = np.sort(np.lexsort((np.arange(len(scores)), -scores))[:6])
        assert np.array_equal(trace[f"{name}.idx.topk"][0], best)


def test_prefill_memory_grows_with_the_prompt_not_with_its_square():
    """8,192 tokens against 8,192 keys would be 268 MB for one layer's scores alone."""
    peaks = {}
    for count in (2048, 8192):
        ids = some_ids(count)
        tracemalloc.start()
        cache = model().new_cache(OFFICIAL)
        model().step(cache, [model().open(cache)], [ids])
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[8192] < 150e6
    assert peaks[8192] < 4.2 * peaks[2048]


def test_shapes_follow_the_nesting_of_ids():
    ids = some_ids(12)
    vocabulary = model().config.vocab_size
    assert model().logits(ids).shape == (12, vocabulary)
    assert model().logits(ids.tolist()).shape == (12, vocabulary)
    assert model().logits(ids.reshape(3, 4)).shape == (3, 4, vocabulary)
    assert model().logits([ids[:5].tolist(), ids[5:]]).shape == (12, vocabulary)
    assert model().logits(ids).dtype == np.float32


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"),
        ([[]], "at least one token"),
        ([[1, 2], []], "at least one token"),
        ([1, 288], "288 at 1 is outside 0 .. 287"),
        ([-1], "-1 at 0 is outside"),
        ([1.5], "expected integers"),
        ([[[1]]], "one or two axes"),
        (3, "one or two axes"),
    ],
)
def test_bad_ids_are_refused_by_name(ids, message):
    with pytest.raises(ValueError, match="ids: .*" + message):
        model().logits(ids)


def test_bad_companions_of_ids_are_refused_by_name():
    with pytest.raises(ValueError, match="token_types: expected the same lengths"):
        model().logits([1, 2, 3], token_types=[-1, -1])
    with pytest.raises(ValueError, match=r"embedding: expected shape \(3, 64\)"):
        model().logits([1, 2, 3], embedding=np.zeros((3, 63), np.float32))


def test_a_refused_step_leaves_the_cache_as_it_was():
    ids, cache = some_ids(20), model().new_cache(OFFICIAL)
    slot = model().open(cache)
    model().step(cache, [slot], [ids[:11]])
    with pytest.raises(ValueError, match="ids"):
        model().step(cache, [slot], [[1, 999]])
    with pytest.raises(ValueError, match="slot"):
        model().step(cache, [slot + 9], [[1]])
    after = model().step(cache, [slot], [ids[11:]])
    fresh = run_in_chunks(ids, [11, 9], OFFICIAL)
    assert np.array_equal(after, fresh[11:])


def test_an_image_span_is_a_barrier_and_routes_by_its_own_bias():
    stored = arrays("vision")
    ids, types = stored["ids"], stored["token_types"]
    embedding = stored["fp32.embedding"]
    as_image, as_text = {}, {}
    model().logits(ids, FLOAT32, as_image, token_types=types, embedding=embedding)
    model().logits(ids, FLOAT32, as_text, token_types=np.full_like(types, -1), embedding=embedding)
    inside = types >= 0
    assert (as_image["L01.engram.gate"][inside] == 0).all()
    assert (as_text["L01.engram.gate"][inside] > 0).all()
    assert not np.array_equal(as_image["L00.moe.expert"][inside], as_text["L00.moe.expert"][inside])
    assert np.array_equal(as_image["L00.moe.expert"][~inside], as_text["L00.moe.expert"][~inside])


def test_weights_left_on_disk_give_the_bits_of_weights_in_memory():
    stored = dsv41.load(GOLDEN, resident_bytes=0)
    assert not isinstance(stored.params["layers"][0]["attn"]["wq_a"]["weight"], np.ndarray)
    for numerics in EXACT.values():
        assert np.array_equal(
            stored.logits(some_ids(40), numerics), model().logits(some_ids(40), numerics)
        )


def test_a_step_that_fails_half_way_is_not_continued():
    """Rings and histories of its requests have moved on: they are refused until released."""
    cache = model().new_cache(OFFICIAL)
    a, b = model().open(cache), model().open(cache)
    model().step(cache, [a, b], [some_ids(9), some_ids(9, 1)])
    broken = np.full((1, 64), np.nan, np.float32)
    with pytest.raises(ValueError, match="finite"):
        model().step(cache, [a], [[5]], embedding=broken)
    with pytest.raises(ValueError, match="failed half way; release it"):
        model().step(cache, [a], [[5]])
    assert np.isfinite(model().step(cache, [b], [[5]])).all()
    cache.release(a)
    assert model().open(cache) == a
    model().step(cache, [a], [some_ids(9)])


def test_a_request_ends_at_max_position_embeddings():
    short = dsv41.Model(
        model().config.but(max_position_embeddings=10), model().params, model().classes
    )
    assert short.logits(some_ids(10)).shape == (10, 288)
    with pytest.raises(ValueError, match="0 tokens and 11 more exceed max_position_embeddings 10"):
        short.logits(some_ids(11))


def test_an_id_without_an_engram_class_is_refused():
    few = dsv41.Model(model().config, model().params, model().classes[:200])
    assert few.logits([199]).shape == (1, 288)
    with pytest.raises(ValueError, match=r"200 at 1 is outside 0 \.\. 199"):
        few.logits([3, 200])
    with pytest.raises(ValueError, match="classes: expected up to 288 ids in 106 classes"):
        dsv41.Model(model().config, model().params, model().classes - 1)


def test_a_weight_that_is_nan_in_memory_is_named():
    weight = model().params["norm"]["weight"].copy()
    weight[3] = np.nan
    with pytest.raises(ValueError, match=r"norm\.weight: weight is nan at \(3,\)"):
        dsv41.Model(model().config, {**model().params, "norm": {"weight": weight}}, model().classes)


def test_reindexing_behind_a_long_context_reads_the_pool_alone(monkeypatch):
    """The consumer's work does not grow with the context: it never gathers all index keys."""
    from dsv41.selection import Entries

    asked = []
    real = Entries.rows

    def rows(self, request, entries):
        asked.append(entries.shape)
        return real(self, request, entries)

    monkeypatch.setattr(Entries, "rows", rows)
    model().logits(some_ids(90), FLOAT32)
    sources = sum(layer.mode == "full" for layer in model().config.plan)
    whole, listed = ([shape for shape in asked if len(shape) == n] for n in (1, 2))
    assert len(whole) == sources
    pool = model().config.candidate_topk_blocks * model().config.candidate_block_size
    assert listed == [(90, pool)]
