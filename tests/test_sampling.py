"""Laws as exact fractions: what is drawn, what a verifier keeps, and what comes out of both."""

import itertools
from fractions import Fraction
from math import lcm

import numpy as np
import pytest
from compare import assert_close, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.sampling import Sampling, distribution, draw, verify

LAST = float(np.nextafter(1, 0))  # the largest number a generator of [0, 1) can give
GREEDY = Sampling()


class Scripted:
    """A generator that gives the numbers it was told, and knows how many were asked for."""

    def __init__(self, *numbers):
        self.numbers, self.used = numbers, 0

    def random(self):
        self.used += 1
        return self.numbers[(self.used - 1) % len(self.numbers)]


def middles(count):
    """Midpoints of `count` equal parts of [0, 1): they integrate steps at multiples of 1/count."""
    return [(i + 0.5) / count for i in range(count)]


# ---- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature: .* -0\.1"),
        ({"temperature": float("nan")}, "temperature: .* nan"),
        ({"temperature": float("inf")}, "temperature: .* inf"),
        ({"top_p": 0}, r"top_p: .*\(0, 1\], got 0"),
        ({"top_p": -0.5}, r"top_p: .* -0\.5"),
        ({"top_p": 1.5}, r"top_p: .* 1\.5"),
        ({"top_p": float("nan")}, "top_p: .* nan"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_settings_at_the_edges_are_legal():
    assert Sampling(temperature=0, top_p=1).temperature == 0
    assert Sampling(temperature=100.0, top_p=1e-9).top_p == 1e-9


# ---- the law of one token ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([0.5, 3, 2], 1),
        ([2, 3, 3, 3], 1),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([-np.inf, -4, -np.inf, -4], 1),
        ([-3, -1, -2, -np.inf, -np.inf], 1),
        ([7], 0),
    ],
)
def test_greedy_takes_the_best_and_of_equals_the_lowest(logits, token):
    law = distribution(np.float32(logits), GREEDY)
    assert law.tolist() == [float(i == token) for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    ("logits", "found"),
    [
        ([-np.inf, -np.inf], "-inf"),
        ([0, np.nan, 9], "nan"),
        ([np.nan, -np.inf], "nan"),
        ([0, np.inf], "inf"),
    ],
)
def test_logits_without_a_best_token_are_an_error(logits, found, temperature):
    with pytest.raises(ValueError, match=f"logits: .* {found}"):
        distribution(np.float32(logits), Sampling(temperature))


def test_temperature_divides_the_logits():
    logits = np.log([1, 2, 5])
    assert_close("T = 1", distribution(logits, Sampling(1)), np.array([1, 2, 5]) / 8)
    assert_close("T = 1/2", distribution(logits, Sampling(0.5)), np.array([1, 4, 25]) / 30)
    roots = np.sqrt([1, 2, 5])
    assert_close("T = 2", distribution(logits, Sampling(2)), roots / roots.sum())


def test_a_token_that_cannot_be_has_no_share():
    law = distribution(np.array([np.log(3), -np.inf, 0]), Sampling(1))
    assert_close("law", law, np.array([0.75, 0, 0.25]))
    assert law[1] == 0


