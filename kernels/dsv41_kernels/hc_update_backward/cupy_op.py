"""The update's gradient on a GPU; the contract is in dsv41.train.mhc.hc_update_backward."""

import cupy
import numpy as np

from ..arrays import on_device, stream_sizes
from ..launch import THREADS, grid, kernel


def hc_update_backward(dnew, streams, y, post, comb):
    tokens, s, width = stream_sizes(streams)
    dnew, streams = (
        on_device(name, x, (tokens, s, width)) for name, x in (("dnew", dnew), ("streams", streams))
    )
    y, post = on_device("y", y, (tokens, width)), on_device("post", post, (tokens, s))
    inputs = dnew, streams, y, post, on_device("comb", comb, (tokens, s, s))
    outputs = tuple(cupy.empty_like(x) for x in inputs[1:])
    if tokens:
        name = "hc_update_backward" + ("" if width % 4 else "_v2")  # by the width, not the batch
        run = kernel("hc_update_backward", name, S=s)
        arguments = (*inputs, *outputs, np.int64(tokens), np.int32(width))
        run(grid(tokens, THREADS // 32), (THREADS,), arguments)
    return outputs
