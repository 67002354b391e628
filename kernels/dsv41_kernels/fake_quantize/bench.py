"""How fast are activations rounded to FP8 on their way into a linear? 4,096 rows, float32."""

import functools

import cupy
import numpy as np

from dsv41.quant import ACTIVATION_FP8
from dsv41.quant import fake_quantize as text

from ..records_cases import Maker, some_rows
from .cupy_op import launch_fake

CHANNELS = 5120


def cases(quick=False):
    for rows in (64,) if quick else (1, 64, 4096):
        x = cupy.random.default_rng(0).standard_normal((rows, CHANNELS), dtype=np.float32)
        out, word, chosen = cupy.empty_like(x), cupy.zeros(1, np.uint64), some_rows(rows)
        want = text.definition(x[chosen].get(), ACTIVATION_FP8)
        make = Maker("fake_quantize", f"T={rows}, d={CHANNELS}", chosen, want, None)
        for version in ("v1", "v2"):
            call = functools.partial(launch_fake, x, out, word, ACTIVATION_FP8, version)
            yield make(version, call, x, out)
        yield make("cupy text", functools.partial(_text, x, out), x, out)


def _text(x, out):
    cupy.copyto(out, text.definition(x, ACTIVATION_FP8))
