"""A malformed file is refused for the right reason; written arrays come back byte by byte."""

import json
import os
import pickle

import numpy as np
import pytest

from dsv41.formats import decode_e8m0, unpack_nibbles
from dsv41.safetensors import TensorFile, atomic_file, write_tensors

GOOD_HEADER = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
EIGHT = np.array([1.5, -2.0], np.float32).tobytes()


def tensor_file(header, data=b"", length=None):
    """Bytes of a file with `header` (text or object), lying about its length when asked to."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path_or_bytes, tmp_path, source):
    if source == "memory":
        return TensorFile(np.frombuffer(path_or_bytes, np.uint8))
    (tmp_path / "x.safetensors").write_bytes(path_or_bytes)
    return TensorFile.open(tmp_path / "x.safetensors")


F32_2 = entry("F32", [2], 0, 8)
MALFORMED = {
    "empty": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "header of 2^40 bytes": (tensor_file(GOOD_HEADER, EIGHT, length=2**40), "1099511627776 bytes"),
    "header one byte short": (tensor_file(GOOD_HEADER, EIGHT, length=53), "header"),
    "header one byte beyond": (tensor_file(GOOD_HEADER, b"", length=55), "header of 55 bytes"),
    "not UTF-8": (b"\x07" + b"\0" * 7 + b'{"\xff":1}', "utf-8"),
    "a list": (tensor_file([1]), "JSON object, got list"),
    "nested too deep": (tensor_file("[" * 100_000), "header"),
    "data cut": (tensor_file(GOOD_HEADER, EIGHT[:7]), "'a': ends at byte 8"),
    "range too long": (tensor_file({"a": entry("F32", [2], 0, 12)}, b"\0" * 12), "'a': .*8 bytes"),
    "range too late": (tensor_file({"a": entry("F32", [2], 4, 12)}, EIGHT), "'a': ends at byte 12"),
    "range backwards": (tensor_file({"a": entry("F32", [2], 8, 0)}, EIGHT), "'a': .* no range"),
    "range negative": (tensor_file({"a": entry("F32", [2], -8, 0)}, EIGHT), "'a': .* no range"),
    "range of booleans": (tensor_file({"a": entry("U8", [1], False, True)}, b"1"), "'a': .*range"),
    "shape too large": (tensor_file({"a": entry("F32", [3], 0, 8)}, EIGHT), "'a': .* 12 bytes"),
    "shape of fractions": (tensor_file({"a": entry("F32", [2.0], 0, 8)}, EIGHT), "'a': .*shape"),
    "shape negative": (tensor_file({"a": entry("F32", [-1, -2], 0, 8)}, EIGHT), "'a': .*shape"),
    "shape beyond int64": (tensor_file({"a": entry("F32", [0, 2**70], 0, 0)}), "'a': .*shape"),
    "shape missing": (tensor_file({"a": {"dtype": "F32"}}, EIGHT), "'a': needs dtype, shape"),
    "three offsets": (
        tensor_file({"a": {**F32_2, "data_offsets": [0, 8, 8]}}, EIGHT),
        "'a': needs .* two data_offsets",
    ),
    "overlap": (
        tensor_file({"a": F32_2, "b": entry("F32", [2], 4, 12)}, b"\0" * 12),
        "'b': overlaps",
    ),
    "same range": (tensor_file({"a": F32_2, "b": F32_2}, EIGHT), "'b': overlaps"),
    "hole": (
        tensor_file({"a": F32_2, "b": entry("F32", [2], 12, 20)}, b"\0" * 20),
        "'b': a hole of 4 bytes",
    ),
    "hole in front": (tensor_file({"a": entry("F32", [1], 4, 8)}, EIGHT), "'a': a hole of 4"),
    "trailing byte": (tensor_file(GOOD_HEADER, EIGHT + b"\0"), "1 bytes behind the last"),
    "only data": (tensor_file({}, b"\0"), "1 bytes behind the last"),
    "duplicate name": (tensor_file(GOOD_HEADER[:-1] + "," + GOOD_HEADER[1:], EIGHT), "'a' appears"),
    "duplicate field": (
        tensor_file(GOOD_HEADER.replace("}}", ',"dtype":"I32"}}'), EIGHT),
        "'dtype'",
    ),
    "dtype F33": (tensor_file(GOOD_HEADER.replace("F32", "F33"), EIGHT), "'a': .*dtype 'F33'"),
    "dtype a list": (tensor_file({"a": entry(["F32"], [2], 0, 8)}, EIGHT), "'a': .*dtype"),
    "F4 odd": (tensor_file({"a": entry("F4", [2, 7], 0, 7)}, b"\0" * 7), "'a': .*even last axis"),
    "F4 scalar": (tensor_file({"a": entry("F4", [], 0, 1)}, b"\0"), "'a': .*even last axis"),
    "metadata": (tensor_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "pickle": (pickle.dumps({"a": np.zeros(2)}), "not a safetensors file.*pickles"),
    "torch zip": (b"PK\x03\x04" + b"\0" * 60, "not a safetensors file"),
}


@pytest.mark.parametrize("source", ["memory", "file"])
@pytest.mark.parametrize("variant", MALFORMED)
def test_a_malformed_file_is_refused_before_any_tensor(variant, source, tmp_path):
    data, reason = MALFORMED[variant]
    with pytest.raises(ValueError, match=reason) as caught:
        read(data, tmp_path, source)
    assert ("memory" if source == "memory" else "x.safetensors") in str(caught.value)


@pytest.mark.parametrize("source", ["memory", "file"])
def test_the_good_file_loads_read_only(source, tmp_path):
    assert len(GOOD_HEADER) == 54
    file = read(tensor_file(GOOD_HEADER, EIGHT), tmp_path, source)
    assert file.array("a").tolist() == [1.5, -2.0]
    assert file.entries["a"].nbytes == 8
    with pytest.raises(ValueError, match="read-only"):
        file.array("a")[0] = 0
    writable = np.frombuffer(tensor_file(GOOD_HEADER, EIGHT), np.uint8).copy()
    assert not TensorFile(writable).array("a").flags.writeable


def test_a_header_beyond_the_limit_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as out:
        out.write((1 << 34).to_bytes(8, "little"))
        out.truncate((1 << 34) + 8)
    with pytest.raises(ValueError, match="limit 100000000"):
        TensorFile.open(path)


def test_any_damage_to_a_header_is_a_value_error_or_harmless():
    good = tensor_file({"a": F32_2, "b": entry("BF16", [2, 2], 8, 16)}, EIGHT * 2)
    rng, refused = np.random.default_rng(0), 0
    for _ in range(2000):
        damaged = np.frombuffer(good, np.uint8).copy()
        at = rng.integers(0, len(good) - 16, rng.integers(1, 4))
        damaged[at] = rng.integers(0, 128, len(at))
        try:
            file = TensorFile(damaged)
            assert sum(file.array(name).nbytes for name in file.entries) == 16
        except ValueError:
            refused += 1
    assert 1000 < refused < 2000


@pytest.mark.parametrize("source", ["memory", "file"])
def test_small_formats_come_as_bytes(source, tmp_path):
    """trap: E8M0 byte 120 is 2^-7; read as a number it would be 120."""
    header = {"f4": entry("F4", [2, 8], 0, 8), "scale": entry("F8_E8M0", [3], 8, 11)}
    data = bytes([0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F, 120, 127, 0])
    file = read(tensor_file(header, data), tmp_path, source)
    packed = file.array("f4")
    assert (packed.shape, packed.dtype) == ((2, 4), np.uint8)
    assert unpack_nibbles(packed).tolist() == [[*range(1, 9)], [*range(9, 16), 0]]
    scales = decode_e8m0(file.array("scale"))
    assert scales.tolist() == [0.0078125, 1.0, 2.0**-127]


def test_written_bytes_depend_on_names_and_values_only(tmp_path):
    arrays = {
        "b": np.arange(3, dtype=np.uint8),
        "a": np.arange(5, dtype=np.uint8).reshape(1, 5)[:, ::2],  # strided
        "wide": np.float32(2.5).reshape(()),
        "none": np.zeros((0, 4), np.uint16),
    }
    dtypes = {"b": "F8_E8M0", "a": "F8_E4M3", "wide": "F32", "none": "BF16"}
    specs = {name: (dtypes[name], arrays[name].shape) for name in arrays}
    write_tensors(tmp_path / "1", specs, arrays.get)
    write_tensors(tmp_path / "2", dict(reversed(specs.items())), arrays.get)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    file = TensorFile.open(tmp_path / "1")
    assert list(file.entries) == ["wide", "none", "a", "b"]
    assert int.from_bytes((tmp_path / "1").read_bytes()[:8], "little") % 8 == 0
    for name, array in arrays.items():
        assert np.array_equal(file.array(name), array), name


def test_an_array_of_another_type_is_not_cast_into_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"a: F8_E8M0 \[2\] is stored as uint8"):
        write_tensors(tmp_path / "x", {"a": ("F8_E8M0", (2,))}, lambda _: np.ones(2, np.float32))
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), atomic_file(path) as out:
        out.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
