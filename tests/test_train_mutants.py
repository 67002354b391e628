"""Deliberate bugs in the backward text: each must change a gradient that the other tests compare
with differences. A mutant is (name, file, text, replacement), built as in mutants.py.

Differences cannot see a wrong target, which is wrong in the loss too. Such mutants are also held
against the losses by hand in test_train_targets.py, which know nothing of the unchanged package.
"""

import importlib

import numpy as np
import pytest
from mutants import build
from oracles import small_classes, small_config
from test_train_targets import check_draft_target, check_index_target

import dsv41
from dsv41.init import random_params
from dsv41.quant import WEIGHT_FP8
from dsv41.tensors import flatten, nest

CONFIG = small_config(
    vision_config=None,
    num_nextn_predict_layers=2,
    compress_ratios=(0, 1, 1, 2, 2, 0, 2, 1, 1, 1, 1, 0, 0),
    dspark_target_layer_ids=(3, 8, 10),
    dspark_block_size=3,
    dspark_noise_token_id=7,
)
CLASSES = small_classes(CONFIG)
ANCHORS = [np.array([1, 4, 8]), np.array([2]), np.array([], int)]

MUTANTS = [
    # small operations
    (
        "norm's direction kept",
        "ops",
        "g - normed * np.mean(g * normed, axis=-1, keepdims=True)",
        "g",
    ),
    ("gain's gradient by x", "ops", "_over_rows(dy * normed)", "_over_rows(dy * x)"),
    ("weight sees unrounded x", "ops", "dy, numerics.activation.fake(x), weight", "dy, x, weight"),
    ("gate's clamp passes", "ops", "np.where(gate <= limit, dgate, 0)", "dgate"),
    ("up's clamp passes", "ops", "np.where(np.abs(up) <= limit, dup, 0)", "dup"),
    ("silu as a constant gate", "ops", "s * (1 + x * (1 - s))", "s"),
    ("root of softplus without 2", "ops", "sigmoid(x) / (2 * ", "sigmoid(x) / (1 * "),
    ("last row wins", "ops", "np.add.reduceat(values, first, axis=0)", "values[first]"),
    ("no row is the last row", "ops", "order = order[rows[order] >= 0]", "rows = rows % 61"),
    # position
    ("turned the same way", "rope", "inverse=not inverse", "inverse=inverse"),
    # attention
    ("scores without their mean", "sparse_attn", "p * (dp - delta) * scale", "p * dp * scale"),
    ("scores without scale", "sparse_attn", "(dp - delta) * scale", "(dp - delta)"),
    ("key only", "sparse_attn", "p.transpose(0, 2, 1) @ do + ds", "ds"),
    ("value only", "sparse_attn", " + ds.transpose(0, 2, 1) @ q ", " "),
    ("sink pulls", "sparse_attn", "-np.sum(left * delta", "np.sum(left * delta"),
    ("sink takes no weight", "sparse_attn", "keepdims=True) + rest", "keepdims=True)"),
    ("one head's share", "sparse_attn", "np.mean(p[:, :, recent:], axis=1)", "p[:, 0, recent:]"),
    (
        "output not turned",
        "sparse_attn",
        "rotate_backward(do, positions, freqs, inverse=True)",
        "do",
    ),
    ("query not turned", "sparse_attn", "rotate_backward(dq, positions, freqs)", "dq"),
    ("records not turned", "window", "rotate_backward(drecords, positions, freqs)", "drecords"),
    ("rows of one document", "window", "batch.count * width", "width"),
    # compression
    ("gates do not learn", "compress", "du * (u - pooled)", "0 * du"),
    ("gates learn from u alone", "compress", "du * (u - pooled)", "du * u"),
    (
        "groups of other tokens",
        "compress",
        "line_up(batch, ratio).members",
        "line_up(batch, ratio).members[::-1]",
    ),
    (
        "one of two projections",
        "compress",
        "dx[members.ravel()] += part",
        "dx[members.ravel()] = part",
    ),
    ("entry not turned", "compress", "return rotate_backward(dkv, positions, freqs)", "return dkv"),
    # indexer
    (
        "closed heads learn",
        "indexer",
        "np.where(dots > 0, dscores[:, None] * w[:, :, None], 0)",
        "dscores[:, None] * w[:, :, None]",
    ),
    (
        "heads weigh nothing",
        "indexer",
        "dscores[:, None] * w[:, :, None]",
        "dscores[:, None] + 0 * dots",
    ),
    ("head scale lost", "indexer", "(channels**-0.5 * heads**-0.5)", "1"),
    ("index keys not turned", "indexer", "rotate_backward(dkeys, positions, freqs)", "dkeys"),
    ("index queries not turned", "indexer", "rotate_backward(dq, positions, freqs)", "dq"),
    # streams
    ("one Sinkhorn pass", "mhc", "reversed(passes)", "passes[-1:]"),
    (
        "softmax not undone",
        "mhc",
        "dcomb - np.sum(dcomb * weights, axis=-1, keepdims=True)",
        "dcomb",
    ),
    ("columns divided as rows", "mhc", "for axis in [-2]", "for axis in [-1]"),
    ("statistic is a constant", "mhc", "dm @ fn - flat * by_rms", "dm @ fn"),
    ("post without its 2", "mhc", "2 * dpost * slope", "dpost * slope"),
    (
        "streams flow the other way",
        "mhc",
        "return comb @ dnew",
        "return comb.transpose(0, 2, 1) @ dnew",
    ),
    (
        "mixing transposed",
        "mhc",
        "streams @ dnew.transpose(0, 2, 1)",
        "dnew @ streams.transpose(0, 2, 1)",
    ),
    # experts
    ("weights grow together", "moe", "chosen.shape[1] > 1", "False"),
    ("routing factor lost", "moe", "dweight = dweight * factor", "pass"),
    ("unweighted expert", "moe", "dplain * weight[:, None]", "dplain"),
    ("last expert wins", "moe", "dx[row] += part", "dx[row] = part"),
    (
        "shared expert forgotten",
        "moe",
        'dx, grads["shared_experts"] = dx + part',
        'dx, grads["shared_experts"] = dx',
    ),
    # Engram
    ("gate without its root", "engram", "gate * (1 - gate) / (2 * root)", "gate * (1 - gate)"),
    (
        "gate open in images",
        "engram",
        "np.where(is_image, 0, sigmoid(",
        "np.where(False, 0, sigmoid(",
    ),
    (
        "key's length moves",
        "engram",
        "both * n_x * scale - a * n_key * scale**2",
        "both * n_x * scale",
    ),
    (
        "norm weights exchanged",
        "engram",
        "dboth * k_weight, dboth * q_weight",
        "dboth * q_weight, dboth * k_weight",
    ),
    # blocks
    (
        "KV of the first reader only",
        "block",
        "_add(back.main_kv, layer.kv_source, records[1])",
        "back.main_kv[layer.kv_source] = records[1]",
    ),
    (
        "keys of one index source",
        "block",
        "_add(back.keys, source, dkeys)",
        "back.keys[source] = dkeys",
    ),
    (
        "target of one reader",
        "block",
        "_add(back.attention, layer.index_source, share)",
        "back.attention[layer.index_source] = share",
    ),
    (
        "target of the first reader",
        "block",
        "_add(back.attention, layer.index_source, share)",
        "back.attention.setdefault(layer.index_source, share)",
    ),
    ("pre is not delayed", "block", "by_mixing, dpre_before, grads", "by_mixing, dpre, grads"),
    ("window forgotten", "block", "dx, grads = dx + by_window,", "dx, grads = dx,"),
    ("compressor's input forgotten", "block", "return dx + by_source,", "return dx,"),
    ("no balance", "block", "back.balance * dscores", "0 * dscores"),
    (
        "Engram after the block",
        "block",
        "engram_backward(dstreams, entered,",
        "engram_backward(dstreams, ffn[0],",
    ),
    # model
    ("mean over all tokens", "model", "dlogits / len(x), x[at]", "dlogits / (len(x) + 1), x[at]"),
    ("one stream of the embedding", "model", "np.sum(dstreams, axis=1)", "dstreams[:, 0]"),
    ("image predicted", "model", "== TEXT", "!= 99"),
    # losses
    ("certain of the target", "losses", "dlogits[at] -= 1", "dlogits[at] -= 0.9"),
    ("balance of the pack", "losses", "f = f[order]", "f = f[0 * order]"),
    (
        "attention as it is",
        "losses",
        "a = attention / np.where(total > 0, total, 1)",
        "a = attention",
    ),
    (
        "distance without softmax",
        "losses",
        "sign - np.sum(sign * p, axis=1, keepdims=True)",
        "sign",
    ),
    ("label without its half", "losses", "label = 1 - distance / 2", "label = 1 - distance"),
    # drafter
    (
        "sees its anchor twice",
        "draft",
        "np.arange(-config.sliding_window, 0)",
        "np.arange(1 - config.sliding_window, 1)",
    ),
    ("context of one stage", "draft", "back.context += by_context", "back.context = by_context"),
    ("compared one token late", "draft", "final[main[at]]", "final[main[at] - 1]"),
    ("predicts its own token", "draft", "behind[main], -1)", "behind[main - 1], -1)"),
    (
        "knows a token too old",
        "draft",
        "ids[main.ravel()], np.max",
        "ids[main.ravel() - 1], np.max",
    ),
    ("late slots weigh alike", "draft", "np.exp(-np.arange(size) / decay)", "1"),
    ("confidence without the token", "draft", "de + dboth[:, width:]", "de"),
    ("confidence without the state", "draft", "dhidden + dboth[:, :width]", "dhidden"),
]

