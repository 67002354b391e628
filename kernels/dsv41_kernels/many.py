"""One launch over a list of arrays: which piece of which array does a block work on?"""

import cupy
import numpy as np

PIECE = 4096  # numbers of a block
THREADS = (256,)


def pieces(arrays):
    """Sizes of arrays -> (blocks, 2) int64: array number, first number of the piece."""
    counts = [-(-a.size // PIECE) for a in arrays]
    which = np.repeat(np.arange(len(arrays)), counts)
    first = np.cumsum(counts) - counts
    return np.stack([which, (np.arange(len(which)) - first[which]) * PIECE], axis=1)


def addresses(*lists):
    """Lists of n contiguous float32 arrays of equal sizes -> (1 + lists, n) int64 on the device:
    sizes, then each list's addresses.
    """
    for arrays in lists:
        for x, like in zip(arrays, lists[0], strict=True):
            if x.dtype != np.float32 or not x.flags.c_contiguous or x.size != like.size:
                raise ValueError(f"arrays: expected contiguous float32, got {x.dtype} {x.shape}")
    return cupy.asarray(
        np.array([[a.size for a in lists[0]], *([a.data.ptr for a in one] for one in lists)])
    )
