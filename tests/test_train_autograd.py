"""A second opinion on the hand-written gradients: `autograd` on forwards written anew, in float64.

Central differences (test_train_difference.py) see about eight digits and move the package's own
forward. Here the forward is written again, straight from its equation and with no care for large
numbers, and a library that knows the chain rule differentiates it. Value and gradients agree to
1e-8 of their largest.
"""

import numpy as np
import pytest
from oracles import small_config
from test_train_difference import float64, random

from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.compress import compress, pool_groups
from dsv41.mhc import hc_coefficients, hc_collapse, hc_update, sinkhorn
from dsv41.ops import rmsnorm, swiglu
from dsv41.quant import FLOAT32
from dsv41.rope import frequencies
from dsv41.sparse_attn import rope_sparse_attn, sparse_attn
from dsv41.train.compress import compress_backward, pool_groups_backward
from dsv41.train.losses import cross_entropy
from dsv41.train.mhc import (
    hc_coefficients_backward,
    hc_collapse_backward,
    hc_update_backward,
    sinkhorn_backward,
)
from dsv41.train.ops import rmsnorm_backward, swiglu_backward
from dsv41.train.sparse_attn import rope_sparse_attn_backward, sparse_attn_backward

autograd = pytest.importorskip("autograd", reason="needs autograd: pip install dsv41[dev]")
a = autograd.numpy


