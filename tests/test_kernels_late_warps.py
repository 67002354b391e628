"""Attention whose warps come late: what no barrier orders would then show in the bits.

A tool that watches shared memory cannot follow these kernels (see sanitize.cu), so they are built
once more with JITTER, a wait of another length for every warp at every barrier (wgmma.cuh).
"""

from functools import partial

import numpy as np
import pytest
from compare import assert_same
from dsv41_kernels import launch, nvrtc
from test_kernels_rope_sparse_attn import few_rows
from test_kernels_sparse_attn import moved

from dsv41.quant import OFFICIAL

BUILDS = [b for b in launch.builds("rope_sparse_attn") if "HEADS" not in b[1]]


def late(seed):
    """`launch.kernel` that builds with JITTER."""
    return lambda op, name, **options: launch.kernel(op, name, **options, JITTER=seed)


@pytest.mark.parametrize(("arch", "macros"), BUILDS)
def test_it_compiles(arch, macros):
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    found = nvrtc.usage("rope_sparse_attn", arch, macros | {"JITTER": 1})
    assert "relay" in {kernel.name for kernel in found}


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["cluster", "pipeline", "relay", "relay 2", "relay 4"])
@pytest.mark.parametrize("widths", [(128, 512), (65, 1)])
def test_bits_do_not_depend_on_who_is_late(cupy, version, widths, monkeypatch):
    from dsv41_kernels.rope_sparse_attn import cupy_op

    name, *split = version.split()
    function = getattr(cupy_op, name)
    if split:
        function = partial(function, split=int(split[0]))
    arguments = moved(cupy, few_rows(*widths))
    want = function(*arguments, OFFICIAL).get()
    assert np.isfinite(want).all()
    for seed in (1, 2, 3):
        monkeypatch.setattr(cupy_op, "kernel", late(seed))
        for _ in range(5):
            assert_same(function(*arguments, OFFICIAL).get(), want)
