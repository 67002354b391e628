"""Losses by hand, and their gradients by differences."""

import math

import numpy as np
import pytest
from compare import assert_close, assert_same
from test_train_difference import check, random

from dsv41.train import losses
from dsv41.train.losses import (
    balance_loss,
    bits_per_byte,
    cross_entropy,
    draft_loss,
    index_loss,
    softmax,
)

# ---- next token -------------------------------------------------------------------------------


def test_cross_entropy():
    targets = np.array([2, 0, 2])
    check(
        "cross entropy",
        lambda logits: cross_entropy(logits, targets)[0],
        lambda d, logits: d[:, None] * cross_entropy(logits, targets)[1],
        {"logits": random(3, 4)},
    )


def test_equal_logits_cost_the_logarithm_of_their_number():
    nats, dlogits = cross_entropy(np.zeros((1, 4)), np.array([3]))
    assert_close("nats", nats, [math.log(4)])
    assert_close("dlogits", dlogits, [[0.25, 0.25, 0.25, -0.75]])


def test_certainty_costs_nothing_and_a_certain_error_its_distance():
    logits = np.float32([[1e4, 0], [-1e4, 0]])
    nats, dlogits = cross_entropy(logits, np.array([0, 0]))
    assert nats.tolist() == [0, 1e4]
    assert_close("dlogits", dlogits, np.float32([[0, 0], [-1, 1]]))


def test_bits_per_byte():
    assert math.isclose(bits_per_byte(8 * math.log(2), 4), 2)


# ---- balance ----------------------------------------------------------------------------------

CHOSEN = np.array([[0, 1], [1, 3], [2, 1], [0, 3]])
ORDER = np.array([0, 0, 0, 2])  # document 1 is empty


def test_balance():
    check(
        "balance",
        lambda scores: balance_loss(scores, CHOSEN, ORDER, 3)[0],
        lambda d, scores: d * balance_loss(scores, CHOSEN, ORDER, 3)[1],
        {"scores": np.exp(random(4, 5))},
    )


def test_balance_by_hand():
    """Equal scores give P = 1/4 whatever the counts, which sum to 4: the loss is 1."""
    loss, _ = balance_loss(np.ones((3, 4)), CHOSEN[:3], ORDER[:3], 1)
    assert_close("equal scores", np.array(loss), np.array(1.0))
    scores = np.array([[3.0, 1], [1, 1]])
    loss, dscores = balance_loss(scores, np.array([[0], [0]]), np.zeros(2, int), 1)
    assert_close("all to one", np.array(loss), np.array(2 * (3 / 4 + 1 / 2) / 2))
    assert np.all(dscores[:, 0] > 0) and np.all(dscores[:, 1] < 0)


def test_a_document_is_balanced_on_its_own():
    scores = np.exp(random(4, 5))
    loss, dscores = balance_loss(scores, CHOSEN, ORDER, 3)
    first, dfirst = balance_loss(scores[:3], CHOSEN[:3], ORDER[:3], 1)
    last, dlast = balance_loss(scores[3:], CHOSEN[3:], ORDER[3:] - 2, 1)
    assert_close("loss", np.array(loss), np.array(3 / 4 * first + 1 / 4 * last))
    assert_close("dscores", dscores, np.concatenate([3 / 4 * dfirst, 1 / 4 * dlast]))


# ---- index ------------------------------------------------------------------------------------

VALID = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
ATTENTION = np.array([[0.2, 0.1, 0.0], [0.3, 0, 0.1], [0, 0, 0], [0, 0, 0]])


def test_index():
    check(
        "index",
        lambda scores: index_loss(scores, VALID, ATTENTION)[0],
        lambda d, scores: d[:, None] * index_loss(scores, VALID, ATTENTION)[1],
        {"scores": random(4, 3)},
    )


def test_index_by_hand():
    """Attention 2 : 1 against equal scores: sum a log(2 a), pulled towards the first entry."""
    loss, dscores = index_loss(np.zeros((1, 2)), np.ones((1, 2), bool), np.array([[0.2, 0.1]]))
    assert_close("loss", loss, [2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)])
    assert_close("dscores", dscores, [[1 / 2 - 2 / 3, 1 / 2 - 1 / 3]])


def test_only_shares_count_and_agreement_costs_nothing():
    scores = np.log(np.array([[0.5, 0.3, 0.2]])) + 7
    loss, dscores = index_loss(scores, np.ones((1, 3), bool), np.array([[0.05, 0.03, 0.02]]))
    assert_close("loss", loss, [0], floor=1e-12)
    assert_close("dscores", dscores, np.zeros((1, 3)), floor=1e-12)


def test_entries_that_were_not_selected_get_nothing():
    _, dscores = index_loss(random(4, 3), VALID, ATTENTION)
    assert np.all(dscores[~VALID] == 0) and np.all(dscores[2:] == 0)


# ---- draft ------------------------------------------------------------------------------------


def draft_inputs():
    return {"logits": random(3, 4), "confidence": random(3)}


def checked_draft(function, backward, by):
    targets, p_main = np.array([1, 0, 3]), softmax(random(3, 4, seed=9))
    check(
        "draft",
        lambda **x: function(draft_loss(**x, targets=targets, p_main=p_main)[0]),
        lambda d, **x: backward(d, *draft_loss(**x, targets=targets, p_main=p_main)[1:]),
        draft_inputs(),
        by,
    )


def test_draft_logits():
    checked_draft(
        lambda parts: 0.1 * parts["ce"] + 0.9 * parts["tv"],
        lambda d, dlogits, _: d[:, None] * dlogits,
        ["logits"],
    )


def test_draft_confidence():
    checked_draft(lambda parts: parts["confidence"], lambda d, _, dc: d * dc, ["confidence"])


def test_confidence_leaves_the_logits_alone(monkeypatch):
    """Its label is a constant: a drafter must not get worse to be more certain of its failure."""
    arguments = *draft_inputs().values(), np.array([1, 0, 3]), softmax(random(3, 4, seed=9))
    before = draft_loss(*arguments)[1]
    monkeypatch.setitem(losses.DRAFT_WEIGHTS, "confidence", 100.0)
    assert_same("dlogits", draft_loss(*arguments)[1], before)


@pytest.mark.parametrize(("p_main", "distance"), [([1, 0], 2), ([0, 1], 0), ([0.5, 0.5], 1)])
def test_draft_by_hand(p_main, distance):
    parts, _, dconfidence = draft_loss(
        np.array([[-1e3, 0.0]]), np.zeros(1), np.array([1]), np.array([p_main], float)
    )
    assert_close("tv", parts["tv"], [distance])
    assert_close("bce", parts["confidence"], [math.log(2)])
    assert_close("dconfidence", dconfidence, [0.5 - (1 - distance / 2)])
