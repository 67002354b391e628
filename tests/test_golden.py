"""The released code's own numbers, on a random model with every mechanism."""

import numpy as np
import pytest
from compare import assert_same
from reference import MODES, PROMPT, arrays, model

from dsv41 import FLOAT32, OFFICIAL
from dsv41.quant import INDEX_FP4, MAIN_KV_FP4
from dsv41.rope import frequencies, rotate
from dsv41.verify import compare_by_layer, compare_whole

BITWISE = ("x_out", "attn.swa_kv", "cmp.latent", "cmp.main_kv", "idx.k", "idx.q", "idx.score")


def limit(mode, name):
    """Largest absolute difference that the reference's own README allows."""
    if mode == "bf16q":
        return 0.0 if name.endswith(BITWISE) else 1e-6
    return 1e-4 if name.endswith("idx.score") else 5e-5


def agree(mode, name, ours, theirs):
    assert ours.shape == theirs.shape, f"{name}: {ours.shape} against {theirs.shape}"
    if theirs.dtype.kind != "f":
        assert np.array_equal(ours, theirs), f"{name}: {np.argwhere(ours != theirs)[:3]} differ"
        return
    with np.errstate(invalid="ignore"):
        distance = np.where(ours == theirs, 0, np.abs(ours - theirs)).max()
    assert distance <= limit(mode, name), f"{name}: {distance} apart"


@pytest.fixture(scope="module", params=list(MODES))
def prompt(request):
    mode = request.param
    stored, trace = arrays(f"prompt_{mode}"), {}
    logits = model().logits(stored["ids"][0, :PROMPT], MODES[mode], trace)
    return mode, stored, trace, logits


def test_every_stored_intermediate_of_the_prompt(prompt):
    mode, stored, trace, _ = prompt
    others = {"ids", "logits", "margin", "x_pos"}
    names = [n for n in stored if n not in others and not n.startswith("seq1.")]
    assert len(names) >= 120
    for name in names:
        agree(mode, name, trace[name], stored[name])


def test_logits_of_both_sequences(prompt):
    mode, stored, _, first = prompt
    agree(mode, "logits", first, stored["logits"][0])
    both = model().logits(stored["ids"][:, :PROMPT], MODES[mode])
    agree(mode, "logits", both, stored["logits"])


def test_choices_of_the_second_sequence(prompt):
    mode, stored, _, _ = prompt
    trace = {}
    model().logits(stored["ids"][1, :PROMPT], MODES[mode], trace)
    for name in (n for n in stored if n.startswith("seq1.")):
        ours = trace[name.removeprefix("seq1.")]
        if name.endswith("moe.expert"):  # stored in ascending order for this sequence only
            assert (np.diff(stored[name], axis=1) > 0).all()
            ours = np.sort(ours, axis=1)
        agree(mode, name, ours, stored[name])


@pytest.fixture(scope="module", params=list(MODES))
def steps(request):
    """Twelve decode steps of both sequences behind their prompts; traces of the first alone."""
    mode = request.param
    ids = arrays(f"prompt_{mode}")["ids"]
    cache = model().new_cache(MODES[mode])
    slots = [model().open(cache) for _ in ids]
    model().step(cache, slots, list(ids[:, :PROMPT]))
    logits, traces = [], []
    for step in range(PROMPT, ids.shape[1]):
        trace = {}
        logits.append(model().step(cache, slots[:1], [ids[0, step : step + 1]], trace=trace)[0])
        model_logits = model().step(cache, slots[1:], [ids[1, step : step + 1]])
        logits[-1] = np.stack([logits[-1], model_logits[0]])
        traces.append(trace)
    return mode, arrays(f"decode_{mode}"), np.stack(logits, axis=1), traces, cache


def test_decode_logits(steps):
    mode, stored, logits, _, _ = steps
    agree(mode, "logits", logits, stored["logits"])


