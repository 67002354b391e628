"""Documents into samples: every token once, nothing across an edge, the same batch for a step."""

import numpy as np
import pytest
from compare import assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.train.packing import BOS, EOS, NO_TARGET, PAD, Batches, Piece, fill, pack, padding


def documents_of(sizes, start=3):
    """Documents of the given sizes whose tokens are all different, from `start` on."""
    ends = start + np.cumsum(sizes)
    return [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]


def rng(seed=0):
    return np.random.default_rng(seed)


def test_five_documents_by_hand():
    """With bos and eos: 10, 4, 3, 2, 5 tokens into samples of 6."""
    documents = documents_of([8, 2, 1, 0, 3])
    samples = pack(documents, 6, rng())
    sizes = sorted([p.stop - p.start for p in sample] for sample in samples)
    assert sizes == [[3], [4], [4, 2], [5], [6]]
    assert [Piece(0, 0, 6)] in samples and any(Piece(3, 0, 2) in sample for sample in samples)
    assert padding(samples, 6) == 1 - 24 / 30


def test_a_packed_sample_by_hand():
    documents = documents_of([2, 1])
    packed = fill([[Piece(0, 0, 4), Piece(1, 0, 3)]], documents, 8)
    assert packed.ids.tolist() == [[BOS, 3, 4, EOS, BOS, 5, EOS, PAD]]
    assert packed.targets.tolist() == [[3, 4, EOS, NO_TARGET, 5, EOS, NO_TARGET, NO_TARGET]]
    assert packed.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_a_long_document_starts_once_and_ends_once():
    documents = documents_of([7])
    packed = fill([[Piece(0, 0, 4)], [Piece(0, 4, 8)], [Piece(0, 8, 9)]], documents, 4)
    assert packed.ids.tolist() == [[BOS, 3, 4, 5], [6, 7, 8, 9], [EOS, PAD, PAD, PAD]]
    assert packed.targets.tolist() == [
        [3, 4, 5, NO_TARGET],
        [7, 8, 9, NO_TARGET],
        [NO_TARGET] * 4,
    ]


@repeatable
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(2, 33), st.integers(0, 9))
def test_every_token_once_and_no_target_across_an_edge(sizes, length, seed):
    documents = documents_of(sizes)
    samples = pack(documents, length, rng(seed))
    packed = fill(samples, documents, length)
    used = packed.segments >= 0
    found = packed.ids[used]
    assert sorted(found[found > 2]) == list(range(3, 3 + sum(sizes)))
    assert np.sum(found == BOS) == np.sum(found == EOS) == len(sizes)
    assert np.all(packed.ids[~used] == PAD) and np.all(packed.targets[~used] == NO_TARGET)
    rows, columns = np.nonzero(packed.targets != NO_TARGET)
    assert np.all(packed.targets[rows, columns] == packed.ids[rows, columns + 1])
    assert np.all(packed.segments[rows, columns] == packed.segments[rows, columns + 1])
    assert len(rows) == sum(size + 2 - -(-(size + 2) // length) for size in sizes)


@repeatable
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(2, 33))
def test_the_best_fit_leaves_no_two_samples_that_would_fit_into_one(sizes, length):
    samples = pack(documents_of(sizes), length, rng())
    used = sorted(sum(p.stop - p.start for p in sample) for sample in samples)
    assert used[-1] <= length
    assert len(used) == 1 or used[0] + used[1] > length


def test_a_corpus_of_documents_leaves_little_padding():
    sizes = rng(1).lognormal(6, 1.5, 800).astype(int)
    samples = pack(documents_of(sizes), 512, rng())
    assert padding(samples, 512) < 1e-3


def test_a_step_has_one_batch_whatever_came_before():
    documents = documents_of(rng(2).integers(0, 60, 100))
    straight, resumed = (Batches(documents, 32, 4, seed=5) for _ in range(2))
    steps = 3 * straight.steps_per_epoch + 1
    batches = [straight(step) for step in range(steps)]
    for step in (steps - 1, 2, straight.steps_per_epoch, 0):
        for got, want in zip(resumed(step), batches[step], strict=True):
            assert_same("batch", got, want)


def test_epochs_and_seeds_differ_in_order_only():
    documents = documents_of(rng(3).integers(0, 60, 100))
    first, other = Batches(documents, 32, 1, seed=0), Batches(documents, 32, 1, seed=1)
    n = first.steps_per_epoch
    assert n == other.steps_per_epoch

    def tokens(batches, epoch):
        return np.concatenate([batches(epoch * n + step).ids[0] for step in range(n)])

    epochs = [tokens(first, 0), tokens(first, 1), tokens(other, 0)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(epochs[a], epochs[b])
        assert_same("tokens", np.sort(epochs[a]), np.sort(epochs[b]))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="length: expected 2 or more tokens in a sample, got 1"):
        pack(documents_of([3]), 1, rng())
    with pytest.raises(ValueError, match="batch: 9 samples asked for, 1 there"):
        Batches(documents_of([3]), 8, 9, seed=0)
