"""What defines a training run, and what can it not be?

Two runs with equal fields, over equal documents, compute equal bits on one machine. The rate goes
up, stays, and falls by half a cosine, once for the model and once, behind its last step, for the
drafter. What cannot be meant is refused before anything is computed: a run of no steps, a sample
longer than the model's context, an empty corpus, ids that the model does not have. Source: report,
sections 2.5 and 4.2; the sizes are ours.
"""

from dataclasses import dataclass, fields
from hashlib import sha256

import numpy as np

from .schedule import BIAS_SPEED, Schedule

LEAST = {
    "length": 2,
    "batch": 1,
    "save_every": 1,
    "evaluate_every": 1,
    "anchors": 1,
    "wide_topk": 1,
}


@dataclass(frozen=True)
class Run:
    """What defines a run. Two runs with equal fields compute equal bits on one machine."""

    length: int = 4096  # tokens of a sample
    batch: int = 8  # samples a step
    steps: int = 1000
    peak: float = 3e-3
    final: float = 3e-4
    warmup: int = 50
    decay_from: int = 500
    micro: int = 0  # most tokens of one backward pass; 0: the whole batch at once
    wide_until: int = 0  # before this step selections hold `wide_topk` entries
    wide_topk: int = 512
    quantised_from: int = 10**9  # first step with the quantisers on
    clip: float = 1.0
    balance: float = 1e-4
    bias_speed: float = BIAS_SPEED  # of the routers' biases, at the peak of the learning rate
    bias_final: float = BIAS_SPEED  # the same at its end; between them in proportion to the rate
    index: float = 1.0
    recall: int = 0  # samples of recall documents a step, besides the batch
    draft_steps: int = 0  # steps of the drafter, after all others
    draft_peak: float = 3e-3
    anchors: int = 64  # drafts that are cut out of a document
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 100

    def __post_init__(self):
        for field in fields(self):
            value, whole = getattr(self, field.name), field.type in (int, "int")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{field.name}: expected {kind}, got {value!r}")
            least = LEAST.get(field.name, 0)
            if not value >= least or (value == 0 and field.name in ("peak", "clip")):
                raise ValueError(f"{field.name}: expected {least} or more, got {value}")
        if not self.all_steps:
            raise ValueError("steps: expected some, of the model or of the drafter, got none")

    @property
    def schedule(self):
        decay_from = min(self.decay_from, self.steps)
        warmup = min(self.warmup, decay_from)
        return Schedule(self.peak, self.final, warmup, decay_from, self.steps)

    @property
    def draft_schedule(self):
        steps = self.draft_steps
        return Schedule(self.draft_peak, self.draft_peak / 10, steps // 20, steps // 2, steps)

    @property
    def all_steps(self):
        return self.steps + self.draft_steps

    def rate(self, step):
        """The learning rate of a step of either phase."""
        if step < self.steps:
            return self.schedule.lr(step)
        return self.draft_schedule.lr(step - self.steps)

    def speed(self, step):
        """How far the routers' biases move at a step: linear in the rate, by its two ends."""
        schedule = self.schedule if step < self.steps else self.draft_schedule
        fall = schedule.peak - schedule.final
        share = (self.rate(step) - schedule.final) / fall if fall else 1.0
        return max(0.0, self.bias_final + (self.bias_speed - self.bias_final) * share)


def digest(documents):
    """sha256 over the documents' ids and edges, in hex."""
    found = sha256(np.array([len(ids) for ids in documents]).tobytes())
    for ids in documents:
        found.update(np.ascontiguousarray(ids, "<u2"))
    return found.hexdigest()


def check_documents(documents, config, run):
    """ValueError for an empty corpus, ids the model does not have, or samples it cannot read."""
    if not any(len(ids) for ids in documents):
        raise ValueError("documents: there is none with a token; build them: python -m dsv41 data")
    largest = max(int(np.max(ids)) for ids in documents if len(ids))
    if largest >= config.vocab_size:
        raise ValueError(f"documents: id {largest} is outside 0 .. {config.vocab_size - 1}")
    if run.length > config.max_position_embeddings:
        raise ValueError(
            f"length: samples of {run.length} tokens are longer than the model's context, "
            f"{config.max_position_embeddings}"
        )