BY_HAND = {  # whose target is wrong, and who knows the right one
    "one head's share": check_index_target,
    "sink takes no weight": check_index_target,
    "target of one reader": check_index_target,
    "target of the first reader": check_index_target,
    "sees its anchor twice": check_draft_target,
    "compared one token late": check_draft_target,
    "predicts its own token": check_draft_target,
    "knows a token too old": check_draft_target,
    "late slots weigh alike": check_draft_target,
    "label without its half": check_draft_target,
}


def _floats():
    leaves = flatten(random_params(CONFIG, np.random.default_rng(0)))
    for name in [n for n in leaves if n.endswith("embed.scale")]:
        table = name.replace("scale", "weight")
        leaves[table] = WEIGHT_FP8.dequantize(leaves[table], leaves.pop(name))
    return leaves


FLOATS = _floats()


def gradients(package):
    """Every gradient of one exact pack with an image, one rounded pack and one drafted pack."""
    model, draft = (importlib.import_module(f"{package}.train.{m}") for m in ("model", "draft"))
    quant = importlib.import_module(f"{package}.quant")
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 60, n) for n in (11, 6, 1)]
    types = [np.where(np.arange(len(d)) == 3, 0, -1) for d in ids]
    images = rng.normal(size=(2, CONFIG.hidden_size)).astype(np.float32)
    exact = model.Documents(ids, types, images=images)
    options, params = model.Options(CLASSES, 50.0, 1.0), nest(FLOATS)
    found = [model.loss_and_grads(params, CONFIG, exact, quant.FLOAT32, options)]
    stored = model.stored_weights(params, CONFIG)
    found += [model.loss_and_grads(stored, CONFIG, ids[:2], quant.OFFICIAL, options)]
    text = model.Documents(ids)
    found += [draft.draft_loss_and_grads(params, CONFIG, text, ANCHORS, quant.FLOAT32, options)]
    images = {"images": found[0][2]["images"]}
    return [flatten(grads) for _, grads, _ in found] + [images]


