"""The small operations every module shares: norm, linear, softmax pieces, gates.

    rmsnorm(x)      = x / sqrt(mean(x^2) + eps) * w
    linear(x)       = x W^T                         bf16 weights and activations
    linear_fp8(x)   = Q8(x) W^T                     FP8 activations per 32 channels, FP8/FP4 weights
    swiglu(a, u)    = silu(min(a, limit)) * clip(u, -limit, limit)
    sqrt_softplus   = sqrt(log(1 + e^x))            the router's score

All arithmetic is float32; `numerics` decides which results are then rounded to bf16. Source:
Linear, RMSNorm, Gate and Expert in the released inference/model.py.
"""

import numpy as np

from .dispatch import op
from .formats import contiguous, f32

ROW_BLOCK = 8  # rows per product under batch_invariant; every OpenBLAS kernel treats 8 rows alike


@op
def rmsnorm(x, weight, eps, numerics):
    """x (..., C) f32, weight (C,) f32 -> (..., C) f32, normalised over the last axis."""
    x = contiguous(x)
    return numerics.store(x * (1 / np.sqrt(mean_square(x) + np.float32(eps))) * weight)


@op
def rmsnorm_fp8(x, weight, eps, numerics):
    """x (..., C) f32 or bf16, weight (C,) f32 -> the normalised rows as an FP8 linear reads them.

    Records (..., C + C/32) uint8 of `numerics.activation` (MXFP8 under OFFICIAL). A kernel may sum
    the squares in another order: then single values differ by a step of their bf16 rounding.
    """
    return numerics.activation.encode(rmsnorm(f32(x), weight, eps, numerics))


def mean_square(x):
    """x (..., C) f32 -> (..., 1) f32: the mean of x^2 over the last axis."""
    return (x * x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])


def dense(weight):
    """The float32 matrix of a weight that may still be stored as codes."""
    return weight.dense() if hasattr(weight, "dense") else weight


def rows(weight, ids):
    """weight (V, D), ids (T,) int -> (T, D) f32; reads only the asked rows of a stored weight."""
    return weight.rows(ids) if hasattr(weight, "rows") else weight[ids]


def matmul_rows(x, weight, numerics):
    """x (T, K) f32, weight (N, K) -> x W^T (T, N) f32.

    A BLAS product of T rows rounds by T: another T takes another routine. Under batch_invariant
    the rows go through in blocks of ROW_BLOCK, the last one padded, so a row's bits are its own.
    """
    x, w = contiguous(x), dense(weight)
    if not numerics.batch_invariant:
        return x @ w.T
    count, width = x.shape
    blocks = -(-count // ROW_BLOCK)
    padded = np.zeros((blocks * ROW_BLOCK, width), np.float32, like=x)
    padded[:count] = x
    out = padded.reshape(blocks, ROW_BLOCK, width) @ w.T
    return out.reshape(blocks * ROW_BLOCK, w.shape[0])[:count]


def linear(x, weight, numerics):
    """x (T, K) f32, weight (N, K) -> (T, N) f32, stored as bf16."""
    return numerics.store(matmul_rows(x, weight, numerics))


def linear_fp8(x, weight, numerics):
    """The same with x first quantised per 32 channels, as every FP8 or FP4 weight expects."""
    return linear(numerics.activation.fake(x), weight, numerics)


def sigmoid(x):
    """x f32 -> 1 / (1 + e^-x), without overflow at either end."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, np.float32(1), decay) / (np.float32(1) + decay)


def silu(x):
    """x f32 -> x * sigmoid(x)."""
    return x * sigmoid(x)


@op
def swiglu(gate, up, limit):
    """gate, up (..., F) f32 -> silu(gate) * up, clamped first; limit 0 or None leaves them alone.

    trap: the clamp is one-sided for the gate (above only) and two-sided for up.
    """
    if limit:
        gate = np.minimum(gate, np.float32(limit))
        up = np.clip(up, np.float32(-limit), np.float32(limit))
    return silu(gate) * up


def sqrt_softplus(x):
    """x f32 -> sqrt(log(1 + e^x)) with full relative precision at both ends.

    trap: log(1 + exp(x)) is 0 below -17 and inf above 89 in float32. Below -20 the root is
    e^(x/2) to the last bit, and only that form survives where e^x itself is subnormal.
    """
    x = f32(x)
    softplus = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    half = np.exp(np.minimum(x, np.float32(0)) * np.float32(0.5))
    return np.where(x < -20, half, np.sqrt(softplus))
