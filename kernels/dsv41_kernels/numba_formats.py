"""Rounding to small floats in Numba CUDA: what formats.py does to arrays, for one number.

Numba knows no FP4 and converts to FP8 only through a module that its simulator lacks, but integers
and float32 suffice: adding c and taking it away rounds to a multiple of c's last bit, ties to even
(Minifloat.round explains it), and here the last bits of the sum are the code itself. Everything is
uint32 and float32 by name: Numba would widen uint32 to 64 bits and Python's own numbers to float64.
They also run in Numba's simulator (NUMBA_ENABLE_CUDASIM=1), where a thread is plain Python.
"""

import numpy as np
from numba import cuda

EXPONENT = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
TWO_TO_120 = np.float32(2.0**120)
E2M1 = (np.uint32(1), np.uint32(127), np.float32(6))  # mantissa bits, lowest exponent, largest
E4M3 = (np.uint32(3), np.uint32(121), np.float32(448))
U1, U15, U16, U20, U22, U23 = (np.uint32(n) for n in (1, 15, 16, 20, 22, 23))
U127, U253, U254, U255 = (np.uint32(n) for n in (127, 253, 254, 255))


def device(function):
    """A function for use inside kernels, inlined by the compiler."""
    return cuda.jit(device=True)(function)


@device
def bits_of(x):
    return np.float32(x).view(np.uint32)


@device
def float_of(bits):
    return np.uint32(bits).view(np.float32)


@device
def code_of(y, mantissa_bits, lowest, largest):
    """Code, without its sign, of the small float nearest to |y|."""
    m = min(abs(y), largest)
    power = max(bits_of(m) & EXPONENT, np.uint32(lowest << U23))
    shift = np.uint32(power + np.uint32((U23 - mantissa_bits) << U23))
    steps = np.uint32(bits_of(m + float_of(shift)) - shift)
    return np.uint32(steps + np.uint32(np.uint32((power >> U23) - lowest) << mantissa_bits))


@device
def sign_of(x):
    return np.uint32(bits_of(x) >> np.uint32(31))


@device
def e4m3_value(code):
    value = float_of(np.uint32(code & U127) << U20) * TWO_TO_120
    if code & U127 == U127:
        value = np.float32(np.nan)
    return -value if code > U127 else value


@device
def e2m1_value(code):
    """Its exponent and mantissa at the place of a float's are the value times 2^-126."""
    bits = np.uint32(np.uint32(code & np.uint32(7)) << U22)
    sign = np.uint32(np.uint32(code & np.uint32(8)) << np.uint32(28))
    return float_of(np.uint32(bits | sign)) * np.float32(2.0**126)


@device
def e8m0_code(x):
    bits = bits_of(x)
    fraction = bits & np.uint32(0x7FFFFF)
    return np.uint32((bits >> U23) + (U1 if fraction else np.uint32(0)))


@device
def e8m0_value(code):
    if code == U255:
        return np.float32(np.nan)
    return float_of(np.uint32(code << U23) if code else np.uint32(0x00400000))


@device
def bf16_code(x):
    bits = bits_of(x)
    if bits & MAGNITUDE > EXPONENT:
        return np.uint32(0x7FC0)
    return np.uint32((bits + np.uint32(0x7FFF) + ((bits >> U16) & U1)) >> U16)


@device
def report(word, position, x):
    """Tell errors.py: the first bad element wins. 0 nan, 1 inf, 2 -inf."""
    kind = 0 if x != x else (1 if x > 0 else 2)
    cuda.atomic.max(word, 0, ~np.uint64(4 * position + kind))
