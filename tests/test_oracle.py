"""The NumPy text against a second model written from the definitions, on shapes of its own."""

from pathlib import Path

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same

from dsv41.checkpoint import Checkpoint, load_params
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32
from dsv41.token_classes import load_token_classes

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a"
MIXED = oracles.small_config()
# nothing optional: no Engram, pool, image bias or shared expert, no swiglu clamp; window of one
PLAIN = oracles.small_config(
    num_hidden_layers=6,
    num_attention_heads=3,
    o_groups=1,
    o_lora_rank=32,
    compress_ratios=(2, 2, 0, 1, 1, 1),
    kv_source_layer_ids=(0, 3),
    index_source_layer_ids=(0, 3, 5),
    candidate_source_layer_id=None,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    hc_mult=2,
    sliding_window=1,
    index_topk=4,
    num_experts_per_tok=1,
    n_shared_experts=0,
    swiglu_limit=0.0,
    vision_config=None,
    image_token_id=None,
)
# a pool of single entries over pairs, Engram before the first layer, unnormalised router weights
PAIRS = oracles.small_config(
    num_hidden_layers=6,
    num_attention_heads=4,
    compress_ratios=(0, 1, 2, 2, 2, 2),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 4, 5),
    candidate_source_layer_id=2,
    candidate_block_size=1,
    candidate_topk_blocks=5,
    hc_mult=4,
    sliding_window=2,
    norm_topk_prob=False,
    engram_layer_ids=(0, 1),
    engram_max_ngram_size=4,
    engram_n_heads=1,
    engram_vocab_size=16,
    engram_num_embeddings=(59, 97),
)
# the seeds are those whose choices are no near ties, so that float32 must choose the same
CASES = {"mixed": (MIXED, 37, 5), "plain": (PLAIN, 23, 1), "pairs": (PAIRS, 31, 5)}
MARGIN = 1e-4


def a_request(config, length, seed):
    """ids and types, with an image span (delimiters, cells, line ends) where the model has one."""
    ids = np.random.default_rng(seed).integers(0, 60, length)
    types = np.full(length, -1)
    if config.image_token_id is not None:
        types[9:15] = [0, 1, 1, 2, 1, 3]
        ids[9:15] = config.image_token_id
    return ids, types


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    config, length, seed = CASES[request.param]
    params = random_params(config, np.random.default_rng(3))
    classes = oracles.small_classes(config)
    ids, types = a_request(config, length, seed)
    want = oracles.forward(params, config, classes, ids, types)
    return Model(config, params, classes), ids, types, want


def listed(index):
    """Rows of numbers without their -1."""
    return [[n for n in row if n >= 0] for row in index.tolist()]


