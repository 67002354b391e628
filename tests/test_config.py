"""The released file is read as it is, and a file of another or an impossible model is refused."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import oracles
import pytest

from dsv41.config import Config
from dsv41.presets import preset

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a" / "config.json"

# config.json of the release, as published
RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "transformers_version": "5.6.0",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "original_max_position_embeddings": 65536,
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def golden():
    return json.loads(GOLDEN.read_text())


def changed(path, value):
    """The golden file's dict with one entry, "section.key" or "key", set."""
    raw = golden()
    *sections, key = path.split(".")
    inner = raw
    for section in sections:
        inner = inner[section]
    inner[key] = value
    return raw


# ---- files that are this model ----------------------------------------------------------------


def test_the_released_file_is_the_released_preset():
    config = Config.from_dict(copy.deepcopy(RELEASED))
    assert config == preset("v4.1-flash")
    assert config.source == RELEASED, "the file as read is kept"
    assert isinstance(config.compress_ratios, tuple) and len(config.compress_ratios) == 43


def test_the_golden_file_is_the_tiny_preset():
    for path in (GOLDEN, GOLDEN.parent, str(GOLDEN)):
        assert Config.load(path) == preset("tiny")


@pytest.mark.parametrize("name", ["v4.1-flash", "tiny"])
def test_a_config_survives_being_written_and_read(name):
    config = preset(name)
    text = json.dumps(config.to_dict())
    assert Config.from_dict(json.loads(text)) == config
    without_images = config.but(vision_config=None)
    assert Config.from_dict(json.loads(json.dumps(without_images.to_dict()))) == without_images


def test_what_is_written_has_the_released_layout():
    written = json.loads(json.dumps(preset("v4.1-flash").to_dict()))
    for section in ("text_config", "vision_config", "quantization_config"):
        for key, value in written[section].items():
            assert RELEASED[section][key] == value, f"{section}.{key}"
    for key in set(written) - {"text_config", "vision_config", "quantization_config"}:
        assert RELEASED[key] == written[key], key
    unread = {"attention_dropout", "use_cache"}
    assert set(RELEASED["text_config"]) - set(written["text_config"]) == unread


def test_fields_that_the_text_model_does_not_read_are_kept_and_ignored():
    raw = changed("text_config.somebody_elses_field", [1, 2])
    config = Config.from_dict(raw)
    assert config == preset("tiny")
    assert config.source["text_config"]["somebody_elses_field"] == [1, 2]


def test_the_config_itself_cannot_be_changed_but_a_copy_can():
    config = preset("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 128
    other = config.but(sliding_window=4)
    assert (other.sliding_window, config.sliding_window) == (4, 8)
    assert dataclasses.replace(other, sliding_window=8) == config
    assert other.source == {}, "a changed copy does not claim to be the file"
    assert hash(config) == hash(preset("tiny")) and hash(other) != hash(config)


def test_a_copy_is_checked_like_a_file():
    with pytest.raises(ValueError, match="hidden_size"):
        preset("tiny").but(hidden_size=-1)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"preset: .*v4\.1-flash.*'v5'"):
        preset("v5")


# ---- files that are none ----------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config: .*config\.json"):
        Config.load(tmp_path)
    with pytest.raises(ValueError, match=r"config: .*nowhere"):
        Config.load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe\x00", b"[1, 2]", b"null"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config: .*config\.json .*JSON"):
        Config.load(tmp_path)


@pytest.mark.parametrize("value", ["deepseek_v4", "DEEPSEEK_V41", None, 41])
def test_another_model_type_is_refused(value):
    with pytest.raises(ValueError, match=f"model_type: .*deepseek_v41.*{value}"):
        Config.from_dict(changed("model_type", value))


def test_a_file_without_a_model_type_is_refused():
    raw = golden()
    del raw["model_type"]
    with pytest.raises(ValueError, match="model_type"):
        Config.from_dict(raw)


@pytest.mark.parametrize(
    "name, value",
    [
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("num_key_value_heads", 4),
        ("attention_bias", True),
    ],
)
def test_a_fact_that_would_make_it_another_model_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: .*{value}"):
        Config.from_dict(changed(f"text_config.{name}", value))


