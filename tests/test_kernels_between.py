"""The benchmark of the ops between the large ones: its inputs and its check, here on a CPU."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from dsv41_kernels import launch
from dsv41_kernels.bench import operations

from dsv41.dispatch import OPS


@pytest.fixture
def between(fake_cuda, monkeypatch):
    """The module, with NumPy in CuPy's place."""
    module = importlib.import_module("dsv41_kernels.between_bench")
    numpy = SimpleNamespace(asarray=np.asarray, asnumpy=np.asarray, ndarray=np.ndarray)
    monkeypatch.setattr(module, "cupy", numpy)
    return module


def test_every_operation_has_a_bench():
    assert set(operations()) == {path.parent.name for path in launch.HERE.glob("*/cupy_op.py")}


def test_the_definition_in_float32_passes_its_own_check(between):
    for op in between.INPUTS:
        assert between.error(op, OPS[op]) < between.MAY_DIFFER, op


def spoiled(between, op, which):
    """The op with one number wrong, in array `which` of all that it returns or changes."""

    def wrong(*arguments):
        results = OPS[op](*arguments)
        changed = between.leaves((results, arguments[: between.CHANGED.get(op, 0)]))
        if which < len(changed):
            changed[which][...].flat[-1] += 1  # of a scalar this is a copy
        seen.append(len(changed))
        return results

    seen = []
    return wrong, seen


def test_a_wrong_number_anywhere_does_not(between):
    for op in between.INPUTS:
        which, arrays = 0, 1
        while which < min(arrays, 12):
            wrong, seen = spoiled(between, op, which)
            if op == "balance_loss" and which == 0:
                wrong, seen = lambda *a: (OPS[op](*a)[0] + 1, OPS[op](*a)[1]), [2]  # noqa: B023
            with pytest.raises(AssertionError, match=op):
                between.error(op, wrong)
            which, arrays = which + 1, seen[0]


def test_bytes_are_every_array_once_and_changed_ones_twice(between, monkeypatch):
    monkeypatch.setattr(between, "find_kernel", lambda op, backend: OPS[op])
    sizes = {op: next(between.cases(op, quick=True)).bytes for op in ("scale_all", "swiglu")}
    assert sizes["scale_all"] == 2 * 4 * between.SMALL * between.ARRAY
    assert sizes["swiglu"] == 3 * 4 * between.SMALL * 2048
