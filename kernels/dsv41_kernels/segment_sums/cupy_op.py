"""Segment sums on a GPU; the contract is dsv41.train.ops.segment_sums' docstring."""

import cupy
import numpy as np

from ..launch import kernel


def segment_sums(values, first):
    values, first = cupy.ascontiguousarray(values, cupy.float32), first.astype(cupy.int64)
    rows, channels = values.shape
    out = cupy.empty((len(first), channels), cupy.float32)
    if len(first):
        threads = (min(256, 32 * -(-channels // 32)),)
        arguments = (values, first, out, np.int64(rows), np.int64(len(first)), np.int32(channels))
        kernel("segment_sums", "segment_sums")((len(first),), threads, arguments)
    return out
