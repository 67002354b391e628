"""DSpark's drafter: the reference's own drafts, a slow second drafter, and who may see what."""

from types import SimpleNamespace

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same
from reference import GOLDEN, MODES, PROMPT, arrays

import dsv41
from dsv41 import FLOAT32, OFFICIAL, draft
from dsv41.draft import Draft, Drafter
from dsv41.init import random_params
from dsv41.mhc import initial_streams
from dsv41.model import Model
from dsv41.ops import rows

STAGES, BLOCK = 3, 4  # of the reference model

# other sizes than the reference's: a block of three, two stages, two targets, one behind Engram
CONFIG = oracles.small_config(
    num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    engram_layer_ids=(0, 4),
    sliding_window=5,
    num_nextn_predict_layers=2,
    dspark_block_size=3,
    dspark_noise_token_id=59,
    dspark_target_layer_ids=(3, 4),
    dspark_markov_rank=8,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=3,
)
W = CONFIG.sliding_window
EXACT = {
    "float32": FLOAT32.but(batch_invariant=True),
    "official": OFFICIAL.but(batch_invariant=True),
}


@pytest.fixture(scope="module")
def small():
    params = random_params(CONFIG, np.random.default_rng(1))
    return Model(CONFIG, params, oracles.small_classes(CONFIG))


def best(_, logits):
    return int(np.argmax(logits))


# ---- the reference's drafts -------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference_model():
    return dsv41.load(GOLDEN, parts=("text", "dspark"))


@pytest.fixture(scope="module", params=list(MODES))
def run(request, reference_model):
    """The reference's prompt and twelve steps: our arrays under the names of dspark.npz."""
    mode, found = request.param, {}
    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        cache = reference_model.new_cache(MODES[mode])
        slot, drafter = reference_model.open(cache), Drafter(reference_model, cache)
        ids = arrays(f"prompt_{mode}")["ids"][0]

        def feed(begin, end):
            features = []
            logits = reference_model.step(cache, [slot], [ids[begin:end]], features=features)
            features = np.concatenate(features, axis=1)
            seen.contexts.clear()
            drafter.observe(slot, np.arange(begin, end), features)
            return features, seen.contexts[0][0], int(np.argmax(logits[-1]))

        found["features"], found["main_x"], _ = feed(0, PROMPT)
        for stage, (_, records) in enumerate(seen.contexts):
            found[f"M{stage}.ctx_kv"] = cache.numerics.window_kv.decode(records, 64)
        steps = []
        for at in range(PROMPT, len(ids)):
            features, context, anchor = feed(at, at + 1)
            if at == PROMPT:
                found |= traced_block(drafter, slot, anchor, seen)
            proposal = drafter.propose([slot], [anchor], best)[0]
            steps.append(
                {
                    "features": features[0],
                    "main_x": context[0],
                    "anchor": np.int32(anchor),
                    "drafts": np.array([anchor, *proposal.tokens], np.int32),
                    "logits": proposal.logits,
                    "confidence": proposal.confidence,
                }
            )
        for name in steps[0]:
            found[f"step.{name}"] = np.array([step[name] for step in steps])
    return mode, found


def watch(patch):
    """Record what passes through draft.py: window KV, routes and streams, in order."""
    seen = SimpleNamespace(contexts=[], routes=[], streams=[])
    window_kv, route, sublayers = draft.window_kv, draft.route, draft.sublayers

    def watched_window_kv(x, *rest):
        records = window_kv(x, *rest)
        seen.contexts.append((x, records))
        return records

    def watched_route(*given):
        chosen = route(*given)
        seen.routes.append(chosen)
        return chosen

    def watched_sublayers(*given):
        after = sublayers(*given)
        seen.streams.append(after[0])
        return after

    patch.setattr(draft, "window_kv", watched_window_kv)
    patch.setattr(draft, "route", watched_route)
    patch.setattr(draft, "sublayers", watched_sublayers)
    return seen


def traced_block(drafter, slot, anchor, seen):
    """One pass over the block, every stage's intermediates by name."""
    for record in (seen.contexts, seen.routes, seen.streams):
        record.clear()
    trace, found = {}, {}
    drafter.hidden([slot], [anchor], trace)
    for name, value in trace.items():
        found[f"step0.{name}"] = value
    for stage in range(STAGES):
        at = f"step0.M{stage}"
        kv = drafter.cache.numerics.window_kv.decode(seen.contexts[stage][1], 64)
        found[f"{at}.attn.block_kv"] = kv
        found[f"{at}.moe.expert"] = seen.routes[stage][0].astype(np.int32)
        found[f"{at}.moe.weight"] = seen.routes[stage][1]
        found[f"{at}.x_out"] = seen.streams[stage]
    return found


