"""Where does a session's window KV wait for the next turn?

The window records of the encoder layers are worth keeping for minutes only: they serve the next
turn of a live session, and each turn makes the last ones worthless. They stay in memory, in a pool
with two limits:

    time to live    an entry that nobody asked for during `ttl_seconds` is gone
    byte budget     the entries asked for longest ago make room for a new one

A use starts the time anew, so both limits drop from the same end of one ordered dictionary. A miss
costs a replay of one window, no more (`replay`).
Source: report, section 3.2.1 (a pool of a tenth of the host's memory, entries living minutes).
Left out: sharing the pool between machines.
"""

import time
from collections import OrderedDict
from threading import Lock


class WindowPool:
    """key -> object, safe to use from several threads. `nbytes` is what the live entries take."""

    def __init__(self, ttl_seconds, budget, clock=time.monotonic):
        if ttl_seconds <= 0 or budget < 0:
            raise ValueError(
                f"ttl_seconds, budget: expected a time above 0 and bytes from 0, "
                f"got {ttl_seconds}, {budget}"
            )
        self.ttl_seconds, self.budget = ttl_seconds, budget
        self._clock = clock
        self._lock = Lock()
        self._entries = OrderedDict()  # key -> (value, bytes, time of last use), oldest use first
        self._nbytes = 0

    def put(self, key, value, nbytes):
        """Keep `value`, in place of what `key` had. -> False if it alone is above the budget."""
        if nbytes < 0:
            raise ValueError(f"nbytes: expected a size from 0, got {nbytes}")
        with self._lock:
            self._expire()
            self._remove(key)  # also when the new value does not fit: the old one is out of date
            if nbytes > self.budget:
                return False
            while self._nbytes + nbytes > self.budget:
                self._remove(next(iter(self._entries)))
            self._entries[key] = value, nbytes, self._clock()
            self._nbytes += nbytes
            return True

    def get(self, key):
        """-> the value, or None if it was never kept, made room for another, or expired."""
        with self._lock:
            self._expire()
            if key not in self._entries:
                return None
            value, nbytes, _ = self._entries.pop(key)
            self._entries[key] = value, nbytes, self._clock()
            return value

    def __len__(self):
        with self._lock:
            self._expire()
            return len(self._entries)

    @property
    def nbytes(self):
        with self._lock:
            self._expire()
            return self._nbytes

    def _expire(self):
        latest = self._clock() - self.ttl_seconds
        while self._entries:
            key, (_, _, used) = next(iter(self._entries.items()))
            if used > latest:
                return
            self._remove(key)

    def _remove(self, key):
        _, nbytes, _ = self._entries.pop(key, (None, 0, None))
        self._nbytes -= nbytes
