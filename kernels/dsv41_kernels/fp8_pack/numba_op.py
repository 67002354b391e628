"""FP8 records in Numba CUDA; the contract is dsv41.quant.fp8_pack's docstring."""

from dsv41.quant import fp8_pack as text

from ..numba_records import pack
from ..records import supported


def fp8_pack(x, fmt):
    if not supported("fp8_pack", fmt):
        return text.definition(x, fmt)
    return pack(x, fmt)
