"""Which stored bytes may a model trust?

Global KV computed by other weights, another tokenizer's Engram classes, other roundings or another
replay rule gives fluent wrong text. The fingerprint hashes all of these, so that a store never
answers for a model that did not write it:

    config as JSON | every weight's name, type, shape and bytes | Engram classes | numerics | rule

Weights in memory are hashed whole. A weight that stays on disk because the model is larger than
memory is represented by its name, shape and 64 samples of 4 KiB spread over it: a changed file is
all but certainly noticed, a deliberately forged one is not.
"""

import hashlib
import json
from dataclasses import asdict

import numpy as np

from .tensors import flatten

FORMAT = b"dsv41 global KV 1"
SAMPLES, SAMPLE_BYTES = 64, 4096


def fingerprint(model, numerics, exact):
    """32 bytes that identify model, numerics and whether prefills are exact."""
    digest = hashlib.blake2b(FORMAT, digest_size=32)
    digest.update(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, leaf in sorted(flatten(model.params).items()):
        for array in _arrays(leaf):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            _update(digest, array)
    if model.classes is not None:
        digest.update(model.classes.tobytes())
    digest.update(json.dumps([asdict(numerics), exact], sort_keys=True).encode())
    return digest.digest()


def _arrays(leaf):
    """The arrays behind a leaf: itself, or the codes and scales of a stored weight."""
    if isinstance(leaf, np.ndarray):
        return [leaf]
    return [getattr(leaf, part) for part in ("codes", "scales") if hasattr(leaf, part)]


def _update(digest, array):
    data = array.reshape(-1).view(np.uint8)
    if not isinstance(_root(array), np.memmap) or data.size <= SAMPLES * SAMPLE_BYTES:
        digest.update(np.ascontiguousarray(data))
        return
    for begin in np.linspace(0, data.size - SAMPLE_BYTES, SAMPLES).astype(np.int64):
        digest.update(np.ascontiguousarray(data[begin : begin + SAMPLE_BYTES]))


def _root(array):
    """The array that owns the memory: a view of a memory map is on disk too."""
    while isinstance(array, np.ndarray) and array.base is not None:
        if isinstance(array, np.memmap):
            return array
        array = array.base
    return array
