"""Which tensors does a checkpoint of this model hold?

A tensor's name is the path to it: "layers.2.attn.wq_a.weight" is params["layers"][2]["attn"]
["wq_a"]["weight"]. Shape, element type and block layout follow from the config alone:

    FP8 linear (N, K)   weight E4M3 (N, K)        scale E8M0 (ceil(N/32), ceil(K/32))   "tiles"
    FP4 expert (N, K)   weight I8   (N, K/2)      scale E8M0 (N, K/32)                  "rows"
    Engram table (R, C) weight E4M3 (R, C)        scale E8M0 (R, C/32)                  "table"
    the rest            BF16; mHC, sinks and selection biases F32

Only Full layers carry a compressor (a gate only where two tokens are pooled) and index keys; only
layers that select carry index queries. DSpark's stages, mtp.N, are window-only blocks.
Source: safetensors headers of the release and the modules of its inference/model.py, engram.py and
vision.py.
"""

import math
from dataclasses import dataclass
from itertools import chain

from .quant import TILE
from .safetensors import tensor_bytes

PARTS = ("text", "dspark", "vision")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as stored: `shape` and `dtype` as the file spells them, and the block layout.

    layout: "tiles" or "rows" for the codes of a quantised weight, "scale" for their scales, "table"
    for both tensors of an Engram table, None for plain numbers.
    """

    shape: tuple
    dtype: str
    layout: str | None = None

    @property
    def logical_shape(self):
        """The shape of the numbers meant: two FP4 codes a byte are two numbers."""
        rows = self.layout == "rows"
        return (self.shape[0], 2 * self.shape[1]) if rows else self.shape

    @property
    def nbytes(self):
        return tensor_bytes(self.dtype, self.shape)


def expected_tensors(config):
    """config -> name -> TensorSpec of every tensor, in the order in which the model uses them."""
    return dict(chain(_text(config), _dspark(config), _vision(config)))


def part_of(name):
    """The part of the model that reads tensor `name`: one of PARTS."""
    if name.startswith("mtp."):
        return "dspark"
    return "vision" if name.startswith(("vision.", "aligner.", "image_")) else "text"


def dense_bytes(config):
    """Bytes of the text model as float32 arrays, Engram tables (which stay on disk) left out."""
    return 4 * sum(
        math.prod(spec.logical_shape)
        for name, spec in expected_tensors(config).items()
        if part_of(name) == "text" and spec.layout not in ("scale", "table")
    )


def nest(leaves):
    """{"layers.2.attn_norm.weight": x} -> {"layers": {2: {"attn_norm": {"weight": x}}}}."""
    params = {}
    for name, leaf in leaves.items():
        *path, last = (int(key) if key.isdigit() else key for key in name.split("."))
        branch = params
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return params


def flatten(params, prefix=""):
    """The inverse of `nest`: nested dicts -> dotted name -> leaf."""
    leaves = {}
    for key, value in params.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _text(c):
    yield from _plain("embed.weight", c.vocab_size, c.hidden_size)
    for layer in c.plan:
        yield from _under(f"layers.{layer.index}.", _layer(c, layer))
    yield from _plain("norm.weight", c.hidden_size)
    yield from _plain("head.weight", c.vocab_size, c.hidden_size)


def _layer(c, layer):
    if layer.engram is not None:
        yield from _under("engram.", _engram(c, c.engram_num_embeddings[layer.engram]))
    yield from _block(c, c.n_routed_experts)
    if layer.mode == "full":
        yield from _under("attn.compressor.", _compressor(c, layer.ratio))
    if layer.selects:
        yield from _under("attn.indexer.", _indexer(c, makes_keys=layer.mode == "full"))


def _block(c, experts):
    """What every block has, DSpark's stages included."""
    yield from _mhc(c, "attn")
    yield from _plain("attn_norm.weight", c.hidden_size)
    yield from _under("attn.", _attention(c))
    yield from _mhc(c, "ffn")
    yield from _plain("ffn_norm.weight", c.hidden_size)
    yield from _under("ffn.", _moe(c, experts))


def _mhc(c, sublayer):
    streams = c.hc_mult
    mixes = (2 + streams) * streams  # pre, post and the streams x streams mixing
    yield from _float(f"hc_{sublayer}_fn", mixes, streams * c.hidden_size)
    yield from _float(f"hc_{sublayer}_base", mixes)
    yield from _float(f"hc_{sublayer}_scale", 3)


