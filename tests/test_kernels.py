"""CUDA kernels: every source compiles for Hopper without spills, and equals its definition."""

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsv41.dispatch import OPS, find_kernel
from dsv41.mhc import sinkhorn
from dsv41.train.mhc import sinkhorn_backward
from dsv41.train.ops import segment_sums
from dsv41.train.sparse_attn import sparse_attn_backward  # noqa: F401, makes its name known

ROOT = Path(__file__).parent.parent / "kernels" / "dsv41_kernels"
SOURCES = sorted(ROOT.glob("*/kernel.cu"))
STORED = ("-DNEAR=1", "-DFAR=2", "-DBF16=1")
MACROS = {
    "sparse_attn": ("-DC=64", "-DH=8", *STORED),
    "sparse_attn_backward": ("-DC=64", "-DH=8", *STORED),
    "rope_sparse_attn": ("-DC=512", "-DHEADS=64", *STORED),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.parent.name)
def test_source_compiles_for_hopper_without_spills(path, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed: install a CUDA toolkit to compile the kernels here")
    macros = MACROS.get(path.parent.name, ("-DS=4", "-DPASSES=39"))
    command = ["nvcc", "-arch=sm_90", *macros, "--cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.cubin"), str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill", done.stderr).count("0") >= 2


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.parent.name)
def test_every_kernel_folder_belongs_to_a_definition(path):
    assert path.parent.name in OPS
    assert (path.parent / "cupy_op.py").exists()


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy", reason="needs CuPy: pip install dsv41[cuda13]")
    try:
        found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    return found


def on_both(cupy, op, *arguments):
    """-> the definition's result, and that of the kernel, as NumPy arrays."""
    assert find_kernel(op.__name__, "cupy") is not None
    moved = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return op.definition(*arguments), op(*moved).get()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000])
def test_sinkhorn(cupy, size, count):
    logits = np.random.default_rng(0).normal(0, 5, (count, size, size)).astype(np.float32)
    logits[:1] = 1000 * np.eye(size)
    want, got = on_both(cupy, sinkhorn, logits, 20, 1e-6)
    assert np.abs(want - got).max(initial=0) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 255, 1000])
def test_sinkhorn_backward(cupy, count):
    rng = np.random.default_rng(0)
    dcomb, logits = rng.normal(0, 2, (2, count, 4, 4)).astype(np.float32)
    want, got = on_both(cupy, sinkhorn_backward, dcomb, logits, 20, 1e-6)
    assert np.abs(want - got).max(initial=0) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 31, 64, 300])
def test_segment_sums(cupy, channels):
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (1000, channels)).astype(np.float32)
    first = np.unique(np.concatenate([[0], rng.integers(0, 1000, 50)]))
    want, got = on_both(cupy, segment_sums, values, first)
    assert np.abs(want - got).max() < 1e-4
    assert np.array_equal(got, on_both(cupy, segment_sums, values, first)[1])


def test_kernel_modules_import_without_a_gpu_library_only_when_asked():
    """The package itself imports anywhere; only an op's module needs CuPy."""
    assert importlib.import_module("dsv41_kernels").__doc__
    assert importlib.import_module("dsv41_kernels.launch").grid(257) == (2,)
