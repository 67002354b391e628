"""The update of the streams on a GPU; the contract is dsv41.mhc.hc_update's docstring."""

import cupy
import numpy as np

from ..arrays import on_device, row_tiles, stream_sizes
from ..launch import kernel


def hc_update(streams, y, post, comb, numerics):
    tokens, s, width = stream_sizes(streams)
    streams, y = on_device("streams", streams, streams.shape), on_device("y", y, (tokens, width))
    post, comb = on_device("post", post, (tokens, s)), on_device("comb", comb, (tokens, s, s))
    out = cupy.empty(streams.shape, cupy.float32)
    if tokens:
        run = kernel("hc_update", "hc_update", S=s, ROUND=int(numerics.bf16))
        tiles, threads = row_tiles(width)
        arguments = (streams, y, post, comb, out, np.int32(tiles), np.int32(width))
        run((tokens * tiles,), (threads,), arguments)
    return out
