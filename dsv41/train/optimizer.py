"""Which rule moves which tensor, and what has to be remembered between steps?

    muon       weight matrices of linear maps                          M        decay
    sinkhorn   rows are tokens or n-grams: embedding, head, Engram     M        none
    adamw      norm weights                                            m, v     decay
               biases, scaling factors, sinks, image delimiters        m, v     none
    bias       selection biases of the routers: by load (schedule.py)
    frozen     scales of quantised weights, which follow from the weights; the vision tower, but
               for its last norm, until the learning rate decays

Weights are trained as dense float32 "masters", Engram tables included; rounding to FP8 or FP4 is
the forward pass's business. Source: report, sections 2.5 and 4.2.2. Where it is silent (sinks,
mHC's matrices, DSpark, the tower once unfrozen) the nearest kind that it names decides; DSpark's
Markov tables count as embedding and head.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from ..tensors import expected_tensors, flatten
from . import adamw, muon
from .adamw import adamw_steps
from .schedule import ENGRAM_FACTOR
from .sinkhorn_update import STEPS, TAU, sinkhorn_step

RULES = ("muon", "sinkhorn", "adamw", "bias", "frozen")


@dataclass(frozen=True)
class Hyper:
    """The constants of the release. vision_factor scales the tower's rate; 0 keeps it frozen."""

    weight_decay: float = 0.1
    momentum: float = muon.MOMENTUM
    gamma: float = muon.GAMMA
    betas: tuple = adamw.BETAS
    eps: float = adamw.EPS
    sinkhorn_steps: int = STEPS
    tau: float = TAU
    engram_factor: float = ENGRAM_FACTOR
    vision_factor: float = 0.0


def assign(name, shape, config, with_vision=False):
    """The rule, one of RULES, of tensor `name` of this shape; with_vision: the tower trains too.

    ValueError for a name that the config's model does not have.
    """
    if name not in _names(config):
        raise ValueError(f"{name}: the model of this config has no such tensor")
    if name.endswith(".scale") or (in_tower(name) and not with_vision):
        return "frozen"
    if name.endswith((".gate.bias", ".gate.bias_vl")):
        return "bias"
    if _leaf(name) in ("embed", "head"):
        return "sinkhorn"
    return "muon" if len(shape) == 2 and not is_norm(name) else "adamw"


def is_norm(name):
    """True for the weight of a norm; Engram's q_weight and k_weight (S, D) are norms as well."""
    return "norm" in _leaf(name) or _leaf(name) in ("q_weight", "k_weight")


def in_tower(name):
    """True for tensors of the vision encoder that stay frozen during most of pre-training."""
    return name.startswith("vision.") and name != "vision.norm.weight"


def _leaf(name):
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


@cache
def _names(config):
    return frozenset(expected_tensors(config))


