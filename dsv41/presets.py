"""Which sizes does the released model have, and which are small enough to read a whole trace of?

"v4.1-flash" is text_config and vision_config of the release, 552 billion parameters. "tiny" has
nine layers and every mechanism of the real plan: two window-only layers, two ratio-2 sources with
a Reuse layer, a ratio-1 decoder whose first layer publishes a pool and whose third reindexes in
it, two Engram modules, four streams. It is the config of the reference data in tests/golden.
"mini" is the real plan in twelve layers, for training on one GPU (data/runs/mini/run.json).
"""

from .config import Config, RopeScaling, VisionConfig


def preset(name):
    """The Config called `name`: "v4.1-flash", "tiny" or "mini"."""
    try:
        return _PRESETS[name]()
    except KeyError:
        raise ValueError(f"preset: expected one of {', '.join(_PRESETS)}, got {name!r}") from None


def _v41_flash():
    return Config(
        vocab_size=129_280,
        hidden_size=5120,
        moe_intermediate_size=2304,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        rope_theta=10_000,
        compress_rope_theta=160_000,
        rope_scaling=RopeScaling(65_536, factor=16, beta_fast=32, beta_slow=1),
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=6,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        sliding_window=128,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20, 0, 0, 0),
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384_006_168, 384_016_682),
        num_nextn_predict_layers=3,
        dspark_target_layer_ids=(37, 38, 39),
        image_token_id=129_264,
        vision_config=VisionConfig(
            num_hidden_layers=32,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=2816,
            patch_size=14,
            rope_theta=10_000.0,
            downsample_ratio=3,
            max_image_tokens=1024,
            min_pixels=295_936,
        ),
    )


def _tiny():
    """Nine layers, every mechanism, small enough to read a whole trace of it."""
    return _v41_flash().but(
        vocab_size=288,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=9,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=96,
        o_lora_rank=32,
        o_groups=2,
        swiglu_limit=1.0,
        rope_scaling=RopeScaling(4096, factor=16, beta_fast=32, beta_slow=1),
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 5),
        index_source_layer_ids=(2, 4, 5, 7),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=6,
        candidate_source_layer_id=5,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=(434, 606),
        engram_vocab_size=61,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=106,
        dspark_block_size=4,
        dspark_noise_token_id=281,
        dspark_target_layer_ids=(6, 7, 8),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=282,
        vision_config=VisionConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=48,
            patch_size=4,
            rope_theta=10_000.0,
            downsample_ratio=3,
            max_image_tokens=64,
            min_pixels=256,
        ),
    )


def _mini():
    """Twelve layers, small enough to be trained on text: the real plan in miniature."""
    return _tiny().but(
        vocab_size=4096,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=8,
        o_lora_rank=64,
        swiglu_limit=10.0,
        n_routed_experts=16,
        sliding_window=64,
        compress_ratios=(0, 0, 2, 2, 2, 2, *[1] * 6, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8, 10),
        index_topk=64,
        candidate_source_layer_id=6,
        candidate_topk_blocks=64,
        candidate_block_size=8,
        engram_num_embeddings=(24_562, 25_586),
        engram_vocab_size=2000,
        engram_n_heads=4,
        engram_compressed_vocab_size=3111,
        dspark_block_size=5,
        dspark_noise_token_id=9,
        dspark_target_layer_ids=(9, 10, 11),
        image_token_id=8,
        max_position_embeddings=65_536,
        vision_config=None,
    )


_PRESETS = {"v4.1-flash": _v41_flash, "tiny": _tiny, "mini": _mini}
