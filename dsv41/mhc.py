"""How do four residual streams meet one sublayer? (manifold-constrained hyper-connections)

Before every sublayer, attention or MoE, the flattened streams v = X (S*D values) predict 24 numbers
u = fn v / rms(v), which become three sets of coefficients:

    pre  A_i = sigmoid(u) + eps            how much of stream i the NEXT sublayer reads
    post C_k = 2 sigmoid(u)                how much of this sublayer's output goes to stream k
    comb B   = sinkhorn(u as 4x4)          how the old streams flow into the new ones

    x  = sum_i A_i X_i                     collapse, with the A of the sublayer before
    X' = C_k y + sum_j B[j, k] X_j         update

Single-Pass mHC (V4.1): only `pre` is delayed by one sublayer, so one pass over the streams can
update them and predict what the next sublayer needs. The very first A is (1, 0, 0, 0); the last
one collapses the streams for the head. Sinkhorn makes B nearly doubly stochastic, so that streams
are mixed but not amplified. Source: Block.hc_pre / hc_post of inference/model.py; report, section
2.4.1.
"""

import numpy as np

from .dispatch import op
from .formats import contiguous
from .ops import matmul_rows, mean_square, rmsnorm, sigmoid
from .quant import ACTIVATION_FP8


@op
def sinkhorn(logits, iterations, eps):
    """logits (..., S, S) f32 -> (..., S, S) f32 whose columns (axis -2) sum to 1, rows nearly so.

    The first row pass is a softmax; `iterations` row and column passes in all, ending with columns.
    trap: eps stands inside every division and after the softmax, and columns come last.
    """
    eps, ones = np.float32(eps), np.zeros(logits.shape[-2:], logits.dtype, like=logits) + 1
    shifted = logits - np.max(logits, axis=-1, keepdims=True)  # exp of large logits would overflow
    b = np.exp(shifted)
    b = b / (b @ ones) + eps
    b = b / (ones @ b + eps)
    for _ in range(iterations - 1):
        b = b / (b @ ones + eps)  # b @ ones: every element's row sum; ones @ b: its column sum
        b = b / (ones @ b + eps)
    return b


@op
def hc_coefficients(streams, fn, base, scale, config, numerics):
    """The three sets of one sublayer, from the streams that enter it.

    streams (T, S, D) f32, fn (2S + S*S, S*D), base (2S + S*S,), scale (3,), all f32
    -> pre (T, S), post (T, S), comb (T, S, S) as [from stream, to stream]; f32, never rounded.
    """
    tokens, s, width = streams.shape
    flat = streams.reshape(tokens, s * width)  # stream-major: all of stream 0 first
    # one statistic over all streams
    rms = np.sqrt(mean_square(flat) + np.float32(config.rms_norm_eps))
    u = matmul_rows(flat, fn, numerics) / rms
    pre = sigmoid(u[:, :s] * scale[0] + base[:s]) + np.float32(config.hc_eps)
    post = 2 * sigmoid(u[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    mix = (u[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(tokens, s, s)
    return pre, post, sinkhorn(mix, config.hc_sinkhorn_iters, config.hc_eps)


@op
def hc_collapse(streams, pre, numerics):
    """streams (T, S, D), pre (T, S) -> x (T, D) = sum_i pre_i X_i, stored as bf16."""
    return numerics.store((pre[:, None, :] @ contiguous(streams))[:, 0])


@op
def hc_update(streams, y, post, comb, numerics):
    """streams (T, S, D), y (T, D), post (T, S), comb (T, S, S) -> new streams (T, S, D), bf16.

    trap: comb is contracted over its FIRST stream axis.
    """
    mixed = comb.transpose(0, 2, 1) @ contiguous(streams)
    return numerics.store(post[:, :, None] * y[:, None, :] + mixed)


@op
def hc_boundary(streams, y, pre, post, comb, fn, base, scale, norm, config, numerics, fp8=False):
    """From one sublayer to the next in one pass over the streams, what the delay of `pre` is for.

    streams (T, S, D), y (T, D), pre, post (T, S), comb (T, S, S): what the old sublayer read, its
    output and its coefficients; fn, base, scale, norm (D,): parameters of the new one.
    -> new streams; x (T, D) for the new sublayer, with fp8 as MXFP8 records (T, D + D / 32) uint8;
    pre, post, comb of the new sublayer.
    trap: x is collapsed with the old sublayer's pre; the new pre is for the sublayer after it.
    """
    streams = hc_update(streams, y, post, comb, numerics)
    x = hc_collapse(streams, pre, numerics)
    x = rmsnorm(x, norm, config.rms_norm_eps, numerics)
    mixing = hc_coefficients(streams, fn, base, scale, config, numerics)
    return streams, ACTIVATION_FP8.encode(x) if fp8 else x, *mixing


def initial_streams(embedding, count):
    """embedding (T, D) -> count identical streams (T, S, D) and the first pre (1, 0, 0, ...)."""
    tokens = len(embedding)
    streams = np.repeat(embedding[:, None, :], count, axis=1)
    pre = np.zeros((tokens, count), np.float32, like=embedding)
    pre[:, 0] = 1
    return streams, pre