def test_decode_intermediates(steps):
    mode, stored, _, traces, _ = steps
    names = [n for n in stored if n.startswith("L") and not n.endswith("_literal")]
    for name in names:
        rows = [trace[name] for trace in traces]
        if name.endswith(("idx.score", "cand.mask")):
            empty = False if name.endswith("mask") else -np.inf
            width = stored[name].shape[1]
            rows = [
                np.pad(r, ((0, 0), (0, width - r.shape[1])), constant_values=empty) for r in rows
            ]
        agree(mode, name, np.concatenate(rows), stored[name])


def test_cache_after_the_last_step(steps):
    mode, stored, _, _, cache = steps
    numerics, config = MODES[mode], model().config
    for name in (n for n in stored if n.startswith("cache.")):
        source, kind = int(name[7:9]), name[10:]
        rows = cache.rows(source, 0, np.arange(len(stored[name])))
        if kind == "cmp.main_kv":
            ours = numerics.main_kv.decode(cache.main_kv[source][rows], config.head_dim)
        else:
            ours = numerics.index.decode(cache.index[source][rows], config.index_head_dim)
        agree(mode, name, ours, stored[name])


def test_each_source_reads_its_own_index_keys(steps):
    """The released decode step reads another source's keys while a pair is open; we must not."""
    _, stored, logits, traces, _ = steps
    different = 0
    for name in (n for n in stored if n.endswith("_literal") and n.startswith("L")):
        ours = np.concatenate([trace[name.removesuffix("_literal")] for trace in traces])
        different += int((ours != stored[name]).any(axis=1).sum())
    assert different > 30
    assert np.abs(logits - stored["logits_literal"]).max() > 1


@pytest.mark.parametrize("mode", list(MODES))
def test_prompt_with_an_image(mode):
    stored, trace = arrays("vision"), {}
    logits = model().logits(
        stored["ids"],
        MODES[mode],
        trace,
        token_types=stored["token_types"],
        embedding=stored[f"{mode}.embedding"],
    )
    agree(mode, "logits", logits, stored[f"{mode}.logits"])
    for name in (n for n in stored if n.startswith(f"{mode}.L")):
        agree(mode, name, trace[name.removeprefix(f"{mode}.")], stored[name])


def test_packed_bytes_of_equal_inputs():
    """Codes and scales from the stored latents decode to the stored caches, and are minimal."""
    stored, config = arrays("prompt_bf16q"), model().config
    for layer in (layer for layer in config.plan if layer.mode == "full"):
        latent = stored[f"L{layer.index:02d}.cmp.latent"]
        positions = np.arange(len(latent)) * layer.ratio
        rotated = OFFICIAL.store(rotate(latent, positions, frequencies(config, layer.ratio)))
        records = MAIN_KV_FP4.encode(rotated)
        kept = stored[f"L{layer.index:02d}.cmp.main_kv"]
        assert_same("main_kv", MAIN_KV_FP4.decode(records, config.head_dim), kept)
        assert_same("main_kv bytes", MAIN_KV_FP4.encode(kept), records)
        keys = stored[f"L{layer.index:02d}.idx.k"]
        assert_same("index keys", INDEX_FP4.decode(INDEX_FP4.encode(keys), 32), keys)


@pytest.mark.parametrize("mode", list(MODES))
def test_verify_agrees_whole_and_layer_by_layer(mode):
    stored = arrays(f"prompt_{mode}")
    whole = compare_whole(model(), stored, MODES[mode])
    assert len(whole) > 120 and all(d.within for d in whole)
    layers = compare_by_layer(model(), stored, MODES[mode])
    assert sorted(layers) == list(range(9))
    for tensors in layers.values():
        assert len(tensors) > 8 and all(d.within for d in tensors)


def test_float32_and_official_are_different_models():
    """A pair of modes that agreed would mean that the quantisers are off."""
    a = model().logits(arrays("prompt_fp32")["ids"][0, :PROMPT], FLOAT32)
    b = model().logits(arrays("prompt_fp32")["ids"][0, :PROMPT], OFFICIAL)
    assert np.abs(a - b).max() > 0.1
