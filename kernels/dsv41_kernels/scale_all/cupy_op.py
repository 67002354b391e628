"""Many arrays scaled in one launch; the contract is dsv41.train.many.scale_all's docstring."""

import cupy
import numpy as np

from ..launch import kernel
from ..many import PIECE, THREADS, addresses, pieces


def scale_all(arrays, factor):
    together = [x for x in arrays if x.flags.c_contiguous]
    for x in arrays:
        if not x.flags.c_contiguous:
            x *= np.float32(factor)
    blocks, table = pieces(together), addresses(together)
    if len(blocks):
        arguments = cupy.asarray(blocks), table, np.int32(len(together)), np.float32(factor)
        kernel("scale_all", "scale_all", PIECE=PIECE)((len(blocks),), THREADS, arguments)
