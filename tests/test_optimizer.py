"""AdamW, the schedule, who is moved by which rule, and steps of a whole small model."""

import math

import numpy as np
import pytest
from compare import assert_close, assert_same
from test_muon import mutated, random

from dsv41.init import random_params
from dsv41.presets import preset
from dsv41.quant import WEIGHT_FP8
from dsv41.tensors import expected_tensors, flatten, nest
from dsv41.train import adamw, muon, optimizer, schedule
from dsv41.train.adamw import adamw_step
from dsv41.train.optimizer import RULES, Hyper, Optimizer, assign, is_norm
from dsv41.train.schedule import (
    RELEASED,
    STEP_TOKENS,
    Schedule,
    balance_bias,
    expert_load,
)
from dsv41.train.sinkhorn_update import sinkhorn_step

TINY, FLASH = preset("tiny"), preset("v4.1-flash")
TABLE = "layers.1.engram.embed.weight"
HEADS = "layers.0.attn.wq_b.weight"
NORM = "layers.0.attn_norm.weight"
SINK = "layers.0.attn.attn_sink"
EXPERT = "layers.0.ffn.experts.3.w2.weight"


# ---- AdamW ----------------------------------------------------------------------------------


def test_adamw_by_hand():
    weight, m, v = np.array([1.0, -2, 3]), np.zeros(3), np.zeros(3)
    adamw_step(weight, m, v, 1, np.array([0.5, -4, 0]), lr=0.1, decay=0.2)
    assert_close("m", m, [0.05, -0.4, 0])
    assert_close("v", v, [0.0125, 0.8, 0])
    # the first step has size lr, after 1 - 0.1 * 0.2 of the weight is kept
    assert_close("weight", weight, [0.98 - 0.1, -1.96 + 0.1, 2.94])
    adamw_step(weight, m, v, 2, np.array([1.0, 0, 0]), lr=0.1)
    # m = 0.145, v = 0.061875; 0.145 / 0.19 over sqrt(0.061875 / 0.0975)
    first = 0.145 / 0.19 / math.sqrt(0.061875 / 0.0975)
    second = -0.36 / 0.19 / math.sqrt(0.76 / 0.0975)
    assert_close("weight", weight, [0.88 - 0.1 * first, -1.86 - 0.1 * second, 2.94])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_adamw_equals_a_loop(dtype):
    weight = random(7, dtype=dtype)
    m, v, want = np.zeros(7, dtype), np.zeros(7, dtype), weight.astype(float)
    slow_m, slow_v = [0.0] * 7, [0.0] * 7
    for t in range(1, 20):
        g = random(7, seed=t, dtype=dtype)
        adamw_step(weight, m, v, t, g, 0.01, 0.1)
        for i, x in enumerate(g.tolist()):
            slow_m[i] = 0.9 * slow_m[i] + 0.1 * x
            slow_v[i] = 0.95 * slow_v[i] + 0.05 * x * x
            ratio = slow_m[i] / (1 - 0.9**t) / (math.sqrt(slow_v[i] / (1 - 0.95**t)) + 1e-20)
            want[i] -= 0.01 * 0.1 * want[i] + 0.01 * ratio
    assert weight.dtype == m.dtype == v.dtype == dtype
    assert_close("weight", weight, want)


@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_the_size_of_the_gradient_does_not_matter_to_adamw(size):
    moved = []
    for scale in (1.0, size):
        weight, m, v = np.zeros(5, np.float32), np.zeros(5, np.float32), np.zeros(5, np.float32)
        for t in (1, 2, 3):
            adamw_step(weight, m, v, t, np.float32(scale) * random(5, seed=t, dtype="f4"), 0.01)
        moved.append(weight)
    assert_close("weight", moved[1], moved[0], rel=1e-5)


def test_no_gradient_means_no_step_and_no_nan():
    weight, m, v = (np.zeros(3, np.float32) for _ in range(3))
    for t in (1, 2):
        adamw_step(weight, m, v, t, np.zeros(3, np.float32), 0.1)
    assert_same("weight", weight, [0, 0, 0])


# ---- schedule and selection bias ------------------------------------------------------------


def test_the_released_schedule():
    assert STEP_TOKENS == 96 * 1_048_576
    assert (RELEASED.decay_from, RELEASED.decay_to) == (278_155, 397_364)
    for step, want in [
        (0, 1.3e-7),
        (999, 1.3e-4),
        (1999, 2.6e-4),
        (2000, 2.6e-4),
        (278_155, 2.6e-4),
        (397_364, 2.6e-5),
        (447_034, 2.6e-5),
    ]:
        assert_close(f"step {step}", RELEASED.lr(step), want, floor=0)


