"""A CuPy without a GPU: arrays are NumPy's, a launch is only written down.

Enough to run a kernel's wrapper on any machine: its checks, its shapes, the grid it asks for.
"""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np


class FakeArray(np.ndarray):
    """A NumPy array that claims to be in CUDA memory."""

    __cuda_array_interface__ = {}  # noqa: RUF012


def on_fake_device(x):
    return np.asarray(x).view(FakeArray)


def _module(launches):
    module = ModuleType("cupy")

    def raw_module(code, options=(), **settings):
        def function(name):
            return lambda grid, block, arguments, **more: launches.append((name, grid, block))

        return SimpleNamespace(get_function=function)

    module.RawModule, module.ndarray = raw_module, FakeArray
    module.empty = lambda shape, dtype=np.float32: on_fake_device(np.empty(shape, dtype))
    module.zeros = lambda shape, dtype=np.float32: on_fake_device(np.zeros(shape, dtype))
    module.empty_like = lambda x: on_fake_device(np.empty_like(x))
    module.ascontiguousarray = lambda x, dtype=None: on_fake_device(np.ascontiguousarray(x, dtype))
    runtime = SimpleNamespace(getDeviceProperties=lambda device: {"multiProcessorCount": 132})
    stream = SimpleNamespace(ptr=0)
    module.cuda = SimpleNamespace(
        runtime=runtime, Device=lambda: SimpleNamespace(id=0), get_current_stream=lambda: stream
    )
    for name in ("float32", "int32", "int64", "uint8", "uint16", "uint32"):
        setattr(module, name, getattr(np, name))
    return module


def _forget():
    for name in [n for n in sys.modules if n.startswith("dsv41_kernels.")]:
        del sys.modules[name]


@contextmanager
def fake_device():
    """-> wrapper(op) imports dsv41_kernels.<op>.cupy_op with the fake CuPy; and the launches."""
    launches, real = [], sys.modules.get("cupy")
    _forget()
    sys.modules["cupy"] = _module(launches)

    def wrapper(op):
        return getattr(importlib.import_module(f"dsv41_kernels.{op}.cupy_op"), op)

    try:
        yield wrapper, launches
    finally:
        _forget()
        del sys.modules["cupy"]
        if real is not None:
            sys.modules["cupy"] = real
