"""Which blocks of a prompt has this machine seen before, and how does the answer outlive a process?

    store = Store(directory, fingerprint, budget=100 << 30)
    n = store.longest(hashes)                        leading blocks that are there
    blocks = [store.get(h) for h in hashes[:n]]      verified; None where one is damaged after all
    store.put_many(zip(hashes[n:], payloads[n:]))

A block's key hashes it and all before it, so an entry never changes. Any number of processes and
threads share a directory; what was used longest ago is forgotten first. A cache must not break its
user: a full disk, a busy or damaged index, a refused write give a miss or False, one warning and
`last_error`; only opening what is not a store raises StoreError.
Files: `segments` (the bytes), `store_index` (SQLite), `store_files` (the order of writes).
Source: reports, sections 3.2.1 (V4.1) and 3.5.2 (V4). Left out: sharing between machines, a minimum
lifetime, an open store in a forked child.
"""

import os
import sqlite3
import threading
import warnings
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from .segments import extent, list_segments, read_record, sign
from .store_files import Files, rebuild
from .store_index import Index, StoreError

__all__ = ["Store", "StoreError"]

PENDING = 1 << 16  # uses remembered before they are written down


class Store:
    """key -> payload on disk.

    fingerprint: bytes that name weights, tokenizer and formats. Entries of another fingerprint may
    share the directory and its budget, and are never returned.
    budget: bytes for all segment files together, None is no limit. It holds after each call; during
    one a segment more may be there. The index comes on top.
    """

    def __init__(self, directory, fingerprint, budget=None, segment_bytes=64 << 20):
        if segment_bytes < 1 or (budget is not None and budget < 0):
            raise ValueError(f"segment_bytes, budget: got {segment_bytes}, {budget}")
        self.directory, self.last_error = Path(directory), None
        self.fingerprint = blake2b(fingerprint, digest_size=16).digest()
        self.budget = budget
        if budget is not None:  # an eighth, so that room can be made in parts
            segment_bytes = min(segment_bytes, budget // 8)
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._counts = dict.fromkeys(("hits", "misses", "corrupt", "evicted"), 0)
        self._chain, self._reads = {}, {}  # keys used since uses were last written down, in order
        self.directory.mkdir(parents=True, exist_ok=True)
        self._index = Index(self.directory, rebuild)
        self._files = Files(self.directory, self._index, segment_bytes)
        if not self._index.readonly:
            with self._quiet():
                self._counts["corrupt"] += self._files.sweep()

    # ---- read ------------------------------------------------------------------------------

    def get(self, key):
        """-> payload, a read-only view that stays valid whatever happens to the store, or None."""
        with self._lock:
            payload = None
            with self._quiet():
                payload = self._find(_as_key(key))
            self._counts["misses" if payload is None else "hits"] += 1
            return payload

    def _find(self, key):
        for _ in range(2):  # once more, as another process may have moved the record in between
            place = self._index.place(self.fingerprint, key)
            if place is None:
                return None
            payload = self._read(key, *place)
            if payload is not None:
                self._note_read(key)
                return payload
            if self._drop(key, *place[:2]):
                return None
        return None

    def _read(self, key, segment, offset, length, checksum):
        data = self._files.maps.get(segment, offset + extent(len(key), length))
        record = None if data is None else read_record(data, offset)
        if record is None:
            return None
        found = (record.fingerprint, record.key, len(record.payload), record.checksum)
        return record.payload if found == (self.fingerprint, key, length, checksum) else None

    def _drop(self, key, segment, offset):
        """Forget a damaged record. -> whether it was still listed at this place."""
        gone = 1
        if not self._index.readonly:
            gone = self._index.drop(self.fingerprint, key, segment, offset)
        self._counts["corrupt"] += gone
        return gone

    def __contains__(self, key):
        """Whether the index lists the key; only `get` looks at the payload."""
        with self._quiet():
            return self._index.place(self.fingerprint, _as_key(key)) is not None
        return False

    def longest(self, keys):
        """Keys of a chain, of one length -> how many leading ones are listed; these are used."""
        keys = [_as_key(key) for key in keys]
        size = len(keys[0]) if keys else 0
        if any(len(key) != size for key in keys):
            raise ValueError("keys: expected the same length for all keys of a chain")
        count = 0
        with self._quiet():
            count = self._index.leading(self.fingerprint, b"".join(keys), size)
            self._begin_chain(keys[:count])
        return count

    # ---- write -----------------------------------------------------------------------------

    def put(self, key, payload):
        """payload: bytes or a C-contiguous view. -> False: it was there, or could not be stored."""
        return self.put_many([(key, payload)]) == 1

    def put_many(self, items):
        """[(key, payload)], a chain from its head -> how many were stored that were not there.

        A crash loses what the call has not listed yet: it lists each time a segment is full.
        """
        items = {_as_key(key): memoryview(payload).cast("B") for key, payload in items}
        if not all(items):
            raise ValueError("key: expected at least one byte")
        stored = 0
        with self._quiet():
            listed = {key for key in items if key in self}
            if listed:
                self._begin_chain(key for key in items if key in listed)
            fresh = [item for item in items.items() if item[0] not in listed]
            use = self._write_uses(len(fresh)) if fresh else 0
            for group in self._groups(fresh):
                stored += self._files.append([sign(self.fingerprint, *item) for item in group], use)
                use -= len(group)
                if self._is_over():
                    self.evict()
        return stored

    def _groups(self, items):
        """Cut [(key, payload)] into lists that fit a segment, without what no budget allows."""
        group, size = [], 0
        for item in items:
            needed = extent(*map(len, item))
            if self.budget is not None and needed > self._low_water():
                self._note(f"budget {self.budget} is too small for {len(item[1])} bytes")
                continue
            if group and size + needed > self._files.segment_bytes:
                yield group
                group, size = [], 0
            group.append(item)
            size += needed
        if group:
            yield group

    # ---- forget ----------------------------------------------------------------------------

    def evict(self):
        """Bring the files under the budget. -> records forgotten."""
        forgotten = 0
        with self._quiet():
            self._write_uses()
            if self._is_over():
                with self._index.transaction():
                    forgotten = self._index.drop_oldest(self._index.live() - self._low_water())
            self._counts["evicted"] += forgotten
            self._counts["corrupt"] += self._files.sweep()
            for segment, size, live in self._index.segments():
                if live >= size or not self._is_over():
                    break
                self._counts["corrupt"] += self._files.compact(segment)
        return forgotten

    def _is_over(self):
        return self.budget is not None and self._index.size() > self.budget

    def _low_water(self):
        # an eighth below: then an eighth at least is dead, and copying the living is worth it
        return self.budget - self.budget // 8

    def touch(self, keys):
        """Count a chain as used now, for all processes."""
        with self._quiet():
            self._begin_chain(_as_key(key) for key in keys)
            self._write_uses()

    def _begin_chain(self, keys):
        self._write_uses()  # those of the request before are complete
        self._chain = dict.fromkeys(keys)

    def _note_read(self, key):
        if key not in self._chain:
            self._reads.setdefault(key)
        if len(self._reads) >= PENDING:
            self._write_uses()

    def _write_uses(self, reserve=0):
        """Write down the pending uses. -> the use of the first of `reserve` records to come.

        trap: without its head a chain is worth nothing, and the head is read first. So within one
        writing what came first counts as latest, and a chain before what is stored behind it.
        """
        chain, reads = self._chain, self._reads
        self._chain, self._reads = {}, {}
        if self._index.readonly or not (chain or reads or reserve):
            return 0
        uses = [*chain, *[None] * reserve, *reads]
        top = self._index.latest_use() + len(uses)
        rows = [(top - n, self.fingerprint, key) for n, key in enumerate(uses) if key is not None]
        if rows:
            with self._index.transaction():
                self._index.set_uses(rows)
        return top - len(chain)

    # ---- the rest --------------------------------------------------------------------------

    @property
    def stats(self):
        """Counts of this object; bytes of all segment files and records of all fingerprints."""
        records = size = 0
        with self._quiet():
            records = self._index.one("SELECT COUNT(*) FROM records")
            size = sum(list_segments(self.directory).values())
        return {**self._counts, "records": records, "bytes": size}

    def close(self):
        """Write down the last uses and let go of the files; the store cannot be used afterwards."""
        with self._lock:
            if self._index is not None:
                with self._quiet():
                    self._write_uses()
                self._index.close()
                self._index = self._files = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @contextmanager
    def _quiet(self):
        """For one thread at a time: what goes wrong on disk is noted, and the block is left."""
        with self._lock:
            if self._index is None or self._pid != os.getpid():
                raise StoreError(f"{self.directory}: it was closed, or opened before a fork")
            try:
                yield
            except (OSError, sqlite3.Error) as problem:
                self._note(f"{type(problem).__name__}: {problem}")

    def _note(self, problem):
        if self.last_error is None:
            warnings.warn(f"store {self.directory}: {problem}", RuntimeWarning, stacklevel=2)
        self.last_error = problem


def _as_key(key):
    return memoryview(key).tobytes()  # bytes(5) would be five zeros
