"""FP4 records on a GPU; the contract is dsv41.quant.fp4_pack's docstring."""

from dsv41.quant import fp4_pack as text

from ..records import pack, supported


def fp4_pack(x, fmt):
    if not supported("fp4_pack", fmt):
        return text.definition(x, fmt)
    return pack("fp4_pack", x, fmt)
