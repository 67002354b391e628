"""Many requests at once: the same text alone, in company, in pieces, drafted or put aside."""

from functools import cache
from itertools import product

import numpy as np
import oracles
import pytest
from compare import assert_same
from reference import GOLDEN

import dsv41
from dsv41 import FLOAT32, OFFICIAL
from dsv41.batch import make_batch
from dsv41.draft import Draft, Drafter
from dsv41.engine import Engine
from dsv41.generate import Summary, stream_text, summarise
from dsv41.init import random_params
from dsv41.model import Model, engram_rows
from dsv41.rollback import restore, snapshot
from dsv41.sampling import Sampling
from dsv41.schedule import Throughput

# three layers before the cut and two behind it, a window of four, drafts of three
CONFIG = oracles.small_config(
    num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    engram_layer_ids=(0, 4),
    sliding_window=4,
    eos_token_id=59,
    num_nextn_predict_layers=2,
    dspark_block_size=3,
    dspark_noise_token_id=58,
    dspark_target_layer_ids=(3, 4),
    dspark_markov_rank=8,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
)
W, BLOCK, VOCAB = CONFIG.sliding_window, CONFIG.dspark_block_size, CONFIG.vocab_size
ENCODER, DECODER = 3, 2  # layers
EXACT = {
    "float32": FLOAT32.but(batch_invariant=True),
    "official": OFFICIAL.but(batch_invariant=True),
}
LENGTHS = (1, W - 1, W, W + 1, 3 * W + 1, 22)
TOKENS = 7


@cache
def model():
    params = random_params(CONFIG, np.random.default_rng(2))
    return Model(CONFIG, params, oracles.small_classes(CONFIG))


def prompt(length):
    return np.random.default_rng(length).integers(0, 58, length)


def finish(engine):
    for _ in engine.run():
        pass


@cache
def alone(numerics, exact, length, sampling=None):
    """The text of one prompt in an engine of its own, its prompt in one piece, no drafts."""
    engine = Engine(model(), EXACT[numerics], exact=exact)
    request = engine.submit(prompt(length), TOKENS, sampling, stop=())
    finish(engine)
    return tuple(request.tokens)


def submit_all(engine, sampling=None, lengths=LENGTHS):
    return [engine.submit(prompt(n), TOKENS, sampling, stop=()) for n in lengths]


def assert_alone(requests, numerics, exact, sampling=None):
    for request in requests:
        want = alone(numerics, exact, len(request.prompt), sampling)
        assert tuple(request.tokens) == want, f"prompt of {len(request.prompt)}"


both = pytest.mark.parametrize(("numerics", "exact"), list(product(EXACT, [True, False])))


# ---- which text -------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_text_is_the_best_token_after_every_prefix(numerics, length):
    text = alone(numerics, True, length)
    logits = model().logits([*prompt(length), *text], EXACT[numerics])
    assert np.argmax(logits[length - 1 : -1], axis=1).tolist() == list(text)


def test_the_texts_of_these_tests_tell_tokens_apart():
    texts = [alone("official", exact, n) for n in LENGTHS for exact in (True, False)]
    assert len(set(texts)) > len(LENGTHS)
    assert min(len(set(text)) for text in texts) > 2


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("length", LENGTHS)
def test_only_the_last_window_of_a_prompt_is_decoded(numerics, length):
    """The engine against the same rule spelled with `step`."""
    cache = model().new_cache(EXACT[numerics])
    slot, text = model().open(cache), []
    start = max(0, length - W)
    logits = model().step(cache, [slot], [prompt(length)], decoder_from=[start])
    assert len(logits) == length - start
    for _ in range(TOKENS):
        text.append(int(np.argmax(logits[-1])))
        logits = model().step(cache, [slot], [text[-1:]])
    assert tuple(text) == alone(numerics, False, length)