def assert_same_choices(trace, want):
    """Every selection, pool, expert and table row of the oracle `want` is in `trace`."""
    for layer, selected in want.selected.items():
        assert listed(trace[f"L{layer:02d}.idx.topk"]) == selected, f"top-k of layer {layer}"
    for layer, chosen in want.experts.items():
        assert trace[f"L{layer:02d}.moe.expert"].tolist() == chosen, f"experts of layer {layer}"
    for layer, rows in want.engram_rows.items():
        assert trace[f"L{layer:02d}.engram.rows"].tolist() == rows, f"Engram rows of layer {layer}"
    for layer, blocks in want.pool.items():
        mask, size = trace[f"L{layer:02d}.cand.mask"], want.config.candidate_block_size
        pool = [sorted({j // size for j in np.flatnonzero(row).tolist()}) for row in mask]
        assert pool == blocks, f"pool of layer {layer}"


def test_the_oracle_itself_agrees_with_the_released_code():
    checkpoint = Checkpoint(GOLDEN)
    params, classes = load_params(checkpoint), load_token_classes(GOLDEN)
    golden = np.load(GOLDEN / "prompt_fp32.npz")
    got = oracles.forward(params, checkpoint.config, classes, golden["ids"][0, :72])
    assert_same_choices(golden, got)
    for layer, x_out in got.x_out.items():
        want = golden[f"L{layer:02d}.x_out"]
        assert_close(f"x_out of layer {layer}", x_out, want, rel=1e-5, floor=1e-6)
    assert_close("logits", got.logits, golden["logits"][0], rel=1e-5, floor=1e-6)


def test_the_choices_of_these_models_are_no_near_ties(case):
    assert case[3].margin > MARGIN


def test_the_cases_make_every_kind_of_choice():
    """A pool that leaves something out, a top-k that does, and a tie that the rule decides."""
    config, length, seed = CASES["mixed"]
    ids, types = a_request(config, length, seed)
    model = Model(
        config, random_params(config, np.random.default_rng(3)), oracles.small_classes(config)
    )
    trace = {}
    model.logits(ids, FLOAT32, trace, token_types=types)
    mask, score = trace["L07.cand.mask"], trace["L09.idx.score"]
    assert not mask[-1].all() and np.isfinite(score[-1]).sum() > config.index_topk
    zeros = [np.sum(row == 0) > 1 for row in trace["L07.idx.score"]]
    assert any(zeros), "no query has two entries to which no head responds"


def test_every_layer_agrees_with_the_oracle(case):
    model, ids, types, want = case
    trace = {}
    logits = model.logits(ids, FLOAT32, trace, token_types=types)
    assert_same_choices(trace, want)
    for layer, gates in want.gates.items():
        assert_close(f"gates of layer {layer}", trace[f"L{layer:02d}.engram.gate"], np.array(gates))
    for layer, x_out in want.x_out.items():
        assert_close(f"x_out of layer {layer}", trace[f"L{layer:02d}.x_out"], x_out)
    assert_close("logits", logits, want.logits)


@pytest.mark.parametrize("cuts", ["one by one", [1, 10, 2], [13, 1], [7, 8]])
def test_a_prompt_in_pieces_agrees_with_the_oracle(case, cuts):
    """The image span, the window and open pairs are cut in the middle."""
    model, ids, types, want = case
    pieces = [1] * len(ids) if cuts == "one by one" else [*cuts, len(ids) - sum(cuts)]
    cache = model.new_cache(FLOAT32)
    slot, logits, at = model.open(cache), [], 0
    for n in pieces:
        piece = slice(at, at + n)
        logits.append(model.step(cache, [slot], [ids[piece]], [types[piece]]))
        at += n
    assert_close("logits", np.concatenate(logits), want.logits)


def test_a_request_in_a_batch_agrees_with_the_oracle(case):
    model, ids, types, want = case
    others = [ids[:1], ids[4:13], ids[20:22]]
    kinds = [types[:1], types[4:13], types[20:22]]
    logits = model.logits(
        [others[0], others[1], ids, others[2]],
        FLOAT32,
        token_types=[kinds[0], kinds[1], types, kinds[2]],
    )
    assert_close("logits", logits[10 : 10 + len(ids)], want.logits)


def test_an_image_row_comes_from_the_embedding_that_was_passed():
    config, length, seed = CASES["mixed"]
    params, classes = random_params(config, np.random.default_rng(3)), oracles.small_classes(config)
    ids, types = a_request(config, length, seed)
    embedding = params["embed"]["weight"][ids]
    image = np.random.default_rng(8).standard_normal((6, config.hidden_size))
    embedding[9:15] = image.astype(np.float32)
    want = oracles.forward(params, config, classes, ids, types, embedding)
    assert want.margin > MARGIN
    got = Model(config, params, classes).logits(
        ids, FLOAT32, token_types=types, embedding=embedding
    )
    assert_close("logits", got, want.logits)
    plain = oracles.forward(params, config, classes, ids, types)
    assert_same("before the image", want.logits[:9], plain.logits[:9])
    assert np.abs(want.logits[15:] - plain.logits[15:]).max() > 0.01
