"""What Numba has no name for: accesses of 16 bytes, and instructions that take two numbers a word.

A function here is one PTX instruction, named as in ptx.cuh. @instruction hands its text to the
compiler and keeps the Python body as its meaning: that is what Numba's simulator runs
(NUMBA_ENABLE_CUDASIM=1), so one kernel text serves both. Loads and stores take a flat uint8 array
and a place in bytes, a multiple of their width: Numba's own indexing moves one element at a time,
8 bytes at most.
"""

import threading

import numpy as np
from numba import config, cuda

from .numba_formats import E4M3, bf16_code, code_of, sign_of

if not config.ENABLE_CUDASIM:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    KINDS = {"r": types.uint32, "f": types.float32, "h": types.uint16}


def instruction(text, kinds):
    """A decorator: PTX `text` for the compiler, the function itself for the simulator.

    `kinds` has a letter for the result and one per argument, as in CUDA C++: r u32, f f32, h u16.
    """
    if config.ENABLE_CUDASIM:
        return lambda meaning: meaning

    def lower(context, builder, signature, values):
        made, *taken = (context.get_value_type(KINDS[kind]) for kind in kinds)
        constraints = ",".join(["=" + kinds[0], *kinds[1:]])
        assembly = ir.InlineAsm(ir.FunctionType(made, taken), text, constraints)
        return builder.call(assembly, values)

    signature = KINDS[kinds[0]](*(KINDS[kind] for kind in kinds[1:]))
    emits = {
        1: lambda context, a: (signature, lower),
        2: lambda context, a, b: (signature, lower),
        3: lambda context, a, b, c: (signature, lower),
    }
    return lambda meaning: intrinsic(emits[len(kinds) - 1])


def half_words(word):
    return np.uint32(word).reshape(1).view(np.uint16)


def one_word(halves):
    return np.array(halves).view(np.uint32)[0]


@instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "rff")
def bf16x2(low, high):
    return np.uint32(bf16_code(low) | bf16_code(high) << np.uint32(16))


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "rff")
def f16x2(low, high):
    return one_word([np.float16(low), np.float16(high)])


@instruction("{.reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t;}", "rff")
def e4m3x2(low, high):
    """Two E4M3 codes, nearest even, saturating; low in bits 0-7."""
    low, high = (np.uint32(code_of(x, *E4M3) | sign_of(x) << np.uint32(7)) for x in (low, high))
    return np.uint32(low | high << np.uint32(8))


@instruction("{.reg .b16 t, u; mov.b32 {t, u}, $1; cvt.rn.f16x2.e4m3x2 $0, t;}", "rr")
def f16x2_of_e4m3x2(codes):
    """Two E4M3 codes in bits 0-15 -> two f16, exact."""
    low, high = (np.uint32(codes >> np.uint32(at)) for at in (0, 8))
    return one_word([e4m3_as_f16(low), e4m3_as_f16(high)])


