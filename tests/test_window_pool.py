"""The pool of window KV: time, bytes and order by hand, against a slow list, and from threads."""

import random
import threading
import time

import pytest

from dsv41.window_pool import WindowPool


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_value_comes_back_as_the_same_object(clock):
    pool, value = WindowPool(10, 100, clock), object()
    assert pool.get("k") is None
    assert pool.put("k", value, 40) is True
    assert pool.get("k") is value and pool.get("k") is value
    assert (len(pool), pool.nbytes) == (1, 40)


def test_an_entry_lives_so_long_after_its_last_use(clock):
    pool = WindowPool(10, 100, clock)
    pool.put("used", 1, 10)
    pool.put("idle", 2, 20)
    clock.now += 6
    assert pool.get("used") == 1
    clock.now += 3.99
    assert pool.get("idle") == 2  # and is used by that
    clock.now += 6.01
    assert pool.get("used") is None
    assert (len(pool), pool.nbytes) == (1, 20)
    clock.now += 10
    assert len(pool) == 0 and pool.nbytes == 0


def test_expired_bytes_are_free_at_once(clock):
    pool = WindowPool(10, 100, clock)
    pool.put("old", 1, 100)
    clock.now += 10
    assert pool.put("new", 2, 60) and pool.put("other", 3, 40)
    assert len(pool) == 2 and not pool._entries.keys() & {"old"}


def test_the_least_recently_used_make_room(clock):
    pool = WindowPool(10, 100, clock)
    for key in "abcde":
        pool.put(key, key, 20)
    pool.get("a")
    assert pool.put("f", "f", 30)
    assert [key for key in "abcdef" if pool.get(key)] == ["a", "d", "e", "f"]
    assert pool.nbytes == 90


def test_a_new_value_replaces_the_old_one(clock):
    pool = WindowPool(10, 100, clock)
    pool.put("k", "old", 90)
    pool.put("other", 1, 10)
    assert pool.put("k", "new", 90)
    assert pool.get("k") == "new" and pool.get("other") == 1 and pool.nbytes == 100


def test_what_is_larger_than_the_budget_is_refused(clock):
    pool = WindowPool(10, 100, clock)
    pool.put("other", 1, 100)
    assert pool.put("k", 2, 101) is False
    assert pool.get("k") is None and pool.get("other") == 1
    assert pool.put("other", 3, 101) is False
    assert pool.get("other") is None and pool.nbytes == 0  # trap: the old window would be wrong
    assert WindowPool(10, 0, clock).put("empty", 1, 0) is True


@pytest.mark.parametrize("ttl, budget", [(0, 1), (-1, 1), (1, -1)])
def test_wrong_limits(ttl, budget):
    with pytest.raises(ValueError, match="ttl_seconds, budget"):
        WindowPool(ttl, budget)


def test_a_negative_size():
    with pytest.raises(ValueError, match="nbytes"):
        WindowPool(1, 1).put("k", 1, -1)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_list(clock, seed):
    rng, pool, entries = random.Random(seed), WindowPool(10, 100, clock), []
    for step in range(600):
        clock.now += rng.choice((0, 0.5, 3))
        entries = [e for e in entries if e[3] + 10 > clock.now]
        key, size = rng.randrange(8), rng.choice((0, 7, 30, 55, 101))
        found = next((e for e in entries if e[0] == key), None)
        if rng.random() < 0.5:
            assert pool.get(key) == (found and found[1])
            if found:
                entries.remove(found)
                entries.append((*found[:3], clock.now))
        else:
            assert pool.put(key, step, size) == (size <= 100)
            entries = [e for e in entries if e[0] != key]
            while size <= 100 and sum(e[2] for e in entries) + size > 100:
                entries.pop(0)
            if size <= 100:
                entries.append((key, step, size, clock.now))
        assert (len(pool), pool.nbytes) == (len(entries), sum(e[2] for e in entries))


def test_threads():
    pool, failures = WindowPool(0.01, 500, time.monotonic), []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(3000):
                key = rng.randrange(20)
                if rng.random() < 0.5:
                    pool.put(key, key, rng.randrange(100))
                else:
                    assert pool.get(key) in (None, key)
                assert 0 <= pool.nbytes <= 500 and len(pool) <= 20
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.nbytes == sum(size for _, size, _ in pool._entries.values())
