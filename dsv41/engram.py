"""What does the model remember about the last two, three and four tokens?

Engram is a table lookup, addressed by a hash of the n-gram that ends at a token:

    mix_2 = x0 m0 ^ x1 m1    mix_3 = mix_2 ^ x2 m2    mix_4 = mix_3 ^ x3 m3      x0 the newest
    row[n, head] = mix_n mod prime[n, head] + offset[n, head]

x are token classes: ids whose text is equal after normalising share one (`token_classes`). 24 rows
of 256 numbers give, through one projection, a key per stream and one value; the streams add as much
of the value as their own content asks for:

    a_s    = RMSNorm(X_s) . RMSNorm(key_s) / sqrt(D)
    gate_s = sigmoid( sign(a_s) sqrt(max(|a_s|, 1e-6)) )        X_s += gate_s * value

The look-back stops at the start of the request and at an image position, and does not resume
behind it; stopped slots count as the pad token. It happens before a layer, on the raw streams.
Source: report, section 2.4.2; inference/engram.py of the release; the Engram paper (arXiv
2601.07372) has a convolution more.
"""

import functools
import math

import numpy as np

from .dispatch import beside, on_host, op
from .ops import dense, linear_fp8, sigmoid
from .quant import WEIGHT_FP8

BARRIER = -1  # in a request's history: an image position


@functools.cache
def multipliers(config, layer):
    """(max n-gram size,) odd int64, small enough that class * multiplier stays below 2^63."""
    bound = np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2
    draw = np.random.default_rng(10007 * layer)
    odd = draw.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64) * 2 + 1
    odd.flags.writeable = False  # the cached array is everybody's
    return odd


@functools.cache
def table_primes(config):
    """Row counts of every hash column: one list per Engram module, in (order, head) order.

    Every (module, order) searches upwards from engram_vocab_size; no prime is used twice, ever.
    """
    used, modules = set(), []
    for _ in config.engram_layer_ids:
        columns = []
        for _ in range(config.engram_max_ngram_size - 1):
            candidate = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                candidate = _next_prime(candidate, used)
                used.add(candidate)
                columns.append(candidate)
        modules.append(columns)
    if [sum(columns) for columns in modules] != list(config.engram_num_embeddings):
        raise ValueError(
            f"engram_num_embeddings: the primes sum to {[sum(c) for c in modules]}, "
            f"got {list(config.engram_num_embeddings)}"
        )
    return modules


def _next_prime(after, used):
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def look_back(classes, is_image, history, pad):
    """The n-gram window of every new token of one request.

    classes (T,) int64 of the new tokens, is_image (T,) bool, history (n - 1,) int64 classes of the
    tokens before, oldest first, BARRIER for images -> windows (T, n) int64, newest first, and the
    new history. `pad` is the class that fills stopped slots.
    """
    size = len(history) + 1
    line = np.concatenate([history, np.where(is_image, BARRIER, classes)])
    back = np.arange(size - 1, -1, -1)  # column s looks s tokens back
    windows = line[np.arange(len(classes))[:, None] + back]
    # trap: a barrier hides not only itself but everything older
    stopped = np.cumsum(windows == BARRIER, axis=1) > 0
    return np.where(stopped, pad, windows), line[len(line) - size + 1 :]


@op
def hash_rows(windows, multiplier, primes, heads):
    """windows (T, n) int64 newest first, multiplier (n,) int64, primes (columns,) int64, heads per
    order -> table rows (T, columns) int64.
    """
    mix = windows[:, 0] * multiplier[0]
    columns = []
    for s in range(1, windows.shape[1]):
        mix = mix ^ (windows[:, s] * multiplier[s])
        columns += [mix] * heads  # the heads of one order differ by their modulus only
    offsets = np.cumsum(primes) - primes
    return np.stack(columns, axis=1) % primes + offsets


def read_rows(table, rows):
    """table: {"weight": codes (rows, C) uint8, "scale": (rows, C / 32) uint8}, maybe memory maps;
    rows (T, columns) int -> (T, columns * C) f32, exact in bf16. Only these rows are read, and
    a NaN among them raises ValueError.
    """
    codes, scales = (table[part][beside(rows, table[part])] for part in ("weight", "scale"))
    values = WEIGHT_FP8.dequantize(codes, scales)
    finite = np.isfinite(values).all(axis=-1)
    if on_host(values) and not finite.all():
        raise ValueError(f"engram.embed.weight: row {rows.flat[np.argmin(finite)]} holds a NaN")
    return values.reshape(len(rows), -1)


@op
def engram_gate(streams, key, value, q_weight, k_weight, is_image, eps, numerics):
    """streams (T, S, D), key (T, S, D), value (T, D) f32, q_weight and k_weight (S, D), is_image
    (T,) bool -> new streams (T, S, D) stored as bf16, and gate (T, S) f32, 0 inside an image.
    """
    eps = np.float32(eps)
    dot = np.sum(streams * q_weight * k_weight * key, axis=-1)  # (T, S)
    for x in (streams, key):
        dot = dot / np.sqrt(np.mean(x * x, axis=-1) + eps)
    dot = dot * np.float32(streams.shape[-1] ** -0.5)
    root = np.sqrt(np.maximum(np.abs(dot), np.float32(1e-6)))
    gate = np.where(is_image[:, None], np.float32(0), sigmoid(np.sign(dot) * root))
    return numerics.store(streams + gate[:, :, None] * value[:, None, :]), gate


def engram(streams, rows, p, is_image, config, numerics):
    """One module: streams (T, S, D), rows (T, columns), its parameters -> streams, gate (T, S)."""
    tokens, count, width = streams.shape
    memory = beside(read_rows(p["embed"], rows), streams)  # the table may stay in host memory
    kv = linear_fp8(memory, p["wkv"]["weight"], numerics)
    key, value = kv[:, : count * width].reshape(tokens, count, width), kv[:, count * width :]
    return engram_gate(
        *(streams, key, value, dense(p["q_weight"]), dense(p["k_weight"]), is_image),
        config.rms_norm_eps,
        numerics,
    )