def test_the_decay_is_half_a_cosine():
    s = Schedule(peak=1.0, final=0.2, warmup=0, decay_from=10, decay_to=14)
    want = [1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2, 0.2]
    assert_close("lr", [s.lr(step) for step in range(10, 16)], want)
    rates = [RELEASED.lr(step) for step in range(2000, 400_000, 997)]
    assert rates == sorted(rates, reverse=True)


def test_an_impossible_schedule_is_refused():
    for steps in [(5, 4, 9), (1, 9, 8), (-1, 2, 3)]:
        with pytest.raises(ValueError, match="warmup <= decay_from <= decay_to"):
            Schedule(1.0, 0.1, *steps)


def test_loads_of_text_and_images_are_counted_apart():
    chosen = np.array([[0, 2], [2, 1], [2, 3], [0, 3]])
    load = expert_load(chosen, np.array([False, True, False, False]), 5)
    assert_same("load", load, [[2, 0, 2, 2, 0], [0, 1, 1, 0, 0]])


def test_the_bias_moves_against_the_load():
    gate = {"bias": np.zeros(4, np.float32), "bias_vl": np.ones(4, np.float32)}
    balance_bias(gate, np.array([[5, 1, 3, 3], [0, 0, 0, 8]]))
    assert_close("text", gate["bias"], [-0.001, 0.001, 0, 0])  # a load equal to the mean: no move
    assert_close("image", gate["bias_vl"], [1.001, 1.001, 1.001, 0.999])
    before = gate["bias_vl"].copy()
    balance_bias(gate, np.array([[3, 0, 0, 0], [0, 0, 0, 0]]))
    assert_same("no images in the batch", gate["bias_vl"], before)
    assert gate["bias"].dtype == np.float32


def test_a_router_with_one_bias_counts_all_tokens():
    gate = {"bias": np.zeros(2)}
    balance_bias(gate, np.array([[3, 1], [0, 4]]), speed=0.5)
    assert_close("bias", gate["bias"], [0.5, -0.5])


# ---- who is moved by which rule -------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, FLASH], ids=["tiny", "v4.1-flash"])
def test_every_tensor_has_a_rule(config):
    specs = expected_tensors(config)
    rules = {name: assign(name, spec.logical_shape, config) for name, spec in specs.items()}
    assert set(rules.values()) == set(RULES)
    tables = {n for n, rule in rules.items() if rule == "sinkhorn"}
    engram = {f"layers.{layer}.engram.embed.weight" for layer in config.engram_layer_ids}
    drafter = {"mtp.2.markov_head.embed.weight", "mtp.2.markov_head.head.weight"}
    assert tables == {"embed.weight", "head.weight"} | engram | drafter
    for name, rule in rules.items():
        tower = name.startswith("vision.") and name != "vision.norm.weight"
        assert (rule == "frozen") == (name.endswith(".scale") or tower), name
        assert rule != "muon" or len(specs[name].shape) == 2, name
        assert (rule == "bias") == (".gate.bias" in name), name


def test_rules_of_tensors_that_are_easy_to_mistake():
    spec = expected_tensors(TINY)
    for rule, names in {
        "muon": f"{HEADS} {EXPERT} layers.0.hc_attn_fn layers.1.engram.wkv.weight "
        "aligner.w1.weight layers.0.ffn.gate.weight "
        "layers.2.attn.indexer.wk.weight mtp.0.main_proj.weight",
        "adamw": f"{NORM} {SINK} layers.0.hc_attn_scale layers.0.hc_ffn_base aligner.w2.bias "
        "layers.1.engram.q_weight layers.1.engram.k_weight vision.norm.weight image_start",
        "frozen": "layers.0.attn.wq_b.scale layers.1.engram.embed.scale "
        "vision.blocks.0.norm1.weight",
        "bias": "layers.0.ffn.gate.bias layers.0.ffn.gate.bias_vl mtp.1.ffn.gate.bias",
    }.items():
        for name in names.split():
            assert assign(name, spec[name].shape, TINY) == rule, name


def test_an_unfrozen_tower_follows_the_same_rules():
    for name, rule in {
        "vision.blocks.0.attn.wqkv.weight": "muon",
        "vision.blocks.0.attn.wqkv.bias": "adamw",
        "vision.blocks.0.norm1.weight": "adamw",
    }.items():
        assert assign(name, expected_tensors(TINY)[name].shape, TINY, with_vision=True) == rule