def e4m3_as_f16(code):
    size = int(code) & 127
    value = np.nan if size == 127 else size * 2.0**-9
    if 8 <= size < 127:
        value = (8 + size % 8) * 2.0 ** (size // 8 - 10)
    return np.float16(-value if int(code) & 128 else value)


@instruction("{.reg .b16 t, u; mov.b32 {t, u}, $1; cvt.f32.f16 $0, t;}", "fr")
def low_f16(pair):
    return np.float32(half_words(pair).view(np.float16)[0])


@instruction("{.reg .b16 t, u; mov.b32 {t, u}, $1; cvt.f32.f16 $0, u;}", "fr")
def high_f16(pair):
    return np.float32(half_words(pair).view(np.float16)[1])


@instruction("max.u16x2 $0, $1, $2;", "rrr")
def max_u16x2(a, b):
    return one_word(np.maximum(half_words(a), half_words(b)))


@instruction("min.u16x2 $0, $1, $2;", "rrr")
def min_u16x2(a, b):
    return one_word(np.minimum(half_words(a), half_words(b)))


@instruction("prmt.b32 $0, $1, $2, $3;", "rrrr")
def byte_perm(a, b, selectors):
    """Four bytes, each chosen from the eight of a (0-3) and b (4-7) by four bits of `selectors`."""
    pool = np.array([a, b], np.uint32).view(np.uint8)
    chosen = [pool[int(selectors) >> (4 * k) & 7] for k in range(4)]
    return np.array(chosen).view(np.uint32)[0]


@instruction("lop3.b32 $0, $2, $1, $3, 0xE2;", "rrrr")
def select(mask, a, b):
    """Bits of a where the mask is set, of b elsewhere."""
    return np.uint32((a & mask) | (b & ~np.uint32(mask)))


@instruction("rcp.approx.ftz.f32 $0, $1;", "ff")
def reciprocal(x):
    """1 / x with an error of one unit in the last place."""
    return np.float32(1) / x


@instruction("rsqrt.approx.f32 $0, $1;", "ff")
def rsqrt(x):
    """1 / sqrt(x) with an error of two units in the last place."""
    return np.float32(1) / np.sqrt(x)


# ---- lanes of a warp ------------------------------------------------------------------------


if config.ENABLE_CUDASIM:
    board = {}  # the simulator runs one block at a time

    def from_lane(value, step):
        """The u32 that lane (own number ^ step) hands in; every thread of the block has to call."""
        me = threading.current_thread()
        board[me.thread_id] = value
        me.syncthreads()
        other = board[me.thread_id ^ step]
        me.syncthreads()
        return other

else:

    @cuda.jit(device=True)
    def from_lane(value, step):
        return np.uint32(cuda.shfl_xor_sync(0xFFFFFFFF, np.int32(value), step))


# ---- accesses of 4, 8 and 16 bytes ----------------------------------------------------------


def pointer(context, builder, kind, array, place, words):
    """The address `place` bytes into an array, as one of a vector of `words` words."""
    data = context.make_array(kind)(context, builder, array).data
    wide = ir.VectorType(ir.IntType(32), words).as_pointer()
    return builder.bitcast(builder.gep(data, [place]), wide)


def loader(words):
    """Device function (array, place) -> tuple of `words` uint32."""
    if config.ENABLE_CUDASIM:
        return lambda array, place: tuple(
            np.uint32(sum(int(array[int(place) + 4 * i + k]) << 8 * k for k in range(4)))
            for i in range(words)
        )

    def lower(context, builder, signature, values):
        at = pointer(context, builder, signature.args[0], *values, words)
        loaded = builder.load(at, align=4 * words)
        parts = [builder.extract_element(loaded, ir.IntType(32)(i)) for i in range(words)]
        return context.make_tuple(builder, signature.return_type, parts)

    @intrinsic
    def load(context, array, place):
        return types.UniTuple(types.uint32, words)(array, types.uint64), lower

    return load


def storer(words):
    """Device function (array, place, tuple of `words` uint32)."""
    if config.ENABLE_CUDASIM:

        def meaning(array, place, values):
            for k in range(4 * words):
                array[int(place) + k] = int(values[k // 4]) >> 8 * (k % 4) & 255

        return meaning

    def lower(context, builder, signature, values):
        at = pointer(context, builder, signature.args[0], *values[:2], words)
        wide = ir.VectorType(ir.IntType(32), words)(ir.Undefined)
        for i in range(words):
            word = builder.extract_value(values[2], i)
            wide = builder.insert_element(wide, word, ir.IntType(32)(i))
        builder.store(wide, at, align=4 * words)
        return context.get_dummy_value()

    @intrinsic
    def store(context, array, place, values):
        return types.void(array, types.uint64, types.UniTuple(types.uint32, words)), lower

    return store


load1, load2, load4 = (loader(words) for words in (1, 2, 4))
store1, store2, store4 = (storer(words) for words in (1, 2, 4))
