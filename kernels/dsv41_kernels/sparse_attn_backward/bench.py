"""Gradients of the miniature's attention, checked against the definition in float64."""

import cupy
import numpy as np

from dsv41.quant import FLOAT32
from dsv41.train import sparse_attn as definitions

from ..bench import Case
from ..sparse_attn.bench import CHANNELS, HEADS, WIDTH, moved, training_inputs
from .cupy_op import sparse_attn_backward

CHECKED = 2048  # tokens, whole documents, of the call that is compared


def error(function):
    """The largest rms error ratio of the five results; AssertionError beyond 1e-5."""
    inputs = training_inputs(CHECKED, FLOAT32, seed=1)
    do = cupy.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape, np.float32))
    got = function(do, *inputs, FLOAT32)
    q, *reads, sink = (x.get() for x in inputs)
    exact = (do.get().astype(np.float64), q.astype(np.float64), *reads, sink.astype(np.float64))
    want = definitions.sparse_attn_backward.definition(*exact, FLOAT32)
    pairs = [(g.get(), w) for g, w in zip(got, want, strict=True)]
    found = max(float(np.sqrt(np.mean((g - w) ** 2) / np.mean(w**2))) for g, w in pairs)
    assert found < 1e-5, f"error {found:.3g}"
    return found


def cases(quick=False):
    tokens = 2048 if quick else 32_768
    inputs = training_inputs(tokens, FLOAT32)
    do = cupy.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape, np.float32))
    text = definitions.sparse_attn_backward.definition
    for version, function in {"v1": sparse_attn_backward, "cupy text": text}.items():
        yield Case(
            "sparse_attn_backward",
            version,
            f"T={tokens}, 8 heads x 64, 64 + 64 rows",
            call=lambda f=function: f(do, *inputs, FLOAT32),
            check=lambda f=function: error(f),
            bytes=2 * moved(tokens, FLOAT32),
            flops=tokens * 10 * HEADS * CHANNELS * 2 * WIDTH,
        )
