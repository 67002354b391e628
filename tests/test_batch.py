"""Requests laid end to end: who owns a row, and that no row feels its company."""

import numpy as np
import oracles
import pytest
from compare import assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.batch import TEXT, make_batch
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32, OFFICIAL

# a window, a pool and a top-k that a dozen tokens overflow; both ratios, Engram in both halves
CONFIG = oracles.small_config(
    num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    engram_layer_ids=(0, 4),
    sliding_window=4,
    index_topk=4,
)
EXACT = {
    "float32": FLOAT32.but(batch_invariant=True),
    "official": OFFICIAL.but(batch_invariant=True),
}


@pytest.fixture(scope="module")
def model():
    params = random_params(CONFIG, np.random.default_rng(0))
    return Model(CONFIG, params, oracles.small_classes(CONFIG))


def example():
    """Requests of 2, 1 and 3 tokens in slots 5, 0 and 2, at positions 7, 0 and 4."""
    types = [[TEXT, 0], [TEXT], [1, 2, TEXT]]
    return make_batch([[11, 12], [13], [14, 15, 16]], [7, 0, 4], [5, 0, 2], types)


# ---- who owns a row ---------------------------------------------------------------------------


def test_every_row_knows_its_request_by_hand():
    batch = example()
    assert batch.count == 3
    assert batch.ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [7, 8, 0, 4, 5, 6]
    assert batch.order.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.starts.tolist() == [7, 7, 0, 4, 4, 4]
    assert batch.offsets.tolist() == [0, 0, 2, 3, 3, 3]
    assert batch.floors.tolist() == [0] * 6
    assert batch.slots.tolist() == [5, 0, 2]
    assert batch.lengths.tolist() == [2, 1, 3]
    assert batch.is_image.tolist() == [False, True, False, True, True, False]


def test_segments_name_slot_rows_and_positions():
    assert list(example().segments()) == [
        (5, slice(0, 2), 7, 9),
        (0, slice(2, 3), 0, 1),
        (2, slice(3, 6), 4, 7),
    ]


def test_tokens_are_text_unless_types_say_otherwise():
    batch = make_batch([[1, 2], [3]], [0, 9], [0, 1])
    assert batch.types.tolist() == [TEXT] * 3
    assert not batch.is_image.any()


def test_a_sub_batch_keeps_places_of_requests_that_lose_all_rows():
    keep = np.array([False, True, False, False, True, True])
    part = example().only(keep)
    assert part.ids.tolist() == [12, 15, 16]
    assert part.types.tolist() == [0, 2, TEXT]
    assert part.positions.tolist() == [8, 5, 6]
    assert part.starts.tolist() == [8, 5, 5], "a sub-batch begins at its own first position"
    assert part.offsets.tolist() == [0, 1, 1]
    assert part.lengths.tolist() == [1, 0, 2]
    assert part.order.tolist() == [0, 2, 2]
    assert part.slots.tolist() == [5, 0, 2]
    assert list(part.segments()) == [(5, slice(0, 1), 8, 9), (2, slice(1, 3), 5, 7)]


def test_a_sub_batch_of_nothing_has_no_segment():
    part = example().only(np.zeros(6, bool))
    assert len(part.ids) == 0
    assert part.count == 3
    assert list(part.segments()) == []


def test_a_sub_batch_leaves_the_batch_as_it_was():
    batch = example()
    batch.only(batch.is_image)
    assert batch.lengths.tolist() == [2, 1, 3]
    assert batch.starts.tolist() == [7, 7, 0, 4, 4, 4]


def test_floors_belong_to_slots_and_not_to_places_in_the_batch():
    floors = [100, 101, 102, 103, 104, 105]
    batch = example().with_floors(floors)
    assert batch.floors.tolist() == [105, 105, 100, 102, 102, 102]
    part = batch.only(np.array([False, True, False, False, True, True]))
    assert part.floors.tolist() == [105, 102, 102]
    assert part.with_floors(range(6)).floors.tolist() == [5, 2, 2]


