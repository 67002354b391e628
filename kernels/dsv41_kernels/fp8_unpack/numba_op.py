"""Values of FP8 records in Numba CUDA; the contract is dsv41.quant.fp8_unpack's docstring."""

import numpy as np

from dsv41.quant import fp8_unpack as text

from ..numba_records import unpack
from ..records import supported


def fp8_unpack(records, channels, fmt, dtype=np.float32):
    if not supported("fp8_unpack", fmt):
        return text.definition(records, channels, fmt, dtype)
    return unpack(records, channels, fmt, dtype)
