"""Many in-place sums in one launch; the contract is dsv41.train.many.scale_add's docstring."""

import cupy
import numpy as np

from ..launch import kernel
from ..many import PIECE, THREADS, addresses, pieces


def scale_add(targets, factors, others, scales):
    others = [cupy.ascontiguousarray(x) for x in others]
    blocks, table = pieces(targets), addresses(targets, others)
    numbers = cupy.asarray(np.array([factors, scales], np.float32))
    if len(blocks):
        arguments = cupy.asarray(blocks), table, numbers, np.int32(len(targets))
        kernel("scale_add", "scale_add", PIECE=PIECE)((len(blocks),), THREADS, arguments)
