"""Processes that share a store and are killed: what test_store.py and soak_store.py start.

A payload follows from its key and a key from a number, so every answer of a store can be checked.
Processes are forked from a small one of our own, as the process that runs the tests has threads.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from hashlib import sha256, shake_128
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process that forks should be alone

from dsv41.segments import list_segments
from dsv41.store import Store

FINGERPRINT = b"weights A"
# in memory where possible: a process that dies does not mind, and SQLite syncs in no time
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
BUDGET, SEGMENT = 120_000, 20_000
NUMBER = struct.Struct("<Q")


def key_of(number):
    return sha256(b"%d" % number).digest()


def payload_of(key):
    """0 to 4095 bytes."""
    return shake_128(key).digest(int.from_bytes(key[:2], "little") % 4096)


def item_of(number):
    return key_of(number), payload_of(key_of(number))


def served(store, numbers):
    """-> the numbers that the store has. A wrong payload is an error."""
    found = set()
    for number in numbers:
        payload = store.get(key_of(number))
        if payload is not None:
            assert payload == payload_of(key_of(number)), f"wrong payload for {number}"
            found.add(number)
    return found


def check_directory(directory, budget=None):
    """Open the store anew; nothing may be left that no index lists. -> the open store."""
    store = Store(directory, FINGERPRINT, budget, SEGMENT)
    files = list_segments(directory)
    listed = {segment: size for segment, size, _ in store._index.segments()}
    assert files == listed, f"files {files}, index {listed}"
    assert store.last_error is None, store.last_error
    return store


# ---- processes ------------------------------------------------------------------------------


def start(function, *arguments):
    """Fork, run function(report, *arguments); report(n) sends a number. -> pid, descriptor."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        function(lambda number: os.write(writing, NUMBER.pack(number)), *arguments)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def finish(pid, reading):
    """Wait -> the exit status (negative: the signal), the numbers reported."""
    with open(reading, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(pid, 0)
    whole = len(sent) // NUMBER.size * NUMBER.size
    return os.waitstatus_to_exitcode(status), {n for (n,) in NUMBER.iter_unpack(sent[:whole])}


def write(report, directory, budget, seed, seconds=60):
    """Use a store in every way, and report what has been stored."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    with Store(directory, FINGERPRINT, budget, SEGMENT) as store:
        while time.monotonic() < end:
            first = rng.randrange(300)
            numbers = range(first, first + rng.choice((1, 1, 1, 2, 5, 12)))
            store.longest([key_of(n) for n in numbers])
            served(store, numbers)
            if len(numbers) == 1:
                store.put(*item_of(first))
            else:
                store.put_many(map(item_of, numbers))
            if rng.random() < 0.05:
                store.evict()
            assert store.last_error is None, store.last_error
            for number in numbers:
                report(number)


def read(report, directory, seconds):
    end = time.monotonic() + seconds
    with Store(directory, FINGERPRINT) as store:
        views = {}
        while time.monotonic() < end:
            for number in served(store, random.sample(range(312), 20)):
                report(number)
                views[number] = store.get(key_of(number))
        for number, view in views.items():  # by now most of their files are gone
            assert view is None or view == payload_of(key_of(number))
        assert store.last_error is None and store.stats["corrupt"] == 0, store.stats


# ---- what the tests ask for -----------------------------------------------------------------


def kill_writers(directory, kills, seed):
    """Two writers at a time, killed at random instants, then everything is read. -> a summary."""
    rng, known = random.Random(seed), set()
    tally = dict.fromkeys(("kills", "reported", "served", "opened_late"), 0)
    while tally["kills"] < kills:
        budget = rng.choice((None, BUDGET))
        path = Path(directory) / ("unlimited" if budget is None else "limited")
        writers = [start(write, path, budget, rng.random()) for _ in range(2)]
        for pid, _ in writers:
            time.sleep(rng.expovariate(1 / 0.03))
            os.kill(pid, signal.SIGKILL)
        ends = [finish(*writer) for writer in writers]
        assert all(code == -signal.SIGKILL for code, _ in ends), "a writer failed"
        with check_directory(path, budget) as store:
            found = served(store, range(312))
            reported = set.union(*(numbers for _, numbers in ends))
            if budget is None:
                known |= reported
                assert found >= known, f"lost {sorted(known - found)}"
            else:
                store.evict()
                assert store.stats["bytes"] <= budget
            assert store.stats["corrupt"] == 0
        tally["kills"] += 2
        tally["reported"] += len(reported)
        tally["served"] += len(found)
        tally["opened_late"] += sum(not numbers for _, numbers in ends)
    return tally


def crowd(directory, seconds):
    """Two writers, one that only evicts, and a reader. -> how much each of them did."""
    workers = [
        start(write, directory, BUDGET, 1, seconds),
        start(write, directory, BUDGET, 2, seconds),
        start(read, directory, seconds),
        start(evict, directory, seconds),
    ]
    ends = [finish(*worker) for worker in workers]
    assert [code for code, _ in ends] == [0] * 4
    with check_directory(directory, BUDGET) as store:
        served(store, range(312))
        store.evict()
        assert store.stats["bytes"] <= BUDGET and store.stats["corrupt"] == 0
    return [len(numbers) for _, numbers in ends]


def evict(report, directory, seconds):
    end = time.monotonic() + seconds
    with Store(directory, FINGERPRINT, BUDGET // 2, SEGMENT) as store:
        while time.monotonic() < end:
            report(store.evict())
            assert store.last_error is None, store.last_error
            time.sleep(0.005)


def open_at_once(directory, count):
    """Processes open a store that does not exist yet, in the same instant. -> records stored."""
    instant = time.monotonic() + 0.1
    workers = [start(_open, directory, n, instant) for n in range(count)]
    ends = [finish(*worker) for worker in workers]
    assert [code for code, _ in ends] == [0] * count
    with check_directory(directory) as store:
        return len(served(store, range(count)))


def _open(report, directory, number, instant):
    time.sleep(max(0, instant - time.monotonic()))
    with Store(directory, FINGERPRINT) as store:
        assert store.put(*item_of(number)), store.last_error


def session(report, directory, budget):
    """A short use that appends, evicts, compacts and removes; numbers 0 to 39 are there before."""
    with Store(directory, FINGERPRINT, budget, SEGMENT) as store:
        store.touch([key_of(n) for n in range(0, 40, 3)])
        for number in range(100, 106):
            store.put(*item_of(number))
            report(number)
        store.put_many(map(item_of, range(106, 115)))
        store.get(key_of(3))


def die_at(moment):
    """Kill this process before its `moment`-th new line of the store."""
    seen = set()

    def watch(frame, event, _):
        if "dsv41" not in frame.f_code.co_filename:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        if len(seen) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return watch

    sys.settrace(watch)


def tear_at(moment):
    """Kill this process half way through its `moment`-th write to a segment."""
    pwrite, left = os.pwrite, iter(range(moment - 1, -1, -1))

    def torn(fd, data, offset):
        if next(left):
            return pwrite(fd, data, offset)
        pwrite(fd, data[: (len(data) + 1) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    os.pwrite = torn


def kill_everywhere(directory, budget, tear, first=1, stride=1):
    """Kill a session before each line that it executes, or half way through each of its writes.

    -> kills. Starts from a store that holds 0 to 39, ends with a session that survives.
    """
    before, path = Path(directory) / "before", Path(directory) / "store"
    with Store(before, FINGERPRINT, None, SEGMENT) as store:
        store.put_many(map(item_of, range(40)))
    for kills, moment in enumerate(range(first, 5000, stride)):
        shutil.copytree(before, path)
        code, reported = finish(*start(_doomed, tear_at if tear else die_at, moment, path, budget))
        assert code in (0, -signal.SIGKILL)
        with check_directory(path, budget) as store:
            found = served(store, (*range(40), *range(100, 115)))
            assert budget is not None or found >= {*range(40)} | reported
            store.put_many(map(item_of, range(200, 203)))  # and it works
            assert served(store, range(200, 203)) == {200, 201, 202}
            assert store.stats["corrupt"] == 0
            assert budget is None or store.stats["bytes"] <= budget
        shutil.rmtree(path)
        if code == 0:
            return kills
    raise AssertionError("the session never came to its end")


def _doomed(report, prepare, moment, path, budget):
    prepare(moment)
    session(report, path, budget)


def fill_disk(directory, limit):
    """No file may grow beyond `limit` bytes, not even the index. -> what the store says then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with Store(directory, FINGERPRINT) as store:
        large = store.put(b"large", bytes(limit + 1)), store.last_error
        sizes = list_segments(directory)
        stored = [n for n in range(200) if store.put(*item_of(n))]
        found = served(store, range(200))
        return {
            "large": large,
            "files_after_large": len(sizes),
            "stored": stored,
            "found": sorted(found),
            "error": store.last_error,
        }


def read_all(directory, count):
    with Store(directory, FINGERPRINT) as store:
        return len(served(store, range(count)))


def without_rights(directory):
    """Use a store in a directory that we may only read."""
    if os.getuid() == 0:
        os.setuid(65534)
    with Store(directory, FINGERPRINT) as store:
        found = served(store, range(10))
        put = store.put(*item_of(50))
        longest = store.longest([key_of(n) for n in range(10)])
        return {"found": len(found), "put": put, "longest": longest, "error": store.last_error}


def run(name, **arguments):
    """Call a function of this file in a process of its own -> its result."""
    command = [sys.executable, "-W", "ignore", __file__, name, json.dumps(arguments, default=str)]
    roots = os.pathsep.join(str(Path(__file__).parent.parent / part) for part in (".", "kernels"))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": roots},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