def test_every_stored_array_of_the_drafter(run):
    mode, found = run
    stored = {n.removeprefix(f"{mode}."): a for n, a in arrays("dspark").items() if mode in n}
    assert len(stored) == 11 + STAGES * 12
    assert sorted(found) == sorted(stored)
    limit = {"fp32": 5e-5, "bf16q": 1e-6}[mode]
    for name, theirs in stored.items():
        ours = found[name]
        assert ours.shape == theirs.shape, name
        if theirs.dtype.kind != "f":
            assert np.array_equal(ours, theirs), name
        else:
            distance = np.abs(ours - theirs).max()
            assert distance <= limit, f"{name}: {distance} apart"


def test_the_rings_hold_the_last_window_of_the_reference(reference_model):
    """Position p lies in row p mod W of every stage, as the released ring buffers have it."""
    numerics = MODES["bf16q"]
    cache = reference_model.new_cache(numerics)
    slot, drafter = reference_model.open(cache), Drafter(reference_model, cache)
    drafter.observe(slot, np.arange(PROMPT), arrays("dspark")["bf16q.features"])
    for stage in range(STAGES):
        want = arrays("dspark")[f"bf16q.M{stage}.ctx_kv"]
        got = numerics.window_kv.decode(drafter.rings[stage][slot], 64)
        for position in range(PROMPT - 8, PROMPT):
            assert_close(f"{stage}, {position}", got[position % 8], want[position], rel=1e-6)


# ---- a second, slow drafter -------------------------------------------------------------------


def slow_block(params, features, first, length, anchor):
    """features {position: vector}; one block behind `length` tokens, in float64 and loops.

    -> hidden (B, D), base logits (B, V), and the smallest distance of a choice of experts.
    """
    p, c = oracles.as_float64(params), CONFIG
    stages = [p["mtp"][n] for n in range(c.num_nextn_predict_layers)]
    eps, freqs, margins = c.rms_norm_eps, oracles.frequencies(c, 0), []
    few = c.but(num_experts_per_tok=c.dspark_num_experts_per_tok)
    seen = range(max(first, length - W), length)
    project = stages[0]["main_proj"]["weight"]
    context = [
        oracles.norm(project @ features[t], stages[0]["main_norm"]["weight"], eps) for t in seen
    ]
    ids = [anchor, *[c.dspark_noise_token_id] * (c.dspark_block_size - 1)]
    streams = [np.array([p["embed"]["weight"][i]] * c.hc_mult) for i in ids]
    pre = [np.eye(c.hc_mult)[0] for _ in ids]
    for stage in stages:
        keys = [slow_key(x, stage["attn"], t, freqs) for x, t in zip(context, seen, strict=True)]
        for name in ("attn", "ffn"):
            mix = [oracles.mixing(x, stage, name, c) for x in streams]
            xs = [oracles._collapsed(x, a) for x, a in zip(streams, pre, strict=True)]
            xs = [oracles.norm(x, stage[f"{name}_norm"]["weight"], eps) for x in xs]
            if name == "attn":
                ys = slow_attention(xs, stage["attn"], keys, length, freqs)
            else:
                ys = [oracles.experts(x, stage["ffn"], False, few, margins)[0] for x in xs]
            streams = [
                oracles.updated(x, y, post, comb)
                for x, y, (_, post, comb) in zip(streams, ys, mix, strict=True)
            ]
            pre = [a for a, _, _ in mix]
    hidden = [oracles._collapsed(x, a) for x, a in zip(streams, pre, strict=True)]
    normed = [oracles.norm(h, stages[-1]["norm"]["weight"], eps) for h in hidden]
    return np.array(hidden), np.array([p["head"]["weight"] @ x for x in normed]), min(margins)


def slow_key(x, p, position, freqs):
    latent = oracles.norm(p["wkv"]["weight"] @ x, p["kv_norm"]["weight"], CONFIG.rms_norm_eps)
    return oracles.rotated(latent, position, freqs)


