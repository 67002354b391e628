"""Which tokens does one call bring, and to whom do they belong?

A batch is the new tokens of several requests laid end to end. Token-wise layers (linear, MoE, mHC)
see T rows and need nothing else. Window, compressor, indexer and Engram also need to know where a
request begins and how long it already is; they read it here. Prefill is one request with many
tokens, decode is many requests with one token each, a packed training sample is many short
requests: the same code. A row never depends on another request's rows.
"""

from dataclasses import dataclass, replace

import numpy as np

from .dispatch import beside

TEXT = -1  # token type of a text token; an image span has types >= 0


@dataclass(frozen=True)
class Batch:
    """T tokens of `count` requests: NumPy arrays per token (T,) and per request (count,)."""

    ids: np.ndarray  # token ids
    types: np.ndarray  # TEXT, or the kind of image position
    positions: np.ndarray  # position of the token in its request
    order: np.ndarray  # which request of the batch, 0 .. count-1
    starts: np.ndarray  # first position of that request in this batch
    offsets: np.ndarray  # first row of that request in this batch
    floors: np.ndarray  # window keys before this position are not seen
    slots: np.ndarray  # (count,) the requests' places in the cache
    lengths: np.ndarray  # (count,) tokens each request brings; 0 in some sub-batches

    @property
    def count(self):
        return len(self.slots)

    @property
    def is_image(self):
        """(T,) bool: positions of an image span, delimiters included."""
        return self.types > TEXT

    def segments(self):
        """Yield (slot, slice of rows, first position, position after the last) per request."""
        begin = 0
        for slot, length in zip(self.slots.tolist(), self.lengths.tolist(), strict=True):
            if length:
                first = int(self.positions[begin])
                yield slot, slice(begin, begin + length), first, first + length
            begin += length

    def only(self, keep):
        """The rows where keep (T,) bool holds, an unbroken run of each request, as a Batch."""
        lengths = np.bincount(self.order[keep], minlength=self.count)
        offsets = (np.cumsum(lengths) - lengths)[self.order[keep]]
        positions = self.positions[keep]
        return replace(
            self,
            ids=self.ids[keep],
            types=self.types[keep],
            positions=positions,
            order=self.order[keep],
            starts=positions[offsets],
            offsets=offsets,
            floors=self.floors[keep],
            lengths=lengths,
        )

    def beside(self, like):
        """The batch with its per-token arrays in the memory of `like`, for arithmetic there."""
        names = ("positions", "order", "starts", "offsets", "floors")
        return replace(self, **{name: beside(getattr(self, name), like) for name in names})

    def with_floors(self, floor_of):
        """The same rows with window floors: floor_of[slot] for every row of that slot."""
        floors = np.array([floor_of[slot] for slot in self.slots.tolist()], np.int64)
        return replace(self, floors=floors[self.order])


def make_batch(requests, starts, slots, types=None):
    """requests: list of 1-D int id arrays; starts, slots: one int per request -> Batch.

    types: list of 1-D int arrays like the ids, or None for text only. Every request brings at
    least one token.
    """
    lengths = np.array([len(ids) for ids in requests])
    order = np.repeat(np.arange(len(requests)), lengths)
    offsets = (np.cumsum(lengths) - lengths)[order]
    first = np.asarray(starts, np.int64)[order]
    ids = np.concatenate([np.asarray(ids, np.int64) for ids in requests])
    return Batch(
        ids=ids,
        types=np.full_like(ids, TEXT) if types is None else np.concatenate(types).astype(np.int64),
        positions=first + np.arange(len(ids)) - offsets,
        order=order,
        starts=first,
        offsets=offsets,
        floors=np.zeros_like(ids),
        slots=np.asarray(slots, np.int64),
        lengths=lengths,
    )
