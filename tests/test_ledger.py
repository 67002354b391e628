"""The ledger against published figures, hand-worked numbers, tensor shapes and the cache."""

import struct
import sys
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from dsv41 import figures, ledger
from dsv41.accounts import BESIDE, from_config
from dsv41.cache import Cache
from dsv41.families import MODELS, describe
from dsv41.ledger_tables import breakdown, report
from dsv41.presets import preset
from dsv41.quant import OFFICIAL
from dsv41.tensors import expected_tensors, part_of

FLASH, TINY = preset("v4.1-flash"), preset("tiny")
K, M = 1 << 10, 1 << 20


def total(model, context):
    return ledger.decode_flops(model, context).total


# ---- bytes of cache -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V1-67B", 389_120),
        ("V2", 69_120),
        ("V3", 70_272),
        ("V3.2", 48_068),
        ("V4-Flash", 3514.25),
        ("V4-Pro", 5031.4375),
        ("V4.1-Flash", 890),
    ],
)
def test_global_kv_bytes_per_token(name, expected):
    assert ledger.kv_bytes(name).hbm == expected


def test_ratios_of_figure_1b():
    bytes_ = [ledger.kv_bytes(name).hbm for name in ("V1-67B", "V3.2", "V4-Flash", "V4.1-Flash")]
    steps = [before / after for before, after in pairwise(bytes_)]
    assert steps == pytest.approx([8.095, 13.678, 3.949], abs=5e-4)
    assert bytes_[0] / bytes_[-1] == pytest.approx(437.2, abs=0.05)


def test_where_the_890_bytes_are():
    kv = ledger.kv_bytes(FLASH)
    assert (kv.main, kv.index) == (720, 170)
    per_layer = {k.name: k.count * (k.entry_bytes + k.key_bytes) for k in from_config(FLASH).kinds}
    assert per_layer["encoder full"] / 2 == 534
    assert per_layer["decoder full"] == 356
    assert sum(per_layer.values()) == 3 * 356 + 356  # nobody else stores an entry


def test_persistent_cache_is_an_eighth_of_v4_flash():
    old, new = ledger.kv_bytes("V4-Flash"), ledger.kv_bytes("V4.1-Flash")
    assert (old.disk, new.disk) == (7028.5, 890)
    assert old.disk / new.disk == pytest.approx(7.90, abs=0.005)
    # two window checkpoints a turn are half of the store when a turn is about this long
    assert 2 * old.window / old.hbm == pytest.approx(1830, abs=1)


def test_claims_of_the_v4_report_about_its_cache():
    kv = {name: ledger.kv_bytes(name).hbm for name in MODELS}
    assert kv["V4-Flash"] / kv["V3.2"] == pytest.approx(0.073, abs=5e-4)  # "7 %"
    assert kv["V4-Pro"] / kv["V3.2"] == pytest.approx(0.105, abs=5e-4)  # "10 %"
    for name, layers in (("V4-Flash", 43), ("V4-Pro", 61)):
        grouped_query = layers * 2 * 8 * 128 * 2  # BF16, 8 KV heads of 128
        assert kv[name] / grouped_query == pytest.approx(0.02, abs=5e-4)
    window = 43 * 584  # stored for every token, against main KV alone: "about 8 times"
    assert window / ledger.kv_bytes("V4-Flash").main == pytest.approx(7.95, abs=0.01)


def test_fixed_bytes_per_request():
    kv = ledger.kv_bytes(FLASH)
    assert kv.window == 40 * 128 * 528 == 2_703_360
    assert kv.carry == 3 * 2 * 512 * 4  # one open pair per ratio-2 source: value and gate, f32
    assert kv.history == 3 * 8
    assert kv.draft == 3 * 128 * 528
    assert ledger.kv_bytes("V4-Flash").window == 43 * 128 * 584 == 3_214_336


@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_predicted_cache_equals_the_arrays(config):
    cache = Cache(config, OFFICIAL)
    cache.reserve(cache.add(), 64)
    kv = ledger.kv_bytes(config)
    assert cache.bytes_per_token() == kv.hbm
    assert cache.bytes_per_request() == kv.per_request


