"""How fast is a row of the residual stream normalised and cast for an FP8 linear? 5,120 channels.

The error is the share of bytes that differ from the definition on the CPU: the sum of squares is
taken in another order, so a bf16 rounding, and then a code, may fall the other way now and then.
"""

import functools
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
    size = x.nbytes + weight.nbytes + records.nbytes
    for version, call in _calls(x, weight, records, word):
        target = TARGETS.get(rows) if version.startswith("v") else None
        if version == "numba" and rows in TARGETS:
            target = NUMBA_MAY_TAKE * TARGETS[rows]
        check = functools.partial(_check, call, records, chosen, want)
        shape = f"T={rows}, d={CHANNELS}"
        extra = x.nbytes if version == "cupy text" else 0  # it reads float32
        yield Case("rmsnorm_fp8", version, shape, call, check, size + extra, target_us=target)


def _check(call, records, chosen, want):
    records.fill(0)
    call()
    share = float(np.mean(records[chosen].get() != want))
    assert share < MAY_DIFFER, f"{share:.2%} of the bytes differ from the definition"
    return share


def _calls(x, weight, records, word):
    """-> version, call that fills the records."""
    for version in ("v1", "v2", "v3", "v4"):
        yield version, functools.partial(launch_rmsnorm, x, weight, records, word, EPS, version)
    if importlib.util.find_spec("numba"):
        from . import numba_op

        yield "numba", functools.partial(numba_op.launch_rmsnorm, x, weight, records, word, EPS)
    if importlib.util.find_spec("torch"):
        from .. import torch_records as peer

        inside, out = peer.tensor(bits(x), "bfloat16"), peer.tensor(records)
        scale = peer.tensor(weight)
        norm = functools.partial(peer.rmsnorm, inside, scale, EPS)
        yield "torch", lambda: out.copy_(peer.pack(norm(), ACTIVATION_FP8))
    wide, plain = decode_bf16(bits(x)), text.definition
    yield "cupy text", lambda: cupy.copyto(records, plain(wide, weight, EPS, OFFICIAL))