def test_norms_decay_and_other_vectors_do_not():
    adam = [n for n, s in expected_tensors(TINY).items() if assign(n, s.shape, TINY) == "adamw"]
    decaying = {n for n in adam if is_norm(n)}
    assert {NORM, "layers.1.engram.q_weight", "norm.weight"} <= decaying
    kept = "attn_sink _base _scale .bias image_start image_end image_newline".split()
    assert all(any(name.endswith(end) for end in kept) for name in set(adam) - decaying)


def test_a_name_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"layers\.77\.attn\.wkv\.weight: the model of this"):
        assign("layers.77.attn.wkv.weight", (4, 4), TINY)


# ---- a whole model --------------------------------------------------------------------------


def masters(seed=0):
    """Params of the tiny model with its Engram tables as float32."""
    params = random_params(TINY, np.random.default_rng(seed))
    for layer in TINY.engram_layer_ids:
        table = params["layers"][layer]["engram"]["embed"]
        table["weight"] = WEIGHT_FP8.dequantize(table["weight"], table.pop("scale"))
    return params


def gradients(params, seed):
    rng = np.random.default_rng(seed)
    return nest(
        {n: rng.standard_normal(x.shape).astype(x.dtype) for n, x in flatten(params).items()}
    )


def snapshot(params):
    return {name: leaf.copy() for name, leaf in flatten(params).items()}


@pytest.fixture(scope="module")
def one_step():
    """Leaves before and after a step with rate 0.01, and its gradients."""
    params = masters()
    before, grads = snapshot(params), gradients(params, seed=1)
    Optimizer(TINY, params).step(grads, 0.01)
    return before, flatten(params), flatten(grads)


def test_every_trained_tensor_moves_by_its_rule_and_nothing_else_does(one_step):
    before, after, _ = one_step
    for name, leaf in after.items():
        rule = assign(name, leaf.shape, TINY)
        change = leaf - before[name] * (1 - 0.001 * (rule == "muon" or is_norm(name)))
        size = {"muon": 0.0018, "sinkhorn": 0.0018, "adamw": 0.01}.get(rule, 0)
        if name.endswith("engram.embed.weight"):
            size *= 5
        if rule in ("bias", "frozen"):
            assert_same(name, leaf, before[name])
        else:
            # a square matrix may have a singular value too small to be lifted to 1
            assert_close(name, np.sqrt(np.mean(change**2)), size, rel=0.06, floor=1e-6)
        assert leaf.dtype == np.float32


def test_heads_and_experts_move_as_if_alone(one_step):
    before, after, grads = one_step
    for name, blocks in [(HEADS, 4), (EXPERT, 1), ("layers.1.engram.wkv.weight", 5)]:
        want = before[name].reshape(blocks, -1, before[name].shape[1])
        g = grads[name].reshape(want.shape)
        for weight, direction in zip(want, g, strict=True):
            weight *= 0.999
            weight -= 0.01 * muon.muon_update(1.95 * direction)
        assert_close(name, after[name], want.reshape(before[name].shape), rel=1e-6)


def test_the_five_times_larger_rate_of_the_tables_is_applied_once(one_step):
    before, after, grads = one_step
    for name, lr in [(TABLE, 0.05), ("embed.weight", 0.01)]:
        want = before[name].copy()
        sinkhorn_step(want, np.zeros_like(want), grads[name], lr)
        assert_same(name, after[name], want)


def test_a_tensor_without_gradient_keeps_its_bits_and_its_state():
    params = masters()
    optimizer_ = Optimizer(TINY, params)
    optimizer_.step(gradients(params, seed=1), 0.01)
    before, state = snapshot(params), optimizer_.state_dict()
    grads = flatten(gradients(params, seed=2))
    skipped = {HEADS, NORM, TABLE, "embed.weight"}
    some = {n: g for n, g in grads.items() if not n.startswith("mtp.")}
    optimizer_.step(nest(some | dict.fromkeys(skipped)), 0.01)
    for name, leaf in flatten(params).items():
        stays = name in skipped or name.startswith("mtp.") or name not in optimizer_.state
        assert np.array_equal(leaf, before[name]) == stays, name
    for key, value in optimizer_.state_dict().items():
        name = key.rpartition(".")[0]
        if name in skipped or name.startswith("mtp."):
            assert_same(key, value, state[key])
        elif key.endswith(".step"):
            assert value == 2


