"""Values of FP8 records on a GPU; the contract is dsv41.quant.fp8_unpack's docstring."""

import numpy as np

from dsv41.quant import fp8_unpack as text

from ..records import supported, unpack


def fp8_unpack(records, channels, fmt, dtype=np.float32):
    if not supported("fp8_unpack", fmt):
        return text.definition(records, channels, fmt, dtype)
    return unpack("fp8_unpack", records, channels, fmt, dtype)
