"""Training the drafter: the blocks see what they see in use, and every gradient is a difference."""

import numpy as np
import pytest
from compare import assert_close
from oracles import small_classes, small_config
from test_train_difference import float64
from test_train_model import check_directions

from dsv41.draft import Drafter
from dsv41.init import random_params
from dsv41.mhc import hc_collapse
from dsv41.model import Model
from dsv41.quant import FLOAT32, WEIGHT_FP8
from dsv41.tensors import flatten, nest
from dsv41.train import draft as train
from dsv41.train import losses
from dsv41.train.draft import (
    DraftCall,
    cut_blocks,
    draft_forward,
    draft_loss_and_grads,
    read_by_main_model,
    sample_anchors,
)
from dsv41.train.model import Documents, Options, open_call

CONFIG = small_config(
    vision_config=None,
    swiglu_limit=3.0,
    num_nextn_predict_layers=2,
    compress_ratios=(0, 1, 1, 2, 2, 0, 2, 1, 1, 1, 1, 0, 0),
    dspark_target_layer_ids=(3, 8, 10),
    dspark_block_size=3,
    dspark_noise_token_id=7,
)
CLASSES = small_classes(CONFIG)
STORED = random_params(CONFIG, np.random.default_rng(0))
ANCHORS = [np.array([1, 4, 8]), np.array([2]), np.array([], int), np.array([1])]


def _floats():
    leaves = flatten(STORED)
    for name in [n for n in leaves if n.endswith("embed.scale")]:
        table = name.replace("scale", "weight")
        leaves[table] = WEIGHT_FP8.dequantize(leaves[table], leaves.pop(name))
    return leaves


FLOATS = _floats()


def documents(lengths=(11, 6, 1, 3)):
    rng = np.random.default_rng(1)
    return Documents([rng.integers(0, CONFIG.vocab_size - 1, n) for n in lengths])


def run(leaves, docs, anchors=ANCHORS, **options):
    out = draft_loss_and_grads(
        nest(leaves), CONFIG, docs, anchors, FLOAT32, Options(CLASSES), **options
    )
    return out[0], flatten(out[1]), out[2]


def wide():
    return {name: leaf.astype(np.float64) for name, leaf in FLOATS.items()}


# ---- gradients --------------------------------------------------------------------------------


@float64()
def test_cross_entropy_and_distance_along_random_directions(monkeypatch):
    """Without the confidence, whose label is a constant of the gradient."""
    monkeypatch.setitem(losses.DRAFT_WEIGHTS, "confidence", 0.0)
    leaves, docs = wide(), documents()
    _, grads, _ = run(leaves, docs)
    names = [n for n in grads if "confidence" not in n]
    check_directions(lambda: run(leaves, docs)[0], leaves, grads, names)


@float64()
def test_every_path_through_the_confidence(monkeypatch):
    """The same with a confidence loss whose label does not move: log(1 + e^c)."""

    def softplus(logits, confidence, targets, p_main):
        slope = 1 / (1 + np.exp(-confidence))
        zero = np.zeros(len(confidence))
        parts = {"ce": zero, "tv": zero, "confidence": np.log1p(np.exp(confidence))}
        return parts, np.zeros_like(logits), slope

    monkeypatch.setattr(train, "draft_loss", softplus)
    leaves, docs = wide(), documents()
    _, grads, _ = run(leaves, docs)
    names = [
        n for n in grads if "markov_head.head" not in n and not n.endswith("mtp.1.norm.weight")
    ]
    assert np.all(grads["mtp.1.norm.weight"] == 0)  # the confidence reads h before the norm
    check_directions(lambda: run(leaves, docs)[0], leaves, grads, names)


def test_exactly_the_drafter_s_tensors_move():
    _, grads, info = run(FLOATS, documents())
    own = {n for n in FLOATS if n.startswith("mtp.")}
    assert own - set(grads) == {n for n in own if n.endswith("gate.bias")}
    assert all(g.shape == FLOATS[n].shape and np.isfinite(g).all() for n, g in grads.items())
    slots = CONFIG.dspark_num_experts_per_tok * CONFIG.dspark_block_size * 5
    assert [load.sum() for load in info["load"].values()] == [slots, slots]


# ---- what a block sees ------------------------------------------------------------------------


def hidden_of(docs, anchors):
    params = nest(FLOATS)
    call = open_call(params, CONFIG, docs, FLOAT32, CLASSES)
    features, _ = read_by_main_model(params, docs, call)
    draft = DraftCall(params, features, cut_blocks(docs, anchors, CONFIG, 3), call)
    streams, pre, _ = draft_forward(params, draft)
    return hc_collapse(streams, pre, FLOAT32), features


