"""FP4 and FP8 records in Numba CUDA: one kernel packs every format, one unpacks it.

A thread packs a piece, 16 neighbours; two lanes of a warp share a group of 32. It reads its piece
16 bytes at a time, finds the largest magnitude, derives the scale and stores the codes as wide as
the records are aligned. bf16 stays in its words, two numbers each, and most instructions take both.
A thread unpacks 8 numbers. Sizes and formats are constants of the closures, so that the compiler
unrolls the loops and keeps every local array in registers. Same bits as dsv41/quant.py.
"""

import functools

import numpy as np
from numba import config, cuda

from .errors import bad_values
from .launch import THREADS, grid, numba_launch
from .numba_formats import (
    E2M1,
    EXPONENT,
    MAGNITUDE,
    U16,
    U254,
    bits_of,
    code_of,
    e2m1_value,
    e4m3_value,
    e8m0_code,
    e8m0_value,
    float_of,
    report,
    sign_of,
)
from .numba_instructions import (
    bf16x2,
    byte_perm,
    e4m3x2,
    f16x2,
    f16x2_of_e4m3x2,
    from_lane,
    high_f16,
    load1,
    load2,
    load4,
    low_f16,
    max_u16x2,
    min_u16x2,
    reciprocal,
    select,
    store1,
    store2,
    store4,
)
from .records import BF16, check_records, describe

PIECE = 16  # numbers that a thread packs
UNIT = 8  # numbers that a thread unpacks
UPPER, BOTH = np.uint32(0xFFFF0000), np.uint32(0x7FFF7FFF)  # a word's upper half, two magnitudes


@cuda.jit(device=True)
def thread_number():
    """cuda.grid(1), unsigned: of a signed index the compiler asks each time if it is negative."""
    block = np.uint64(cuda.blockIdx.x) * np.uint64(cuda.blockDim.x)
    return np.uint64(block + np.uint64(cuda.threadIdx.x))


# ---- a piece in registers -------------------------------------------------------------------