@pytest.mark.parametrize(
    "path, value",
    [
        ("text_config.rope_scaling.type", "linear"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float32"),
        ("quantization_config.expert_dtype", "fp8"),
    ],
)
def test_another_scaling_or_number_format_is_refused(path, value):
    with pytest.raises(ValueError, match=path.split(".")[-1]):
        Config.from_dict(changed(path, value))


REQUIRED = [
    f.name
    for f in dataclasses.fields(Config)
    if f.default is f.default_factory is dataclasses.MISSING
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name):
    raw = golden()
    del raw["text_config"][name]
    with pytest.raises(ValueError, match=rf"text_config: missing {name}$"):
        Config.from_dict(raw)


def test_all_missing_fields_are_named_at_once():
    raw = golden()
    for name in ("head_dim", "hc_eps"):
        del raw["text_config"][name]
    del raw["text_config"]["rope_scaling"]["factor"]
    with pytest.raises(ValueError, match="text_config: missing head_dim, hc_eps"):
        Config.from_dict(raw)
    raw = golden()
    del raw["text_config"]["rope_scaling"]["factor"]
    with pytest.raises(ValueError, match="rope_scaling: missing factor"):
        Config.from_dict(raw)
    raw = golden()
    del raw["vision_config"]["patch_size"]
    with pytest.raises(ValueError, match="vision_config: missing patch_size"):
        Config.from_dict(raw)
    raw = golden()
    del raw["text_config"]
    with pytest.raises(ValueError, match="text_config: missing vocab_size"):
        Config.from_dict(raw)


@pytest.mark.parametrize("value", [None, 3, "text", [1]])
@pytest.mark.parametrize("section", ["text_config", "text_config.rope_scaling", "vision_config"])
def test_a_section_that_is_no_object_is_named(section, value):
    if section == "vision_config" and value is None:
        assert Config.from_dict(changed(section, None)).vision_config is None
        return
    with pytest.raises(ValueError, match=f"{section.split('.')[-1]}: .*object"):
        Config.from_dict(changed(section, value))


TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
KINDS = {
    int: [None, "7", 1.5, True, -1, [1]],
    float: [None, "7", math.nan, True, -1.0, [1]],
    tuple: [None, "7", 3, [0.5], ["a"]],
}
MAY_BE_NONE = ("image_token_id", "candidate_source_layer_id", "swiglu_limit")
NUMBERS = {
    f.name: values
    for f in dataclasses.fields(Config)
    for kind, values in KINDS.items()
    if f.type in (kind, kind | None)
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name):
    path = name if name in TOP_LEVEL else f"text_config.{name}"
    for value in NUMBERS[name]:
        if value is None and name in MAY_BE_NONE:
            continue
        with pytest.raises(ValueError, match=name):
            Config.from_dict(changed(path, value))
            pytest.fail(f"{name} = {value!r} was accepted")


# ---- models that cannot exist -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes",
    [
        ("qk_rope_head_dim", {"qk_rope_head_dim": 7}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 0}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 96}),  # more than a head has
        ("qk_rope_head_dim", {"qk_rope_head_dim": 48}),  # more than an index head has
        ("o_groups", {"o_groups": 3}),
        ("num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("n_shared_experts", {"n_shared_experts": 2}),
        ("hidden_size", {"hidden_size": 48}),
        ("moe_intermediate_size", {"moe_intermediate_size": 33}),
        ("head_dim", {"head_dim": 80}),
        ("q_lora_rank", {"q_lora_rank": 40}),
        ("index_head_dim", {"index_head_dim": 16}),
        ("o_lora_rank", {"o_lora_rank": 24}),  # 2 groups of 24: the second projection's input
        ("engram_head_dim", {"engram_head_dim": 16}),
        ("engram_max_ngram_size", {"engram_max_ngram_size": 1}),
        ("engram_num_embeddings", {"engram_num_embeddings": (434,)}),
        ("engram_pad_token_id", {"engram_pad_token_id": 288}),
        ("image_token_id", {"image_token_id": 288}),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_together_are_refused_by_name(name, changes):
    with pytest.raises(ValueError, match=name):
        preset("tiny").but(**changes)


def test_the_small_model_of_these_tests_is_possible():
    config = oracles.small_config()
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert [sum(p) for p in oracles.primes_from(config)] == list(config.engram_num_embeddings)
