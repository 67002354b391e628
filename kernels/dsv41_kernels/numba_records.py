"""FP4 and FP8 records in Numba CUDA: one kernel packs every format, one unpacks it.

A thread packs one group: it reads its 16 or 32 numbers 8 bytes at a time, finds the largest,
derives the scale and stores the codes in words as wide as the record's alignment allows. Sizes and
formats are constants of the closures, so that the compiler unrolls the loops and keeps the group in
registers. A thread unpacks what fills one 8-byte store. Same bits as dsv41/quant.py.
"""

import functools

import numpy as np
from numba import config, cuda

from .errors import bad_values
from .launch import THREADS, grid, numba_launch
from .numba_formats import (
    E2M1,
    E4M3,
    EXPONENT,
    MAGNITUDE,
    U16,
    U254,
    bf16_code,
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
from .records import BF16, check_records, describe

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@functools.cache
def ratio_function(scale, bf16):
    """x / scale, as far as rounding to a code can tell, without dividing every element.

    A power of two can be multiplied with. An E4M3 scale's reciprocal is not exact; but bf16 has 8
    significant bits, so a product off by 2^-23 is either a tie or far from one, and rounding it to
    13 bits makes ties ties again. Only float32 divided by an E4M3 scale needs the division.
    """
    half, keep = np.uint32(0x400), np.uint32(0xFFFFF800)

    def multiply(x, value, inverse):
        return x * inverse

    def multiply_and_snap(x, value, inverse):
        return float_of(np.uint32(bits_of(x * inverse) + half) & keep)

    def divide(x, value, inverse):
        return x / value

    kinds = {"e8m0": multiply, "e4m3": multiply_and_snap if bf16 else divide}
    return cuda.jit(device=True)(kinds[scale])


@functools.cache
def scale_functions(scale, largest):
    """-> device functions amax -> byte, byte -> value, (byte, value) -> 1 / value."""
    largest, reciprocal = np.float32(largest), np.float32(1 / largest)
    mantissa_bits, lowest, top = E4M3
    one = np.float32(1)

    def e4m3_byte(amax):
        return code_of(amax / largest, mantissa_bits, lowest, top)

    def e8m0_byte(amax):
        return e8m0_code(amax * reciprocal)

    def inverse_e4m3(byte, value):
        return one / value

    def inverse_e8m0(byte, value):
        return float_of(np.uint32(U254 - byte) << np.uint32(23))

    jit = cuda.jit(device=True)
    if scale == "e4m3":
        return jit(e4m3_byte), e4m3_value, jit(inverse_e4m3)
    return jit(e8m0_byte), e8m0_value, jit(inverse_e8m0)


@functools.cache
def amax_function(group):
    """Device function (x, bad, position) -> bits of the amax; reports what is not finite."""

    @cuda.jit(device=True)
    def amax_of(x, bad, position):
        amax = np.uint32(0)
        for i in range(group):
            amax = max(amax, np.uint32(bits_of(x[i]) & MAGNITUDE))
        if amax >= EXPONENT:
            for i in range(group):
                if bits_of(x[i]) & MAGNITUDE >= EXPONENT:
                    report(bad, position + i, x[i])
        return np.uint32(amax)

    return amax_of


@functools.cache
def word_function(fmt, bf16, per_store):
    """Device function (x, first, value, inverse) -> the codes of x[first ...] in one word."""
    mantissa_bits, lowest, largest = E2M1 if fmt.element.bits == 4 else E4M3
    sign_shift, code_bits = np.uint32(fmt.element.bits - 1), np.uint64(fmt.element.bits)
    ratio = ratio_function(fmt.scale, bf16)

    @cuda.jit(device=True)
    def word_of(x, first, value, inverse):
        word = np.uint64(0)
        for k in range(per_store):
            element = x[first + k]
            code = code_of(ratio(element, value, inverse), mantissa_bits, lowest, largest)
            code = np.uint32(code | np.uint32(sign_of(element) << sign_shift))
            word |= np.uint64(code) << (np.uint64(k) * code_bits)
        return word

    return word_of


@functools.cache
def group_writer(fmt, channels, bf16):
    """Device function that quantises one group x and stores it as part `in_row` of record `row`.

    `words` and `records` are the same memory, as words of `store_bytes` and as bytes. bf16 says
    that x holds bf16 values.
    """
    group, groups, floor = fmt.group, channels // fmt.group, np.float32(fmt.floor)
    size = store_bytes(fmt.record_bytes(channels))
    per_store, word_type = 8 * size // fmt.element.bits, UNSIGNED[size]
    stores, code_bytes = group // per_store, channels * fmt.element.bits // 8
    amax_of, word_of = amax_function(group), word_function(fmt, bf16, per_store)
    scale_byte, scale_value, inverse_of = scale_functions(fmt.scale, fmt.element.largest)

    @cuda.jit(device=True)
    def write(x, row, in_row, words, records, bad):
        amax = amax_of(x, bad, (row * groups + in_row) * group)
        byte = scale_byte(max(float_of(amax), floor))
        value = scale_value(byte)
        inverse = inverse_of(byte, value)
        for s in range(stores):
            words[row, in_row * stores + s] = word_type(word_of(x, s * per_store, value, inverse))
        records[row, code_bytes + in_row] = np.uint8(byte)

    return write


@functools.cache
def group_loader(group, bf16):
    """Device function that reads group g of x, seen as uint64, into a local array."""
    per_load, width = (4, np.uint64(16)) if bf16 else (2, np.uint64(32))
    shift, loads = U16 if bf16 else np.uint32(0), group // per_load

    @cuda.jit(device=True)
    def load(wide, g, x):
        for i in range(loads):
            loaded = wide[g * loads + i]
            for k in range(per_load):
                element = np.uint32(loaded >> (np.uint64(k) * width))
                x[i * per_load + k] = float_of(np.uint32(element << shift))

    return load


@functools.cache
def pack_kernel(fmt, channels, bf16):
    """The kernel (x as uint64, words, records, bad, groups): one thread a group."""
    group, groups = fmt.group, channels // fmt.group
    load, write = group_loader(fmt.group, bf16), group_writer(fmt, channels, bf16)

    @cuda.jit
    def pack(wide, words, records, bad, count):
        g = cuda.grid(1)
        if g < count:
            x = cuda.local.array(group, np.float32)
            load(wide, g, x)
            write(x, g // groups, g % groups, words, records, bad)

    return pack


def store_bytes(record):
    """The widest store that every record's start and every group's codes are aligned to."""
    return next(size for size in (8, 4, 1) if record % size == 0)


def pack(x, fmt):
    """x (..., C) f32 or bf16 -> records (..., fmt.record_bytes(C)) uint8."""
    x = check("x", x, np.float32, BF16)
    fmt.require_groups(x.shape)
    channels = x.shape[-1]
    records = fmt.new_records(x.shape[:-1], channels, like=x)
    if x.size:
        with bad_values(describe(fmt, x.shape), x) as word:
            launch_pack(x, records, word, fmt)
    return records


def launch_pack(x, records, word, fmt):
    """The launch alone: C-ordered arrays, checked and allocated by the caller."""
    count, rows = x.size // fmt.group, records.reshape(-1, records.shape[-1])
    wide = x.reshape(-1).view(np.uint64)
    words = rows.view(UNSIGNED[store_bytes(rows.shape[-1])])
    run = pack_kernel(fmt, x.shape[-1], x.dtype == BF16)
    numba_launch(run, grid(count), THREADS, (wide, words, rows, word, count))


@functools.cache
def unpack_kernel(fmt, channels, bf16):
    """The kernel (words, records, out as uint64, units): a unit is one 8-byte store."""
    bits, group, code_bytes = fmt.element.bits, fmt.group, channels * fmt.element.bits // 8
    scale_value = scale_functions(fmt.scale, fmt.element.largest)[1]
    size, per_store = load_bytes(fmt, channels, bf16), 4 if bf16 else 2
    units, loads = channels // per_store, per_store * bits // 8 // size
    word_of = value_word_function(bits, bf16)

    @cuda.jit
    def unpack(words, records, out, count):
        unit = cuda.grid(1)
        if unit < count:
            row, in_row = unit // units, unit % units
            scale = scale_value(np.uint32(records[row, code_bytes + in_row * per_store // group]))
            codes = np.uint32(0)
            for i in range(loads):
                loaded = np.uint32(words[row, in_row * loads + i])
                codes = np.uint32(codes | np.uint32(loaded << np.uint32(8 * size * i)))
            out[unit] = word_of(codes, scale)

    return unpack


@functools.cache
def value_word_function(bits, bf16):
    """Device function (codes, scale) -> 4 bf16 or 2 f32 in a word of 8 bytes."""
    element_value, mask = e2m1_value if bits == 4 else e4m3_value, np.uint32(2**bits - 1)
    values, width = (4, np.uint64(16)) if bf16 else (2, np.uint64(32))

    @cuda.jit(device=True)
    def word_of(codes, scale):
        word = np.uint64(0)
        for k in range(values):
            code = np.uint32(codes >> np.uint32(k * bits)) & mask
            value = element_value(np.uint32(code)) * scale
            pattern = bf16_code(value) if bf16 else bits_of(value)
            word |= np.uint64(pattern) << (np.uint64(k) * width)
        return word

    return word_of


def load_bytes(fmt, channels, bf16):
    """Bytes of codes behind one 8-byte store, or 1 where records are not aligned to them."""
    size = (4 if bf16 else 2) * fmt.element.bits // 8
    return size if fmt.record_bytes(channels) % size == 0 else 1


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
    wide = out.reshape(-1).view(np.uint64)
    rows, bf16 = records.reshape(-1, records.shape[-1]), out.dtype == BF16
    words = rows.view(UNSIGNED[load_bytes(fmt, out.shape[-1], bf16)])
    run = unpack_kernel(fmt, out.shape[-1], bf16)
    numba_launch(run, grid(wide.size), THREADS, (words, rows, wide, wide.size))


def check(name, x, *dtypes):
    """x in C order, on the GPU or, in Numba's simulator, anywhere; TypeError for other arrays."""
    if not config.ENABLE_CUDASIM:
        from .arguments import cuda_array

        return cuda_array(name, x, *dtypes)
    if getattr(x, "dtype", None) not in dtypes:
        expected = " or ".join(str(np.dtype(d)) for d in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {getattr(x, 'dtype', type(x))}")
    return np.ascontiguousarray(x)
