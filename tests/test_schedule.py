"""Draft lengths by hand, the law they leave, and speeds between measured points."""

import itertools
from fractions import Fraction

import numpy as np
import oracles
import pytest
from compare import repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32
from dsv41.sampling import draw, verify
from dsv41.schedule import Throughput, draft_lengths, measure_throughput


def speed(*steps):
    """Steps per second for one token, two tokens, ..."""
    return lambda tokens: steps[tokens - 1]


def lengths(survival, steps_per_second):
    return draft_lengths([np.array(row) for row in survival], steps_per_second).tolist()


# ---- by hand ----------------------------------------------------------------------------------


def test_a_free_verification_takes_every_draft_that_may_survive():
    assert lengths([[0.9, 0.5], [0.8, 0.1]], lambda tokens: 7.0) == [2, 2]
    assert lengths([[0.9, 0.0], [0.8, 0.0]], lambda tokens: 7.0) == [1, 1]


def test_rates_by_hand_for_two_requests():
    """2 x 1, 2.75 x 0.8 = 2.2, 3.25 x 0.7 = 2.275, 3.5 x 0.65 = 2.275: no gain, so it ends."""
    steps = speed(None, 1.0, 0.8, 0.7, 0.65, 0.65)
    assert lengths([[0.75, 0.25], [0.5, 0.125]], steps) == [1, 1]


def test_a_sure_request_gets_more_drafts_than_a_doubtful_one():
    steps = speed(None, 1.0, 0.9, 0.8, 0.7, 0.6)
    assert lengths([[0.25, 0.0625], [0.9375, 0.875]], steps) == [0, 2]


