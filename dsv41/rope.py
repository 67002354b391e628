"""How does a vector know its position?

The last d_r channels are read as d_r/2 complex numbers, channel pairs (2i, 2i+1), and turned:

    z_i -> z_i * exp(j * t * f_i)        f_i = base^(-2i / d_r)

A query at t and a key at s then meet at the angle (t - s) f_i. Keys are also values here, so what
attention returns carries the keys' rotations; turning it back by the query's position leaves only
the distance (inverse=True, the conjugate).

Two bases. Window-only layers use rope_theta as it is. Every other layer uses compress_rope_theta
with YaRN for all it rotates: frequencies that turn less than beta_slow times in the original
context are divided by `factor`, those above beta_fast are kept, with a ramp between, and no
magnitude factor. Angles are float32 products of a float32 position, as in the release: at position
1,000,000 a float64 table would give other bits. Source: precompute_freqs_cis and apply_rotary_emb.
"""

import functools
import math

import numpy as np

from .dispatch import op


@functools.cache
def frequencies(config, ratio):
    """Radians per token of each pair, (U,) f32, for a layer of this compress ratio."""
    pairs = np.arange(0, config.qk_rope_head_dim, 2, dtype=np.float32)
    base = config.compress_rope_theta if ratio else config.rope_theta
    freqs = np.float32(1) / np.float32(base) ** (pairs / np.float32(config.qk_rope_head_dim))
    freqs = _yarn(freqs, config, base) if ratio else freqs
    freqs.flags.writeable = False  # the cached array is everybody's
    return freqs


def _yarn(freqs, config, base):
    scaling, dim = config.rope_scaling, config.qk_rope_head_dim

    def pair_that_turns(times):
        """Which pair (a real number) makes `times` turns within the original context."""
        wavelength = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    span = high - low if high > low else 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span)
    slow = np.clip(ramp, np.float32(0), np.float32(1))
    return freqs / np.float32(scaling.factor) * slow + freqs * (1 - slow)


@op
def rotate(x, positions, freqs, inverse=False):
    """Turn the last 2 * len(freqs) channels of x by their position.

    x (T, ..., C) f32, positions (T,) int, freqs (U,) f32 -> (T, ..., C) f32, x unchanged.
    """
    pairs = len(freqs)
    angle = positions.astype(np.float32)[:, None] * np.asarray(freqs, like=x)  # (T, U)
    angle = angle.reshape((len(x), *[1] * (x.ndim - 2), pairs))
    cos, sin = np.cos(angle), np.sin(-angle if inverse else angle)
    out = x.copy()
    turning = x[..., -2 * pairs :]
    # trap: neighbours form a pair (2i, 2i+1), not channel i with channel i + U
    real, imag = turning[..., 0::2], turning[..., 1::2]
    out[..., -2 * pairs :: 2] = real * cos - imag * sin
    out[..., -2 * pairs + 1 :: 2] = real * sin + imag * cos
    return out