@both
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk": 4, "max_batch": 3, "page_tokens": 2},
        {"draft": True},
        {"draft": True, "chunk": 5, "max_batch": 3},
        {"draft": True, "steps_per_second": Throughput([1, 20], [1.0, 6.0])},
    ],
    ids=["together", "pieces", "drafts", "drafts-pieces", "drafts-scheduled"],
)
def test_company_pieces_pages_and_drafts_change_no_text(numerics, exact, options):
    engine = Engine(model(), EXACT[numerics], exact=exact, **options)
    requests = submit_all(engine)
    finish(engine)
    assert_alone(requests, numerics, exact)
    assert {r.finish for r in requests} == {"length"}
    drafted = [bool(r.accepted) for r in requests]
    assert any(drafted) == ("draft" in options)
    if options == {"draft": True}:
        assert all(drafted)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_pieces_that_end_before_the_last_window_can_be_drafted_for(chunk):
    """Their rows leave no features; the first ones come with a later piece."""
    engine = Engine(model(), EXACT["float32"], draft=True, chunk=chunk)
    request = engine.submit(prompt(22), TOKENS, stop=())
    finish(engine)
    assert_alone([request], "float32", False)
    assert request.accepted


@pytest.mark.parametrize(
    ("numerics", "exact", "draft"),
    [("float32", True, True), ("official", True, False), ("official", False, True)],
)
def test_requests_put_aside_go_on_where_they_were(numerics, exact, draft):
    """Every second step puts one aside, by turns one that reads and one that writes."""
    engine = Engine(model(), EXACT[numerics], exact=exact, draft=draft, chunk=5, max_batch=4)
    requests, steps, aside = submit_all(engine), 0, set()
    while engine.busy:
        engine.step()
        steps += 1
        kind = steps % 4 == 3
        for one in [r for r in engine.running if r.reading == kind][: steps % 2]:
            aside.add((len(one.prompt), one.reading))
            engine.preempt(one)
            assert one.slot is None
            assert engine.waiting[-1] is one
    assert_alone(requests, numerics, exact)
    assert {reading for _, reading in aside} == {True, False}
    assert len(aside) > 4


@pytest.mark.parametrize("draft", [False, True])
def test_requests_join_and_leave_between_steps(draft):
    """One arrives at every step, one is cancelled while it writes and one while it waits."""
    engine = Engine(model(), EXACT["official"], draft=draft, chunk=8, max_batch=3)
    requests = []
    for step in range(len(LENGTHS)):
        requests += submit_all(engine, lengths=[LENGTHS[step]])
        engine.step()
        if step == 2:
            leaver, never = submit_all(engine, lengths=[6, 7])
            engine.cancel(never)
    while not leaver.tokens:
        engine.step()
    begun = list(leaver.tokens)
    engine.cancel(leaver)
    finish(engine)
    assert_alone(requests, "official", False)
    assert (leaver.finish, leaver.tokens, leaver.slot) == ("cancelled", begun, None)
    assert (never.finish, never.tokens) == ("cancelled", [])


@pytest.mark.parametrize("numerics", EXACT)
def test_the_next_request_in_a_slot_finds_nothing_of_the_last(numerics):
    """One slot, used in turn; all it leaves behind is overwritten with NaN."""
    engine = Engine(model(), EXACT[numerics], draft=True, max_batch=1)
    for length in (22, 1, W + 1):
        request = engine.submit(prompt(length), TOKENS, stop=())
        finish(engine)
        assert_alone([request], numerics, False)
        kept = engine.cache
        assert kept.length == [None]
        assert len(set(kept.free_pages)) == len(kept.free_pages)
        assert not engine.drafter.first
        arrays = [*kept.window, *kept.carry.values(), *kept.main_kv.values(), *kept.index.values()]
        for array in arrays:
            array[:] = np.nan if array.dtype == np.float32 else 0xFF
        kept.history[:] = 10**15


def test_what_is_yielded_adds_up_to_the_texts():
    engine = Engine(model(), EXACT["float32"], draft=True)
    requests = submit_all(engine)
    pieces = {id(r): [] for r in requests}
    for request, new in engine.run():
        assert new
        pieces[id(request)] += new
        assert request.tokens == pieces[id(request)]
    assert_alone(requests, "float32", False)
    assert not engine.busy


