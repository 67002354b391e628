"""How does a gradient flow through streams that mix themselves?

    x  = sum_i A_i X_i                    dX_i = A_i dx           dA_i = dx . X_i
    X'_k = C_k y + sum_j B_jk X_j         dX_j = sum_k B_jk dX'_k   dy = sum_k C_k dX'_k
                                          dC_k = y . dX'_k          dB_jk = X_j . dX'_k

A, B and C are themselves functions of X, so X gets a third part, through u = fn v / rms(v):

    dm = du / rms        dfn = dm^T v        dv = dm fn - v sum(du u) / (D S rms^2)

Sinkhorn is undone pass by pass, from the last to the softmax that was the first: b' = b / (sum b +
eps) gives db = (db' - sum db' b') / (sum b + eps). That needs the results of all passes, 2 *
iterations matrices of S x S a token, which are cheap to make again. The gradient of the delayed
`pre` comes from the sublayer behind, which is where it was used. Source: mhc.py, differentiated;
none of it is rounded.
"""

import numpy as np

from ..dispatch import op
from ..ops import matmul_rows
from .ops import sigmoid_slope


@op
def sinkhorn_backward(dcomb, logits, iterations, eps):
    """dcomb, logits (..., S, S) -> dlogits (..., S, S)."""
    weights, passes = _sinkhorn_passes(logits, iterations, eps)
    for b, total, axis in reversed(passes):
        dcomb = (dcomb - np.sum(dcomb * b, axis=axis, keepdims=True)) / total
    return weights * (dcomb - np.sum(dcomb * weights, axis=-1, keepdims=True))


def _sinkhorn_passes(logits, iterations, eps):
    """The forward again -> softmax, and (result, divisor, axis) of every pass behind it."""
    weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    weights = weights / np.sum(weights, axis=-1, keepdims=True)
    b, passes = weights + eps, []
    for axis in [-2] + [-1, -2] * (iterations - 1):  # columns follow the softmax of the rows
        total = np.sum(b, axis=axis, keepdims=True) + eps
        b = b / total
        passes.append((b, total, axis))
    return weights, passes


@op
def hc_coefficients_backward(dpre, dpost, dcomb, streams, fn, base, scale, config, numerics):
    """dpre, dpost (T, S), dcomb (T, S, S), streams (T, S, D) and the sublayer's parameters
    -> dstreams (T, S, D), dfn, dbase, dscale.
    """
    tokens, s, width = streams.shape
    flat = streams.reshape(tokens, s * width)
    mean_square = np.mean(flat * flat, axis=-1, keepdims=True)
    r = 1 / np.sqrt(mean_square + config.rms_norm_eps)
    u = matmul_rows(flat, fn, numerics) * r  # (T, 2 S + S * S)
    spread = np.repeat(scale, [s, s, s * s])  # one scale a set
    z = u * spread + base
    dz = _through_sets(dpre, dpost, dcomb, z, s, config)
    du, by_scale = dz * spread, np.sum(dz * u, axis=0)
    dscale = np.stack([np.sum(part) for part in np.split(by_scale, [s, 2 * s])])
    dm = du * r
    by_rms = r * r * np.sum(du * u, axis=-1, keepdims=True) / flat.shape[1]
    dflat = dm @ fn - flat * by_rms
    return dflat.reshape(streams.shape), dm.T @ flat, np.sum(dz, axis=0), dscale


def _through_sets(dpre, dpost, dcomb, z, s, config):
    """The gradient by z (T, 2 S + S * S), from those of the three sets."""
    slope = sigmoid_slope(z[:, : 2 * s])
    mix = z[:, 2 * s :].reshape(dcomb.shape)
    dmix = sinkhorn_backward(dcomb, mix, config.hc_sinkhorn_iters, config.hc_eps)
    parts = [dpre * slope[:, :s], 2 * dpost * slope[:, s:], dmix.reshape(len(z), s * s)]
    return np.concatenate(parts, axis=1)


@op
def hc_collapse_backward(dx, streams, pre):
    """dx (T, D), streams (T, S, D), pre (T, S) -> dstreams (T, S, D), dpre (T, S)."""
    dpre = (streams @ dx[:, :, None])[:, :, 0]
    return pre[:, :, None] * dx[:, None, :], dpre


@op
def hc_update_backward(dnew, streams, y, post, comb):
    """dnew (T, S, D) by the new streams, then the inputs of `hc_update`
    -> dstreams (T, S, D), dy (T, D), dpost (T, S), dcomb (T, S, S).
    """
    dy = (post[:, None, :] @ dnew)[:, 0]
    dpost = (dnew @ y[:, :, None])[:, :, 0]
    return comb @ dnew, dy, dpost, streams @ dnew.transpose(0, 2, 1)
