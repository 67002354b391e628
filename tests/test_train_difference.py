"""Central differences in float64, the one way in which every gradient is checked, and its checks.

    (f(x + h) - f(x - h)) / 2h        for every element x of every input, f weighted to one number

The forward text works in float32 on purpose. `float64` lets the same text compute in float64, so
that a difference of 1e-5 is not lost in rounding: it replaces the type, not the text.
"""

import sys
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest

import dsv41.train.ops
from dsv41.ops import rmsnorm
from dsv41.quant import FLOAT32

KEEPS = ("rope", "tokenizer")  # rope caches its float32 frequencies; angles may stay as they are


@contextmanager
def float64(package="dsv41"):
    """Within it, np.float32 is float64 in every module of the package."""
    wide = ModuleType("numpy")
    wide.__dict__.update({**vars(np), "float32": np.float64})
    changed = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(package + ".") and name.rpartition(".")[2] not in KEEPS
        if getattr(module, "np", None) is np
    ]
    for module in changed:
        module.np = wide
    try:
        yield
    finally:
        for module in changed:
            module.np = np


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def check(name, function, backward, inputs, by=None, rel=1e-6):
    """Every gradient that `backward` returns is that of `function`, element by element.

    function(**inputs) -> array or tuple of arrays; backward(*weights, **inputs) -> the gradients by
    the inputs named in `by` (default: all), where weights are those by function's results. Inputs
    are float64 arrays, or nested dicts of them, as parameters are.
    """
    with float64():
        results = _as_tuple(function(**inputs))
        # seeds that no input has: a weight equal to an input would hide a transposed gradient
        weights = [random(*np.shape(r), seed=100 + i) for i, r in enumerate(results)]

        def total():
            again = _as_tuple(function(**inputs))
            return sum(np.sum(w * r) for w, r in zip(weights, again, strict=True))

        grads = _as_tuple(backward(*weights, **inputs))
        for key, grad in zip(inputs if by is None else by, grads, strict=True):
            _compare(f"{name}: d{key}", total, inputs[key], grad, rel)


def _compare(name, total, x, grad, rel):
    if isinstance(grad, dict):
        assert grad, f"{name}: no gradients"
        for key, part in grad.items():
            _compare(f"{name}.{key}", total, x[key], part, rel)
        return
    assert grad.shape == x.shape, f"{name}: shape {grad.shape}, expected {x.shape}"
    want = differences(total, x)
    scale = max(np.max(np.abs(want), initial=0), 1e-3)
    error = np.max(np.abs(grad - want), initial=0) / scale
    assert error < rel, f"{name}: off by {error:.2g} of the largest gradient"


def differences(total, x, step=1e-5):
    """The gradient of total() by the array x, which is moved in place."""
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        kept = x[at]
        x[at] = kept + step
        high = total()
        x[at] = kept - step
        out[at] = (high - total()) / (2 * step)
        x[at] = kept
    return out


def _as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


# ---- does the check itself work? --------------------------------------------------------------


def test_differences_of_a_parabola_by_hand():
    x = np.array([1.0, -2.0])
    assert np.allclose(differences(lambda: x[0] ** 2 + 3 * x[0] * x[1], x), [-4, 3], atol=1e-9)


def test_a_wrong_factor_a_wrong_shape_and_a_missing_gradient_are_noticed():
    inputs = {"x": random(3)}
    check("square", lambda x: x * x, lambda g, x: 2 * x * g, inputs)
    with pytest.raises(AssertionError, match="square: dx: off by"):
        check("square", lambda x: x * x, lambda g, x: 2.00001 * x * g, inputs)
    with pytest.raises(AssertionError, match="shape"):
        check("square", lambda x: x * x, lambda g, x: (2 * x * g)[:2], inputs)
    with pytest.raises(AssertionError, match="no gradients"):
        check("nothing", lambda x: np.zeros(1), lambda g, x: {}, {"x": {}})


def test_the_forward_text_runs_in_float64_and_is_left_as_it_was():
    x = random(2, 3)
    with float64():
        assert rmsnorm(x, np.ones(3), 1e-6, FLOAT32).dtype == np.float64
        assert dsv41.train.ops.np.float32 is np.float64
    assert rmsnorm(np.float32(x), np.ones(3, np.float32), 1e-6, FLOAT32).dtype == np.float32
    assert dsv41.train.ops.np is np
