"""Norm, linear and gates against float64 loops; batch invariance; who runs a marked function."""

import importlib
import math
import subprocess
import sys
import types
import warnings

import ml_dtypes
import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import dispatch
from dsv41.dispatch import choose_backend, find_kernel, op, use
from dsv41.ops import (
    dense,
    linear,
    linear_fp8,
    matmul_rows,
    rmsnorm,
    rows,
    sigmoid,
    silu,
    sqrt_softplus,
    swiglu,
)
from dsv41.quant import FLOAT32, OFFICIAL, quantize_weight

INVARIANT = FLOAT32.but(batch_invariant=True)
AWKWARD = [0, 1, 2, 7, 8, 9, 63, 64, 65]
logits = st.floats(-200, 200, width=32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- rmsnorm --------------------------------------------------------------------------------


def test_rmsnorm_by_hand():
    # mean square of 1, 2, 2, 4 is 25 / 4
    x, weight = np.float32([[1, 2, 2, 4]]), np.float32([1, 1, 2, -1])
    assert_close("y", rmsnorm(x, weight, 1e-20, FLOAT32), [[0.4, 0.8, 1.6, -1.6]])


def test_rmsnorm_epsilon_is_added_to_the_mean_square_inside_the_root():
    x, weight = np.float32([[1e-10, -1e-10], [0, 0]]), np.ones(2, np.float32)
    y = rmsnorm(x, weight, 1e-20, FLOAT32)
    assert_close("mean square as large as epsilon", y, [[0.5**0.5, -(0.5**0.5)], [0, 0]])


@pytest.mark.parametrize("count", AWKWARD)
@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 512])
def test_rmsnorm_equals_a_float64_loop(count, width):
    x, weight = random(count, width), random(width, seed=1)
    want = np.zeros((count, width))
    for t in range(count):
        root = math.sqrt(sum(float(v) ** 2 for v in x[t]) / width + 1e-20)
        want[t] = [float(v) / root * float(w) for v, w in zip(x[t], weight, strict=True)]
    assert_close("y", rmsnorm(x, weight, 1e-20, FLOAT32), want, rel=1e-6)


def test_rmsnorm_is_rounded_once_after_the_weight():
    # rounding 1.00390625 to bf16 before the weight 1.5 would give 1.5, not 1.5078125
    weight = np.float32([1.5, 1.5])
    exact = rmsnorm(np.float32([[1.00390625, 0.99607843]]), weight, 1e-20, FLOAT32)
    assert_close("before rounding", exact, [[1.505871, 1.494129]], rel=1e-4)
    y = rmsnorm(np.float32([[1.00390625, 0.99607843]]), weight, 1e-20, OFFICIAL)
    assert_same("rounded", y, exact.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert y[0, 0] == 1.5078125


def test_rmsnorm_normalises_the_last_axis_of_any_shape():
    x, weight = random(2, 3, 5), random(5, seed=1)
    flat = rmsnorm(x.reshape(6, 5), weight, 1e-20, FLOAT32)
    assert_same("y", rmsnorm(x, weight, 1e-20, FLOAT32), flat.reshape(2, 3, 5))


def test_rmsnorm_reads_strides():
    weight = random(64, seed=1)
    for numerics in (FLOAT32, INVARIANT, OFFICIAL):
        assert_any_layout(
            "rmsnorm", lambda x, n=numerics: rmsnorm(x, weight, 1e-20, n), random(65, 64)
        )


# ---- linear ---------------------------------------------------------------------------------


def slow_linear(x, weight):
    y = np.zeros((len(x), len(weight)))
    for t in range(len(x)):
        for n in range(len(weight)):
            y[t, n] = sum(float(a) * float(b) for a, b in zip(x[t], weight[n], strict=True))
    return y


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT], ids=["plain", "batch_invariant"])
@pytest.mark.parametrize("count", AWKWARD)
def test_linear_equals_a_float64_loop(count, numerics):
    x, weight = random(count, 32), random(7, 32, seed=1)
    y = linear(x, weight, numerics)
    assert y.dtype == np.float32
    assert_close("y", y, slow_linear(x, weight))


def test_linear_stores_bf16_and_reads_x_as_it_is():
    x, weight = random(5, 32), random(3, 32, seed=1)
    want = slow_linear(x, weight).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_same("y", linear(x, weight, OFFICIAL), want.astype(np.float32))


def test_linear_fp8_quantises_x_in_groups_of_32():
    # beside 448 the scale is 1 and the smallest step 2^-9: half of it is lost. Alone it is not.
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 1], x[0, 33] = 448, 2.0**-10, 2.0**-10
    weight = np.zeros((2, 64), np.float32)
    weight[0, 1] = weight[1, 33] = 1
    assert_same("official", linear_fp8(x, weight, OFFICIAL), [[0, 2.0**-10]])
    assert_same("float32", linear_fp8(x, weight, FLOAT32), [[2.0**-10, 2.0**-10]])


