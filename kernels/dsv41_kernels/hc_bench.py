"""The six hyper-connection ops of training, measured at the miniature's and the released width.

Each op's folder has a bench.py that asks here for its own cases. The check compares the kernel
with the definition in float64 on the same inputs; `cupy text` is the definition on CuPy arrays.
"""

from types import SimpleNamespace

import cupy
import numpy as np

import dsv41.train.mhc  # noqa: F401, its definitions enter OPS
from dsv41.dispatch import OPS, find_kernel
from dsv41.quant import FLOAT32

from .bench import Case

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
STREAMS, MIX = 4, 24
SHAPES = [(32_768, 128), (4_096, 5_120)]  # tokens of a step of the miniature; the released width
QUICK = [(32_768, 128), (64, 30)]  # the second is no multiple of 16 bytes, for which v1 stays
LATEST = dict.fromkeys(("hc_coefficients", "hc_coefficients_backward", "hc_update_backward"), "v2")
# float32 numbers of width D that one token reads or writes
ROWS = {
    "hc_coefficients": STREAMS,
    "hc_collapse": STREAMS + 1,
    "hc_update": 2 * STREAMS + 1,
    "hc_coefficients_backward": 2 * STREAMS,
    "hc_collapse_backward": 2 * STREAMS + 1,
    "hc_update_backward": 3 * STREAMS + 2,
}


def inputs(op, tokens, width, seed=0):
    """NumPy arguments of the op, in the order of its signature."""
    rng = np.random.default_rng(seed)

    def random(*shape, scale=1.0):
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    x, y = random(tokens, STREAMS, width), random(tokens, width)
    pre, post, comb = random(tokens, 4), random(tokens, 4), random(tokens, 4, 4)
    fn = random(MIX, STREAMS * width, scale=(STREAMS * width) ** -0.5)
    mixing = x, fn, random(MIX), np.float32([0.5, 1.5, 2]), CONFIG, FLOAT32
    return {
        "hc_coefficients": lambda: mixing,
        "hc_collapse": lambda: (x, pre, FLOAT32),
        "hc_update": lambda: (x, y, post, comb, FLOAT32),
        "hc_coefficients_backward": lambda: (pre, post, comb, *mixing),
        "hc_collapse_backward": lambda: (y, x, pre),
        "hc_update_backward": lambda: (random(tokens, STREAMS, width), x, y, post, comb),
    }[op]()


def error(function, op, width, tokens=200):
    """Largest error against the float64 definition, as a share of each result's largest number."""
    given = inputs(op, tokens, width, seed=1)
    wide = [a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in given]
    want, got = OPS[op](*wide), function(*_moved(given))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    worst = max(np.abs(g.get() - w).max() / np.abs(w).max() for g, w in pairs)
    assert worst < 1e-5, f"{op}: {worst}"
    return float(worst)


def cases(op, quick=False):
    """The kernel beside the text on CuPy arrays."""
    for tokens, width in QUICK if quick else SHAPES:
        version = "v1" if op == "hc_update_backward" and width % 4 else LATEST.get(op, "v1")
        functions = {version: find_kernel(op, "cupy"), "cupy text": OPS[op]}
        given = _moved(inputs(op, tokens, width))
        for version, function in functions.items():
            yield Case(
                op=op,
                version=version,
                shape=f"T={tokens}, D={width}",
                call=lambda function=function, given=given: function(*given),
                check=lambda function=function, width=width: error(function, op, width),
                bytes=4 * ROWS[op] * tokens * width,
            )


def _moved(given):
    return [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in given]
