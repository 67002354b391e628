"""How does a model get onto the GPU?

Its float32 parameters are copied once into CuPy arrays; from then on the NumPy text itself runs
and where a kernel of an operation's name exists it is used instead (dsv41.dispatch). Weights that a
model keeps on disk, the Engram tables among them, stay in host memory and are read by the row.
"""

import numpy as np


def to_cuda(params):
    """Nested dicts of NumPy float32 arrays -> the same with CuPy arrays; other leaves stay."""
    import cupy

    if isinstance(params, dict):
        return {key: to_cuda(value) for key, value in params.items()}
    return (
        cupy.asarray(params)
        if isinstance(params, np.ndarray) and params.dtype.kind == "f"
        else params
    )


def cuda_like():
    """An empty CuPy array: "next to this", for functions that create arrays."""
    import cupy

    return cupy.zeros(0, cupy.float32)