@repeatable
@given(data=st.data())
def test_batches_and_sub_batches_against_lists_of_tokens(data):
    """Rows as tuples (slot, position, id, type), in lists that cannot be confused."""
    count = data.draw(st.integers(1, 5), label="requests")
    slots = data.draw(st.permutations(range(8)))[:count]
    starts = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    ids = [[10 * r + t for t in range(size)] for r, size in enumerate(sizes)]
    types = [[(r + t) % 3 - 1 for t in range(size)] for r, size in enumerate(sizes)]
    rows = [
        (slots[r], starts[r] + t, ids[r][t], types[r][t])
        for r in range(count)
        for t in range(sizes[r])
    ]
    batch = make_batch(ids, starts, slots, types)
    _compare(batch, rows)
    runs = [sorted(data.draw(st.tuples(*[st.integers(0, s)] * 2), label="run")) for s in sizes]
    keep = [low <= t < high for (low, high), s in zip(runs, sizes, strict=True) for t in range(s)]
    kept = [row for row, k in zip(rows, keep, strict=True) if k]
    _compare(batch.only(np.array(keep)), kept)


def _compare(batch, rows):
    slot = batch.slots[batch.order]
    got = zip(slot, batch.positions, batch.ids, batch.types, strict=True)
    assert [tuple(int(v) for v in row) for row in got] == rows
    for i, (owner, _, _, _) in enumerate(rows):
        first = next(j for j, row in enumerate(rows) if row[0] == owner)
        assert batch.offsets[i] == first
        assert batch.starts[i] == rows[first][1]
    lengths = [sum(row[0] == s for row in rows) for s in batch.slots]
    assert batch.lengths.tolist() == lengths
    seen = []
    for owner, at, begin, end in batch.segments():
        assert [(owner, p) for p in range(begin, end)] == [row[:2] for row in rows[at]]
        seen += rows[at]
    assert seen == rows


# ---- no row feels its company -----------------------------------------------------------------


def ids_of(length, seed):
    return np.random.default_rng(seed).integers(0, 60, length)


@pytest.mark.parametrize("numerics", EXACT)
def test_a_row_has_the_same_bits_in_a_batch_of_any_size_at_any_place(model, numerics):
    """One decode step of a request, alone and among one, two and seven others of other lengths."""
    mine, others = ids_of(11, 0), [ids_of(n, n) for n in (1, 2, 3, 5, 8, 9, 14)]
    want = model.logits(mine, EXACT[numerics])[-1:]
    for size in (1, 2, 3, 8):
        for place in range(size):
            requests = others[: size - 1]
            requests.insert(place, mine)
            cache = model.new_cache(EXACT[numerics])
            slots = [model.open(cache) for _ in requests]
            fed = [slot for slot, r in zip(slots, requests, strict=True) if len(r) > 1]
            model.step(cache, fed, [r[:-1] for r in requests if len(r) > 1])
            got = model.step(cache, slots, [r[-1:] for r in requests])
            assert_same(f"row {place} of {size}", got[place : place + 1], want)


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("page_tokens", [2, 64])
def test_prompts_of_unequal_length_side_by_side(model, numerics, page_tokens):
    short, long = ids_of(3, 1), ids_of(7, 2)
    cache = model.new_cache(EXACT[numerics], page_tokens)
    slots = [model.open(cache) for _ in range(2)]
    got = model.step(cache, slots, [short, long])
    assert_same("three tokens", got[:3], model.logits(short, EXACT[numerics]))
    assert_same("seven tokens", got[3:], model.logits(long, EXACT[numerics]))


@pytest.mark.parametrize("numerics", EXACT)
def test_three_runs_of_one_batch_give_the_same_bits(model, numerics):
    requests = [ids_of(n, n) for n in (9, 1, 6)]
    runs = [model.logits(requests, EXACT[numerics]) for _ in range(3)]
    assert_same("second run", runs[1], runs[0])
    assert_same("third run", runs[2], runs[0])
