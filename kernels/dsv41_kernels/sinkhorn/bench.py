"""Sinkhorn of the 4 x 4 matrices of a prefill and of a training step: RawKernel, Numba, peers.

64 bytes come and 64 go for a matrix, but 39 passes of dependent arithmetic lie in between.
"""

import importlib.util

import cupy
import numpy as np

from dsv41.dispatch import OPS, find_kernel

from ..bench import Case

COUNTS = (4_096, 262_144)
ITERATIONS, EPS = 20, 1e-6


def cases(quick=False):
    """All versions on every count of matrices."""
    versions = {"v1": find_kernel("sinkhorn", "cupy"), "cupy text": OPS["sinkhorn"]}
    if importlib.util.find_spec("numba") is not None:
        versions["numba"] = find_kernel("sinkhorn", "numba")
    if importlib.util.find_spec("torch") is not None:
        versions["torch"] = in_torch
    for count in COUNTS[: 1 if quick else None]:
        logits = np.random.default_rng(0).normal(0, 3, (count, 4, 4)).astype(np.float32)
        moved = cupy.asarray(logits)
        for version, function in versions.items():
            yield Case(
                op="sinkhorn",
                version=version,
                shape=f"{count} matrices of 4 x 4",
                call=lambda function=function, moved=moved: function(moved, ITERATIONS, EPS),
                check=lambda function=function, logits=logits: error(function, logits),
                bytes=2 * logits.nbytes,
                flops=count * ITERATIONS * 2 * (16 * 2 + 4 * 3),
            )


def in_torch(logits, iterations, eps):
    """The definition in PyTorch."""
    import torch

    b = torch.from_dlpack(logits).softmax(-1) + eps
    b = b / (b.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        b = b / (b.sum(-1, keepdim=True) + eps)
        b = b / (b.sum(-2, keepdim=True) + eps)
    return cupy.from_dlpack(b)


def error(function, logits):
    """Largest difference from the float64 definition, on some of the matrices."""
    some = logits[:1000]
    want = OPS["sinkhorn"](some.astype(np.float64), ITERATIONS, EPS)
    worst = np.abs(function(cupy.asarray(some), ITERATIONS, EPS).get() - want).max()
    assert worst < 1e-6, f"sinkhorn: off by {worst}"
    return float(worst)
