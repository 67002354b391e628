"""A stored prefix: what a hit saves, what it may change, and that nothing wrong is ever served."""

import numpy as np
import pytest
from reference import GOLDEN, MODES, model

import dsv41
from dsv41 import FLOAT32, OFFICIAL
from dsv41.draft import Draft
from dsv41.engine import Engine
from dsv41.fingerprint import fingerprint
from dsv41.model import Model
from dsv41.prefix import STRATEGIES, PrefixCache, block_keys
from dsv41.store import Store
from dsv41.window_pool import WindowPool

EXACT = {name: numerics.but(batch_invariant=True) for name, numerics in MODES.items()}
BLOCK, WINDOW = 8, 8


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 280, count).tolist()


class Memory(dict):
    """A store in a dict, which counts what it is asked."""

    def longest(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self), len(keys))

    def put(self, key, payload):
        self[key] = bytes(payload)

    def put_many(self, items):
        self.update((key, bytes(payload)) for key, payload in items)


def run(prompt, numerics, prefix=None, **options):
    """-> the finished request and its engine."""
    engine = Engine(model(), numerics, prefix=prefix, page_tokens=BLOCK, **options)
    request = engine.submit(prompt, 12, stop=())
    for _ in engine.run():
        pass
    return request, engine


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("strategy", ["zero", "periodic", "full"])
def test_exact_strategies_write_what_a_run_without_a_store_writes(mode, strategy):
    numerics, store = EXACT[mode], Memory()
    prompt = some_ids(101)
    plain, _ = run(prompt, numerics, exact=True)
    for attempt in range(2):
        prefix = PrefixCache(model(), store, strategy, period=16)
        request, _ = run(prompt, numerics, prefix)
        assert request.tokens == plain.tokens
        if attempt:
            expected = {"zero": 101 - 96 + 72, "periodic": 101 - 96, "full": 101 - 96}[strategy]
            assert request.computed == expected
    longer = prompt + some_ids(9, 1)
    request, _ = run(longer, numerics, PrefixCache(model(), store, strategy, period=16))
    plain, _ = run(longer, numerics, exact=True)
    assert request.tokens == plain.tokens


def test_a_bounded_hit_computes_one_window_and_what_follows():
    store = Memory()
    prompt = some_ids(101)
    first, _ = run(prompt, EXACT["bf16q"], PrefixCache(model(), store))
    again, _ = run(prompt, EXACT["bf16q"], PrefixCache(model(), store))
    assert (first.computed, again.computed) == (101, 101 - 96 + WINDOW)
    assert len(again.tokens) == 12


def test_a_hit_inside_one_window_changes_nothing():
    """Everything is replayed, so the text is that of a fresh run."""
    store, prompt = Memory(), some_ids(14)
    first, _ = run(prompt, EXACT["fp32"], PrefixCache(model(), store))
    again, _ = run(prompt, EXACT["fp32"], PrefixCache(model(), store))
    assert first.tokens == again.tokens and again.computed == 14


def test_pooled_windows_save_the_replay_and_change_nothing_in_the_encoder():
    store, pool, prompt = Memory(), WindowPool(60, 1 << 20), some_ids(101)
    first, _ = run(prompt, EXACT["fp32"], PrefixCache(model(), store, pool=pool))
    again, engine = run(prompt, EXACT["fp32"], PrefixCache(model(), store, pool=pool))
    assert again.computed == 101 - 96
    assert first.computed == 101
    assert engine.cache.work["encoder"] == 5 * (101 - 96 + 11)


def test_the_bytes_of_each_strategy():
    """Per token: global KV, and for `full` all window records; `periodic` a ring per checkpoint."""
    config, prompt = model().config, some_ids(97)
    per_token = 106
    window = len(config.plan) * (64 + 2)
    sizes = {}
    for strategy in STRATEGIES:
        store = Memory()
        run(prompt, EXACT["bf16q"], PrefixCache(model(), store, strategy, period=16))
        sizes[strategy] = sum(map(len, store.values()))
    blocks = (97 + 11) // BLOCK
    assert sizes["bounded"] == sizes["zero"] == blocks * BLOCK * per_token
    assert sizes["full"] == sizes["zero"] + blocks * BLOCK * window
    assert sizes["periodic"] == sizes["zero"] + (97 + 11) // 16 * WINDOW * window


