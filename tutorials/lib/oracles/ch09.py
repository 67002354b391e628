"""Chapter 09: answers come from dsv41.ledger, dsv41.replay and dsv41.window."""

from types import SimpleNamespace

import numpy as np

from dsv41 import ledger, replay
from dsv41.batch import make_batch
from dsv41.window import window_index

from ..page import Exercise


def _layers_run(n):
    return ledger.prefill_share("V4.1-Flash", n)


def _prompts(rng):
    fixed = [1, 2, 127, 128, 129, 1536, 65_536, 1 << 20]
    return [(int(n),) for n in (*fixed, *rng.integers(1, 4096, 10))]


def _first_decoded(total, start, window):
    return replay.decoder_start(total, start, SimpleNamespace(sliding_window=window))


def _turns(rng):
    yield 5, 0, 128  # the prompt is shorter than the window
    yield 300, 290, 128  # the new part is shorter than the window
    for _ in range(20):
        total = int(rng.integers(1, 600))
        yield total, int(rng.integers(0, total)), int(rng.choice([8, 128]))


def _window_keys(i, s, window):
    ids = np.zeros(i - s + 1, np.int64)
    batch = make_batch([ids], [s], [0]).with_floors([s])
    rows = window_index(batch, window)[-1]  # the ring's rows come first
    return rows[rows >= 0] - window + s


def _queries(rng):
    for back in (0, 6, 7, 8):  # the start itself, and both sides of a full window
        yield 50 + back, 50, 8
    for _ in range(20):
        s = int(rng.integers(0, 300))
        yield s + int(rng.integers(0, 260)), s, int(rng.choice([4, 8, 128]))


EXERCISES = {
    "layers_run": Exercise(
        _layers_run,
        blank="return layers run over all layers: 20 for every token, 20 for the tail",
        hint="the tail is never longer than the prompt",
        inputs=_prompts,
        within=1e-12,
    ),
    "first_decoded": Exercise(
        _first_decoded,
        blank="return the first token of the tail, or the first new one if that comes later",
        hint="neither a token before `start` nor one before 0 can run now",
        inputs=_turns,
    ),
    "window_keys": Exercise(
        _window_keys,
        blank="return the positions from the later of two edges up to the query itself",
        hint="a full window has `window` keys, the query's own among them",
        inputs=_queries,
    ),
}
