"""Sinkhorn in Numba CUDA: in the simulator here, on the GPU with `make test-gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41.dispatch import use
from dsv41.mhc import sinkhorn

ROOT = Path(__file__).parent.parent
SIZES, COUNTS = [1, 2, 3, 4, 5], [0, 1, 2, 129]

# what runs below in a process of its own, because Numba decides at its first import whether to
# simulate: every size and count, and logits that overflow without the shift
SIMULATION = """
import numpy as np
from dsv41.dispatch import use
from dsv41.mhc import sinkhorn
for size in (1, 2, 4):
    for logits in (3 * np.random.default_rng(size).normal(size=(3, 2, size, size)),
                   1000 * np.eye(size), np.zeros((0, size, size))):
        for iterations in (1, 2, 20):
            with use("numba"):
                got = sinkhorn(logits.astype(np.float32), iterations, 1e-6)
            want = sinkhorn.definition(logits, iterations, 1e-6)
            assert got.dtype == np.float32 and got.shape == want.shape
            worst = np.abs(got - want).max(initial=0)
            assert worst < 1e-6, (size, iterations, worst)
wrongs = {"expected shape (..., S, S), got (2, 3)": np.zeros((2, 3), np.float32),
          "expected float32, got float64": np.zeros((4, 4)),
          "expected shape (..., S, S), got (4,)": np.zeros(4, np.float32)}
for message, wrong in wrongs.items():
    try:
        with use("numba"):
            sinkhorn(wrong, 20, 1e-6)
    except (TypeError, ValueError) as error:
        assert str(error) == f"logits: {message}", error
    else:
        raise AssertionError(f"{wrong.dtype} {wrong.shape} was accepted")
print("simulated")
"""


def test_in_the_simulator():
    pytest.importorskip("numba.cuda", reason="needs Numba: pip install dsv41[cuda13]")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "simulated", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "numba"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_on_the_device(backend, size, count):
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install dsv41[cuda13]")
    if backend == "numba":
        pytest.importorskip("numba.cuda", reason="needs Numba: pip install dsv41[cuda13]")
    logits = np.random.default_rng(size).normal(0, 5, (count, size, size)).astype(np.float32)
    want = sinkhorn.definition(logits.astype(np.float64), 20, 1e-6)
    with use(backend):
        got = sinkhorn(cupy.asarray(logits), 20, 1e-6).get()
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max(initial=0) < 1e-6