def slow_attention(xs, p, past, length, freqs):
    """Every row of the block reads the same keys: the past ones and the whole block."""
    c = CONFIG
    keys = past + [slow_key(x, p, length + k, freqs) for k, x in enumerate(xs)]
    out = []
    for k, x in enumerate(xs):
        latent = oracles.norm(p["wq_a"]["weight"] @ x, p["q_norm"]["weight"], c.rms_norm_eps)
        q = (p["wq_b"]["weight"] @ latent).reshape(c.num_attention_heads, c.head_dim)
        q = np.array([oracles.rotated(head, length + k, freqs) for head in q])
        o = oracles.attend(q, keys, p["attn_sink"])
        o = np.array([oracles.rotated(head, length + k, freqs, sign=-1) for head in o])
        out.append(oracles._grouped_output(o, p, c))
    return out


def slow_chain(params, hidden, base, anchor, tokens):
    """Draft logits and confidence of a block whose drafts turn out to be `tokens`."""
    p = oracles.as_float64(params)["mtp"][CONFIG.num_nextn_predict_layers - 1]
    embed, out = p["markov_head"]["embed"]["weight"], p["markov_head"]["head"]["weight"]
    weight = p["confidence_head"]["proj"]["weight"][0]
    logits, confidence = [], []
    for h, u, before in zip(hidden, base, [anchor, *tokens[:-1]], strict=True):
        logits.append(u + out @ embed[before])
        confidence.append(float(weight @ np.concatenate([h, embed[before]])))
    return np.array(logits), np.array(confidence)


def observed(model, numerics, length, first=0, seed=0):
    """A drafter of one request with random features of positions first .. length - 1."""
    cache = model.new_cache(numerics)
    slot, drafter = model.open(cache), Drafter(model, cache)
    features = some_features(length, seed)
    cache.length[slot] = length
    drafter.observe(slot, np.arange(first, length), features[first:])
    return drafter, slot, features


def some_features(length, seed):
    width = len(CONFIG.dspark_target_layer_ids) * CONFIG.hidden_size
    return np.random.default_rng(seed).standard_normal((length, width), np.float32)


@pytest.mark.parametrize(
    ("length", "first"),
    [(1, 0), (W - 1, 0), (W, 0), (W + 1, 0), (2 * W + 3, 0), (2 * W + 3, 2 * W + 1), (W, W - 1)],
)
def test_a_block_against_loops(small, length, first):
    """Positions, key set and Markov chain at every place of the window's edge.

    `first` is where a bounded prefill began to leave features.
    """
    anchor, tokens = 17, [9, 30, 9]
    drafter, slot, features = observed(small, FLOAT32, length, first, seed=length)
    hidden, base, margin = slow_block(small.params, features, first, length, anchor)
    assert margin > 1e-4, "two experts tie: take another seed"
    assert_close("hidden", drafter.hidden([slot], [anchor])[0], hidden)
    feed = iter(tokens)
    got = drafter.propose([slot], [anchor], lambda i, z: next(feed))[0]
    logits, confidence = slow_chain(small.params, hidden, base, anchor, tokens)
    assert got.tokens.tolist() == tokens
    assert_close("logits", got.logits, logits)
    assert_close("confidence", got.confidence, confidence)


def test_every_row_of_a_block_sees_the_whole_window_before_it(small):
    """Another key in the last stage reaches all rows, the oldest key like the newest."""
    length = 2 * W + 1
    drafter, slot, _ = observed(small, EXACT["float32"], length)
    before = drafter.hidden([slot], [3])[0]
    for position in range(length - W, length):
        key = drafter.rings[-1][slot][position % W]
        key += 1
        moved = np.abs(drafter.hidden([slot], [3])[0] - before).max(axis=1)
        key -= 1
        assert (moved > 1e-4).all(), f"{position - length}: rows moved by {moved}"


def test_rows_of_the_ring_that_hold_no_position_are_never_read(small):
    """The request has three tokens; features of a prefill began at its second."""
    drafter, slot, _ = observed(small, FLOAT32, 3, first=1)
    want = drafter.hidden([slot], [3])
    for ring in drafter.rings:
        ring[slot][[0, 3, 4]] = np.nan
    assert_same("hidden", drafter.hidden([slot], [3]), want)


def test_a_draft_depends_on_the_token_before_it_and_on_none_behind(small):
    drafter, slot, _ = observed(small, EXACT["float32"], 7)

    def logits_of(tokens):
        feed = iter(tokens)
        return drafter.propose([slot], [11], lambda i, z: next(feed))[0].logits

    one, two = logits_of([4, 5, 6]), logits_of([4, 8, 6])
    assert_same("the first two", one[:2], two[:2])
    assert np.abs(one[2] - two[2]).max() > 1e-3
    other = drafter.propose([slot], [12], best)[0].logits
    assert np.abs(one[0] - other[0]).max() > 1e-3, "the anchor is the first token before"