def test_equal_survival_goes_to_the_earlier_draft_and_then_to_the_earlier_request():
    row = [0.5, 0.5, 0.5]
    for taken, want in enumerate([[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]):
        free = [1.0] * (taken + 2)
        steps = speed(None, *free[1:], *[1e-3] * 8)
        assert lengths([row, row], steps) == want


def test_a_candidate_that_only_keeps_the_rate_is_not_taken():
    """1 x 1 = 1 and 1.5 x 2/3 = 1."""
    assert lengths([[0.5]], speed(1.0, 2 / 3)) == [0]
    assert lengths([[0.5]], speed(1.0, 0.67)) == [1]


def test_what_lies_behind_a_loss_is_not_looked_at():
    """1, then 1.8 x 0.5 = 0.9, then 2.52 x 0.45 = 1.134: better, and still out of reach."""
    assert lengths([[0.8, 0.72]], speed(1, 0.5, 0.45)) == [0]


def test_requests_without_drafts_count_as_tokens_of_the_batch():
    steps = speed(1.0, 1.0, 1.0, 0.1)
    assert lengths([[0.9], [], []], steps) == [0, 0, 0]
    assert lengths([[0.9], []], steps) == [1, 0]


def test_the_speed_is_asked_for_whole_numbers_of_tokens():
    asked = []
    lengths([[0.9, 0.8], [0.7]], lambda tokens: asked.append(tokens) or 1.0)
    assert asked == [2, 3, 4, 5]
    assert all(isinstance(tokens, int) for tokens in asked)


# ---- properties -------------------------------------------------------------------------------

shares = st.lists(st.integers(0, 16), max_size=4).map(lambda s: sorted(s, reverse=True))
requests = st.lists(shares, min_size=1, max_size=3)
# falling speeds in 64ths: products with survival in 16ths are exact in float64
speeds = st.lists(st.integers(1, 64), min_size=15, max_size=15).map(
    lambda s: sorted(s, reverse=True)
)


@repeatable
@given(requests=requests, speeds=speeds)
def test_taking_while_the_rate_rises_is_taking_above_a_threshold(requests, speeds):
    """A draft is worth its place while its survival exceeds tau (SPS(B) / SPS(B + 1) - 1)."""
    sps = {tokens: Fraction(s, 64) for tokens, s in enumerate(speeds, 1)}
    order = sorted((-a, k, r) for r, row in enumerate(requests) for k, a in enumerate(row))
    tau, tokens, want = Fraction(len(requests)), len(requests), [0] * len(requests)
    for minus_a, _, r in order:
        survival = Fraction(-minus_a, 16)
        if not survival > tau * (sps[tokens] / sps[tokens + 1] - 1):
            break
        tau, tokens, want[r] = tau + survival, tokens + 1, want[r] + 1
    assert lengths(np_rows(requests), lambda tokens: float(sps[tokens])) == want


@repeatable
@given(requests=requests, speeds=speeds, data=st.data())
def test_whether_a_draft_is_verified_does_not_depend_on_later_drafts(requests, speeds, data):
    """Survival behind a draft is a function of that draft's token: it must not decide about it."""
    r = data.draw(st.integers(0, len(requests) - 1))
    k = data.draw(st.integers(0, len(requests[r])))
    other = [list(row) for row in requests]
    ceiling = other[r][k - 1] if k else 16
    other[r][k:] = [min(a, ceiling) for a in data.draw(shares)][: 4 - k]
    steps = lambda tokens: speeds[tokens - 1] / 64  # noqa: E731
    before, after = lengths(np_rows(requests), steps), lengths(np_rows(other), steps)
    for j in range(1, k + 1):
        assert (before[r] >= j) == (after[r] >= j)


def np_rows(requests):
    return [[a / 16 for a in row] for row in requests]


# ---- the law that is left ---------------------------------------------------------------------

STEPS = speed(1, 0.5, 0.45)
TARGET, DRAFTED = np.array([0.7, 0.3]), np.array([0.5, 0.5])


def survival_behind(token):
    """The second draft is likely to be kept behind token 0 and hopeless behind token 1."""
    return np.array([0.8, 0.8 * (0.9 if token == 0 else 0)])


def law_of_first_token(choose_length):
    """Law of the next token when choose_length(survival) drafts are verified, as fractions.

    Accept probabilities are 1 and 3/5, so midpoints of ten parts integrate exactly.
    """
    law = [Fraction(0), Fraction(0)]
    for token in range(2):
        count = min(1, choose_length(survival_behind(token)))  # later drafts do not matter here
        for u, v in itertools.product((np.arange(10) + 0.5) / 10, repeat=2):
            target, drafted = [TARGET] * (count + 1), [DRAFTED] * count
            kept, then = verify(target, drafted, [token][:count], Numbers(u, v))
            law[token if kept else then] += Fraction(1, 200)
    return law


class Numbers:
    """A generator that gives the numbers it was told, in order."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


def test_stopping_at_the_first_loss_leaves_the_models_law():
    law = law_of_first_token(lambda survival: int(draft_lengths([survival], STEPS)[0]))
    assert law == [Fraction(7, 10), Fraction(3, 10)]


def test_stopping_leaves_the_models_law_where_drafts_are_taken():
    """The same drafts on a machine on which the first is worth its place."""
    taken = {0: 2, 1: 1}
    for token, count in taken.items():
        assert draft_lengths([survival_behind(token)], speed(1, 0.9, 0.8)).tolist() == [count]
    law = law_of_first_token(lambda s: int(draft_lengths([s], speed(1, 0.9, 0.8))[0]))
    assert law == [Fraction(7, 10), Fraction(3, 10)]


def test_looking_ahead_would_change_the_law():
    """The length with the best rate of all: verified exactly when the draft is token 0."""

    def best_length(survival):
        rates = [(1 + sum(survival[:n])) * STEPS(n + 1) for n in range(len(survival) + 1)]
        return int(np.argmax(rates))

    assert best_length(survival_behind(0)) == 2
    assert best_length(survival_behind(1)) == 0
    assert law_of_first_token(best_length) == [Fraction(17, 20), Fraction(3, 20)]


def test_the_law_by_drawing():
    """The same two rules with a real generator, 20,000 tokens each."""
    ahead = lambda s: 2 if s[1] else 0  # noqa: E731
    stops = lambda s: int(draft_lengths([s], STEPS)[0])  # noqa: E731
    for rule, share in ((stops, 0.7), (ahead, 0.85)):
        generator, first = np.random.default_rng(0), 0
        for _ in range(20_000):
            token = draw(DRAFTED, generator)
            count = min(1, rule(survival_behind(token)))
            laws = [TARGET] * (count + 1), [DRAFTED] * count
            kept, then = verify(*laws, [token][:count], generator)
            first += (token if kept else then) == 0
        assert abs(first / 20_000 - share) < 5 * np.sqrt(share * (1 - share) / 20_000)


# ---- speed ------------------------------------------------------------------------------------


def test_seconds_lie_on_straight_lines_between_measured_points():
    throughput = Throughput([1, 2, 6], [1.0, 1.5, 5.5])
    assert throughput(1) == 1
    assert throughput(2) == pytest.approx(1 / 1.5)
    assert throughput(3) == pytest.approx(1 / 2.5), "not the mean of the speeds"
    assert throughput(6) == pytest.approx(1 / 5.5)


def test_beyond_the_last_point_the_last_slope_goes_on():
    throughput = Throughput([1, 2, 6], [1.0, 1.5, 5.5])
    assert throughput(8) == pytest.approx(1 / 7.5)
    assert Throughput([2, 4], [2.0, 1.0])(100) == 1, "never faster than measured"
    assert Throughput([4], [0.5])(100) == 2


def test_before_the_first_point_a_step_takes_as_long_as_the_first():
    assert Throughput([4, 8], [0.5, 1.0])(1) == 2


def test_measured_speed_falls_with_the_tokens():
    config = oracles.small_config()
    params = random_params(config, np.random.default_rng(0))
    model = Model(config, params, oracles.small_classes(config))
    throughput = measure_throughput(model, FLOAT32, sizes=(1, 3), repeats=1)
    assert throughput.tokens.tolist() == [1, 3]
    assert 0 < throughput(3) <= throughput(2) <= throughput(1) < 1e6
