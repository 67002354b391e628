"""AdamW for a whole list in one launch; the contract is dsv41.train.adamw.adamw_steps."""

import math

import cupy
import numpy as np

from ..launch import kernel
from ..many import PIECE, THREADS, addresses, pieces


def adamw_steps(weights, ms, vs, ts, grads, rates, decays, betas, eps):
    b1, b2 = betas
    grads = [cupy.ascontiguousarray(g, np.float32) for g in grads]
    blocks, table = pieces(weights), addresses(weights, ms, vs, grads)
    numbers = [
        [1 - rate * decay for rate, decay in zip(rates, decays, strict=True)],
        [rate / (1 - b1**t) for rate, t in zip(rates, ts, strict=True)],
        [math.sqrt(1 - b2**t) for t in ts],
    ]
    if len(blocks):
        constants = [np.float32(c) for c in (b1, b2, 1 - b1, 1 - b2, eps)]
        there = cupy.asarray(blocks), table, cupy.asarray(np.array(numbers, np.float32))
        run = kernel("adamw_steps", "adamw_steps", PIECE=PIECE)
        run((len(blocks),), THREADS, (*there, np.int32(len(weights)), *constants))
