"""RMSNorm and FP8 cast in Numba CUDA; the contract is dsv41.ops.rmsnorm_fp8's docstring.

v3 of kernel.cu: one thread holds 16 channels of a row from the reading to the record, and blocks
take every n-th row, so that the weight is read once and the next row is on its way while this one
is summed. The sum goes over a warp by exchange between lanes, then over the warps through shared
memory, in an order that the width alone decides.
"""

import functools

import numpy as np
from numba import config, cuda

from dsv41.ops import rmsnorm_fp8 as text
from dsv41.quant import ACTIVATION_FP8

from ..errors import bad_values
from ..launch import numba_launch, processors
from ..numba_formats import bits_of, float_of
from ..numba_instructions import bf16x2, from_lane, rsqrt
from ..numba_records import PIECE, check, flat_bytes, piece_functions, piece_writer
from ..records import BF16, describe

WIDEST = PIECE * 1024  # channels: a block has 1,024 threads at most
PAIRS = PIECE // 2  # words of a piece in bf16
RESIDENT = 3  # blocks per SM
INFINITY = np.float32(np.inf)


@functools.cache
def sum_function(warps):
    """Device function (value, turn): the sum over a block, known to all of its threads.

    Turns alternate between 0 and 1: so nobody overwrites what another warp still reads.
    """

    @cuda.jit(device=True)
    def block_sum(value, turn):
        sums, t = cuda.shared.array((2, 32), np.float32), np.uint32(cuda.threadIdx.x)
        for k in range(5):
            value += float_of(from_lane(bits_of(value), 16 >> k))
        if t % np.uint32(32) == 0:
            sums[turn, t // np.uint32(32)] = value
        cuda.syncthreads()
        total = np.float32(0)
        for warp in range(warps):
            total += sums[turn, np.uint32(warp)]
        return total

    return block_sum


@functools.cache
def squares_function(bf16):
    """Device function w -> sum of squares of a piece, in two chains."""
    number = piece_functions(bf16)[2]

    @cuda.jit(device=True)
    def squares(w):
        even, odd = np.float32(0), np.float32(0)
        for i in range(0, PIECE, 2):
            even += number(w, i) * number(w, i)
            odd += number(w, i + 1) * number(w, i + 1)
        return even + odd

    return squares


@cuda.jit(device=True)
def inverse_root(v):
    """1 / sqrt(v): the fast root, corrected once. Infinity would come out of that as NaN."""
    r, half, more = rsqrt(v), np.float32(0.5), np.float32(1.5)
    return np.float32(0) if v == INFINITY else r * (more - half * v * r * r)


@functools.cache
def normaliser(bf16):
    """Device function (w, factor, weight, y): a piece times both, as bf16 pairs."""
    number = piece_functions(bf16)[2]

    @cuda.jit(device=True)
    def normalise(w, factor, weight, y):
        for i in range(PAIRS):
            low = number(w, 2 * i) * factor * float_of(weight[2 * i])
            high = number(w, 2 * i + 1) * factor * float_of(weight[2 * i + 1])
            y[i] = bf16x2(low, high)

    return normalise


@functools.cache
def norm_kernel(channels, bf16):
    """The kernel (x, weight and records as flat bytes, bad, rows, eps): a thread 16 channels."""
    words, load, _ = piece_functions(bf16)
    functions = (
        load,
        piece_functions(False)[1],
        sum_function(threads_of(channels) // 32),
        squares_function(bf16),
        normaliser(bf16),
        piece_writer(ACTIVATION_FP8, channels, True),
    )
    return norm_of(words, np.uint64(channels // PIECE), np.float32(1 / channels), *functions)


def norm_of(words, pieces, share, load, load_weight, block_sum, squares, normalise, write):
    """norm_kernel for a row of `pieces`, each of so many words; share is 1 / channels."""

    def norm(x, weight, records, bad, rows, eps):
        piece, row = np.uint64(cuda.threadIdx.x), np.uint64(cuda.blockIdx.x)
        mine, turn = piece < pieces, np.uint32(0)
        if not mine:  # these threads repeat the last group, as a pair
            piece = np.uint64(pieces - np.uint64(2) + (piece & np.uint64(1)))
        w, coming = cuda.local.array(words, np.uint32), cuda.local.array(words, np.uint32)
        factors, y = cuda.local.array(PIECE, np.uint32), cuda.local.array(PAIRS, np.uint32)
        load_weight(weight, piece, factors)
        load(x, row * pieces + piece, coming)
        while row < rows:
            for i in range(words):
                w[i] = coming[i]
            after = np.uint64(row + np.uint64(cuda.gridDim.x))
            if after < rows:
                load(x, after * pieces + piece, coming)
            total = block_sum(squares(w) if mine else np.float32(0), turn)
            normalise(w, inverse_root(total * share + eps), factors, y)
            write(y, row, piece, mine, records, bad)
            row, turn = after, np.uint32(np.uint32(1) - turn)

    return cuda.jit(norm)


def threads_of(channels):
    """Threads of a block: one for every piece, in whole warps."""
    return 32 * -(-channels // (32 * PIECE))


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
    channels, rows = x.shape[-1], x.size // x.shape[-1]
    blocks = min(rows, 2 if config.ENABLE_CUDASIM else RESIDENT * processors())
    run = norm_kernel(channels, x.dtype == BF16)
    arguments = (*map(flat_bytes, (x, weight, records)), word, np.uint64(rows), np.float32(eps))
    numba_launch(run, blocks, threads_of(channels), arguments)
