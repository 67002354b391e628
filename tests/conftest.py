"""Fixtures that every test file may ask for by name; Numba simulates where there is no driver."""

import ctypes
import os

from fake_cuda import fake_cuda  # noqa: F401

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # read when numba is first imported
