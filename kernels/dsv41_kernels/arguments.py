"""What may a wrapper be handed? One clear error for everything a kernel could not survive.

A kernel sees a pointer: it does not notice another type, a stride, a CPU address or another GPU's.
Wrappers pass every array through `cuda_array`, which refuses the wrong kinds by name and copies
what is merely laid out differently, so that the result is the definition's for every view.
"""

import numpy as np


def cuda_array(name, x, *dtypes, ndim=None, shape=None, align=16):
    """x as a C-ordered CuPy array whose address is a multiple of `align`; copied only if needed.

    TypeError for arrays in CPU memory and other dtypes; ValueError for shapes and other GPUs.
    """
    import cupy

    if not hasattr(x, "__cuda_array_interface__"):
        kind = f"a {type(x).__module__}.{type(x).__name__} in CPU memory"
        raise TypeError(f"{name}: expected a CUDA array, got {kind}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(np.dtype(d)) for d in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {x.dtype}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} axes, got shape {x.shape}")
    if shape is not None and x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {x.shape}")
    here = cupy.cuda.runtime.getDevice()
    if x.size and x.device.id != here:
        raise ValueError(f"{name}: lives on GPU {x.device.id}, the current one is {here}")
    x = cupy.ascontiguousarray(x)
    return x.copy() if x.data.ptr % align else x


def require(condition, message):
    """ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)
