"""What the indexer and the drafter are taught: their targets, computed again from the words.

    index   the attention that each selected entry got: joint softmax over window, selected entries
            and sink, summed over the heads of every layer that reads the selection, then made to
            sum to 1
    draft   slot k behind anchor a: the main model's distribution at a + k, as `logits` has it

A gradient that equals the differences of its own loss says nothing about these: a wrong target is
wrong in both. So here the losses themselves are compared with loops in float64. The checks take the
name of a package, so that test_train_mutants.py can ask them about broken copies.
"""

import importlib

import numpy as np
from compare import assert_close
from oracles import small_classes, small_config
from test_train_difference import float64

from dsv41.draft import Drafter
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.quant import FLOAT32, WEIGHT_FP8
from dsv41.rope import frequencies
from dsv41.tensors import flatten, nest

# ---- the index loss -----------------------------------------------------------------------------


def readers(count, ratio):
    """A window-only layer, then one index source and the Reuse layers behind it."""
    config = small_config(
        vision_config=None,
        num_hidden_layers=1 + count,
        compress_ratios=(0, *[ratio] * count),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    leaves = flatten(random_params(config, np.random.default_rng(0)))
    for name in leaves:
        if name.endswith("attn.wq_b.weight"):
            leaves[name] = 6 * leaves[name]  # far from uniform, and unlike from layer to layer
        if name.endswith("attn_sink"):
            leaves[name] = np.random.default_rng(len(name)).normal(size=leaves[name].shape)
    return config, {name: leaf.astype(np.float64) for name, leaf in leaves.items()}


def normed(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turned(x, config, ratio):
    """x (T, ..., C) at positions 0, 1, ..: complex numbers times unit ones."""
    freqs = frequencies(config, ratio)
    angle = np.arange(len(x), dtype=np.float32)[:, None] * freqs
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), len(freqs))
    tail = x[..., -2 * len(freqs) :]
    z = (tail[..., 0::2] + 1j * tail[..., 1::2]) * (np.cos(angle) + 1j * np.sin(angle))
    pairs = np.stack([z.real, z.imag], axis=-1).reshape(tail.shape)
    return np.concatenate([x[..., : -2 * len(freqs)], pairs], axis=-1)


def attention_input(layer, leaves, trace, config):
    """What the sublayer in front left behind, collapsed and normed, (T, D)."""
    streams, pre = (trace[f"L{layer - 1:02}.{name}"] for name in ("x_out", "hc_ffn.pre"))
    x = np.einsum("ts,tsd->td", pre, streams)
    return normed(x, leaves[f"layers.{layer}.attn_norm.weight"], config.rms_norm_eps)


def attention_of(layer, leaves, trace, config):
    """(T, K): the weight of every selected entry, summed over the layer's heads."""
    p = {n: leaves[f"layers.{layer}.attn.{n}.weight"] for n in ("wq_a", "q_norm", "wq_b", "wkv")}
    x, eps = attention_input(layer, leaves, trace, config), config.rms_norm_eps
    ratio = config.compress_ratios[layer]
    q = normed(x @ p["wq_a"].T, p["q_norm"], eps) @ p["wq_b"].T
    q = turned(q.reshape(len(x), config.num_attention_heads, -1), config, ratio)
    norm = leaves[f"layers.{layer}.attn.kv_norm.weight"]
    window = turned(normed(x @ p["wkv"].T, norm, eps), config, ratio)
    chosen, main, out = trace["L01.idx.topk"], trace["L01.cmp.main_kv"], []
    for t in range(len(x)):
        selected = main[chosen[t][chosen[t] >= 0]]
        kv = np.concatenate([selected, window[max(0, t + 1 - config.sliding_window) : t + 1]])
        weight = np.zeros(len(chosen[t]))
        for head, sink in enumerate(leaves[f"layers.{layer}.attn.attn_sink"]):
            e = np.exp([*(kv @ q[t, head] / np.sqrt(config.head_dim)), sink])
            weight[: len(selected)] += e[: len(selected)] / e.sum()
        out.append(weight)
    return np.array(out)


def index_loss_by_hand(ids, config, leaves):
    """-> sum over the document's queries of the index loss, and its gradient by weights_proj."""
    trace, loss, heads = {}, 0.0, config.index_n_heads
    with float64():
        Model(config, nest(leaves)).logits(ids, FLOAT32, trace)
    layers = range(1, config.num_hidden_layers)
    attention = sum(attention_of(layer, leaves, trace, config) for layer in layers)
    x, grad = attention_input(1, leaves, trace, config), np.zeros((heads, config.hidden_size))
    for t, chosen in enumerate(trace["L01.idx.topk"]):
        if (count := np.count_nonzero(chosen >= 0)) == 0:
            continue
        open_dots = np.maximum(trace["L01.idx.q"][t] @ trace["L01.idx.k"][chosen[:count]].T, 0)
        scores = trace["L01.idx.w"][t] @ open_dots
        guess = np.exp(scores) / np.exp(scores).sum()
        target = attention[t, :count] / attention[t, :count].sum()
        loss += np.sum(target * np.log(target / guess))
        grad += np.outer(open_dots @ (guess - target), x[t]) / np.sqrt(
            heads * config.index_head_dim
        )
    return loss, grad


