"""Records, pages and what one call leaves for the next: bytes counted on arrays, rows against a
model made of dicts, and prompts fed in pieces.
"""

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL

CONFIG = oracles.small_config()
# the windows, pools and top-k of this model overflow within thirteen tokens
SHORT = oracles.small_config(index_topk=4, sliding_window=4)
EXACT = {
    "float32": FLOAT32.but(batch_invariant=True),
    "official": OFFICIAL.but(batch_invariant=True),
}


@pytest.fixture(scope="module")
def short():
    params = random_params(SHORT, np.random.default_rng(0))
    return Model(SHORT, params, oracles.small_classes(SHORT))


def tokens(length, seed=0):
    """ids and types of a prompt with an image span at 5, 6 and 7."""
    ids = np.random.default_rng(seed).integers(0, 60, length)
    types = np.where((np.arange(length) >= 5) & (np.arange(length) < 8), 1, -1)
    return np.where(types > 0, 60, ids), types


# ---- bytes ------------------------------------------------------------------------------------


def test_a_token_of_the_released_model_costs_890_bytes():
    """Counted on the arrays as they are, then again on what the pools grow by."""
    cache = Cache(preset("v4.1-flash"), OFFICIAL)
    slot = cache.add()
    before = cache.nbytes
    cache.reserve(slot, 64 * 16)
    assert cache.bytes_per_token() == 890
    assert cache.nbytes - before == 890 * 64 * 16
    pools = (cache.main_kv, cache.index)
    shares = [sum(p.nbytes for p in pool.values()) / (64 * 16) for pool in pools]
    assert shares == [720, 170]


def test_an_empty_cache_knows_what_a_token_and_a_request_will_cost():
    cache, used = Cache(CONFIG, OFFICIAL), Cache(CONFIG, OFFICIAL)
    used.reserve(used.add(), 1)
    assert cache.bytes_per_token() == used.bytes_per_token() > 0
    assert cache.bytes_per_request() == used.bytes_per_request() > 0


