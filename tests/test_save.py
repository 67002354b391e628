"""What is saved opens again with the same values; what cannot be saved leaves nothing behind."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from reference import GOLDEN

from dsv41.checkpoint import Checkpoint, load_params
from dsv41.engram import read_rows
from dsv41.formats import encode_bf16
from dsv41.init import random_params
from dsv41.presets import preset
from dsv41.save import save
from dsv41.tensors import PARTS, flatten, nest


def assert_same_bytes(first, second):
    assert set(first.names) == set(second.names)
    for name in first.names:
        assert first.entry(name).dtype == second.entry(name).dtype, name
        assert first.raw(name).tobytes() == second.raw(name).tobytes(), name


@pytest.mark.parametrize("shard_bytes", [None, 200_000])
def test_leaves_as_stored_survive_saving_bit_by_bit(shard_bytes, tmp_path):
    golden = Checkpoint(GOLDEN)
    params = load_params(golden, resident_bytes=0, parts=PARTS)
    save(tmp_path, golden.config, params, shard_bytes)
    again = Checkpoint(tmp_path)
    assert again.config == golden.config
    assert_same_bytes(golden, again)
    sizes = [os.path.getsize(path) for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == (12 if shard_bytes else 1)
    assert max(sizes) < (shard_bytes or 3e6) + 20_000


def test_dense_leaves_keep_their_values_through_the_formats(tmp_path):
    golden = Checkpoint(GOLDEN)
    params = load_params(golden, parts=PARTS)
    save(tmp_path / "1", golden.config, params)
    first = Checkpoint(tmp_path / "1")
    again = flatten(load_params(first, parts=PARTS))
    for name, leaf in flatten(params).items():
        assert np.array_equal(again[name], leaf), name
    save(tmp_path / "2", golden.config, load_params(first, parts=PARTS))
    assert_same_bytes(first, Checkpoint(tmp_path / "2"))


def test_a_dense_engram_table_is_stored_in_rows_of_32(tmp_path):
    config = preset("tiny")
    params = random_params(config, np.random.default_rng(0))
    table = np.random.default_rng(1).standard_normal((434, 32)).astype(np.float32)
    table *= 2.0 ** (np.arange(434).reshape(-1, 1) % 100 - 50)  # neighbours share no scale
    params["layers"][1]["engram"]["embed"] = {"weight": table}
    save(tmp_path, config, params)
    stored = load_params(Checkpoint(tmp_path))["layers"][1]["engram"]["embed"]
    assert stored["scale"].shape == (434, 1)
    largest = (stored["weight"] & 0x7F).max(axis=1)
    assert (largest >= 0x76).all()  # a row's largest code lies above 224 of 448
    assert np.abs(read_rows(stored, np.arange(434).reshape(-1, 1)) / table - 1).max() < 2**-4


def test_params_in_use_survive_being_overwritten(tmp_path):
    golden = Checkpoint(GOLDEN)
    save(tmp_path, golden.config, load_params(golden, 0, PARTS))
    mapped = load_params(Checkpoint(tmp_path), 0, PARTS)
    before = mapped["layers"][0]["attn"]["wq_a"]["weight"].dense()
    mapped["norm"]["weight"] = np.full(64, 2, np.float32)
    save(tmp_path, golden.config, mapped)
    assert np.array_equal(mapped["layers"][0]["attn"]["wq_a"]["weight"].dense(), before)
    again = load_params(Checkpoint(tmp_path))
    assert (again["norm"]["weight"] == 2).all()
    assert np.array_equal(again["layers"][0]["attn"]["wq_a"]["weight"], before)


def test_params_of_another_model_are_refused_before_anything_is_written(tmp_path):
    golden = Checkpoint(GOLDEN)
    leaves = flatten(load_params(golden, parts=PARTS))
    del leaves["head.weight"], leaves["layers.4.engram.embed.scale"]
    leaves["norm.weight"] = np.ones(32, np.float32)
    leaves["layers.0.attn.wq_a.scale"] = np.ones((3, 2), np.uint8)
    leaves["embed.weight"] = encode_bf16(leaves["embed.weight"])
    with pytest.raises(ValueError) as caught:
        save(tmp_path / "d", golden.config, nest(leaves))
    for problem in (
        "layers.0.attn.wq_a.scale is no leaf of this model",
        "head.weight is missing",
        "layers.4.engram.embed.scale is missing",
        "norm.weight has shape [32], expected [64]",
        "embed.weight has type uint16, expected floating",
    ):
        assert problem in str(caught.value)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("shard_bytes", [None, 200_000])
def test_a_failed_save_leaves_nothing_that_opens(shard_bytes, tmp_path):
    golden = Checkpoint(GOLDEN)
    params = load_params(golden, parts=PARTS)
    params["layers"][7]["ffn"]["experts"][2]["w3"]["weight"][3, 4] = np.inf
    with pytest.raises(ValueError, match=r"7\.ffn\.experts\.2\.w3\.weight: .* inf at \(3, 4\)"):
        save(tmp_path, golden.config, params, shard_bytes)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError):
        Checkpoint(tmp_path)


def test_the_index_is_written_last(tmp_path, monkeypatch):
    golden = Checkpoint(GOLDEN)
    written = []
    replace = os.replace

    def spy(source, target):
        written.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    save(tmp_path, golden.config, load_params(golden, 0, PARTS), shard_bytes=500_000)
    assert written[0] == "model-00001-of-00005.safetensors"
    assert written[-2:] == ["config.json", "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(golden.entry(n).nbytes for n in golden.names)
    with pytest.raises(ValueError, match=r"index\.json: exists; a second layout"):
        save(tmp_path, golden.config, load_params(golden, 0, PARTS))
