"""Fixtures that every test file may ask for by name; Numba simulates where there is no driver."""

import ctypes
import os

import pytest
from fake_cuda import fake_cuda  # noqa: F401

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # read when numba is first imported


@pytest.fixture(scope="session")
def cupy():
    """The module, on a machine with a CUDA device; a skip that says what is missing elsewhere."""
    found = pytest.importorskip("cupy", reason="needs CuPy: pip install dsv41[cuda13]")
    try:
        found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    return found
