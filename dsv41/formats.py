"""How are 4, 8 and 16 bits read as numbers, and how is a float32 rounded into them?

A small float has a sign, e exponent bits and m mantissa bits with a bias b:

    value = (-1)^s * 2^(max(E, 1) - b) * ([E > 0] + M / 2^m)

bf16 is the upper half of a float32. E4M3 (one byte, largest 448) carries FP8 weights, activations
and the window cache; E2M1 (half a byte: 0 .5 1 1.5 2 3 4 6) carries FP4 experts, index keys and
the main KV cache; E8M0 is a bare exponent, the scale of an MX block. Everything rounds to nearest,
ties to the even code, and saturates instead of overflowing. Codes come from integer arithmetic on
the bits, so the same text runs on NumPy and CuPy arrays; two shortcuts give the rounded value
without the code, and tests hold them to the codes: `Minifloat.round`, and for bf16 on a CPU
ml_dtypes. Source: OCP Microscaling formats v1.0 and OCP FP8; the released inference/kernel.py uses
exactly these roundings. NaN: bf16 and E4M3 carry it, E2M1 cannot, and quant.py refuses it before
it gets here.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .dispatch import on_host, op


def f32(x):
    """x as float32, in the library it lives in (NumPy or CuPy); numbers and lists become NumPy."""
    if hasattr(x, "astype"):
        return x.astype(np.float32, copy=False)
    return np.asarray(x, np.float32)


def contiguous(x):
    """x in C order, copied only if it is not: another memory order would sum in another order."""
    return x if x.flags.c_contiguous else x.copy()


# ---- bf16 -----------------------------------------------------------------------------------


def encode_bf16(x):
    """x f32 -> uint16, nearest, ties to even; overflow gives inf, NaN stays NaN (quiet)."""
    bits = f32(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # trap: adding to the bits of a NaN can wrap into -0 or inf, so NaNs take the truncating path
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def decode_bf16(codes):
    """codes uint16 -> f32, exact."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


@op
def round_bf16(x):
    """x f32 -> f32 holding the nearest bf16 value.

    In CPU memory ml_dtypes does the same rounding, compiled; elsewhere the bits do.
    """
    x = f32(x)
    if on_host(x):
        with np.errstate(invalid="ignore"):  # NaN is a legal input
            return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return decode_bf16(encode_bf16(x))


# ---- E4M3 and E2M1 --------------------------------------------------------------------------


@dataclass(frozen=True)
class Minifloat:
    """A sign, `exponent_bits` and `mantissa_bits` with `bias`; `largest` is the largest finite."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_nan: bool

    def encode(self, x):
        """x f32 -> uint8 codes: nearest, ties to even, saturating, signed zero kept.

        NaN becomes the format's NaN code where it has one; otherwise the code is meaningless.
        """
        x = f32(x)
        magnitude = np.minimum(np.abs(x), np.float32(self.largest))
        bits = magnitude.view(np.uint32)
        drop = np.uint32(23 - self.mantissa_bits)  # float32 mantissa bits that do not fit
        odd = (bits >> drop) & np.uint32(1)
        rounded = (bits + (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1) + odd) >> drop
        normal = rounded - np.uint32((127 - self.bias) << self.mantissa_bits)
        # below the smallest normal the grid is uniform, so rounding is a plain round-half-even
        step = np.float32(2.0 ** (self.bias - 1 + self.mantissa_bits))
        is_small = magnitude < np.float32(2.0 ** (1 - self.bias))
        small = np.rint(np.where(is_small, magnitude, np.float32(0)) * step).astype(np.uint32)
        code = np.where(is_small, small, normal)
        if self.has_nan:
            code = np.where(np.isnan(x), np.uint32(self.nan_code), code)
        sign = (x.view(np.uint32) >> np.uint32(31)) << np.uint32(self.bits - 1)
        return (code | sign).astype(np.uint8)

    def round(self, x):
        """x f32 -> f32, the value of x's code: what encode and decode give, without the codes.

        Adding c and taking it away again rounds to a multiple of c's last bit, ties to even; c is
        chosen for every x so that this bit is one step of the format's grid there.
        """
        x = f32(x)
        magnitude = np.minimum(np.abs(x), np.float32(self.largest))
        power = (magnitude.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        power = np.maximum(power, np.float32(2.0 ** (1 - self.bias)))  # one step below it
        c = power * np.float32(2.0 ** (23 - self.mantissa_bits))
        return np.copysign((magnitude + c) - c, x)

    def decode(self, codes):
        """codes uint8 (only the low `bits` used) -> f32, exact."""
        return np.asarray(self.table, like=codes)[codes & np.uint8(2**self.bits - 1)]

    @property
    def bits(self):
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def nan_code(self):
        """The code with all exponent and mantissa bits set (E4M3 has no infinity)."""
        return 2 ** (self.bits - 1) - 1

    @property
    def table(self):
        """f32 value of every code, (2 ** bits,)."""
        return _tables[self.name]


def _decode_table(fmt):
    code = np.arange(2**fmt.bits)
    mantissa = code % 2**fmt.mantissa_bits
    exponent = (code >> fmt.mantissa_bits) % 2**fmt.exponent_bits
    sign = np.where(code >> (fmt.bits - 1), -1.0, 1.0)
    fraction = (exponent > 0) + mantissa / 2**fmt.mantissa_bits
    value = sign * 2.0 ** (np.maximum(exponent, 1) - fmt.bias) * fraction
    if fmt.has_nan:
        value[code % 2 ** (fmt.bits - 1) == fmt.nan_code] = np.nan
    return value.astype(np.float32)


E4M3 = Minifloat("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_nan=True)
E2M1 = Minifloat("E2M1", exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_nan=False)
_tables = {fmt.name: _decode_table(fmt) for fmt in (E4M3, E2M1)}


# ---- E8M0 -----------------------------------------------------------------------------------


def encode_e8m0_ceil(x):
    """x f32, positive and normal -> uint8 byte of the smallest power of two >= x.

    Read off the bits: the exponent field, plus one when any mantissa bit is set.
    trap: ceil(log2(x)) in float32 returns 2^20 for 2^20 * (1 + 2^-23).
    """
    bits = f32(x).view(np.uint32)
    has_fraction = (bits & np.uint32(0x7FFFFF)) != 0
    return ((bits >> np.uint32(23)) + has_fraction.astype(np.uint32)).astype(np.uint8)


def decode_e8m0(codes):
    """codes uint8 -> f32 2^(code - 127); code 0 is 2^-127 (a float32 subnormal), 255 is NaN."""
    bits = codes.astype(np.uint32) << np.uint32(23)
    bits = np.where(codes == 0, np.uint32(0x00400000), bits)
    return np.where(codes == 255, np.uint32(0x7FC00000), bits).astype(np.uint32).view(np.float32)


# ---- two codes a byte -----------------------------------------------------------------------


def pack_nibbles(codes):
    """codes uint8 (..., C) in 0..15, C even -> uint8 (..., C/2), even channel in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: an even last axis can be packed, got shape {codes.shape}")
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed):
    """packed uint8 (..., B) -> uint8 codes (..., 2 B), low nibble first."""
    pair = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pair.reshape((*packed.shape[:-1], 2 * packed.shape[-1]))
