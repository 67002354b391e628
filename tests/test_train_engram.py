"""Gradients of the Engram gate, its projection and the table rows that were read."""

import numpy as np
import pytest
from compare import assert_close, assert_same
from oracles import small_config
from test_train_difference import check, float64, random

from dsv41.engram import engram, engram_gate
from dsv41.quant import FLOAT32, WEIGHT_FP8
from dsv41.train.engram import engram_backward, engram_forward, engram_gate_backward

CONFIG = small_config()
EPS = CONFIG.rms_norm_eps


def gate_inputs(tokens, s=3, width=4):
    return {
        "streams": random(tokens, s, width),
        "key": random(tokens, s, width, seed=1),
        "value": random(tokens, width),
        "q_weight": random(s, width),
        "k_weight": random(s, width, seed=1),
    }


@pytest.mark.parametrize("is_image", [[], [False], [False, True, False]])
def test_gate(is_image):
    is_image = np.array(is_image, bool)
    check(
        "gate",
        lambda **x: engram_gate(**x, is_image=is_image, eps=EPS, numerics=FLOAT32)[0],
        lambda d, **x: engram_gate_backward(d, **x, is_image=is_image, eps=EPS),
        gate_inputs(len(is_image)),
    )


def test_inside_an_image_the_streams_pass_and_nothing_else_moves():
    values, d = gate_inputs(2), random(2, 3, 4)
    out = engram_gate_backward(d, **values, is_image=np.ones(2, bool), eps=EPS)
    assert_same("dstreams", out[0], d)
    assert all(np.all(x == 0) for x in out[1:])


def test_a_gate_below_the_floor_does_not_move():
    values = gate_inputs(1)
    values["q_weight"] *= 1e-9
    out = engram_gate_backward(random(1, 3, 4), **values, is_image=np.zeros(1, bool), eps=EPS)
    assert np.all(out[1] == 0) and np.all(out[2] != 0)


def parameters(width, table_rows=5, channels=3, columns=2):
    return {
        "embed": {"weight": random(table_rows, channels)},
        "wkv": {"weight": random(4 * width, columns * channels)},
        "q_weight": random(3, width),
        "k_weight": random(3, width, seed=1),
    }


def test_module_with_rows_that_repeat():
    rows, is_image = np.array([[0, 2], [2, 4], [0, 4]]), np.array([False, False, True])
    rest = is_image, CONFIG, FLOAT32

    def backward(d, streams, p):
        dstreams, grads = engram_backward(d, streams, rows, p, *rest)
        numbers, values = grads["embed"]["weight"]
        assert numbers.tolist() == [0, 2, 4]
        whole = np.zeros((5, 3))
        whole[numbers] = values
        return dstreams, grads | {"embed": {"weight": whole}}

    check(
        "engram",
        lambda streams, p: engram_forward(streams, rows, p, *rest),
        backward,
        {"streams": random(3, 3, 4), "p": parameters(4)},
    )


def test_the_float_table_gives_what_the_stored_one_gives():
    p, rows = parameters(4, channels=32), np.array([[0, 2], [3, 3]])
    codes, scales = WEIGHT_FP8.quantize(np.float32(p["embed"]["weight"]))
    streams, text = np.float32(random(2, 3, 4)), np.zeros(2, bool)
    stored = p | {"embed": {"weight": codes, "scale": scales}}
    dense = p | {"embed": {"weight": WEIGHT_FP8.dequantize(codes, scales)}}
    want = engram(streams, rows, stored, text, CONFIG, FLOAT32)[0]
    got = engram_forward(streams, rows, dense, text, CONFIG, FLOAT32)
    assert_close("streams", got, want)


def test_equal_n_grams_add_up():
    """Two tokens at the same rows, with the same streams: the rows get twice what one gives."""
    p, streams = parameters(4), random(1, 3, 4)
    text, d = np.zeros(2, bool), random(1, 3, 4, seed=3)
    with float64():
        one = engram_backward(d, streams, np.array([[1, 4]]), p, text[:1], CONFIG, FLOAT32)
        two = engram_backward(
            np.repeat(d, 2, 0),
            np.repeat(streams, 2, 0),
            np.array([[1, 4]] * 2),
            p,
            text,
            CONFIG,
            FLOAT32,
        )
    for (rows, once), (same, twice) in [(one[1]["embed"]["weight"], two[1]["embed"]["weight"])]:
        assert_same("rows", rows, same)
        assert_close("values", twice, 2 * once)