def test_the_reference_model_writes_its_own_best_tokens_with_and_without_drafts():
    """Nine layers, three stages; the drafter is random, so hardly any draft is kept."""
    big = dsv41.load(GOLDEN, parts=("text", "dspark"))
    ids = np.random.default_rng(0).integers(3, 280, 19)
    texts = []
    for draft in (False, True):
        engine = Engine(big, exact=True, draft=draft, chunk=8)
        request = engine.submit(ids, 6, stop=())
        finish(engine)
        texts.append(request.tokens)
    logits = big.logits([*ids, *texts[0]], batch_invariant=True)
    assert np.argmax(logits[18:-1], axis=1).tolist() == texts[0] == texts[1]


# ---- where it ends ----------------------------------------------------------------------------


def first_new_token(text):
    """A token of the text that stands in it for the first time at place two or later."""
    return next(t for i, t in enumerate(text) if i >= 2 and t not in text[:i])


@pytest.mark.parametrize("draft", [False, True])
def test_a_text_ends_with_its_stop_token(draft):
    text = alone("official", False, 22)
    stop = first_new_token(text)
    engine = Engine(model(), EXACT["official"], draft=draft)
    request, other = (engine.submit(prompt(22), TOKENS, stop=s) for s in ([stop, 60], ()))
    finish(engine)
    assert request.finish == "stop"
    assert tuple(request.tokens) == text[: text.index(stop) + 1]
    assert (tuple(other.tokens), other.finish) == (text, "length")


def test_a_stop_token_in_the_last_place_is_a_stop():
    text = alone("official", False, 22)
    at = text.index(first_new_token(text))
    engine = Engine(model(), EXACT["official"])
    request = engine.submit(prompt(22), at + 1, stop=[text[at]])
    finish(engine)
    assert (len(request.tokens), request.finish) == (at + 1, "stop")


def test_the_configs_end_of_text_stops_by_default():
    text = alone("official", False, 22)
    eos = first_new_token(text)
    other = Model(CONFIG.but(eos_token_id=eos), model().params, model().classes)
    engine = Engine(other, EXACT["official"])
    request = engine.submit(prompt(22), TOKENS)
    assert (request.stop, request.finish, request.reading) == ({eos}, None, True)
    finish(engine)
    assert tuple(request.tokens) == text[: text.index(eos) + 1]


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_a_text_ends_at_its_limit(limit, draft):
    engine = Engine(model(), EXACT["float32"], draft=draft)
    request = engine.submit(prompt(W + 1), limit, stop=())
    finish(engine)
    assert tuple(request.tokens) == alone("float32", False, W + 1)[:limit]
    assert (request.finish, request.slot) == ("length", None)


def test_one_token_needs_no_second_step():
    engine = Engine(model(), EXACT["float32"])
    request = engine.submit(prompt(5), 1)
    assert engine.step() == [(request, request.tokens)]
    assert not engine.busy


# ---- drafts -----------------------------------------------------------------------------------


def script(engine, wanted):
    """The engine's drafter proposes wanted(request), BLOCK tokens, instead of its own."""

    def propose(slots, anchors, choose):
        by_slot, drafts = {r.slot: r for r in engine.running}, []
        for i, (slot, anchor) in enumerate(zip(slots, anchors, strict=True)):
            request = by_slot[slot]
            assert anchor == request.tokens[-1]
            assert engine.cache.length[slot] == len(request.ids) - 1, "the anchor has not been run"
            tokens = wanted(request)
            logits = np.eye(VOCAB, dtype=np.float32)[tokens]
            assert [choose(i, z) for z in logits] == tokens
            drafts.append(Draft(np.array(tokens), logits, np.zeros(BLOCK, np.float32)))
        return drafts

    engine.drafter.propose = propose
    return engine


