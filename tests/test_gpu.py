"""The text on CUDA arrays: the same choices, the same numbers to rounding. Run `make test-gpu`."""

from dataclasses import replace

import numpy as np
import pytest
from reference import MODES, PROMPT, arrays, model

from dsv41 import FLOAT32, OFFICIAL
from dsv41.dispatch import beside, to_host
from dsv41.init import random_params
from dsv41.mhc import initial_streams
from dsv41.presets import preset
from dsv41.tensors import flatten
from dsv41.train.block import Back, block_backward, block_forward
from dsv41.train.draft import draft_loss_and_grads, sample_anchors
from dsv41.train.loop import Trainer, to_masters
from dsv41.train.model import (
    Documents,
    Options,
    embed,
    loss_and_grads,
    open_call,
    stored_weights,
)
from dsv41.train.run import Run

pytestmark = pytest.mark.gpu
CONFIG = preset("tiny").but(vision_config=None)
CLASSES = np.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size


@pytest.fixture(scope="module")
def like(cupy):
    """An empty CuPy array to live next to."""
    return cupy.zeros(0, cupy.float32)


@pytest.mark.parametrize("mode", list(MODES))
def test_the_reference_prompt_chooses_alike(like, mode):
    ids, ours, theirs = arrays(f"prompt_{mode}")["ids"][0, :PROMPT], {}, {}
    on_cpu = model().logits(ids, MODES[mode], ours)
    on_gpu = to_host(model().to("cuda").logits(ids, MODES[mode], theirs))
    assert np.abs(on_cpu - on_gpu).max() < 1e-4
    for name in (n for n in ours if n.endswith(("topk", "expert", "rows", "mask"))):
        assert np.array_equal(ours[name], theirs[name]), name


