"""What does a window record pass back to the token that wrote it?

A record is one latent, normed, rotated and rounded; its gradient walks the same way back:

    k_t = Q8( rotate( RMSNorm(x_t Wkv), t ) )
    dlatent = rotate(dk_t, -t)      d(x Wkv) = RMSNorm'(dlatent)      dx, dWkv as for any linear

dk_t is the sum over all queries that saw the token: itself and the W - 1 behind it. Q8 is passed
straight through; MXFP8 scales reach every value, so none is cut off. A training call brings whole
documents, so the rings hold nothing that a query could read, and row numbers count from the call's
own first row. Source: window.py.
"""

import numpy as np

from ..ops import linear_fp8
from .ops import linear_fp8_backward, rmsnorm_backward
from .rope import rotate_backward


def own_rows(window_rows, batch, width):
    """window_rows (T, W) as `window_index` makes them, for requests that begin in this call
    -> the same as rows of the call itself.
    """
    return np.where(window_rows < 0, -1, window_rows - batch.count * width)


def window_kv_backward(drecords, x, p, positions, freqs, config, numerics):
    """drecords (T, C) by the decoded records, x (T, D) -> dx (T, D), gradients of wkv, kv_norm."""
    latent = linear_fp8(x, p["wkv"]["weight"], numerics)
    drecords = rotate_backward(drecords, positions, freqs)
    norm = p["kv_norm"]["weight"]
    dlatent, dnorm = rmsnorm_backward(drecords, latent, norm, config.rms_norm_eps)
    dx, dwkv = linear_fp8_backward(dlatent, x, p["wkv"]["weight"], numerics)
    return dx, {"wkv": {"weight": dwkv}, "kv_norm": {"weight": dnorm}}
