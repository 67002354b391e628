"""Gradients of a layer's own window records, and their row numbers inside one call."""

import numpy as np
from compare import assert_same
from oracles import small_config
from test_train_difference import check, random

from dsv41.batch import make_batch
from dsv41.quant import FLOAT32
from dsv41.rope import frequencies
from dsv41.train.window import own_rows, window_kv_backward
from dsv41.window import window_index, window_kv

CONFIG = small_config(hidden_size=32, head_dim=32, qk_rope_head_dim=4)


def test_window_kv():
    p = {"wkv": {"weight": random(32, 32) / 6}, "kv_norm": {"weight": random(32, seed=1)}}
    rest = np.arange(2) + 5, frequencies(CONFIG, 0), CONFIG, FLOAT32
    check(
        "window_kv",
        lambda x, p: window_kv(x, p, *rest),
        lambda d, x, p: window_kv_backward(d, x, p, *rest),
        {"x": random(2, 32), "p": p},
    )


def test_rows_of_three_documents_by_hand():
    batch = make_batch([np.zeros(n, int) for n in (3, 1, 2)], [0, 0, 0], [4, 0, 1])
    want = [[0, -1], [0, 1], [1, 2], [3, -1], [4, -1], [4, 5]]
    assert_same("rows", own_rows(window_index(batch, 2), batch, 2), np.array(want))
    everything = own_rows(window_index(batch, 6), batch, 6)
    assert everything.max() == 5 and (everything[:, 3:] == -1).all()