def coming(numerics, exact, request):
    """The next BLOCK tokens of the request's greedy text, zeros behind its end."""
    text = alone(numerics, exact, len(request.prompt))
    return [*text[len(request.tokens) :], *[0] * BLOCK][:BLOCK]


def rounds(limit, kept_of):
    """Drafts kept per verification of a text of `limit` tokens: kept_of(tokens so far, drafts)."""
    written, kept = 1, []
    while limit - written > 1:
        kept.append(kept_of(written, min(BLOCK, limit - written - 1)))
        written += kept[-1] + 1
    return kept


@both
def test_drafts_that_are_always_right_are_all_kept(numerics, exact):
    """Prompts on both sides of the window; a shift by one would only be slow, never wrong."""
    engine = script(
        Engine(model(), EXACT[numerics], exact=exact, draft=True),
        lambda request: coming(numerics, exact, request),
    )
    requests = submit_all(engine)
    finish(engine)
    assert_alone(requests, numerics, exact)
    assert [r.accepted for r in requests] == [[3, 1]] * len(LENGTHS)


@both
def test_drafts_that_are_always_wrong_cost_a_token_each_and_change_nothing(numerics, exact):
    engine = script(
        Engine(model(), EXACT[numerics], exact=exact, draft=True),
        lambda request: [(t + 1) % VOCAB for t in coming(numerics, exact, request)],
    )
    requests = submit_all(engine)
    finish(engine)
    assert_alone(requests, numerics, exact)
    assert [r.accepted for r in requests] == [[0] * (TOKENS - 2)] * len(LENGTHS)


@both
def test_drafts_that_are_right_by_chance_are_kept_up_to_the_first_wrong_one(numerics, exact):
    rng, said = np.random.default_rng(3), {}

    def wanted(request):
        right = coming(numerics, exact, request)
        tokens = [t if rng.random() < 0.6 else int(rng.integers(VOCAB)) for t in right]
        agree = [a == b for a, b in zip(tokens, right, strict=True)]
        said[len(request.prompt), len(request.tokens)] = [*agree, False].index(False)
        return tokens

    engine = script(Engine(model(), EXACT[numerics], exact=exact, draft=True, chunk=9), wanted)
    requests = submit_all(engine)
    finish(engine)
    assert_alone(requests, numerics, exact)
    for request in requests:
        length = len(request.prompt)
        want = rounds(TOKENS, lambda at, n, length=length: min(n, said[length, at]))
        assert request.accepted == want
    assert {n for r in requests for n in r.accepted} == {0, 1, 2, 3}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_follows_a_stop_token_inside_a_draft(place):
    """The draft and the model agree beyond it, and still the text ends there."""
    text = alone("official", False, 13)
    stop = text[1 + place]
    assert len(set(text[:4])) == 4, "the first draft must hold the stop token where it is meant"
    engine = Engine(model(), EXACT["official"], draft=True, max_batch=1)
    script(engine, lambda request: coming("official", False, request))
    request, after = (engine.submit(prompt(n), TOKENS, stop=s) for n, s in ((13, [stop]), (5, ())))
    finish(engine)
    assert tuple(request.tokens) == text[: 2 + place]
    assert request.finish == "stop"
    assert_alone([after], "official", False)


@pytest.mark.parametrize("numerics", EXACT)
def test_a_request_that_drafts_leaves_the_cache_of_one_that_does_not(numerics):
    """After every step, the logits behind each text and the drafter's rings, to the bit."""
    rng = np.random.default_rng(5)

    def wanted(request):
        right = coming(numerics, True, request)
        return [t if rng.random() < 0.6 else 7 for t in right]

    engine = script(Engine(model(), EXACT[numerics], exact=True, draft=True), wanted)
    submit_all(engine, lengths=(W + 1, 13))
    while engine.busy:
        engine.step()
        assert not engine.cache.marks
        for request in engine.running:
            aside = model().new_cache(EXACT[numerics])
            slot = restore(aside, snapshot(engine.cache, request.slot))
            got = model().step(aside, [slot], [request.tokens[-1:]])
            assert_same("logits", got[0], model().logits(request.ids, EXACT[numerics])[-1])
            assert_rings_of(engine, request)


