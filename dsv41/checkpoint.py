"""How does a directory in the released layout become `params`?

    config.json                          which model, and so which tensors (tensors.py)
    model.safetensors                    all of them, or
    model.safetensors.index.json         {"weight_map": {tensor name: shard file}} and the shards

Opening reads headers only. `load_params` compares every name, shape and type with the config before
it uses a number, and returns nested dicts whose keys spell the tensor names; a quantised weight and
its scale are one leaf. A model that fits in memory becomes float32 arrays. A larger one keeps its
bytes on disk: leaves are QuantizedWeight or Bf16Weight over memory maps, decoded when used. Engram
tables always stay on disk, as codes and scales, and are read by the row (engram.py).

Source: the layout of the release on Hugging Face. trap: E8M0 scales and FP4 pairs are bytes, not
numbers; casting one instead of decoding it rescales every weight without an error.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np

from .config import Config
from .formats import decode_bf16
from .quant import QuantizedWeight, require_finite_weight
from .safetensors import TensorFile, parse_json
from .tensors import PARTS, dense_bytes, expected_tensors, nest, part_of

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHOWN = 5  # problems spelled out in one error


class Checkpoint:
    """An opened directory: `config`, `names`, `entry(name)`, `raw(name)`, `check()`, `extra`."""

    def __init__(self, directory):
        """Reads config.json and all headers. ValueError when one of them cannot be believed."""
        self.directory = Path(directory)
        self.config = Config.load(self.directory / CONFIG)
        self.files = open_tensors(self.directory)

    @property
    def names(self):
        """Names of all tensors, in file order."""
        return tuple(self.files)

    @cached_property
    def expected(self):
        """name -> TensorSpec, what the config asks for."""
        return expected_tensors(self.config)

    @property
    def extra(self):
        """Names of tensors that the config does not ask for."""
        return tuple(name for name in self.files if name not in self.expected)

    def entry(self, name):
        """-> TensorEntry: dtype, shape, nbytes, file."""
        return self._file(name).entries[name]

    def raw(self, name):
        """-> the stored array, a read-only view of the mapped file (types as in safetensors.py)."""
        return self._file(name).array(name)

    def check(self, parts=PARTS):
        """One ValueError that lists tensors of `parts` that are missing, misshapen or mistyped."""
        problems = []
        for name, spec in self.expected.items():
            if part_of(name) in parts:
                problems += self._problems(name, spec)
        raise_if_any(problems, f"{self.directory}: tensors do not fit {CONFIG}")

    def _problems(self, name, spec):
        if name not in self.files:
            yield f"{name} is missing"
            return
        found = self.entry(name)
        if (found.dtype, found.shape) != (spec.dtype, spec.shape):
            wanted = f"{spec.dtype} {list(spec.shape)}"
            yield f"{name} is {found.dtype} {list(found.shape)}, expected {wanted}"

    def _file(self, name):
        if name not in self.files:
            raise ValueError(f"{self.directory}: no tensor {name!r}")
        return self.files[name]


def raise_if_any(problems, title):
    """One ValueError for a list of sentences, of which it spells out the first few."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"{title}: {'; '.join(problems[:SHOWN])}{more}")


def open_tensors(directory):
    """directory -> name -> TensorFile that holds it, for one file or an index with shards."""
    directory = Path(directory)
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{directory}: holds {SINGLE} and {INDEX}; which one is meant?")
    if index.exists():
        return _open_shards(directory, parse_json(index.read_bytes(), index).get("weight_map"))
    if not single.exists():
        raise ValueError(f"{directory}: neither {SINGLE} nor {INDEX}; pickles are never opened")
    file = TensorFile.open(single)
    return dict.fromkeys(file.entries, file)


def _open_shards(directory, weight_map):
    """weight_map: tensor name -> shard file name, from the index."""
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise ValueError(f"{directory / INDEX}: weight_map must map tensor names to file names")
    paths = {shard: _path_inside(directory, shard) for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, path in paths.items() if not path.is_file()]
    raise_if_any(missing, f"{directory}: missing shards")
    files = {shard: TensorFile.open(path) for shard, path in paths.items()}
    lacking = [
        f"{name} is not in {shard}"
        for name, shard in weight_map.items()
        if name not in files[shard].entries
    ]
    raise_if_any(lacking, f"{directory / INDEX}: promises what its shards lack")
    return {name: files[shard] for name, shard in weight_map.items()}


