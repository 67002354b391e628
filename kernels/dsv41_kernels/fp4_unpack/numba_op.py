"""Values of FP4 records in Numba CUDA; the contract is dsv41.quant.fp4_unpack's docstring."""

import numpy as np

from dsv41.quant import fp4_unpack as text

from ..numba_records import unpack
from ..records import supported


def fp4_unpack(records, channels, fmt, dtype=np.float32):
    if not supported("fp4_unpack", fmt):
        return text.definition(records, channels, fmt, dtype)
    return unpack(records, channels, fmt, dtype)
