"""The whole gradient: along random directions, of packs of documents, in every format.

Choices (experts, top-k, pools) are constants of a gradient. A difference that crossed one would be
off by many orders of magnitude more than the tolerance, so no choice flips in these tests.
"""

import numpy as np
import pytest
from compare import assert_close, assert_same
from oracles import small_classes, small_config
from test_train_difference import float64

from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32, OFFICIAL, WEIGHT_FP8, quantize_weight
from dsv41.tensors import expected_tensors, flatten, nest
from dsv41.train import model as train
from dsv41.train.losses import cross_entropy
from dsv41.train.model import Documents, Options, evaluate, loss_and_grads, stored_weights

# where few hidden numbers are near the clamp: a difference that pushes one across it is wrong
CONFIG = small_config(vision_config=None, swiglu_limit=3.0)
CLASSES = small_classes(CONFIG)
NEXT = Options(CLASSES, balance=0.0, index=0.0)
ALL = Options(CLASSES, balance=0.3, index=1.0)
LENGTHS = (9, 1, 6, 2)


def _drawn():
    """Flat float parameters; Engram tables too."""
    leaves = flatten(random_params(CONFIG, np.random.default_rng(0)))
    for name in [n for n in leaves if n.endswith("embed.scale")]:
        table = name.replace("scale", "weight")
        leaves[table] = WEIGHT_FP8.dequantize(leaves[table], leaves.pop(name))
    return leaves


DRAWN = _drawn()


def masters(dtype=np.float64):
    return {name: leaf.astype(dtype) for name, leaf in DRAWN.items()}


def documents(lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size - 1, n) for n in lengths]


def run(leaves, docs, options=ALL, numerics=FLOAT32):
    loss, grads, info = loss_and_grads(nest(leaves), CONFIG, docs, numerics, options)
    return loss, {name: _dense(g, leaves[name]) for name, g in flatten(grads).items()}, info


def _dense(grad, like):
    if not isinstance(grad, tuple):
        return grad
    whole = np.zeros_like(like)
    whole[grad[0]] = grad[1]
    return whole