def assert_rings_of(engine, request):
    """The drafter has seen the features of all tokens but the newest, and no others."""
    fresh = model().new_cache(engine.cache.numerics)
    slot, features, count = model().open(fresh), [], len(request.ids) - 1
    model().step(fresh, [slot], [request.ids[:-1]], features=features)
    want = Drafter(model(), fresh)
    want.observe(slot, np.arange(count), np.concatenate(features, axis=1))
    rows = np.arange(max(0, count - W), count) % W
    assert engine.drafter.first[request.slot] == 0
    for stage in range(2):
        got = engine.drafter.rings[stage][request.slot]
        assert_same(f"ring of stage {stage}", got[rows], want.rings[stage][slot][rows])


def test_a_request_that_comes_back_still_has_its_features():
    """A short and a long one are put aside, and come back in each other's slot."""
    engine, seen = Engine(model(), EXACT["float32"], draft=True), {}

    def held(request):
        first, rings = engine.drafter.take(request.slot)
        return request.slot, first, np.array(rings)

    def wanted(request):
        seen[len(request.prompt)] = held(request)
        return [0] * BLOCK

    script(engine, wanted)
    requests = submit_all(engine, lengths=(3, 13))
    engine.step()
    before = {len(r.prompt): held(r) for r in requests}
    for request in requests[::-1]:
        engine.preempt(request)
    assert not engine.drafter.first
    engine.step()
    for length, (slot, first, rings) in before.items():
        assert seen[length][:2] == (1 - slot, first)
        assert_same("rings", seen[length][2], rings)


def test_a_bounded_prefill_leaves_features_of_its_last_window():
    engine = Engine(model(), EXACT["float32"], draft=True, chunk=9)
    short, long = submit_all(engine, lengths=(3, 13))
    while long.reading:
        engine.step()
    assert engine.drafter.first == {short.slot: 0, long.slot: 13 - W}


def test_costly_tokens_are_not_spent_on_doubtful_drafts():
    """Every draft survives with one half: one is worth 1.3 seconds a step, none 1.6."""
    for seconds, drafts in ((1.3, 1), (1.6, 0)):
        steps = Throughput([1, 2], [1.0, seconds])
        engine = Engine(model(), EXACT["float32"], draft=True, steps_per_second=steps)
        script(engine, lambda request: coming("float32", False, request))
        request = engine.submit(prompt(5), 6, stop=())
        finish(engine)
        assert tuple(request.tokens) == alone("float32", False, 5)[:6]
        assert request.accepted == ([1, 1] if drafts else [])


# ---- sampled texts ----------------------------------------------------------------------------

WARM = Sampling(0.8, 0.95, seed=4)


def test_a_seed_gives_one_text_and_another_seed_another():
    texts = {seed: alone("official", False, 22, Sampling(1.0, seed=seed)) for seed in range(4)}
    assert len(set(texts.values())) == 4
    engine = Engine(model(), EXACT["official"])
    again = engine.submit(prompt(22), TOKENS, Sampling(1.0, seed=2), stop=())
    finish(engine)
    assert tuple(again.tokens) == texts[2] != alone("official", False, 22)


@pytest.mark.parametrize("options", [{"chunk": 4}, {"max_batch": 3}], ids=str)
def test_a_sampled_text_does_not_depend_on_its_company(options):
    engine = Engine(model(), EXACT["official"], **options)
    requests = submit_all(engine, WARM)
    submit_all(engine, Sampling(2.0, seed=1), [W, 22])
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps == 6:
            engine.preempt(engine.running[0])
    assert_alone(requests, "official", False, WARM)


