"""CuPy's shape without a GPU: enough for the checks that a wrapper makes before it launches.

Arrays are NumPy arrays that claim to live on a device; kernels are recorded, not run, so outputs
hold whatever memory held. `fake_cuda` is the fixture; its value lists the launches.
"""

import importlib
import sys
import types

import numpy as np
import pytest

from dsv41 import dispatch


class FakeArray(np.ndarray):
    """A NumPy array with the attributes by which CuPy's arrays are recognised."""

    device = types.SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3}

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self)


def on_device(x):
    """x as if it were in GPU memory, at an address that kernels accept."""
    x = np.asarray(x)
    room = np.empty(x.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    out = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out.view(FakeArray)


def _module():
    cupy = types.ModuleType("cupy")
    for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "uint16", "uint32"):
        setattr(cupy, name, getattr(np, name))
    cupy.uint64, cupy.ndarray, cupy.dtype = np.uint64, FakeArray, np.dtype
    cupy.empty = lambda shape, dtype=float: on_device(np.zeros(shape, dtype))
    cupy.zeros = cupy.empty
    cupy.empty_like = lambda x: on_device(np.zeros(x.shape, x.dtype))
    cupy.asarray = lambda x, dtype=None: on_device(np.asarray(x, dtype))
    cupy.ascontiguousarray = lambda x, dtype=None: (
        x if x.flags.c_contiguous and dtype in (None, x.dtype) else on_device(np.array(x, dtype))
    )
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        cudaDevAttrMultiProcessorCount=16,
        deviceGetAttribute=lambda attribute, device: 132,
    )
    processors = {"MultiProcessorCount": 132}
    device = lambda: types.SimpleNamespace(id=0, attributes=processors)  # noqa: E731
    stream = lambda: types.SimpleNamespace(ptr=0)  # noqa: E731
    cupy.cuda = types.SimpleNamespace(runtime=runtime, Device=device, get_current_stream=stream)
    return cupy


def _forget_wrappers():
    """Whatever has taken `kernel` or CuPy by name is imported anew; the patched modules stay."""
    stay = ("dsv41_kernels.launch", "dsv41_kernels.errors", "dsv41_kernels.nvrtc")
    for name in [n for n in sys.modules if n.startswith("dsv41_kernels.") and n not in stay]:
        del sys.modules[name]
    dispatch.find_kernel.cache_clear()


def wrapper(op):
    """The CuPy wrapper of an op, to be called inside a test that asks for `fake_cuda`."""
    return getattr(importlib.import_module(f"dsv41_kernels.{op}.cupy_op"), op)


@pytest.fixture
def fake_cuda(monkeypatch):
    """-> list of (op, kernel name, blocks, threads, arguments): what would have been launched."""
    from dsv41_kernels import errors, launch

    launches = []

    def kernel(op, name, **options):
        def run(blocks, threads, arguments, shared_mem=0):
            launches.append((op, name, blocks, threads, arguments))

        return run

    _forget_wrappers()
    monkeypatch.setitem(sys.modules, "cupy", _module())
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(errors, "_pools", {})
    yield launches
    _forget_wrappers()