# ---- features ---------------------------------------------------------------------------------


def some_ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 59, length)


@pytest.mark.parametrize("numerics", EXACT)
def test_features_are_the_streams_mean_behind_engram_and_before_the_block(small, numerics):
    cache, features, trace = small.new_cache(EXACT[numerics]), [], {}
    slot = small.open(cache)
    small.step(cache, [slot], [some_ids(9)], features=features, trace=trace)
    store = EXACT[numerics].store
    assert len(features) == 2
    assert_same("layer 3", features[0], store(trace["L02.x_out"].mean(axis=1)))
    assert_same("layer 4", features[1], store(trace["L04.engram.x"].mean(axis=1)))


def test_features_belong_to_the_rows_that_are_decoded(small):
    cache, features = small.new_cache(EXACT["float32"]), []
    slots, prompts = [small.open(cache) for _ in range(2)], [some_ids(9, 1), some_ids(4, 2)]
    small.step(cache, slots, prompts, features=features, decoder_from=[6, 0], tails=[0, 1])
    assert [f.shape for f in features] == [(3 + 4, CONFIG.hidden_size)] * 2
    cache, alone = small.new_cache(EXACT["float32"]), []
    small.step(cache, [small.open(cache)], prompts[1:], features=alone)
    for target in range(2):
        assert_same("second request", features[target][3:], alone[target])


def test_looking_at_features_changes_no_logit(small):
    ids = some_ids(12)
    for numerics in EXACT.values():
        cache = small.new_cache(numerics)
        got = small.step(cache, [small.open(cache)], [ids], features=[])
        assert_same("logits", got, small.logits(ids, numerics))


# ---- rings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", EXACT)
@pytest.mark.parametrize("cuts", [[1] * 14, [W, 1, W - 1, 4], [2, 12], [W + 1, W + 1, 2]], ids=str)
def test_features_in_pieces_leave_the_same_rings(small, numerics, cuts):
    whole, slot, features = observed(small, EXACT[numerics], 14)
    pieces, at = Drafter(small, whole.cache), 0
    for size in cuts:
        pieces.observe(slot, np.arange(at, at + size), features[at : at + size])
        at += size
    assert pieces.first == whole.first == {slot: 0}
    for stage in range(2):
        assert_same(f"stage {stage}", pieces.rings[stage][slot], whole.rings[stage][slot])


@pytest.mark.parametrize("numerics", EXACT)
def test_several_requests_in_one_pass_are_each_as_if_alone(small, numerics):
    """Lengths on both sides of the window, slots out of order, one request between two passes."""
    cache = small.new_cache(EXACT[numerics])
    drafter, want = Drafter(small, cache), {}
    for length in (1, 3, W - 1, W, W + 1, 13):
        slot = small.open(cache)
        cache.length[slot] = length
        drafter.observe(slot, np.arange(length), some_features(length, seed=length))
        want[slot] = drafter.propose([slot], [20 + slot], best)[0]
    for slots in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [4, 2]):
        got = drafter.propose(slots, [20 + slot for slot in slots], best)
        for slot, one in zip(slots, got, strict=True):
            for name in ("tokens", "logits", "confidence"):
                assert_same(
                    f"{slots}, {slot}, {name}", getattr(one, name), getattr(want[slot], name)
                )


def test_choose_is_asked_once_per_draft_from_left_to_right(small):
    cache = small.new_cache(FLOAT32)
    drafter, asked = Drafter(small, cache), []
    slots = [small.open(cache) for _ in range(2)]
    for slot in slots:
        cache.length[slot] = 4
        drafter.observe(slot, np.arange(4), some_features(4, seed=slot))

    def choose(i, logits):
        asked.append((i, logits.copy()))
        return 10 * i + len(asked)

    first, second = drafter.propose(slots, [1, 2], choose)
    assert [i for i, _ in asked] == [0, 0, 0, 1, 1, 1]
    assert first.tokens.tolist() == [1, 2, 3]
    assert second.tokens.tolist() == [14, 15, 16]
    assert_same(
        "logits", np.array([z for _, z in asked]), np.concatenate([first.logits, second.logits])
    )