def test_huge_logits_and_small_temperatures_do_not_overflow():
    law = distribution(np.float32([1e30, 0, -1e30]), Sampling(1e-3))
    assert law.tolist() == [1, 0, 0]
    law = distribution(np.float32([-1e30, -1e30]), Sampling(0.7))
    assert law.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [8, 0, 0, 0]),
        (0.5, [8, 0, 0, 0]),
        (0.51, [8, 4, 0, 0]),
        (0.75, [8, 4, 0, 0]),
        (0.76, [8, 4, 2, 0]),
        (0.875, [8, 4, 2, 0]),
        (0.9, [8, 4, 2, 2]),
        (1.0, [8, 4, 2, 2]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_holds_it(top_p, kept):
    """Shares 8, 4, 2, 2 of 16; the tokens stand in another order; of equals the lower id stays."""
    law = distribution(np.log([2.0, 8.0, 2.0, 4.0]), Sampling(1, top_p))
    want = np.array([kept[2], kept[0], kept[3], kept[1]]) / sum(kept)
    assert_close("law", law, want)
    assert ((law > 0) == (want > 0)).all()


def test_of_equal_shares_the_lower_ids_stay():
    law = distribution(np.zeros(4), Sampling(1, 0.5))
    assert law.tolist() == [0.5, 0.5, 0, 0]


def test_top_p_is_measured_after_the_temperature():
    logits = np.log([4.0, 3.0, 3.0])  # at T = 1/2: 16, 9 and 9 of 34
    assert np.count_nonzero(distribution(logits, Sampling(1, 0.45))) == 2
    assert np.count_nonzero(distribution(logits, Sampling(0.5, 0.45))) == 1


@repeatable
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=8),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.37, 0.63, 0.93, 1.0]),
)
def test_a_law_against_loops(logits, temperature, top_p):
    weights = [float(np.exp(z / temperature)) for z in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept, mass = [], 0.0
    for i in ranked:
        if mass < top_p * sum(weights):
            kept.append(i)
        mass += weights[i]
    want = [w if i in kept else 0 for i, w in enumerate(weights)]
    law = distribution(np.float32(logits), Sampling(temperature, top_p))
    assert law.dtype == np.float64
    assert_close("law", law, np.array(want) / sum(want))


def test_logits_are_left_as_they_were():
    logits = np.float32([3, 1, 2])
    logits.flags.writeable = False
    distribution(logits, Sampling(1, 0.5))
    assert logits.tolist() == [3, 1, 2]


# ---- drawing ----------------------------------------------------------------------------------


def test_draws_have_the_law_exactly():
    counts = np.bincount([draw(np.array([2, 0, 5, 1]) / 8, Scripted(u)) for u in middles(8)])
    assert counts.tolist() == [2, 0, 5, 1]


def test_a_share_need_not_be_normalised():
    counts = np.bincount([draw(np.array([0, 0.1, 0.3]), Scripted(u)) for u in middles(4)])
    assert counts.tolist() == [0, 1, 3]


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, 0.99999994, LAST])
def test_a_token_without_a_share_is_never_drawn(u):
    for law in ([0, 0, 1, 0, 0], [0, 0.1, 0.2, 0, 0.3, 0], [0.1] * 7 + [0] * 3, [0, 5e-324, 0]):
        assert law[draw(np.array(law), Scripted(u))] > 0


def test_the_largest_number_draws_the_last_token_that_can_be():
    """Sums of a long law round; the end of the vocabulary must not catch what is missing."""
    law = distribution(np.random.default_rng(0).normal(size=129280), Sampling(1))
    law[-1000:] = 0
    assert draw(law, Scripted(LAST)) == 129280 - 1001
    assert draw(law, Scripted(0.0)) == 0


def test_a_draw_takes_one_number():
    generator = Scripted(0.3)
    draw(np.array([0.5, 0.5]), generator)
    assert generator.used == 1


# ---- verifying ------------------------------------------------------------------------------


def one_hot(tokens, size):
    return np.eye(size)[list(tokens)]


@pytest.mark.parametrize(
    ("drafts", "kept", "then"),
    [([3, 5, 7], 2, 9), ([3, 5, 9], 3, 1), ([], 0, 3), ([4, 5, 9], 0, 3), ([3, 4, 9], 1, 5)],
)
@pytest.mark.parametrize("u", [0.0, 0.37, LAST])
def test_greedy_keeps_what_the_model_would_have_written(drafts, kept, then, u):
    target = one_hot([3, 5, 9, 1][: len(drafts) + 1], 12)
    got = verify(target, one_hot(drafts, 12), drafts, Scripted(u))
    assert got == (kept, then)


