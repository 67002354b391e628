"""A directory that lies is refused for the right reason; leaves mean what their formats say."""

import json
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from reference import GOLDEN

from dsv41 import checkpoint as module
from dsv41.checkpoint import Bf16Weight, Checkpoint, inventory, load_params, open_tensors
from dsv41.formats import decode_bf16, encode_bf16
from dsv41.ops import dense
from dsv41.presets import preset
from dsv41.quant import QuantizedWeight, dequantize_tiles
from dsv41.safetensors import write_tensors
from dsv41.tensors import PARTS, dense_bytes, expected_tensors, flatten, nest, part_of

# which tensors there are


def test_expected_tensors_are_those_of_the_reference_checkpoint():
    checkpoint = Checkpoint(GOLDEN)
    found = {name: checkpoint.entry(name) for name in checkpoint.names}
    expected = checkpoint.expected
    assert len(found) == 938
    assert {n: (s.shape, s.dtype) for n, s in expected.items()} == {
        n: (e.shape, e.dtype) for n, e in found.items()
    }
    assert checkpoint.extra == ()
    checkpoint.check()


def test_expected_tensors_of_the_released_model():
    expected = expected_tensors(preset("v4.1-flash"))
    parts = [part_of(name) for name in expected]
    assert parts.count("text") == 40 * 2334 + 11 + 32 + 12 + 3 == 93_418
    shapes = {
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_a.scale": (256, 128),
        "layers.39.ffn.experts.383.w2.weight": (5120, 1152),
        "layers.39.ffn.experts.383.w2.scale": (5120, 72),
        "layers.14.engram.embed.scale": (384_016_682, 8),
        "layers.1.engram.wkv.weight": (25_600, 6144),
        "layers.36.attn.indexer.wq_b.scale": (128, 40),
        "layers.7.hc_ffn_fn": (24, 20_480),
        "mtp.0.main_proj.scale": (160, 480),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
        "aligner.w1.weight": (5120, 9216),
        "vision.blocks.31.mlp.w1.weight": (5632, 1024),
    }
    assert {name: expected[name].shape for name in shapes} == shapes
    assert expected["layers.0.ffn.experts.0.w1.weight"].logical_shape == (2304, 5120)
    gates = [name for name in expected if name.endswith("compressor.wgate.weight")]
    assert gates == [f"layers.{i}.attn.compressor.wgate.weight" for i in (2, 8, 14)]
    queries = [n.split(".")[1] for n in expected if n.endswith("indexer.wq_b.weight")]
    assert queries == ["2", "8", "14", "20", "24", "28", "32", "36"]


def test_expected_tensors_follow_the_config():
    tiny = preset("tiny")
    ratios = tiny.compress_ratios[: tiny.num_hidden_layers]
    blind = expected_tensors(tiny.but(vision_config=None))
    assert set(expected_tensors(tiny)) - set(blind) == {
        name
        for name in expected_tensors(tiny)
        if part_of(name) == "vision" or name.endswith("bias_vl")
    }
    no_draft = expected_tensors(tiny.but(num_nextn_predict_layers=0, compress_ratios=ratios))
    assert not any(part_of(name) == "dspark" for name in no_draft)
    one_stage = expected_tensors(tiny.but(num_nextn_predict_layers=1, compress_ratios=ratios))
    assert {"mtp.0.main_proj.weight", "mtp.0.norm.weight"} <= set(one_stage)
    lonely = expected_tensors(tiny.but(n_shared_experts=0))
    assert not any("shared_experts" in name for name in lonely)


def test_nest_spells_names_and_flatten_undoes_it():
    leaves = {"layers.2.attn.wq_a.weight": 1, "layers.10.hc_attn_fn": 2, "image_end": 3}
    params = nest(leaves)
    assert params["layers"][2]["attn"]["wq_a"]["weight"] == 1
    assert list(params["layers"]) == [2, 10]
    assert flatten(params) == leaves


# directories


def golden_copy(directory, **patches):
    """A writable copy of the reference checkpoint; patches: name -> function of its array."""
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "config.json", directory)
    source = Checkpoint(GOLDEN)
    arrays = {name: source.raw(name) for name in source.names}
    specs = {name: (source.entry(name).dtype, source.entry(name).shape) for name in arrays}
    for name, patch in patches.items():
        arrays[name] = patch(arrays[name].copy())
        if arrays[name] is None:
            del arrays[name], specs[name]
        else:
            specs[name] = (specs[name][0], arrays[name].shape)
    write_tensors(directory / "model.safetensors", specs, arrays.get)
    return directory


def poke(position, value):
    def patch(array):
        array[position] = value
        return array

    return patch