def check_index_target(package="dsv41"):
    """Every reader of a selection has its say, by its heads' joint softmax."""
    train = importlib.import_module(f"{package}.train.model")
    exact = importlib.import_module(f"{package}.quant").FLOAT32
    for count, ratio in ((2, 1), (2, 2), (3, 1)):
        config, leaves = readers(count, ratio)
        documents = [np.random.default_rng(n).integers(0, 60, n) for n in (12, 7)]
        with float64(package):
            _, grads, info = train.loss_and_grads(
                nest(leaves), config, documents, exact, train.Options(balance=0.0)
            )
        parts = [index_loss_by_hand(ids, config, leaves) for ids in documents]
        name = f"{count} readers, ratio {ratio}"
        assert_close(name, np.float64(info["index"]), sum(p[0] for p in parts) / 19, rel=1e-9)
        found = grads["layers"][1]["attn"]["indexer"]["weights_proj"]["weight"]
        assert_close(f"{name}, gradient", found, sum(p[1] for p in parts) / 19, rel=1e-9)


def test_the_indexer_is_taught_by_every_reader_of_its_selection():
    check_index_target()


def test_readers_disagree_so_that_one_of_them_is_not_all():
    config, leaves = readers(2, 1)
    trace = {}
    with float64():
        Model(config, nest(leaves)).logits(np.arange(12), FLOAT32, trace)
    shares = [attention_of(layer, leaves, trace, config) for layer in (1, 2)]
    shares = [s[5:] / s[5:].sum(axis=1, keepdims=True) for s in shares]
    assert np.abs(shares[0] - shares[1]).max() > 0.1


# ---- the drafter's losses -----------------------------------------------------------------------

DRAFTED = small_config(
    vision_config=None,
    num_nextn_predict_layers=2,
    compress_ratios=(0, 1, 1, 2, 2, 0, 2, 1, 1, 1, 1, 0, 0),
    dspark_target_layer_ids=(3, 8, 10),
    dspark_block_size=3,
    dspark_noise_token_id=7,
)
ANCHORS = [np.array([1, 4, 8]), np.array([2, 4])]  # two blocks end beyond their document


def drafting_model():
    stored = random_params(DRAFTED, np.random.default_rng(0))
    sharper = {"head": {"weight": 2 * stored["head"]["weight"]}}  # main model far from drafter
    return Model(DRAFTED, stored | sharper, small_classes(DRAFTED))


def floats(params):
    leaves = flatten(params)
    for name in [n for n in leaves if n.endswith("embed.scale")]:
        table = name.replace("scale", "weight")
        leaves[table] = WEIGHT_FP8.dequantize(leaves[table], leaves.pop(name))
    return nest(leaves)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def drafted(model, ids, anchor):
    """A block as in use: h (B, D) of a Drafter that has observed the tokens before the anchor."""
    cache, features = model.new_cache(FLOAT32), []
    slot = model.open(cache)
    model.step(cache, [slot], [ids[:anchor]], features=features)
    drafter = Drafter(model, cache)
    drafter.observe(slot, np.arange(anchor), np.concatenate(features, axis=1))
    return drafter.hidden([slot], [ids[anchor]])[0].astype(float)


def slot_losses(model, hidden, known, truth, main_logits):
    """One slot: hidden (D,), the token known to the Markov head, the true next one, and the main
    model's logits (V,) at the slot's position -> ce, tv, confidence loss.
    """
    p = model.params["mtp"][DRAFTED.num_nextn_predict_layers - 1]
    e = p["markov_head"]["embed"]["weight"][known].astype(float)
    x = normed(hidden, p["norm"]["weight"], DRAFTED.rms_norm_eps)
    guess = softmax(model.params["head"]["weight"] @ x + p["markov_head"]["head"]["weight"] @ e)
    distance = np.abs(guess - softmax(main_logits)).sum()
    c = (p["confidence_head"]["proj"]["weight"] @ np.concatenate([hidden, e]))[0]
    kept = 1 / (1 + np.exp(-c))
    label = 1 - distance / 2
    return -np.log(guess[truth]), distance, -label * np.log(kept) - (1 - label) * np.log(1 - kept)


def draft_losses_by_hand(model, documents, decay):
    """-> weighted means of ce, tv and confidence over all slots that have a next token."""
    found, weights = [], []
    for ids, anchors in zip(documents, ANCHORS, strict=True):
        logits = model.logits(ids, FLOAT32).astype(float)
        for anchor in anchors:
            for k, hidden in enumerate(drafted(model, ids, anchor)):
                at = anchor + k
                if at + 1 < len(ids):
                    found.append(slot_losses(model, hidden, ids[at], ids[at + 1], logits[at]))
                    weights.append(np.exp(-k / decay))
    return np.average(found, axis=0, weights=weights)


def check_draft_target(package="dsv41"):
    """Slot k behind anchor a is compared with the main model at a + k and with token a + k + 1."""
    train = importlib.import_module(f"{package}.train.draft")
    exact = importlib.import_module(f"{package}.quant").FLOAT32
    options = importlib.import_module(f"{package}.train.model").Options(small_classes(DRAFTED))
    docs = importlib.import_module(f"{package}.train.model").Documents
    documents = [np.random.default_rng(n).integers(0, 60, n) for n in (11, 6)]
    model = drafting_model()
    _, _, info = train.draft_loss_and_grads(
        floats(model.params), DRAFTED, docs(documents), ANCHORS, exact, options, decay=2.0
    )
    want = draft_losses_by_hand(model, documents, decay=2.0)
    for name, value in zip(("ce", "tv", "confidence"), want, strict=True):
        assert_close(name, np.float64(info[name]), value, rel=1e-5)


def test_the_drafter_is_compared_with_what_the_main_model_says_at_the_same_position():
    check_draft_target()