def test_keys_depend_on_every_token_before():
    ids = some_ids(40)
    keys = block_keys(ids, BLOCK)
    assert len(keys) == 5 and len(set(keys)) == 5
    for changed in (0, 7, 8, 39):
        other = list(ids)
        other[changed] += 1
        same = [a == b for a, b in zip(keys, block_keys(other, BLOCK), strict=True)]
        assert same == [number < changed // BLOCK for number in range(5)]


def test_only_the_common_prefix_is_used():
    store, shared = Memory(), some_ids(40)
    run(shared + some_ids(30, 1), EXACT["fp32"], PrefixCache(model(), store, "zero"))
    prompt = shared + some_ids(30, 2)
    request, _ = run(prompt, EXACT["fp32"], PrefixCache(model(), store, "zero"))
    plain, _ = run(prompt, EXACT["fp32"], exact=True)
    assert request.tokens == plain.tokens
    assert request.computed == 70 - 40 + 40  # zero: 72 tokens back is the beginning


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_damaged_block_is_recomputed(damage):
    store, prompt = Memory(), some_ids(101)
    plain, _ = run(prompt, EXACT["fp32"], exact=True)
    prefix = PrefixCache(model(), store, "zero")
    _, engine = run(prompt, EXACT["fp32"], prefix)
    key = prefix.keys(engine.cache, prompt)[4]
    payload = store.pop(key)
    if damage != "missing":
        store[key] = payload[:-1] if damage == "short" else payload + b"x"
    request, _ = run(prompt, EXACT["fp32"], PrefixCache(model(), store, "zero"))
    assert request.tokens == plain.tokens
    assert request.computed == 101  # four blocks of eight: all are inside the replay


def test_full_window_kv_needs_blocks_inside_the_window():
    prefix = PrefixCache(model(), Memory(), "full")
    wanted = "page_tokens: full window KV needs blocks up to 8, got 64"
    with pytest.raises(ValueError, match=wanted):
        Engine(model(), FLOAT32, prefix=prefix, page_tokens=64)


def test_impossible_combinations_are_refused_at_once():
    with pytest.raises(ValueError, match="strategy: expected one of"):
        PrefixCache(model(), Memory(), "some")
    with pytest.raises(ValueError, match="pool: pooled windows are for the bounded strategy"):
        PrefixCache(model(), Memory(), "zero", pool=WindowPool(60, 1 << 20))
    prefix = PrefixCache(model(), Memory(), "periodic", period=12)
    with pytest.raises(ValueError, match="period: expected a multiple of 8 tokens, got 12"):
        Engine(model(), FLOAT32, prefix=prefix, page_tokens=BLOCK)
    with pytest.raises(ValueError, match="exact: a bounded prefix is an approximation"):
        Engine(model(), FLOAT32, exact=True, prefix=PrefixCache(model(), Memory()))


def finished(some, prompt, count, **options):
    """-> the request after a run of an engine of its own."""
    engine = Engine(some, EXACT["fp32"], **options)
    stop = options.pop("stop", ())
    request = engine.submit(prompt, count, stop=stop)
    for _ in engine.run():
        pass
    return request


class Foresight:
    """A drafter's `propose` that knows the text, so that a whole block is verified at once."""

    def __init__(self, text):
        self.text = text

    def __call__(self, slots, anchors, choose):
        (anchor,) = anchors
        at = self.text.index(anchor) + 1 if anchor in self.text else 0
        tokens = np.array((self.text[at:] + self.text)[:3])
        logits = np.full((3, 288), -9, np.float32)
        logits[np.arange(3), tokens] = 9
        for row in logits:
            choose(0, row)
        return [Draft(tokens, logits, np.full(3, 9, np.float32))]


@pytest.mark.parametrize("strategy", ["periodic", "full", "bounded"])
@pytest.mark.parametrize("block", [2, 4, 8])
def test_a_stop_inside_a_draft_stores_nothing_behind_it(strategy, block):
    """The model had run further than the text went, and its windows had moved on."""
    drafted, store = dsv41.load(GOLDEN), Memory()
    pool = WindowPool(60, 1 << 20) if strategy == "bounded" else None
    exact = strategy != "bounded"
    for count in range(2, 12):
        prompt = some_ids(count, seed=count)
        text = finished(drafted, prompt, 6, exact=exact).tokens
        if len(set(text)) < 6:
            continue
        for attempt in range(2):
            prefix = PrefixCache(drafted, store, strategy, pool, period=block)
            engine = Engine(drafted, EXACT["fp32"], prefix=prefix, page_tokens=block, draft=True)
            engine.drafter.propose = Foresight(text)
            request = engine.submit(prompt, 6, stop=text[1:2])
            for _ in engine.run():
                pass
            if exact or attempt == 0:  # a bounded hit may write another text
                assert request.tokens == text[:2]
        longer = prompt + text[:2] + some_ids(3)
        prefix = PrefixCache(drafted, store, strategy, pool, period=block)
        again = finished(drafted, longer, 4, prefix=prefix, page_tokens=block)
        if exact:
            assert again.tokens == finished(drafted, longer, 4, exact=True).tokens


def test_two_models_may_share_a_store_and_a_pool():
    store, pool, prompt = Memory(), WindowPool(60, 1 << 20), some_ids(60)
    for some in (model(), changed_weight()):
        first = finished(some, prompt, 6, prefix=PrefixCache(some, store, "bounded", pool))
        assert first.computed == 60
        exact = finished(some, prompt, 6, prefix=PrefixCache(some, store, "zero"))
        assert exact.computed == 60
        assert exact.tokens == finished(some, prompt, 6, exact=True).tokens


def test_through_the_store_on_disk(tmp_path):
    mark = fingerprint(model(), EXACT["bf16q"], True)
    prompt = some_ids(101)
    plain, _ = run(prompt, EXACT["bf16q"], exact=True)
    for computed in (101, 101 - 96 + 72):
        with Store(tmp_path, mark) as store:
            request, _ = run(prompt, EXACT["bf16q"], PrefixCache(model(), store, "zero"))
        assert (request.tokens, request.computed) == (plain.tokens, computed)


def changed_weight():
    params = dict(model().params)
    weight = params["norm"]["weight"].copy()
    weight[7] += 1
    return Model(model().config, {**params, "norm": {"weight": weight}}, model().classes)


def changed_classes():
    return Model(model().config, model().params, np.roll(model().classes, 1))


def changed_config():
    config = model().config.but(routed_scaling_factor=1.25)
    return Model(config, model().params, model().classes)


@pytest.mark.parametrize("other", [changed_weight, changed_classes, changed_config])
def test_another_model_gets_another_fingerprint(other, tmp_path):
    ours, theirs = (fingerprint(m, OFFICIAL, True) for m in (model(), other()))
    assert ours != theirs
    with Store(tmp_path, ours) as store:
        run(some_ids(101), EXACT["bf16q"], PrefixCache(model(), store, "zero"))
    with Store(tmp_path, theirs) as store:
        assert store.longest(block_keys(some_ids(101), BLOCK)) == 0


def test_other_numerics_and_the_other_rule_get_other_fingerprints():
    marks = {
        fingerprint(model(), numerics, exact)
        for numerics in (FLOAT32, OFFICIAL, EXACT["bf16q"])
        for exact in (False, True)
    }
    assert len(marks) == 6
    assert fingerprint(model(), OFFICIAL, True) in marks
