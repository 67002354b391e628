"""Tokens taken back, and requests moved out and in: no bit may tell that it happened.

Wherever something is taken back or freed, everything that no open request may read any more is
overwritten with NaN (`poison`), so that a stale row cannot look right by chance.
"""

from types import SimpleNamespace

import numpy as np
import oracles
import pytest
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rollback import mark, restore, rollback, snapshot

# pairs and single entries, a pool, n-grams of four in both halves; all overflow within a dozen
CONFIG = oracles.small_config(
    num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    sliding_window=4,
    engram_layer_ids=(0, 4),
    engram_max_ngram_size=4,
    engram_n_heads=1,
    engram_vocab_size=16,
    engram_num_embeddings=(59, 97),
)
W = CONFIG.sliding_window
EXACT = {
    "float32": FLOAT32.but(batch_invariant=True),
    "official": OFFICIAL.but(batch_invariant=True),
}
IMAGE = 60


@pytest.fixture(scope="module")
def model():
    params = random_params(CONFIG, np.random.default_rng(0))
    return Model(CONFIG, params, oracles.small_classes(CONFIG))


def tokens(count, seed, images=0.0):
    """(ids, types) of `count` tokens, a share of them image positions."""
    rng = np.random.default_rng(seed)
    is_image = rng.random(count) < images
    ids = np.where(is_image, IMAGE, rng.integers(0, IMAGE, count))
    return ids, np.where(is_image, 1, -1)


