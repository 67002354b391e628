"""Attention of the released model: decode of a batch, and prefill, over stored records."""

import importlib.util

import cupy
import numpy as np

from dsv41 import sparse_attn as definitions
from dsv41.quant import MAIN_KV_FP4, OFFICIAL, WINDOW_KV_FP8

from ..bench import Case
from ..sparse_attn.cupy_op import plain
from ..sparse_attn.oracle import attention
from .cupy_op import CHANNELS, HEADS, cluster, pipeline, quad, relay, resident, tiles

WINDOW, SELECTED = 128, 512
FREQS = np.float32(160_000.0 ** -(np.arange(32) / 32))
MOST_SPREAD, MOST_QUADS = 8, 66  # tokens up to which v5 and v8 are measured
SAMPLE = 4  # queries that are compared with float64
TORCH_TOKENS = 1024  # that PyTorch gathers rows of at once
TARGETS = {1: 9, 32: 16, 128: 26, 512: 88, 8192: 1350}  # microseconds, by tokens


def random_records(fmt, count, seed):
    """Records of fmt holding normal numbers, made in pieces on the device."""
    rng = cupy.random.default_rng(seed)
    made = [
        fmt.encode(rng.standard_normal((min(65_536, count - n), CHANNELS), dtype=cupy.float32))
        for n in range(0, count, 65_536)
    ]
    return cupy.concatenate(made)


def inputs(tokens, rows, prefill, seed=0):
    """Arguments of rope_sparse_attn up to the sink. Decode: every query its own 128 window records;
    prefill: the 128 before it. Selected rows are uniform, distinct and ascending.
    """
    rng = np.random.default_rng(seed)
    q = cupy.asarray(rng.standard_normal((tokens, HEADS, CHANNELS), np.float32))
    window = random_records(
        WINDOW_KV_FP8, tokens + WINDOW if prefill else tokens * WINDOW, seed + 1
    )
    first = np.arange(tokens)[:, None] * (1 if prefill else WINDOW)
    step = rows // SELECTED
    far = np.arange(SELECTED) * step + rng.integers(0, step, (tokens, SELECTED))
    place = cupy.asarray(rng.integers(0, 1 << 20, tokens))
    sink = cupy.asarray(rng.standard_normal(HEADS).astype(np.float32))
    lists = (cupy.asarray(x) for x in (first + np.arange(WINDOW), far))
    pool = random_records(MAIN_KV_FP4, rows, seed + 2)
    return q, place, FREQS, window, next(lists), pool, next(lists), sink


def moved(tokens):
    """Least bytes: q and o in float32, the lists, every listed record."""
    records = WINDOW * 528 + SELECTED * 288
    return tokens * (2 * 4 * HEADS * CHANNELS + 8 * (WINDOW + SELECTED) + records)


def error(o, arguments, limit=4e-3):
    """rms(o - float64) / rms(float64) over some queries; AssertionError beyond bf16's rounding."""
    q, place, freqs, window, near_rows, pool, far_rows, sink = arguments
    some = np.random.default_rng(1).choice(len(q), min(SAMPLE, len(q)), replace=False)
    used = [x[some].get() for x in (q, near_rows, far_rows, place)]
    decoded = []
    for records, rows, fmt in ((window, 1, WINDOW_KV_FP8), (pool, 2, MAIN_KV_FP4)):
        numbers, used[rows] = np.unique(used[rows], return_inverse=True)
        decoded.append(fmt.decode(records[cupy.asarray(numbers)].get(), CHANNELS))
    lists = [used[n].reshape(len(some), -1) for n in (1, 2)]
    reads = decoded[0], lists[0], decoded[1], lists[1], sink.get()
    want = attention(used[0], *reads, used[3], freqs)
    found = float(np.sqrt(np.mean((o[some].get() - want) ** 2) / np.mean(want**2)))
    assert found < limit, f"error {found:.3g}"
    return found


def in_torch(arguments):
    """The same product in PyTorch on records decoded to bf16 beforehand, rotations left out, some
    queries at a time.
    """
    import torch

    q, _, _, window, near_rows, pool, far_rows, sink = arguments

    def bf16(x):
        return torch.from_dlpack(x).bfloat16()

    near, far = (
        bf16(WINDOW_KV_FP8.decode(window, CHANNELS)),
        bf16(MAIN_KV_FP4.decode(pool, CHANNELS)),
    )
    q, sink = bf16(q), torch.from_dlpack(sink)
    rows = [torch.from_dlpack(x) for x in (near_rows, far_rows)]
    out = torch.empty_like(q)

    def some(at):
        kv = torch.cat([near[rows[0][at]], far[rows[1][at]]], dim=1)
        s = torch.baddbmm(sink[:1].bfloat16(), q[at], kv.mT, beta=0, alpha=CHANNELS**-0.5).float()
        with_sink = torch.cat([s, sink[None, :, None].expand(len(s), -1, 1)], dim=2)
        out[at] = torch.softmax(with_sink, dim=2)[..., :-1].bfloat16() @ kv

    def call():
        for begin in range(0, len(q), TORCH_TOKENS):
            some(slice(begin, begin + TORCH_TOKENS))
        return out

    return call


def torch_error(call, arguments):
    """PyTorch's result, which also rounds its scores to bf16, against float64 without turns."""
    q, place, freqs, *reads = arguments
    unturned = q, place, freqs[:0], *reads
    return error(cupy.from_dlpack(call().float()), unturned, limit=2e-2)


def cases(quick=False):
    decode = (1, 32) if quick else (1, 16, 32, 128, 512)
    sizes = [(tokens, False) for tokens in decode]
    sizes += [] if quick else [(8192, True)]
    for tokens, prefill in sizes:
        arguments = inputs(tokens, 65_536, prefill)
        text = definitions.rope_sparse_attn.definition
        functions = {"v5": cluster} if tokens <= MOST_SPREAD else {}
        functions |= {"v7": resident} if tokens > MOST_SPREAD else {}
        functions |= {"v8": quad} if tokens <= MOST_QUADS else {}
        functions |= {"v6": relay, "v4": pipeline, "v3": tiles, "v1": plain, "cupy text": text}
        for version, function in functions.items():
            if not (prefill and version == "v1"):
                yield case(version, tokens, prefill, arguments, function)
        if importlib.util.find_spec("torch"):
            call = in_torch(arguments)
            yield Case(
                "rope_sparse_attn",
                "torch",
                shape(tokens, prefill),
                call=call,
                check=lambda c=call, a=arguments: torch_error(c, a),
                bytes=moved(tokens),
                flops=flops(tokens),
            )


def case(version, tokens, prefill, arguments, function):
    return Case(
        "rope_sparse_attn",
        version,
        shape(tokens, prefill),
        call=lambda: function(*arguments, OFFICIAL),
        check=lambda: error(function(*arguments, OFFICIAL), arguments),
        bytes=moved(tokens),
        flops=flops(tokens),
        target_us=TARGETS.get(tokens) if version[0] == "v" else None,
    )


def shape(tokens, prefill):
    return f"{'prefill T' if prefill else 'decode B'}={tokens}, 64 heads x 512, 128 + 512 rows"


def flops(tokens):
    return tokens * 4 * HEADS * CHANNELS * (WINDOW + SELECTED)