def _attention(c):
    heads, low_rank = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    yield from _fp8("wq_a", c.q_lora_rank, c.hidden_size)
    yield from _plain("q_norm.weight", c.q_lora_rank)
    yield from _fp8("wq_b", heads, c.q_lora_rank)
    yield from _fp8("wkv", c.head_dim, c.hidden_size)
    yield from _plain("kv_norm.weight", c.head_dim)
    yield from _float("attn_sink", c.num_attention_heads)
    yield from _fp8("wo_a", low_rank, heads // c.o_groups)
    yield from _fp8("wo_b", c.hidden_size, low_rank)


def _compressor(c, ratio):
    yield from _plain("wkv.weight", c.head_dim, c.hidden_size)
    if ratio > 1:  # a group of one token needs no pooling weights
        yield from _plain("wgate.weight", c.head_dim, c.hidden_size)
    yield from _plain("norm.weight", c.head_dim)


def _indexer(c, makes_keys):
    if makes_keys:
        yield from _plain("wk.weight", c.index_head_dim, c.head_dim)
        yield from _plain("k_norm.weight", c.index_head_dim)
    yield from _fp8("wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield from _plain("weights_proj.weight", c.index_n_heads, c.hidden_size)


def _moe(c, experts):
    yield from _plain("gate.weight", experts, c.hidden_size)
    yield from _float("gate.bias", experts)
    if c.vision_config:  # image tokens choose their experts with a bias of their own
        yield from _float("gate.bias_vl", experts)
    for expert in range(experts):
        yield from _under(f"experts.{expert}.", _swiglu(c, _fp4))
    if c.n_shared_experts:
        yield from _under("shared_experts.", _swiglu(c, _fp8))


def _swiglu(c, linear):
    yield from linear("w1", c.moe_intermediate_size, c.hidden_size)
    yield from linear("w3", c.moe_intermediate_size, c.hidden_size)
    yield from linear("w2", c.hidden_size, c.moe_intermediate_size)


def _engram(c, rows):
    width = c.engram_head_dim
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    yield "embed.weight", TensorSpec((rows, width), "F8_E4M3", "table")
    yield "embed.scale", TensorSpec((rows, width // TILE), "F8_E8M0", "table")
    yield from _fp8("wkv", (c.hc_mult + 1) * c.hidden_size, columns * width)
    yield from _plain("q_weight", c.hc_mult, c.hidden_size)
    yield from _plain("k_weight", c.hc_mult, c.hidden_size)


def _dspark(c):
    stages = range(c.num_nextn_predict_layers)
    for stage in stages:
        yield from _under(f"mtp.{stage}.", _block(c, c.dspark_n_routed_experts))
    if stages:
        yield from _under("mtp.0.", _draft_input(c))
        yield from _under(f"mtp.{stages[-1]}.", _draft_output(c))


def _draft_input(c):
    yield from _fp8("main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
    yield from _plain("main_norm.weight", c.hidden_size)


def _draft_output(c):
    yield from _plain("norm.weight", c.hidden_size)
    yield from _plain("markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
    yield from _plain("markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
    yield from _plain("confidence_head.proj.weight", 1, c.hidden_size + c.dspark_markov_rank)


def _vision(c):
    v = c.vision_config
    if not v:
        return
    yield from _biased("vision.patch_embed.proj", v.hidden_size, 3 * v.patch_size**2)
    for block in range(v.num_hidden_layers):
        yield from _under(f"vision.blocks.{block}.", _vision_block(v))
    yield from _plain("vision.norm.weight", v.hidden_size)
    yield from _biased("aligner.w1", c.hidden_size, v.hidden_size * v.downsample_ratio**2)
    yield from _biased("aligner.w2", c.hidden_size, c.hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        yield from _plain(name, c.hidden_size)


def _vision_block(v):
    yield from _plain("norm1.weight", v.hidden_size)
    yield from _biased("attn.wqkv", 3 * v.hidden_size, v.hidden_size)
    yield from _biased("attn.wo", v.hidden_size, v.hidden_size)
    yield from _plain("norm2.weight", v.hidden_size)
    yield from _plain("mlp.w1.weight", 2 * v.intermediate_size, v.hidden_size)
    yield from _plain("mlp.w2.weight", v.hidden_size, v.intermediate_size)


def _under(prefix, tensors):
    return ((prefix + name, spec) for name, spec in tensors)


def _plain(name, *shape):
    yield name, TensorSpec(shape, "BF16")


def _float(name, *shape):
    yield name, TensorSpec(shape, "F32")


def _biased(name, n, k):
    yield from _plain(f"{name}.weight", n, k)
    yield from _plain(f"{name}.bias", n)


def _fp8(name, n, k):
    grid = (math.ceil(n / TILE), math.ceil(k / TILE))
    yield f"{name}.weight", TensorSpec((n, k), "F8_E4M3", "tiles")
    yield f"{name}.scale", TensorSpec(grid, "F8_E8M0", "scale")


def _fp4(name, n, k):
    yield f"{name}.weight", TensorSpec((n, k // 2), "I8", "rows")
    yield f"{name}.scale", TensorSpec((n, k // TILE), "F8_E8M0", "scale")