# ---- parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active"),  # as published
    [
        ("V1-67B", 67, 67),
        ("V2", 236, 21),
        ("V3", 671, 37),
        ("V4-Flash", 284, 13),
        ("V4-Pro", 1573, 49),
        ("V4.1-Flash", 552, 16),
    ],
)
def test_published_sizes(name, billions, active):
    counts = ledger.parameters(name)
    assert round(counts.backbone / 1e9) == billions
    assert round(counts.decode / 1e9) == active


def test_sizes_of_v41_flash():
    counts = ledger.parameters(FLASH)
    assert counts.backbone / 1e9 == pytest.approx(551.6, abs=0.05)
    assert counts.engram / 1e9 == pytest.approx(196.6, abs=0.05)
    assert counts.decode / 1e9 == pytest.approx(15.8, abs=0.05)
    assert counts.prefill / 1e9 == pytest.approx(7.6, abs=0.05)
    table = FLASH.vocab_size * FLASH.hidden_size
    assert (counts.prefill + table) / 1e9 == pytest.approx(8.2, abs=0.05)


def test_the_last_source_makes_kv_and_keys_for_every_prompt_token():
    parts = ledger.parameters(FLASH).parts
    assert parts["compressor"] == (7 * 512 * 5120,) * 3  # four of KV, three gates
    keys, queries = 4 * 128 * 512, 4096 * 1280 + 32 * 5120
    assert parts["indexer"] == (keys + 8 * queries, keys + 8 * queries, keys + 3 * queries)


def test_sizes_of_v4():
    flash, pro = ledger.parameters("V4-Flash"), ledger.parameters("V4-Pro")
    assert flash.backbone / 1e9 == pytest.approx(284.3, abs=0.05)
    assert flash.decode / 1e9 == pytest.approx(13.3, abs=0.05)
    assert pro.backbone / 1e9 == pytest.approx(1573, abs=0.1)
    assert pro.decode / 1e9 == pytest.approx(48.9, abs=0.1)
    # hash-routed layers, the first three, have no selection bias
    assert flash.parts["router"][0] == 43 * 256 * 4096 + 40 * 256


def _shape_sums(config, measure):
    """(text without Engram, Engram, DSpark, vision) summed over the checkpoint's tensors."""
    sums = dict.fromkeys(("text", "engram", "dspark", "vision"), 0)
    for name, spec in expected_tensors(config).items():
        sums["engram" if ".engram." in name else part_of(name)] += measure(spec)
    return tuple(sums.values())


def _part_sums(parts):
    engram = parts["Engram tables"] + parts["Engram projections"]
    backbone = sum(size for part, size in parts.items() if part not in BESIDE)
    return backbone, engram, parts["DSpark drafter"], parts["vision tower"]


@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_parameters_equal_the_tensor_shapes(config):
    def numbers(spec):
        scale = spec.layout == "scale" or (spec.layout == "table" and spec.dtype == "F8_E8M0")
        return 0 if scale else prod(spec.logical_shape)

    counts = {part: stored for part, (stored, *_) in ledger.parameters(config).parts.items()}
    assert _part_sums(counts) == _shape_sums(config, numbers)


@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_stored_bytes_equal_the_tensors(config):
    expected = _shape_sums(config, lambda spec: spec.nbytes)
    assert _part_sums(ledger.stored_bytes(config)) == expected


def test_stored_bytes_of_v41_flash():
    stored = ledger.stored_bytes(FLASH)
    assert ledger.expert_bytes(FLASH) == 18_800_640
    assert stored["routed experts"] == 40 * 384 * 18_800_640  # 288.8 GB
    assert ledger.engram_row_bytes(FLASH) == 264
    assert stored["Engram tables"] == 264 * (384_006_168 + 384_016_682)  # 202.8 GB
    assert stored["Engram tables"] / 2**30 == pytest.approx(188.8, abs=0.05)


def test_a_config_without_images_drafter_and_engram():
    plain = FLASH.but(
        vision_config=None,
        num_nextn_predict_layers=0,
        compress_ratios=FLASH.compress_ratios[:40],
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    counts = ledger.parameters(plain)
    assert not set(counts.parts) & set(BESIDE)
    assert counts.engram == 0
    # one selection bias per router instead of two
    assert ledger.parameters(FLASH).backbone - counts.backbone == 40 * 384
    assert "Engram projections" not in breakdown(plain)


# ---- arithmetic -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V4.1-Flash", (19.8, 20.5, 25.2)),
        ("V4-Flash", (16.1, 21.4, 60.0)),
        ("V4-Pro", (60.0, 72.0, 158.4)),
        ("V3.2", (74.8, 138.2, 596.7)),
    ],
)
def test_decode_table(name, expected):
    gflop = [total(name, context) / 1e9 for context in (4 * K, 128 * K, M)]
    assert gflop == pytest.approx(expected, rel=0.01)