def test_a_sampled_text_with_drafts_does_not_depend_on_its_company():
    """Drafting draws other numbers, so it is another text, but always the same one."""
    texts = []
    for lengths in ((13,), (1, 13, 22), (22, 5, 13)):
        engine = Engine(model(), EXACT["float32"], draft=True, chunk=30)
        requests = submit_all(engine, WARM, lengths)
        finish(engine)
        texts += [tuple(r.tokens) for r in requests if len(r.prompt) == 13]
    assert len(set(texts)) == 1


# a model of four words, each law depending on the word before, and a drafter that errs
WORDS = np.array([[4, 3, 2, 1], [1, 1, 6, 2], [5, 1, 1, 3], [0, 5, 5, 0]]) / 10
GUESSES = np.array([[1, 4, 4, 1], [5, 3, 1, 1], [2, 2, 3, 3], [3, 3, 3, 1]]) / 10
SURVIVES = np.float32([2, -3, 0.5, -1])  # confidence behind each word


class FakeDrafter:
    """Guesses by table; how confident it is depends on the word before, as with the real one."""

    first = range(10**6)  # every slot has features

    def propose(self, slots, anchors, choose):
        return [self._chain(i, word, choose) for i, word in enumerate(anchors)]

    def _chain(self, i, word, choose):
        tokens, logits, confidence = [], [], []
        for _ in range(BLOCK):
            logits.append(_logits(GUESSES[word]))
            confidence.append(SURVIVES[word])
            word = choose(i, logits[-1])
            tokens.append(word)
        return Draft(np.array(tokens), np.array(logits), np.array(confidence))

    def observe(self, slot, positions, features):
        pass

    def forget(self, slot):
        pass


def _logits(law):
    with np.errstate(divide="ignore"):
        return np.log(np.concatenate([law, np.zeros(VOCAB - 4)]))


def fake_step(cache, slots, requests, *, decoder_from, tails, features):
    """What Model.step does to the cache, with logits looked up."""
    one = model()
    batch = make_batch(requests, [cache.length[s] for s in slots], slots)
    cache.begin(batch, decoder_from)
    engram_rows(one.config, one.classes, batch, cache)
    for source in cache.ratio:
        cache.mark_written(source, batch)
        for slot, at, _, _ in batch.segments():
            cache.note_pending(source, slot, np.zeros((at.stop - at.start, 2, 32), np.float32))
    cache.advance(batch)
    if features is not None:
        features.append(np.zeros((len(batch.ids), 1), np.float32))
    rows = [r[len(r) - n :] for r, n in zip(requests, tails, strict=True)]
    return np.array([_logits(WORDS[word]) for word in np.concatenate(rows)])


@pytest.mark.parametrize(
    "steps_per_second",
    [None, Throughput([800, 2000, 3000], [1.0, 1.9, 4.0])],
    ids=["all", "scheduled"],
)
def test_drafted_texts_have_the_models_law(monkeypatch, steps_per_second):
    """800 texts of four words in one batch, against all 256 texts' probabilities."""
    monkeypatch.setattr(model(), "step", fake_step)
    engine = Engine(model(), EXACT["float32"], draft=True, max_batch=800, exact=True, chunk=10**6)
    engine.drafter, engine.steps_per_second = FakeDrafter(), steps_per_second
    requests = [engine.submit([0], 5, Sampling(1.0, seed=s), stop=()) for s in range(800)]
    finish(engine)
    kept = [n for r in requests for n in r.accepted]
    assert min(kept) == 0
    assert max(kept) >= 2
    counts = np.zeros((4, 4, 4, 4))
    for request in requests:
        counts[tuple(request.tokens[1:])] += 1
    law = WORDS[0] @ WORDS  # of the second word
    law = np.einsum("a,ab,bc,cd->abcd", law, WORDS, WORDS, WORDS)
    assert chi_square(counts, law) < 1
    wrong = np.einsum("a,ab,bc,cd->abcd", GUESSES[0] @ GUESSES, GUESSES, GUESSES, GUESSES)
    assert chi_square(counts, wrong) > 1.5, "the test can tell the two laws apart"


