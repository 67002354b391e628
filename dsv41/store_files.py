"""How do several processes write into one directory, and one be killed, without losing a record?

The order of an append: lock a segment with room, cut what lies behind the last listed record, write
whole records, list them in one transaction, unlock. A process killed anywhere leaves bytes that no
index lists; the next writer of that segment cuts them off, and so does whoever opens the store.
A writer that finds the segments taken starts one of its own, so writers do not wait for each
other's bytes, only for the short transaction. To remove a segment: lock, unlist, unlink.

Nothing is synced to the disk. That matters only when the machine stops: the index may then list
bytes that never arrived. They do not verify, the block counts as missing, and is computed again.
Left out: who decides what to write and to forget (`store`).
"""

import os
import secrets
from contextlib import ExitStack, contextmanager

from .segments import (
    Maps,
    list_segments,
    locked,
    read_record,
    scan,
    segment_path,
    write_record,
)


def rebuild(directory, index):
    """List every record that verifies in the segments of `directory`, also once forgotten ones."""
    maps = Maps(directory)
    for segment in list_segments(directory):
        with locked(segment_path(directory, segment)) as fd:
            data = None if fd is None else maps.get(segment)
            if found := list(scan(data or b"")):
                offset, record = found[-1]
                rows = [_row(segment, offset, record, 0) for offset, record in found]
                index.add(segment, offset + record.extent, rows)


def _row(segment, offset, record, use):
    place = segment, offset, len(record.payload), record.extent, record.checksum
    return record.fingerprint, record.key, *place, use


class Files:
    """The segments of a directory, changed together with their index."""

    def __init__(self, directory, index, segment_bytes):
        self.directory, self.segment_bytes = directory, segment_bytes
        self._index, self.maps = index, Maps(directory)

    # ---- append ----------------------------------------------------------------------------

    def append(self, records, use):
        """Write [Record], then list them, used at `use`, use - 1, ... -> how many were new."""
        with self._claim(sum(record.extent for record in records)) as (segment, fd, tail):
            rows = []
            for n, record in enumerate(records):
                rows.append(_row(segment, tail, record, use - n))
                tail = write_record(fd, tail, record)
            with self._index.transaction():
                return self._index.add(segment, tail, rows)

    @contextmanager
    def _claim(self, needed):
        """-> segment, descriptor, tail: room for `needed` bytes to which only we can append."""
        if not self._index.is_current():
            raise OSError(f"{self._index.path} was removed or replaced: open the store again")
        for segment, create in self._candidates(needed):
            with self._created(segment) if create else locked(self._path(segment)) as fd:
                # asked again under the lock: another process may have filled or removed it
                tail = 0 if create else self._index.tail(segment)
                fits = create or (tail is not None and tail + needed <= self.segment_bytes)
                if fd is None or not fits:
                    continue
                os.ftruncate(fd, tail)
                try:
                    yield segment, fd, tail
                except BaseException:
                    self._cut(segment, fd)
                    raise
                return
        raise OSError(f"{self.directory}: no segment could be created")

    def _candidates(self, needed):
        for segment in self._index.roomy(self.segment_bytes - needed):
            yield segment, False
        yield secrets.randbits(62), True

    @contextmanager
    def _created(self, segment):
        with ExitStack() as opened:
            # trap: a sweep would remove a file between creation and lock; it waits for us
            with self._index.transaction():
                fd = opened.enter_context(locked(self._path(segment), create=True))
            yield fd

    def _cut(self, segment, fd):
        # trap: an interrupt can arrive after the commit; the index knows, the failure does not
        tail = self._index.tail(segment)
        if tail is None:
            self._path(segment).unlink(missing_ok=True)
        elif os.fstat(fd).st_size > tail:
            os.ftruncate(fd, tail)

    # ---- remove ----------------------------------------------------------------------------

    def sweep(self):
        """Remove what a crash or an eviction left. -> records that lost their bytes."""
        # trap: the index first; a segment made between the two would look lost
        listed = {segment: (size, live) for segment, size, live in self._index.segments()}
        files, lost = list_segments(self.directory), 0
        for segment in listed.keys() | files.keys():
            (size, live), found = listed.get(segment, (0, 0)), files.get(segment, 0)
            if found < size:
                lost += self._index.drop_beyond(segment, found)
            if live == 0 or found != size:
                self._reclaim(segment)
        return lost

    def _reclaim(self, segment):
        """Remove a segment in which nothing lives, cut one with an unlisted tail."""
        path = self._path(segment)
        with self._index.transaction(), locked(path) as fd:
            if fd is None and path.exists():
                return  # somebody writes it
            self._index.drop_segment(segment)
            if fd is not None:
                self._cut(segment, fd)

    def compact(self, victim):
        """Copy the records of a segment to another one and remove it. -> how many were damaged."""
        with locked(self._path(victim)) as held:
            # trap: the map at hand may be older than the last records of the file
            data = None if held is None else self.maps.get(victim, os.fstat(held).st_size)
            if data is None:
                return 0
            rows = self._index.offsets(victim)
            found = [(*row, record) for row in rows if (record := read_record(data, row[1]))]
            with self._claim(sum(record.extent for *_, record in found)) as (segment, fd, tail):
                moves = []
                for rowid, offset, record in found:
                    moves.append((rowid, offset, tail))
                    tail = write_record(fd, tail, record)
                with self._index.transaction():
                    lost = self._index.move(victim, segment, tail, moves)
            self._path(victim).unlink(missing_ok=True)
            return lost

    def _path(self, segment):
        return segment_path(self.directory, segment)
