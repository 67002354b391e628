"""What does a request leave behind for its next token, and how many bytes is it?

    window ring      every layer        W records per request       528 B each
    main KV          every KV source    one record per `ratio` tokens   288 B
    index key        every KV source    one record per `ratio` tokens    68 B
    compressor carry ratio-2 sources    u and g of the token whose pair is open, float32
    Engram history   the request        classes of its last three tokens

Global records (main KV, index keys) live in pages of `page_tokens` tokens: one page number stands
for page_tokens / ratio rows of every source, and a request is a list of page numbers. Row of entry
j:

    page_table[j // rows_per_page] * rows_per_page + j % rows_per_page

Under OFFICIAL the records are the released bytes; under FLOAT32 they are the float32 vectors.
"""

import numpy as np

NEW_PAGES = 16  # the pool grows by doubling, from here


class Cache:
    """State of several requests. `add` opens one and returns its slot; `release` frees it."""

    def __init__(self, config, numerics, page_tokens=64, like=None):
        ratios = [config.compress_ratios[s] for s in config.kv_source_layer_ids]
        if page_tokens < 1 or any(page_tokens % ratio for ratio in ratios):
            raise ValueError(f"page_tokens: expected a positive even number, got {page_tokens}")
        self.config, self.numerics, self.page_tokens, self.like = (
            config,
            numerics,
            page_tokens,
            like,
        )
        self.ratio = dict(zip(config.kv_source_layer_ids, ratios, strict=True))
        self.length = []  # tokens seen, per slot; None where the slot is free
        self.pages = []  # page numbers, per slot
        self.free_pages = []
        self.history = np.zeros((0, config.engram_max_ngram_size - 1), np.int64)
        self.window = [self._ring(0) for _ in range(config.num_hidden_layers)]
        self.carry = {s: self._carry(0) for s, ratio in self.ratio.items() if ratio > 1}
        self.main_kv = {s: self._pool("main_kv", s, 0) for s in self.ratio}
        self.index = {s: self._pool("index", s, 0) for s in self.ratio}

    # ---- requests --------------------------------------------------------------------------

    def add(self, pad_class=0):
        """Open a request and return its slot. `pad_class` is what Engram sees before its start."""
        if None in self.length:
            slot = self.length.index(None)
        else:
            slot = len(self.length)
            self.length.append(None)
            self.pages.append([])
            self._grow_slots(max(4, 2 * slot) if slot >= len(self.history) else len(self.history))
        self.length[slot] = 0
        self.history[slot] = pad_class
        return slot

    def release(self, slot):
        """Free a request's slot and pages for others."""
        self.require_open(slot)
        self.free_pages += self.pages[slot]
        self.length[slot], self.pages[slot] = None, []

    def reserve(self, slot, length):
        """Give the request the pages that `length` tokens need."""
        self.require_open(slot)
        needed = -(-length // self.page_tokens) - len(self.pages[slot])
        if needed > len(self.free_pages):
            self._grow_pages(needed - len(self.free_pages))
        self.pages[slot] += [self.free_pages.pop(0) for _ in range(max(needed, 0))]

    def require_open(self, slot):
        """Raise ValueError unless `slot` is an open request."""
        if not 0 <= slot < len(self.length) or self.length[slot] is None:
            raise ValueError(f"slot: {slot} is not an open request")

    # ---- rows and records ------------------------------------------------------------------

    def rows(self, source, slot, entries):
        """Pool rows (same shape, int64) of a request's entry numbers; -1 stays -1."""
        per_page = self.page_tokens // self.ratio[source]
        table = np.asarray(self.pages[slot] or [0], np.int64)
        entries = np.asarray(entries)
        found = table[np.maximum(entries, 0) // per_page] * per_page + entries % per_page
        return np.where(entries < 0, -1, found)

    def index_keys(self, source, slot, count):
        """The request's first `count` index keys, in order: (count, Z) records."""
        return self.index[source][self.rows(source, slot, np.arange(count))]

    def no_records(self, tokens):
        """An empty pool of main KV and an empty row list (T, 0): nothing to read."""
        empty = self.numerics.main_kv.new_records((0,), self.config.head_dim, like=self.like)
        return empty, np.zeros((tokens, 0), np.int64, like=self.like)

    def write_window(self, layer, batch, records):
        """Put the last W new records of every request into its ring."""
        width = self.config.sliding_window
        recent = batch.positions >= (batch.starts + batch.lengths[batch.order] - width)
        slots = batch.slots[batch.order[recent]]
        self.window[layer][slots, batch.positions[recent] % width] = records[recent]

    # ---- bytes -----------------------------------------------------------------------------

    def bytes_per_token(self):
        """Bytes of global KV that one more token costs, measured on the arrays' own records."""
        pools = (self.main_kv, self.index)
        return sum(p[s][:1].nbytes / self.ratio[s] for p in pools for s in self.ratio)

    def bytes_per_request(self):
        """Bytes a request holds whatever its length: rings, carry, Engram history."""
        rings = sum(ring[:1].nbytes for ring in self.window)
        carries = sum(carry[:1].nbytes for carry in self.carry.values())
        return rings + carries + self.history[:1].nbytes

    @property
    def nbytes(self):
        """Bytes of all arrays, free pages and slots included."""
        arrays = [*self.window, *self.carry.values(), *self.main_kv.values(), *self.index.values()]
        return sum(a.nbytes for a in arrays) + self.history.nbytes

    # ---- storage ---------------------------------------------------------------------------

    def _ring(self, slots):
        shape = (slots, self.config.sliding_window)
        return self.numerics.window_kv.new_records(shape, self.config.head_dim, like=self.like)

    def _carry(self, slots):
        # per slot: the pending token's u and g; ratio 2 leaves at most one token pending
        return np.zeros((slots, 1, 2, self.config.head_dim), np.float32, like=self.like)

    def _pool(self, kind, source, pages):
        rows = pages * (self.page_tokens // self.ratio[source])
        channels = self.config.head_dim if kind == "main_kv" else self.config.index_head_dim
        fmt = getattr(self.numerics, kind)
        return fmt.new_records((rows,), channels, like=self.like)

    def _grow_slots(self, count):
        self.window = [_extended(ring, self._ring(count)) for ring in self.window]
        self.carry = {s: _extended(old, self._carry(count)) for s, old in self.carry.items()}
        self.history = _extended(self.history, np.zeros((count, self.history.shape[1]), np.int64))

    def _grow_pages(self, needed):
        some = next(iter(self.ratio), None)
        have = 0 if some is None else len(self.main_kv[some]) * self.ratio[some] // self.page_tokens
        total = max(NEW_PAGES, 2 * have, have + needed)
        for kind in ("main_kv", "index"):
            pools = getattr(self, kind)
            for s in pools:
                pools[s] = _extended(pools[s], self._pool(kind, s, total))
        self.free_pages += range(have, total)


def _extended(old, new):
    """new, with old's rows in front."""
    new[: len(old)] = old
    return new
