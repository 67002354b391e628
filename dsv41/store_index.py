"""Where does each stored block lie, which were used last, and which segments are worth keeping?

An SQLite file answers for all processes. `records` has a row per block: fingerprint and key, place,
checksum, last use. `segments` has a row per file: `size`, the end of the last record ever listed in
it. What its records do not add up to is dead space.

Journal: WAL, so that readers never wait for a writer. synchronous=NORMAL: a commit is not synced,
the file survives a power cut whole but may miss its last commits. FULL would add a disk flush per
block, to protect what can be computed again.

Last use is a count of uses, not a time: no clock can jump. The file may be damaged, so numbers
are cast where they are read, and a row is a hint where to look: what lies there has to verify.
Left out: the files (`segments`, `store_files`) and every decision (`store`).
"""

import os
import sqlite3
import time
from contextlib import contextmanager

from .segments import try_lock

APPLICATION, FORMAT = 0x64735634, 1  # SQLite's application_id ("dsV4") and user_version
BUSY_SECONDS = 5  # patience with a process that holds the index
OPEN_SECONDS = 60  # and with one that rebuilds it
SCHEMA = (
    "CREATE TABLE segments (id INTEGER PRIMARY KEY, size INTEGER)",
    "CREATE TABLE records (fingerprint BLOB, key BLOB, segment INTEGER, offset INTEGER, "
    "length INTEGER, extent INTEGER, checksum BLOB, used INTEGER, PRIMARY KEY (fingerprint, key))",
    "CREATE INDEX records_by_use ON records (used)",
    "CREATE INDEX records_by_place ON records (segment, offset, extent)",
)


def _number(column):
    return f"CAST(IFNULL({column}, -1) AS INTEGER)"


SAME = "fingerprint = ? AND key = ?"
PLACE = (
    f"SELECT {_number('segment')}, {_number('offset')}, {_number('length')}, checksum "
    f"FROM records WHERE {SAME}"
)
# TOTAL, unlike SUM, has no overflow that a damaged number could cause
LIVE = "(SELECT CAST(TOTAL(extent) AS INTEGER) FROM records WHERE segment = id)"
TAIL = (
    f"SELECT MAX({_number('size')}, IFNULL((SELECT MAX({_number('offset')} + {_number('extent')}) "
    "FROM records WHERE segment = id), 0)) FROM segments WHERE id = ?"
)
# walks along the chain inside SQLite and stops at the first key that is missing
LEADING = (
    "WITH RECURSIVE chain (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM chain WHERE EXISTS "
    "(SELECT 1 FROM records WHERE fingerprint = :fingerprint "
    "AND key = substr(:keys, n * :size + 1, :size))) SELECT MAX(n) FROM chain"
)


class StoreError(ValueError):
    """The directory holds something that cannot be used as a store."""


