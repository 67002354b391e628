"""How are a thousand small tensors moved without a thousand small steps?

An optimizer does the same arithmetic on every tensor that its rule covers. The definitions below
say it tensor by tensor; on a GPU, where starting a kernel costs more than moving a small tensor,
one launch goes through the whole list. Everything happens in place, in the order of the lists.
"""

import numpy as np

from ..dispatch import OPS, find_kernel, on_host


def many(definition):
    """Like `op`, for functions of lists of arrays: where the first array lives decides."""
    OPS[definition.__name__] = definition

    def call(arrays, *rest):
        backend = "numpy" if not arrays or on_host(arrays[0]) else "cupy"
        return (find_kernel(definition.__name__, backend) or definition)(arrays, *rest)

    call.__doc__, call.definition = definition.__doc__, definition
    return call


@many
def scale_all(arrays, factor):
    """x <- factor * x for a list of arrays."""
    for x in arrays:
        x *= factor


@many
def scale_add(targets, factors, others, scales):
    """target <- factor * target + scale * other, for lists of arrays and of numbers."""
    for target, factor, other, scale in zip(targets, factors, others, scales, strict=True):
        target *= factor
        target += scale * other


@many
def square_sums(arrays):
    """Sum of the squares of each array -> (n,) float64 on the host."""
    return np.array([float(np.sum(x * x)) for x in arrays])
