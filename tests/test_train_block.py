"""One block alone: its gradient by what entered it, and the records that it shares."""

import numpy as np
import pytest
from compare import assert_close, assert_same
from oracles import small_config
from test_train_difference import float64, random
from test_train_model import check_directions

from dsv41.ced import block, sublayers
from dsv41.init import random_params
from dsv41.mhc import hc_coefficients, hc_update
from dsv41.quant import FLOAT32
from dsv41.train.block import Back, block_backward, block_forward
from dsv41.train.model import Documents, open_call

ALONE = {  # the only layer of a model
    "window only": dict(compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=()),
    "full, pairs": dict(
        compress_ratios=(2,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,)
    ),
    "full, singles": dict(
        compress_ratios=(1,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,)
    ),
}
DOCUMENTS = Documents([np.arange(5), np.arange(1), np.arange(3)])


def one_layer(case):
    config = small_config(
        **ALONE[case],
        num_hidden_layers=1,
        candidate_source_layer_id=None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        vision_config=None,
    )
    return config, random_params(config, np.random.default_rng(0))


def opened(config, params):
    return open_call(params, config, DOCUMENTS, FLOAT32)


@pytest.mark.parametrize("case", ALONE)
def test_a_block_by_its_streams_and_its_pre(case):
    config, params = one_layer(case)
    leaves = {"streams": random(9, 3, 32), "pre": random(9, 3)}
    out, next_pre = random(9, 3, 32, seed=1), random(9, 3, seed=2)
    p, layer = params["layers"][0], config.plan[0]

    def forward():
        call = opened(config, params)
        streams, pre, kept = block_forward(leaves["streams"], leaves["pre"], p, layer, call)
        return np.sum(streams * out) + np.sum(pre * next_pre), kept, call

    with float64():
        _, kept, call = forward()
        back = Back(balance=0.0, index=0.0)
        by_streams, by_pre, _ = block_backward(out, next_pre, kept, p, layer, call, back)
        grads = {"streams": by_streams, "pre": by_pre}
        check_directions(lambda: forward()[0], leaves, grads, grads)


def test_the_forward_pass_is_that_of_the_model():
    config, params = one_layer("full, pairs")
    streams, pre = (np.float32(random(*s)) for s in ((9, 3, 32), (9, 3)))
    p, layer = params["layers"][0], config.plan[0]
    want = block(streams, pre, p, layer, opened(config, params))
    got = block_forward(streams, pre, p, layer, opened(config, params))
    assert_same("streams", got[0], want[0])
    assert_same("pre", got[1], want[1])


def test_sublayers_keep_what_entered_them_and_their_outputs():
    config, params = one_layer("window only")
    streams, pre = (np.float32(random(*s)) for s in ((9, 3, 32), (9, 3)))
    p, call = params["layers"][0], opened(config, params)

    def double(x, p, layer, call):
        return 2 * x

    after, last, kept = sublayers(streams, pre, (double, double), p, config.plan[0], call)
    assert kept[0][0] is streams and kept[0][1] is pre
    for name, (own, _, y), (below, new_pre) in zip(
        ("attn", "ffn"), kept, (kept[1][:2], (after, last)), strict=True
    ):
        mixing = [p[f"hc_{name}_{part}"] for part in ("fn", "base", "scale")]
        want, post, comb = hc_coefficients(own, *mixing, config, FLOAT32)
        assert_same(f"{name}.pre", new_pre, want)
        assert_same(f"behind {name}", below, hc_update(own, y, post, comb, FLOAT32))


def test_entries_are_found_where_they_were_written():
    config, params = one_layer("full, pairs")
    call = opened(config, params)
    entries, owners = np.array([0, 1, 0]), np.array([0, 0, 2])
    kv, keys = np.float32(random(3, 32)), np.float32(random(3, 32, seed=1))
    call.cache.write_entries(0, entries, owners, kv, keys)
    rows = call.cache.rows_of_entries(0, entries, owners)
    assert_close("main KV", call.cache.main_kv[0][rows], kv)
    assert_close("index keys", call.cache.index[0][rows], keys)