def test_records_of_the_released_model_have_the_released_sizes():
    cache = Cache(preset("v4.1-flash"), OFFICIAL)
    slot = cache.add()
    cache.reserve(slot, 1)
    assert {ring.shape[1:] for ring in cache.window} == {(128, 528)}
    assert len(cache.window) == 40
    assert list(cache.main_kv) == list(cache.index) == [2, 8, 14, 20]
    for source, ratio in {2: 2, 8: 2, 14: 2, 20: 1}.items():
        assert cache.main_kv[source].shape == (16 * 64 // ratio, 288)
        assert cache.index[source].shape == (16 * 64 // ratio, 68)
    arrays = [*cache.window, *cache.main_kv.values(), *cache.index.values()]
    assert {a.dtype for a in arrays} == {np.dtype(np.uint8)}
    assert {s: c.shape[1:] for s, c in cache.carry.items()} == {s: (1, 2, 512) for s in (2, 8, 14)}
    fixed = 40 * 128 * 528 + 3 * 2 * 512 * 4 + 3 * 8
    assert cache.bytes_per_request() == fixed == 2_715_672
    assert fixed - 3 * 2 * 512 * 4 - 3 * 8 == 2_703_360, "rings of every layer"


def test_float32_records_are_the_vectors_themselves():
    cache = Cache(CONFIG, FLOAT32)
    cache.reserve(cache.add(), 1)
    for array, channels in (
        (cache.window[0], CONFIG.head_dim),
        (cache.main_kv[3], CONFIG.head_dim),
        (cache.index[3], CONFIG.index_head_dim),
    ):
        assert array.dtype == np.float32 and array.shape[-1] == channels
    # two sources of single tokens and one of pairs
    assert cache.bytes_per_token() == 2.5 * 4 * (CONFIG.head_dim + CONFIG.index_head_dim)


def test_nbytes_counts_every_array_the_cache_holds():
    cache = Cache(CONFIG, OFFICIAL)
    cache.reserve(cache.add(), 100)
    held, found = [cache.__dict__], []
    while held:
        thing = held.pop()
        if isinstance(thing, np.ndarray):
            found.append(thing)
        elif isinstance(thing, dict | list):
            held += thing.values() if isinstance(thing, dict) else thing
    assert cache.nbytes == sum(a.nbytes for a in found)


# ---- pages ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 64]),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("grow grow free".split()),
                       st.integers(1, 90)), min_size=1, max_size=25),
)  # fmt: skip
def test_every_entry_has_a_row_of_its_own_that_keeps_its_record(page_tokens, steps):
    """Requests grow, leave and come back in any order; a dict remembers what was written where."""
    cache = Cache(CONFIG, FLOAT32, page_tokens=page_tokens)
    written, slots, stamp = {}, {}, 0
    for who, what, size in steps:
        if what == "free":
            if who in slots:
                slot = slots.pop(who)
                cache.release(slot)
                written = {key: v for key, v in written.items() if key[0] != slot}
            continue
        if who not in slots:
            slots[who] = cache.add()
        slot = slots[who]
        old, new = cache.length[slot], cache.length[slot] + size
        cache.reserve(slot, new)
        cache.length[slot] = new
        for source, ratio in cache.ratio.items():
            for entry in range(old // ratio, new // ratio):
                stamp += 1
                row = cache.rows(source, slot, entry)
                cache.main_kv[source][row] = stamp
                cache.index[source][row] = -stamp
                written[slot, source, entry] = stamp
    for source in cache.ratio:
        mine = [key for key in written if key[1] == source]
        rows = [int(cache.rows(source, slot, entry)) for slot, _, entry in mine]
        assert len(set(rows)) == len(rows), "two entries share a row"
    for (slot, source, entry), value in written.items():
        row = cache.rows(source, slot, entry)
        assert (cache.main_kv[source][row] == value).all()
        assert (cache.index[source][row] == -value).all()
    pages = [page for slot in slots.values() for page in cache.pages[slot]]
    assert len(set(pages)) == len(pages) and not set(pages) & set(cache.free_pages)
    for slot in slots.values():
        assert len(cache.pages[slot]) == -(-cache.length[slot] // page_tokens)


def test_rows_by_hand_for_requests_that_alternate():
    cache = Cache(CONFIG, FLOAT32, page_tokens=4)
    a, b = cache.add(), cache.add()
    for length in (4, 8, 12):
        cache.reserve(a, length)
        cache.reserve(b, length)
    assert cache.pages[a] == [0, 2, 4] and cache.pages[b] == [1, 3, 5]
    # a page holds four entries of single tokens, two of pairs
    assert cache.rows(1, b, np.arange(9)).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20]
    assert cache.rows(3, b, np.arange(5)).tolist() == [2, 3, 6, 7, 10]
    assert cache.rows(3, b, [[0, -1], [4, -1]]).tolist() == [[2, -1], [10, -1]]
    cache.index[3][:, 0] = np.arange(len(cache.index[3]))
    assert cache.index_keys(3, b, 5)[:, 0].tolist() == [2, 3, 6, 7, 10]
    assert cache.index_keys(3, b, 0).shape == (0, CONFIG.index_head_dim)


def test_an_entry_beyond_the_reserved_pages_is_an_error_and_not_somebody_elses_row():
    cache = Cache(CONFIG, FLOAT32, page_tokens=2)
    a, b = cache.add(), cache.add()
    cache.reserve(a, 2)
    cache.reserve(b, 2)
    with pytest.raises(IndexError):
        cache.rows(1, a, 2)


def test_a_request_without_pages_has_rows_for_no_entry():
    cache = Cache(CONFIG, FLOAT32)
    assert cache.rows(3, cache.add(), np.full((2, 3), -1)).tolist() == [[-1] * 3] * 2


def test_growing_keeps_every_record_where_it_was():
    cache = Cache(CONFIG, OFFICIAL, page_tokens=2)
    first = cache.add()
    cache.reserve(first, 30)
    rng = np.random.default_rng(0)
    arrays = [*cache.window, *cache.main_kv.values(), *cache.index.values()]
    for array in arrays:
        array[:] = rng.integers(0, 255, array.shape)
    for carry in cache.carry.values():
        carry[:] = rng.standard_normal(carry.shape)
    cache.history[:] = 7
    before = [a.copy() for a in arrays + list(cache.carry.values())]
    for _ in range(9):
        cache.reserve(cache.add(), 40)
    arrays = [*cache.window, *cache.main_kv.values(), *cache.index.values()]
    for old, new in zip(before, arrays + list(cache.carry.values()), strict=True):
        assert len(new) > len(old)
        assert_same("old part", new[: len(old)], old)
    assert cache.history[first].tolist() == [7] * (CONFIG.engram_max_ngram_size - 1)


# ---- slots ------------------------------------------------------------------------------------


def test_a_freed_slot_and_its_pages_are_used_again():
    cache = Cache(CONFIG, FLOAT32)
    a, b = cache.add(pad_class=9), cache.add(pad_class=9)
    cache.reserve(a, 130)
    cache.reserve(b, 10)
    mine = set(cache.pages[a])
    cache.history[a] = 5
    cache.release(a)
    again = cache.add(pad_class=9)
    assert again == a and cache.length[again] == 0 and cache.pages[again] == []
    assert cache.history[again].tolist() == [9] * cache.history.shape[1]
    pool = len(cache.main_kv[1])
    for _ in range(len(cache.free_pages)):
        cache.reserve(again, 64 * (len(cache.pages[again]) + 1))
    assert mine < set(cache.pages[again]), "freed pages were never handed out"
    assert len(cache.main_kv[1]) == pool, "the pool grew while pages were free"


def test_pages_behind_the_length_can_be_given_back():
    cache = Cache(CONFIG, FLOAT32, page_tokens=4)
    slot = cache.add()
    cache.reserve(slot, 17)
    kept = cache.pages[slot][:3]
    cache.length[slot] = 9
    cache.trim(slot)
    assert cache.pages[slot] == kept
    cache.reserve(slot, 20)
    pages = cache.pages[slot]
    assert pages[:3] == kept and len(set(pages)) == 5 and not set(pages) & set(cache.free_pages)


@pytest.mark.parametrize("page_tokens", [0, -2, 1, 63])
def test_a_page_must_hold_whole_pairs(page_tokens):
    with pytest.raises(ValueError, match=f"page_tokens: .*{page_tokens}"):
        Cache(CONFIG, FLOAT32, page_tokens=page_tokens)


def test_a_slot_that_is_not_open_is_refused_by_number():
    cache = Cache(CONFIG, FLOAT32)
    slot = cache.add()
    cache.release(slot)
    for call in (cache.release, lambda s: cache.reserve(s, 4)):
        for wrong in (slot, 1, -1):
            with pytest.raises(ValueError, match=f"slot: {wrong} "):
                call(wrong)


# ---- the ring ---------------------------------------------------------------------------------


def test_a_ring_keeps_the_last_window_of_each_request():
    """Position p lies in row p mod 5, whatever the sizes of the calls that brought it."""
    cache = Cache(CONFIG, FLOAT32)
    a, b = cache.add(), cache.add()
    lengths = {a: 0, b: 0}
    for call in ({a: 3, b: 7}, {b: 1}, {b: 2, a: 1}, {a: 13}, {a: 5, b: 4}):
        slots, sizes = list(call), list(call.values())
        starts = [lengths[slot] for slot in slots]
        batch = make_batch([np.zeros(n, int) for n in sizes], starts, slots)
        owner = np.repeat(slots, sizes)
        stamps = (100 * (owner + 1) + batch.positions).astype(np.float32)
        cache.write_window(2, batch, np.repeat(stamps[:, None], CONFIG.head_dim, axis=1))
        for slot, size in call.items():
            lengths[slot] += size
        for slot, length in lengths.items():
            for p in range(max(0, length - 5), length):
                assert (cache.window[2][slot, p % 5] == 100 * (slot + 1) + p).all(), (slot, p)
    assert not cache.window[1].any(), "another layer's ring was written"


# ---- what one call leaves for the next --------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize(
    "cuts", [[1] * 13, [3, 5, 5], [4, 4, 5], [7, 6], [2, 11], [12, 1]], ids=str
)
def test_a_prompt_in_pieces_leaves_the_same_cache_and_logits(short, numerics, cuts):
    ids, types = tokens(13)
    whole, trace = short.new_cache(EXACT[numerics]), {}
    slot = short.open(whole)
    want = short.step(whole, [slot], [ids], [types], trace=trace)
    cache = short.new_cache(EXACT[numerics])
    company, mine = short.open(cache), short.open(cache)
    got, at = [], 0
    chosen = {i: [] for i in SHORT.index_source_layer_ids}
    for size in cuts:
        piece, seen = slice(at, at + size), {}
        # a second request advances in the same calls by another rhythm
        pair = [[int(i) % 60 for i in ids[:2]], ids[piece]]
        kinds = [[-1, -1], types[piece]]
        got.append(short.step(cache, [company, mine], pair, kinds, trace=seen)[2:])
        for layer in chosen:
            chosen[layer].append(seen[f"L{layer:02d}.idx.topk"][2:])
        at += size
    assert_same("logits", np.concatenate(got), want)
    for layer, rows in chosen.items():
        assert_same("selection", np.concatenate(rows), trace[f"L{layer:02d}.idx.topk"])
    for source, ratio in whole.ratio.items():
        for pool in ("main_kv", "index"):
            a, b = (
                getattr(c, pool)[source][c.rows(source, s, np.arange(13 // ratio))]
                for c, s in ((cache, mine), (whole, slot))
            )
            assert_same(f"{pool} of layer {source}", a, b)
    for source in whole.carry:
        assert_same("open token", cache.carry[source][mine], whole.carry[source][slot])
    for layer in range(SHORT.num_hidden_layers):
        assert_same("ring", cache.window[layer][mine], whole.window[layer][slot])
    assert_same("Engram history", cache.history[mine], whole.history[slot])


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
def test_the_same_prompt_cut_at_its_end_gives_the_same_last_logits(short, numerics):
    """Prompts of one to thirteen tokens against rows of the longest."""
    ids, types = tokens(13)
    exact = numerics.but(batch_invariant=True)
    want = short.logits(ids, exact, token_types=types)
    for length in range(1, 13):
        got = short.logits(ids[:length], exact, token_types=types[:length])
        assert_same(f"{length} tokens", got, want[:length])
    plain = short.logits(ids, FLOAT32, token_types=types)
    cache = short.new_cache(FLOAT32)
    slot = short.open(cache)
    steps = [short.step(cache, [slot], [ids[t : t + 1]], [types[t : t + 1]]) for t in range(13)]
    assert np.abs(np.concatenate(steps) - plain).max() <= 1e-5
    assert_close("plain products", np.concatenate(steps), plain)


@pytest.mark.parametrize("numerics", EXACT)
def test_nothing_left_in_freed_memory_is_ever_read(short, numerics):
    """Everything a released request held is overwritten with NaN; its successor is as if alone."""
    ids, types = tokens(13, seed=4)
    cache = short.new_cache(EXACT[numerics])
    first = short.open(cache)
    short.step(cache, [first], [np.arange(40) % 60])
    cache.release(first)
    for array in [*cache.window, *cache.main_kv.values(), *cache.index.values()]:
        array[:] = np.nan if array.dtype == np.float32 else 0xFF
    for carry in cache.carry.values():
        carry[:] = np.nan
    cache.history[:] = 10**15
    slot = short.open(cache)
    got = [
        short.step(cache, [slot], [ids[part]], [types[part]])
        for part in (slice(0, 3), slice(3, 12), slice(12, 13))
    ]
    want = short.logits(ids, EXACT[numerics], token_types=types)
    assert_same("after poison", np.concatenate(got), want)


@pytest.mark.parametrize("page_tokens", [2, 64])
def test_the_size_of_a_page_changes_nothing(short, page_tokens):
    ids, types = tokens(13)
    cache = Cache(SHORT, EXACT["official"], page_tokens=page_tokens)
    slots = [cache.add(int(short.classes[SHORT.engram_pad_token_id])) for _ in range(2)]
    got = []
    for part in (slice(0, 6), slice(6, 13)):
        step = short.step(cache, slots, [ids[part]] * 2, [types[part]] * 2)
        got.append(step[: part.stop - part.start])
    want = short.logits(ids, EXACT["official"], token_types=types)
    assert_same("logits", np.concatenate(got), want)
