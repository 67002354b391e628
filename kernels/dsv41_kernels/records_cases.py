"""Cases of the packing benchmarks: every rung, Numba, the text on CuPy arrays, PyTorch.

Inputs and outputs are bf16, as the released code keeps activations, except for the text, which
takes float32. A check compares the bytes, or values, of rows spread over the whole array with the
definition on the CPU, bit for bit; the error reported is the number that differ, so it is 0.
"""

import functools
import importlib.util
from dataclasses import dataclass

import cupy
import numpy as np

from dsv41.formats import decode_bf16, encode_bf16
from dsv41.quant import fp4_pack, fp4_unpack, fp8_pack, fp8_unpack

from .bench import Case
from .records import BF16, launch_pack, launch_unpack

OPS = {op.__name__: op for op in (fp4_pack, fp4_unpack, fp8_pack, fp8_unpack)}
NUMBA_MAY_TAKE = 1.3  # times the target of the RawKernel
CHECKED = 512  # rows


def bf16_array(shape, seed=0):
    """Normal numbers, a scale of its own for every row, as bf16 in GPU memory."""
    rng = cupy.random.default_rng(seed)
    x = rng.standard_normal(shape, dtype=np.float32)
    x *= cupy.exp2(rng.integers(-6, 7, size=(*shape[:-1], 1)).astype(np.float32))
    return encode_bf16(x).view(BF16)


def bits(x):
    """bf16 values as uint16, for libraries that know no bf16."""
    return x.view(np.uint16)


def some_rows(count):
    """First, last, and evenly spaced rows."""
    return cupy.asarray(np.unique(np.linspace(0, count - 1, min(count, CHECKED)).astype(np.int64)))


@dataclass(frozen=True)
class Maker:
    """Makes the cases of one operation on one shape; `want` are the chosen rows of the result."""

    op: str
    shape: str
    chosen: cupy.ndarray
    want: np.ndarray
    target: float | None

    def __call__(self, version, call, source, out):
        """The case that computes `out` from `source`."""
        limit = self.target if version.startswith("v") else None
        if version == "numba" and self.target:
            limit = NUMBA_MAY_TAKE * self.target
        size = source.nbytes + out.nbytes
        check = functools.partial(self.check, call, out)
        return Case(self.op, version, self.shape, call, check, size, target_us=limit)

    def check(self, call, out):
        """How many of the chosen elements have other bits; AssertionError unless none."""
        unit = np.uint8 if out.dtype == np.uint8 else np.uint16
        out.view(np.uint8).fill(0)
        call()
        got, want = out.view(unit)[self.chosen].get(), self.want.astype(out.dtype).view(unit)
        count = int(np.count_nonzero(got != want))
        assert count == 0, f"{count} of {want.size} differ from the definition"
        return float(count)


def shape_of(channels, fmt, quick):
    """-> rows, and how people say it."""
    rows = 1 << (14 if quick else 20)
    return rows, f"{'16K' if quick else '1M'} rows x {channels} {fmt.name}"


def pack_cases(op, fmt, channels, versions, target=None, quick=False):
    """Cases that pack 1M rows of `channels`."""
    rows, shape = shape_of(channels, fmt, quick)
    x, word = bf16_array((rows, channels)), cupy.zeros(1, np.uint64)
    records = cupy.empty((rows, fmt.record_bytes(channels)), np.uint8)
    chosen = some_rows(rows)
    want = OPS[op].definition(decode_bf16(bits(x)[chosen].get()), fmt)
    make = Maker(op, shape, chosen, want, None if quick else target)
    for version in versions:
        yield make(version, lambda v=version: launch_pack(op, x, records, word, fmt, v), x, records)
    if importlib.util.find_spec("numba"):
        from . import numba_records

        call = functools.partial(numba_records.launch_pack, x, records, word, fmt)
        yield make("numba", call, x, records)
    if importlib.util.find_spec("torch"):
        from . import torch_records as peer

        inside, out = peer.tensor(bits(x), "bfloat16"), peer.tensor(records)
        yield make("torch", lambda: out.copy_(peer.pack(inside, fmt)), x, records)
    wide, text = decode_bf16(bits(x)), OPS[op].definition
    yield make("cupy text", lambda: cupy.copyto(records, text(wide, fmt)), wide, records)


def unpack_cases(op, fmt, channels, versions, target=None, quick=False):
    """Cases that unpack 1M records of `channels` to bf16."""
    rows, shape = shape_of(channels, fmt, quick)
    records = random_records(fmt, rows, channels)
    out = cupy.zeros((rows, channels), np.uint16).view(BF16)
    chosen = some_rows(rows)
    want = OPS[op].definition(records[chosen].get(), channels, fmt)
    make = Maker(op, shape, chosen, want, None if quick else target)
    for version in versions:
        yield make(version, lambda v=version: launch_unpack(op, records, out, fmt, v), records, out)
    if importlib.util.find_spec("numba"):
        from . import numba_records

        call = functools.partial(numba_records.launch_unpack, records, out, fmt)
        yield make("numba", call, records, out)
    if importlib.util.find_spec("torch"):
        from . import torch_records as peer

        inside, result = peer.tensor(records), peer.tensor(bits(out), "bfloat16")
        yield make("torch", lambda: result.copy_(peer.unpack(inside, channels, fmt)), records, out)
    wide, text = cupy.empty((rows, channels), np.float32), OPS[op].definition
    call = functools.partial(_copy_text, text, records, channels, fmt, wide)
    yield make("cupy text", call, records, wide)


def _copy_text(text, records, channels, fmt, out):
    cupy.copyto(out, text(records, channels, fmt))


def random_records(fmt, rows, channels):
    """Records of normal numbers."""
    records = cupy.empty((rows, fmt.record_bytes(channels)), np.uint8)
    op = "fp4_pack" if fmt.element.bits == 4 else "fp8_pack"
    launch_pack(op, bf16_array((rows, channels)), records, cupy.zeros(1, np.uint64), fmt)
    return records