def test_a_block_is_drafted_as_in_use():
    """Every anchor of a pack against a Drafter that has observed just the tokens before it."""
    docs = documents()
    hidden, features = hidden_of(docs, ANCHORS)
    blocks = iter(hidden.reshape(-1, CONFIG.dspark_block_size, CONFIG.hidden_size))
    begin = 0
    for ids, anchors in zip(docs.ids, ANCHORS, strict=True):
        for anchor in anchors:
            model = Model(CONFIG, STORED, CLASSES)
            cache = model.new_cache(FLOAT32)
            slot = model.open(cache)
            model.step(cache, [slot], [ids[:anchor]])
            drafter = Drafter(model, cache)
            drafter.observe(slot, np.arange(anchor), features[begin : begin + anchor])
            assert_close(
                f"block at {anchor}", next(blocks), drafter.hidden([slot], [ids[anchor]])[0]
            )
        begin += len(ids)


def test_features_are_those_that_a_step_hands_out():
    docs = documents()
    _, features = hidden_of(docs, ANCHORS)
    model = Model(CONFIG, STORED, CLASSES)
    cache, handed = model.new_cache(FLOAT32), []
    slots = [model.open(cache) for _ in docs.ids]
    model.step(cache, slots, docs.ids, features=handed)
    assert_close("features", features, np.concatenate(handed, axis=1))


def test_tokens_behind_the_anchor_change_targets_only():
    docs, anchors = documents((8,)), [np.array([3])]
    changed = Documents([docs.ids[0].copy()])
    changed.ids[0][4:] = changed.ids[0][4:][::-1]
    assert_close("hidden", hidden_of(changed, anchors)[0], hidden_of(docs, anchors)[0])


def test_blocks_do_not_see_each_other():
    docs = documents()
    together, _ = hidden_of(docs, ANCHORS)
    alone, _ = hidden_of(docs, [np.array([8]), *[np.array([], int)] * 3])
    assert_close("block", together[6:9], alone)


def test_slots_of_a_block_by_hand():
    docs = Documents([np.array([50, 51, 52, 53, 54])])
    blocks = cut_blocks(docs, [np.array([2, 3])], CONFIG, decay=2.0)
    assert blocks.positions.tolist() == [2, 3, 4, 3, 4, 5]
    assert blocks.ids.tolist() == [52, 7, 7, 53, 7, 7]
    assert blocks.before.tolist() == [52, 53, 54, 53, 54, 54]
    assert blocks.truth.tolist() == [53, 54, 0, 54, 0, 0]
    assert blocks.context.tolist() == [[-1, -1, -1, 0, 1], [-1, -1, 0, 1, 2]]
    late = np.exp(-0.5)
    assert_close("weight", blocks.weight, np.array([1, late, 0, 1, 0, 0]) / (2 + late))


def test_a_document_s_context_ends_at_its_edge():
    docs = documents((4, 5))
    blocks = cut_blocks(docs, [np.array([], int), np.array([2])], CONFIG, 3)
    assert blocks.context.tolist() == [[-1, -1, -1, 4, 5]]
    assert blocks.main.tolist() == [6, 7, 8]


def test_image_tokens_are_no_targets():
    docs = Documents(documents((6,)).ids, types=[np.array([-1, -1, -1, 0, -1, -1])])
    blocks = cut_blocks(docs, [np.array([1])], CONFIG, 3)
    assert (blocks.weight > 0).tolist() == [True, False, True]


# ---- anchors ----------------------------------------------------------------------------------


def test_anchors_have_a_token_on_either_side():
    docs = documents((2, 3, 40))
    draws = sample_anchors(docs, 5, np.random.default_rng(0))
    assert [len(d) for d in draws] == [0, 1, 5]
    assert draws[1].tolist() == [1]
    assert np.all(np.diff(draws[2]) > 0) and 1 <= draws[2].min() and draws[2].max() <= 38


@pytest.mark.parametrize("anchor", [0, 10])
def test_an_impossible_anchor_is_refused(anchor):
    with pytest.raises(ValueError, match=r"anchors: expected 1 .. 9 in document 0"):
        run(FLOATS, documents((11,)), [np.array([anchor])])


def test_no_anchors_no_gradient():
    loss, grads, info = run(FLOATS, documents((4, 1)), [np.array([], int)] * 2)
    assert loss == 0 and info["slots"] == 0
    assert all(np.all(g == 0) for g in grads.values())


def test_late_slots_weigh_less_and_the_loss_is_a_mean():
    short = run(FLOATS, documents(), decay=0.1)[2]
    only_first = cut_blocks(documents(), ANCHORS, CONFIG, 0.1).weight.reshape(-1, 3)[:, 0]
    assert_close("first slots", np.array(only_first.sum()), np.array(1.0), rel=1e-3)
    assert (
        0 <= short["tv"] <= 2 and short["slots"] == run(FLOATS, documents(), decay=9.0)[2]["slots"]
    )
