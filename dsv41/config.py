"""Which model is it?

`Config` holds the released config.json under its own field names: text_config flattened,
vision_config nested. A released file is read unchanged and checked once, here; nothing later asks
whether a size makes sense. `Config.plan` says which layer does what (plan.py); presets.py has the
released sizes.

Source: config.json of the release. Fields that the text model does not read (dropout, cache flags)
are kept in `source` and otherwise ignored; fields that would make it another model are refused.
Left out: V4's config, which has other layer kinds.
"""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from .plan import build_plan, check_config


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: stretch wavelengths beyond original_max_position_embeddings by `factor`."""

    original_max_position_embeddings: int
    factor: float
    beta_fast: float
    beta_slow: float
    type: str = "yarn"


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's sizes; read and written, used where images are."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class Config:
    """The released fields, by their released names. Build it with `Config.load` or a preset."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple
    kv_source_layer_ids: tuple
    index_source_layer_ids: tuple
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple = ()
    engram_num_embeddings: tuple = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16_000_000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99_092
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128_799
    dspark_target_layer_ids: tuple = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    max_position_embeddings: int = 1_048_576
    initializer_range: float = 0.02
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    vision_config: VisionConfig | None = None
    source: dict = field(default_factory=dict, repr=False, compare=False)  # the JSON as read

    def __post_init__(self):
        check_config(self)

    @classmethod
    def load(cls, path):
        """Read a released config.json, or the one in a checkpoint directory."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"config: no file {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {path} is not JSON ({error})") from None
        if not isinstance(raw, dict):
            raise ValueError(f"config: {path} must hold one JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw):
        """raw: the released nested dict. Raises ValueError naming a missing or impossible field."""
        if raw.get("model_type") != "deepseek_v41":
            raise ValueError(f"model_type: expected 'deepseek_v41', got {raw.get('model_type')!r}")
        text = _object(raw.get("text_config", {}), "text_config")
        flat = {**text, **_only(_TOP_LEVEL, raw)}
        for name, expected in _FIXED.items():
            if flat.get(name, expected) != expected:
                raise ValueError(f"{name}: this model has {expected!r}, got {flat[name]!r}")
        for name, expected in _QUANTIZATION.items():
            got = (raw.get("quantization_config") or {}).get(name, expected)
            if got != expected:
                raise ValueError(f"quantization_config.{name}: expected {expected!r}, got {got!r}")
        values = _read(cls, flat, "text_config")
        values["rope_scaling"] = RopeScaling(
            **_read(RopeScaling, values["rope_scaling"], "rope_scaling")
        )
        if values["rope_scaling"].type != "yarn":
            raise ValueError(
                f"rope_scaling: type yarn expected, got {values['rope_scaling'].type!r}"
            )
        if raw.get("vision_config"):
            values["vision_config"] = VisionConfig(
                **_read(VisionConfig, raw["vision_config"], "vision_config")
            )
        return cls(**values, source=raw)

    def but(self, **changes):
        """A copy with some fields changed: `config.but(sliding_window=4)`."""
        return replace(self, source={}, **changes)

    @cached_property
    def plan(self):
        """tuple of `plan.Layer`, one per decoder block."""
        return build_plan(self)

    def to_dict(self):
        """The released nested layout; `Config.from_dict(c.to_dict()) == c`."""
        values = {k: v for k, v in asdict(self).items() if k != "source"}
        vision = values.pop("vision_config")
        top = {name: values.pop(name) for name in _TOP_LEVEL}
        out = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            **top,
            "quantization_config": _QUANTIZATION,
            "text_config": {**_FIXED, **values},
        }
        return {**out, "vision_config": vision} if vision else out


_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
# facts that the code relies on; a config that says otherwise describes another model
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def _only(names, values):
    return {name: values[name] for name in names if name in values}


def _object(values, where):
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
    return values


def _read(cls, values, where):
    """The fields of dataclass `cls` out of a JSON object, lists as tuples; missing ones named."""
    values = _object(values, where)
    known = [f for f in fields(cls) if f.name not in ("source", "vision_config")]
    needed = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    found = _only([f.name for f in known], values)
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
