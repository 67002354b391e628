"""Gradients of the low-rank queries and the grouped output."""

import numpy as np
import pytest
from oracles import small_config
from test_train_difference import check, random

from dsv41.projections import grouped_output, low_rank_queries
from dsv41.quant import FLOAT32
from dsv41.train.projections import grouped_output_backward, low_rank_queries_backward

CONFIG = small_config(num_attention_heads=4, o_groups=2, o_lora_rank=16)


@pytest.mark.parametrize("tokens", [0, 2])
def test_low_rank_queries(tokens):
    config = CONFIG.but(num_attention_heads=2)
    p = {
        "wq_a": {"weight": random(4, 5)},
        "q_norm": {"weight": random(4, seed=1)},
        "wq_b": {"weight": random(64, 4)},
    }
    check(
        "queries",
        lambda x, p: low_rank_queries(x, p, config, FLOAT32)[1],
        lambda dq, x, p: low_rank_queries_backward(dq, x, p, config, FLOAT32),
        {"x": random(tokens, 5), "p": p},
    )


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_grouped_output(tokens):
    p = {"wo_a": {"weight": random(32, 4)}, "wo_b": {"weight": random(3, 32)}}
    check(
        "output",
        lambda o, p: grouped_output(o, p, CONFIG, FLOAT32),
        lambda dy, o, p: grouped_output_backward(dy, o, p, CONFIG, FLOAT32),
        {"o": random(tokens, 4, 2), "p": p},
    )


def test_a_group_moves_only_its_own_rows_of_the_first_matrix():
    p = {"wo_a": {"weight": random(32, 4)}, "wo_b": {"weight": random(3, 32)}}
    o = random(3, 4, 2)
    o[:, 2:] = 0  # the second group is silent
    _, grads = grouped_output_backward(random(3, 3), o, p, CONFIG, FLOAT32)
    moved = np.any(grads["wo_a"]["weight"] != 0, axis=1)
    assert moved.tolist() == [True] * 16 + [False] * 16