def test_table_gradients_may_name_the_rows_hit():
    dense, sparse = masters(), masters()
    pair = Optimizer(TINY, dense), Optimizer(TINY, sparse)
    for step in range(3):
        rows = np.random.default_rng(step).permutation(434)[:40]
        values = random(40, 32, seed=step, dtype=np.float32)
        g = np.zeros((434, 32), np.float32)
        g[rows] = values
        pair[0].step(nest({TABLE: g}), 0.01)
        pair[1].step(nest({TABLE: (rows, values)}), 0.01)
    assert_same(TABLE, flatten(sparse)[TABLE], flatten(dense)[TABLE])


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not():
    params = masters()
    straight = Optimizer(TINY, params)
    for step in range(2):
        straight.step(gradients(params, seed=step), 0.01)
    saved, kept = straight.state_dict(), nest(snapshot(params))
    assert all(isinstance(value, np.ndarray) for value in saved.values())
    resumed = Optimizer(TINY, kept)
    resumed.load_state_dict(saved)
    for step in range(2, 4):
        g = flatten(gradients(params, seed=step))
        straight.step(nest(g), 0.01)
        resumed.step(nest(dict(reversed(g.items()))), 0.01)
    for name, leaf in flatten(params).items():
        assert_same(name, flatten(kept)[name], leaf)
    for key, value in straight.state_dict().items():
        assert_same(key, resumed.state_dict()[key], value)
        if saved[key].any():
            assert not np.array_equal(saved[key], value), key  # the copies did not move on


def test_a_state_that_does_not_fit_is_refused_whole():
    own = Optimizer(TINY, masters())
    good = own.state_dict()
    key = f"{HEADS}.momentum"
    for bad, message in [
        ({k: v for k, v in good.items() if k != key}, "on one side only"),
        (good | {"more": good[key]}, "more is on one side only"),
        (good | {key: good[key][:1]}, r"expected \(\(256, 96\)"),
        (good | {key: good[key].astype(np.float64)}, "float64"),
    ]:
        changed = {k: v + 1 for k, v in bad.items()}
        with pytest.raises(ValueError, match=message):
            own.load_state_dict(changed)
    for key, value in own.state_dict().items():
        assert_same(key, value, good[key])


def test_the_tower_can_be_unfrozen_in_mid_training():
    params = masters()
    old = Optimizer(TINY, params)
    old.step(gradients(params, seed=1), 0.01)
    new = Optimizer(TINY, params, Hyper(vision_factor=0.1))
    new.load_state_dict(new.state_dict() | old.state_dict())
    before, name = snapshot(params), "vision.blocks.0.attn.wqkv.weight"
    g = {n: x for n, x in flatten(gradients(params, seed=2)).items() if n.startswith("vision.")}
    new.step(nest(g), 0.01)
    change = flatten(params)[name] - before[name] * (1 - 0.0001)
    assert_close("rms", np.sqrt(np.mean(change**2)), 0.00018, rel=0.06, floor=0)


def test_a_branch_of_the_params_can_train_alone():
    params = masters()
    before = snapshot(params)
    drafter = Optimizer(TINY, {"mtp": params["mtp"]})
    drafter.step({"mtp": gradients(params, seed=1)["mtp"]}, 0.01)
    for name, leaf in flatten(params).items():
        moved = name.startswith("mtp.") and ".gate.bias" not in name
        assert np.array_equal(leaf, before[name]) != moved, name


