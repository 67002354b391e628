"""What does one forward call hand from layer to layer?

`Call` gathers what every layer of a call looks at: the new tokens, the requests' cache, config and
numerics, the Engram rows fetched beforehand, and the dicts of a caller who watches. `Shared` is
the only state that layers of one call leave for each other: the selections of index sources and
the candidate pool. It begins empty with every call and is owned by the source layers, so that no
layer can see another call's choice, another request's, or one that has not been computed yet.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .batch import Batch
from .cache import Cache
from .config import Config
from .dispatch import beside
from .quant import Numerics
from .window import window_index


@dataclass
class Shared:
    """selected: {index source: (T, K) entry numbers, -1 padded}; pool: (T, B) block numbers of the
    candidate source, -1 padded, None before it has run.
    """

    selected: dict = field(default_factory=dict)
    pool: np.ndarray | None = None


@dataclass(frozen=True)
class Call:
    """One forward call over T tokens. trace and features are None unless somebody watches."""

    batch: Batch
    cache: Cache
    config: Config
    numerics: Numerics
    memory: list = ()  # Engram table rows (T, columns), one array per module
    shared: Shared = field(default_factory=Shared)
    trace: dict | None = None
    features: list | None = None  # collects what the drafter reads, (T, D) per target layer

    @cached_property
    def here(self):
        """The batch with its per-token arrays where the model computes."""
        return self.batch.beside(self.cache.like)

    @cached_property
    def is_image(self):
        """(T,) bool where the model computes: positions of an image span."""
        return beside(self.batch.is_image, self.cache.like)

    @cached_property
    def pages(self):
        """(R, n) page numbers of each request where the model computes, 0 behind its last."""
        return beside(self.cache.page_table(self.batch.slots.tolist()), self.cache.like)

    @cached_property
    def window_rows(self):
        """(T, W) rows of the window records that each query reads; the same in all layers."""
        return window_index(self.here, self.config.sliding_window)

    def only(self, keep):
        """The call for the rows where keep (T,) bool holds; shared, cache and watchers stay."""
        memory = [rows[keep] for rows in self.memory]
        return replace(self, batch=self.batch.only(keep), memory=memory)

    def with_floors(self, half):
        """The call with the window floors of "encoder" or "decoder" that the cache remembers."""
        return replace(self, batch=self.batch.with_floors(self.cache.floor[half]))
