"""With which numbers does an untrained model start?

A linear W (N, K) is drawn with standard deviation K^-1/2, so that an input of size 1 gives an
output of size 1; norms start at 1 and embeddings at size 1. The final norm and the head then give
logits with standard deviation about 1, whatever the depth. The mHC projections start small, so that
a stream's mixing weights depend mostly on `base`, which is random: four equal streams would stay
equal. Every tensor gets some noise, norms included, so that no formula can lose a factor of 1
without a test seeing it.

Source: the usual fan-in rule (He et al. 2015, section 2.2, without the factor for ReLU). Left out:
the report's own initialisation, of which only a standard deviation of 0.02 is published.
"""

import numpy as np

from .quant import WEIGHT_FP8
from .tensors import expected_tensors, nest


def random_params(config, rng):
    """config, np.random.Generator -> params of every part, nested as `load_params` nests them.

    Leaves are dense float32; Engram's embed is uint8 codes and scales, as it is when loaded.
    """
    leaves = {}
    for name, spec in expected_tensors(config).items():
        if spec.layout == "table" and name.endswith("weight"):
            scale = name.removesuffix("weight") + "scale"
            leaves[name], leaves[scale] = WEIGHT_FP8.quantize(_normal(rng, spec.shape))
        elif spec.layout not in ("table", "scale"):
            leaves[name] = _draw(name, spec.logical_shape, rng)
    return nest(leaves)


def _draw(name, shape, rng):
    """One tensor, by what its name says it is for; shape f32."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):  # Engram's are norms of query and key
        return 1 + _normal(rng, shape, std=0.1)
    if leaf in ("hc_attn_scale", "hc_ffn_scale"):
        return rng.uniform(0.5, 1, shape).astype(np.float32)
    if leaf in ("hc_attn_fn", "hc_ffn_fn"):
        return _normal(rng, shape, std=0.3 * shape[-1] ** -0.5)
    if leaf in ("bias", "bias_vl"):
        return _normal(rng, shape, std=0.1)
    is_lookup = leaf == "embed" or len(shape) == 1  # rows, sinks, mHC bases, image delimiters
    return _normal(rng, shape, std=1 if is_lookup else shape[-1] ** -0.5)


def _normal(rng, shape, std=1.0):
    return rng.standard_normal(shape, np.float32) * np.float32(std)
