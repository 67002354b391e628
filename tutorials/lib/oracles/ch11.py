"""Chapter 11: answers come from dsv41.moe, dsv41.train.schedule and dsv41.ledger."""

from types import SimpleNamespace

import numpy as np

from dsv41.ledger import expert_bytes
from dsv41.moe import route
from dsv41.quant import FLOAT32
from dsv41.train.schedule import balance_bias

from ..page import Exercise


def _route_one(logits, bias, k):
    gate = {"weight": np.eye(len(logits), dtype=np.float32), "bias": bias}
    chosen, weight, _ = route(logits[None], gate, np.array([False]), k, 1.5, True, FLOAT32)
    dense = np.zeros(len(logits), np.float32)
    dense[chosen[0]] = weight[0]
    return dense


def _tokens(rng):
    yield np.float32([2, 1, 0, -1]), np.float32([0, 0, 1, 2]), 2  # the bias decides
    yield np.zeros(6, np.float32), np.zeros(6, np.float32), 3  # all equal
    yield np.float32([1, 1, 0, 1]), np.float32([1, 1, 0, 1]), 2  # three tie for two places
    yield np.float32([-60, -58, 100, 90]), np.float32([20, 20, 0, 0]), 2  # tiny scores weigh too
    for experts, k in ((8, 2), (16, 3), (16, 6), (32, 6), (384, 6)):
        logits = 3 * rng.standard_normal(experts)
        yield np.float32(logits), np.float32(0.5 * rng.standard_normal(experts)), k


def _balanced(bias, loads):
    gate = {"bias": bias.copy()}
    balance_bias(gate, np.stack([loads.sum(axis=0), 0 * loads[0]]))
    return gate["bias"]


def _steps(rng):
    yield np.zeros(4, np.float32), np.array([[3, 1, 2, 2], [2, 2, 3, 1]])  # 5 3 5 3
    yield np.zeros(3, np.float32), np.array([[9, 0, 3], [0, 4, 2]])  # one is above on one machine
    yield np.zeros(4, np.float32), np.array([[4, 0, 1, 3], [0, 4, 3, 1]])  # all on the mean
    yield np.float32([0.1, 0.2]), np.zeros((3, 2), np.int64)
    for machines, experts in ((1, 8), (2, 8), (4, 16), (8, 16), (8, 384)):
        bias = rng.standard_normal(experts).astype(np.float32)
        yield bias, rng.integers(0, 5, (machines, experts))


def _bytes_of_expert(hidden, width):
    return expert_bytes(SimpleNamespace(hidden_size=hidden, moe_intermediate_size=width))


def _sizes(rng):
    yield 5120, 2304
    yield 32, 64
    for hidden, width in rng.integers(1, 200, (10, 2)):
        yield int(32 * hidden), int(32 * width)


EXERCISES = {
    "route_one": Exercise(
        _route_one,
        blank="return a weight for each expert, 0 where it is not chosen",
        hint="look at where the bias enters, at the factor, and at which of two equal sums wins",
        inputs=_tokens,
        within=2e-6,
    ),
    "balanced": Exercise(
        _balanced,
        blank="return the bias after one step, moved by the loads of all machines together",
        hint="what adds up over machines, loads or signs? An expert exactly on the mean stays",
        inputs=_steps,
        within=1e-6,
    ),
    "bytes_of_expert": Exercise(
        _bytes_of_expert,
        blank="return the bytes of three matrices, half a byte a number and a scale byte for 32",
        hint="count both parts, codes and scales, for all three matrices",
        inputs=_sizes,
    ),
}
