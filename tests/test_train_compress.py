"""Gradients of pooled entries: every channel its own softmax, leftovers and neighbours nothing."""

import numpy as np
import pytest
from compare import assert_close, assert_same
from oracles import small_config
from test_train_difference import check, random

from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.compress import compress, line_up, main_kv, pool_groups
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rope import frequencies
from dsv41.train.compress import (
    compress_backward,
    main_kv_backward,
    pool_groups_backward,
)

CONFIG = small_config(hidden_size=32, head_dim=32, qk_rope_head_dim=4)


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 1, 3), (0, 2, 4), (1, 5, 1)])
def test_pool_groups(shape):
    inputs = {"u": random(*shape), "g": 2 * random(*shape, seed=1)}
    check("pool", lambda u, g: pool_groups(u, g), pool_groups_backward, inputs)


def test_equal_gates_share_equally_by_hand():
    """u = (1, 3), g = (0, 0): a = 1/2 each; raising g0 moves the mean 2 towards u0: 1/2 (1 - 2)."""
    du, dg = pool_groups_backward(
        np.array([[1.0]]), np.array([[[1.0], [3.0]]]), np.zeros((1, 2, 1))
    )
    assert_close("du", du, [[[0.5], [0.5]]])
    assert_close("dg", dg, [[[-0.5], [0.5]]])


def opened(lengths, ratio):
    """A batch of documents, and a cache that knows them."""
    cache = Cache(CONFIG, FLOAT32)
    slots = [cache.add() for _ in lengths]
    batch = make_batch([np.zeros(n, int) for n in lengths], [0] * len(lengths), slots)
    source = next(s for s in CONFIG.kv_source_layer_ids if CONFIG.compress_ratios[s] == ratio)
    return batch, cache, source


def parameters(ratio):
    p = {"wkv": {"weight": random(32, 32) / 6}, "norm": {"weight": random(32, seed=1)}}
    return p | ({"wgate": {"weight": random(32, 32, seed=2) / 6}} if ratio > 1 else {})


@pytest.mark.parametrize(("lengths", "ratio"), [([3, 1, 2], 2), ([2, 1], 1), ([1, 1], 2)])
def test_compress(lengths, ratio):
    batch, cache, source = opened(lengths, ratio)
    check(
        "compress",
        lambda x, p: compress(x, p, source, ratio, cache, batch, CONFIG, FLOAT32)[0],
        lambda d, x, p: compress_backward(d, x, p, ratio, batch, CONFIG, FLOAT32),
        {"x": random(sum(lengths), 32), "p": parameters(ratio)},
    )


def test_groups_begin_with_their_document():
    batch, _, _ = opened([3, 1, 4], 2)
    assert_same("members", line_up(batch, 2).members, np.array([[0, 1], [4, 5], [6, 7]]))


def test_a_token_behind_the_last_whole_group_gets_nothing():
    batch, _, _ = opened([3, 1], 2)
    dx, _ = compress_backward(
        random(1, 32), random(4, 32), parameters(2), 2, batch, CONFIG, FLOAT32
    )
    assert np.all(dx[2:] == 0) and np.all(dx[:2] != 0)


def test_main_kv():
    rest = np.array([0, 4]), frequencies(CONFIG, 2), FLOAT32
    check(
        "main_kv",
        lambda latent: main_kv(latent, *rest),
        lambda d, latent: main_kv_backward(d, latent, *rest),
        {"latent": random(2, 32)},
    )


def test_a_channel_that_the_main_kv_format_cannot_hold_gets_nothing():
    latent, freqs = np.full((1, 32), 1.0, np.float32), np.float32([0, 0])
    latent[0, 3] = 3000
    dlatent = main_kv_backward(np.ones((1, 32), np.float32), latent, np.array([7]), freqs, OFFICIAL)
    assert_same("dlatent", dlatent == 0, np.arange(32)[None] == 3)
