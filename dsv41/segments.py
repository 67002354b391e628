"""How does a cached block lie on disk so that it can be trusted without any other file?

A segment file is a row of records, each on a multiple of 64 bytes:

    magic 4 | key bytes 4 | payload bytes 8 | fingerprint 16 | checksum 16 | key, pad | payload, pad

The checksum is BLAKE2b over lengths, key and payload, keyed by the model's fingerprint. CRC-32 is
four times faster, but binds nothing and passes one damaged block in 2^32; 57 KB take 0.1 ms.

Other processes map segments, and reading a map whose file lost bytes kills the process. So a record
that was ever listed is never overwritten or cut off: a segment is appended to, or removed as a
whole. The right to do either is its flock, which the kernel takes back from a process that dies.
Left out: compression; network file systems; Windows, which has no flock.
"""

import fcntl
import mmap
import os
import re
import struct
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

MAGIC = b"kvR1"  # a change of the format changes it
HEADER = struct.Struct("<4sIQ16s16s")
ALIGN = 64  # payloads start on it, so that a view of them suits any dtype
MAPS = 64  # mapped segments a process keeps; each costs a file descriptor


class Record(NamedTuple):
    fingerprint: bytes  # (16,)
    key: bytes
    payload: memoryview
    checksum: bytes  # (16,)

    @property
    def extent(self):
        return extent(len(self.key), len(self.payload))


def extent(key_bytes, payload_bytes):
    """Bytes that a record takes in its segment."""
    return _padded(HEADER.size + key_bytes) + _padded(payload_bytes)


def _padded(size):
    return -(-size // ALIGN) * ALIGN


def sign(fingerprint, key, payload):
    """-> the Record, with its checksum."""
    lengths = struct.pack("<IQ", len(key), len(payload))
    summed = blake2b(lengths, digest_size=16, key=fingerprint)
    summed.update(key)
    summed.update(payload)
    return Record(fingerprint, key, payload, summed.digest())


def write_record(fd, offset, record):
    """-> the offset behind it. After an OSError a part of it may be there."""
    sizes = len(record.key), len(record.payload)
    head = HEADER.pack(MAGIC, *sizes, record.fingerprint, record.checksum) + record.key
    offset = _write(fd, head.ljust(_padded(len(head)), b"\0"), offset)
    offset = _write(fd, record.payload, offset)
    return _write(fd, bytes(-sizes[1] % ALIGN), offset)


def _write(fd, data, offset):
    rest = memoryview(data)
    while rest:  # trap: a disk about to be full takes a part and only then complains
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written
    return offset


def read_record(data, offset):
    """Bytes of a segment -> the Record at `offset`; None unless all of it is there and verifies."""
    begin = offset + HEADER.size
    if offset < 0 or offset % ALIGN or begin > len(data):
        return None
    magic, key_bytes, payload_bytes, fingerprint, checksum = HEADER.unpack_from(data, offset)
    start = offset + _padded(HEADER.size + key_bytes)
    if magic != MAGIC or start + payload_bytes > len(data):
        return None
    key = bytes(data[begin : begin + key_bytes])
    record = sign(fingerprint, key, memoryview(data)[start : start + payload_bytes])
    return record if record.checksum == checksum else None


def scan(data):
    """Bytes of a segment -> (offset, Record) of all that verify; damaged stretches are skipped."""
    offset = data.find(MAGIC)
    while offset >= 0:
        record = read_record(data, offset)
        if record:
            yield offset, record
        offset = data.find(MAGIC, offset + (record.extent if record else 1))


def segment_path(directory, segment):
    """Segments are numbers, so that no damaged index can lead out of the directory."""
    return directory / f"{segment:016x}.kv"


def list_segments(directory):
    """-> {segment: bytes} of the files named like a segment."""
    sizes = {}
    for entry in os.scandir(directory):
        if re.fullmatch(r"[0-9a-f]{16}\.kv", entry.name):
            try:
                sizes[int(entry.name[:16], 16)] = os.stat(entry.path).st_size
            except FileNotFoundError:  # another process removed it since
                continue
    return sizes


@contextmanager
def locked(path, create=False):
    """A descriptor with the right to append to a segment or remove it; None if another has it."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        fd = os.open(path, flags, 0o666)
    except (FileNotFoundError, FileExistsError):
        yield None
        return
    try:
        # trap: between open and lock another process may have locked, removed and left the file
        yield fd if try_lock(fd) and os.fstat(fd).st_nlink else None
    finally:
        os.close(fd)


def try_lock(fd):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


class Maps:
    """The segments that this process reads. Views of a map stay valid when it leaves this list."""

    def __init__(self, directory):
        self._directory = directory
        self._maps = {}  # least recently used first

    def get(self, segment, end=1):
        """-> a read-only map of at least `end` bytes; None if the file is gone or shorter."""
        data = self._maps.pop(segment, None)
        if data is None or len(data) < end:
            self._drop_removed()
            data = self._map(segment)
        # trap: a map keeps its length when its file is cut, and reading there kills the process
        if data is None or min(len(data), data.size()) < end:
            return None
        self._maps[segment] = data
        return data

    def _map(self, segment):
        try:
            with open(segment_path(self._directory, segment), "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError):  # ValueError: nothing to map
            return None

    def _drop_removed(self):
        # trap: the disk keeps the bytes of a removed file for as long as somebody maps it
        kept = list(self._maps.items())[1 - MAPS :]
        self._maps = {s: m for s, m in kept if segment_path(self._directory, s).exists()}
