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

from typing import NamedTuple

import numpy as np

from .dispatch import beside, op
from .ops import matmul_rows, rmsnorm
from .rope import rotate


@op
def pool_groups(u, g):
    """u, g (N, m, C) f32 -> (N, C) f32: softmax over the m tokens, channel by channel."""
    weights = np.exp(g - np.max(g, axis=1, keepdims=True))
    return np.sum(u * weights, axis=1) / np.sum(weights, axis=1)


class Groups(NamedTuple):
    """How a call's rows meet what waits in the cache. Row numbers refer to the line
    `[waiting u and g of every request in turn | rows of this call]`.
    """

    waiting: tuple  # slots and places in the cache, (w,) each, of what the line begins with
    members: np.ndarray  # (N, m) rows of each entry that is complete
    entries: np.ndarray  # (N,) entry numbers
    owners: np.ndarray  # (N,) the entries' requests
    rest: tuple  # slots, places and rows, (r,) each, of what waits from now on


def line_up(batch, ratio):
    """The Groups of a batch whose requests begin in mid-group or not; NumPy arrays."""
    begins = [(slot, first % ratio) for slot, _, first, _ in batch.segments()]
    offset, taken, members, entries, owners, rest = sum(n for _, n in begins), 0, [], [], [], []
    for slot, rows, first, end in batch.segments():
        waiting = np.arange(taken, taken + first % ratio)
        own = np.concatenate([waiting, np.arange(rows.start, rows.stop) + offset])
        taken += len(waiting)
        entries.append(np.arange(first // ratio, end // ratio))
        owners.append(np.full(len(entries[-1]), slot))
        whole = len(entries[-1]) * ratio
        members.append(own[:whole].reshape(-1, ratio))
        rest += [(slot, place, row) for place, row in enumerate(own[whole:].tolist())]
    before = [(slot, place) for slot, count in begins for place in range(count)]
    columns = np.array(before, np.int64).reshape(-1, 2).T, np.array(rest, np.int64).reshape(-1, 3).T
    lists = (np.concatenate(x) for x in (members, entries, owners))
    return Groups(tuple(columns[0]), *lists, tuple(columns[1]))


def compress(x, p, source, ratio, cache, batch, config, numerics):
    """Emit the entries that x completes, and keep what is pending.

    x (T, D) f32 the source layer's attention input, p its "compressor" parameters
    -> latent (N, C) f32 and entry number (N,) and request (N,) int64 of every new entry.
    """
    u = matmul_rows(x, p["wkv"]["weight"], numerics)  # (T, C), float32 on purpose
    g = matmul_rows(x, p["wgate"]["weight"], numerics) if ratio > 1 else np.zeros_like(u)
    line, groups = np.stack([u, g], axis=1), line_up(batch, ratio)  # (T, 2, C)
    for slot, rows, _, _ in batch.segments():
        cache.note_pending(source, slot, line[rows])
    if len(groups.waiting[0]):
        line = np.concatenate([cache.carry[source][groups.waiting], line])
    if len(groups.rest[0]):
        slots, places, rows = groups.rest
        cache.carry[source][slots, places] = line[rows]
    both = line[beside(groups.members, line)]  # (N, m, 2, C)
    pooled = numerics.store(pool_groups(both[:, :, 0], both[:, :, 1]))
    latent = rmsnorm(pooled, p["norm"]["weight"], config.rms_norm_eps, numerics)
    return latent, groups.entries, groups.owners


def main_kv(latent, positions, freqs, numerics):
    """latent (N, C) f32, positions (N,) of the groups' first tokens -> main KV records (N, Z)."""
    return numerics.main_kv.encode(numerics.store(rotate(latent, positions, freqs)))