def test_decode_steps_of_two_requests(like):
    ids = arrays("prompt_fp32")["ids"]
    logits = []
    for some in (model(), model().to("cuda")):
        cache = some.new_cache(FLOAT32)
        slots = [some.open(cache) for _ in ids]
        some.step(cache, slots, list(ids[:, :PROMPT]))
        steps = [some.step(cache, slots, list(ids[:, t : t + 1])) for t in range(PROMPT, 80)]
        logits.append(np.stack([to_host(step) for step in steps]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


# ---- gradients: CPU against GPU -----------------------------------------------------------------

PACK = [np.random.default_rng(n).integers(3, 280, 40 + n) for n in range(3)]


def weights(like, numerics):
    """The same masters in either memory, as a step under these numerics reads them."""
    masters = to_masters(random_params(CONFIG, np.random.default_rng(0)), like)
    return masters if numerics is FLOAT32 else stored_weights(masters, CONFIG)


def pairs(ours, theirs):
    """Yield name, ours, theirs of all gradients, on the host; Engram rows have to be the same."""
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        if isinstance(one, tuple):
            assert np.array_equal(to_host(one[0]), to_host(other[0])), name
            one, other = one[1], other[1]
        yield name, to_host(one), to_host(other)


def error(one, other):
    return np.linalg.norm(one - other) / (np.linalg.norm(one) + 1e-12)


def whole_model(like, numerics):
    params, options = weights(like, numerics), Options(CLASSES)
    return loss_and_grads(params, CONFIG, PACK, numerics, options)[:2]


def drafter(like, numerics):
    params, docs = weights(like, numerics), Documents(PACK)
    anchors = sample_anchors(docs, 6, np.random.default_rng(0))
    return draft_loss_and_grads(params, CONFIG, docs, anchors, numerics, Options(CLASSES))[:2]


@pytest.mark.parametrize("learn", [whole_model, drafter])
def test_exact_gradients_of_cpu_and_gpu_agree(like, learn):
    (ours, grads), (theirs, others) = learn(None, FLOAT32), learn(like, FLOAT32)
    assert ours == pytest.approx(theirs, rel=1e-5)
    for name, one, other in pairs(grads, others):
        assert error(one, other) < 1e-3, name


@pytest.mark.parametrize("learn", [whole_model, drafter])
def test_rounded_gradients_of_cpu_and_gpu_point_the_same_way(like, learn):
    """A value on the edge of its rounding moves an expert's choice, and that all layers behind;
    how exactly each block's gradient agrees is asked below, where nothing adds up.
    """
    (ours, grads), (theirs, others) = learn(None, OFFICIAL), learn(like, OFFICIAL)
    assert ours == pytest.approx(theirs, rel=0.02)
    sums = np.zeros(3)
    for _, one, other in pairs(grads, others):
        sums += [np.sum(one * other), np.sum(one * one), np.sum(other * other)]
    assert sums[0] > 0.6 * np.sqrt(sums[1] * sums[2])


def forced(like, numerics, inputs=None):
    """Every block from given streams and pre, and backwards from random gradients.

    inputs: those of another machine, on the host -> the inputs, {layer: (dstreams, dpre, grads)}.
    """
    params, docs, seen, kept, found = weights(like, numerics), Documents(PACK), [], [], {}
    call = open_call(params, CONFIG, docs, numerics, CLASSES)
    streams, pre = initial_streams(embed(params, docs, call), CONFIG.hc_mult)
    for layer in CONFIG.plan:
        if inputs is not None:
            streams, pre = (beside(x, like) for x in inputs[layer.index])
        seen.append((to_host(streams), to_host(pre)))
        p = params["layers"][layer.index]
        streams, pre, some = block_forward(streams, pre, p, layer, call)
        kept.append(some)
    back = Back(balance=1e-2, index=1.0)
    for layer in reversed(CONFIG.plan):
        rng, p = np.random.default_rng(layer.index), params["layers"][layer.index]
        d = [beside(rng.normal(size=x.shape).astype(np.float32), like) for x in seen[layer.index]]
        found[layer.index] = block_backward(*d, kept.pop(), p, layer, call, back)
    return seen, found


def errors_by_kind(ours, theirs):
    """{tensor name without numbers: error over all layers and experts}: one expert's choice that
    falls the other way at the edge of a rounding weighs little there.
    """
    parts = {}
    for layer, (dstreams, dpre, grads) in ours.items():
        found = [("dstreams", dstreams, to_host(theirs[layer][0])), *pairs(grads, theirs[layer][2])]
        if layer:  # its streams are all the same, so the true dpre of the first layer is 0
            found.append(("dpre", dpre, to_host(theirs[layer][1])))
        for name, one, other in found:
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            parts.setdefault(kind, []).append((one.ravel(), other.ravel()))
    return {k: error(*(np.concatenate(x) for x in zip(*v, strict=True))) for k, v in parts.items()}


@pytest.mark.parametrize(("numerics", "most"), [(FLOAT32, 1e-3), (OFFICIAL, 0.05)])
def test_every_block_s_gradient_agrees_from_the_same_streams(like, numerics, most):
    inputs, ours = forced(None, numerics)
    for kind, found in errors_by_kind(ours, forced(like, numerics, inputs)[1]).items():
        assert found < most, f"{kind}: {found}"


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(like, tmp_path):
    run = Run(length=24, batch=2, steps=4, warmup=1, decay_from=2, quantised_from=3)
    documents = [np.arange(n, n + 30) % 50 + 3 for n in range(40)]

    def trainer(folder):
        return Trainer(CONFIG, run, documents, CLASSES, tmp_path / folder, like=like)

    straight = trainer("straight")
    for _ in range(4):
        straight.step()
    for _ in range(2):
        part = trainer("parts")
        part.step()
        part.step()
        part.save()
    ours, theirs = flatten(straight.params), flatten(part.params)
    assert all(np.array_equal(to_host(ours[n]), to_host(theirs[n])) for n in ours)
    with pytest.raises(ValueError, match="belongs to another run"):
        Trainer(CONFIG, replace(run, peak=1.0), documents, CLASSES, tmp_path / "parts", like=like)
