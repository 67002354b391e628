"""How is the work on a shared prompt kept for the next request, and what is worth keeping?

Tokens are cut into blocks of one page. A block's key hashes its tokens and, through the key of the
block before, everything that stands before it, from a fingerprint of model, numerics and replay
rule on: all that its global KV depends on. Saved per block: main KV and index keys of every
source, 890 bytes a token in the real plan. Window KV is the question, because it is large and soon
useless. Four answers, by what a hit of H tokens then costs:

    bounded    V4.1: keep none; run the last W tokens again, approximately (replay.py)
    zero       keep none; run the last W * layers tokens again, exactly
    periodic   keep all rings every `period` tokens; run again from the last checkpoint, exactly
    full       keep every token's window KV; run nothing again

A WindowPool beside the store may hold encoder rings for minutes: then a hit continues without
encoder replay. Source: report, section 3.2.1, and V4's, section 3.5.2. Left out: prompts with
images, whose pixels the token ids do not tell.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from .fingerprint import fingerprint
from .replay import begin_replay, resume_at

STRATEGIES = ("bounded", "zero", "periodic", "full")


@dataclass(frozen=True)
class Resumed:
    """A request after a lookup: `hit` tokens of global KV are there, feed the ids from `start`."""

    hit: int
    start: int
    windows: str  # where they come from: "nowhere" (no hit), "replay", "store" or "pool"


class PrefixCache:
    """Saves and resumes requests of one model and numerics through a Store.

    store: an object with get, put, put_many and longest over byte keys. pool: a WindowPool or
    None. period: tokens between the checkpoints of the periodic strategy, a multiple of the cache's
    page_tokens.
    """

    def __init__(self, model, store, strategy="bounded", pool=None, period=1024):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {STRATEGIES}, got {strategy!r}")
        if pool is not None and strategy != "bounded":
            raise ValueError(f"pool: pooled windows are for the bounded strategy, not {strategy}")
        self.model, self.store, self.strategy = model, store, strategy
        self.pool, self.period = pool, period
        self.saved = {}  # slot -> blocks of this request that are stored
        self.marks = {}  # numerics -> fingerprint, which every key begins with

    @property
    def exact(self):
        """Whether a resumed request computes what it would have computed alone."""
        return self.strategy != "bounded"

    def check(self, cache):
        """ValueError when this cache's pages cannot serve the strategy."""
        block, width = cache.page_tokens, self.model.config.sliding_window
        if self.strategy == "full" and block > width:
            raise ValueError(f"page_tokens: full window KV needs blocks up to {width}, got {block}")
        if self.strategy == "periodic" and (self.period < 1 or self.period % block):
            raise ValueError(f"period: expected a multiple of {block} tokens, got {self.period}")

    def keys(self, cache, ids):
        """A key per whole block of ids, of this model, these numerics and this rule alone."""
        if cache.numerics not in self.marks:
            mark = fingerprint(self.model, cache.numerics, self.exact)
            self.marks[cache.numerics] = mark
        return block_keys(ids, cache.page_tokens, self.marks[cache.numerics])

    # ---- resume ----------------------------------------------------------------------------

    def resume(self, cache, slot, ids):
        """Load what is stored of the prompt `ids` into an empty request -> Resumed.

        At least one token is left to feed, since its logits are what the caller wants.
        """
        keys = self.keys(cache, ids[: len(ids) - 1])
        found = self._load_blocks(cache, slot, keys[: self.store.longest(keys)])
        self.saved[slot] = found
        if not found:
            return Resumed(0, 0, "nowhere")
        hit, keys = found * cache.page_tokens, keys[:found]
        for finder in (self._from_pool, self._from_store):
            resumed = finder(cache, slot, ids, hit, keys)
            if resumed:
                return resumed
        return Resumed(hit, begin_replay(self.model, cache, slot, ids, hit, self.exact), "replay")

    def _load_blocks(self, cache, slot, keys):
        """Copy the blocks' records into the request's pages -> how many could be read."""
        for number, key in enumerate(keys):
            payload = self.store.get(key)
            cache.reserve(slot, (number + 1) * cache.page_tokens)
            if payload is None or not cache.put_block(slot, number, payload):
                return number
        return len(keys)

    def _from_pool(self, cache, slot, ids, hit, keys):
        rings = self.pool.get(keys[-1]) if self.pool is not None else None
        if rings is None:
            return None
        for ring, rows in zip(cache.window, rings, strict=False):  # encoder layers come first
            ring[slot] = rows
        floor = {"encoder": 0, "decoder": hit}
        resume_at(self.model, cache, slot, ids, hit, hit, floor)
        return Resumed(hit, hit, "pool")

    def _from_store(self, cache, slot, ids, hit, keys):
        """The latest point of the prefix whose windows are stored."""
        if self.strategy not in ("periodic", "full"):
            return None
        for number in range(len(keys), 0, -1):
            rings = self._stored_rings(cache, keys[:number])
            if rings is not None:
                for ring, rows in zip(cache.window, rings, strict=True):
                    ring[slot] = rows
                at = number * cache.page_tokens
                resume_at(self.model, cache, slot, ids, hit, at, {"encoder": 0, "decoder": 0})
                return Resumed(hit, at, "store")
        return None

    def _stored_rings(self, cache, keys):
        """Rings (layers, W, Z) as they stood at the end of the last block of `keys`, or None."""
        shape = (len(cache.window), -1, *cache.window[0].shape[2:])
        dtype = cache.window[0].dtype
        if self.strategy == "periodic":
            payload = self.store.get(_window_key(keys[-1]))
            return None if payload is None else np.frombuffer(payload, dtype).reshape(shape)
        width, block = self.model.config.sliding_window, cache.page_tokens
        rings = np.zeros((len(cache.window), *cache.window[0].shape[1:]), dtype)
        for number in range(max(0, len(keys) - -(-width // block)), len(keys)):
            payload = self.store.get(_window_key(keys[number]))
            if payload is None:
                return None
            positions = np.arange(number * block, (number + 1) * block)
            rings[:, positions % width] = np.frombuffer(payload, dtype).reshape(shape)
        return rings

    # ---- save ------------------------------------------------------------------------------

    def stop_before(self, cache, length, total):
        """Where a prefill at `length` of `total` tokens has to stop so that `save` sees windows."""
        block = cache.page_tokens
        step = {"full": block, "periodic": self.period}.get(self.strategy)
        if step:
            return min(total, (length // step + 1) * step)
        last = (total - 1) // block * block
        return last if self.pool is not None and length < last else total

    def save(self, cache, slot, ids):
        """Store the request's whole blocks that are not stored yet; ids: all its tokens.

        A request that ended inside a verified draft has run more tokens than it kept; what lies
        behind the kept ones is not stored, nor are the windows, which have moved on.
        """
        block, length = cache.page_tokens, min(cache.length[slot], len(ids))
        if length // block <= self.saved.get(slot, 0):
            return
        keys = self.keys(cache, ids[:length])
        new = range(self.saved.get(slot, 0), len(keys))
        self.store.put_many((keys[number], cache.get_block(slot, number)) for number in new)
        self.saved[slot] = len(keys)
        if length % block == 0 and length == cache.length[slot]:
            self._save_windows(cache, slot, length, keys[-1])

    def _save_windows(self, cache, slot, length, key):
        block = cache.page_tokens
        if self.strategy == "full":
            rows = np.arange(length - block, length) % self.model.config.sliding_window
            payload = np.stack([ring[slot, rows] for ring in cache.window])
            self.store.put(_window_key(key), payload.tobytes())
        elif self.strategy == "periodic" and length % self.period == 0:
            payload = np.stack([ring[slot] for ring in cache.window])
            self.store.put(_window_key(key), payload.tobytes())
        elif self.pool is not None:
            self._pool_rings(cache, slot, key)

    def _pool_rings(self, cache, slot, key):
        layers = [layer.index for layer in self.model.config.plan if layer.half == "encoder"]
        rings = [cache.window[layer][slot].copy() for layer in layers]
        self.pool.put(key, rings, sum(ring.nbytes for ring in rings))

    def forget(self, slot):
        """The request has ended."""
        self.saved.pop(slot, None)


def block_keys(ids, block, start=b""):
    """ids (T,) int -> a 32-byte key per whole block of `block` tokens, hashing all before too,
    and `start` before them.
    """
    ids, chain, keys = np.asarray(ids, np.int64), start, []
    for begin in range(0, len(ids) // block * block, block):
        chain = _hash(chain + ids[begin : begin + block].astype("<i8").tobytes())
        keys.append(chain)
    return keys


def _window_key(key):
    return _hash(key + b"window")


def _hash(data):
    return hashlib.blake2b(data, digest_size=32).digest()