@pytest.mark.parametrize("layout", ["tiles", "rows"])
def test_linear_reads_a_weight_that_is_still_stored_as_codes(layout):
    x, stored = random(5, 64), quantize_weight(random(33, 64, seed=1), layout)
    assert_same("y", linear(x, stored, FLOAT32), linear(x, stored.dense(), FLOAT32))
    assert_close("y", linear_fp8(x, stored, FLOAT32), slow_linear(x, stored.dense()))


def test_dense_and_rows_pass_a_plain_matrix_through():
    weight = random(5, 3)
    assert dense(weight) is weight
    assert_same("rows", rows(weight, np.array([4, 0, 4])), weight[[4, 0, 4]])


def test_rows_of_a_stored_table_reads_only_those_rows():
    class Table:
        def rows(self, ids):
            return np.float32(ids)[:, None]

    assert_same("rows", rows(Table(), np.array([2, 1])), np.float32([[2], [1]]))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 65])
@pytest.mark.parametrize("width", [64, 256, 640])
def test_batch_invariant_product_gives_a_row_the_same_bits_in_every_batch(count, width):
    weight, row = random(256, width), random(1, width, seed=1)
    alone = matmul_rows(row, weight, INVARIANT)
    others = random(count, width, seed=2)
    for place in {*range(min(count, 9)), count - 1}:
        batch = others.copy()
        batch[place] = row
        assert_same(
            f"row {place} of {count}", matmul_rows(batch, weight, INVARIANT)[place], alone[0]
        )


def test_batch_invariant_product_repeats_itself():
    x, weight = random(8, 256, seed=1), random(256, 256)
    first = matmul_rows(x, weight, INVARIANT)
    for _ in range(3):
        assert_same("again", matmul_rows(x, weight, INVARIANT), first)


def test_a_row_in_a_batch_equals_the_row_alone_to_rounding():
    x, weight = random(8, 256, seed=1), random(256, 256)
    together = matmul_rows(x, weight, FLOAT32)
    for t in range(8):
        assert_close("row", matmul_rows(x[t : t + 1], weight, FLOAT32), together[t : t + 1])


def test_products_read_strides():
    weight = random(48, 64, seed=1)
    for numerics in (FLOAT32, INVARIANT, OFFICIAL):
        for function in (matmul_rows, linear, linear_fp8):
            assert_any_layout(
                function.__name__, lambda x, f=function, n=numerics: f(x, weight, n), random(9, 64)
            )


# ---- gates ----------------------------------------------------------------------------------


def test_swiglu_clamps_up_on_both_sides_and_the_gate_only_above():
    gate, up = np.float32([20, -30, 12, 5, -15]), np.float32([-15, 25, 3, 11, -15])
    want = [-99.99546021, -2.80728689e-11, 29.99863806, 49.66535746, 4.58853340e-05]
    got = swiglu(gate, up, 10.0)
    for i in range(5):  # one by one: the small ones matter as much as the large ones
        assert_close(f"pair {i}", got[i], want[i], rel=1e-6, floor=0)


@pytest.mark.parametrize("limit", [0, 0.0, None])
def test_swiglu_without_a_limit_does_not_clamp(limit):
    got = swiglu(np.float32([20, -30]), np.float32([-15, 25]), limit)
    assert_close("open", got, [-300 / (1 + math.exp(-20)), -750 / (1 + math.exp(30))], rel=1e-6)


def test_swiglu_limit_itself_passes():
    assert_close("at", swiglu(np.float32([1]), np.float32([-1]), 1.0), [-1 / (1 + math.exp(-1))])


@repeatable
@given(st.lists(logits, min_size=1, max_size=9))
def test_sigmoid_and_silu_equal_float64(values):
    x = np.float32(values)
    for v, s, g in zip(values, sigmoid(x), silu(x), strict=True):
        want = 1 / (1 + math.exp(-v))
        assert_close("sigmoid", s, want, rel=1e-6, floor=1e-44)
        assert_close("silu", g, v * want, rel=1e-6, floor=1e-42)


def test_gates_survive_extreme_inputs_without_a_warning(no_warnings):
    x = np.float32([-np.inf, -1000, -88.8, 0, 88.8, 1000, np.inf])
    assert_close("sigmoid", sigmoid(x), [0, 0, 0, 0.5, 1, 1, 1])
    assert_close("silu", silu(x[1:]), [0, 0, 0, 88.8, 1000, np.inf])


SOFTPLUS = {
    -100: 1.92874985e-22,
    -20: 4.53999297e-05,
    -16.64: 2.43595861e-04,
    -1: 0.559697854,
    0: 0.832554611,
    1: 1.145976303,
    20: 4.472135955,
    88.8: 9.423375192,
    100: 10.0,
    1000: 31.6227766,
}


@pytest.mark.parametrize("x", SOFTPLUS)
def test_sqrt_softplus_is_exact_at_both_ends(x):
    assert_close("score", sqrt_softplus(np.float32([x])), [SOFTPLUS[x]], rel=1e-6, floor=0)


