"""FP8 records in Numba CUDA; the contract is dsv41.quant.fp8_pack's docstring."""

from ..numba_records import pack


def fp8_pack(x, fmt):
    return pack(x, fmt)
