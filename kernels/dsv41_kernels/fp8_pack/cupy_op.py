"""FP8 records on a GPU; the contract is dsv41.quant.fp8_pack's docstring."""

from dsv41.quant import fp8_pack as text

from ..records import pack, supported


def fp8_pack(x, fmt):
    if not supported("fp8_pack", fmt):
        return text.definition(x, fmt)
    return pack("fp8_pack", x, fmt)
