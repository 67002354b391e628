"""The boundary between two sublayers at the released width, bf16 in memory as in the released code.

The floor is one pass: 2 S + 2 rows of D bf16 a token, and fn once. Beside the four versions stand
the definition on CuPy arrays (float32 in memory) and a chain of PyTorch calls. The check is against
float64: new streams and x within their bf16 roundings, coefficients, computed from those very
streams, within 1e-6 (1e-5 for the two peers).
"""

from functools import partial
from types import SimpleNamespace

import cupy
import numpy as np

from dsv41.formats import decode_bf16, encode_bf16, round_bf16
from dsv41.mhc import hc_boundary as definition
from dsv41.mhc import hc_coefficients, hc_collapse, hc_update, sinkhorn
from dsv41.ops import rmsnorm
from dsv41.quant import FLOAT32, OFFICIAL

from ..bench import Case
from .cupy_op import NAMES, VERSIONS, prepare

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
STREAMS, WIDTH, MIX = 4, 5120, 24
TARGETS = {1: 9, 8: 9, 64: 10, 512: 20, 4096: 118}  # microseconds, by tokens
LIMIT = 1e-6  # of a coefficient; plain float32 products of length 20,480 may miss it
SAMPLE = 24  # rows that the check looks at, half of them from the end


def inputs(tokens, width=WIDTH, seed=0):
    """NumPy arguments in the order of NAMES; streams and y are bf16 values in float32."""
    rng = np.random.default_rng(seed)

    def random(*shape, scale=1.0):
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    streams, y = (round_bf16(random(tokens, *rest)) for rest in ((STREAMS, width), (width,)))
    pre, post = rng.uniform(0, 1, (2, tokens, STREAMS)).astype(np.float32)
    comb = sinkhorn.definition(random(tokens, STREAMS, STREAMS), 20, 1e-6)
    fn = random(MIX, STREAMS * width, scale=(STREAMS * width) ** -0.5)
    scale, norm = np.float32([0.5, 1.5, 2]), 1 + random(width, scale=0.1)
    return streams, y, pre, 2 * post, comb, fn, random(MIX), scale, norm


def on_gpu(given, stored="bf16"):
    """-> (old, new): the two groups of `prepare`, streams and y as bf16 bits or float32."""
    arrays = [cupy.asarray(a) for a in given]
    if stored == "bf16":
        arrays[:2] = [cupy.asarray(encode_bf16(a)) for a in given[:2]]
    return tuple(arrays[:5]), tuple(arrays[5:])


def error(given, results, limit):
    """The largest error of a coefficient; AssertionError where something is out of contract."""
    tokens = len(given[0])
    rows = np.unique(np.r_[: min(tokens, SAMPLE // 2), max(0, tokens - SAMPLE // 2) : tokens])
    streams, x, *mixing = (_host(r[cupy.asarray(rows)]) for r in results)
    old = [a[rows].astype(np.float64) for a in given[:5]]
    fn, base, scale, norm = (a.astype(np.float64) for a in given[5:])
    _within("streams", streams, hc_update.definition(*old[:2], *old[3:], FLOAT32), 2.0**-8)
    streams = streams.astype(np.float64)
    collapsed = hc_collapse.definition(streams, old[2], FLOAT32)
    _within("x", x, rmsnorm(collapsed, norm, CONFIG.rms_norm_eps, FLOAT32), 2.0**-7)
    want = hc_coefficients.definition(streams, fn, base, scale, CONFIG, FLOAT32)
    worst = max(np.abs(g - w).max() for g, w in zip(mixing, want, strict=True))
    assert worst < limit, f"coefficients: off by {worst}"
    return float(worst)


def cases(quick=False):
    """The versions, the text and PyTorch, from one token to 4,096."""
    for tokens in (1, 64, 65) if quick else TARGETS:
        given = inputs(tokens)
        for version in VERSIONS:
            yield _case(tokens, version, *_kernel(given, version), given)
        yield _case(tokens, "cupy text", *_text(given), given)
        yield from (_case(tokens, "torch", *chain, given) for chain in _torch(given))


def _case(tokens, version, call, results, given):
    return Case(
        op="hc_boundary",
        version=version,
        shape=f"T={tokens}, D={WIDTH}",
        call=call,
        check=lambda: error(given, results(), LIMIT if version in VERSIONS else 10 * LIMIT),
        bytes=2 * (2 * STREAMS + 2) * WIDTH * tokens + 4 * MIX * STREAMS * WIDTH,
        flops=2 * MIX * STREAMS * WIDTH * tokens,
        target_us=TARGETS.get(tokens) if version in VERSIONS else None,
    )


def _kernel(given, version):
    """-> call, results of one version, its launches prepared."""
    out, launches = prepare(*on_gpu(given), CONFIG, OFFICIAL, version=version)

    def call():
        for run, blocks, threads, arguments, shared in launches:
            run(blocks, threads, arguments, shared_mem=shared)

    def results():
        call()
        return out

    return call, results


def _text(given):
    old, new = on_gpu(given, "float32")
    call = partial(definition.definition, *old, *new, CONFIG, OFFICIAL)
    return call, call


def _torch(given):
    """The same steps in PyTorch, [] without it."""
    try:
        import torch
    except ImportError:
        return []
    moved = dict(zip(NAMES, (torch.from_numpy(a).cuda() for a in given), strict=True))
    moved |= {name: moved[name].bfloat16() for name in ("streams", "y")}

    def chain(streams, y, pre, post, comb, fn, base, scale, norm):
        mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
        streams = (post[:, :, None] * y.float()[:, None] + mixed).bfloat16()
        wide = streams.float()
        x = torch.einsum("ts,tsd->td", pre, wide).bfloat16().float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps) * norm
        flat = wide.flatten(1)
        u = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps)
        first = torch.sigmoid(u[:, :4] * scale[0] + base[:4]) + CONFIG.hc_eps
        second = 2 * torch.sigmoid(u[:, 4:8] * scale[1] + base[4:8])
        b = (u[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + CONFIG.hc_eps
        b = b / (b.sum(-2, keepdim=True) + CONFIG.hc_eps)
        for _ in range(CONFIG.hc_sinkhorn_iters - 1):
            b = b / (b.sum(-1, keepdim=True) + CONFIG.hc_eps)
            b = b / (b.sum(-2, keepdim=True) + CONFIG.hc_eps)
        return streams, x.bfloat16(), first, second, b

    def call():
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            return chain(**moved)

    def results():
        found = [r.view(torch.uint16) if r.dtype == torch.bfloat16 else r for r in call()]
        return [cupy.asarray(r.cpu().numpy()) for r in found]

    return [(call, results)]


def _within(name, got, want, relative):
    excess = np.abs(got - want) - relative * np.abs(want)
    assert excess.max() < 1e-5, f"{name}: {excess.max()} beyond {relative} of the value"


def _host(x):
    x = x.get()
    return decode_bf16(x) if x.dtype == np.uint16 else x
