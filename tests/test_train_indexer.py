"""Gradients of the indexer's scores, keys and queries."""

import tracemalloc

import numpy as np
import pytest
from compare import assert_close
from oracles import small_config
from test_train_difference import check, random

from dsv41.indexer import index_keys, index_queries, index_scores
from dsv41.quant import FLOAT32
from dsv41.rope import frequencies
from dsv41.train import indexer as train
from dsv41.train.indexer import (
    index_keys_backward,
    index_queries_backward,
    index_scores_backward,
    selection_backward,
)

CONFIG = small_config(index_n_heads=2, index_head_dim=32, qk_rope_head_dim=4)
FREQS = frequencies(CONFIG, 1)


def test_scores():
    check(
        "scores",
        lambda q, w, keys: index_scores(q, w, keys, FLOAT32),
        lambda d, q, w, keys: index_scores_backward(d, q, w, keys, FLOAT32),
        {"q": random(3, 2, 4), "w": random(3, 2), "keys": random(3, 5, 4)},
    )


def test_one_head_by_hand():
    """q . k = 6, w = -2: the relu is open, so dw = 6 and dq = -2 k; a closed one passes nothing."""
    q, w, keys = np.array([[[2.0, 0]]]), np.array([[-2.0]]), np.array([[[3.0, 1], [-3, 1]]])
    dq, dw, dkeys = index_scores_backward(np.ones((1, 2)), q, w, keys, FLOAT32)
    assert_close("dq", dq, [[[-6, -2]]])
    assert_close("dw", dw, [[6]])
    assert_close("dkeys", dkeys, [[[-4, 0], [0, 0]]])


def test_keys():
    p = {"wk": {"weight": random(32, 6) / 2}, "k_norm": {"weight": random(32, seed=1)}}
    rest = np.array([0, 2]), FREQS, CONFIG, FLOAT32
    check(
        "keys",
        lambda latent, p: index_keys(latent, p, *rest),
        lambda d, latent, p: index_keys_backward(d, latent, p, *rest),
        {"latent": random(2, 6), "p": p},
    )


def test_queries():
    p = {"wq_b": {"weight": random(64, 4)}, "weights_proj": {"weight": random(2, 5)}}
    rest = np.array([3, 4]), FREQS, CONFIG, FLOAT32
    check(
        "queries",
        lambda x, c_q, p: index_queries(x, c_q, p, *rest),
        lambda dq, dw, x, c_q, p: index_queries_backward(dq, dw, x, c_q, p, *rest),
        {"x": random(2, 5), "c_q": random(2, 4), "p": p},
    )


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_selection_s_loss_and_gradients(monkeypatch, block):
    """Blocks of queries share keys; a query without a selection adds nothing, nor an empty row."""
    monkeypatch.setattr(train, "block_elements", lambda q: block)
    rows = np.array([[0, 2, -1], [2, 3, 4], [-1, -1, -1], [4, 0, -1]])
    attention = np.where(rows < 0, 0, np.exp(random(4, 3)))

    def both(q, w, keys):
        return selection_backward(q, w, keys, rows, attention, 1.0, FLOAT32)

    check(
        "selection",
        lambda q, w, keys: both(q, w, keys)[0],
        lambda d, q, w, keys: tuple(d * grad for grad in both(q, w, keys)[1:]),
        {"q": random(4, 2, 4), "w": random(4, 2), "keys": random(6, 4)},
    )


def test_the_keys_of_all_queries_are_never_gathered_at_once(monkeypatch):
    count, topk, channels = 2000, 8, 32
    monkeypatch.setattr(train, "block_elements", lambda q: 1 << 14)
    q, w = np.float32(random(count, 1, channels)), np.float32(random(count, 1))
    keys = np.float32(random(count, channels, seed=1))
    rows = np.random.default_rng(0).integers(0, count, (count, topk))
    tracemalloc.start()
    selection_backward(q, w, keys, rows, np.ones((count, topk), np.float32), 1.0, FLOAT32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2e6 < 4 * count * topk * channels  # bytes
