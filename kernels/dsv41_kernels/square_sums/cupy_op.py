"""Many norms in one launch; the contract is dsv41.train.many.square_sums' docstring."""

import cupy
import numpy as np

from ..launch import kernel
from ..many import PIECE, THREADS, addresses, pieces


def square_sums(arrays):
    arrays = [cupy.ascontiguousarray(x, np.float32) for x in arrays]
    blocks, table = pieces(arrays), addresses(arrays)
    sums = cupy.zeros(len(blocks), np.float64)
    if len(blocks):
        arguments = cupy.asarray(blocks), table, sums, np.int32(len(arrays))
        kernel("square_sums", "square_sums", PIECE=PIECE)((len(blocks),), THREADS, arguments)
    return np.bincount(blocks[:, 0], weights=sums.get(), minlength=len(arrays))