def group(name):
    """The tensor's kind: its name without layer and expert numbers."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def check_directions(total, leaves, grads, names, rel=1e-6, step=1e-6):
    """For each kind of tensor, the slope of total() along one random direction."""
    rng = np.random.default_rng(7)
    for kind in sorted({group(name) for name in names}):
        own = [name for name in names if group(name) == kind]
        before = {name: leaves[name] for name in own}
        ways = {name: rng.normal(size=leaves[name].shape) for name in own}
        sides = []
        for sign in (1, -1):
            leaves.update({name: before[name] + sign * step * ways[name] for name in own})
            sides.append(total())
        leaves.update(before)
        slope = (sides[0] - sides[1]) / (2 * step)
        want = sum(np.sum(grads[name] * ways[name]) for name in own)
        size = np.sqrt(sum(np.sum(grads[name] ** 2) for name in own))
        assert size > 0, f"{kind}: no gradient at all"
        assert abs(slope - want) < rel * size, f"{kind}: slope {slope}, gradient says {want}"


# ---- differences ------------------------------------------------------------------------------


@float64()
def test_the_next_token_loss_along_random_directions_of_every_kind_of_tensor():
    leaves, docs = masters(), documents()
    _, grads, _ = run(leaves, docs, NEXT)

    def total():
        nats, count = evaluate(nest(leaves), CONFIG, docs, FLOAT32, NEXT)
        return nats / count

    check_directions(total, leaves, grads, grads)


@float64()
def test_the_balance_loss_joins_in():
    leaves, docs = masters(), documents((5, 3))
    options = Options(CLASSES, balance=50.0, index=0.0)
    _, grads, _ = run(leaves, docs, options)
    names = [n for n in grads if n.endswith(("gate.weight", "ffn_norm.weight", "embed.weight"))]
    check_directions(lambda: run(leaves, docs, options)[0], leaves, grads, names)


@float64()
def test_the_index_loss_moves_the_indexers():
    leaves, docs = masters(), documents()
    _, grads, _ = run(leaves, docs)
    names = [n for n in grads if ".indexer." in n]
    assert len(names) == 16
    check_directions(lambda: run(leaves, docs)[0], leaves, grads, names)


@float64()
def test_the_index_loss_moves_nothing_else():
    leaves, docs = masters(), documents()
    _, without, info = run(leaves, docs, NEXT)
    _, with_index, _ = run(leaves, docs, Options(CLASSES, balance=0.0, index=5.0))
    assert info["index"] == 0
    assert {n for n in with_index if n not in without} == {n for n in with_index if "indexer" in n}
    for name in without:
        assert_close(name, with_index[name], without[name])


def test_float32_gradients_are_close_to_float64_ones():
    docs = documents()
    _, single, _ = run(masters(np.float32), docs)
    with float64():
        _, double, _ = run(masters(), docs)
    assert set(single) == set(double)
    for name, grad in single.items():
        assert grad.dtype == np.float32 and double[name].dtype == np.float64, name
        assert_close(name, grad, double[name], rel=1e-3, floor=1e-6)


# ---- what has a gradient ----------------------------------------------------------------------


def test_every_tensor_but_selection_biases_has_one():
    leaves = masters(np.float32)
    _, grads, info = run(leaves, documents())
    assert set(leaves) - set(grads) == {n for n in leaves if n.endswith("gate.bias")}
    assert all(grads[n].shape == leaves[n].shape for n in grads)
    assert all(np.isfinite(g).all() for g in grads.values())
    assert sorted(info["load"]) == list(range(CONFIG.num_hidden_layers))
    assert all(load.sum() == 2 * sum(LENGTHS) for load in info["load"].values())


def test_engram_rows_are_named_once_and_only_those_that_were_read():
    _, grads, _ = loss_and_grads(nest(masters(np.float32)), CONFIG, documents(), FLOAT32, NEXT)
    for layer in CONFIG.engram_layer_ids:
        rows, values = grads["layers"][layer]["engram"]["embed"]["weight"]
        assert np.all(np.diff(rows) > 0) and values.shape == (len(rows), CONFIG.engram_head_dim)
        assert len(rows) < sum(LENGTHS) * 6


def test_tokens_that_do_not_occur_have_no_embedding_gradient():
    docs = documents()
    _, grads, _ = run(masters(np.float32), docs)
    moved = np.flatnonzero(np.any(grads["embed.weight"] != 0, axis=1))
    assert_same("ids", moved, np.unique(np.concatenate(docs)))


def test_nothing_is_left_behind(monkeypatch):
    """Readers come before their sources on the way back, and every source takes what it is owed."""
    made = []
    back = train.Back
    monkeypatch.setattr(train, "Back", lambda *args: made.append(back(*args)) or made[0])
    run(masters(np.float32), documents())
    assert made[0].main_kv == made[0].keys == made[0].attention == {}


# ---- documents --------------------------------------------------------------------------------


@float64()
def test_documents_of_a_pack_do_not_touch_each_other():
    leaves, docs = masters(), documents((7, 3, 1, 4))
    _, _, info = run(leaves, docs)
    alone = [run(leaves, [d]) for d in docs]
    counts = np.array([len(d) - 1 for d in docs])
    assert info["targets"] == sum(counts)
    nats = sum(n * each[2]["next_token"] for n, each in zip(counts, alone, strict=True))
    assert abs(info["next_token"] - nats / sum(counts)) < 1e-12
    tokens = np.array([len(d) for d in docs])
    for part in ("balance", "index"):
        mean = sum(n * each[2][part] for n, each in zip(tokens, alone, strict=True)) / sum(tokens)
        assert abs(info[part] - mean) < 1e-12, part
    parts = [run(leaves, [d], NEXT)[1] for d in docs]
    _, pack, _ = run(leaves, docs, NEXT)
    for name, grad in pack.items():
        want = sum(n * each[name] for n, each in zip(counts, parts, strict=True)) / sum(counts)
        assert_close(name, grad, want, rel=1e-9)


@float64()
def test_the_order_of_documents_does_not_matter():
    leaves, docs = masters(), documents()
    loss, grads, _ = run(leaves, docs)
    again, other, _ = run(leaves, docs[::-1])
    assert abs(loss - again) < 1e-12
    for name, grad in grads.items():
        assert_close(name, other[name], grad, rel=1e-9)


def test_documents_of_one_token_predict_nothing():
    loss, grads, info = run(masters(np.float32), documents((1, 1)), NEXT)
    assert loss == 0 and info["targets"] == 0
    assert all(np.all(g == 0) for g in grads.values())


def test_only_wanted_tokens_are_predicted():
    docs = documents((6, 3))
    wanted = [np.array([1, 0, 0, 1, 0, 1], bool), np.array([1, 0, 0], bool)]
    rows, tokens = Documents(docs, wanted=wanted).targets()
    assert rows.tolist() == [2, 4]
    assert tokens.tolist() == docs[0][[3, 5]].tolist()
    _, _, info = run(masters(np.float32), Documents(docs, wanted=wanted))
    assert info["targets"] == 2


# ---- images -----------------------------------------------------------------------------------


def with_image(images=None):
    docs = documents((8, 5))
    types = [np.array([-1, -1, 0, 0, 1, -1, -1, -1]), np.array([-1, 0, -1, -1, -1])]
    return Documents(docs, types=types, images=images)


def test_an_image_token_is_read_but_never_predicted():
    rows, _ = with_image().targets()
    assert rows.tolist() == [0, 4, 5, 6, 9, 10, 11]


@float64()
def test_image_embeddings_get_the_gradient_that_their_tokens_would_have_had():
    leaves = masters()
    leaves["images"] = np.random.default_rng(5).normal(size=(4, CONFIG.hidden_size))

    def total():
        params = {k: v for k, v in leaves.items() if k != "images"}
        nats, count = evaluate(nest(params), CONFIG, with_image(leaves["images"]), FLOAT32, NEXT)
        return nats / count

    params = {k: v for k, v in leaves.items() if k != "images"}
    _, grads, info = run(params, with_image(leaves["images"]), NEXT)
    grads["images"] = info["images"]
    check_directions(total, leaves, grads, ["images", "embed.weight"])


@float64()
def test_without_given_embeddings_an_image_token_reads_its_id():
    leaves = masters()
    ids = np.concatenate(with_image().ids)
    inside = np.concatenate(with_image().types) >= 0
    given = with_image(leaves["embed.weight"][ids[inside]])
    loss, grads, info = run(leaves, with_image(), NEXT)
    again, other, given_info = run(leaves, given, NEXT)
    assert loss == again and info["images"] is None
    total = other["embed.weight"].copy()
    np.add.at(total, ids[inside], given_info["images"])
    assert_close("embed", total, grads["embed.weight"])


def test_images_have_their_own_load():
    info = run(masters(np.float32), with_image())[2]
    assert all(load.sum(axis=1).tolist() == [2 * 9, 2 * 4] for load in info["load"].values())


# ---- the forward pass is the model's ----------------------------------------------------------


def quantized(leaves):
    """The parameters as a checkpoint stores them: codes and scales, or bf16."""
    specs, stored = expected_tensors(CONFIG), {}
    plain = flatten(stored_weights(nest(leaves), CONFIG))
    for name, leaf in leaves.items():
        layout = specs[name].layout
        if layout == "table":
            stored[name], stored[name.replace("weight", "scale")] = WEIGHT_FP8.quantize(leaf)
        else:
            stored[name] = quantize_weight(leaf, layout) if layout else plain[name]
    return nest(stored)


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_the_loss_is_that_of_the_stored_model(numerics):
    """Masters rounded on the way in give the logits of the checkpoint with codes and scales."""
    docs = documents((9, 6))
    logits = Model(CONFIG, quantized(masters(np.float32)), CLASSES).logits(docs, numerics)
    keep = [t for t in range(14) if t != 8]  # the last token of a document predicts nothing
    want = np.mean(cross_entropy(logits[keep], np.concatenate([d[1:] for d in docs]))[0])
    stored = stored_weights(nest(masters(np.float32)), CONFIG)
    loss, grads, _ = loss_and_grads(stored, CONFIG, docs, numerics, NEXT)
    nats, count = evaluate(stored, CONFIG, docs, numerics, NEXT)
    assert abs(loss - want) < 1e-5 and abs(nats / count - want) < 1e-5
    parts = (g[1] if isinstance(g, tuple) else g for g in flatten(grads).values())
    assert all(np.isfinite(g).all() for g in parts)


def test_rounded_training_moves_about_where_exact_training_moves():
    leaves, docs = masters(np.float32), documents((9, 6))
    _, exact, _ = run(leaves, docs, NEXT)
    stored = stored_weights(nest(leaves), CONFIG)
    _, rounded, _ = loss_and_grads(stored, CONFIG, docs, OFFICIAL, NEXT)
    rounded = {name: _dense(g, leaves[name]) for name, g in flatten(rounded).items()}
    size = np.sqrt(sum(np.sum(g**2) for g in exact.values()))
    size *= np.sqrt(sum(np.sum(g**2) for g in rounded.values()))
    cosine = sum(np.sum(g * rounded[name]) for name, g in exact.items()) / size
    assert 0.3 < cosine < 0.9999  # random weights: rounding makes other choices in every layer


def test_a_stored_table_is_read_row_by_row():
    leaves = masters(np.float32)
    name = "layers.3.engram.embed.weight"
    table = flatten(stored_weights(nest(leaves), CONFIG))[name]
    rows = np.array([[5, 2]])
    assert_same("rows", table[rows], WEIGHT_FP8.fake(leaves[name])[rows])


# ---- memory -----------------------------------------------------------------------------------


def test_blocks_of_logits_add_up_to_the_whole(monkeypatch):
    leaves, docs = masters(np.float32), documents()
    loss, grads, _ = run(leaves, docs)
    monkeypatch.setattr(train, "block_elements", lambda x: 2 * CONFIG.vocab_size)
    again, other, _ = run(leaves, docs)
    assert abs(loss - again) < 1e-5
    assert_close("head", other["head.weight"], grads["head.weight"])


def test_the_cache_of_a_step_is_its_own():
    leaves, docs = nest(masters(np.float32)), documents((4,))
    call = train.open_call(leaves, CONFIG, Documents(docs), FLOAT32, CLASSES)
    assert isinstance(call.cache, Cache) and call.cache.length == [0]
    assert call.batch.ids.tolist() == make_batch(docs, [0], [0]).ids.tolist()
