"""Values of FP4 records on a GPU; the contract is dsv41.quant.fp4_unpack's docstring."""

import numpy as np

from dsv41.quant import fp4_unpack as text

from ..records import supported, unpack


def fp4_unpack(records, channels, fmt, dtype=np.float32):
    if not supported("fp4_unpack", fmt):
        return text.definition(records, channels, fmt, dtype)
    return unpack("fp4_unpack", records, channels, fmt, dtype)