def differing(package, want):
    """Names of gradients that are not those of the unchanged package."""
    try:
        found = gradients(package)
    except Exception as error:  # a crash is noticed too
        return [f"{type(error).__name__}: {error}"]
    return [n for a, b in zip(want, found, strict=True) for n in a if not _equal(a[n], b[n])]


def _equal(a, b):
    a, b = (x[1] if isinstance(x, tuple) else x for x in (a, b))
    return a.shape == b.shape and np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


@pytest.fixture(scope="module")
def want():
    return gradients(dsv41.__name__)


def test_a_copy_has_the_same_gradients(want, tmp_path):
    build(tmp_path, "dsv41_same")
    assert differing("dsv41_same", want) == []


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m[0] for m in MUTANTS])
def test_mutant_is_noticed(number, want, tmp_path):
    _, module, *change = MUTANTS[number]
    build(tmp_path, f"dsv41_backward_{number}", f"train/{module}.py", *change)
    assert differing(f"dsv41_backward_{number}", want)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_wrong_target_is_noticed_by_hand(name, tmp_path):
    number = [m[0] for m in MUTANTS].index(name)
    _, module, *change = MUTANTS[number]
    build(tmp_path, f"dsv41_target_{number}", f"train/{module}.py", *change)
    with pytest.raises(AssertionError, match="error ratio"):
        BY_HAND[name](f"dsv41_target_{number}")