def sharded(directory, weight_map, **files):
    """A directory with an index; files: stem -> name -> F32 scalar, one shard each."""
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "config.json", directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for stem, tensors in files.items():
        specs = {name: ("F32", ()) for name in tensors}
        write_tensors(
            directory / f"{stem}.safetensors", specs, lambda n, t=tensors: np.array(t[n], "f4")
        )
    return directory


def test_an_index_finds_its_shards(tmp_path):
    directory = sharded(
        tmp_path / "d", {"a": "s.safetensors", "b": "t.safetensors"}, s={"a": 1}, t={"b": 2, "c": 3}
    )
    checkpoint = Checkpoint(directory)
    assert checkpoint.names == ("a", "b")
    assert checkpoint.raw("b") == 2
    assert checkpoint.entry("b").file.endswith("t.safetensors")
    with pytest.raises(ValueError, match="no tensor 'c'"):
        checkpoint.raw("c")


@pytest.mark.parametrize("kind", ["..", "inner ..", "absolute", "link", "linked folder"])
def test_an_index_cannot_lead_out_of_its_directory(kind, tmp_path):
    sharded(tmp_path / "outside", {}, s={"a": 1})
    directory = sharded(tmp_path / "d", {})
    (directory / "link.safetensors").symlink_to(tmp_path / "outside" / "s.safetensors")
    (directory / "folder").symlink_to(tmp_path / "outside")
    shard = {
        "..": "../outside/s.safetensors",
        "inner ..": "folder/../outside/s.safetensors",
        "absolute": str(tmp_path / "outside" / "s.safetensors"),
        "link": "link.safetensors",
        "linked folder": "folder/s.safetensors",
    }[kind]
    sharded(directory, {"a": shard})
    with pytest.raises(ValueError, match="lies outside the directory"):
        Checkpoint(directory)


def test_a_hugging_face_snapshot_may_link_to_its_blobs(tmp_path):
    (tmp_path / "snapshots").mkdir()
    directory = sharded(tmp_path / "snapshots" / "1f2e", {"a": "s.safetensors"}, s={"a": 7})
    (tmp_path / "blobs").mkdir()
    shutil.move(directory / "s.safetensors", tmp_path / "blobs" / "c0ffee")
    (directory / "s.safetensors").symlink_to("../../blobs/c0ffee")
    assert Checkpoint(directory).raw("a") == 7
    with pytest.raises(ValueError, match="lies outside"):  # an index may not spell that way itself
        Checkpoint(sharded(directory, {"a": "../../blobs/c0ffee"}))


