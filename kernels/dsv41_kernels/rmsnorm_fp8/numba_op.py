"""RMSNorm and FP8 cast in Numba CUDA; the contract is dsv41.ops.rmsnorm_fp8's docstring.

One block a row, one thread a group of 32, which stays in its registers from the reading to the
record. The sum of squares goes through shared memory in a fixed order: the threads' sums in 32
columns, then the columns.
"""

import functools
import math

import numpy as np
from numba import cuda, float32

from dsv41.ops import rmsnorm_fp8 as text
from dsv41.quant import ACTIVATION_FP8

from ..errors import bad_values
from ..launch import numba_launch
from ..numba_formats import U16, bf16_code, float_of
from ..numba_records import UNSIGNED, check, group_loader, group_writer, store_bytes
from ..records import BF16, describe

GROUP = ACTIVATION_FP8.group
WIDEST = GROUP * 1024  # channels: a block has 1,024 threads at most


@functools.cache
def sum_function(threads):
    """Device function: the sum of one number per thread of a block, known to all of them."""

    @cuda.jit(device=True)
    def block_sum(value):
        sums, columns = cuda.shared.array(threads, float32), cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        sums[t] = value
        cuda.syncthreads()
        if t < 32:
            total = np.float32(0)
            for i in range(t, threads, 32):
                total += sums[i]
            columns[t] = total
        cuda.syncthreads()
        total = np.float32(0)
        for i in range(32):
            total += columns[i]
        return total

    return block_sum


@functools.cache
def norm_kernel(channels, bf16):
    """The kernel (x as uint64, weight, words, records, bad, eps): one block a row."""
    groups = channels // GROUP
    load, write = group_loader(GROUP, bf16), group_writer(ACTIVATION_FP8, channels, True)
    block_sum = sum_function(32 * -(-groups // 32))
    one, count = np.float32(1), np.float32(channels)

    @cuda.jit
    def norm(wide, weight, words, records, bad, eps):
        row, g = cuda.blockIdx.x, cuda.threadIdx.x
        x, squares = cuda.local.array(GROUP, float32), np.float32(0)
        if g < groups:
            load(wide, row * groups + g, x)
            for i in range(GROUP):
                squares += x[i] * x[i]
        factor = one / np.float32(math.sqrt(block_sum(squares) / count + eps))
        if g < groups:
            for i in range(GROUP):
                y = x[i] * factor * weight[g * GROUP + i]
                x[i] = float_of(np.uint32(bf16_code(y) << U16))
            write(x, row, g, words, records, bad)

    return norm


def rmsnorm_fp8(x, weight, eps, numerics):
    known = numerics.bf16 and numerics.activation == ACTIVATION_FP8 and x.shape[-1] <= WIDEST
    if not known:
        return text.definition(x, weight, eps, numerics)
    x, weight = check("x", x, np.float32, BF16), check("weight", weight, np.float32)
    ACTIVATION_FP8.require_groups(x.shape)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: expected shape {x.shape[-1:]}, got {weight.shape}")
    records = ACTIVATION_FP8.new_records(x.shape[:-1], x.shape[-1], like=x)
    if x.size:
        with bad_values(describe(ACTIVATION_FP8, x.shape), x) as word:
            launch_rmsnorm(x, weight, records, word, eps)
    return records


def launch_rmsnorm(x, weight, records, word, eps):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    channels, rows = x.shape[-1], records.reshape(-1, records.shape[-1])
    words = rows.view(UNSIGNED[store_bytes(rows.shape[-1])])
    threads = 32 * -(-channels // GROUP // 32)
    run = norm_kernel(channels, x.dtype == BF16)
    arguments = (x.reshape(-1).view(np.uint64), weight, words, rows, word, np.float32(eps))
    numba_launch(run, len(rows), threads, arguments)
