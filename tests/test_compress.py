"""Groups are pooled channel by channel, whole groups only, wherever a prompt is cut."""

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.compress import compress, main_kv, pool_groups
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rope import frequencies

CONFIG = oracles.small_config()
SOURCE, RATIO_1_SOURCE = 3, 1
EXACT = FLOAT32.but(batch_invariant=True)

# seven tokens of two channels; six close three pairs, the seventh waits
U = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
G = [[0, 0], [1, -1], [2, 0], [0, 2], [-1, 3], [-1, 3], [9, 9]]
ENTRIES = [[2.462117157, 2.537882843], [5.238405844, 7.761594156], [10, 11]]


def hand_parameters():
    """Projections that read u from input channels 0, 1 and g from 2, 3, repeated 16 times."""
    width = CONFIG.head_dim
    wkv, wgate = np.zeros((2, width, CONFIG.hidden_size), np.float32)
    for c in range(width):
        wkv[c, c % 2] = wgate[c, 2 + c % 2] = 1
    norm = np.ones(width, np.float32)
    return {"wkv": {"weight": wkv}, "wgate": {"weight": wgate}, "norm": {"weight": norm}}


def random_parameters(seed=0):
    draw = np.random.default_rng(seed).standard_normal
    shape = (CONFIG.head_dim, CONFIG.hidden_size)
    return {
        "wkv": {"weight": draw(shape, np.float32)},
        "wgate": {"weight": draw(shape, np.float32)},
        "norm": {"weight": 1 + draw(CONFIG.head_dim, np.float32) / 10},
    }


def hand_input():
    x = np.zeros((len(U), CONFIG.hidden_size), np.float32)
    x[:, :2], x[:, 2:4] = U, G
    return x


def feed(cache, calls, p, source=SOURCE, ratio=2):
    """calls: per call a dict slot -> inputs (t, D). -> slot -> latents, and entries per call."""
    found, published = {}, []
    for call in calls:
        slots = list(call)
        starts = [cache.length[slot] for slot in slots]
        batch = make_batch([np.zeros(len(x), int) for x in call.values()], starts, slots)
        x = np.concatenate(list(call.values()))
        latent, entries, owners = compress(x, p, source, ratio, cache, batch, CONFIG, EXACT)
        published.append(list(zip(owners.tolist(), entries.tolist(), strict=True)))
        for (slot, entry), row in zip(published[-1], latent, strict=True):
            assert entry == len(found.setdefault(slot, [])), "entries come in order, once each"
            found[slot].append(row)
        for slot in slots:
            cache.length[slot] += len(call[slot])
    return found, published


def pieces(x, cuts):
    return np.split(x, np.cumsum(cuts)[:-1])


def test_each_channel_has_its_own_softmax():
    groups = np.array(U[:6], np.float32).reshape(3, 2, 2)
    gates = np.array(G[:6], np.float32).reshape(3, 2, 2)
    got = pool_groups(groups, gates)
    assert got.dtype == np.float32
    # one weight per token for all channels would give [2, 3] and [6, 7] first
    assert_close("pooled", got, np.array(ENTRIES), rel=1e-7, floor=0)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 128])
def test_pooling_agrees_with_the_loop_for_any_group_size(m):
    rng = np.random.default_rng(m)
    u, g = rng.standard_normal((2, 5, m, 6)).astype(np.float32) * np.float32(3)
    want = [oracles.pooled(a, b) for a, b in zip(u.tolist(), g.tolist(), strict=True)]
    assert_close("pooled", pool_groups(u, g), np.array(want), rel=1e-6)


