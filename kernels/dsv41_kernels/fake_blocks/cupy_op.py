"""Block scaling there and back on a GPU; the contract is dsv41.quant.fake_blocks' docstring.

A group with a NaN or an infinity comes back as NaN: a GPU is not stopped to look for one.
"""

import cupy
import numpy as np

from dsv41.quant import fake_blocks as definition

from ..launch import grid, kernel


def fake_blocks(x, fmt):
    if fmt.group not in (16, 32):
        return definition.definition(x, fmt)
    if x.shape[-1] % fmt.group:
        raise ValueError(
            f"{fmt.name}: last axis must be a multiple of {fmt.group}, got shape {x.shape}"
        )
    x, element = cupy.ascontiguousarray(x, np.float32), fmt.element
    out = cupy.empty_like(x)
    macros = {"GROUP": fmt.group, "MANTISSA": element.mantissa_bits, "BIAS": element.bias}
    run = kernel("fake_blocks", "fake_blocks", **macros, SCALE_E4M3=int(fmt.scale == "e4m3"))
    if x.size:
        sizes = np.int64(x.size), np.float32(element.largest), np.float32(fmt.floor)
        run(grid(x.size), (256,), (x, out, *sizes))
    return out
