"""Values of FP8 records in Numba CUDA; the contract is dsv41.quant.fp8_unpack's docstring."""

import numpy as np

from ..numba_records import unpack


def fp8_unpack(records, channels, fmt, dtype=np.float32):
    return unpack(records, channels, fmt, dtype)