def poison(cache):
    """Overwrite all that nobody may read: free pages and slots, rows of no position, old pairs."""
    lengths = [(slot, n) for slot, n in enumerate(cache.length) if n is not None]
    for source, ratio in cache.ratio.items():
        kept = [
            cache.rows(source, slot, np.arange(cache.written[source][slot] // ratio))
            for slot, _ in lengths
        ]
        for pool in (cache.main_kv[source], cache.index[source]):
            _spoil(pool, np.concatenate([np.zeros(0, int), *kept]))
    for layer, ring in zip(CONFIG.plan, cache.window, strict=True):
        flat = ring.reshape(-1, ring.shape[-1])
        kept = []
        for slot, n in lengths:
            first = max(n - W, cache.floor[layer.half][slot], 0)
            kept += [slot * W + t % W for t in range(first, n)]
        _spoil(flat, kept)
    for source, carry in cache.carry.items():
        _spoil(carry, [slot for slot, n in lengths if n % cache.ratio[source]])
    free = np.setdiff1d(np.arange(len(cache.history)), [slot for slot, _ in lengths])
    cache.history[free] = 10**15


def _spoil(array, kept):
    """Every row but those of `kept` becomes NaN, or bytes that decode to NaN."""
    bad = np.ones(len(array), bool)
    bad[np.asarray(kept, int)] = False
    array[bad] = np.nan if array.dtype == np.float32 else 0xFF


def feed(model, cache, slot, ids, types):
    return model.step(cache, [slot], [ids], [types])


def assert_same_state(got, mine, want, theirs):
    """Everything a later token may read of slot `mine` equals that of slot `theirs`."""
    length = want.length[theirs]
    assert got.length[mine] == length
    assert len(got.pages[mine]) == -(-length // got.page_tokens), "pages behind the length"
    for source, ratio in got.ratio.items():
        assert got.written[source][mine] == want.written[source][theirs] == length
        entries = np.arange(length // ratio)
        for name in ("main_kv", "index"):
            a, b = (
                getattr(c, name)[source][c.rows(source, s, entries)]
                for c, s in ((got, mine), (want, theirs))
            )
            assert_same(f"{name} of layer {source}", a, b)
    for source in got.carry:
        if length % got.ratio[source]:
            assert_same("open pair", got.carry[source][mine], want.carry[source][theirs])
    assert_same("Engram history", got.history[mine], want.history[theirs])
    rows = np.arange(max(0, length - W), length) % W
    for layer, (a, b) in enumerate(zip(got.window, want.window, strict=True)):
        assert_same(f"ring {layer}", a[mine, rows], b[theirs, rows])


# ---- taking tokens back -----------------------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("length", [0, 1, W - 1, W, W + 1, 2 * W + 2])
def test_any_number_of_tokens_taken_back_from_any_run(model, numerics, length):
    """Every run up to the window, every kept length in it, then one token more."""
    ids, types = tokens(length + W + 1, seed=length)
    want = model.logits(ids, EXACT[numerics], token_types=types)
    cache = model.new_cache(EXACT[numerics])
    first = model.open(cache)
    if length:
        feed(model, cache, first, ids[:length], types[:length])
    start = snapshot(cache, first)
    runs = [(n, kept) for n in range(1, W + 1) for kept in range(n + 1)]
    slots = [restore(cache, start) for _ in runs]
    fed = []
    for slot, (n, kept) in zip(slots, runs, strict=True):
        mark(cache, slot, n)
        fed.append(np.concatenate([ids[length:][:kept], (ids[length:][kept:n] + 29) % IMAGE]))
    model.step(cache, slots, fed)
    for slot, (_, kept) in zip(slots, runs, strict=True):
        rollback(cache, slot, length + kept)
    poison(cache)
    got = model.step(cache, slots, [ids[length + kept :][:1] for _, kept in runs])
    for row, (n, kept) in zip(got, runs, strict=True):
        assert_same(f"kept {kept} of {n}", row, want[length + kept])


@st.composite
def histories(draw):
    """A request's life: prompt, rounds of fed and kept tokens cut into calls, tokens at the end."""
    rounds = draw(
        st.lists(
            st.integers(1, W).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
            ),
            min_size=1,
            max_size=4,
        )
    )
    return SimpleNamespace(
        prompt=draw(st.integers(1, 2 * W + 3)),
        rounds=rounds,
        end=draw(st.integers(1, W + 2)),
        images=draw(st.sampled_from([0.0, 0.3])),
        page_tokens=draw(st.sampled_from([2, 8, 64])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("numerics", EXACT)
@settings(max_examples=16, deadline=None, derandomize=True)
@given(life=histories())
def test_tokens_that_were_taken_back_leave_no_trace(model, numerics, life):
    """Beside a request that takes nothing back; both end as if each had been alone."""
    total = life.prompt + sum(kept for _, kept, _ in life.rounds) + life.end
    ids, types = tokens(total, life.seed, life.images)
    wrong, wrong_types = tokens(W, life.seed + 1000, life.images)
    cache = model.new_cache(EXACT[numerics], life.page_tokens)
    mine, company = model.open(cache), model.open(cache)
    others, _ = tokens(40, seed=7)
    got = []

    def step(new, kinds):
        at = cache.length[company]
        pair = [others[at : at + 1], new], [[-1], kinds]
        return model.step(cache, [company, mine], *pair)[1:]

    got.append(step(ids[: life.prompt], types[: life.prompt]))
    for n, kept, cut in life.rounds:
        length = cache.length[mine]
        new = np.concatenate([ids[length : length + kept], wrong[kept:n]])
        kinds = np.concatenate([types[length : length + kept], wrong_types[kept:n]])
        mark(cache, mine, n)
        rows = [step(new[:cut], kinds[:cut])]
        if cut < n:
            rows.append(step(new[cut:], kinds[cut:]))
        rollback(cache, mine, length + kept)
        poison(cache)
        got.append(np.concatenate(rows)[:kept])
    got.append(step(ids[-life.end :], types[-life.end :]))
    fresh = model.new_cache(EXACT[numerics], life.page_tokens)
    slot, other = model.open(fresh), model.open(fresh)
    assert_same("logits", np.concatenate(got), feed(model, fresh, slot, ids, types))
    assert_same_state(cache, mine, fresh, slot)
    model.step(fresh, [other], [others[: cache.length[company]]])
    assert_same_state(cache, company, fresh, other)


def test_an_image_that_is_taken_back_is_no_barrier_any_more(model):
    """Three text tokens, then an image and a word: the word's n-gram must reach behind it again."""
    ids, _ = tokens(6, seed=3)
    for kept, want in ((0, ids[:3]), (1, [ids[1], ids[2], None]), (2, [ids[2], None, ids[4]])):
        cache = model.new_cache(EXACT["float32"])
        slot = model.open(cache)
        feed(model, cache, slot, ids[:3], [-1] * 3)
        mark(cache, slot, 3)
        feed(model, cache, slot, [IMAGE, *ids[4:6]], [0, -1, -1])
        rollback(cache, slot, 3 + kept)
        classes = [-1 if i is None else int(model.classes[i]) for i in want]
        assert cache.history[slot].tolist() == classes


@pytest.mark.parametrize("page_tokens", [2, 4, 64])
def test_pages_of_tokens_that_were_taken_back_are_free_again(model, page_tokens):
    ids, types = tokens(9, seed=0)
    cache = model.new_cache(EXACT["float32"], page_tokens)
    slot = model.open(cache)
    feed(model, cache, slot, ids[:5], types[:5])
    held, free = list(cache.pages[slot]), set(cache.free_pages)
    mark(cache, slot, W)
    feed(model, cache, slot, ids[5:], types[5:])
    rollback(cache, slot, 5)
    assert cache.pages[slot] == held
    assert set(cache.free_pages) == free
    assert len(cache.free_pages) == len(free), "no page is free twice"


def test_a_mark_is_for_one_request_and_leaves_the_others_alone(model):
    ids, _ = tokens(20, seed=1)
    cache = model.new_cache(EXACT["official"])
    a, b = model.open(cache), model.open(cache)
    model.step(cache, [a, b], [ids[:6], ids[:9]])
    mark(cache, a, 2)
    mark(cache, b, 3)
    model.step(cache, [b, a], [ids[9:12], ids[10:12]])
    rollback(cache, b, 10)
    rollback(cache, a, 6)
    poison(cache)
    got = model.step(cache, [a, b], [ids[6:8], ids[10:12]])
    assert_same("a", got[:2], model.logits(ids[:8], EXACT["official"])[6:])
    assert_same("b", got[2:], model.logits(ids[:12], EXACT["official"])[10:])


def test_a_model_without_engram_takes_tokens_back_too():
    config = CONFIG.but(engram_layer_ids=(), engram_num_embeddings=())
    plain = Model(config, random_params(config, np.random.default_rng(0)))
    ids, _ = tokens(8, seed=4)
    want = plain.logits(ids, EXACT["float32"])
    for kept in range(3):
        cache = plain.new_cache(EXACT["float32"])
        slot = plain.open(cache)
        plain.step(cache, [slot], [ids[:5]])
        mark(cache, slot, 2)
        plain.step(cache, [slot], [[*ids[5 : 5 + kept], 1, 2][:2]])
        rollback(cache, slot, 5 + kept)
        got = plain.step(cache, [slot], [ids[5 + kept : 6 + kept]])
        assert_same(f"kept {kept}", got[0], want[5 + kept])


# ---- what is refused --------------------------------------------------------------------------


@pytest.fixture
def marked(model):
    """A request of five tokens, a mark for two, and one of them fed."""
    ids, types = tokens(9, seed=0)
    cache = model.new_cache(EXACT["float32"])
    slot = model.open(cache)
    feed(model, cache, slot, ids[:5], types[:5])
    mark(cache, slot, 2)
    feed(model, cache, slot, ids[5:6], types[5:6])
    return cache, slot, ids


@pytest.mark.parametrize("length", [4, 7, -1, 0])
def test_a_length_outside_the_mark_is_refused_and_the_mark_stays(marked, length):
    cache, slot, _ = marked
    with pytest.raises(ValueError, match=f"length: slot {slot} of 6 tokens .* back to {length}"):
        rollback(cache, slot, length)
    assert cache.length[slot] == 6
    rollback(cache, slot, 5)
    assert cache.length[slot] == 5


def test_more_tokens_than_were_marked_cannot_be_taken_back(model, marked):
    cache, slot, ids = marked
    model.step(cache, [slot], [ids[6:8]])
    with pytest.raises(ValueError, match="length: slot 0 of 8 tokens"):
        rollback(cache, slot, 5)


def test_a_mark_serves_once(marked):
    cache, slot, _ = marked
    rollback(cache, slot, 6)
    with pytest.raises(ValueError, match="length: "):
        rollback(cache, slot, 6)


def test_a_new_mark_replaces_the_old_one(model, marked):
    cache, slot, ids = marked
    mark(cache, slot, 1)
    model.step(cache, [slot], [ids[6:7]])
    with pytest.raises(ValueError, match="length: "):
        rollback(cache, slot, 5)
    rollback(cache, slot, 6)
    got = model.step(cache, [slot], [ids[6:7]])
    assert_same("logits", got[0], model.logits(ids[:7], EXACT["float32"])[-1])


def test_a_mark_ends_with_its_request(model, marked):
    cache, slot, ids = marked
    cache.release(slot)
    assert model.open(cache) == slot
    model.step(cache, [slot], [ids[:6]])
    with pytest.raises(ValueError, match="length: "):
        rollback(cache, slot, 5)


@pytest.mark.parametrize("count", [0, -1, W + 1])
def test_a_mark_for_no_token_or_for_more_than_a_window_is_refused(marked, count):
    cache, slot, _ = marked
    with pytest.raises(ValueError, match=rf"count: expected 1 \.\. {W} tokens, got {count}"):
        mark(cache, slot, count)


@pytest.mark.parametrize("slot", [-1, 1, 7])
def test_slots_that_are_not_open_are_refused_by_number(marked, slot):
    cache = marked[0]
    for call in (lambda: mark(cache, slot, 1), lambda: rollback(cache, slot, 5)):
        with pytest.raises(ValueError, match=f"slot: {slot} is not"):
            call()
    with pytest.raises(ValueError, match=f"slot: {slot} is not"):
        snapshot(cache, slot)


# ---- out of the cache and back ----------------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize(
    ("length", "page_tokens"), [(1, 64), (W - 1, 2), (W, 64), (W + 1, 2), (14, 64), (14, 2)]
)
def test_a_request_comes_back_in_another_slot_as_if_it_had_stayed(
    model, numerics, length, page_tokens
):
    """Others advance meanwhile, one of them in the slot that became free."""
    ids, types = tokens(length + 6, seed=length, images=0.2)
    want = model.logits(ids, EXACT[numerics], token_types=types)
    others, _ = tokens(20, seed=9)
    cache = model.new_cache(EXACT[numerics], page_tokens)
    mine, stays = model.open(cache), model.open(cache)
    kinds = [types[:length], [-1] * 3]
    model.step(cache, [mine, stays], [ids[:length], others[:3]], kinds)
    saved = snapshot(cache, mine)
    cache.release(mine)
    poison(cache)
    comes = model.open(cache)
    assert comes == mine
    model.step(cache, [comes, stays], [others[:11], others[3:4]])
    back = restore(cache, saved)
    assert back not in (comes, stays)
    poison(cache)
    kinds = [[-1], types[length : length + 5], [-1]]
    new = [others[4:5], ids[length : length + 5], others[11:12]]
    got = model.step(cache, [stays, back, comes], new, kinds)
    cache.release(comes)
    poison(cache)
    last = feed(model, cache, back, ids[-1:], types[-1:])
    assert_same("logits", np.concatenate([got[1:6], last]), want[length:])
    alone = model.logits(others[:12], EXACT[numerics])
    assert_same("the one that stayed", got[0], alone[4])
    assert_same("the one that came", got[6], alone[11])


@pytest.mark.parametrize("numerics", EXACT)
def test_one_snapshot_serves_several_times_and_in_other_caches(model, numerics):
    """What happens to the request, or to one copy, does not reach the snapshot."""
    ids, types = tokens(16, seed=5)
    want = model.logits(ids, EXACT[numerics])
    cache = model.new_cache(EXACT[numerics], page_tokens=2)
    slot = model.open(cache)
    feed(model, cache, slot, ids[:9], types[:9])
    saved = snapshot(cache, slot)
    assert_same("the request goes on", feed(model, cache, slot, ids[9:], types[9:]), want[9:])
    cache.release(slot)
    poison(cache)
    other = model.new_cache(EXACT[numerics], page_tokens=64)
    model.open(other)
    for place in (cache, other):
        first, second = restore(place, saved), restore(place, saved)
        poison(place)
        feed(model, place, first, ids[:5], types[:5])
        assert_same("second copy", feed(model, place, second, ids[9:], types[9:]), want[9:])


def test_a_request_without_tokens_can_be_moved(model):
    ids, types = tokens(5, seed=2)
    cache = model.new_cache(EXACT["float32"])
    saved = snapshot(cache, model.open(cache))
    slot = restore(cache, saved)
    got = feed(model, cache, slot, ids, types)
    assert_same("logits", got, model.logits(ids, EXACT["float32"]))


def test_a_bounded_prefill_keeps_its_floor_when_it_is_moved(model):
    """The decoder's windows begin at token 9; what stands in the rings before it is no key."""
    ids, _ = tokens(14, seed=6)
    caches = [model.new_cache(EXACT["official"]) for _ in range(2)]
    for cache in caches:
        model.step(cache, [model.open(cache)], [ids[:11]], decoder_from=[9])
    want = model.step(caches[0], [0], [ids[11:]])
    saved = snapshot(caches[1], 0)
    caches[1].release(0)
    model.open(caches[1])
    back = restore(caches[1], saved)
    poison(caches[1])
    assert caches[1].floor["decoder"][back] == 9
    assert_same("logits", model.step(caches[1], [back], [ids[11:]]), want)


def test_a_snapshot_knows_its_bytes(model):
    """Rings of 4 x 33 bytes, one open pair, three classes, 4 or 9 entries of 18 + 17 bytes."""
    ids, types = tokens(9, seed=0)
    cache = model.new_cache(EXACT["official"])
    slot = model.open(cache)
    feed(model, cache, slot, ids, types)
    fixed = 5 * 4 * 33 + 2 * 32 * 4 + 3 * 8
    assert snapshot(cache, slot).nbytes == fixed + (4 + 9) * (18 + 17)
    assert cache.bytes_per_request() == fixed


# ---- freed memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("page_tokens", [2, 8])
def test_freed_pages_and_slots_say_nothing_to_the_next_request(model, numerics, page_tokens):
    """Four requests in turn through the same slot and pages, beside one that stays open."""
    cache = model.new_cache(EXACT[numerics], page_tokens)
    stays, got = model.open(cache), []
    ids, _ = tokens(20, seed=3)
    for turn, length in enumerate((13, 3, 8, 1)):
        slot = model.open(cache)
        assert slot == 1
        own, types = tokens(length, seed=turn, images=0.2)
        at = cache.length[stays]
        rows = model.step(cache, [stays, slot], [ids[at : at + 2], own], [[-1, -1], types])
        got.append(rows[:2])
        want = model.logits(own, EXACT[numerics], token_types=types)
        assert_same(f"request {turn}", rows[2:], want)
        cache.release(slot)
        poison(cache)
    assert_same("the one that stayed", np.concatenate(got), model.logits(ids[:8], EXACT[numerics]))
