"""Rounding to a block format on a GPU; the contract is dsv41.quant.fake_quantize's docstring."""

import cupy
import numpy as np

from dsv41.quant import fake_quantize as text

from ..arguments import cuda_array
from ..errors import bad_values
from ..launch import THREADS, grid, kernel, launch
from ..records import BF16, describe, supported


def fake_quantize(x, fmt):
    if not supported(f"fp{fmt.element.bits}", fmt):
        return text.definition(x, fmt)
    x = cuda_array("x", x, np.float32, BF16).astype(np.float32, copy=False)
    fmt.require_groups(x.shape)
    out = cupy.empty_like(x)
    if x.size:
        with bad_values(describe(fmt, x.shape), x) as word:
            launch_fake(x, out, word, fmt)
    return out


def launch_fake(x, out, word, fmt, version="v2"):
    """The launch alone: C-ordered float32 arrays, checked and allocated by the caller."""
    macros = {"BITS": fmt.element.bits, "GROUP": fmt.group}
    macros["SCALE_E4M3"] = int(fmt.scale == "e4m3")
    count = x.size // (fmt.group if version == "v1" else 4)
    run = kernel("fake_quantize", f"fake_quantize_{version}", **macros)
    launch(run, grid(count), THREADS, (x, out, word, np.int64(count), np.float32(fmt.floor)))