@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, 0.99999994, LAST])
@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("temperature", [0, 0.3, 1.0, 4.0])
def test_a_draft_from_the_models_own_law_is_kept_whatever_the_numbers(u, count, temperature):
    logits = np.random.default_rng(0).normal(size=129280).astype(np.float32)
    law = distribution(logits, Sampling(temperature))
    tokens = np.argsort(-law)[:: max(1, 129280 // count)][:count]  # from likely to unlikely
    tokens = [int(t) for t in tokens if law[t] > 0]
    kept, then = verify([law] * (len(tokens) + 1), [law] * len(tokens), tokens, Scripted(u))
    assert kept == len(tokens)
    assert law[then] > 0


@repeatable
@given(weights=st.lists(st.floats(1e-300, 1), min_size=1, max_size=6), u=st.floats(0, LAST))
def test_equal_laws_keep_every_token_at_every_number(weights, u):
    law = np.array(weights) / sum(weights)
    for token in np.flatnonzero(law >= 1e-300).tolist():  # a normal number: u * q stays below q
        assert verify([law, law], [law], [token], Scripted(u))[0] == 1


def test_a_token_that_the_model_cannot_write_is_refused_at_zero():
    p, q = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    assert verify([p, p], [q], [0], Scripted(0.0)) == (0, 1)


def test_the_run_ends_at_the_first_refusal():
    """The second draft would be kept, but it stood behind another first token."""
    target, drafted = one_hot([1, 2, 3], 4), one_hot([0, 2], 4)
    generator = Scripted(0.0)
    assert verify(target, drafted, [0, 2], generator) == (0, 1)
    assert generator.used == 2, "one number for the refusal, one for the token in its place"


def verify_one(p, q, token, *numbers):
    """Verify one token said to come from q, with the numbers that the generator will give."""
    return verify(np.array([p, p], float), np.array([q], float), [token], Scripted(*numbers))


def kept_share(p, q, token, parts):
    """Probability that `token` is kept, when it is a multiple of 1 / parts."""
    return Fraction(sum(verify_one(p, q, token, u, 0.5)[0] for u in middles(parts)), parts)


def replacement(p, q, token, parts):
    """Law of the token that stands in for a refused one, in multiples of 1 / parts."""
    runs = [verify_one(p, q, token, LAST, u) for u in middles(parts)]
    assert {kept for kept, _ in runs} == {0}
    counts = np.bincount([then for _, then in runs], minlength=len(p))
    return [Fraction(int(c), parts) for c in counts]


P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)


def test_acceptance_and_replacement_by_hand():
    shares = [kept_share(P, Q, token, 30) for token in range(3)]
    assert shares == [1, Fraction(3, 5), Fraction(2, 3)]
    assert replacement(P, Q, 1, 10) == [1, 0, 0]
    assert replacement(P, Q, 2, 10) == [1, 0, 0]


def test_a_draft_taken_as_the_best_has_a_law_of_one_point():
    """The token with the largest q, verified against q itself, would give (2/5, 3/5, 0)."""
    point = (0, 1, 0)
    assert kept_share(P, point, 1, 10) == Fraction(3, 10)
    assert replacement(P, point, 1, 7) == [Fraction(5, 7), 0, Fraction(2, 7)]
    assert emitted(P, point, 1, 70) == [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
    assert emitted(P, Q, 1, 10) == [Fraction(2, 5), Fraction(3, 5), 0]


def emitted(p, q, token, parts):
    """Law of the first token that comes out when `token` was drafted and q is said to be its law.

    Exact when every step lies at a multiple of 1 / parts.
    """
    counts = [0] * len(p)
    for pair in itertools.product(middles(parts), repeat=2):
        kept, then = verify_one(p, q, token, *pair)
        counts[token if kept else then] += 1
    return [Fraction(c, parts**2) for c in counts]


@st.composite
def two_laws(draw):
    """Two laws over two to four tokens in the same small whole numbers."""
    total, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    cuts = st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1).map(sorted)
    edges = [[0, *draw(cuts), total] for _ in range(2)]
    return total, *(np.diff(e).tolist() for e in edges)


@repeatable
@given(laws=two_laws())
def test_what_comes_out_has_the_models_law_whatever_was_drafted(laws):
    total, p, q = laws
    parts = lcm(*range(1, total + 1))
    law = [Fraction(0)] * len(p)
    for token in np.flatnonzero(q).tolist():
        shares = emitted(np.array(p) / total, np.array(q) / total, token, parts)
        law = [a + Fraction(q[token], total) * b for a, b in zip(law, shares, strict=True)]
    assert law == [Fraction(n, total) for n in p]


# a text of three tokens: law of the first, of the second behind each first, of the third
FIRST = {"model": (2, 1, 1), "draft": (1, 3, 0)}
SECOND = {
    "model": [(1, 3, 0), (2, 2, 0), (0, 1, 3)],
    "draft": [(1, 1, 2), (2, 2, 0), (4, 0, 0)],
}
THIRD = [[(4, 0, 0), (0, 2, 2), (1, 2, 1)], [(1, 1, 2), (0, 0, 4), (3, 1, 0)], [(0, 4, 0)] * 3]


def test_two_drafts_in_a_row_leave_the_law_of_the_whole_text():
    """Every draft, every kept length and every number drawn, summed up in fractions."""
    parts = 12  # all laws are in quarters: ratios and remainders have denominators up to 4
    law = {}
    for drafts in itertools.product(range(3), repeat=2):
        laws = [FIRST["draft"], SECOND["draft"][drafts[0]]]
        chance = Fraction(laws[0][drafts[0]] * laws[1][drafts[1]], 16)
        if not chance:
            continue
        target = [FIRST["model"], SECOND["model"][drafts[0]], THIRD[drafts[0]][drafts[1]]]
        for numbers in itertools.product(middles(parts), repeat=3):
            run = verify(np.array(target) / 4, np.array(laws) / 4, drafts, Scripted(*numbers))
            text = (*drafts[: run[0]], run[1])
            law[text] = law.get(text, 0) + chance / parts**3
    assert sum(law.values()) == 1
    assert _continued(law) == _plain_law()


def _plain_law():
    law = {}
    for a, b, c in itertools.product(range(3), repeat=3):
        share = FIRST["model"][a] * SECOND["model"][a][b] * THIRD[a][b][c]
        law[a, b, c] = Fraction(share, 64)
    return law


def _continued(law):
    """Texts of one to three tokens, continued by the model to three."""
    whole = dict.fromkeys(itertools.product(range(3), repeat=3), Fraction(0))
    for text in whole:
        for cut in (1, 2, 3):
            share = law.get(text[:cut], Fraction(0))
            if cut == 1:
                share *= Fraction(SECOND["model"][text[0]][text[1]], 4)
            if cut <= 2:
                share *= Fraction(THIRD[text[0]][text[1]][text[2]], 4)
            whole[text] += share
    return whole


def test_drawn_texts_fit_the_models_law_by_chi_square():
    """60,000 drafts with a real generator; 33.4 is exceeded once in a million for five tokens."""
    p, q = np.array([0.4, 0.3, 0.2, 0.07, 0.03]), np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    generator, counts, drafts = np.random.default_rng(7), np.zeros(5), 60_000
    for _ in range(drafts):
        token = draw(q, generator)
        kept, then = verify((p, p), (q,), (token,), generator)
        counts[token if kept else then] += 1
    assert _chi_square(counts, p) < 33.4
    assert _chi_square(counts, q) > 1000, "the test can tell the two laws apart"


def _chi_square(counts, law):
    expected = law * counts.sum()
    return float(np.sum((counts - expected) ** 2 / expected))