def agree(anew, forward, backward, inputs):
    """anew(*inputs) is forward(*inputs), and its gradients are backward(*weights, *inputs).

    Results are arrays or tuples of arrays; the weights are those of a sum of all their elements.
    """
    with float64():
        want, got = _tuple(anew(*inputs)), _tuple(forward(*inputs))
        weights = [random(*r.shape, seed=100 + i) for i, r in enumerate(want)]
        found = _tuple(backward(*weights, *inputs))

    def total(*inputs):
        return sum(a.sum(w * r) for w, r in zip(weights, _tuple(anew(*inputs)), strict=True))

    grads = autograd.grad(total, tuple(range(len(inputs))))(*inputs)
    for ours, theirs in zip((*got, *found), (*want, *grads), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == np.float64
        assert np.abs(theirs).max() > 1e-3  # else there would be nothing to compare
        assert np.abs(ours - theirs).max() < 1e-8 * np.abs(theirs).max()


def _tuple(results):
    return tuple(results) if isinstance(results, tuple | list) else (results,)


# ---- norm, gate, loss ---------------------------------------------------------------------------


def norm(x, weight, eps=1e-3):
    return x / a.sqrt(a.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + a.exp(-x))


def test_rmsnorm():
    agree(
        norm,
        lambda x, w: rmsnorm(x, w, 1e-3, FLOAT32),
        lambda dy, x, w: rmsnorm_backward(dy, x, w, 1e-3),
        (random(5, 2, 7), random(7)),
    )


@pytest.mark.parametrize("limit", [None, 0.8])
def test_swiglu(limit):
    def anew(gate, up):
        if limit:
            gate, up = a.where(gate > limit, limit, gate), a.clip(up, -limit, limit)
        return gate * sigmoid(gate) * up

    gate, up = 2 * random(6, 9), 2 * random(6, 9, seed=1)
    assert np.any(gate > 0.8) and np.any(up > 0.8) and np.any(up < -0.8)
    rest = (lambda g, u: swiglu(g, u, limit), lambda d, g, u: swiglu_backward(d, g, u, limit))
    agree(anew, *rest, (gate, up))


def test_cross_entropy():
    targets = np.array([0, 4, 4, 2])

    def anew(z):
        p = a.exp(z) / a.sum(a.exp(z), axis=1, keepdims=True)
        return -a.log(p[np.arange(4), targets])

    agree(
        anew,
        lambda z: cross_entropy(z, targets)[0],
        lambda d, z: d[:, None] * cross_entropy(z, targets)[1],
        (3 * random(4, 5),),
    )


# ---- streams ------------------------------------------------------------------------------------

CONFIG = small_config(hc_sinkhorn_iters=5, hc_eps=1e-2, rms_norm_eps=1e-2)


def doubly(logits, iterations, eps):
    b = a.exp(logits)
    b = b / a.sum(b, axis=-1, keepdims=True) + eps
    b = b / (a.sum(b, axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        b = b / (a.sum(b, axis=-1, keepdims=True) + eps)
        b = b / (a.sum(b, axis=-2, keepdims=True) + eps)
    return b


def coefficients(streams, fn, base, scale):
    tokens, s, _ = streams.shape
    v = a.reshape(streams, (tokens, -1))
    u = norm(v, 1.0, CONFIG.rms_norm_eps) @ fn.T
    pre = sigmoid(u[:, :s] * scale[0] + base[:s]) + CONFIG.hc_eps
    post = 2 * sigmoid(u[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    mix = a.reshape(u[:, 2 * s :] * scale[2] + base[2 * s :], (tokens, s, s))
    return pre, post, doubly(mix, CONFIG.hc_sinkhorn_iters, CONFIG.hc_eps)


def mixing(s=3, width=4):
    return random(2 * s + s * s, s * width) / 2, random(2 * s + s * s), 1 + random(3) / 3


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn(iterations):
    agree(
        lambda z: doubly(z, iterations, 1e-2),
        lambda z: sinkhorn(z, iterations, 1e-2),
        lambda d, z: sinkhorn_backward(d, z, iterations, 1e-2),
        (2 * random(3, 4, 4),),
    )


def test_coefficients():
    rest = CONFIG, FLOAT32
    agree(
        coefficients,
        lambda *x: hc_coefficients(*x, *rest),
        lambda *x: hc_coefficients_backward(*x, *rest),
        (random(5, 3, 4), *mixing()),
    )


def test_a_sublayer_s_streams_from_collapse_to_update():
    """y is what collapse reads, squared: the streams' three ways into the new ones at once."""

    def anew(streams, pre, fn, base, scale):
        y = a.sum(pre[:, :, None] * streams, axis=1) ** 2
        new, post, comb = coefficients(streams, fn, base, scale)
        return a.einsum("tk,td->tkd", post, y) + a.einsum("tjk,tjd->tkd", comb, streams), new

    def forward(streams, pre, *parameters):
        y = hc_collapse(streams, pre, FLOAT32) ** 2
        new, post, comb = hc_coefficients(streams, *parameters, CONFIG, FLOAT32)
        return hc_update(streams, y, post, comb, FLOAT32), new

    def backward(dstreams, dnew, streams, pre, *parameters):
        x = hc_collapse(streams, pre, FLOAT32)
        _, post, comb = hc_coefficients(streams, *parameters, CONFIG, FLOAT32)
        by_update, dy, dpost, dcomb = hc_update_backward(dstreams, streams, x**2, post, comb)
        by_collapse, dpre = hc_collapse_backward(2 * x * dy, streams, pre)
        by_mixing, *more = hc_coefficients_backward(
            dnew, dpost, dcomb, streams, *parameters, CONFIG, FLOAT32
        )
        return by_update + by_collapse + by_mixing, dpre, *more

    agree(anew, forward, backward, (random(5, 3, 4), random(5, 3), *mixing()))


# ---- attention ----------------------------------------------------------------------------------

WINDOW_ROWS = np.array([[0, -1, -1], [0, 1, -1], [0, 1, 2], [-1, -1, -1], [3, 2, 1]])
GLOBAL_ROWS = np.array([[-1, -1], [4, -1], [0, 4], [-1, -1], [4, 2]])  # row 4 is read three times


def attend(q, window, chosen, sink):
    """Query by query and head by head, over the rows that exist."""
    out = []
    for t in range(len(q)):
        near, far = (rows[t][rows[t] >= 0] for rows in (WINDOW_ROWS, GLOBAL_ROWS))
        kv = a.concatenate([window[near], chosen[far]])
        for h in range(q.shape[1]):
            e = a.exp(kv @ q[t, h] / np.sqrt(q.shape[2]))
            out.append((e @ kv) / (a.sum(e) + a.exp(sink[h])))
    return a.reshape(a.stack(out), q.shape)


def records():
    return random(5, 2, 8), random(4, 8, seed=1), random(6, 8, seed=2), random(2, seed=3)


def test_attention_with_a_sink_over_gathered_rows():
    agree(
        attend,
        lambda q, w, g, s: sparse_attn(q, w, WINDOW_ROWS, g, GLOBAL_ROWS, s, FLOAT32),
        lambda d, q, w, g, s: sparse_attn_backward(
            d, q, w, WINDOW_ROWS, g, GLOBAL_ROWS, s, FLOAT32
        )[:4],
        records(),
    )


def test_attention_between_two_rotations():
    config = small_config(qk_rope_head_dim=4)
    freqs, positions = frequencies(config, 0), np.array([0, 1, 2, 7, 8])
    angle = np.float32(positions)[:, None] * freqs  # the package's angles are float32 on purpose
    cos, sin = (f(angle)[:, None] for f in (np.cos, np.sin))

    def turn(x, sin):
        real, imag = x[..., -4::2], x[..., -3::2]
        pairs = a.stack([real * cos - imag * sin, real * sin + imag * cos], axis=-1)
        return a.concatenate([x[..., :-4], a.reshape(pairs, (*x.shape[:-1], 4))], axis=-1)

    def rest(w, g, s):
        return positions, freqs, w, WINDOW_ROWS, g, GLOBAL_ROWS, s, FLOAT32

    agree(
        lambda q, w, g, s: turn(attend(turn(q, sin), w, g, s), -sin),
        lambda q, *kv: rope_sparse_attn(q, *rest(*kv)),
        lambda d, q, *kv: rope_sparse_attn_backward(d, q, *rest(*kv))[:4],
        records(),
    )


# ---- compression --------------------------------------------------------------------------------


def pooled(u, g):
    return a.sum(a.exp(g) * u, axis=1) / a.sum(a.exp(g), axis=1)


def test_pooling():
    agree(pooled, pool_groups, pool_groups_backward, (random(4, 3, 5), random(4, 3, 5, seed=1)))


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_compressor_of_two_documents(ratio):
    """Five and two tokens: under ratio 2 the fifth waits for a partner and gets no gradient."""
    config = small_config(rms_norm_eps=1e-3)
    members = [[0, 1], [2, 3], [5, 6]] if ratio == 2 else [[t] for t in range(7)]
    source = config.kv_source_layer_ids[0 if ratio == 1 else 1]

    def parameters(wkv, wgate, weight):
        named = {"wkv": wkv, "wgate": wgate, "norm": weight}
        return {name: {"weight": w} for name, w in named.items()}

    def opened():
        cache = Cache(config, FLOAT32, 16)
        batch = make_batch([np.arange(5), np.arange(2)], [0, 0], [cache.add(0), cache.add(0)])
        cache.begin(batch)
        return cache, batch

    def anew(x, wkv, wgate, weight):
        rows = x[np.array(members)]
        return norm(pooled(rows @ wkv.T, rows @ wgate.T), weight)

    def forward(x, *weights):
        place = source, ratio, *opened(), config, FLOAT32
        return compress(x, parameters(*weights), *place)[0]

    def backward(d, x, *weights):
        p, batch = parameters(*weights), opened()[1]
        dx, grads = compress_backward(d, x, p, ratio, batch, config, FLOAT32)
        names = ("wkv", "wgate", "norm") if ratio == 2 else ("wkv", "norm")
        assert set(grads) == set(names)
        return dx, *(grads[name]["weight"] for name in names)

    inputs = random(7, 6), random(32, 6), random(32, 6, seed=1), random(32)
    if ratio == 2:
        agree(anew, forward, backward, inputs)
    else:  # one token a group: its weight is 1 whatever the gate says, and there is no gate
        x, wkv, wgate, weight = inputs
        agree(
            lambda x, wkv, weight: anew(x, wkv, wgate, weight),
            lambda x, wkv, weight: forward(x, wkv, wgate, weight),
            lambda d, x, wkv, weight: backward(d, x, wkv, wgate, weight),
            (x, wkv, weight),
        )
