"""How does a request take tokens back?

Verifying drafts runs the model on tokens that may be rejected. Global records behind the accepted
length need no undoing: nobody reads them, and the next tokens overwrite them. Three things do:

    window rings      a new token j overwrote token j - W, which the window may need again
    compressor carry  the open pair belongs to another token now
    Engram history    the last three classes are other tokens

`mark` saves what the next `count` tokens will overwrite; while the mark stands, the compressor and
Engram also note what they computed for each of them; `rollback` puts back what is behind the
accepted length. `snapshot` and `restore` move a whole request out of the cache and back, for
preemption.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Mark:
    """What stood where the next tokens write, and what they computed."""

    length: int
    count: int
    rings: list  # per layer, (count, Z): the ring rows of tokens length .. length + count - 1
    carry: dict  # source -> (1, 2, C)
    history: np.ndarray  # (n - 1,)
    candidates: dict  # source -> [(t, 2, C)]: u and g of the tokens since
    classes: list = field(default_factory=list)  # [(t,)]: Engram classes of the tokens since


def mark(cache, slot, count):
    """Prepare for taking back up to `count` tokens that come next (count <= W)."""
    cache.require_open(slot)
    width, length = cache.config.sliding_window, cache.length[slot]
    if not 0 < count <= width:
        raise ValueError(f"count: expected 1 .. {width} tokens, got {count}")
    ring_rows = np.arange(length, length + count) % width
    cache.marks[slot] = Mark(
        length=length,
        count=count,
        rings=[ring[slot, ring_rows].copy() for ring in cache.window],
        carry={s: carry[slot].copy() for s, carry in cache.carry.items()},
        history=cache.history[slot].copy(),
        candidates={s: [] for s in cache.ratio},
    )


def rollback(cache, slot, length):
    """Make the request `length` tokens long again, and drop its mark.

    Raises ValueError when there is no mark or length is outside what it covers.
    """
    cache.require_open(slot)
    saved, now = cache.marks.get(slot), cache.length[slot]
    if saved is None or not saved.length <= length <= now or now > saved.length + saved.count:
        raise ValueError(f"length: slot {slot} of {now} tokens cannot go back to {length}")
    del cache.marks[slot]
    width, kept = cache.config.sliding_window, length - saved.length
    undone = np.arange(length, now)
    for ring, rows in zip(cache.window, saved.rings, strict=True):
        ring[slot, undone % width] = rows[undone - saved.length]
    for source in cache.carry:
        if length % cache.ratio[source]:
            seen = np.concatenate([saved.carry[source], *saved.candidates[source]])
            cache.carry[source][slot] = seen[kept : kept + 1]
    if saved.classes:  # empty in a model without Engram
        line = np.concatenate([saved.history, *saved.classes])
        cache.history[slot] = line[kept : kept + len(saved.history)]
    for written in cache.written.values():
        written[slot] = min(written[slot], length)
    cache.length[slot] = length
    cache.trim(slot)


@dataclass(frozen=True)
class Snapshot:
    """A request outside the cache: arrays of its own, nothing shared."""

    length: int
    written: dict
    floor: dict
    rings: list
    carry: dict
    history: np.ndarray
    entries: dict  # source -> (main KV (N, Z), index keys (N, Z))

    @property
    def nbytes(self):
        arrays = [*self.rings, *self.carry.values(), self.history]
        return sum(a.nbytes for a in arrays) + sum(
            a.nbytes for pair in self.entries.values() for a in pair
        )


def snapshot(cache, slot):
    """Copy a request out of the cache -> Snapshot. The request stays open."""
    cache.require_open(slot)
    entries = {}
    for source, ratio in cache.ratio.items():
        rows = cache.rows(source, slot, np.arange(cache.written[source][slot] // ratio))
        entries[source] = (cache.main_kv[source][rows], cache.index[source][rows])
    return Snapshot(
        length=cache.length[slot],
        written={s: written[slot] for s, written in cache.written.items()},
        floor={half: floor[slot] for half, floor in cache.floor.items()},
        rings=[ring[slot].copy() for ring in cache.window],
        carry={s: carry[slot].copy() for s, carry in cache.carry.items()},
        history=cache.history[slot].copy(),
        entries=entries,
    )


def restore(cache, saved):
    """Open a request with the state of a Snapshot -> its slot, which may be another one."""
    slot = cache.add()
    cache.reserve(slot, max(saved.length, *saved.written.values(), 0))
    cache.length[slot], cache.history[slot] = saved.length, saved.history
    for s, (kv, keys) in saved.entries.items():
        cache.written[s][slot] = saved.written[s]
        cache.write_entries(s, np.arange(len(kv)), np.full(len(kv), slot), kv, keys)
    for half, floor in saved.floor.items():
        cache.floor[half][slot] = floor
    for ring, rows in zip(cache.window, saved.rings, strict=True):
        ring[slot] = rows
    for s, carry in saved.carry.items():
        cache.carry[s][slot] = carry
    return slot
