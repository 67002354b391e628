"""The collapse's gradient on a GPU; the contract is in dsv41.train.mhc.hc_collapse_backward."""

import cupy
import numpy as np

from ..arrays import on_device, stream_sizes
from ..launch import THREADS, grid, kernel


def hc_collapse_backward(dx, streams, pre):
    tokens, s, width = stream_sizes(streams)
    dx, pre = on_device("dx", dx, (tokens, width)), on_device("pre", pre, (tokens, s))
    streams = on_device("streams", streams, streams.shape)
    dstreams, dpre = cupy.empty_like(streams), cupy.empty_like(pre)
    if tokens:
        run = kernel("hc_collapse_backward", "hc_collapse_backward", S=s)
        arguments = (dx, streams, pre, dstreams, dpre, np.int64(tokens), np.int32(width))
        run(grid(tokens, THREADS // 32), (THREADS,), arguments)
    return dstreams, dpre
