"""What a kernel's folder offers to be measured: one Case per version and shape."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    op: str  # folder name
    version: str  # "v1", "v3", "numba", "cupy text", "torch"
    shape: str  # human-readable
    call: Callable  # () -> None, launches on the current stream with preallocated inputs
    check: Callable  # () -> float: error measure against the float64 definition; may raise
    bytes: int  # least bytes through device memory
    flops: int = 0
    target_us: float | None = None
