"""Attention of the miniature's training step: float32 records, and stored ones (OFFICIAL)."""

import cupy
import numpy as np

from dsv41 import sparse_attn as definitions
from dsv41.quant import FLOAT32, OFFICIAL

from ..bench import Case
from .cupy_op import attend, plain
from .oracle import attention

HEADS, CHANNELS, WIDTH = 8, 64, 64
SAMPLE = 64  # queries that are compared with float64


def training_inputs(tokens, numerics, seed=0):
    """q, window, window_rows, global_kv, global_rows, sink: documents of 1,024 tokens."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, HEADS, CHANNELS), np.float32)
    near, far = rng.standard_normal((2, tokens, CHANNELS), np.float32)
    place, token = np.arange(tokens) % 1024, np.arange(tokens)[:, None]
    recent = token - np.arange(WIDTH)
    window_rows = np.where(np.arange(WIDTH) <= place[:, None], recent, -1)
    chosen = (rng.random((tokens, WIDTH)) * (place[:, None] + 1)).astype(np.int64)
    global_rows = np.where(np.arange(WIDTH) <= place[:, None], token - chosen, -1)
    sink = rng.standard_normal(HEADS).astype(np.float32)
    window, pool = numerics.window_kv.encode(near), numerics.main_kv.encode(far)
    return tuple(cupy.asarray(x) for x in (q, window, window_rows, pool, global_rows, sink))


def moved(tokens, numerics):
    """Least bytes: q and o, the lists, every record once."""
    record = numerics.window_kv.record_bytes(CHANNELS) + numerics.main_kv.record_bytes(CHANNELS)
    return tokens * (2 * 4 * HEADS * CHANNELS + 2 * 8 * WIDTH + record)


def error(o, inputs, numerics):
    """rms(o - float64) / rms(float64) over some queries; AssertionError beyond the contract."""
    q, window, near_rows, pool, far_rows, sink = (x.get() for x in inputs)
    some = np.random.default_rng(1).choice(len(q), min(SAMPLE, len(q)), replace=False)
    near = numerics.window_kv.decode(window, CHANNELS)
    far = numerics.main_kv.decode(pool, CHANNELS)
    want = attention(q[some], near, near_rows[some], far, far_rows[some], sink)
    found = float(np.sqrt(np.mean((o.get()[some] - want) ** 2) / np.mean(want**2)))
    assert found < (4e-3 if numerics.bf16 else 1e-5), f"error {found:.3g}"
    return found


def without_turns(version):
    return lambda q, *rest: version(q, None, None, *rest)


def cases(quick=False):
    tokens = 2048 if quick else 32_768
    for numerics in (FLOAT32, OFFICIAL):
        inputs = training_inputs(tokens, numerics)
        text = definitions.sparse_attn.definition
        versions = {"v2": without_turns(attend), "v1": without_turns(plain), "cupy text": text}
        for version, function in versions.items():
            yield Case(
                "sparse_attn",
                version,
                f"T={tokens}, 8 heads x 64, 64 + 64 rows, {numerics.name}",
                call=lambda f=function, i=inputs, n=numerics: f(*i, n),
                check=lambda f=function, i=inputs, n=numerics: error(f(*i, n), i, n),
                bytes=moved(tokens, numerics),
                flops=tokens * 4 * HEADS * CHANNELS * 2 * WIDTH,
            )