def test_sqrt_softplus_warns_of_nothing(no_warnings):
    score = sqrt_softplus(np.float32([-1000, -200, -100, 100, 200, 1000, 3e38]))
    assert np.isfinite(score).all()


@repeatable
@given(logits)
def test_sqrt_softplus_equals_float64(x):
    want = math.sqrt(math.log1p(math.exp(-abs(x))) + max(x, 0))
    assert_close("score", sqrt_softplus(np.float32([x])), [want], rel=1e-6, floor=1.5e-45)


def test_sqrt_softplus_grows_across_the_switch_between_its_two_forms():
    x = np.arange(-20.01, -19.99, 1e-5).astype(np.float32)
    assert (np.diff(sqrt_softplus(x)) >= 0).all()


def test_gates_keep_float32_and_read_strides():
    x, u = random(5, 6), random(5, 6, seed=1)
    for function in (sigmoid, silu, sqrt_softplus, lambda g: swiglu(g, u, 1.0)):
        assert function(x).dtype == np.float32
        assert_any_layout("gate", function, x)


def test_a_float64_setting_does_not_make_float64_activations():
    x, w = random(2, 4), random(4, seed=1)
    assert rmsnorm(x, w, np.float64(1e-20), FLOAT32).dtype == np.float32
    assert swiglu(x, x, np.float64(1.5)).dtype == np.float32
    assert linear(x, random(3, 4), FLOAT32).dtype == np.float32
    assert linear_fp8(random(2, 32), random(3, 32), OFFICIAL).dtype == np.float32


# ---- who runs a marked function -------------------------------------------------------------


class CudaArray:
    """What dispatch recognises a GPU array by."""

    __cuda_array_interface__ = None


@pytest.fixture
def doubled(monkeypatch, tmp_path):
    """An op `doubled` with a kernel for cupy, none for numba; -> the op. Nothing leaks out."""
    package = importlib.import_module("dsv41_kernels")
    folder = tmp_path / "doubled"
    folder.mkdir()
    (folder / "cupy_op.py").write_text("def doubled(x, y=None):\n    return 'cupy kernel'\n")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(dispatch, "OPS", {})
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))  # where such arrays live
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    find_kernel.cache_clear()
    importlib.invalidate_caches()

    @op
    def doubled(x, y=None):
        """Twice x."""
        return "definition"

    yield doubled
    find_kernel.cache_clear()


def test_an_op_keeps_its_definition_and_is_listed(doubled):
    assert doubled.definition(1) == "definition"
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice x.")
    assert dispatch.OPS == {"doubled": doubled.definition}


def test_numpy_arguments_run_the_definition(doubled):
    assert doubled(np.ones(3)) == "definition"
    assert doubled(3) == "definition"


def test_cuda_arguments_run_the_kernel_found_by_name(doubled):
    assert doubled(CudaArray()) == "cupy kernel"
    assert doubled(1, CudaArray()) == "cupy kernel"


def test_a_cuda_argument_passed_by_name_counts_too(doubled):
    assert doubled(1, y=CudaArray()) == "cupy kernel"


def test_use_forces_a_backend_and_ends_with_its_block(doubled):
    with use("cupy"):
        assert doubled(1) == "cupy kernel"
        with use("numpy"):
            assert doubled(CudaArray()) == "definition"
        assert doubled(1) == "cupy kernel"
    assert doubled(1) == "definition"
    with pytest.raises(RuntimeError, match="inside"), use("cupy"):
        raise RuntimeError("inside")
    assert doubled(1) == "definition"


def test_the_definition_runs_where_there_is_no_kernel(doubled):
    with use("numba"):
        assert doubled(1) == "definition"
    assert find_kernel("no_such_op", "cupy") is None
    assert find_kernel("doubled", "numpy") is None


def test_the_environment_forces_a_backend_and_use_overrules_it(doubled, monkeypatch):
    monkeypatch.setenv("DSV41_BACKEND", "cupy")
    assert doubled(1) == "cupy kernel"
    with use("numpy"):
        assert doubled(1) == "definition"
    monkeypatch.setenv("DSV41_BACKEND", "")
    assert doubled(1) == "definition"


@pytest.mark.parametrize("name", ["cuda", "NumPy", "torch"])
def test_an_unknown_backend_is_refused_by_name(doubled, monkeypatch, name):
    with pytest.raises(ValueError, match=f"numpy, cupy, numba, got '{name}'"), use(name):
        pass
    monkeypatch.setenv("DSV41_BACKEND", name)
    with pytest.raises(ValueError, match=f"numpy, cupy, numba, got '{name}'"):
        doubled(1)


def test_choose_backend_reads_where_the_arguments_live(monkeypatch):
    monkeypatch.delenv("DSV41_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert choose_backend((np.ones(2), 3)) == "numpy"
    assert choose_backend((np.ones(2), CudaArray())) == "cupy"


def test_the_package_imports_no_gpu_library():
    code = "import sys, dsv41.model; print([m for m in ('cupy', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
