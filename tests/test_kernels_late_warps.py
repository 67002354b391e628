"""Attention whose warps come late: what no barrier orders would then show in the bits.

A tool that watches shared memory does not see what a warpgroup's products read there, so all are
built once more with JITTER: at named barriers, and behind bytes that arrive, every warp waits for
another while (wgmma.cuh).
"""

import numpy as np
import pytest
from compare import assert_same
from dsv41_kernels import launch, nvrtc
from test_kernels_rope_sparse_attn import inputs
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


VERSIONS = {
    "cluster, 8 add values": ("cluster", {"adders": 8}),
    "cluster, 16 add values": ("cluster", {"adders": 16}),
    "pipeline": ("pipeline", {}),
    "relay": ("relay", {"split": 1}),
    "relay, 2 blocks a token": ("relay", {"split": 2}),
    "relay, 4 blocks a token": ("relay", {"split": 4}),
    "resident": ("resident", {}),
    "quad, 4 blocks a token": ("quad", {"sharers": 4}),
    "quad, 2 blocks a token": ("quad", {"sharers": 2}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("widths", [(128, 512), (65, 1), (100, 150)])
def test_bits_do_not_depend_on_who_is_late(cupy, version, widths, monkeypatch):
    from dsv41_kernels.rope_sparse_attn import cupy_op

    near, far = widths
    counts = range(5, 0, -1)  # of fifths
    arguments = inputs([near * n // 5 for n in counts], [far * n // 5 for n in counts], 600, widths)
    arguments = moved(cupy, arguments)
    name, options = VERSIONS[version]
    function = getattr(cupy_op, name)
    want = function(*arguments, OFFICIAL, **options).get()
    assert np.isfinite(want).all()
    monkeypatch.setattr(cupy_op, "processors", lambda: 2)  # so that blocks stay for a token more
    for seed in (1, 2):
        monkeypatch.setattr(cupy_op, "kernel", late(seed))
        for _ in range(5):
            assert_same(version, function(*arguments, OFFICIAL, **options).get(), want)
