"""What is asked of an engine, and what became of it?

A request is a prompt in token ids, how its tokens are drawn, and when it ends. The engine
(engine.py) fills in the rest as it goes: the tokens written, the slot in the cache while it is
open, its state while it is put aside, and the counts that `generate.summarise` reports. Everything
random in a request comes from its own generator, so company does not change its draws. A
submission is checked before anything is queued; an error names the argument. Left out: images.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from .sampling import Sampling


@dataclass(eq=False)
class Request:
    """One prompt and what became of it."""

    prompt: list
    max_tokens: int
    sampling: Sampling
    stop: frozenset  # token ids that end the text; the last of `tokens`, though no text is shown
    tokens: list = field(default_factory=list)  # generated so far
    finish: str | None = None  # "stop", "length"
    slot: int | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    accepted: list = field(default_factory=list)  # drafts kept, per verification
    computed: int = 0  # prompt tokens fed, a stored prefix left out
    aside: tuple | None = None  # state of a preempted request

    def __post_init__(self):
        self.generator = np.random.default_rng(self.sampling.seed)

    @property
    def ids(self):
        return self.prompt + self.tokens

    @property
    def reading(self):
        """True until the prompt has been run."""
        return not self.tokens


def check_submission(max_tokens, sampling, stop):
    """ValueError unless all three are of their kind."""
    if not isinstance(max_tokens, int | np.integer) or max_tokens < 1:
        raise ValueError(f"max_tokens: expected a positive integer, got {max_tokens!r}")
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling: expected a Sampling, got {sampling!r}")
    if not all(isinstance(token, int | np.integer) for token in stop):
        raise ValueError(f"stop: expected token ids, got {sorted(map(repr, stop))}")