def chi_square(counts, law):
    """Rare texts counted as one -> the statistic over what one in a million texts would exceed."""
    expected = law * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(counts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9))) / limit


# ---- work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, 3 * W + 1])
def test_a_prefill_costs_what_the_rule_says(length, chunk):
    """Tokens times layers: all of them in the encoder half, the last window in the decoder half."""
    for exact, decoded in ((False, min(length, W)), (True, length)):
        engine = Engine(model(), EXACT["float32"], exact=exact, chunk=chunk)
        request = engine.submit(prompt(length), 1)
        finish(engine)
        assert engine.cache.work == {"encoder": ENCODER * length, "decoder": DECODER * decoded}
        assert request.computed == length


def test_a_step_of_decode_costs_every_layer_once_per_token():
    engine = Engine(model(), EXACT["float32"])
    submit_all(engine, lengths=(3, 9))
    engine.step()
    before = dict(engine.cache.work)
    engine.step()
    done = {half: engine.cache.work[half] - before[half] for half in before}
    assert done == {"encoder": 2 * ENCODER, "decoder": 2 * DECODER}


def logits_of_run(monkeypatch, length, exact):
    """All logits that an engine sees while it writes the text of one prompt."""
    one, seen = model(), []
    step = Model.step
    with monkeypatch.context() as patch:
        patch.setattr(
            one, "step", lambda *a, **k: seen.append(step(one, *a, **k)) or seen[-1], raising=False
        )
        engine = Engine(one, EXACT["official"], exact=exact)
        engine.submit(prompt(length), 5, stop=())
        finish(engine)
    return np.concatenate(seen)


@pytest.mark.parametrize("length", [1, W - 1, W])
def test_a_prompt_up_to_the_window_is_not_changed_by_the_bound(monkeypatch, length):
    got, want = (logits_of_run(monkeypatch, length, exact) for exact in (False, True))
    assert_same("logits", got, want)


def test_a_longer_prompt_is_changed_by_the_bound(monkeypatch):
    got, want = (logits_of_run(monkeypatch, W + 1, exact) for exact in (False, True))
    assert not np.array_equal(got[0], want[0])


def test_steps_keep_to_the_chunk_and_writers_never_wait_for_readers(monkeypatch):
    one, sizes = model(), []
    step = Model.step

    def counted(cache, slots, requests, **options):
        sizes.append([len(r) for r in requests])
        return step(one, cache, slots, requests, **options)

    monkeypatch.setattr(one, "step", counted, raising=False)
    engine = Engine(one, EXACT["float32"], chunk=6, max_batch=3)
    requests = submit_all(engine)
    while engine.busy:
        writers = [r for r in engine.running if not r.reading]
        written = [len(r.tokens) for r in writers]
        engine.step()
        assert len(engine.running) <= 3
        assert [len(r.tokens) for r in writers] == [n + 1 for n in written]
    assert max(map(sum, sizes)) == 6
    assert len(engine.cache.length) == 3
    assert_alone(requests, "float32", False)


# ---- text -------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of two-byte characters, one byte an id: ids 2i and 2i + 1 make one."""

    def encode(self, text):
        return [byte % VOCAB for byte in text.encode()]

    def stream(self):
        return self

    def push(self, token):
        self.pushed = [*getattr(self, "pushed", []), token]
        return f"<{token}>"

    def flush(self):
        return "|"


@pytest.fixture
def speaking():
    """The small model with a tokenizer that spells every id."""
    one = Model(CONFIG, model().params, model().classes)
    one.tokenizer = Letters()
    return one


@pytest.mark.parametrize("draft", [False, True])
def test_pieces_of_text_spell_the_tokens_without_the_stop_token(speaking, draft):
    ids = speaking.tokenizer.encode("hello")
    engine = Engine(speaking)
    request = engine.submit(ids, TOKENS, stop=())
    finish(engine)
    stop = first_new_token(request.tokens)
    want = request.tokens[: request.tokens.index(stop)]
    for given in ("hello", ids):
        pieces = stream_text(speaking, given, TOKENS, Sampling(), stop=[stop], draft=draft)
        assert "".join(pieces) == "".join(f"<{t}>" for t in want) + "|"
    pieces = speaking.generate("hello", TOKENS, stop=[stop], draft=draft)
    assert "".join(pieces) == "".join(f"<{t}>" for t in want) + "|"


