"""FP4 records in Numba CUDA; the contract is dsv41.quant.fp4_pack's docstring."""

from dsv41.quant import fp4_pack as text

from ..numba_records import pack
from ..records import supported


def fp4_pack(x, fmt):
    if not supported("fp4_pack", fmt):
        return text.definition(x, fmt)
    return pack(x, fmt)
