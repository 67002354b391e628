"""The collapse of the streams on a GPU; the contract is dsv41.mhc.hc_collapse's docstring."""

import cupy
import numpy as np

from ..arrays import on_device, row_tiles, stream_sizes
from ..launch import kernel


def hc_collapse(streams, pre, numerics):
    tokens, s, width = stream_sizes(streams)
    streams, pre = on_device("streams", streams, streams.shape), on_device("pre", pre, (tokens, s))
    x = cupy.empty((tokens, width), cupy.float32)
    if tokens:
        run = kernel("hc_collapse", "hc_collapse", S=s, ROUND=int(numerics.bf16))
        tiles, threads = row_tiles(width)
        arguments = (streams, pre, x, np.int32(tiles), np.int32(width))
        run((tokens * tiles,), (threads,), arguments)
    return x