def test_large_gates_neither_overflow_nor_forget_the_other_token():
    u = np.array([[[1, 1, 1], [3, 3, 3]]], np.float32)
    g = np.array([[[1e4, -1e4, 200.0], [0, 0, 201.0]]], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        got = pool_groups(u, g)
    later = 1 / (1 + np.exp(-1.0))
    assert_close("pooled", got, np.array([[1, 3, 1 + 2 * later]]), rel=1e-7, floor=0)


def test_a_group_without_any_tokens_to_pool_gives_an_empty_array():
    empty = np.zeros((0, 2, 8), np.float32)
    assert pool_groups(empty, empty).shape == (0, 8)


@pytest.mark.parametrize(
    "cuts, published",
    [
        ([7], [[0, 1, 2]]),
        ([1, 4, 2], [[], [0, 1], [2]]),
        ([1] * 7, [[], [0], [], [1], [], [2], []]),
        ([2, 2, 2, 1], [[0], [1], [2], []]),
    ],
)
def test_a_pair_cut_by_a_chunk_edge_is_the_same_pair(cuts, published):
    cache = Cache(CONFIG, EXACT)
    slot = cache.add()
    calls = [{slot: x} for x in pieces(hand_input(), cuts)]
    found, when = feed(cache, calls, hand_parameters())
    assert when == [[(slot, entry) for entry in entries] for entries in published]
    # pairs begun anew in every chunk would pool tokens 1 and 2 to [4.46, 5.46]
    want = np.tile(np.array(ENTRIES), (1, CONFIG.head_dim // 2))
    want /= np.sqrt(np.mean(want**2, axis=1, keepdims=True))
    assert_close("latents", np.array(found[slot]), want, rel=1e-6)
    pending = np.array([[U[6], G[6]]], np.float32)
    assert_same("carry", cache.carry[SOURCE][slot], np.tile(pending, CONFIG.head_dim // 2))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_no_entry_exists_before_its_last_token(length):
    cache = Cache(CONFIG, EXACT)
    slot = cache.add()
    found, _ = feed(cache, [{slot: hand_input()[:length]}], hand_parameters())
    assert len(found.get(slot, [])) == length // 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_any_split_in_any_company_gives_the_same_latents_and_carry(calls, random):
    """Two requests advance by their own steps, in either order within a call."""
    p, x = (
        random_parameters(),
        np.random.default_rng(7).standard_normal((2, 40, CONFIG.hidden_size)),
    )
    x = x.astype(np.float32)
    cache = Cache(CONFIG, EXACT)
    slots = [cache.add(), cache.add()]
    at, fed = [0, 0], []
    for sizes in calls:
        call = {}
        for who in random.sample([0, 1], 2):
            if sizes[who]:
                call[slots[who]] = x[who, at[who] : at[who] + sizes[who]]
                at[who] += sizes[who]
        fed += [call] if call else []
    found, _ = feed(cache, fed, p)
    for who, slot in enumerate(slots):
        if not at[who]:
            continue
        alone = Cache(CONFIG, EXACT)
        slot_alone = alone.add()
        want, _ = feed(alone, [{slot_alone: x[who, : at[who]]}], p)
        assert len(found.get(slot, [])) == len(want.get(slot_alone, [])) == at[who] // 2
        for j, (a, b) in enumerate(zip(found.get(slot, []), want.get(slot_alone, []), strict=True)):
            assert_same(f"latent {j} of request {who}", a, b)
        if at[who] % 2:
            assert_same("carry", cache.carry[SOURCE][slot], alone.carry[SOURCE][slot_alone])


def test_latents_agree_with_the_loop():
    p, x = random_parameters(1), np.random.default_rng(2).standard_normal((9, CONFIG.hidden_size))
    x = x.astype(np.float32)
    for source, ratio in ((SOURCE, 2), (RATIO_1_SOURCE, 1)):
        cache = Cache(CONFIG, EXACT)
        slot = cache.add()
        found, _ = feed(cache, [{slot: x}], p, source, ratio)
        p64 = oracles.as_float64(p)
        want = oracles.latents(list(x.astype(np.float64)), p64, ratio, CONFIG.rms_norm_eps)
        assert_close(f"latents at ratio {ratio}", np.array(found[slot]), np.array(want), rel=2e-6)


def test_a_source_of_single_tokens_needs_no_gate_and_keeps_nothing():
    p = random_parameters()
    del p["wgate"]
    cache = Cache(CONFIG, EXACT)
    slot = cache.add()
    x = np.ones((3, CONFIG.hidden_size), np.float32)
    found, when = feed(cache, [{slot: x[:1]}, {slot: x[1:]}], p, RATIO_1_SOURCE, 1)
    assert when == [[(slot, 0)], [(slot, 1), (slot, 2)]]
    assert_same("equal inputs", found[slot][0], found[slot][2])
    assert RATIO_1_SOURCE not in cache.carry and SOURCE in cache.carry


def test_an_entry_is_rotated_by_the_position_of_its_first_token():
    latent = np.random.default_rng(0).standard_normal((4, CONFIG.head_dim)).astype(np.float32)
    freqs = frequencies(CONFIG, 2)
    entries = np.array([0, 1, 5, 700])
    got = main_kv(latent, entries * 2, freqs, FLOAT32)
    slow = oracles.frequencies(CONFIG, 2)
    want = [oracles.rotated(v, 2 * j, slow) for v, j in zip(latent, entries.tolist(), strict=True)]
    # an angle of 1400 rad is itself rounded to 6e-5 in float32
    assert_close("main KV", got, np.array(want), rel=1e-5)
    kept = CONFIG.head_dim - CONFIG.qk_rope_head_dim
    assert_same("channels that do not rotate", got[:, :kept], latent[:, :kept])


def test_the_pooled_vector_is_rounded_before_its_norm():
    """1 + 2^-8 is halfway between two bf16 numbers and becomes 1; divided as it is by the norm,
    1.487, it would give 173 / 256.
    """
    x = np.full((1, CONFIG.hidden_size), 1.5, np.float32)
    x[0, 0] = 1 + 2**-8
    p = {"wkv": {"weight": np.eye(32, dtype=np.float32)}, "norm": {"weight": np.ones(32, "f4")}}
    cache = Cache(CONFIG, FLOAT32)
    batch = make_batch([[0]], [0], [cache.add()])
    stored = FLOAT32.but(bf16=True)
    latent, _, _ = compress(x, p, RATIO_1_SOURCE, 1, cache, batch, CONFIG, stored)
    assert latent[0, 0] == 172 / 256


def test_the_stored_record_is_made_from_bf16():
    """The scale is 0.75 / 6; 0.15626 lies above the tie at 1.25 scales, its bf16 value on it."""
    latent = np.zeros((1, CONFIG.head_dim), np.float32)
    latent[0, :2] = 0.75, 0.15626
    record = main_kv(latent, np.zeros(1, int), frequencies(CONFIG, 2), OFFICIAL)
    values = OFFICIAL.main_kv.decode(record, CONFIG.head_dim)
    assert values[0, :2].tolist() == [0.75, 0.125]  # quantised directly it would be 0.1875
