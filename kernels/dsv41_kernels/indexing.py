"""What the indexer's kernels share on the host: which shapes they know, and how arrays go in.

A wrapper of these kernels falls back to the definition, on CuPy arrays, where `macros` knows no
kernel for the shapes and numerics that it was given, or where a row of scores does not fit into
the shared memory of one block of threads.
"""

import numpy as np

from .arguments import cuda_array

MOST_HEADS, MOST_CHANNELS = 64, 128  # what a thread keeps in registers and a block in shared memory
FORMATS = {"float32": 0, "MXFP4": 1}  # numerics.index.name -> PACKED
SHARED_BYTES = 200 * 1024  # for a block of threads on Hopper, beside its static arrays


def macros(q, numerics):
    """The macros of score.cuh for q (T, I, J), or None where it has no kernel."""
    heads, channels = q.shape[1:]
    packed = FORMATS.get(numerics.index.name)
    if packed is None or q.dtype != np.float32 or channels % 32:
        return None
    if not (0 < heads <= MOST_HEADS and 0 < channels <= MOST_CHANNELS):
        return None
    return {"HEADS": heads, "CHANNELS": channels, "PACKED": packed, "BF16": int(numerics.bf16)}


def query_arrays(q, w):
    """q (T, I, J), w (T, I), checked and contiguous."""
    return cuda_array("q", q, np.float32), cuda_array("w", w, np.float32, shape=q.shape[:2])


def key_array(keys, channels, numerics, ndim=2):
    """Index records (..., Z), checked and contiguous."""
    plain = numerics.index.name == "float32"
    width = channels if plain else channels // 2 + channels // 32
    dtype = np.float32 if plain else np.uint8
    return cuda_array("keys", keys, dtype, ndim=ndim, shape=(*keys.shape[:-1], width))


def entry_arrays(entries, tokens):
    """pages, order, visible of Entries, checked and contiguous."""
    pages = cuda_array("pages", entries.pages, np.int64, ndim=2)
    order = cuda_array("order", entries.order, np.int64, shape=(tokens,))
    return pages, order, cuda_array("visible", entries.visible, np.int64, shape=(tokens,))


# ---- score_mma.cuh ------------------------------------------------------------------------------

RUN = 8  # records that must lie in a row
WARPS, RING_BYTES = 8, 8 * 4 * 32 * 68  # of a block of threads: STAGES tiles for each warp
BLOCKS = 264  # two on each of the 132 SMs of a Hopper


def on_tensor_cores(known):
    """True for the sizes of score_mma.cuh, those of the released model."""
    return known["PACKED"] == 1 and (known["HEADS"], known["CHANNELS"]) == (32, 128)


def equal_shares(tokens, count, warps=WARPS, blocks=BLOCKS, step=32 * WARPS):
    """Like keys_per_block, where every query sees `count` keys: whole waves of blocks, few of them,
    since each block has a query to unpack and a first tile to wait for, the time of a turn. A
    multiple of `step`.
    """
    turn, steps = 32 * warps / step, max(1, -(-count // step))

    def time(chunks):
        return -(-tokens * chunks // blocks) * (-(-steps // chunks) / turn + 1.2)

    chunks = {max(1, min(steps, waves * blocks // max(1, tokens))) for waves in range(1, 9)}
    return step * -(-steps // min(sorted(chunks), key=time))


def keys_per_block(total):
    """A multiple of what the warps of a block score at once, so that every SM has work. Keys do not
    know their neighbours: the cut changes no score.
    """
    step = 32 * WARPS
    return min(8192, max(step, step * -(-total // (step * BLOCKS))))