class Optimizer:
    """The state of all rules: one momentum per matrix or table, two moments per other tensor."""

    def __init__(self, config, params, hyper=None):
        """params: nested dicts of float arrays, or a branch such as {"mtp": ...}; updated in place.

        A tensor that trains must be dense; ValueError names one that is still codes.
        """
        self.config, self.params, self.hyper = config, params, hyper or Hyper()
        self.rules, self.state = {}, {}
        for name, leaf in flatten(params).items():
            rule = assign(name, leaf.shape, config, with_vision=self.hyper.vision_factor > 0)
            self.rules[name] = rule
            if rule in ("muon", "sinkhorn", "adamw"):
                self.state[name] = _new_state(name, leaf, rule)

    def step(self, grads, lr):
        """Move every tensor that has a gradient by one step with base learning rate `lr`.

        grads: nested like params; a missing branch, or None, leaves tensor and state as they are.
        Those of Sinkhorn tables may be (rows, values), see sinkhorn_step. Gradients of frozen
        tensors and selection biases are ignored. ValueError, before anything moves, for a gradient
        that does not fit.
        """
        leaves, work = flatten(self.params), {"muon": [], "sinkhorn": [], "adamw": []}
        for name, grad in self._used(flatten(grads), leaves).items():
            work[self.rules[name]].append((name, leaves[name], grad, lr * self._factor(name)))
        self._muon(work["muon"])
        self._adamw(work["adamw"])
        for one in work["sinkhorn"]:
            self._sinkhorn(*one)

    def _used(self, grads, leaves):
        """The checked gradients of tensors that train, in the order of params."""
        if unknown := set(grads) - set(leaves):
            raise ValueError(f"grads: no parameter is called {min(unknown)}")
        used = {name: grads[name] for name in self.state if grads.get(name) is not None}
        for name, grad in used.items():
            _check_grad(name, leaves[name], grad, self.rules[name])
        return used

    def _muon(self, work):
        momenta = [self.state[name]["momentum"] for name, *_ in work]
        directions = muon.nesterov_all(momenta, [grad for *_, grad, _ in work], self.hyper.momentum)
        jobs = []
        for (name, weight, _, lr), direction in zip(work, directions, strict=True):
            start = 0
            for count in muon.matrix_rows(name, weight.shape, self.config):
                rows = slice(start, start + count)  # one of the matrices stacked in the tensor
                jobs.append((weight[rows], direction[rows], lr))
                start += count
        muon.muon_step(jobs, self.hyper.weight_decay, self.hyper.gamma)

    def _sinkhorn(self, name, weight, grad, lr):
        h, momentum = self.hyper, self.state[name]["momentum"]
        constants = dict(steps=h.sinkhorn_steps, tau=h.tau, eps=h.eps)
        sinkhorn_step(weight, momentum, grad, lr, h.momentum, h.gamma, **constants)

    def _adamw(self, work):
        h, states = self.hyper, [self.state[name] for name, *_ in work]
        for state in states:
            state["step"] += 1
        m, v, t = ([state[key] for state in states] for key in ("m", "v", "step"))
        decays = [h.weight_decay if is_norm(name) else 0.0 for name, *_ in work]
        _, weights, grads, rates = zip(*work, strict=True) if work else ((),) * 4
        lists = list(weights), m, v, [int(n) for n in t], list(grads), rates, decays
        adamw_steps(*lists, h.betas, h.eps)

    def _factor(self, name):
        if name.endswith(".engram.embed.weight"):
            return self.hyper.engram_factor
        return self.hyper.vision_factor if in_tower(name) else 1.0

    def state_dict(self):
        """-> flat dict of arrays (copies): "<tensor>.momentum", or ".m", ".v" and ".step"."""
        return {key: value.copy() for key, value in flatten(self.state).items()}

    def load_state_dict(self, saved):
        """Continue from what `state_dict` returned; then the next steps have the same bits.

        ValueError unless names, shapes and types are those of this optimizer. To unfreeze the tower
        in mid-training: new.load_state_dict(new.state_dict() | old.state_dict()).
        """
        own = flatten(self.state)
        if differing := set(own) ^ set(saved):
            raise ValueError(f"optimizer state: {min(differing)} is on one side only")
        for key, value in own.items():
            found, wanted = (saved[key].shape, saved[key].dtype), (value.shape, value.dtype)
            if found != wanted:
                raise ValueError(f"optimizer state: {key} is {found}, expected {wanted}")
        for key, value in own.items():
            value[...] = np.asarray(saved[key], like=value)


def _new_state(name, leaf, rule):
    if not np.issubdtype(getattr(leaf, "dtype", np.uint8), np.floating):
        raise ValueError(f"{name}: training needs a dense float master, got {type(leaf).__name__}")
    if rule == "adamw":
        step = np.zeros((), np.int64)  # its own count: a tensor may be skipped in some steps
        return {"m": np.zeros_like(leaf), "v": np.zeros_like(leaf), "step": step}
    return {"momentum": np.zeros_like(leaf)}


def _check_grad(name, weight, grad, rule):
    """ValueError for a gradient that would broadcast, or rows that would be lost."""
    shape = weight.shape
    if isinstance(grad, tuple) and rule == "sinkhorn":
        rows, values = grad
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"{name}: its gradient names a row twice; add such rows up first")
        grad, shape = values, (len(rows), weight.shape[1])
    if isinstance(grad, tuple) or grad.shape != shape:
        found = "(rows, values)" if isinstance(grad, tuple) else grad.shape
        raise ValueError(f"{name}: expected a gradient of shape {shape}, got {found}")
