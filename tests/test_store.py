"""The persistent store: answers by hand, damage of every kind, killed writers, full disks."""

import errno
import os
import random
import shutil
import sqlite3
import struct
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import store_worker
from store_worker import FINGERPRINT, MEMORY, check_directory, item_of, key_of, served

from dsv41 import segments, store_files, store_index
from dsv41.segments import MAGIC, Maps, list_segments, read_record, scan, segment_path, sign
from dsv41.store import Store, StoreError


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def no_surprise():
    """A store that warns has met a problem, which only the tests of problems expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def noticed(text=""):
    return pytest.warns(RuntimeWarning, match=text)


def filled(directory, count, **options):
    with Store(directory, FINGERPRINT, **options) as store:
        assert store.put_many(map(item_of, range(count))) == count


def only_segment(directory):
    (segment,) = list_segments(directory)
    return segment_path(directory, segment)


def change_row(directory, key, column, value):
    db = sqlite3.connect(directory / "index.sqlite", isolation_level=None)
    db.execute(f"UPDATE records SET {column} = ? WHERE key = ?", (value, key))
    db.close()


# ---- what goes in comes out -----------------------------------------------------------------


def test_a_payload_comes_back(directory):
    with Store(directory, FINGERPRINT) as store:
        assert b"k" not in store and store.get(b"k") is None
        assert store.put(b"k", b"payload") is True
        assert store.put(b"k", b"payload") is False
        assert b"k" in store
        view = store.get(b"k")
        assert view == b"payload" and view.readonly
        assert store.stats == {
            "hits": 1, "misses": 1, "corrupt": 0, "evicted": 0, "records": 1, "bytes": 128
        }  # fmt: skip


def test_what_a_payload_may_be(directory):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    with Store(directory, FINGERPRINT) as store:
        assert store.put(b"empty", b"") and store.get(b"empty") == b""
        assert store.put(b"array", memoryview(array))
        back = np.frombuffer(store.get(b"array"), np.float32).reshape(array.shape)
        assert np.array_equal(back, array) and back.ctypes.data % 64 == 0
        assert store.put(bytearray(b"view"), memoryview(b"abcdef")[2:4])
        assert store.get(memoryview(b"view")) == b"cd"
        with pytest.raises(ValueError, match="key"):
            store.put(b"", b"x")
        for no_key in (5, "text"):
            with pytest.raises(TypeError):
                store.put(no_key, b"x")


def test_it_outlives_the_object_and_the_process(directory):
    filled(directory, 30)
    with check_directory(directory) as store:
        assert served(store, range(31)) == set(range(30))
    assert store_worker.run("read_all", directory=directory, count=31) == 30


def test_put_many_counts_what_is_new_and_fills_segments(directory):
    with Store(directory, FINGERPRINT, segment_bytes=10_000) as store:
        assert store.put_many(map(item_of, range(10))) == 10
        assert store.put_many([*map(item_of, range(5, 25)), item_of(24)]) == 15
        assert store.put(b"large", bytes(30_000))  # larger than a segment: one of its own
        sizes = sorted(list_segments(directory).values())
        assert sizes[-1] == 30_000 // 64 * 64 + 128 and sizes[-2] <= 10_000
        assert served(store, range(25)) == set(range(25))


def test_a_segment_is_filled_by_later_calls_and_processes(directory):
    for number in range(6):
        with Store(directory, FINGERPRINT, segment_bytes=1 << 20) as store:
            assert store.put(*item_of(number))
    assert len(list_segments(directory)) == 1


def test_the_layout_of_a_record_by_hand(directory):
    with Store(directory, b"weights") as store:
        store.put(b"first", b"x" * 65)
        store.put(b"abc", b"12345")
        fingerprint = store.fingerprint
    data = only_segment(directory).read_bytes()
    assert len(data) == 64 + 128 + 64 + 64
    magic, key, payload = struct.unpack("<4sIQ", data[192:208])
    assert (magic, key, payload) == (MAGIC, 3, 5)
    assert data[208:224] == fingerprint and data[240:243] == b"abc"
    assert data[256:261] == b"12345" and not any(data[261:])
    assert data[224:240] == sign(fingerprint, b"abc", b"12345").checksum
    assert [(offset, bytes(record.key)) for offset, record in scan(data)] == [
        (0, b"first"),
        (192, b"abc"),
    ]


def test_the_checksum_tells_key_payload_and_fingerprint_apart():
    f, g = bytes(16), bytes(15) + b"\1"
    sums = {
        sign(*parts).checksum for parts in ((f, b"ab", b"c"), (f, b"a", b"bc"), (g, b"ab", b"c"))
    }
    assert len(sums) == 3


# ---- chains ---------------------------------------------------------------------------------


def test_longest_stops_at_the_first_gap(directory):
    keys = [key_of(n) for n in range(10)]
    with Store(directory, FINGERPRINT) as store:
        assert store.longest([]) == 0 and store.longest(keys) == 0
        store.put_many(item_of(n) for n in (0, 1, 2, 4, 5))
        assert store.longest(keys) == 3
        assert store.longest(keys[:2]) == 2
        assert store.longest(keys[4:]) == 2
        assert store.longest(keys[3:]) == 0
        with pytest.raises(ValueError, match="length"):
            store.longest([b"ab", b"c"])


def test_longest_has_no_limit_on_the_chain(directory):
    """A query with one variable per key ends at 32,766 of them, two million tokens."""
    keys = [b"%08d" % n for n in range(40_000)]
    with Store(directory, FINGERPRINT) as store:
        store.put_many((key, b"") for key in keys)
        assert store.longest([*keys, b"missing."]) == 40_000


def test_longest_believes_the_index_and_get_does_not(directory):
    filled(directory, 3)
    path = only_segment(directory)
    path.write_bytes(bytes(path.stat().st_size))
    with Store(directory, FINGERPRINT) as store:
        keys = [key_of(n) for n in range(3)]
        assert store.longest(keys) == 3
        assert store.get(keys[0]) is None
        assert store.longest(keys) == 0 and store.longest(keys[1:]) == 2


# ---- least recently used --------------------------------------------------------------------


def thousand(number):
    """A record of 1,024 bytes in the file: 64 of header and key, 960 of payload."""
    return b"%02d" % number, bytes([number]) * 960


def kept(store, numbers):
    return [n for n in numbers if b"%02d" % n in store]


def test_the_oldest_use_goes_first(directory):
    with Store(directory, FINGERPRINT, budget=8 * 1024, segment_bytes=1024) as store:
        for number in range(8):
            assert store.put(*thousand(number))
        assert kept(store, range(8)) == list(range(8))
        store.get(b"00")
        store.touch([b"02"])
        assert store.put(*thousand(8))  # the budget minus an eighth is seven records
        assert kept(store, range(9)) == [0, 2, 4, 5, 6, 7, 8]
        assert store.stats["evicted"] == 2 and store.stats["bytes"] == 7 * 1024
        store.put(*thousand(9))
        assert store.put(*thousand(4)) is False  # finding it is a use as well
        store.put(*thousand(10))
        assert kept(store, range(11)) == [0, 2, 4, 7, 8, 9, 10]


def test_a_chain_dies_from_its_end(directory):
    with Store(directory, FINGERPRINT, budget=8 * 1024, segment_bytes=1024) as store:
        store.put_many(map(thousand, range(6)))
        assert store.longest([b"%02d" % n for n in range(4)]) == 4  # found, read, and continued
        for number in range(4):
            store.get(b"%02d" % number)
        store.put_many(map(thousand, range(10, 13)))
        assert kept(store, range(20)) == [0, 1, 2, 3, 10, 11, 12]
        store.put_many(map(thousand, range(20, 22)))
        assert kept(store, range(30)) == [0, 1, 2, 3, 10, 20, 21]
        assert store.put_many(map(thousand, [0, 1, 2, 3, 10])) == 0  # found again: used again
        assert store.longest([b"30"]) == 0  # another request
        store.put_many(map(thousand, range(30, 35)))
        assert kept(store, range(40)) == [0, 1, 2, 30, 31, 32, 33, 34]


def test_a_new_payload_survives_however_much_was_read_before_it(directory):
    with Store(directory, FINGERPRINT, budget=8 * 1024, segment_bytes=1024) as store:
        for number in range(30):
            for read in range(number):
                store.get(b"%02d" % read)
            assert store.put(*thousand(number)) and b"%02d" % number in store


def test_uses_of_another_process_count(directory):
    with (
        Store(directory, FINGERPRINT, budget=8 * 1024, segment_bytes=1024) as one,
        Store(directory, FINGERPRINT) as other,
    ):
        one.put_many(map(thousand, range(8)))
        other.get(b"07")
        other.close()  # uses are written down with the next write, request or at the end
        one.put(*thousand(8))
        assert 7 in kept(one, range(9))


@pytest.mark.parametrize("seed", range(3))
def test_the_budget_holds_after_every_call(directory, seed):
    rng = random.Random(seed)
    budget = rng.choice((30_000, 70_000))
    with Store(directory, FINGERPRINT, budget, segment_bytes=rng.choice((2_000, 9_000))) as store:
        for _ in range(150):
            number = rng.randrange(60)
            if rng.random() < 0.7:
                store.put(*item_of(number))
                assert key_of(number) in store
            else:
                store.put_many(map(item_of, range(number, number + rng.randrange(9))))
            served(store, rng.sample(range(70), 5))
            assert store.stats["bytes"] <= budget
        assert store.stats["bytes"] > budget / 2 and store.stats["corrupt"] == 0


def test_scattered_survivors_are_moved_together(directory):
    """One used record in each segment: without moving them no file could ever go."""
    with Store(directory, FINGERPRINT, budget=64 * 1024, segment_bytes=4 * 1024) as store:
        store.put_many(map(thousand, range(64)))
        hot = range(0, 64, 4)
        for round in range(60, 99):
            store.touch([b"%02d" % n for n in hot])
            store.put(*thousand(round))
        assert kept(store, hot) == list(hot)
        assert store.stats["bytes"] <= 64 * 1024
        assert all(store.get(b"%02d" % n) == bytes([n]) * 960 for n in hot)


def test_dead_segments_are_removed_without_a_budget(directory):
    filled(directory, 40, segment_bytes=8_000)
    with Store(directory, FINGERPRINT) as store:
        store._index.change("DELETE FROM records")
        assert store.evict() == 0
        assert list_segments(directory) == {} and store.stats["bytes"] == 0


def test_a_view_outlives_eviction_and_the_store(directory):
    reader = Store(directory, FINGERPRINT)
    with Store(directory, FINGERPRINT, budget=8 * 1024, segment_bytes=1024) as writer:
        writer.put(*thousand(1))
        view = reader.get(b"01")
        writer.put_many(map(thousand, range(10, 40)))
        assert b"01" not in writer and reader.get(b"01") is None
    reader.close()
    assert view == bytes([1]) * 960


def test_a_removed_segment_frees_the_disk(directory):
    """The trap: the disk keeps the bytes of a removed file for as long as somebody maps it."""
    maps = Maps(directory)
    for number in range(3):
        segment_path(directory, number).write_bytes(b"x")
        assert maps.get(number)
    segment_path(directory, 0).unlink()
    segment_path(directory, 3).write_bytes(b"x")
    assert maps.get(3) and list(maps._maps) == [1, 2, 3]


def test_the_number_of_open_files_is_limited(directory):
    filled(directory, 300, segment_bytes=64)
    before = len(os.listdir("/proc/self/fd"))
    with Store(directory, FINGERPRINT) as store:
        assert len(served(store, range(300))) == 300
        assert len(os.listdir("/proc/self/fd")) - before <= segments.MAPS + 4


def test_a_budget_too_small_refuses(directory):
    with Store(directory, FINGERPRINT, budget=4_000) as store:
        with noticed("budget 4000 is too small"):
            assert store.put(b"large", bytes(3_500)) is False
        assert "too small" in store.last_error
        assert store.put(b"large", bytes(3_500)) is False  # the warning is not repeated
        assert store.put_many([(b"small", b"x"), (b"large", bytes(9_000)), (b"other", b"y")]) == 2
        assert b"small" in store and b"other" in store and store.stats["bytes"] <= 4_000
    with Store(directory / "none", FINGERPRINT, budget=0) as store, noticed():
        assert store.put(b"k", b"") is False
    for wrong in ({"budget": -1}, {"segment_bytes": 0}):
        with pytest.raises(ValueError, match="budget"):
            Store(directory, FINGERPRINT, **wrong)


# ---- other weights, other versions, other programs ------------------------------------------


def test_another_fingerprint_is_never_served(directory):
    with Store(directory, b"A") as a, Store(directory, b"B") as b:
        assert a.put(b"k", b"of A")
        assert b"k" not in b and b.get(b"k") is None and b.longest([b"k"]) == 0
        assert b.put(b"k", b"of B")
        assert a.get(b"k") == b"of A" and b.get(b"k") == b"of B"
        assert a.stats["records"] == 2


def test_a_row_that_claims_other_weights_is_not_believed(directory):
    with Store(directory, b"A") as a:
        a.put(b"k", b"of A")
    with Store(directory, b"B") as b:
        change_row(directory, b"k", "fingerprint", b.fingerprint)
        assert b"k" in b and b.get(b"k") is None
        assert b.stats["corrupt"] == 1 and b"k" not in b


def test_another_format_version_is_an_error(directory):
    filled(directory, 3)
    db = sqlite3.connect(directory / "index.sqlite")
    db.execute("PRAGMA user_version = 9")
    db.close()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"index\.sqlite: store format 9, this program uses 1"):
            Store(directory, FINGERPRINT)
    assert len(list_segments(directory)) == 1


def test_a_database_of_another_program_is_left_alone(directory):
    path = directory / "index.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"index\.sqlite: a database of another program"):
        Store(directory, FINGERPRINT)
    assert path.read_bytes() == before and [p.name for p in directory.iterdir()] == ["index.sqlite"]


@pytest.mark.parametrize("content", [b"no database\n" * 200, b"SQLite format 3\0" + bytes(4080)])
def test_a_file_that_is_no_database_is_an_error(directory, content):
    path = directory / "index.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"index\.sqlite: "):
        Store(directory, FINGERPRINT)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"index\.sqlite: "):
        Store(directory, FINGERPRINT)


def test_files_of_others_are_left_alone(directory):
    others = ["notes.txt", "0123.kv", "0123456789abcdeX.kv", "0123456789abcdef.kv.part"]
    for name in others:
        (directory / name).write_bytes(b"theirs")
    filled(directory, 5)
    with Store(directory, FINGERPRINT, budget=100) as store:
        store.evict()
    assert all((directory / name).read_bytes() == b"theirs" for name in others)


# ---- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_anywhere_in_a_record(directory, bit):
    key, payload = b"the key", bytes(range(100))
    with Store(directory, FINGERPRINT) as store:
        store.put(key, payload)
        path = only_segment(directory)
        good = path.read_bytes()
        padding = {*range(48 + len(key), 64), *range(64 + 100, 192)}
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            path.write_bytes(bad)
            damaged = store.stats["corrupt"]
            if place in padding:
                assert store.get(key) == payload
                continue
            assert store.get(key) is None and key not in store, place
            assert store.stats["corrupt"] == damaged + 1
            path.write_bytes(good)
            assert store.put(key, payload) and store.get(key) == payload
            path = segment_path(directory, store._index.place(store.fingerprint, key)[0])
            store._index.change("UPDATE records SET offset = 0")
            store._index.change("UPDATE segments SET size = 192")
            os.truncate(path, 192)
            good = path.read_bytes()


def test_damage_does_not_spread(directory):
    filled(directory, 20)
    path = only_segment(directory)
    with Store(directory, FINGERPRINT) as store:
        data = bytearray(path.read_bytes())
        data[store._index.place(store.fingerprint, key_of(7))[1] + 5] ^= 1
        path.write_bytes(data)
        assert served(store, range(20)) == set(range(20)) - {7}
        assert store.put(*item_of(7)) and store.stats["corrupt"] == 1


def test_a_segment_cut_anywhere(directory):
    filled(directory, 6)
    data = only_segment(directory).read_bytes()
    ends = [offset + record.extent for offset, record in scan(data)]
    for cut in (*range(0, len(data), 331), len(data) - 1, *ends, *(end - 1 for end in ends)):
        copy = directory / str(cut)
        shutil.copytree(
            directory, copy, ignore=lambda *_: [p for p in os.listdir(directory) if p.isdigit()]
        )
        os.truncate(only_segment(copy), cut)
        with Store(copy, FINGERPRINT) as store:
            whole = sum(end <= cut for end in ends)
            assert served(store, range(6)) == set(range(whole))
            assert store.stats["records"] == whole and store.stats["corrupt"] == 6 - whole
            assert store.put_many(map(item_of, range(6))) == 6 - whole
            assert served(store, range(6)) == set(range(6))
        shutil.rmtree(copy)


def test_a_segment_cut_while_it_is_mapped(directory):
    """The trap: reading behind the end of a mapped file kills the process."""
    filled(directory, 30)
    with Store(directory, FINGERPRINT) as store:
        assert len(served(store, range(30))) == 30
        os.truncate(only_segment(directory), 0)
        assert served(store, range(30)) == set() and store.stats["corrupt"] == 30
        assert store.put(*item_of(3)) and served(store, range(30)) == {3}


def test_a_segment_that_is_gone_or_has_more_bytes(directory):
    filled(directory, 5)
    with open(only_segment(directory), "ab") as file:
        file.write(b"trailing")
    with check_directory(directory) as store:
        assert served(store, range(5)) == set(range(5))
    with Store(directory, FINGERPRINT) as store:
        only_segment(directory).unlink()
        assert served(store, range(3)) == set() and store.stats["corrupt"] == 3
        assert store.put(*item_of(1)) and served(store, range(5)) == {1}


ODD = [None, -1, 0, 1, 64, 1 << 40, (1 << 63) - 1, 0.5, "text", b"\0\xff", b""]


@pytest.mark.parametrize("column", ["segment", "offset", "length", "extent", "checksum", "used"])
def test_any_value_in_the_index(directory, column):
    """Whatever a row says, the record has to verify; nothing is raised on the way."""
    filled(directory, 4)
    for number, value in enumerate(ODD):
        copy = directory / str(number)
        shutil.copytree(
            directory, copy, ignore=lambda *_: [p for p in os.listdir(directory) if p.isdigit()]
        )
        change_row(copy, key_of(1), column, value)
        with Store(copy, FINGERPRINT, budget=20_000) as store:
            assert served(store, range(4)) >= {0, 2, 3}
            store.put_many(map(item_of, range(4, 30)))
            store.evict()
            served(store, range(30))
            assert store.last_error is None


def test_a_row_with_another_key(directory):
    filled(directory, 4)
    change_row(directory, key_of(1), "key", key_of(100))
    with Store(directory, FINGERPRINT) as store:
        assert key_of(100) in store and served(store, (1, 100)) == set()


def test_random_damage_to_the_index(directory):
    """The store opens or says which file is bad; it never serves a wrong payload, nor raises."""
    rng, refused = random.Random(5), 0
    source = directory / "source"
    filled(source, 40, segment_bytes=9_000)
    for number in range(60):
        copy = directory / str(number)
        shutil.copytree(source, copy)
        data = bytearray((copy / "index.sqlite").read_bytes())
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (copy / "index.sqlite").write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Store(copy, FINGERPRINT, budget=60_000) as store:
                    store.longest([key_of(n) for n in range(40)])
                    served(store, range(40))
                    store.put_many(map(item_of, range(30, 60)))
                    store.evict()
                    served(store, range(60))
            except StoreError as problem:
                assert "index.sqlite: " in str(problem)
                refused += 1
        shutil.rmtree(copy)
    assert refused < 30


def test_an_index_cut_to_any_page(directory):
    source, copy = directory / "source", directory / "copy"
    filled(source, 40)
    size = (source / "index.sqlite").stat().st_size
    for cut in (0, 1, 100, *range(4096, size, 4096), size - 1):
        shutil.copytree(source, copy)
        os.truncate(copy / "index.sqlite", cut)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Store(copy, FINGERPRINT) as store:
                    served(store, range(40))
            except StoreError as problem:
                assert "index.sqlite: " in str(problem)
        shutil.rmtree(copy)


def test_a_lost_index_is_made_anew_from_the_segments(directory):
    with Store(directory, b"B") as other:
        other.put(b"k", b"of B")
    filled(directory, 40, segment_bytes=20_000)
    (path, *_) = (segment_path(directory, s) for s in list_segments(directory))
    data = bytearray(path.read_bytes())
    second = [offset for offset, _ in scan(data)][1]
    damaged = read_record(data, second).key
    data[second + 20] ^= 1
    path.write_bytes(data)
    (directory / "index.sqlite").unlink()
    with check_directory(directory) as store, Store(directory, b"B") as other:
        gone = {n for n in range(40) if key_of(n) == damaged}
        assert served(store, range(40)) == set(range(40)) - gone
        assert store.stats["records"] + len(gone) in (40, 41) and len(gone) <= 1
        assert other.get(b"k") == b"of B" or damaged == b"k"


def test_a_process_with_a_lost_index_stops_writing(directory):
    """Else it would cut off what others list in the new index."""
    with Store(directory, FINGERPRINT) as old:
        old.put_many(map(item_of, range(5)))
        (directory / "index.sqlite").unlink()
        with Store(directory, FINGERPRINT) as new:
            new.put_many(map(item_of, range(5, 10)))
            with noticed("removed or replaced"):
                assert old.put(*item_of(20)) is False
            assert served(new, range(10)) == set(range(10))
            assert served(old, range(5)) == set(range(5))


# ---- what a disk and other processes can refuse ---------------------------------------------


def full_after(count, monkeypatch):
    """The disk takes `count` more bytes, then says that it is full."""
    pwrite, left = os.pwrite, [count]

    def limited(fd, data, offset):
        part = data[: left[0]]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(part)
        return pwrite(fd, part, offset)

    monkeypatch.setattr(os, "pwrite", limited)


@pytest.mark.parametrize("room", [0, 1, 63, 64, 100, 1000, 1063])
def test_a_full_disk_refuses_and_leaves_no_trace(directory, monkeypatch, room):
    with Store(directory, FINGERPRINT) as store:
        store.put_many(map(item_of, range(3)))
        before = list_segments(directory)
        full_after(room, monkeypatch)
        with noticed("No space left"):
            assert store.put(b"k", bytes(1000)) is False
        assert store.put_many([(b"k", bytes(1000)), (b"l", b"")]) == 0
        assert "No space left" in store.last_error
        assert list_segments(directory) == before
        assert b"k" not in store and served(store, range(3)) == {0, 1, 2}
        monkeypatch.undo()
        assert store.put(b"k", bytes(1000)) and store.get(b"k") == bytes(1000)


def test_a_full_disk_leaves_no_new_segment(directory, monkeypatch):
    with Store(directory, FINGERPRINT) as store:
        full_after(10, monkeypatch)
        with noticed("No space left"):
            assert store.put(b"k", bytes(1000)) is False
        assert list_segments(directory) == {}


def test_a_write_in_small_parts(directory, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:100], at))
    filled(directory, 10)
    with check_directory(directory) as store:
        assert served(store, range(10)) == set(range(10))


def test_a_full_disk_while_records_are_moved(directory, monkeypatch):
    with Store(directory, FINGERPRINT, budget=64 * 1024, segment_bytes=4 * 1024) as store:
        store.put_many(map(thousand, range(64)))
        store.touch([b"%02d" % n for n in range(0, 64, 4)])
        store.budget //= 2
        full_after(2000, monkeypatch)
        with noticed("No space left"):
            store.evict()
        assert kept(store, range(0, 64, 4)) == list(range(0, 64, 4))
        assert all(store.get(b"%02d" % n) == bytes([n]) * 960 for n in range(0, 64, 4))
        monkeypatch.undo()
        store.evict()
        assert store.stats["bytes"] <= 32 * 1024 and store.stats["corrupt"] == 0


def test_an_index_that_cannot_grow(directory):
    with Store(directory, FINGERPRINT) as store:
        store.put_many(map(item_of, range(5)))
        before = list_segments(directory)
        pages = store._index.one("PRAGMA page_count")
        store._index.one(f"PRAGMA max_page_count = {pages}")
        with noticed("full"):
            assert store.put_many((b"%d" % n, b"") for n in range(500)) == 0
        assert list_segments(directory) == before
        assert served(store, range(5)) == set(range(5))


def test_no_file_can_grow(directory):
    said = store_worker.run("fill_disk", directory=directory, limit=150_000)
    assert said["large"][0] is False and "File too large" in said["large"][1]
    assert said["files_after_large"] == 0
    assert said["found"] == said["stored"] and 0 < len(said["stored"]) < 200 and said["error"]
    with check_directory(directory) as store:
        assert sorted(served(store, range(200))) == said["stored"]


def test_a_directory_that_may_only_be_read(directory):
    filled(directory, 10)
    directory.chmod(0o755)
    try:
        for path in directory.iterdir():
            path.chmod(0o444)
        directory.chmod(0o555)
        said = store_worker.run("without_rights", directory=directory)
    finally:
        directory.chmod(0o755)
    assert said["found"] == said["longest"] == 10
    assert said["put"] is False and "Permission" in said["error"]


def test_an_index_that_another_process_holds(directory, monkeypatch):
    monkeypatch.setattr(store_index, "BUSY_SECONDS", 0.05)
    filled(directory, 3)
    with Store(directory, FINGERPRINT) as store:
        before = list_segments(directory)
        other = sqlite3.connect(directory / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert served(store, range(3)) == {0, 1, 2}
        with noticed("locked"):
            assert store.put(*item_of(7)) is False
        assert list_segments(directory) == before
        other.close()
        assert store.put(*item_of(7)) and served(store, (7,)) == {7}


def test_a_segment_that_another_process_holds(directory):
    filled(directory, 3)
    with Store(directory, FINGERPRINT) as store, segments.locked(only_segment(directory)) as fd:
        assert fd is not None
        assert store.put(*item_of(7)) and len(list_segments(directory)) == 2
        store._index.change("DELETE FROM records")
        store.evict()
        assert len(list_segments(directory)) == 1  # it may be about to list something there


def test_a_segment_that_another_process_holds_is_not_moved(directory):
    with Store(directory, FINGERPRINT, budget=64 * 1024, segment_bytes=4 * 1024) as store:
        store.put_many(map(thousand, range(64)))
        store.touch([b"%02d" % n for n in range(0, 64, 4)])
        store.budget //= 2
        held = store._index.place(store.fingerprint, b"00")[0]
        with segments.locked(segment_path(directory, held)) as fd:
            assert fd is not None and store.evict() > 0
            assert held in list_segments(directory)
        assert store._index.place(store.fingerprint, b"00")[0] == held


def test_what_a_killed_writer_left_is_cut_off_by_the_next(directory):
    with Store(directory, FINGERPRINT) as store:
        store.put(*item_of(0))
        with open(only_segment(directory), "ab") as file:
            file.write(b"torn" * 5000)
        assert store.put(*item_of(1)) and served(store, range(2)) == {0, 1}
        (row,) = store._index.segments()
        assert row[1] == only_segment(directory).stat().st_size


def test_a_record_forgotten_while_it_is_moved(directory, monkeypatch):
    """SQLite gives the number of a deleted row to the next new one."""
    with Store(directory, FINGERPRINT) as store, Store(directory, FINGERPRINT) as other:
        store.put(*item_of(1))
        (segment,), write_record = list_segments(directory), store_files.write_record

        def late(*arguments):
            monkeypatch.setattr(store_files, "write_record", write_record)
            other._index.change("DELETE FROM records")
            assert other.put(*item_of(2))
            return write_record(*arguments)

        monkeypatch.setattr(store_files, "write_record", late)
        assert store._files.compact(segment) == 0
        assert served(store, (1, 2)) == {2} and store.stats["corrupt"] == 0


def test_a_commit_does_not_wait_for_the_disk(directory):
    with Store(directory, FINGERPRINT) as store:
        assert store._index.one("PRAGMA journal_mode") == "wal"
        assert store._index.one("PRAGMA synchronous") == 1


def test_an_interrupt_after_the_commit_loses_nothing(directory, monkeypatch):
    with Store(directory, FINGERPRINT) as store:
        store.put(*item_of(0))
        transaction = store._index.transaction

        class Interrupted:
            def __enter__(self):
                self.inner = transaction()
                self.inner.__enter__()

            def __exit__(self, *problem):
                self.inner.__exit__(*problem)
                raise KeyboardInterrupt

        monkeypatch.setattr(store._index, "transaction", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(*item_of(1))
        monkeypatch.undo()
        assert served(store, range(2)) == {0, 1} and store.stats["corrupt"] == 0


def test_a_segment_removed_between_open_and_lock(directory, monkeypatch):
    """The trap: the lock is then that of a file without a name."""
    path, try_lock = segment_path(directory, 1), segments.try_lock
    path.write_bytes(b"x")
    monkeypatch.setattr(segments, "try_lock", lambda fd: (path.unlink(), try_lock(fd))[1])
    with segments.locked(path) as fd:
        assert fd is None


def test_a_sweep_between_creation_and_lock(directory, monkeypatch):
    monkeypatch.setattr(store_index, "BUSY_SECONDS", 0.05)
    with Store(directory, FINGERPRINT) as store, Store(directory, FINGERPRINT) as other:
        try_lock, sweeps = segments.try_lock, []

        def late(fd):
            if not sweeps:
                sweeps.append(other)
                with noticed("locked"):  # it has to wait, and after a while gives up
                    other.evict()
            return try_lock(fd)

        monkeypatch.setattr(segments, "try_lock", late)
        assert store.put(*item_of(1)) and sweeps
        other.evict()
        assert served(store, (1,)) == served(other, (1,)) == {1}


def test_a_segment_made_during_a_sweep(directory, monkeypatch):
    with Store(directory, FINGERPRINT) as store, Store(directory, FINGERPRINT) as other:
        made = []

        def then_put(function):
            def wrapped(*arguments):
                found = function(*arguments)
                if not made:
                    made.append(other.put(*item_of(1)))
                return found

            return wrapped

        monkeypatch.setattr(store._index, "segments", then_put(store._index.segments))
        monkeypatch.setattr(store_files, "list_segments", then_put(store_files.list_segments))
        store.evict()
        assert made == [True] and served(store, (1,)) == {1} and store.stats["corrupt"] == 0


def test_a_writer_between_the_reads_of_a_transaction(directory):
    """The trap: a transaction that starts by reading fails at once when another one wrote."""
    with Store(directory, FINGERPRINT) as store, Store(directory, FINGERPRINT) as other:
        with store._index.transaction():
            store._index.latest_use()
            held = threading.Thread(target=other.put, args=item_of(1))
            held.start()
            held.join(0.1)
            assert held.is_alive()  # it waits for us, not we for it
            store._index.set_uses([])
        held.join()
        assert served(store, (1,)) == {1}


def test_a_record_that_moves_between_index_and_file(directory, monkeypatch):
    with Store(directory, FINGERPRINT) as store:
        store.put(*item_of(1))
        place, moved = store._index.place, []

        def stale(fingerprint, key):
            found = place(fingerprint, key)
            if not moved:  # another process compacts just now
                moved.append(Store(directory, FINGERPRINT))
                (segment,) = list_segments(directory)
                with segments.locked(segment_path(directory, 1), create=True):
                    assert moved[0]._files.compact(segment) == 0
            return found

        monkeypatch.setattr(store._index, "place", stale)
        assert served(store, (1,)) == {1} and store.stats["corrupt"] == 0


def test_a_closed_store_says_so(directory):
    store = Store(directory, FINGERPRINT)
    store.close()
    store.close()
    for call in (lambda: store.get(b"k"), lambda: store.put(b"k", b""), lambda: store.stats):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_a_store_does_not_cross_a_fork(directory, monkeypatch):
    with Store(directory, FINGERPRINT) as store:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="fork"):
            store.put(b"k", b"")
        monkeypatch.undo()


def test_threads_share_a_store(directory):
    failures = []
    with Store(directory, FINGERPRINT, budget=100_000, segment_bytes=9_000) as store:

        def work(seed):
            try:
                rng = random.Random(seed)
                for _ in range(60):
                    store.put(*item_of(rng.randrange(80)))
                    served(store, [rng.randrange(80)])
            except BaseException as problem:
                failures.append(problem)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and store.stats["hits"] + store.stats["misses"] == 240


# ---- several processes, and their deaths ----------------------------------------------------


def test_writers_a_reader_and_an_evictor_at_once(directory):
    done = store_worker.run("crowd", directory=directory, seconds=2)
    assert all(done), done


def test_many_processes_open_a_new_store_at_once(directory):
    assert store_worker.run("open_at_once", directory=directory, count=12) == 12


def test_writers_killed_at_random(directory):
    tally = store_worker.run("kill_writers", directory=directory, kills=20, seed=11)
    assert tally["kills"] == 20 and tally["served"] > 100


@pytest.mark.parametrize("budget", [None, 60_000])
def test_a_writer_killed_between_two_lines(directory, budget):
    """Every ninth of them; soak_store.py --everywhere takes all."""
    kills = store_worker.run(
        "kill_everywhere", directory=directory, budget=budget, tear=False, first=5, stride=9
    )
    assert kills > 20


@pytest.mark.parametrize("budget", [None, 60_000])
def test_a_writer_killed_inside_a_write(directory, budget):
    kills = store_worker.run(
        "kill_everywhere", directory=directory, budget=budget, tear=True, stride=3
    )
    assert kills > 10
