"""Who does what, layer by layer, and which plans are impossible."""

import dataclasses
from pathlib import Path

import oracles
import pytest

from dsv41.ced import halves
from dsv41.config import Config
from dsv41.plan import Layer, build_plan, format_plan
from dsv41.presets import preset

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a"
REAL, TINY = preset("v4.1-flash"), preset("tiny")


def test_the_released_plan_has_2_swa_4_full_4_reindex_and_30_reuse_layers():
    modes = [layer.mode for layer in REAL.plan]
    assert [modes.count(m) for m in ("swa", "full", "reindex", "reuse")] == [2, 4, 4, 30]
    assert [layer.index for layer in REAL.plan] == list(range(40))


def test_the_released_plan_layer_by_layer():
    """Rows of the published table: layers, ratio, mode, KV from, top-k from, candidate role."""
    table = [
        ([0, 1], 0, "swa", None, None, None),
        ([2], 2, "full", 2, 2, None),
        ([8], 2, "full", 8, 8, None),
        ([14], 2, "full", 14, 14, None),
        (range(3, 8), 2, "reuse", 2, 2, None),
        (range(9, 14), 2, "reuse", 8, 8, None),
        (range(15, 20), 2, "reuse", 14, 14, None),
        ([20], 1, "full", 20, 20, "publish"),
        (range(21, 24), 1, "reuse", 20, 20, None),
        ([24], 1, "reindex", 20, 24, "consume"),
        ([28], 1, "reindex", 20, 28, "consume"),
        ([32], 1, "reindex", 20, 32, "consume"),
        ([36], 1, "reindex", 20, 36, "consume"),
        (range(25, 28), 1, "reuse", 20, 24, None),
        (range(29, 32), 1, "reuse", 20, 28, None),
        (range(33, 36), 1, "reuse", 20, 32, None),
        (range(37, 40), 1, "reuse", 20, 36, None),
    ]
    seen = []
    for layers, ratio, mode, kv_source, index_source, candidates in table:
        for index in layers:
            layer = REAL.plan[index]
            seen.append(index)
            assert (layer.ratio, layer.mode) == (ratio, mode), f"layer {index}"
            sources = (layer.kv_source, layer.index_source, layer.candidates)
            assert sources == (kv_source, index_source, candidates), f"layer {index}"
            assert layer.selects == (mode in ("full", "reindex"))
            assert layer.engram == {1: 0, 14: 1}.get(index)
            assert layer.half == ("encoder" if index < 20 else "decoder")
    assert sorted(seen) == list(range(40))


def test_the_released_model_is_cut_in_the_middle():
    encoder, decoder = halves(REAL.plan)
    assert [layer.index for layer in encoder] == list(range(20))
    assert [layer.index for layer in decoder] == list(range(20, 40))


def test_the_golden_plan_is_what_its_readme_says():
    plan = Config.load(GOLDEN).plan
    assert plan == TINY.plan
    modes = "swa swa full reuse full full reuse reindex reuse".split()
    assert [layer.mode for layer in plan] == modes
    assert [layer.ratio for layer in plan] == [0, 0, 2, 2, 2, 1, 1, 1, 1]
    assert [layer.kv_source for layer in plan] == [None, None, 2, 2, 4, 5, 5, 5, 5]
    assert [layer.index_source for layer in plan] == [None, None, 2, 2, 4, 5, 5, 7, 7]
    assert [layer.candidates for layer in plan] == [*[None] * 5, "publish", None, "consume", None]
    assert [layer.engram for layer in plan] == [None, 0, None, None, 1, *[None] * 4]


def test_a_reindex_layer_before_the_pool_chooses_freely():
    plan = oracles.small_config().plan
    assert [layer.mode for layer in plan] == [
        *["swa", "full", "reuse", "full", "reindex", "swa", "reuse"],
        *["full", "reuse", "reindex", "reuse"],
    ]
    roles = {layer.index: layer.candidates for layer in plan if layer.candidates}
    assert roles == {7: "publish", 9: "consume"}
    assert plan[6].index_source == 4, "the window-only layer between does not break the chain"
    assert plan[5].kv_source is None and plan[5].index_source is None
    assert [layer.half for layer in plan].count("encoder") == 7


