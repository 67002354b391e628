"""What a kernel folder's bench.py yields: one measurement, with its check and its floor."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`call` launches on the current stream; `check` returns an error or raises AssertionError."""

    op: str
    version: str
    shape: str
    call: Callable[[], None]
    check: Callable[[], float]
    bytes: int
    flops: int = 0
    target_us: float | None = None
