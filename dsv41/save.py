"""How do `params` become a directory in the released layout?

    leaf                                          what is written
    float32                                       rounded to the tensor's type (tensors.py)
    QuantizedWeight, Bf16Weight, Engram codes     the same bits

Floats that came from a stored type keep their value, though not always their bytes: the scale is
chosen anew. Names, shapes and types are compared with the config before anything is written. A file
appears complete or not at all, and an index only after all shards that it promises.

Source: the layout of the release on Hugging Face, as checkpoint.py reads it. Left out: the
tokenizer and other files of the release, which are not made from params.
"""

import json
from pathlib import Path

import numpy as np

from .checkpoint import CONFIG, INDEX, SINGLE, Bf16Weight, raise_if_any, scale_of
from .formats import encode_bf16, f32
from .ops import dense
from .quant import WEIGHT_FP8, QuantizedWeight, quantize_weight, require_finite_weight
from .safetensors import DTYPES, atomic_file, write_tensors
from .tensors import expected_tensors, flatten


def save(directory, config, params, shard_bytes=None):
    """Write params, of every part that the config has, in the released layout.

    `shard_bytes` spreads the tensors over files of at most that size (a larger tensor gets its
    own). ValueError when params do not fit the config, when a float is not finite, or when the
    directory already holds the other layout: one file beside an index.
    """
    directory, expected = Path(directory), expected_tensors(config)
    leaves = _quantize_tables(flatten(params))
    _check_leaves(leaves, expected)
    other = directory / (SINGLE if shard_bytes else INDEX)
    if other.exists():
        raise ValueError(f"{other}: exists; a second layout beside it would contradict it")
    directory.mkdir(parents=True, exist_ok=True)
    files = _split(expected, shard_bytes)
    for file, names in files.items():
        tensors = {name: (expected[name].dtype, expected[name].shape) for name in names}
        write_tensors(directory / file, tensors, lambda name: _stored(name, leaves, expected))
    _write_json(directory / CONFIG, config.to_dict())
    if shard_bytes:
        total = sum(spec.nbytes for spec in expected.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        _write_json(directory / INDEX, dict(metadata={"total_size": total}, weight_map=weight_map))


def _quantize_tables(leaves):
    """leaves with every float32 Engram table replaced by its codes and scales, per 32 of a row."""
    for name in [name for name in leaves if name.endswith("engram.embed.weight")]:
        if leaves[name].dtype != np.uint8:
            table = WEIGHT_FP8.quantize(_finite(leaves[name], name))
            leaves[name], leaves[scale_of(name)] = table
    return leaves


def _check_leaves(leaves, expected):
    """Refuse params that another config would describe, before anything is written."""
    wanted = {name: spec for name, spec in expected.items() if spec.layout != "scale"}
    problems = [f"{name} is no leaf of this model" for name in leaves if name not in wanted]
    for name, spec in wanted.items():
        problems += _leaf_problems(name, spec, leaves.get(name))
    raise_if_any(problems, "params do not fit the config")


def _leaf_problems(name, spec, leaf):
    # trap: codes taken for numbers would be rounded and stored without an error
    kind = np.uint8 if spec.layout == "table" else np.floating
    if leaf is None:
        yield f"{name} is missing"
    elif leaf.shape != spec.logical_shape:
        yield f"{name} has shape {list(leaf.shape)}, expected {list(spec.logical_shape)}"
    elif isinstance(leaf, np.ndarray) and not np.issubdtype(leaf.dtype, kind):
        yield f"{name} has type {leaf.dtype}, expected {kind.__name__}"


def _split(expected, shard_bytes):
    """-> file name -> tensor names, in model order, each file filled up to shard_bytes."""
    if not shard_bytes:
        return {SINGLE: list(expected)}
    shards, room = [], 0
    for name, spec in expected.items():
        if not shards or spec.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= spec.nbytes
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def _stored(name, leaves, expected):
    """The array to store as tensor `name`; leaves as stored keep their bits."""
    spec = expected[name]
    if spec.layout == "scale":
        weight = name.removesuffix("scale") + "weight"
        return _quantized(leaves[weight], expected[weight].layout, weight).scales
    leaf = leaves[name]
    if spec.layout == "table":
        return leaf
    if spec.layout:
        return _quantized(leaf, spec.layout, name).codes.view(DTYPES[spec.dtype][1])
    if spec.dtype == "BF16":
        return leaf.codes if isinstance(leaf, Bf16Weight) else encode_bf16(_finite(leaf, name))
    return _finite(leaf, name)


def _quantized(leaf, layout, name):
    if isinstance(leaf, QuantizedWeight) and leaf.layout == layout:
        return leaf
    return quantize_weight(_finite(leaf, name), layout)


def _finite(leaf, name):
    return require_finite_weight(f32(dense(leaf)), name)


def _write_json(path, value):
    with atomic_file(path) as out:
        out.write((json.dumps(value, indent=2) + "\n").encode())