def test_a_model_of_windows_alone_has_no_decoder_half():
    config = oracles.small_config(
        num_hidden_layers=3,
        compress_ratios=(0, 0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    assert {layer.mode for layer in config.plan} == {"swa"}
    encoder, decoder = halves(config.plan)
    assert (len(encoder), len(decoder)) == (3, 0)


def test_without_a_pool_nobody_publishes_or_consumes():
    plan = TINY.but(candidate_source_layer_id=None).plan
    assert not any(layer.candidates for layer in plan)


def test_ratios_of_the_draft_layers_may_be_left_out():
    """The released list has 43 entries for 40 layers; the last three are window-only stages."""
    assert TINY.but(compress_ratios=TINY.compress_ratios[:9]).plan == TINY.plan
    assert build_plan(TINY) == TINY.plan and len(TINY.plan) == 9


def test_a_layer_is_a_plain_unchangeable_record():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.plan[0].mode = "full"
    assert TINY.plan[0] == Layer(0, 0, "swa", None, None, None, None, "encoder")


def test_the_plan_prints_as_a_table_with_a_line_per_layer():
    lines = format_plan(REAL.plan).splitlines()
    assert len(lines) == 41 and not any(line != line.rstrip() for line in lines)
    assert lines[0].split() == "layer half ratio mode KV of top-k of candidates engram".split()
    assert lines[1].split() == "0 encoder 0 swa - - - -".split()
    assert lines[2].split() == "1 encoder 0 swa - - - 0".split()
    assert lines[21].split() == "20 decoder 1 full 20 20 publish -".split()
    assert lines[37].split() == "36 decoder 1 reindex 20 36 consume -".split()
    starts = {line.index(word) for line, word in zip(lines[1:], ["encoder"] * 20, strict=False)}
    assert starts == {lines[0].index("half")}, "columns do not line up"


# ---- impossible plans -------------------------------------------------------------------------

# tiny: ratios 0 0 2 2 2 1 1 1 1 (0 0 0), KV sources 2 4 5, index sources 2 4 5 7, pool 5
IMPOSSIBLE = {
    "a layer reuses before any Full layer": (
        {"kv_source_layer_ids": (4, 5), "index_source_layer_ids": (4, 5, 7)},
        r"kv_source_layer_ids: .*layer 2 reuses",
    ),
    "a layer reindexes before any Full layer": (
        {"kv_source_layer_ids": (4, 5), "index_source_layer_ids": (2, 4, 5, 7)},
        r"kv_source_layer_ids: .*layer 2 reindexes",
    ),
    "no source at all": (
        {
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "candidate_source_layer_id": None,
        },
        r"kv_source_layer_ids: .*layer 2",
    ),
    "a KV source that does not select": (
        {"index_source_layer_ids": (2, 5, 7)},
        r"index_source_layer_ids: .*layer 4",
    ),
    "an unknown ratio": (
        {"compress_ratios": (0, 0, 2, 2, 2, 1, 4, 1, 1)},
        r"compress_ratios: layer 6 .*4",
    ),
    "a negative ratio": (
        {"compress_ratios": (0, -1, 2, 2, 2, 1, 1, 1, 1)},
        r"compress_ratios: .*-1",
    ),
    "another ratio than its KV source": (
        {"compress_ratios": (0, 0, 2, 1, 2, 1, 1, 1, 1)},
        r"compress_ratios: layer 3 .*ratio 1 .*layer 2",
    ),
    "another ratio than its KV source, behind the last one": (
        {"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 2)},
        r"compress_ratios: layer 8 .*ratio 2 .*layer 5",
    ),
    "too few ratios": (
        {"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1)},
        r"compress_ratios: expected 9.*got 8",
    ),
    "ratios for some of the draft layers": (
        {"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 0)},
        r"compress_ratios: expected 9.*got 10",
    ),
    "a window-only KV source": (
        {"kv_source_layer_ids": (1, 2, 4, 5), "index_source_layer_ids": (1, 2, 4, 5, 7)},
        r"kv_source_layer_ids: .*layer 1 .*ratio 0",
    ),
    "a window-only index source": (
        {"index_source_layer_ids": (0, 2, 4, 5, 7)},
        r"index_source_layer_ids: .*layer 0 .*ratio 0",
    ),
    "a source behind the last layer": (
        {"index_source_layer_ids": (2, 4, 5, 7, 9)},
        r"index_source_layer_ids: .*9",
    ),
    "sources out of order": (
        {"kv_source_layer_ids": (4, 2, 5)},
        r"kv_source_layer_ids: .*\[4, 2, 5\]",
    ),
    "a source named twice": (
        {"index_source_layer_ids": (2, 2, 4, 5, 7)},
        r"index_source_layer_ids: .*\[2, 2, 4, 5, 7\]",
    ),
    "a pool at a layer that is no KV source": (
        {"candidate_source_layer_id": 7},
        r"candidate_source_layer_id: layer 7 ",
    ),
    "a pool before the last KV source": (
        {"candidate_source_layer_id": 4},
        r"candidate_source_layer_id: layer 4 ",
    ),
    "a pool behind the last layer": (
        {"candidate_source_layer_id": 99},
        r"candidate_source_layer_id: layer 99 ",
    ),
    "a pool smaller than top-k": (
        {"candidate_topk_blocks": 1},
        r"index_topk: .*1 x 4 .*top-6",
    ),
    "an empty pool": (
        {"candidate_topk_blocks": 0},
        r".*candidate_topk_blocks",
    ),
    "blocks of nothing": (
        {"candidate_block_size": 0},
        r".*candidate_block_size",
    ),
    "Engram in a layer that does not exist": (
        {"engram_layer_ids": (1, 9)},
        r"engram_layer_ids: .*9",
    ),
    "an Engram module without a table": (
        {"engram_num_embeddings": (434,)},
        r"engram_num_embeddings: .*per engram layer",
    ),
    "a draft that reads a layer that does not exist": (
        {"dspark_target_layer_ids": (6, 7, 9)},
        r"dspark_target_layer_ids: .*9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_plan_is_refused_in_one_sentence_that_names_the_field(what):
    changes, sentence = IMPOSSIBLE[what]
    with pytest.raises(ValueError, match=f"^{sentence}") as refusal:
        TINY.but(**changes)
    assert "\n" not in str(refusal.value)


def test_a_pool_as_large_as_top_k_is_large_enough():
    assert TINY.but(candidate_topk_blocks=2, candidate_block_size=3).plan == TINY.plan


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_model_that_begins_with_reuse_is_refused_by_its_first_layer(ratio):
    with pytest.raises(ValueError, match="layer 0 reuses"):
        oracles.small_config(
            num_hidden_layers=3,
            compress_ratios=(ratio,) * 3,
            kv_source_layer_ids=(1,),
            index_source_layer_ids=(1,),
            candidate_source_layer_id=None,
            engram_layer_ids=(),
            engram_num_embeddings=(),
        )