@functools.cache
def piece_functions(bf16):
    """-> words of a piece, device functions load(x, piece, w) and number(w, i) -> f32."""
    loads = 2 if bf16 else 4
    size = np.uint64(16 * loads)

    def load(x, piece, w):
        for i in range(loads):
            four = load4(x, np.uint64(piece * size + np.uint64(16 * i)))
            for k in range(4):
                w[4 * i + k] = four[k]

    def bf16_number(w, i):
        word = w[i // 2]
        return float_of(np.uint32(word & UPPER if i % 2 else word << U16))

    def f32_number(w, i):
        return float_of(w[i])

    number = bf16_number if bf16 else f32_number
    return 4 * loads, cuda.jit(device=True)(load), cuda.jit(device=True)(number)


@functools.cache
def amax_function(group, bf16):
    """Device function w -> bits of the largest magnitude of the piece's group."""
    words = piece_functions(bf16)[0]

    @cuda.jit(device=True)
    def amax_of(w):
        top = np.uint32(0)
        for i in range(words):
            top = max_u16x2(top, w[i] & BOTH) if bf16 else max(top, w[i] & MAGNITUDE)
        if bf16:
            top = max(np.uint32(top << U16), np.uint32(top & UPPER))
        if group == 2 * PIECE:
            top = max(top, from_lane(np.uint32(top), 1))
        return np.uint32(top)

    return amax_of


@functools.cache
def bad_function(bf16):
    """Device function (w, bad, position): reports the first number that is not finite."""
    number = piece_functions(bf16)[2]

    @cuda.jit(device=True)
    def report_piece(w, bad, position):
        at, value = -1, np.float32(0)
        for k in range(PIECE):
            x = number(w, PIECE - 1 - k)
            if bits_of(x) & MAGNITUDE >= EXPONENT:
                at, value = PIECE - 1 - k, x
        if at >= 0:  # the bad number may be the other lane's
            report(bad, position + np.uint64(at), value)

    return report_piece


# ---- scales ---------------------------------------------------------------------------------


@functools.cache
def scale_functions(scale, largest):
    """-> device functions amax -> byte, byte -> value, (byte, value) -> 1 / value, nearly."""
    largest, inverse = np.float32(largest), np.float32(1 / largest)

    def e4m3_byte(amax):
        return np.uint32(e4m3x2(amax / largest, np.float32(0)) & np.uint32(255))

    def e8m0_byte(amax):
        return e8m0_code(amax * inverse)

    def inverse_e4m3(byte, value):
        return reciprocal(value)

    def inverse_e8m0(byte, value):
        return float_of(np.uint32(U254 - byte) << np.uint32(23))

    jit = cuda.jit(device=True)
    if scale == "e4m3":
        return jit(e4m3_byte), e4m3_value, jit(inverse_e4m3)
    return jit(e8m0_byte), e8m0_value, jit(inverse_e8m0)


# ---- codes ----------------------------------------------------------------------------------
#
# Device functions (w, amax, value, inverse, codes): the piece's codes, 2 words of FP4 or 4 of FP8.


@functools.cache
def e2m1_function(scale):
    """FP4 codes of float32, one number at a time."""
    mantissa_bits, lowest, largest = E2M1

    @cuda.jit(device=True)
    def encode(w, amax, value, inverse, codes):
        for i in range(2):
            word = np.uint32(0)
            for k in range(8):
                x = float_of(w[8 * i + k])
                # a power of two can be multiplied with; the inverse of other scales is not exact
                scaled = x * inverse if scale == "e8m0" else x / value
                code = code_of(scaled, mantissa_bits, lowest, largest)
                code = np.uint32(code | np.uint32(sign_of(x) << np.uint32(3)))
                word = np.uint32(word | np.uint32(code << np.uint32(4 * k)))
            codes[i] = word

    return encode


@cuda.jit(device=True)
def round_pair(pair, factor):
    """Two magnitudes in bf16 -> their E2M1 codes, at bits 9-11 and 25-27; factor = 2^-14 / scale.

    y * 2^-14 as f16 has the layout of E2M1: exponent field 1 is [1, 2), subnormals are multiples of
    the same step below 1. So both are rounded to a code by rounding the halves to 9 bits less, in
    one addition. A quotient by an E4M3 scale is a tie or 2^-10 away from one, as bf16 has 8 bits:
    the product's last-bit error is gone when f16 rounds it, and a tie is a tie.
    """
    low, high = float_of(np.uint32(pair << U16)), float_of(np.uint32(pair & UPPER))
    h = f16x2(low * factor, high * factor)
    even = np.uint32((h >> np.uint32(9)) & np.uint32(0x00010001))
    return np.uint32(h + np.uint32(np.uint32(0x00FF00FF) + even))


@cuda.jit(device=True)
def four_nibbles(a, b, first, second):
    """Two words of a piece, their codes as round_pair leaves them -> nibbles in bytes 0 and 2."""
    upper = np.uint32(0x7531)  # bytes 1 and 3 of both words: where codes and signs are
    codes = byte_perm(first, second, upper)
    signs = byte_perm(a, b, upper)
    four = select(np.uint32(0x0E0E0E0E), codes, np.uint32(signs >> np.uint32(3)))
    return select(
        np.uint32(0x000F000F), np.uint32(four >> np.uint32(1)), np.uint32(four >> np.uint32(5))
    )


@functools.cache
def e2m1_pairs_function(scale):
    """FP4 codes of bf16, two numbers an instruction."""
    seven, six = np.float32(7), np.float32(6)

    @cuda.jit(device=True)
    def encode(w, amax, value, inverse, codes):
        limit = BOTH
        if scale == "e4m3" and float_of(amax) >= seven * value:  # only at the ends of E4M3's range
            limit = np.uint32(bits_of(six * value) >> U16)  # exact in bf16
            limit = np.uint32(limit | np.uint32(limit << U16))
        factor = inverse * np.float32(2.0**-14)
        for i in range(2):
            halves = cuda.local.array(2, np.uint32)
            for k in range(2):
                a, b = w[4 * i + 2 * k], w[4 * i + 2 * k + 1]
                first, second = np.uint32(a & BOTH), np.uint32(b & BOTH)
                if scale == "e4m3":
                    first, second = min_u16x2(first, limit), min_u16x2(second, limit)
                halves[k] = four_nibbles(
                    a, b, round_pair(first, factor), round_pair(second, factor)
                )
            codes[i] = byte_perm(halves[0], halves[1], np.uint32(0x6420))

    return encode


@functools.cache
def e4m3_function(bf16):
    """FP8 codes: one instruction makes two, and a scale is a power of two."""
    number = piece_functions(bf16)[2]

    @cuda.jit(device=True)
    def encode(w, amax, value, inverse, codes):
        for i in range(4):
            low = e4m3x2(number(w, 4 * i) * inverse, number(w, 4 * i + 1) * inverse)
            high = e4m3x2(number(w, 4 * i + 2) * inverse, number(w, 4 * i + 3) * inverse)
            codes[i] = np.uint32(low | np.uint32(high << U16))

    return encode


def code_function(fmt, bf16):
    if fmt.element.bits == 8:
        return e4m3_function(bf16)
    return (e2m1_pairs_function if bf16 else e2m1_function)(fmt.scale)


# ---- packing --------------------------------------------------------------------------------


@functools.cache
def code_storer(record, words):
    """Device function (records, place, codes), as wide as records of so many bytes are aligned."""
    wide = record % 16 == 0 and words == 4

    @cuda.jit(device=True)
    def store(records, place, codes):
        if wide:
            store4(records, place, (codes[0], codes[1], codes[2], codes[3]))
        elif record % 8 == 0:
            for i in range(words // 2):
                store2(records, place + np.uint64(8 * i), (codes[2 * i], codes[2 * i + 1]))
        elif record % 4 == 0:
            for i in range(words):
                store1(records, place + np.uint64(4 * i), (codes[i],))
        else:
            for i in range(4 * words):
                byte = np.uint8(codes[i // 4] >> np.uint32(8 * (i % 4)))
                records[place + np.uint64(i)] = byte

    return store


@functools.cache
def piece_storer(fmt, channels):
    """Device function (records, row, in_row, codes, byte): codes and scale of a piece."""
    words, record = PIECE * fmt.element.bits // 32, fmt.record_bytes(channels)
    store, size, width = code_storer(record, words), np.uint64(record), np.uint64(4 * words)
    code_bytes = np.uint64(channels * fmt.element.bits // 8)
    share = np.uint64(fmt.group // PIECE)

    @cuda.jit(device=True)
    def store_piece(records, row, in_row, codes, byte):
        start = row * size
        store(records, start + in_row * width, codes)
        if in_row % share == 0:
            records[start + code_bytes + in_row // share] = np.uint8(byte)

    return store_piece


@functools.cache
def piece_writer(fmt, channels, bf16):
    """Device function that quantises the words of one piece and stores part `in_row` of `row`.

    Every thread of a warp has to call it; those with mine = False store nothing.
    """
    amax_of, report_piece = amax_function(fmt.group, bf16), bad_function(bf16)
    scale_byte, scale_value, inverse_of = scale_functions(fmt.scale, fmt.element.largest)
    encode, store = code_function(fmt, bf16), piece_storer(fmt, channels)
    words, floor = PIECE * fmt.element.bits // 32, np.float32(fmt.floor)
    row_size, piece_size = np.uint64(channels), np.uint64(PIECE)

    @cuda.jit(device=True)
    def write(w, row, in_row, mine, records, bad):
        amax = amax_of(w)
        if amax >= EXPONENT:
            report_piece(w, bad, row * row_size + in_row * piece_size)
        byte = scale_byte(max(float_of(amax), floor))
        value, codes = scale_value(byte), cuda.local.array(words, np.uint32)
        encode(w, amax, value, inverse_of(byte, value), codes)
        if mine:
            store(records, row, in_row, codes, byte)

    return write


@functools.cache
def pack_kernel(fmt, channels, bf16):
    """The kernel (x and records as flat bytes, bad, pieces): one thread a piece."""
    words, load, _ = piece_functions(bf16)
    write, pieces = piece_writer(fmt, channels, bf16), np.uint64(channels // PIECE)
    odd = np.uint64(fmt.group // PIECE - 1)

    @cuda.jit
    def pack(x, records, bad, count):
        thread, last = thread_number(), np.uint64(count - np.uint64(1))
        mine, piece = thread <= last, thread
        if (
            thread > last
        ):  # trap: where two lanes share a group, the last pair is repeated as a pair
            piece = last - ((thread - last) & odd)
        w = cuda.local.array(words, np.uint32)
        load(x, piece, w)
        row = piece // pieces
        write(w, row, piece - row * pieces, mine, records, bad)

    return pack


def pack(x, fmt):
    """x (..., C) f32 or bf16 -> records (..., fmt.record_bytes(C)) uint8."""
    x = check("x", x, np.float32, BF16)
    fmt.require_groups(x.shape)
    records = fmt.new_records(x.shape[:-1], x.shape[-1], like=x)
    if x.size:
        with bad_values(describe(fmt, x.shape), x) as word:
            launch_pack(x, records, word, fmt)
    return records


def launch_pack(x, records, word, fmt):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    count, run = x.size // PIECE, pack_kernel(fmt, x.shape[-1], x.dtype == BF16)
    arguments = (flat_bytes(x), flat_bytes(records), word, np.uint64(count))
    numba_launch(run, grid(count), THREADS, arguments)


def flat_bytes(x):
    return x.reshape(-1).view(np.uint8)


# ---- unpacking ------------------------------------------------------------------------------


@functools.cache
def code_loader(record, words):
    """Device function (records, place, codes), as wide as records of so many bytes are aligned."""

    @cuda.jit(device=True)
    def load(records, place, codes):
        if record % 8 == 0 and words == 2:
            codes[0], codes[1] = load2(records, place)
        elif record % 4 == 0:
            for i in range(words):
                codes[i] = load1(records, place + np.uint64(4 * i))[0]
        else:
            for i in range(words):
                word = np.uint32(0)
                for k in range(4):
                    byte = np.uint32(records[place + np.uint64(4 * i + k)])
                    word = np.uint32(word | np.uint32(byte << np.uint32(8 * k)))
                codes[i] = word

    return load


@functools.cache
def value_function(bits):
    """Device function (codes, scale, v): the 8 products code * scale as f32."""

    def e2m1_values(codes, scale, v):
        for i in range(UNIT):
            v[i] = e2m1_value(np.uint32(codes[0] >> np.uint32(4 * i))) * scale

    def e4m3_values(codes, scale, v):
        for i in range(UNIT // 2):
            pair = f16x2_of_e4m3x2(np.uint32(codes[i // 2] >> np.uint32(16 * (i % 2))))
            v[2 * i], v[2 * i + 1] = low_f16(pair) * scale, high_f16(pair) * scale

    return cuda.jit(device=True)(e2m1_values if bits == 4 else e4m3_values)


@functools.cache
def value_storer(bf16):
    """Device function (out, unit, v): 16 bytes of bf16, or 32 of f32."""

    def store_bf16(out, unit, v):
        pairs = (bf16x2(v[0], v[1]), bf16x2(v[2], v[3]), bf16x2(v[4], v[5]), bf16x2(v[6], v[7]))
        store4(out, unit * np.uint64(16), pairs)

    def store_f32(out, unit, v):
        for i in range(2):
            k, place = 4 * i, unit * np.uint64(32) + np.uint64(16 * i)
            words = (bits_of(v[k]), bits_of(v[k + 1]), bits_of(v[k + 2]), bits_of(v[k + 3]))
            store4(out, place, words)

    return cuda.jit(device=True)(store_bf16 if bf16 else store_f32)


@functools.cache
def unpack_kernel(fmt, channels, bf16):
    """The kernel (records and out as flat bytes, units): one thread 8 numbers."""
    bits, record = fmt.element.bits, np.uint64(fmt.record_bytes(channels))
    units, share = np.uint64(channels // UNIT), np.uint64(fmt.group // UNIT)
    code_bytes, width, words = np.uint64(channels * bits // 8), np.uint64(bits), bits // 4
    scale_value = scale_functions(fmt.scale, fmt.element.largest)[1]
    load, values, store = code_loader(int(record), words), value_function(bits), value_storer(bf16)

    @cuda.jit
    def unpack(records, out, count):
        unit = thread_number()
        if unit < count:
            row = unit // units
            in_row, start = unit - row * units, row * record
            codes, v = cuda.local.array(words, np.uint32), cuda.local.array(UNIT, np.float32)
            byte = np.uint32(records[start + code_bytes + in_row // share])
            load(records, start + in_row * width, codes)
            values(codes, scale_value(byte), v)
            store(out, unit, v)

    return unpack


def unpack(records, channels, fmt, dtype=np.float32):
    """records (..., fmt.record_bytes(channels)) uint8 -> (..., channels) f32 or bf16."""
    records, dtype = check("records", records, np.uint8), np.dtype(dtype)
    check_records(records.shape, channels, fmt, dtype)
    out = np.zeros((*records.shape[:-1], channels), dtype, like=records)
    if out.size:
        launch_unpack(records, out, fmt)
    return out


def launch_unpack(records, out, fmt):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    count, run = out.size // UNIT, unpack_kernel(fmt, out.shape[-1], out.dtype == BF16)
    arguments = (flat_bytes(records), flat_bytes(out), np.uint64(count))
    numba_launch(run, grid(count), THREADS, arguments)


def check(name, x, *dtypes):
    """x in C order, on the GPU or, in Numba's simulator, anywhere; TypeError for other arrays."""
    if not config.ENABLE_CUDASIM:
        from .arguments import cuda_array

        return cuda_array(name, x, *dtypes)
    if getattr(x, "dtype", None) not in dtypes:
        expected = " or ".join(str(np.dtype(d)) for d in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {getattr(x, 'dtype', type(x))}")
    return np.ascontiguousarray(x)
