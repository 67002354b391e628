"""How many drafted tokens are worth verifying? (DSpark's scheduler)

Verifying takes a place in the batch: with B tokens the main model makes SPS(B) steps a second,
fewer as B grows. Request r survives up to its j-th draft with probability a_rj, so with l_r drafts
each

    tau = sum_r (1 + sum_{j <= l_r} a_rj)      tokens per step        B = sum_r (1 + l_r)
    Theta = tau * SPS(B)                       tokens per second

Candidates are taken in order of survival, best first, one at a time, while Theta rises, and the
first that does not raise it ends it. Stopping there matters: to look further would let a draft's
length depend on tokens drawn later, and the output would no longer have the main model's law.
Source: the DSpark paper (arXiv 2607.05147), section on scheduling and appendix A, which has the
counter-example.
"""

import time

import numpy as np


def draft_lengths(survival, steps_per_second, others=0):
    """survival: list of (B,) arrays, non-increasing, one per request -> drafts to verify, (R,) int.

    steps_per_second(tokens) -> float: the main model's speed with that many tokens in the batch.
    others: tokens of requests in the same step that do not draft.
    """
    lengths = np.zeros(len(survival), int)
    expected = tokens = float(len(survival) + others)
    best = expected * steps_per_second(int(tokens))
    candidates = [(-a, k, r) for r, row in enumerate(survival) for k, a in enumerate(row)]
    for minus_a, _, r in sorted(candidates):  # equal survival: earlier draft, then earlier request
        expected, tokens = expected - minus_a, tokens + 1
        rate = expected * steps_per_second(int(tokens))
        if rate <= best:
            break
        best = rate
        lengths[r] += 1
    return lengths


class Throughput:
    """Steps per second by batch tokens: measured points, straight lines of seconds between them."""

    def __init__(self, tokens, seconds):
        """tokens ascending, seconds per step of each; beyond the last the last slope goes on."""
        self.tokens, self.seconds = np.asarray(tokens, float), np.asarray(seconds, float)

    def __call__(self, count):
        if count > self.tokens[-1] and len(self.tokens) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
            return 1 / (self.seconds[-1] + max(slope, 0.0) * (count - self.tokens[-1]))
        return 1 / float(np.interp(count, self.tokens, self.seconds))


def measure_throughput(model, numerics, sizes=(1, 2, 4, 8, 16, 32), repeats=3):
    """Time decode steps of this machine -> Throughput. Takes the best of `repeats`."""
    seconds = []
    for size in sizes:
        cache = model.new_cache(numerics)
        slots = [model.open(cache) for _ in range(size)]
        ids = [np.zeros(1, int)] * size
        model.step(cache, slots, ids)
        seconds.append(min(_timed(model, cache, slots, ids) for _ in range(repeats)))
    return Throughput(sizes, np.maximum.accumulate(seconds))


def _timed(model, cache, slots, ids):
    start = time.perf_counter()
    model.step(cache, slots, ids)
    return time.perf_counter() - start
