"""RMSNorm and FP8 cast on a GPU; the contract is dsv41.ops.rmsnorm_fp8's docstring."""

import cupy
import numpy as np

from dsv41.ops import rmsnorm_fp8 as text
from dsv41.quant import ACTIVATION_FP8

from ..arguments import cuda_array
from ..errors import bad_values
from ..launch import kernel, launch, processors
from ..records import BF16, describe

RESIDENT = 3  # v3's and v4's blocks per SM: as many as its registers let stay there
WIDEST = 16 * 1024  # channels: 16 a thread


def rmsnorm_fp8(x, weight, eps, numerics):
    if not supported(x, numerics):
        return text.definition(x, weight, eps, numerics)
    x = cuda_array("x", x, np.float32, BF16)
    ACTIVATION_FP8.require_groups(x.shape)
    weight = cuda_array("weight", weight, np.float32, shape=x.shape[-1:])
    records = cupy.empty((*x.shape[:-1], ACTIVATION_FP8.record_bytes(x.shape[-1])), np.uint8)
    if x.size:
        with bad_values(describe(ACTIVATION_FP8, x.shape), x) as word:
            launch_rmsnorm(x, weight, records, word, eps)
    return records


def supported(x, numerics):
    """The kernel rounds to bf16 and casts to MXFP8, as OFFICIAL does; rows have a limit."""
    return numerics.bf16 and numerics.activation == ACTIVATION_FP8 and x.shape[-1] <= WIDEST


def best(rows):
    """The version for so many rows; all of these have the same bits, so the number may choose.

    A block of v4 works on many rows, while the next ones come; where there is one a block, v2.
    """
    return "v2" if rows <= RESIDENT * processors() else "v4"


def launch_rmsnorm(x, weight, records, word, eps, version=None):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    channels, bf16 = x.shape[-1], x.dtype == BF16
    rows = x.size // channels
    version = version or best(rows)
    wide = 32 * -(-channels // 512)  # threads with 16 channels each
    count, threads = {
        "v1": (rows, 256),
        "v2": (rows, wide),
        "v3": (min(rows, RESIDENT * processors()), wide),
        "v4": (min(rows, RESIDENT * processors()), wide),
    }[version]
    run = kernel("rmsnorm_fp8", f"rmsnorm_fp8_{version}", CHANNELS=channels, BF16=int(bf16))
    launch(run, count, threads, (x, weight, records, word, np.int64(rows), np.float32(eps)))
