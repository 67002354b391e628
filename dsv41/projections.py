"""How do 5120 channels become 64 queries of 512, and 64 outputs become 5120 again, cheaply?

Both ways go through a narrow waist. Queries: a shared low-rank latent that the indexer reads too,

    c_q = RMSNorm(x Wqa)        q = c_q Wqb          (no norm per head, unlike V4)

Output: the heads are split into groups of neighbours; each group of H/G heads is projected to O
channels on its own, and one matrix mixes the G * O results:

    z_g = o_g Wa_g              y = [z_1 .. z_G] Wb

In the release Wa is used with bf16 activations, Wb with FP8 ones. Source: Attention.forward in
inference/model.py.
"""

import numpy as np

from .dispatch import op
from .formats import contiguous
from .ops import dense, linear, linear_fp8, rmsnorm


@op
def low_rank_queries(x, p, config, numerics):
    """x (T, D) f32, p the "attn" parameters -> c_q (T, Q) f32 and q (T, H, C) f32, not rotated."""
    c_q = linear_fp8(x, p["wq_a"]["weight"], numerics)
    c_q = rmsnorm(c_q, p["q_norm"]["weight"], config.rms_norm_eps, numerics)
    q = linear_fp8(c_q, p["wq_b"]["weight"], numerics)
    return c_q, q.reshape(-1, config.num_attention_heads, config.head_dim)


@op
def grouped_output(o, p, config, numerics):
    """o (T, H, C) f32, p the "attn" parameters -> y (T, D) f32."""
    tokens, heads, channels = o.shape
    groups = config.o_groups
    o = o.reshape(tokens, groups, heads // groups * channels)  # neighbouring heads together
    wo_a = dense(p["wo_a"]["weight"]).reshape(groups, config.o_lora_rank, -1)
    z = [linear(contiguous(o[:, g]), wo_a[g], numerics) for g in range(groups)]
    return linear_fp8(np.concatenate(z, axis=1), p["wo_b"]["weight"], numerics)
