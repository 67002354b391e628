"""A fresh model has every tensor, at the size that keeps activations and logits near 1."""

import numpy as np
import pytest

from dsv41.checkpoint import Checkpoint, load_params
from dsv41.engram import read_rows
from dsv41.init import random_params
from dsv41.presets import preset
from dsv41.save import save
from dsv41.tensors import PARTS, expected_tensors, flatten

TINY = preset("tiny")


@pytest.fixture(scope="module")
def leaves():
    return flatten(random_params(TINY, np.random.default_rng(0)))


def test_every_tensor_of_the_config_is_there(leaves):
    expected = {n: s for n, s in expected_tensors(TINY).items() if s.layout != "scale"}
    assert set(leaves) == set(expected)
    for name, spec in expected.items():
        assert leaves[name].shape == spec.logical_shape, name
        assert leaves[name].dtype == (np.uint8 if spec.layout == "table" else np.float32), name
        assert leaves[name].std() > 0 or spec.layout == "table", name


def test_the_same_seed_gives_the_same_model_and_no_other_source_is_used(leaves):
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    again = flatten(random_params(TINY, np.random.default_rng(0)))
    other = flatten(random_params(TINY, np.random.default_rng(1)))
    assert np.array_equal(np.random.get_state()[1], state)
    for name, leaf in leaves.items():
        assert np.array_equal(leaf, again[name]), name
        assert not np.array_equal(leaf, other[name]) or name.endswith("embed.scale"), name


def test_the_text_model_does_not_depend_on_what_else_there_is(leaves):
    alone = TINY.but(num_nextn_predict_layers=0, compress_ratios=TINY.compress_ratios[:9])
    text = flatten(random_params(alone, np.random.default_rng(0)))
    assert not any(name.startswith("mtp") for name in text)
    assert np.array_equal(text["head.weight"], leaves["head.weight"])


def test_a_linear_keeps_the_size_of_its_input(leaves):
    rng = np.random.default_rng(2)
    for name, spec in expected_tensors(TINY).items():
        if spec.layout in ("tiles", "rows"):
            out = leaves[name] @ rng.standard_normal((spec.logical_shape[1], 50))
            assert 0.8 < out.std() < 1.2, name


def test_norms_are_near_one_and_logits_have_size_one(leaves):
    norms = [x for n, x in leaves.items() if "norm" in n or n.endswith(("q_weight", "k_weight"))]
    assert len(norms) == 66 and all(0.8 < x.mean() < 1.2 and x.std() < 0.2 for x in norms)
    x = np.random.default_rng(3).standard_normal((20, 64)) * leaves["norm.weight"]
    assert 0.85 < (x @ leaves["head.weight"].T).std() < 1.15
    assert 0.95 < leaves["embed.weight"].std() < 1.05


def test_streams_start_different_and_their_mixing_nearly_constant(leaves):
    assert np.ptp(leaves["layers.0.hc_attn_base"]) > 1
    x = np.random.default_rng(4).standard_normal((256, 200))
    assert 0.2 < (leaves["layers.0.hc_ffn_fn"] @ x).std() < 0.4
    scales = np.concatenate([x for n, x in leaves.items() if n.endswith("hc_attn_scale")])
    assert 0.5 <= scales.min() and scales.max() <= 1
    assert np.abs(leaves["layers.3.ffn.gate.bias"]).max() < 0.5


def test_engram_rows_have_size_one(leaves):
    table = {key: leaves[f"layers.4.engram.embed.{key}"] for key in ("weight", "scale")}
    rows = read_rows(table, np.arange(606).reshape(101, 6))
    assert rows.size == 606 * 32
    assert 0.95 < rows.std() < 1.05


def test_a_fresh_model_can_be_saved_and_loaded(tmp_path, leaves):
    params = random_params(TINY, np.random.default_rng(0))
    save(tmp_path, TINY, params)
    again = flatten(load_params(Checkpoint(tmp_path), parts=PARTS))
    assert set(again) == set(leaves)
    for name, spec in expected_tensors(TINY).items():
        if spec.layout != "scale":
            coarse = {"tiles": 2**-4, "rows": 2**-2, "table": 0, None: 2**-8}[spec.layout]
            off = np.abs(again[name].astype(np.float64) - leaves[name])
            assert (off <= coarse * np.abs(leaves[name]).max()).all(), name