def test_decode_growth_and_ratios():
    assert total("V4.1-Flash", M) / total("V4.1-Flash", 4 * K) == pytest.approx(1.276, rel=1e-3)
    assert total("V4-Flash", M) / total("V3.2", M) == pytest.approx(0.1005, rel=0.01)  # "10 %"
    assert total("V4-Pro", M) / total("V3.2", M) == pytest.approx(0.265, rel=0.01)  # "27 %"


def test_attention_in_fp8_would_miss_the_published_ratios():
    def cheap(name):
        flops = ledger.decode_flops(name, M)
        return flops.total - flops.attention / 2

    assert cheap("V4-Flash") / cheap("V3.2") == pytest.approx(0.083, abs=1e-3)
    assert cheap("V4-Pro") / cheap("V3.2") == pytest.approx(0.207, abs=1e-3)


def test_crossing_of_v41_and_v4_flash():
    context = ledger.crossing("V4.1-Flash", "V4-Flash")
    assert context == pytest.approx(106_000, rel=0.01)
    assert total("V4.1-Flash", context) < total("V4-Flash", context)
    assert total("V4.1-Flash", context - 1) >= total("V4-Flash", context - 1)
    assert ledger.crossing("V3.2", "V4-Flash") == M  # never


def test_index_entries_scored_at_one_million():
    assert ledger.index_entries(FLASH, M) == 3 * M // 2 + M + 4 * 16_384  # 2.69 million
    no_pool = FLASH.but(candidate_source_layer_id=None)
    assert ledger.index_entries(no_pool, M) == 6.5 * M  # 6.82 million
    every_layer = tuple(range(2, 40))
    no_sharing = no_pool.but(kv_source_layer_ids=every_layer, index_source_layer_ids=every_layer)
    assert ledger.index_entries(no_sharing, M) == 29 * M  # 30.4 million


def test_engram_is_counted_beside_the_total():
    flops = ledger.decode_flops(FLASH, 4 * K)
    assert flops.engram == 2 * 25_600 * 6144  # two modules; FP8 halves the two FLOPs
    assert flops.total == sum(flops[:4])


@pytest.mark.parametrize(("tokens", "expected"), [(128, 1), (1536, 0.542), (64 * K, 0.501)])
def test_prefill_share_of_the_layers(tokens, expected):
    share = ledger.prefill_share(FLASH, tokens)
    assert share == (20 * tokens + 20 * 128) / (40 * tokens)
    assert share == pytest.approx(expected, abs=5e-4)
    assert ledger.prefill_share("V4-Flash", tokens) == 1


def test_prefill_work_halves_with_long_prompts():
    works = [ledger.prefill_flops(FLASH, 64 * K, exact).total for exact in (False, True)]
    assert works[0] / works[1] == pytest.approx(0.5, abs=0.01)


def test_exact_prefill_is_the_sum_over_positions():
    steps = [ledger.decode_flops(TINY, position) for position in range(1, 38)]
    whole = ledger.prefill_flops(TINY, 37, exact=True)
    for term in ("linear", "attention", "index", "engram"):
        assert getattr(whole, term) == sum(getattr(step, term) for step in steps)
    assert whole.head == steps[0].head  # one prediction


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_prefill_within_the_window_is_exact(tokens):
    assert ledger.prefill_flops(TINY, tokens) == ledger.prefill_flops(TINY, tokens, exact=True)