class Index:
    """The index of a directory. A missing one is made and filled by `rebuild(directory, index)`."""

    def __init__(self, directory, rebuild):
        self.path = directory / "index.sqlite"
        self.readonly = not os.access(directory, os.W_OK)
        self._db = None
        try:
            with _alone(directory):
                self._open(rebuild)
        except (StoreError, sqlite3.Error) as problem:
            if self._db is not None:
                self._db.close()
            if isinstance(problem, StoreError):
                raise
            raise StoreError(
                f"{self.path}: not usable as the index of a store: {problem} (if it is damaged, "
                f"delete it: opening the store makes a new one from the segments)"
            ) from None

    # ---- opening ---------------------------------------------------------------------------

    def _open(self, rebuild):
        self._db = _connect(self.path, self.readonly)
        kind, version, tables = (
            self.one(query)
            for query in (
                "PRAGMA application_id",
                "PRAGMA user_version",
                "SELECT COUNT(*) FROM sqlite_master",
            )
        )
        if not (kind or version or tables or self.readonly):
            self._create(rebuild)
        elif kind != APPLICATION:
            raise StoreError(f"{self.path}: a database of another program")
        elif version != FORMAT:
            raise StoreError(f"{self.path}: store format {version}, this program uses {FORMAT}")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._inode = os.stat(self.path).st_ino

    def _create(self, rebuild):
        self._db.execute("PRAGMA journal_mode = WAL")
        with self.transaction():
            for statement in SCHEMA:
                self._db.execute(statement)
            rebuild(self.path.parent, self)
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {FORMAT}")

    def close(self):
        self._db.close()

    def is_current(self):
        """Whether the file is still the one that was opened."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    # ---- statements ------------------------------------------------------------------------

    def one(self, query, *values):
        """-> the only value of the first row; None without a row."""
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def change(self, statement, *values):
        """-> rows changed."""
        return self._db.execute(statement, values).rowcount

    @contextmanager
    def transaction(self):
        # trap: a transaction that starts by reading fails at once when another one wrote meanwhile
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # ---- records ---------------------------------------------------------------------------

    def place(self, fingerprint, key):
        """-> segment, offset, length, checksum; None if not listed."""
        return self._db.execute(PLACE, (fingerprint, key)).fetchone()

    def leading(self, fingerprint, keys, size):
        """keys: one after the other, `size` bytes each -> how many leading ones are listed."""
        chain = {"fingerprint": fingerprint, "keys": keys, "size": size}
        return self._db.execute(LEADING, chain).fetchone()[0]

    def add(self, segment, size, rows):
        """In a transaction: rows of `records` enter, `size` is their end. -> how many are new."""
        self._set_size(segment, size)
        insert = "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        return sum(self.change(insert, *row) for row in rows)

    def move(self, victim, segment, size, moves):
        """In a transaction: [(rowid, offset, new offset)] go from a segment that goes. -> lost."""
        self._set_size(segment, size)
        self._db.executemany(
            "UPDATE records SET segment = ?, offset = ? "
            "WHERE rowid = ? AND segment = ? AND offset = ?",
            [(segment, new, rowid, victim, old) for rowid, old, new in moves],
        )
        lost = self.change("DELETE FROM records WHERE segment = ?", victim)
        self.change("DELETE FROM segments WHERE id = ?", victim)
        return lost

    def drop(self, fingerprint, key, segment, offset):
        """Forget a record, unless it lies elsewhere by now. -> 1 or 0."""
        place = f"{_number('segment')} = ? AND {_number('offset')} = ?"
        statement = f"DELETE FROM records WHERE {SAME} AND {place}"
        return self.change(statement, fingerprint, key, segment, offset)

    def drop_beyond(self, segment, end):
        where = "segment = ? AND offset + extent > ?"
        return self.change(f"DELETE FROM records WHERE {where}", segment, end)

    def drop_oldest(self, excess):
        """In a transaction: forget `excess` bytes of what was used longest ago. -> records."""
        doomed = []
        query = f"SELECT rowid, {_number('extent')} FROM records ORDER BY used, rowid DESC"
        for rowid, size in self._db.execute(query):
            if excess <= 0:
                break
            doomed.append((rowid,))
            excess -= size
        self._db.executemany("DELETE FROM records WHERE rowid = ?", doomed)
        return len(doomed)

    def latest_use(self):
        # the limit: a damaged count must not run out of integers
        return min(self.one("SELECT CAST(IFNULL(MAX(used), 0) AS INTEGER) FROM records"), 1 << 62)

    def set_uses(self, rows):
        """In a transaction: [(use, fingerprint, key)]."""
        self._db.executemany(f"UPDATE records SET used = ? WHERE {SAME}", rows)

    # ---- segments --------------------------------------------------------------------------

    def _set_size(self, segment, size):
        insert = "INSERT INTO segments VALUES (?, ?)"
        self.change(f"{insert} ON CONFLICT (id) DO UPDATE SET size = excluded.size", segment, size)

    def tail(self, segment):
        """End of the last record that was ever listed there; None for an unknown segment."""
        return self.one(TAIL, segment)

    def segments(self):
        """-> [(segment, size, bytes of the records in it)], the one with most dead bytes first."""
        query = f"SELECT id, {_number('size')} AS size, {LIVE} AS live FROM segments"
        return self._db.execute(f"{query} ORDER BY size - live DESC").fetchall()

    def roomy(self, size, limit=8):
        """-> the fullest segments among those of at most `size` bytes."""
        query = "SELECT id FROM segments WHERE size <= ? ORDER BY size DESC LIMIT ?"
        return [segment for (segment,) in self._db.execute(query, (size, limit)).fetchall()]

    def drop_segment(self, segment):
        """Forget a segment in which nothing lives."""
        self.change(f"DELETE FROM segments WHERE id = ? AND {LIVE} = 0", segment)

    def offsets(self, segment):
        """-> [(rowid, offset)] of the records there."""
        query = f"SELECT rowid, {_number('offset')} FROM records WHERE segment = ?"
        return self._db.execute(query, (segment,)).fetchall()

    def size(self):
        """Bytes of all segments."""
        return int(self.one("SELECT TOTAL(size) FROM segments"))

    def live(self):
        """Bytes of all records."""
        return int(self.one("SELECT TOTAL(extent) FROM records"))


def _connect(path, readonly):
    options = {"timeout": BUSY_SECONDS, "isolation_level": None, "check_same_thread": False}
    if not readonly:
        return sqlite3.connect(path, **options)
    # without its two side files a WAL index can be read only if declared to be immutable
    for mode in ("mode=ro", "immutable=1"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, **options)
        try:
            db.execute("SELECT COUNT(*) FROM sqlite_master")
            return db
        except sqlite3.OperationalError:
            db.close()
    raise StoreError(f"{path}: cannot be read, or is absent, and the directory is read-only")


@contextmanager
def _alone(directory):
    """One process at a time: a switch to WAL fails when another process is about it as well."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        give_up = time.monotonic() + OPEN_SECONDS
        while not try_lock(fd):
            if time.monotonic() > give_up:
                raise StoreError(f"{directory}: another process has been opening it for long")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)