def test_a_directory_must_hold_what_it_promises(tmp_path):
    with pytest.raises(ValueError, match=r"missing shards: t\.safetensors; u\.safetensors"):
        names = {"a": "s.safetensors", "b": "t.safetensors", "c": "u.safetensors"}
        Checkpoint(sharded(tmp_path / "1", names, s={"a": 1}))
    with pytest.raises(ValueError, match=r"b is not in s\.safetensors"):
        names = {"a": "s.safetensors", "b": "s.safetensors"}
        Checkpoint(sharded(tmp_path / "2", names, s={"a": 1}))
    with pytest.raises(ValueError, match="weight_map must map"):
        Checkpoint(sharded(tmp_path / "3", {"a": ["s.safetensors"]}))
    with pytest.raises(ValueError, match="which one is meant"):
        Checkpoint(sharded(tmp_path / "4", {}, model={"a": 1}))
    with pytest.raises(ValueError, match=r"neither .* pickles are never opened"):
        (tmp_path / "5").mkdir()
        (tmp_path / "5" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
        open_tensors(tmp_path / "5")
    with pytest.raises(ValueError, match="no file"):
        Checkpoint(tmp_path / "nowhere")


def test_a_truncated_shard_is_named(tmp_path):
    directory = sharded(tmp_path / "d", {"a": "s.safetensors"}, s={"a": 1})
    data = (directory / "s.safetensors").read_bytes()
    (directory / "s.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"s\.safetensors: tensor 'a': ends at byte 4"):
        Checkpoint(directory)


def test_one_error_lists_what_does_not_fit_the_config(tmp_path):
    patches = {
        "embed.weight": lambda array: None,
        "layers.0.attn.wq_a.scale": lambda array: array[:1, :1].copy(),  # tiles of 128 x 128
        "layers.8.ffn.gate.bias": lambda array: array[:4].copy(),
    }
    checkpoint = Checkpoint(golden_copy(tmp_path / "d", **patches))
    with pytest.raises(ValueError) as caught:
        load_params(checkpoint)
    assert "embed.weight is missing" in str(caught.value)
    assert "wq_a.scale is F8_E8M0 [1, 1], expected F8_E8M0 [3, 2]" in str(caught.value)
    assert "layers.8.ffn.gate.bias is F32 [4], expected F32 [8]" in str(caught.value)


def test_a_long_list_of_problems_is_cut(tmp_path):
    patches = dict.fromkeys([f"layers.{i}.attn_norm.weight" for i in range(9)], lambda array: None)
    with pytest.raises(ValueError, match=r"layers\.4\.attn_norm\.weight is missing; and 4 more"):
        Checkpoint(golden_copy(tmp_path / "d", **patches)).check()


def test_a_wrong_type_is_a_problem_and_a_missing_vision_tower_only_where_it_is_used(tmp_path):
    directory = sharded(tmp_path / "d", {"norm.weight": "s.safetensors"}, s={"norm.weight": 1})
    with pytest.raises(ValueError, match=r"embed\.weight is missing"):
        Checkpoint(directory).check()
    blind = golden_copy(tmp_path / "blind", **{"vision.norm.weight": lambda array: None})
    assert "embed" in load_params(Checkpoint(blind))
    with pytest.raises(ValueError, match=r"vision\.norm\.weight is missing"):
        load_params(Checkpoint(blind), parts=("text", "vision"))
    as_int = golden_copy(tmp_path / "int")
    data = (as_int / "model.safetensors").read_bytes()
    assert b'"layers.0.hc_attn_scale":{"dtype":"F32"' in data
    old, new = (
        b'"layers.0.hc_attn_scale":{"dtype":"F32"',
        b'"layers.0.hc_attn_scale":{"dtype":"I32"',
    )
    (as_int / "model.safetensors").write_bytes(data.replace(old, new))
    with pytest.raises(ValueError, match=r"hc_attn_scale is I32 \[3\], expected F32 \[3\]"):
        Checkpoint(as_int).check()


def test_extra_tensors_are_told_not_refused(tmp_path):
    directory = golden_copy(tmp_path / "d")
    config = json.loads((directory / "config.json").read_text())
    del config["vision_config"]
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(directory)
    checkpoint.check()
    assert "layers.0.ffn.gate.bias_vl" in checkpoint.extra
    assert "vision.norm.weight" in checkpoint.extra
    assert "bias_vl" not in load_params(checkpoint)["layers"][0]["ffn"]["gate"]


# params


@pytest.mark.parametrize(
    ("name", "patch", "says"),
    [
        ("layers.2.attn.wkv.scale", poke((1, 0), 255), r"wkv\.weight: weight is nan at \(32, 0\)"),
        ("layers.2.attn.wkv.weight", poke((5, 7), 0x7F), r"wkv\.weight: .* nan at \(5, 7\)"),
        ("layers.2.attn.wkv.weight", poke((5, 8), 0xFF), r"wkv\.weight: .* nan at \(5, 8\)"),
        ("mtp.0.ffn.experts.3.w2.scale", poke((9, 1), 255), r"w2\.weight: .* nan at \(9, 32\)"),
        ("embed.weight", poke((281, 3), 0x7FC0), r"embed\.weight: .* nan at \(281, 3\)"),
        ("norm.weight", poke(63, 0xFF80), r"norm\.weight: weight is -inf at \(63,\)"),
        ("layers.1.hc_attn_fn", poke((2, 255), np.nan), r"hc_attn_fn: .* nan at \(2, 255\)"),
    ],
)
def test_a_stored_nan_is_named_with_its_position(name, patch, says, tmp_path):
    directory = golden_copy(tmp_path / "d", **{name: patch})
    with pytest.raises(ValueError, match=says):
        load_params(Checkpoint(directory), parts=("text", "dspark"))
    if "hc" not in name and name != "norm.weight":  # codes on disk speak up when they are used
        leaves = flatten(load_params(Checkpoint(directory), 0, ("text", "dspark")))
        with pytest.raises(ValueError, match=says):
            leaves[name.replace("scale", "weight")].dense()


def test_resident_and_stored_leaves_mean_the_same_numbers():
    checkpoint = Checkpoint(GOLDEN)
    size = dense_bytes(checkpoint.config)
    resident = flatten(load_params(checkpoint, size, PARTS))
    stored = flatten(load_params(checkpoint, size - 1, PARTS))
    assert list(resident) == list(stored)
    kinds = {type(leaf) for leaf in stored.values()}
    assert kinds == {np.ndarray, QuantizedWeight, Bf16Weight}
    for name, leaf in stored.items():
        assert resident[name].shape == leaf.shape == checkpoint.expected[name].logical_shape, name
        assert np.array_equal(dense(leaf), resident[name]), name
        assert isinstance(leaf, np.ndarray) or len(leaf.shape) == 2, name
        assert not isinstance(leaf, QuantizedWeight) or leaf.codes.dtype == np.uint8, name
        if part_of(name) == "text" and "engram.embed" not in name:
            size -= resident[name].nbytes
            assert resident[name].dtype == np.float32
    assert size == 0


def test_leaves_are_decoded_as_their_formats_say():
    checkpoint = Checkpoint(GOLDEN)
    params = load_params(checkpoint)
    assert set(params) == {"embed", "layers", "norm", "head"}
    assert sorted(params["layers"]) == list(range(9))
    assert np.array_equal(params["norm"]["weight"], decode_bf16(checkpoint.raw("norm.weight")))
    codes = checkpoint.raw("layers.3.ffn.experts.7.w2.weight").view(np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scale = 2.0 ** (checkpoint.raw("layers.3.ffn.experts.7.w2.scale").astype(int) - 127)
    weight = params["layers"][3]["ffn"]["experts"][7]["w2"]["weight"]
    assert weight[10, 40] == table[codes[10, 20] & 15] * scale[10, 1]
    assert weight[10, 41] == table[codes[10, 20] >> 4] * scale[10, 1]


def test_scales_belong_to_tiles_of_32():
    codes = np.full((33, 65), 0x38, np.uint8)  # ones
    scales = np.array([[127, 128, 129], [130, 131, 132]], np.uint8)
    values = dequantize_tiles(codes, scales)
    assert [values[at] for at in ((31, 63), (0, 64), (32, 64))] == [2, 4, 32]
    assert values.sum() == 4000
    with pytest.raises(ValueError, match="scales"):
        dequantize_tiles(codes, np.array([[127]], np.uint8))  # the grid of 128x128 tiles


def test_engram_tables_stay_on_disk():
    for resident_bytes in (0, 2 << 30):
        table = load_params(Checkpoint(GOLDEN), resident_bytes)["layers"][4]["engram"]["embed"]
        assert {key: (x.shape, x.dtype.name) for key, x in table.items()} == {
            "weight": ((606, 32), "uint8"),
            "scale": ((606, 1), "uint8"),
        }
        root = table["weight"]
        while isinstance(root.base, np.ndarray):
            root = root.base
        assert isinstance(root, np.memmap)
        assert not table["weight"].flags.writeable


def test_rows_of_a_stored_matrix():
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    weight = Bf16Weight(encode_bf16(values), "embed.weight")
    assert weight.rows(np.array([3, 0, 3])).tolist() == values[[3, 0, 3]].tolist()
    weight.codes[2, 1] = 0x7FC0
    assert weight.rows(np.array([1]))[0, 0] == 3
    with pytest.raises(ValueError, match=r"embed\.weight .*nan at \(1, 1\)"):
        weight.rows(np.array([0, 2]))


def test_parts_are_chosen_by_name():
    params = load_params(Checkpoint(GOLDEN), parts=("dspark",))
    assert set(params) == {"mtp"}
    with pytest.raises(ValueError, match="parts: expected some of text, dspark, vision"):
        load_params(Checkpoint(GOLDEN), parts=("text", "images"))


# size


def test_a_huge_file_costs_only_what_is_read_of_it(tmp_path):
    """44 GB of zeros that no disk block backs, one Engram row and one norm written into them."""
    config = preset("tiny").but(engram_num_embeddings=(1_000_000_000, 333_000_000))
    expected = expected_tensors(config)
    header, end = {}, 0
    for name, spec in expected.items():
        offsets = [end, end + spec.nbytes]
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        end += spec.nbytes
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    row = np.arange(32, dtype=np.uint8)
    with open(tmp_path / "model.safetensors", "wb") as out:
        out.write(head)
        out.truncate(len(head) + end)
        table_end = header["layers.1.engram.embed.weight"]["data_offsets"][1]
        out.seek(len(head) + table_end - 32)
        out.write(row.tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entry("layers.1.engram.embed.weight").nbytes == 32_000_000_000
    table = load_params(checkpoint)["layers"][1]["engram"]["embed"]
    assert np.array_equal(table["weight"][-1], row)
    assert np.array_equal(checkpoint.raw("layers.1.engram.embed.weight")[999_999_999], row)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 200_000


def test_inventory_adds_up_to_the_files():
    checkpoint = Checkpoint(GOLDEN)
    rows = inventory(checkpoint)
    assert sum(count for _, count, _, _ in rows) == 938
    assert sum(size for *_, size in rows) == sum(
        checkpoint.entry(n).nbytes for n in checkpoint.names
    )
    assert ("Engram tables", 2, "F8_E4M3", (434 + 606) * 32) in rows
    assert ("routed experts", 9 * 8 * 3, "I8", 9 * 8 * 3 * 64 * 32) in rows
    assert ("embedding and head", 2, "BF16", 2 * 288 * 64 * 2) in rows
    assert not any(group == "other" for group, *_ in rows)
    assert [size for *_, size in rows] == sorted((size for *_, size in rows), reverse=True)


def test_nothing_here_can_unpickle():
    for name in ("checkpoint", "safetensors", "save", "tensors"):
        source = (Path(module.__file__).parent / f"{name}.py").read_text()
        assert "import pickle" not in source and "np.load" not in source