def test_bounded_replay_by_hand():
    # 10 tokens, window 8: the decoder sees positions 3..10, their window starts at position 3
    flops = ledger.prefill_flops(TINY, 10)
    decoder = sum(min(t, 6) + (t - 2) for t in range(3, 11))  # ratio 1, top-6
    encoder = sum(2 * min(t, 8) + 3 * (min(t // 2, 6) + min(t, 8)) for t in range(1, 11))
    assert flops.attention == (4 * decoder + encoder) * 2 * 4 * 128
    scored = sum(2 * (t // 2) for t in range(1, 11)) + sum(t + min(t, 16) for t in range(3, 11))
    assert flops.index == scored * 0.5 * 4 * 32


# ---- a model small enough to count by hand ---------------------------------------------------


def test_tiny_cache_by_hand():
    kv = ledger.kv_bytes(TINY)
    record, key = 64 // 2 + 64 // 16, 32 // 2 + 32 // 32  # 36 and 17
    assert kv.main == record / 2 + record / 2 + record  # sources 2, 4 (pairs) and 5
    assert kv.index == key / 2 + key / 2 + key
    assert kv.window == 9 * 8 * (64 + 2)


@pytest.mark.parametrize(("context", "keys", "scored"), [(9, 108, 26), (100, 114, 216)])
def test_tiny_decode_by_hand(context, keys, scored):
    """Context 9: layers 0, 1 meet 8 keys; 2-4 meet 4 + 8; 5-8 meet 6 + 8.

    Layers 2, 4 score 4 entries each, 5 and 7 score 9. At 100: 50, 50, 100 and the pool's 16.
    """
    flops = ledger.decode_flops(TINY, context)
    assert flops.attention == keys * 2 * 4 * (64 + 64)
    assert flops.index == scored * 2 * 0.25 * 4 * 32
    assert flops.head == 2 * 288 * 64
    layer = 64 * 96 + 96 * 256 + 64 * 64 + 2 * 32 * 128 + 64 * 64  # attention
    layer += 3 * (3 * 64 * 64) + 8 * 64 + 2 * 24 * 256  # 2 + 1 experts, router, mHC
    sources = (3 + 2) * 64 * 64 + 3 * 32 * 64  # KV, two gates, index keys
    queries = 4 * (4 * 32 * 96 + 4 * 64)
    assert flops.linear == 2 * 0.5 * (9 * layer + sources + queries)


def test_decode_flops_of_an_array_of_contexts():
    contexts = np.array([1, 9, 100, M])
    together = ledger.decode_flops(TINY, contexts).total
    assert list(together) == [total(TINY, int(context)) for context in contexts]


# ---- what a reader sees ---------------------------------------------------------------------


def test_describe_takes_a_model_a_config_or_a_name():
    assert describe(FLASH).kinds == describe("V4.1-Flash").kinds == MODELS["V4.1-Flash"].kinds
    assert describe(MODELS["V2"]) is MODELS["V2"]
    with pytest.raises(ValueError, match=r"expected one of V1-67B.*got 'V5'"):
        describe("V5")


@pytest.mark.parametrize("count", [ledger.decode_flops, ledger.prefill_flops])
def test_no_tokens_is_an_error(count):
    with pytest.raises(ValueError, match="expected a positive number of tokens, got 0"):
        count(FLASH, 0)


def test_report_shows_every_model_and_context():
    text = report(list(MODELS.values()), [1000, 4 * K, M])
    cache, sizes, decode = text.split("\n\n")
    for name in MODELS:
        assert name in cache and name in sizes and name in decode
    assert "389,120" in cache and "3,514.25" in cache and "437.2" in cache
    assert "551.6" in sizes and "196.6" in sizes
    assert decode.splitlines()[1].split() == ["1,000", "4K", "1M"]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_breakdown_adds_up(config):
    text = breakdown(config)
    kv, counts = ledger.kv_bytes(config), ledger.parameters(config)
    assert f"= {kv.hbm:,.0f} bytes" in text
    assert f"= {kv.per_request:,} bytes" in text
    assert f"{counts.backbone:,}" in text
    assert max(map(len, text.splitlines())) <= 100


DRAW = [figures.draw_kv_bytes, figures.draw_decode_flops]


@pytest.mark.parametrize("draw", DRAW)
def test_figures_are_png_and_the_same_bytes_every_time(draw, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'dsv41[plots]'")
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    draw(first)
    draw(second)
    content = first.read_bytes()
    assert content == second.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (600, 350)
    assert b"Software" not in content and b"tEXt" not in content


@pytest.mark.parametrize("draw", DRAW)
def test_figures_name_the_extra_when_matplotlib_is_missing(draw, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dsv41\[plots\]"):
        draw(tmp_path / "never.png")
