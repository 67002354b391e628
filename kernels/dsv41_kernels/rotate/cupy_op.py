"""Rotary embedding on a GPU; the contract is dsv41.rope.rotate's docstring."""

import functools

import cupy
import numpy as np

from dsv41.rope import rotate as definition

from ..launch import grid, kernel


def rotate(x, positions, freqs, inverse=False):
    if x.shape[-1] % 2 or x.dtype != np.float32:
        return definition.definition(x, positions, freqs, inverse)
    x, positions = cupy.ascontiguousarray(x), cupy.ascontiguousarray(positions, np.int64)
    out, count, width = cupy.empty_like(x), x.size // 2, x.shape[-1] // 2
    if count:
        vectors = count // (len(x) * width)
        sizes = np.int64(count), np.int32(vectors), np.int32(width), np.int32(len(freqs))
        arguments = x, positions, _there(bytes(freqs)), out, *sizes
        kernel("rotate", "rotate")(grid(count), (256,), (*arguments, np.float32(1 - 2 * inverse)))
    return out


@functools.cache
def _there(freqs):
    """The few frequencies of a kind of layer, copied once."""
    return cupy.asarray(np.frombuffer(freqs, np.float32))
