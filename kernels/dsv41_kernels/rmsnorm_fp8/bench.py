"""How fast is a row of the residual stream normalised and cast for an FP8 linear? 5,120 channels.

The error is the share of bytes that differ from the definition on the CPU: the sum of squares is
taken in another order, so a bf16 rounding, and then a code, may fall the other way now and then.
"""

import importlib.util

import cupy
import numpy as np

from dsv41.formats import decode_bf16
from dsv41.ops import rmsnorm_fp8 as text
from dsv41.quant import ACTIVATION_FP8, OFFICIAL

from ..bench import Case
from ..records_cases import NUMBA_MAY_TAKE, bf16_array, bits, some_rows
from .cupy_op import launch_rmsnorm

CHANNELS, EPS = 5120, 1e-6
TARGETS = {4096: 17.5}
MAY_DIFFER = 2e-3


def cases(quick=False):
    for rows in (64,) if quick else (1, 64, 512, 4096):
        yield from _cases(rows)


def _cases(rows):
    x, weight = bf16_array((rows, CHANNELS)), cupy.random.default_rng(1).random(CHANNELS) + 0.5
    weight = weight.astype(np.float32)
    records = cupy.empty((rows, ACTIVATION_FP8.record_bytes(CHANNELS)), np.uint8)
    word, chosen = cupy.zeros(1, np.uint64), some_rows(rows)
    values = decode_bf16(bits(x)[chosen].get())
    want = text.definition(values, weight.get(), EPS, OFFICIAL)
    target = TARGETS.get(rows)

    def case(version, call, limit=None, source=x):
        def check():
            records.fill(0)
            call()
            share = float(np.mean(records[chosen].get() != want))
            assert share < MAY_DIFFER, f"{share:.2%} of the bytes differ from the definition"
            return share

        size = source.nbytes + weight.nbytes + records.nbytes
        return Case("rmsnorm_fp8", version, f"T={rows}, d={CHANNELS}", call, check, size, 0, limit)

    for version in ("v1", "v2", "v3"):
        arguments = (x, weight, records, word, EPS, version)
        yield case(version, lambda a=arguments: launch_rmsnorm(*a), target)
    if importlib.util.find_spec("numba"):
        from . import numba_op

        limit = target and NUMBA_MAY_TAKE * target
        yield case("numba", lambda: numba_op.launch_rmsnorm(x, weight, records, word, EPS), limit)
    if importlib.util.find_spec("torch"):
        yield case("torch", _torch_call(x, weight, records))
    wide = decode_bf16(bits(x))
    plain = text.definition
    yield case(
        "cupy text", lambda: cupy.copyto(records, plain(wide, weight, EPS, OFFICIAL)), None, wide
    )


def _torch_call(x, weight, records):
    from .. import torch_records as peer

    inside, out = peer.tensor(bits(x), "bfloat16"), peer.tensor(records)
    scale = peer.tensor(weight)
    return lambda: out.copy_(peer.pack(peer.rmsnorm(inside, scale, EPS), ACTIVATION_FP8))