def test_generate_passes_its_settings_on(speaking):
    ids = prompt(22)
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 4, "stop": ()}
    text = "".join(speaking.generate(ids, TOKENS, **options))
    assert text == "".join(f"<{t}>" for t in alone("official", False, 22, WARM)) + "|"


def test_progress_and_summary_of_a_text(speaking):
    reports, summaries = [], []
    list(
        stream_text(
            speaking,
            prompt(13),
            4,
            Sampling(),
            stop=(),
            progress=lambda done, total: reports.append((done, total)),
            finished=summaries.append,
            chunk=5,
        )
    )
    assert reports == [(5, 13), (10, 13), (13, 13)]
    (summary,) = summaries
    assert (summary.prompt_tokens, summary.computed, summary.new_tokens) == (13, 13, 4)
    assert summary.accepted is None
    assert 0 < summary.first_token <= summary.seconds < 60


def test_a_summary_counts_drafts_kept_per_verification():
    engine = script(
        Engine(model(), EXACT["float32"], draft=True),
        lambda request: coming("float32", False, request),
    )
    request = engine.submit(prompt(5), 8, stop=())
    finish(engine)
    assert request.accepted == [3, 2]
    assert summarise(request).accepted == 2.5


def test_a_summary_in_words():
    words = str(Summary(13, 4, 5, first_token=0.5, seconds=2.5, accepted=1.25))
    assert words == (
        "4 of 13 prompt tokens run, first token after 0.50 s, 5 tokens, 2.0 tokens/s, "
        "1.25 drafts kept per step"
    )
    assert "drafts" not in str(Summary(13, 4, 5, 0.5, 2.5, None))


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([],), "ids: .* at least one"),
        (([61],), r"ids: 61 at 0 is outside 0 \.\. 60"),
        (([1, -1],), "ids: -1 at 1"),
        (([1.5],), "ids: expected integers"),
        (("text",), "ids: "),
        (([1], 0), "max_tokens: .* 0"),
        (([1], -3), "max_tokens: .* -3"),
        (([1], 1 << 20), "max_tokens: 1 prompt tokens and 1048576 more exceed 1048576"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_served_are_refused_by_name(given, message):
    engine = Engine(model())
    with pytest.raises(ValueError, match=message):
        engine.submit(*given)
    assert not engine.busy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens: "),
        ({"sampling": 0.7}, "sampling: "),
        ({"stop": ["."]}, "stop: "),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Engine(model()).submit([1], **options)


def test_a_seed_that_no_generator_takes_is_refused_by_name():
    with pytest.raises(ValueError, match="seed: "):
        Engine(model()).submit([1], sampling=Sampling(1.0, seed=-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk.* got 0"),
        ({"max_batch": 0}, "max_batch.* got 512, 0"),
        ({"page_tokens": 3}, "page_tokens: .* 3"),
    ],
    ids=str,
)
def test_engines_that_cannot_run_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model(), **options)


def test_drafting_needs_a_drafter():
    params = {name: p for name, p in model().params.items() if name != "mtp"}
    with pytest.raises(ValueError, match=r"draft: .*without its drafter"):
        Engine(Model(CONFIG, params, model().classes), draft=True)


@pytest.mark.parametrize("method", ["preempt", "cancel"])
def test_a_request_that_the_engine_does_not_hold_is_refused_by_name(method):
    engine = Engine(model())
    request = engine.submit([1], 1)
    finish(engine)
    with pytest.raises(ValueError, match="request: "):
        getattr(engine, method)(request)


def test_a_step_with_nothing_to_do_does_nothing():
    assert Engine(model()).step() == []
