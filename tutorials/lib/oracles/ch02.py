"""Chapter 02: answers come from dsv41.rope, or from complex numbers in float64."""

import numpy as np

from dsv41 import preset
from dsv41.rope import frequencies, rotate

from ..page import Exercise


def _one_turn(q, k, t, s, freqs):
    z = (q[0::2] + 1j * q[1::2]) * np.conj(k[0::2] + 1j * k[1::2])
    return float((z * np.exp(1j * (t - s) * freqs.astype(np.float64))).real.sum())


def _two_vectors(rng):
    config = preset("v4.1-flash")
    for ratio in (0, 2):
        for last in (4, 128, 3000):
            for t, s in rng.integers(0, last, (4, 2)).tolist():
                q, k = rng.standard_normal((2, 64)).astype(np.float32)
                yield q, k, t, s, frequencies(config, ratio)


def _turned_back(o, t, freqs):
    return rotate(o[None], np.array([t]), freqs, inverse=True)[0]


def _outputs(rng):
    freqs = frequencies(preset("v4.1-flash"), 2)
    for t in (0, 1, 1_000_000, *rng.integers(0, 1_000_000, 7).tolist()):
        yield rng.standard_normal((3, 96)).astype(np.float32), t, freqs


def _for_halves(x):
    return x.reshape(32, 2).T.reshape(64)


EXERCISES = {
    "one_turn": Exercise(
        _one_turn,
        blank="return the dot product of two vectors, only one of which is turned",
        hint="turn q by t - s and leave k alone; rotate wants a token axis and an array",
        inputs=_two_vectors,
        within=1e-2,
    ),
    "turned_back": Exercise(
        _turned_back,
        blank="return the heads turned the other way, by the chapter's rotate",
        hint="the conjugate is the negated angle; the angle must be the same float32 product",
        inputs=_outputs,
        within=1e-5,
    ),
    "for_halves": Exercise(
        _for_halves,
        blank="return the 64 channels in the order that a kernel for halves expects",
        hint="pair i sits in channels 2 i and 2 i + 1, and must come to channels i and i + 32",
        inputs=lambda rng: [(x,) for x in rng.standard_normal((10, 64)).astype(np.float32)],
    ),
}
