"""Many momenta in one launch; the contract is dsv41.train.muon.nesterov_all's docstring."""

import cupy
import numpy as np

from ..launch import kernel
from ..many import PIECE, THREADS, addresses, pieces


def nesterov_all(momenta, grads, mu):
    grads = [cupy.ascontiguousarray(x, np.float32) for x in grads]
    flat = cupy.empty(sum(x.size for x in momenta), np.float32)
    ends = np.cumsum([x.size for x in momenta])
    directions = [
        flat[end - x.size : end].reshape(x.shape) for x, end in zip(momenta, ends, strict=True)
    ]
    blocks, table = pieces(momenta), addresses(momenta, grads, directions)
    if len(blocks):
        arguments = cupy.asarray(blocks), table, np.int32(len(momenta)), np.float32(mu)
        kernel("nesterov_all", "nesterov_all", PIECE=PIECE)((len(blocks),), THREADS, arguments)
    return directions
