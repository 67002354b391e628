"""FP4 records in Numba CUDA; the contract is dsv41.quant.fp4_pack's docstring."""

from ..numba_records import pack


def fp4_pack(x, fmt):
    return pack(x, fmt)
