"""A device without a device: enough of CuPy to run the checks of a kernel's wrapper on a CPU.

Arrays are NumPy's under another name. Kernels are recorded and do nothing.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


class ndarray(np.ndarray):
    """A NumPy array that claims to be on the device."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


class Function:
    """What RawModule.get_function gives: remembers grid, block, arguments, shared memory."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __call__(self, grid, block, arguments, shared_mem=0):
        assert min(grid) > 0 and shared_mem <= max(48 * 1024, self.max_dynamic_shared_size_bytes)
        self.launches.append((self.name, grid, block, arguments))


def on_device(x, dtype=None):
    return np.ascontiguousarray(x, dtype).view(ndarray)


def module(launches):
    """The module that stands for cupy."""
    cupy = ModuleType("cupy")
    cupy.ndarray, cupy.asarray, cupy.ascontiguousarray = ndarray, on_device, on_device
    cupy.empty = cupy.zeros = lambda shape, dtype: on_device(np.zeros(shape, dtype))
    cupy.empty_like = lambda x: on_device(np.zeros(x.shape, x.dtype))
    chip = SimpleNamespace(id=0, attributes={"MultiProcessorCount": 132})
    cupy.cuda = SimpleNamespace(Device=lambda: chip)
    cupy.RawModule = lambda code, options: SimpleNamespace(
        get_function=lambda name: Function(name, launches)
    )
    for name in ("float32", "int32", "int64", "uint8"):
        setattr(cupy, name, getattr(np, name))
    return cupy


@pytest.fixture
def fake_device(monkeypatch):
    """-> load(op) giving the wrapper, on_device(array), and the list of launches."""
    launches = []
    kept = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith("dsv41_kernels.")}
    monkeypatch.setitem(sys.modules, "cupy", module(launches))

    def load(op):
        return getattr(importlib.import_module(f"dsv41_kernels.{op}.cupy_op"), op)

    yield SimpleNamespace(load=load, on_device=on_device, launches=launches)
    for name in [n for n in sys.modules if n.startswith("dsv41_kernels.")]:
        del sys.modules[name]
    sys.modules.update(kept)
