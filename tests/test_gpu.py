"""The text on CUDA arrays: the same choices, the same numbers to rounding. Run `make test-gpu`."""

from dataclasses import replace

import numpy as np
import pytest
from reference import MODES, PROMPT, arrays, model

from dsv41 import FLOAT32
from dsv41.dispatch import to_host
from dsv41.init import random_params
from dsv41.presets import preset
from dsv41.tensors import flatten
from dsv41.train.loop import Trainer, to_masters
from dsv41.train.model import Options, loss_and_grads
from dsv41.train.run import Run

pytestmark = pytest.mark.gpu
CONFIG = preset("tiny").but(vision_config=None)
CLASSES = np.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size


@pytest.fixture(scope="module")
def like():
    """An empty CuPy array to live next to."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install dsv41[cuda13]")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a CUDA device: {error}")
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


def test_gradients_of_cpu_and_gpu_agree(like):
    params = to_masters(random_params(CONFIG, np.random.default_rng(0)))
    documents = [np.random.default_rng(n).integers(3, 280, 40 + n) for n in range(3)]
    results = []
    for place in (None, like):
        moved = to_masters(random_params(CONFIG, np.random.default_rng(0)), place)
        loss, grads, _ = loss_and_grads(moved, CONFIG, documents, FLOAT32, Options(CLASSES))
        results.append((loss, flatten(grads)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1].keys() == results[1][1].keys() <= flatten(params).keys()
    for name, ours in results[0][1].items():
        theirs = results[1][1][name]
        if isinstance(ours, tuple):
            assert np.array_equal(to_host(ours[0]), to_host(theirs[0])), name
            ours, theirs = ours[1], theirs[1]
        ours, theirs = to_host(ours), to_host(theirs)
        error = np.sqrt(np.mean((ours - theirs) ** 2)) / (np.sqrt(np.mean(ours**2)) + 1e-12)
        assert error < 1e-3, f"{name}: {error}"


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
