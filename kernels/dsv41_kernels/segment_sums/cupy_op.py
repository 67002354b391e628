"""Segment sums on a GPU; the contract is dsv41.train.ops.segment_sums' docstring."""

import cupy
import numpy as np

from ..launch import kernel


def segment_sums(values, first):
    values = cupy.ascontiguousarray(values, cupy.float32)
    first = cupy.ascontiguousarray(first, cupy.int64)
    rows, channels = values.shape
    out = cupy.empty((len(first), channels), cupy.float32)
    if len(first):
        wide = channels % 4 == 0 and values.data.ptr % 16 == 0
        name, lanes = ("segment_sums_v2", channels // 4) if wide else ("segment_sums", channels)
        threads = (min(256, 32 * -(-lanes // 32)),)
        arguments = (values, first, out, np.int64(rows), np.int64(len(first)), np.int32(channels))
        kernel("segment_sums", name)((len(first),), threads, arguments)
    return out