def test_codes_cannot_be_trained():
    with pytest.raises(ValueError, match=r"layers\.1\.engram\.embed\.weight: training needs a"):
        Optimizer(TINY, random_params(TINY, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({NORM: np.zeros((1,), np.float32)}, r"expected a gradient of shape \(64,\), got \(1,\)"),
        ({NORM: (np.zeros(1, int), np.zeros((1, 64)))}, r"got \(rows, values\)"),
        ({TABLE: (np.array([3, 3]), np.zeros((2, 32)))}, "names a row twice"),
        ({TABLE: (np.array([3, 4]), np.zeros((2, 1)))}, r"of shape \(2, 32\), got \(2, 1\)"),
        ({"layers.0.attn.wq.weight": np.zeros(3)}, "no parameter is called layers.0.attn.wq"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(grads, message):
    params = masters()
    before, fitting = snapshot(params), {"embed.weight": np.ones((288, 64), np.float32)}
    with pytest.raises(ValueError, match=message):
        Optimizer(TINY, params).step(nest(fitting | grads), 0.01)
    assert_same("nothing moved", params["embed"]["weight"], before["embed.weight"])


def test_float64_stays_float64():
    params = nest({name: leaf.astype(np.float64) for name, leaf in flatten(masters()).items()})
    Optimizer(TINY, params).step(gradients(params, seed=1), 0.01)
    assert all(leaf.dtype == np.float64 for leaf in flatten(params).values())


# ---- wrong variants -------------------------------------------------------------------------

WRONG = {
    "no first correction": (adamw, "(lr / (1 - b1**t))", "lr"),
    "no second correction": (adamw, " / math.sqrt(1 - b2**t) + eps", " + eps"),
    "decay through the gradient": (
        adamw,
        "    m *= b1\n",
        "    grad = grad + decay * weight\n    m *= b1\n",
    ),
    "beta of Adam's paper": (adamw, "(0.9, 0.95)", "(0.9, 0.999)"),
    "large epsilon": (adamw, "1e-20", "1e-2"),
    "first step has rate 0": (schedule, "(step + 1) / self.warmup", "step / self.warmup"),
    "straight decay": (schedule, "(1 + math.cos(math.pi * done)) / 2", "(1 - done)"),
    "decay to zero": (schedule, "self.final + (self.peak - self.final) *", "self.peak *"),
    "bias follows the load": (schedule, "missing = np.sum(load) -", "missing = -np.sum(load) +"),
    "bias by the size of the gap": (schedule, "np.sign(missing)", "missing"),
    "one bias for all tokens": (schedule, "load[0], speed", "load[0] + load[1], speed"),
    "images counted as text": (schedule, "experts * is_image[:, None]", "0 * is_image[:, None]"),
    "norms do not decay": (optimizer, "h.weight_decay if is_norm(name) else 0.0", "0.0"),
    "sinks decay": (optimizer, "h.weight_decay if is_norm(name) else 0.0", "h.weight_decay"),
    "whole matrices": (
        optimizer,
        "in muon.matrix_rows(name, weight.shape, self.config)",
        "in weight.shape[:1]",
    ),
    "tables at the common rate": (optimizer, "return self.hyper.engram_factor", "return 1.0"),
    "Engram projections too": (
        optimizer,
        '.endswith(".engram.embed.weight")',
        '.count(".engram.")',
    ),
    "the embedding by Muon": (optimizer, 'in ("embed", "head")', 'in ("head",)'),
    "one count of steps": (optimizer, 'int(state["step"])', "1"),
}


def check_adamw(module):
    weight, m, v = np.array([1.0, -2, 3]), np.zeros(3), np.zeros(3)
    for t, g in enumerate([[0.5, -4, 0], [1.0, 0, 0]], 1):
        module.adamw_step(weight, m, v, t, np.array(g), 0.1, 0.2)
    assert_close("weight", weight, [0.7666014, -1.7549352, 2.8812], rel=1e-6)


def check_schedule(module):
    s = module.Schedule(peak=1.0, final=0.2, warmup=2, decay_from=10, decay_to=14)
    want = [0.5, 1, 1, 0.6 + 0.4 * math.sqrt(0.5), 0.2]
    assert_close("lr", [s.lr(step) for step in (0, 1, 10, 11, 14)], want)
    gate = {"bias": np.zeros(3), "bias_vl": np.zeros(3)}
    chosen, is_image = np.array([[0], [0], [1], [2], [2], [2]]), np.arange(6) > 2
    module.balance_bias(gate, module.expert_load(chosen, is_image, 3))
    assert_close("text", gate["bias"], [-0.001, 0, 0.001])
    assert_close("image", gate["bias_vl"], [0.001, 0.001, -0.001])


def check_optimizer(module):
    names = [HEADS, NORM, SINK, TABLE, "embed.weight", "layers.1.engram.wkv.weight"]
    results = []
    for source in (module, optimizer):
        params = nest({name: flatten(masters())[name] for name in names})
        moving = source.Optimizer(TINY, params)
        for step in range(2):
            moving.step(gradients(params, seed=step), 0.01)
        results.append(flatten(params))
    for name in names:
        assert_close(name, results[0][name], results[1][name], rel=1e-7, floor=0)


CHECKS = {adamw: check_adamw, schedule: check_schedule, optimizer: check_optimizer}


@pytest.mark.parametrize("module", CHECKS, ids=lambda m: m.__name__)
def test_the_right_module_passes_the_check(module):
    CHECKS[module](module)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_noticed(name):
    module, text, replacement = WRONG[name]
    with pytest.raises(AssertionError):
        CHECKS[module](mutated(module, text, replacement))
