"""Cases of the packing benchmarks: every rung, Numba, the text on CuPy arrays, PyTorch.

Inputs and outputs are bf16, as the released code keeps activations, except for the text, which
takes float32. A check compares the bytes, or values, of rows spread over the whole array with the
definition on the CPU, bit for bit; the error reported is the number that differ, so it is 0.
"""

import importlib.util

import cupy
import numpy as np

from dsv41.formats import decode_bf16, encode_bf16
from dsv41.quant import fp4_pack, fp4_unpack, fp8_pack, fp8_unpack

from .bench import Case
from .records import BF16, launch_pack, launch_unpack

OPS = {op.__name__: op for op in (fp4_pack, fp4_unpack, fp8_pack, fp8_unpack)}
NUMBA_MAY_TAKE = 1.3  # times the target of the RawKernel
CHECKED = 512  # rows
SAY_ROWS = {1 << 20: "1M rows", 1 << 14: "16K rows"}


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


def differing(got, want):
    """How many elements are not the same; AssertionError unless none."""
    count = int(np.count_nonzero(got != want))
    assert count == 0, f"{count} of {want.size} differ from the definition"
    return float(count)


def pack_cases(op, fmt, channels, versions, target=None, quick=False):
    """Cases that pack 1M rows of `channels`."""
    rows = 1 << (14 if quick else 20)
    x = bf16_array((rows, channels))
    records = cupy.empty((rows, fmt.record_bytes(channels)), np.uint8)
    word = cupy.zeros(1, np.uint64)
    chosen = some_rows(rows)
    values = decode_bf16(bits(x)[chosen].get())

    def case(version, call, limit, source=x):
        def check():
            records.fill(0)
            call()
            return differing(records[chosen].get(), OPS[op].definition(values, fmt))

        size = source.nbytes + records.nbytes
        shape = f"{SAY_ROWS[rows]} x {channels} {fmt.name}"
        return Case(op, version, shape, call, check, size, target_us=limit if not quick else None)

    for version in versions:
        yield case(version, lambda v=version: launch_pack(op, x, records, word, fmt, v), target)
    if importlib.util.find_spec("numba"):
        from . import numba_records

        limit = target and NUMBA_MAY_TAKE * target
        yield case("numba", lambda: numba_records.launch_pack(x, records, word, fmt), limit)
    if importlib.util.find_spec("torch"):
        from . import torch_records

        inside, out = torch_records.tensor(bits(x), "bfloat16"), torch_records.tensor(records)
        yield case("torch", lambda: out.copy_(torch_records.pack(inside, fmt)), None)
    wide = decode_bf16(bits(x))
    text = OPS[op].definition
    yield case("cupy text", lambda: cupy.copyto(records, text(wide, fmt)), None, wide)


def unpack_cases(op, fmt, channels, versions, target=None, quick=False):
    """Cases that unpack 1M records of `channels` to bf16."""
    rows = 1 << (14 if quick else 20)
    records = cupy.empty((rows, fmt.record_bytes(channels)), np.uint8)
    pack = op.replace("unpack", "pack")
    launch_pack(pack, bf16_array((rows, channels)), records, cupy.zeros(1, np.uint64), fmt)
    out = cupy.zeros((rows, channels), np.uint16).view(BF16)
    wide = cupy.empty((rows, channels), np.float32)
    chosen = some_rows(rows)
    stored = records[chosen].get()

    def case(version, call, limit, target_array=out):
        def check():
            bits(target_array).fill(0)
            call()
            want = OPS[op].definition(stored, channels, fmt, target_array.dtype)
            return differing(bits(target_array)[chosen].get(), want.view(np.uint16))

        size = records.nbytes + target_array.nbytes
        shape = f"{SAY_ROWS[rows]} x {channels} {fmt.name}"
        return Case(op, version, shape, call, check, size, target_us=limit if not quick else None)

    for version in versions:
        yield case(version, lambda v=version: launch_unpack(op, records, out, fmt, v), target)
    if importlib.util.find_spec("numba"):
        from . import numba_records

        limit = target and NUMBA_MAY_TAKE * target
        yield case("numba", lambda: numba_records.launch_unpack(records, out, fmt), limit)
    if importlib.util.find_spec("torch"):
        from . import torch_records

        inside, result = torch_records.tensor(records), torch_records.tensor(bits(out), "bfloat16")
        yield case("torch", lambda: result.copy_(torch_records.unpack(inside, channels, fmt)), None)
    text = OPS[op].definition
    yield case("cupy text", lambda: cupy.copyto(wide, text(records, channels, fmt)), None, wide)
