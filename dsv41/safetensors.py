"""How do named tensors lie in a file, and when may its bytes be believed?

    8 bytes   n, little-endian
    n bytes   JSON {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
    the rest  the tensors back to back; offsets count from here

A header comes from a stranger and its offsets steer every later read, so the whole of it is checked
before the first tensor is handed out: the tensors must tile the data exactly. What is handed out is
a read-only view of the file's bytes, so opening a file of any size costs its header, and a tensor
costs what is touched of it. NumPy lacks the small floats: BF16 comes as uint16, the 8-bit floats as
uint8, F4 as uint8 with two elements a byte; formats.py decodes them.

Source: format description in the README of huggingface/safetensors; its limit of 100 MB for a
header is kept. Left out: dtypes that no DeepSeek checkpoint uses. Nothing here executes a pickle.
"""

import json
import math
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DTYPES = {  # name -> bits of one element, and the NumPy type its bytes are handed out in
    "F64": (64, "<f8"),
    "F32": (32, "<f4"),
    "F16": (16, "<f2"),
    "BF16": (16, "<u2"),
    "I64": (64, "<i8"),
    "I32": (32, "<i4"),
    "I8": (8, "i1"),
    "U8": (8, "u1"),
    "BOOL": (8, "?"),
    "F8_E4M3": (8, "u1"),
    "F8_E8M0": (8, "u1"),
    "F4": (4, "u1"),
}
HEADER_LIMIT = 100_000_000  # bytes
AXES_LIMIT = 64  # NumPy's


@dataclass(frozen=True)
class TensorEntry:
    """One line of a header. `shape` is in elements; `begin` and `end` count from the data."""

    dtype: str
    shape: tuple
    begin: int
    end: int
    file: str

    @property
    def nbytes(self):
        return self.end - self.begin


class TensorFile:
    """A checked header over bytes: `entries` name -> TensorEntry, `array(name)` -> view."""

    def __init__(self, data, where="memory"):
        """data (size,) uint8, the whole file; `where` names it in errors. ValueError if malformed.

        One constructor serves memory and files, so both refuse the same things.
        """
        header, start = _read_header(data, where)
        self.where = str(where)
        self.metadata = header.pop("__metadata__", {})
        self.entries = _read_entries(header, len(data) - start, self.where)
        self._data = data[start:]

    @classmethod
    def open(cls, path):
        """Map the file at `path`. Only its header is read."""
        size = os.path.getsize(path)  # an empty file cannot be mapped
        data = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        return cls(np.asarray(data), path)

    def array(self, name):
        """-> read-only view, `stored_shape(dtype, shape)`, in the NumPy type of DTYPES."""
        entry = self.entries[name]
        view = self._data[entry.begin : entry.end].view(DTYPES[entry.dtype][1])
        view = view.reshape(stored_shape(entry.dtype, entry.shape))
        view.flags.writeable = False
        return view


def stored_shape(dtype, shape):
    """Shape of the array that holds a tensor: F4 has two elements a byte, so half the last axis."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else tuple(shape)


def tensor_bytes(dtype, shape):
    """Bytes of a tensor with `shape` elements of `dtype`."""
    return math.prod(shape) * DTYPES[dtype][0] // 8


def parse_json(data, where):
    """data bytes -> the one JSON object in them; ValueError for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:  # covers bad UTF-8 and bad JSON
        raise ValueError(f"{where}: {problem}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs):
    # trap: json keeps the last of two equal names, so half of the checks would see another tensor
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} appears {times} times")
    return value


def _read_header(data, where):
    """data (size,) uint8 -> header dict, offset of the tensors."""
    if len(data) < 8:
        raise ValueError(f"{where}: {len(data)} bytes are too short for a safetensors file")
    length = int.from_bytes(data[:8].tobytes(), "little")
    # compared before anything is read: this number may be 2^40
    if length > min(len(data) - 8, HEADER_LIMIT):
        raise ValueError(
            f"{where}: not a safetensors file: it promises a header of {length} bytes and has "
            f"{len(data)} (limit {HEADER_LIMIT}); pickles are never opened"
        )
    header = parse_json(data[8 : 8 + length].tobytes(), f"{where}: header")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{where}: header: __metadata__ must map names to strings")
    return header, 8 + length


def _read_entries(header, size, where):
    """header, bytes of data -> name -> TensorEntry, proven to tile the data exactly."""
    entries = {}
    for name, fields in header.items():
        try:
            entries[name] = _read_entry(fields, size, where)
        except ValueError as problem:
            raise ValueError(f"{where}: tensor {name!r}: {problem}") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end:
            raise ValueError(f"{where}: tensor {name!r}: overlaps the tensor before it")
        if entry.begin > end:
            raise ValueError(f"{where}: tensor {name!r}: a hole of {entry.begin - end} bytes")
        end = entry.end
    if end != size:
        raise ValueError(f"{where}: {size - end} bytes behind the last tensor")
    return entries


def _read_entry(fields, size, where):
    """The fields of one tensor -> TensorEntry; ValueError says what is wrong with them."""
    try:
        dtype, shape, (begin, end) = (fields[key] for key in ("dtype", "shape", "data_offsets"))
    except (TypeError, KeyError, ValueError):
        raise ValueError("needs dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or not _fits_array(shape):
        raise ValueError(f"impossible shape {shape!r}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise ValueError(f"F4 packs two elements a byte, so shape {shape} needs an even last axis")
    if not (_is_count(begin) and _is_count(end) and begin <= end):
        raise ValueError(f"data_offsets {begin!r}, {end!r} are no range")
    needed = tensor_bytes(dtype, shape)
    if end - begin != needed:
        raise ValueError(f"{dtype} {shape} takes {needed} bytes, data_offsets give {end - begin}")
    if end > size:
        raise ValueError(f"ends at byte {end}, the file has {size} bytes of data")
    return TensorEntry(dtype, tuple(shape), begin, end, where)


def _is_count(value):
    return type(value) is int and value >= 0  # a JSON true is an int to isinstance


def _fits_array(shape):
    return len(shape) <= AXES_LIMIT and math.prod(max(1, size) for size in shape) < 2**60


def write_tensors(path, tensors, read):
    """Write a safetensors file, one tensor in memory at a time.

    tensors: name -> (dtype, shape in elements); read(name) -> its array in the storage type.
    The bytes do not depend on the order of `tensors`: wide elements come first and names ascend,
    which also aligns every tensor to its element. The file appears complete or not at all.
    """
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]][0], name))
    with atomic_file(path) as out:
        out.write(_encode_header(order, tensors))
        for name in order:
            out.write(_as_stored(read(name), name, *tensors[name]))


def _encode_header(order, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0  # readers of other packages ask for it
    for name in order:
        dtype, shape = tensors[name]
        begin, end = end, end + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_stored(array, name, dtype, shape):
    """array, checked -> its bytes as (size,) uint8."""
    expected = (np.dtype(DTYPES[dtype][1]), stored_shape(dtype, shape))
    if (array.dtype, array.shape) != expected:
        raise ValueError(
            f"{name}: {dtype} {list(shape)} is stored as {expected[0]} {expected[1]}, "
            f"got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@contextmanager
def atomic_file(path):
    """A binary file to write that takes the name `path` only when the block ends without error.

    A file that was there before stays until then, and stays mapped in whoever has it mapped.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
