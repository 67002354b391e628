"""How fast does each parameter learn, at each step?

    lr(step)    a straight line up, constant, half a cosine down, constant
    lr * 5      for the Engram tables: a row is hit far less often than a matrix
    bias_e      <- bias_e + speed * sign(mean load - load_e)        no gradient, no learning rate

The last line keeps experts equally busy. The selection bias of a router goes up by a fixed speed
for an expert that got fewer tokens than the mean of the batch and down for one that got more. Text
and image tokens are counted apart, because each kind has a bias of its own. Source: report,
section 4.2.2; DeepSeek-V3's report, section 2.1.2, for the bias. Left out: the factor of the vision
tower after it is unfrozen, which is not published beyond "smaller".
"""

import math
from dataclasses import dataclass

import numpy as np

BIAS_SPEED = 0.001
ENGRAM_FACTOR = 5.0
STEP_TOKENS = 1536 * 65_536  # of the release: 1,536 sequences of 64K, later 96 of 1M


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: `peak` after `warmup` steps, `final` from step `decay_to` on."""

    peak: float
    final: float
    warmup: int
    decay_from: int
    decay_to: int

    def __post_init__(self):
        if not 0 <= self.warmup <= self.decay_from <= self.decay_to:
            raise ValueError(f"schedule: expected warmup <= decay_from <= decay_to, got {self}")

    def lr(self, step):
        """The rate of step 0, 1, 2, ...; the first is already above 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if step < self.decay_from:
            return self.peak
        if step >= self.decay_to:
            return self.final
        done = (step - self.decay_from) / (self.decay_to - self.decay_from)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2


RELEASED = Schedule(
    peak=2.6e-4,
    final=2.6e-5,
    warmup=2000,
    decay_from=int(28e12 // STEP_TOKENS),
    decay_to=int(40e12 // STEP_TOKENS),
)


def expert_load(chosen, is_image, experts):
    """chosen (T, k) int, is_image (T,) bool -> (2, E) int: choices by text and by image tokens.

    Loads of micro-batches and of machines add up; the bias moves once per step, by the sum.
    """
    bins = chosen + experts * is_image[:, None]
    return np.bincount(bins.ravel(), minlength=2 * experts).reshape(2, experts)


def balance_bias(gate, load, speed=BIAS_SPEED):
    """Move a router's bias, and bias_vl if it has one, in place. gate: its parameters; load (2, E).

    A kind of token that the batch did not contain leaves its bias alone.
    """
    if "bias_vl" in gate:
        _balance(gate["bias"], load[0], speed)
        _balance(gate["bias_vl"], load[1], speed)
    else:
        _balance(gate["bias"], load[0] + load[1], speed)


def _balance(bias, load, speed):
    missing = np.sum(load) - len(load) * load  # in integers, so that an exact mean moves nothing
    bias += speed * np.sign(missing).astype(bias.dtype)
