"""Chapter 03: answers come from dsv41's cache and window, and from NumPy's logaddexp."""

import numpy as np

from dsv41.batch import make_batch
from dsv41.window import window_index

from ..page import Exercise


def _token_in(r, n, width):
    ring = np.full(width, -1)
    for token in range(n):
        ring[token % width] = token
    return int(ring[r])


def _rings(rng):
    for width in (1, 4, 7):
        for n in (0, 1, width - 1, width, width + 1, *rng.integers(2, 60, 5).tolist()):
            yield int(rng.integers(width)), n, width


def _decode_rows(t, width):
    rows = window_index(make_batch([[0]], starts=[t], slots=[0]), width)[0]
    return np.where(rows == width, t % width, rows)  # the module reads its own row behind the ring


def _tokens(rng):
    for width in (1, 4, 128):
        for t in (0, 1, width - 1, width, *rng.integers(0, 3 * width, 6).tolist()):
            yield t, width


def _add_sink(o, L, sink):
    return o * np.exp(L - np.logaddexp(L, sink))[:, None]


def _outputs(rng):
    for special in (-np.inf, 1000.0, -1000.0, 0.0, 3.0):
        sink = rng.standard_normal(4)
        sink[rng.integers(4)] = special
        yield rng.standard_normal((4, 6)), 5 * rng.standard_normal(4), sink


EXERCISES = {
    "token_in": Exercise(
        _token_in,
        blank="return the position of the token in row r, or -1",
        hint="the last token n - 1 is in row (n - 1) % width; how many steps back is row r?",
        inputs=_rings,
    ),
    "decode_rows": Exercise(
        _decode_rows,
        blank="return the rows of the tokens that t sees, padded with -1",
        hint="positions max(0, t - width + 1) to t, each modulo width; -1 only behind them",
        inputs=_tokens,
    ),
    "add_sink": Exercise(
        _add_sink,
        blank="return o with the sink's weight in its denominator",
        hint="o e^L is the sum without its denominator; np.logaddexp(L, sink) does not overflow",
        inputs=_outputs,
        within=1e-12,
    ),
}
