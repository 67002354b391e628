"""What does a token see of its near past?

Every layer, whatever else it does, attends to the last W tokens, itself included, through one
shared latent per token that serves all heads as key and as value:

    k_t = Q8( rotate( RMSNorm(x_t Wkv), t ) )
    query t sees k_j for max(floor, t - W + 1) <= j <= t

Only W of them are kept per request, in a ring: token j lives in row j mod W. A call that brings new
tokens reads the ring as it was before the call, followed by its own rows, so nothing that a query
still needs has been overwritten. Two requests share nothing but the array. Source: Attention in the
released inference/model.py (get_window_topk_idxs); `floor` is where a bounded replay starts.
"""

import numpy as np

from .ops import linear_fp8, rmsnorm
from .rope import rotate


def window_kv(x, p, positions, freqs, config, numerics):
    """x (T, D) f32 normed layer input -> records (T, Z) of `numerics.window_kv`.

    p: the layer's "attn" parameters. The rotated channels are quantised like the others.
    """
    latent = rmsnorm(
        linear_fp8(x, p["wkv"]["weight"], numerics),
        p["kv_norm"]["weight"],
        config.rms_norm_eps,
        numerics,
    )
    return numerics.window_kv.encode(numerics.store(rotate(latent, positions, freqs)))


def window_index(batch, width):
    """Rows that each query reads, (T, W) int64, positions ascending, -1 where there is none.

    Row numbers refer to `[ring of every request in the batch | rows of this call]`, the order in
    which `window_records` lays them out.
    """
    back = np.arange(width - 1, -1, -1, like=batch.positions)
    positions = batch.positions[:, None] - back  # (T, W), own one last
    in_call = positions >= batch.starts[:, None]
    ring_row = batch.order[:, None] * width + positions % width
    own_row = batch.count * width + batch.offsets[:, None] + (positions - batch.starts[:, None])
    rows = np.where(in_call, own_row, ring_row)
    return _left_packed(np.where(positions >= batch.floors[:, None], rows, -1))


def _left_packed(rows):
    """Move the -1 of each row to its end; they come first, since positions ascend."""
    missing = np.sum(rows < 0, axis=1, keepdims=True)
    columns = np.arange(rows.shape[1], like=rows) + missing
    inside = columns < rows.shape[1]
    packed = np.take_along_axis(rows, np.minimum(columns, rows.shape[1] - 1), axis=1)
    return np.where(inside, packed, -1)


def window_records(ring, new):
    """ring (R, W, Z) of the batch's requests, new (T, Z) -> (R*W + T, Z), old rows first."""
    return np.concatenate([ring.reshape(-1, new.shape[-1]), new])
