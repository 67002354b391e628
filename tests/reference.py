"""The reference arrays of tests/golden and the model that must reproduce them."""

import functools
from pathlib import Path

import numpy as np

import dsv41

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a"
PROMPT = 72  # tokens of each reference prompt; twelve more follow, one per step
MODES = {"fp32": dsv41.FLOAT32, "bf16q": dsv41.OFFICIAL}


@functools.cache
def model():
    return dsv41.load(GOLDEN)


@functools.cache
def arrays(stem):
    """One .npz as a dict of read-only arrays."""
    with np.load(GOLDEN / f"{stem}.npz") as archive:
        found = {name: archive[name] for name in archive.files}
    for array in found.values():
        array.flags.writeable = False
    return found