def _path_inside(directory, shard):
    """The path of a shard; ValueError when an index leads out of its directory."""
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links into the repository's blobs
        roots.append(root.parent.parent / "blobs")
    path, spelled = root / shard, PurePosixPath(shard)
    is_inside = any(path.resolve().is_relative_to(folder) for folder in roots)
    if spelled.is_absolute() or ".." in spelled.parts or not is_inside:
        raise ValueError(f"{directory / INDEX}: shard {shard!r} lies outside the directory")
    return path


@dataclass(frozen=True)
class Bf16Weight:
    """A matrix as stored: bf16 codes (N, K) uint16, possibly a memory map, and its name."""

    codes: np.ndarray
    name: str = "weight"

    @property
    def shape(self):
        return self.codes.shape

    def dense(self):
        """-> (N, K) f32, exact. Raises ValueError, naming the tensor, when a NaN is stored."""
        return require_finite_weight(decode_bf16(self.codes), self.name)

    def rows(self, ids):
        """ids (T,) int -> (T, K) f32; reads these rows only."""
        return require_finite_weight(decode_bf16(self.codes[ids]), f"{self.name} (rows asked for)")


def load_params(checkpoint, resident_bytes=2 << 30, parts=("text",)):
    """Checkpoint -> params, nested dicts of float32 arrays, QuantizedWeight and Bf16Weight.

    All leaves are dense when the text model takes at most `resident_bytes` that way. Otherwise
    only vectors and F32 tensors are. Engram's embed.weight and embed.scale are uint8 views of the
    file in both cases. parts: which of "text", "dspark", "vision". Every dense leaf is checked
    to be finite; ValueError names the tensor and the position.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"parts: expected some of {', '.join(PARTS)}, got {sorted(unknown)}")
    checkpoint.check(parts)
    resident = dense_bytes(checkpoint.config) <= resident_bytes
    return nest(
        {
            name: _load_leaf(checkpoint, name, spec, resident)
            for name, spec in checkpoint.expected.items()
            if part_of(name) in parts and spec.layout != "scale"
        }
    )


def _load_leaf(checkpoint, name, spec, resident):
    stored = checkpoint.raw(name)
    if spec.layout == "table":
        return stored
    if spec.layout:  # the FP4 pairs come as signed bytes
        scales = checkpoint.raw(scale_of(name))
        leaf = QuantizedWeight(stored.view(np.uint8), scales, spec.layout, name)
    elif spec.dtype == "BF16":
        leaf = Bf16Weight(stored, name)
    else:
        return require_finite_weight(np.array(stored), name)
    return leaf.dense() if resident or len(spec.shape) == 1 else leaf


def scale_of(weight):
    """The tensor that holds the scales of `weight`, by name."""
    return weight.removesuffix("weight") + "scale"


_GROUPS = (  # (what a tensor's name contains, its line in the inventory); the first match counts
    ("mtp.", "DSpark"),
    ("vision.", "vision"),
    ("aligner.", "vision"),
    ("image_", "vision"),
    (".engram.embed.", "Engram tables"),
    (".engram.", "Engram projections"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".gate.", "router"),
    (".indexer.", "indexer"),
    (".compressor.", "compressor"),
    (".attn.", "attention"),
    (".hc_", "mHC"),
    ("embed.", "embedding and head"),
    ("head.", "embedding and head"),
    ("norm.", "norms"),
    ("", "other"),
)


def inventory(checkpoint):
    """-> rows (group, tensors, dtype, bytes), largest first, that add up to the whole files."""
    counts, sizes = Counter(), Counter()
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        key = next(group for part, group in _GROUPS if part in name), entry.dtype
        counts[key] += 1
        sizes[key] += entry.nbytes
    return [
        (group, counts[group, dtype], dtype, size) for (group, dtype), size in sizes.most_common()
    ]
