"""One definition, many implementations: who runs when a marked function is called?

`@op` marks a NumPy definition that a kernel may replace. The body is the meaning; a kernel is only
another way to compute it, found by name in the package `dsv41_kernels` (folder kernels/):

    dsv41/sparse_attn.py : sparse_attn(...)      the definition
    dsv41_kernels/sparse_attn/cupy_op.py         a function of the same name and signature
    dsv41_kernels/sparse_attn/numba_op.py        another one

With CuPy arrays among the arguments the CuPy kernel is preferred; where there is none, the text
itself runs on CuPy arrays. `with use("numpy")`, `use("cupy")`, `use("numba")` or the environment
variable DSV41_BACKEND force a choice. This is the only module that asks where an array lives.
"""

import functools
import importlib
import importlib.util
import os
import sys
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import numpy as np

BACKENDS = ("numpy", "cupy", "numba")
OPS = {}  # name -> definition, every @op of the package

_forced = ContextVar("dsv41_backend", default=None)
_replaced = ContextVar("dsv41_replaced", default={})  # noqa: B039, never written to


def op(definition):
    """Mark `definition` as replaceable by a kernel of the same name; `.definition` keeps it."""
    name = definition.__name__
    OPS[name] = definition

    @functools.wraps(definition)
    def call(*args, **kwargs):
        if name in _replaced.get():
            return _replaced.get()[name](*args, **kwargs)
        kernel = find_kernel(name, choose_backend((*args, *kwargs.values())))
        return (kernel or definition)(*args, **kwargs)

    call.definition = definition
    return call


def on_host(x):
    """True for arrays in CPU memory (everything but CUDA arrays)."""
    return not _is_cuda(type(x))


@functools.cache
def _is_cuda(kind):
    return hasattr(kind, "__cuda_array_interface__")  # of the class: an array would build it


def beside(x, like):
    """The NumPy array x in the library and memory of `like`; `like` None means NumPy."""
    return x if like is None or on_host(like) else np.asarray(x, like=like)


def to_host(x):
    """x as a NumPy array."""
    return np.asarray(x) if on_host(x) else x.get()


def block_elements(x):
    """How many float32 a temporary may hold where x lives: 16 MB in a CPU's caches' reach, 1 GB
    on a GPU, which needs large launches.
    """
    return 1 << 22 if on_host(x) else 1 << 28


def choose_backend(args=()):
    """The forced backend if there is one, else "cupy" when an argument is a CUDA array."""
    forced = _forced.get() or os.environ.get("DSV41_BACKEND")
    if forced:
        return _checked(forced)
    if "cupy" not in sys.modules:  # then no argument can be a CUDA array
        return "numpy"
    return "numpy" if all(on_host(x) for x in args) else "cupy"


@contextmanager
def use(backend):
    """Force a backend ("numpy", "cupy" or "numba") inside a with block."""
    token = _forced.set(_checked(backend))
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def replaced(**functions):
    """Inside a with block, ops of these names are these functions: an experiment, for whoever wants
    to see what the model is without one of its parts. `op.definition` is still the definition.
    """
    if unknown := set(functions) - set(OPS):
        raise ValueError(f"{min(unknown)}: no such op; there are {', '.join(sorted(OPS))}")
    token = _replaced.set({**_replaced.get(), **functions})
    try:
        yield
    finally:
        _replaced.reset(token)


@functools.cache
def find_kernel(name, backend):
    """The kernel for op `name`, or None where `dsv41_kernels` has none for this backend."""
    if backend == "numpy" or importlib.util.find_spec("dsv41_kernels") is None:
        return None
    package = f"dsv41_kernels.{name}"
    module = f"{package}.{backend}_op"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), name)


def errors_at_end():
    """A context for one step of a model: bad values that kernels meet are raised when it ends.

    Each look at what a kernel reports waits for the GPU, so a step looks once. On a CPU the
    definitions raise where they are.
    """
    if "cupy" not in sys.modules or importlib.util.find_spec("dsv41_kernels") is None:
        return nullcontext()
    return importlib.import_module("dsv41_kernels.errors").deferred_errors()


def _checked(backend):
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend
