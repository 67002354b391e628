"""n-gram addresses to the last digit, the look-back and where it stops, the gate."""

import re
import time

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import model as model_module
from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.engram import (
    engram,
    engram_gate,
    hash_rows,
    look_back,
    multipliers,
    read_rows,
    table_primes,
)
from dsv41.init import random_params
from dsv41.model import Model, engram_rows
from dsv41.presets import preset
from dsv41.quant import FLOAT32, OFFICIAL

REAL = preset("v4.1-flash")
CONFIG = oracles.small_config()
EPS = 1e-20

# the released tables: first prime of a list in full, then the last three digits of the others
PRIMES = """
16000057 079 081 097 121 129 133 183 | 16000189 207 211 253 277 289 307 321
16000339 381 393 399 403 409 447 463 | 16000477 487 499 507 511 573 609 627
16000667 669 693 697 711 729 759 769 | 16000781 799 813 819 841 877 879 889
"""
# rows of one token whose class window is the second item, newest first
VECTORS = [
    (1, [5, 4, 3, 2], """22259 23259088 41371678 58272182 67624233 92075454 96301072 117124931
        142558994 150547688 162989874 181633912 192289736 213618501 237612242 249163395
        261693639 281928537 299139980 315746102 326816926 343423276 352597450 380883595"""),
    (1, [5, 2, 2, 2], """5412672 18319159 35492627 60880252 74962984 95657733 98005115 127351390
        143494632 151789366 171410756 185435171 207165545 218031260 226330336 247008214
        256353435 276423911 295874085 305599364 322749888 348475788 367405771 372009279"""),
    (1, [2, 2, 2, 2], """4299726 29253038 43157972 58397134 65256332 88876378 100686433 112312540
        129401291 144510675 170979806 184903880 199719089 215127204 230239700 250883315
        264341430 275127613 298781502 318608685 331826823 351654054 365224186 370096053"""),
    (14, [5, 4, 3, 2], """738671 18973607 47256193 55444531 75539291 83005306 103863108 114293665
        129221833 159698187 173401037 186352206 207680784 209960455 235097182 243476921
        259483245 282696594 300752079 308490318 320863922 351297015 353876790 382776724"""),
    (14, [5, 2, 2, 2], """6939818 27264717 45254833 51915000 79245924 86868470 108849060 119840903
        131576092 148509516 175704205 177570039 200101533 208499118 238497982 243164617
        268363546 274011563 290850399 314068096 324530373 351836884 354242998 382274687"""),
]  # fmt: skip


def released_primes():
    """The table above as 48 numbers."""
    found = []
    for digits in re.findall(r"\d+", PRIMES):
        found.append(int(digits) if len(digits) > 3 else 16_000_000 + int(digits))
    return found


# ---- the released layout ----------------------------------------------------------------------


def test_the_released_primes_and_row_counts_come_out():
    modules = table_primes(REAL)
    assert [p for module in modules for p in module] == released_primes()
    assert [sum(module) for module in modules] == list(REAL.engram_num_embeddings)
    assert [sum(module) for module in modules] == [384_006_168, 384_016_682]
    assert len({p for module in modules for p in module}) == 48
    assert modules[0][0] == 16_000_057 and modules[1][-1] == 16_000_889
    assert sum(modules[0][:-1]) == 368_005_705, "last column offset of layer 1"


def test_finding_the_released_primes_takes_well_under_a_second():
    unseen = REAL.but(vocab_size=129_281)  # a config whose primes are not remembered yet
    begin = time.perf_counter()
    assert table_primes(unseen) == table_primes(REAL)
    assert time.perf_counter() - begin < 1


def test_the_released_multipliers_are_drawn():
    want = {
        1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    }
    for layer, numbers in want.items():
        got = multipliers(REAL, layer)
        assert got.dtype == np.int64 and got.tolist() == numbers
        assert all(number % 2 for number in numbers)


def test_classes_fit_into_63_bits_and_raw_ids_do_not():
    """The largest class times the largest multiplier of each layer, in unbounded integers."""
    largest = {1: 7_593_551_029_318_463_295, 14: 8_186_821_771_683_697_781}
    for layer, product in largest.items():
        numbers = multipliers(REAL, layer).tolist()
        assert (REAL.engram_compressed_vocab_size - 1) * max(numbers) == product < 2**63
        too_large = [i for i, m in enumerate(numbers) if (REAL.vocab_size - 1) * m >= 2**63]
        assert too_large == ([0, 3] if layer == 1 else [3])


@pytest.mark.parametrize("layer, window, rows", VECTORS, ids=lambda v: str(v)[:12])
def test_the_released_addresses_come_out(layer, window, rows):
    primes = np.array(table_primes(REAL)[REAL.engram_layer_ids.index(layer)])
    got = hash_rows(np.array([window]), multipliers(REAL, layer), primes, REAL.engram_n_heads)
    assert got.dtype == np.int64
    assert got.tolist() == [[int(row) for row in rows.split()]]


def test_a_row_count_that_is_not_the_sum_of_the_primes_is_refused():
    """The columns would reach beyond the table, or leave rows that no hash ever addresses."""
    for rows in (112, 251), (112, 253), (252, 112):
        with pytest.raises(ValueError, match="engram_num_embeddings"):
            config = CONFIG.but(engram_num_embeddings=rows)
            params = random_params(config, np.random.default_rng(0))
            Model(config, params, oracles.small_classes(config))


def test_every_address_lies_in_its_own_column():
    rng = np.random.default_rng(0)
    windows = rng.integers(0, REAL.engram_compressed_vocab_size, (500, 4))
    windows[0] = REAL.engram_compressed_vocab_size - 1
    for layer, primes in zip(REAL.engram_layer_ids, table_primes(REAL), strict=True):
        ends = np.cumsum(primes)
        rows = hash_rows(windows, multipliers(REAL, layer), np.array(primes), 8)
        assert (rows >= ends - primes).all() and (rows < ends).all()


def test_a_negative_mix_would_still_give_a_row():
    """Python's modulo: -7 mod 17 = 10. C gives -7, so a kernel must not copy C."""
    rows = hash_rows(np.array([[-7, 0]]), np.array([1, 1]), np.array([17]), 1)
    assert rows.tolist() == [[10]]


# ---- a hash by hand ---------------------------------------------------------------------------

# primes 17, 19 | 23, 29 | 31, 37; the multipliers are set to 3, 5, 7, 11; every id is its own class
HAND = oracles.small_config(
    engram_layer_ids=(3,),
    engram_num_embeddings=(156,),
    engram_vocab_size=16,
    engram_n_heads=2,
    engram_max_ngram_size=4,
    engram_compressed_vocab_size=50,
)
HAND_TOKENS = [5, 7, 11, 13, 17]
HAND_ROWS = [
    [5, 22, 47, 70, 117, 148],  # 15 ^ 10 = 5; 5 ^ 14 = 11; 11 ^ 22 = 29
    [12, 29, 38, 61, 108, 139],
    [2, 19, 46, 63, 112, 137],
    [16, 33, 46, 63, 110, 141],
    [12, 17, 53, 64, 109, 122],
]
NEXT_TOKENS, NEXT_ROWS = [19, 23], [[0, 30, 51, 62, 100, 125], [9, 24, 56, 79, 90, 121]]


@pytest.fixture
def hand(monkeypatch):
    """Feeds requests to a cache by the hand-made multipliers; returns the table rows."""
    monkeypatch.setattr(model_module, "multipliers", lambda *_: np.array([3, 5, 7, 11]))

    def feed(cache, slots, requests, types=None):
        starts = [cache.length[slot] for slot in slots]
        batch = make_batch(requests, starts, slots, types)
        (rows,) = engram_rows(HAND, np.arange(50), batch, cache)
        for slot, ids in zip(slots, requests, strict=True):
            cache.length[slot] += len(ids)
        return rows.tolist()

    return feed


def test_primes_of_the_hand_made_table():
    assert table_primes(HAND) == [[17, 19, 23, 29, 31, 37]]


@pytest.mark.parametrize("cuts", [[5], [2, 1, 2], [1] * 5, [4, 1]], ids=str)
def test_the_look_back_survives_every_chunk_edge(hand, cuts):
    cache, rows, at = Cache(HAND, FLOAT32), [], 0
    slot = cache.add(pad_class=2)
    for size in cuts:
        rows += hand(cache, [slot], [HAND_TOKENS[at : at + size]])
        at += size
    assert rows == HAND_ROWS


def test_a_neighbour_or_a_predecessor_in_the_slot_is_never_looked_back_at(hand):
    """Leaking from the first request, the second would begin with [6, 30, 45, 85, 104, 123]."""
    cache = Cache(HAND, FLOAT32)
    slots = [cache.add(pad_class=2), cache.add(pad_class=2)]
    assert hand(cache, slots, [HAND_TOKENS, NEXT_TOKENS]) == HAND_ROWS + NEXT_ROWS
    cache.release(slots[0])
    again = cache.add(pad_class=2)
    assert again == slots[0]
    assert hand(cache, [again], [NEXT_TOKENS]) == NEXT_ROWS


def test_no_tokens_have_no_rows_but_all_columns():
    none = np.zeros((0, 4), np.int64)
    rows = hash_rows(none, np.array([3, 5, 7, 11]), np.array([17, 19, 23, 29, 31, 37]), 2)
    assert rows.shape == (0, 6) and rows.dtype == np.int64


def test_an_image_hides_itself_and_everything_older(hand):
    """[5, image, 11, 13, 17]: from 11 on as at a beginning with 2 before it; 5 never comes back."""
    cache = Cache(HAND, FLOAT32)
    image, fresh = cache.add(pad_class=2), cache.add(pad_class=2)
    types = [np.array([-1, 0, -1, -1, -1])]
    rows = hand(cache, [image], [HAND_TOKENS], types)
    assert rows[2:] == hand(cache, [fresh], [HAND_TOKENS[2:]])
    assert rows[0] == HAND_ROWS[0]
    # the position itself is all padding: 6 ^ 10 = 12; 12 ^ 14 = 2; 2 ^ 22 = 20
    assert rows[1] == [12, 17 + 12, 36 + 2, 59 + 2, 88 + 20, 119 + 20]


# ---- the look-back ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=14),
    st.lists(st.integers(1, 5), min_size=1, max_size=14),
)
def test_any_split_gives_the_windows_of_the_loop(size, line, cuts):
    classes = np.array([c for c, _ in line])
    image = np.array([i for _, i in line])
    pad, history = 7, np.full(size - 1, 7)
    got, at = [], 0
    for cut in [*cuts, len(line)]:
        part = slice(at, min(at + cut, len(line)))
        if part.start < part.stop:
            windows, history = look_back(classes[part], image[part], history, pad)
            assert len(history) == size - 1
            got += windows.tolist()
        at = part.stop
    kinds = np.where(image, 0, -1)
    for t in range(len(line)):
        want = oracles.ngram(np.arange(10), classes, kinds, t, size, pad)
        assert got[t] == want, f"token {t} of {line}"


def test_a_barrier_in_an_earlier_chunk_still_stops_the_look_back():
    windows, history = look_back(np.array([3, 4]), np.array([False, True]), np.array([8, 9]), 0)
    assert windows.tolist() == [[3, 9, 8], [0, 0, 0]]
    windows, history = look_back(np.array([5]), np.array([False]), history, 0)
    assert windows.tolist() == [[5, 0, 0]], "3 is behind the image"
    windows, _ = look_back(np.array([6]), np.array([False]), history, 0)
    assert windows.tolist() == [[6, 5, 0]]


# ---- rows of the table ------------------------------------------------------------------------


def test_a_table_row_has_a_scale_per_32_channels_of_its_own(tmp_path):
    """Rows are not tiles: neighbours differ by their scales alone. Scale byte 0 is 2^-127."""
    codes = np.memmap(tmp_path / "codes", np.uint8, "w+", shape=(4, 64))
    scales = np.memmap(tmp_path / "scales", np.uint8, "w+", shape=(4, 2))
    codes[:] = 0x38  # 1.0
    codes[3, 32:] = 0xC4  # -3.0
    scales[:] = [[127, 128], [0, 254], [120, 120], [129, 126]]
    rows = np.array([[3, 0], [1, 1], [0, 3]])
    got = read_rows({"weight": codes, "scale": scales}, rows)
    assert got.dtype == np.float32 and got.shape == (3, 128)
    segments = got.reshape(3, 4, 32)
    assert (segments == segments[:, :, :1]).all()
    three, zero = [4, -1.5], [1, 2]
    one = [2.0**-127, 2.0**127]
    assert segments[:, :, 0].tolist() == [three + zero, one + one, zero + three]


def test_only_the_asked_rows_of_a_table_are_read():
    asked = []

    class Table:
        def __init__(self, width):
            self.width = width

        def __getitem__(self, rows):
            asked.append(rows.copy())
            return np.full((*rows.shape, self.width), 127 if self.width == 1 else 0x38, np.uint8)

    rows = np.array([[10**9, 7]])
    got = read_rows({"weight": Table(32), "scale": Table(1)}, rows)
    assert got.tolist() == [[1.0] * 64]
    assert [a.tolist() for a in asked] == [rows.tolist()] * 2


def test_a_nan_in_a_row_is_refused_and_named():
    codes = np.full((2, 32), 0x38, np.uint8)
    codes[1, 5] = 0x7F
    table = {"weight": codes, "scale": np.full((2, 1), 127, np.uint8)}
    assert read_rows(table, np.array([[0]])).tolist() == [[1.0] * 32]
    with pytest.raises(ValueError, match=r"engram\.embed\.weight: row 1 holds a NaN"):
        read_rows(table, np.array([[0], [1]]))


# ---- the gate ---------------------------------------------------------------------------------


def gate(streams, key, value, q=None, k=None, image=False, numerics=FLOAT32):
    """One token: streams, key (S, D), value (D,) as lists -> new streams and gates."""
    streams, key, value = (np.array([a], np.float32) for a in (streams, key, value))
    ones = np.ones(streams.shape[1:], np.float32)
    q = ones if q is None else np.array(q, np.float32)
    k = ones if k is None else np.array(k, np.float32)
    out, gates = engram_gate(streams, key, value, q, k, np.array([image]), EPS, numerics)
    return out[0], gates[0]


def test_the_gate_by_hand_with_a_norm_per_stream():
    """Dots 1.032795559 and 0. One norm over both streams would give 0.7575323 first."""
    streams, keys = [[1, 2, 3, 4], [2, 0, -2, 0]], [[1, 0, 1, 0], [0, 1, 0, 1]]
    out, gates = gate(streams, keys, [0.5, -0.5, 1, 2])
    assert_close("gates", gates, np.array([0.734244525, 0.5]), rel=1e-7, floor=0)
    want = [[1.3671223, 1.6328777, 3.7342445, 5.4684891], [2.25, -0.25, -1.5, 1.0]]
    assert_close("streams", out, np.array(want), rel=1e-7, floor=0)


def test_a_key_of_ones_and_its_opposite():
    _, up = gate([[1, 2, 3, 4]], [[1, 1, 1, 1]], [0] * 4)
    _, down = gate([[1, 2, 3, 4]], [[-1, -1, -1, -1]], [0] * 4)
    assert_close("gates", np.concatenate([up, down]), np.array([0.794326, 0.205674]), rel=1e-6)


@pytest.mark.parametrize(
    "dot, expected",
    [
        (0, 0.5),
        (1e-8, 0.5002499999791666),
        (-1e-8, 0.4997500000208333),
        (-4, 0.11920292202211755),
        (4, 0.8807970779778823),
        (0.25, 0.6224593312018546),
    ],
)
def test_the_root_of_the_dot_keeps_its_sign_and_has_a_floor(dot, expected):
    _, gates = gate([[1]], [[1]], [1], q=[[dot]])
    assert gates.dtype == np.float32
    assert_close("gate", gates, np.array([expected]), rel=1e-7, floor=0)


def test_the_query_weight_and_the_key_weight_both_count():
    _, gates = gate([[3, 0]], [[2, 0]], [0, 0], q=[[0.5, 9]], k=[[0.25, 9]])
    want = oracles.gate_of(2 * 0.125 / np.sqrt(2))  # each norm divides by |x| / sqrt(2)
    assert_close("gate", gates, np.array([want]), rel=1e-7, floor=0)


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
def test_a_zero_stream_or_key_opens_the_gate_by_half(numerics):
    with np.errstate(all="raise"):
        out, gates = gate([[0, 0], [1, 2]], [[1, 1], [0, 0]], [1, -2], numerics=numerics)
    assert gates.tolist() == [0.5, 0.5]
    assert out.tolist() == [[0.5, -1], [1.5, 1]]


def test_tiny_streams_are_normalised_and_not_lost_in_eps():
    """1e-9 squared is 1e-18, a hundred times eps; half precision would see zero."""
    _, gates = gate([[1e-9, 1e-9]], [[1e-9, 1e-9]], [0, 0])
    want = oracles.gate_of(np.sqrt(2) / 1.01)
    assert_close("gate", gates, np.array([want]), rel=1e-6, floor=0)


def test_an_image_position_passes_through_untouched():
    streams = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    out, gates = gate(streams, streams, [9, 9, 9, 9], image=True)
    assert_same("streams", out, streams)
    assert gates.tolist() == [0, 0, 0]


# ---- the module -------------------------------------------------------------------------------


def test_the_module_agrees_with_the_loop():
    p = random_params(CONFIG, np.random.default_rng(0))["layers"][3]["engram"]
    rng = np.random.default_rng(1)
    streams = rng.standard_normal((6, CONFIG.hc_mult, CONFIG.hidden_size), np.float32)
    primes = table_primes(CONFIG)[0]
    rows = rng.integers(0, sum(primes), (6, len(primes)))
    image = np.array([False, True, False, False, True, False])
    out, gates = engram(streams, rows, p, image, CONFIG, FLOAT32)
    p64 = oracles.as_float64({"engram": p})["engram"]
    for t in range(6):
        want, want_gates = oracles.injected(
            streams[t].astype(float), rows[t].tolist(), p64, image[t], CONFIG
        )
        assert_close(f"streams of token {t}", out[t], want, rel=2e-6)
        assert_close(f"gates of token {t}", gates[t], want_gates, rel=2e-6)
    assert_same("image", out[image], streams[image])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6))
def test_any_split_in_any_company_gives_the_same_rows(calls):
    """Three requests of text and images advance each by their own steps."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, CONFIG.vocab_size, (3, 24))
    types = np.where(rng.random((3, 24)) < 0.25, 1, -1)
    classes = oracles.small_classes(CONFIG)
    pad = int(classes[CONFIG.engram_pad_token_id])
    cache = Cache(CONFIG, FLOAT32)
    slots = [cache.add(pad) for _ in range(3)]
    at, found = [0, 0, 0], [[[], []] for _ in range(3)]
    for sizes in calls:
        who = [r for r in (2, 0, 1) if sizes[r]]
        if not who:
            continue
        parts = {r: slice(at[r], at[r] + sizes[r]) for r in who}
        batch = make_batch(
            [ids[r, parts[r]] for r in who],
            [at[r] for r in who],
            [slots[r] for r in who],
            [types[r, parts[r]] for r in who],
        )
        for module, rows in enumerate(engram_rows(CONFIG, classes, batch, cache)):
            begin = 0
            for r in who:
                found[r][module] += rows[begin : begin + sizes[r]].tolist()
                begin += sizes[r]
        for r in who:
            at[r] += sizes[r]
    size = CONFIG.engram_max_ngram_size
    for module, layer in enumerate(CONFIG.engram_layer_ids):
        primes = oracles.primes_from(CONFIG)[module]
        numbers = oracles.draw_multipliers(CONFIG, layer)
        for r in range(3):
            for t in range(at[r]):
                window = oracles.ngram(classes, ids[r], types[r], t, size, pad)
                want = oracles.hashed(window, numbers, primes, CONFIG.engram_n_heads)
                assert found[r][module][t] == want, f"module {module}, request {r}, token {t}"