@pytest.mark.parametrize("numerics", EXACT)
def test_drafting_leaves_no_trace_in_the_cache_or_the_rings(small, numerics):
    cache, features = small.new_cache(EXACT[numerics]), []
    slot, drafter = small.open(cache), Drafter(small, cache)
    small.step(cache, [slot], [some_ids(7)], features=features)
    drafter.observe(slot, np.arange(7), np.concatenate(features, axis=1))
    kept = [*cache.window, *cache.carry.values(), *cache.main_kv.values(), cache.history]
    kept += [*cache.index.values(), *(ring[slot] for ring in drafter.rings)]
    before, work = [a.copy() for a in kept], dict(cache.work)
    drafter.propose([slot], [5], best)
    for a, b in zip(kept, before, strict=True):
        assert_same("array", a, b)
    assert (cache.length[slot], cache.work) == (7, work)


def test_a_request_takes_its_rings_to_another_slot(small):
    """Meanwhile its old slot belongs to somebody else, who writes into rings of his own."""
    drafter, slot, _ = observed(small, EXACT["official"], 9, first=6)
    want = drafter.propose([slot], [8], best)[0]
    saved = drafter.take(slot)
    drafter.forget(slot)
    drafter.observe(slot, np.arange(7), some_features(7, seed=8))
    other = small.open(drafter.cache)
    drafter.cache.length[other] = 9
    assert drafter.take(other) is None
    drafter.give(other, saved)
    got = drafter.propose([other], [8], best)[0]
    assert_same("logits", got.logits, want.logits)
    assert_same("confidence", got.confidence, want.confidence)


def test_a_forgotten_request_leaves_nothing_to_the_next_in_its_slot(small):
    drafter, slot, _ = observed(small, EXACT["float32"], 9)
    for ring in drafter.rings:
        ring[slot][:] = np.nan
    drafter.forget(slot)
    drafter.cache.length[slot] = 2
    features = some_features(2, seed=5)
    drafter.observe(slot, np.arange(2), features)
    alone, other, _ = observed(small, EXACT["float32"], 2, seed=5)
    assert drafter.first == {slot: 0}
    assert_same("hidden", drafter.hidden([slot], [1]), alone.hidden([other], [1]))


# ---- small things -----------------------------------------------------------------------------


def test_survival_multiplies_what_each_draft_is_given():
    """Chances 1/2, 3/4 and 1/4 behind one another."""
    confidence = np.log(np.float32([1, 3, 1 / 3]))
    one = Draft(np.arange(3), np.zeros((3, 5)), confidence)
    assert_close("survival", one.survival, np.array([1 / 2, 3 / 8, 3 / 32]))
    sure = Draft(np.arange(2), np.zeros((2, 5)), np.float32([200, -200]))
    assert sure.survival.tolist() == [1, 0]


def test_a_block_begins_with_the_anchor_and_four_equal_streams(small, monkeypatch):
    begun = []
    monkeypatch.setattr(
        draft, "initial_streams", lambda e, count: begun.append(e) or initial_streams(e, count)
    )
    drafter, slot, _ = observed(small, EXACT["float32"], 4)
    drafter.hidden([slot], [33])
    noise = CONFIG.dspark_noise_token_id
    assert_same("embedding", begun[0], rows(small.params["embed"]["weight"], [33, noise, noise]))


def test_a_model_that_was_loaded_without_its_drafter_is_refused():
    model = dsv41.load(GOLDEN, parts=("text",))
    with pytest.raises(ValueError, match=r"draft: .*without its drafter"):
        Drafter(model, model.new_cache())


def test_a_drafter_without_markov_and_confidence_heads():
    """Rank 0 leaves the base logits as they are; without a judge every draft counts as sure."""
    model = dsv41.load(GOLDEN)
    config = model.config.but(dspark_markov_rank=0)
    last = model.config.num_nextn_predict_layers - 1
    nothing = np.zeros((config.vocab_size, 0), np.float32)
    heads = {"embed": {"weight": nothing}, "head": {"weight": nothing}}
    stage = {k: v for k, v in model.params["mtp"][last].items() if k != "confidence_head"}
    mtp = {**model.params["mtp"], last: {**stage, "markov_head": heads}}
    bare = Model(config, {**model.params, "mtp": mtp}, model.classes)
    cache = bare.new_cache(FLOAT32)
    slot, features = bare.open(cache), []
    bare.step(cache, [slot], [[5, 6, 7]], features=features)
    drafter = Drafter(bare, cache)
    drafter.observe(slot, np.arange(3), np.concatenate(features, axis=1))
    (draft,) = drafter.propose([slot], [9], lambda _, z: int(z.argmax()))
    base = drafter.base_logits(drafter.hidden([slot], [9])[0])
    assert np.array_equal(draft.logits, base)
    assert draft.survival.tolist() == [1.0] * config.dspark_block_size
