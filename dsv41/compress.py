"""How do m tokens become one entry of the global KV cache?

A source layer projects each token to a candidate u and, for m > 1, a gate g, both C channels wide.
Group j holds tokens j*m .. j*m+m-1; each channel takes its own softmax over the m tokens:

    pooled_j[c] = sum_t softmax_t(g[t, c]) u[t, c]        latent_j = RMSNorm(bf16(pooled_j))

m = 1 is the projection alone. An entry appears when its last token does and carries the position
of its first. Until then the pending tokens' u and g wait in the cache, so a pair may be cut by any
chunk edge; they can be seen through the window meanwhile. The latent is what the indexer reads;
attention reads it rotated and quantised (main KV). Differences to V4: no overlap between groups, no
position bias. Source: Compressor in the released inference/model.py; report, section 2.3.
"""

import numpy as np

from .dispatch import op
from .ops import matmul_rows, rmsnorm
from .rope import rotate


@op
def pool_groups(u, g):
    """u, g (N, m, C) f32 -> (N, C) f32: softmax over the m tokens, channel by channel."""
    weights = np.exp(g - np.max(g, axis=1, keepdims=True))
    return np.sum(u * weights, axis=1) / np.sum(weights, axis=1)


def compress(x, p, source, ratio, cache, batch, config, numerics):
    """Emit the entries that x completes, and keep what is pending.

    x (T, D) f32 the source layer's attention input, p its "compressor" parameters
    -> latent (N, C) f32 and entry number (N,) and request (N,) int64 of every new entry.
    """
    u = matmul_rows(x, p["wkv"]["weight"], numerics)  # (T, C), float32 on purpose
    g = matmul_rows(x, p["wgate"]["weight"], numerics) if ratio > 1 else np.zeros_like(u)
    pooled, entries, owners = [], [], []
    for slot, rows, first, end in batch.segments():
        pending = first % ratio
        both = np.stack([u[rows], g[rows]], axis=1)  # (t, 2, C)
        if pending:
            both = np.concatenate([cache.carry[source][slot, :pending], both])
        whole = len(both) // ratio * ratio
        groups = both[:whole].reshape(-1, ratio, 2, u.shape[1])
        pooled.append(pool_groups(groups[:, :, 0], groups[:, :, 1]))
        entries.append(np.arange(first // ratio, end // ratio))
        owners.append(np.full(end // ratio - first // ratio, slot))
        if len(both) > whole:
            cache.carry[source][slot, : len(both) - whole] = both[whole:]
        cache.note_pending(source, slot, both[-(end - first) :])
    latent = rmsnorm(
        numerics.store(np.concatenate(pooled)), p["norm"]["weight"], config.rms_norm_eps, numerics
    )
    return latent, np.concatenate(entries), np.concatenate(owners)


def main_kv(latent, positions, freqs, numerics):
    """latent (N, C) f32, positions (N,) of the groups' first tokens -> main KV records (N, Z)."""
    return numerics.main_kv.encode(numerics.store(rotate(latent, positions, freqs)))
