"""How are the packing kernels called? One wrapper packs in FP4 and FP8, one unpacks.

The kernels are compiled for the number of channels, the group and the kind of scale, which become
shifts and constants; rows are free. They cover the formats of the caches and of activations (groups
of 16 with an E4M3 scale, groups of 32 with E8M0) from f32 or bf16 and back. For any other format
the definition's text runs. `version` picks a rung of the ladder, by default the fastest.
"""

import ml_dtypes
import numpy as np

from .arguments import cuda_array, require
from .errors import at, bad_values
from .launch import THREADS, grid, kernel, launch

BF16 = np.dtype(ml_dtypes.bfloat16)
BEST = {  # (operation, is bf16) -> version
    ("fp4_pack", True): "v3",
    ("fp4_pack", False): "v2",
    ("fp8_pack", True): "v2",
    ("fp8_pack", False): "v2",
    ("fp4_unpack", True): "v3",
    ("fp4_unpack", False): "v2",
    ("fp8_unpack", True): "v2",
    ("fp8_unpack", False): "v2",
}


def supported(op, fmt):
    """Is there a kernel for this format?"""
    kinds = {(16, "e4m3"), (32, "e8m0")} if op.startswith("fp4") else {(32, "e8m0")}
    return (fmt.group, fmt.scale) in kinds


def pack(op, x, fmt, version=None):
    """x (..., C) f32 or bf16 on the GPU -> records (..., fmt.record_bytes(C)) uint8."""
    import cupy

    x = cuda_array("x", x, np.float32, BF16)
    fmt.require_groups(x.shape)
    records = cupy.empty((*x.shape[:-1], fmt.record_bytes(x.shape[-1])), np.uint8)
    if x.size:
        with bad_values(describe(fmt, x.shape), x) as word:
            launch_pack(op, x, records, word, fmt, version)
    return records


def describe(fmt, shape):
    """The definition's message, from what a kernel reports."""
    return lambda position, kind: (
        f"x: {fmt.name} needs finite input, got {kind} at {at(shape, position)}"
    )


def launch_pack(op, x, records, word, fmt, version=None):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    bf16 = x.dtype == BF16
    version = version or BEST[op, bf16]
    count = x.size // (fmt.group if version == "v1" else 16)
    run = kernel(op, f"{op}_{version}", **macros(op, x.shape[-1], fmt, bf16))
    launch(run, grid(count), THREADS, (x, records, word, np.int64(count), np.float32(fmt.floor)))


def unpack(op, records, channels, fmt, dtype=np.float32, version=None):
    """records (..., fmt.record_bytes(channels)) uint8 on the GPU -> (..., channels) f32 or bf16."""
    import cupy

    records, dtype = cuda_array("records", records, np.uint8), np.dtype(dtype)
    check_records(records.shape, channels, fmt, dtype)
    out = cupy.empty((*records.shape[:-1], channels), dtype)
    if out.size:
        launch_unpack(op, records, out, fmt, version)
    return out


def check_records(shape, channels, fmt, dtype):
    """ValueError unless records of this shape hold `channels` that can be read as `dtype`."""
    require(dtype in (np.float32, BF16), f"dtype: expected float32 or bfloat16, got {dtype}")
    fmt.require_groups((channels,))
    width = fmt.record_bytes(channels)
    require(
        bool(shape) and shape[-1] == width,
        f"records: {channels} channels in {fmt.name} take {width} bytes, got shape {shape}",
    )


def launch_unpack(op, records, out, fmt, version=None):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    bf16 = out.dtype == BF16
    version = version or BEST[op, bf16]
    count = out.size // (1 if version == "v1" else 16 // out.dtype.itemsize)
    threads = -(-count // 2) if op == "fp4_unpack" and version == "v3" else count
    run = kernel(op, f"{op}_{version}", **macros(op, out.shape[-1], fmt, bf16))
    launch(run, grid(threads), THREADS, (records, out, np.int64(count)))


def macros(op, channels, fmt, bf16):
    """What the compiler should know."""
    sizes = {"CHANNELS": channels, "GROUP": fmt.group, "BF16": int(bf16)}
    return sizes | ({"SCALE_E4M3": int(fmt.scale == "e4m3")} if op.startswith("fp4") else {})
