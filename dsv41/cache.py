"""What does a request leave behind for its next token, and how many bytes is it?

    window ring      every layer        W records per request            528 B each
    main KV          every KV source    one record per `ratio` tokens    288 B
    index key        every KV source    one record per `ratio` tokens     68 B
    compressor carry ratio-2 sources    u and g of the token whose pair is open, float32
    Engram history   the request        classes of its last three tokens

Global records (main KV, index keys) live in pages. A page is the same number in every pool, and
holds the entries of `page_tokens` neighbouring tokens of one request; a request is a list of
pages:

    request        pages [5, 0, 9]          tokens 0..63 | 64..127 | 128..191
    source, m = 2  rows  5*32 .. 5*32+31   | 0*32 .. 31 | 9*32 .. 9*32+31      (main KV and keys)
    source, m = 1  rows  5*64 .. 5*64+63   | 0*64 .. 63 | 9*64 .. 9*64+63

Under OFFICIAL the records are the released bytes; under FLOAT32 they are the float32 vectors. Rows
behind a request's length are garbage that nobody reads: visibility is decided by position. Left
out: sharing pages between requests; a stored prefix is copied in (prefix.py).
"""

from collections import deque

import numpy as np

from .dispatch import beside, op

NEW_PAGES = 16  # the pools grow by doubling, from here


@op
def paged_rows(entries, pages, request, per_page):
    """Pool rows of entry numbers (...) int; -1 stays -1.

    pages (R, n) int: page numbers of each request; request: one for all, or of each entry, in any
    shape that broadcasts to entries.
    """
    rows = pages[request, np.maximum(entries, 0) // per_page] * per_page + entries % per_page
    return np.where(entries < 0, -1, rows)


class Cache:
    """State of several requests. `add` opens one and returns its slot; `release` frees it."""

    def __init__(self, config, numerics, page_tokens=64, like=None):
        ratios = [config.compress_ratios[s] for s in config.kv_source_layer_ids]
        if page_tokens < 1 or any(page_tokens % ratio for ratio in ratios):
            raise ValueError(f"page_tokens: expected a positive even number, got {page_tokens}")
        self.config, self.numerics, self.page_tokens = config, numerics, page_tokens
        self.like = like
        self.ratio = dict(zip(config.kv_source_layer_ids, ratios, strict=True))
        self.length = []  # tokens seen, per slot; None where the slot is free
        self.pages = []  # page numbers, per slot
        self.free_pages = deque()
        self.written = {s: [] for s in self.ratio}  # tokens whose global KV exists, per slot
        self.floor = {"encoder": [], "decoder": []}  # first token with window KV, per slot
        self.marks = {}  # slot -> what a rollback needs (rollback.py)
        self.broken = set()  # slots that an error left in the middle of a step
        self.work = {"encoder": 0, "decoder": 0}  # tokens times layers computed so far
        self.history = np.zeros((0, config.engram_max_ngram_size - 1), np.int64)
        self.window = [self._ring(0) for _ in range(config.num_hidden_layers)]
        self.carry = {s: self._carry(0) for s, ratio in self.ratio.items() if ratio > 1}
        self.main_kv = {s: self._pool("main_kv", s, 0) for s in self.ratio}
        self.index = {s: self._pool("index", s, 0) for s in self.ratio}

    # ---- requests --------------------------------------------------------------------------

    def add(self, pad_class=0):
        """Open a request and return its slot. `pad_class` is what Engram sees before its start."""
        slot = self.length.index(None) if None in self.length else self._new_slot()
        self.length[slot] = 0
        self.history[slot] = pad_class
        for per_slot in (*self.written.values(), *self.floor.values()):
            per_slot[slot] = 0
        return slot

    def release(self, slot):
        """Free a request's slot and pages for others."""
        if slot not in self.broken:
            self.require_open(slot)
        self.free_pages += self.pages[slot]
        self.length[slot], self.pages[slot] = None, []
        self.marks.pop(slot, None)
        self.broken.discard(slot)

    def reserve(self, slot, length):
        """Give the request the pages that `length` tokens need."""
        self.require_open(slot)
        needed = self._page_count(length) - len(self.pages[slot])
        if needed > len(self.free_pages):
            self._grow_pages(needed - len(self.free_pages))
        self.pages[slot] += [self.free_pages.popleft() for _ in range(max(needed, 0))]

    def trim(self, slot):
        """Give back the pages behind the request's length."""
        used = self._page_count(self.length[slot])
        self.free_pages += self.pages[slot][used:]
        del self.pages[slot][used:]

    def require_open(self, slot):
        """Raise ValueError unless `slot` is an open request."""
        if not 0 <= slot < len(self.length) or self.length[slot] is None:
            raise ValueError(f"slot: {slot} is not an open request")
        if slot in self.broken:
            raise ValueError(f"slot: a step of {slot} failed half way; release it and start again")

    # ---- one call --------------------------------------------------------------------------

    def begin(self, batch, decoder_from=None):
        """Make room for the batch's tokens -> (T,) bool, the rows that run through the decoder.

        decoder_from: a position per request. Tokens before it leave no window KV in the decoder,
        so its windows begin there.
        """
        for slot, _, _, end in batch.segments():
            self.reserve(slot, end)
        if decoder_from is None:
            return np.ones(len(batch.ids), bool)
        decoder_from = np.asarray(decoder_from, np.int64)
        for (slot, _, first, end), position in zip(batch.segments(), decoder_from, strict=True):
            if position > first:
                self.floor["decoder"][slot] = min(int(position), end)
        return batch.positions >= decoder_from[batch.order]

    def advance(self, batch):
        """The batch's tokens have been computed: count them."""
        for slot, _, _, end in batch.segments():
            self.length[slot] = end

    # ---- global records --------------------------------------------------------------------

    def rows(self, source, slot, entries):
        """Pool rows (same shape, int64) of a request's entry numbers; -1 stays -1."""
        entries = entries if hasattr(entries, "shape") else np.array(entries)
        pages = beside(self.page_table([slot]), entries)
        return paged_rows(entries, pages, 0, self.page_tokens // self.ratio[source])

    def page_table(self, slots):
        """(len(slots), n) int64: page numbers of each request, 0 behind its last."""
        # a request without pages has only -1 to look up; any table will do for those
        table = np.zeros((len(slots), max([1, *(len(self.pages[s]) for s in slots)])), np.int64)
        for row, slot in zip(table, slots, strict=True):
            row[: len(self.pages[slot])] = self.pages[slot]
        return table

    def rows_of_entries(self, source, entries, owners):
        """Pool rows (N,) of entries[i] of slot owners[i], all on the host."""
        slots, request = np.unique(owners, return_inverse=True)
        per_page = self.page_tokens // self.ratio[source]
        return paged_rows(entries, self.page_table(slots.tolist()), request, per_page)

    def index_keys(self, source, slot, count):
        """The request's first `count` index keys, in order: (count, Z) records."""
        entries = beside(np.arange(count), self.like)
        return self.index[source][self.rows(source, slot, entries)]

    def no_records(self, tokens):
        """An empty pool of main KV and an empty row list (T, 0): nothing to read."""
        empty = self.numerics.main_kv.new_records((0,), self.config.head_dim, like=self.like)
        return empty, np.zeros((tokens, 0), np.int64, like=self.like)

    def write_entries(self, source, entries, owners, kv, keys):
        """Store entry entries[i] of slot owners[i]: kv (N, Z) main KV, keys (N, Z) index keys."""
        rows = beside(self.rows_of_entries(source, entries, owners), self.like)
        self.main_kv[source][rows], self.index[source][rows] = kv, keys

    def get_block(self, slot, number):
        """Bytes of the request's page `number`: main KV and index keys of every source in turn."""
        return b"".join(self._page(pool, s, slot, number).tobytes() for pool, s in self._pools())

    def put_block(self, slot, number, payload):
        """Fill page `number` with the bytes of `get_block`; False when their count is wrong."""
        pages = [self._page(pool, s, slot, number) for pool, s in self._pools()]
        if len(payload) != sum(page.nbytes for page in pages):
            return False
        begin = 0
        for page in pages:
            page[:] = np.frombuffer(payload, page.dtype, page.size, begin).reshape(page.shape)
            begin += page.nbytes
        return True

    def _pools(self):
        return [(pool, s) for s in self.ratio for pool in (self.main_kv, self.index)]

    def _page(self, pool, source, slot, number):
        """One page's records, a view into the pool."""
        per_page = self.page_tokens // self.ratio[source]
        first = self.pages[slot][number] * per_page
        return pool[source][first : first + per_page]

    def not_written(self, source, batch):
        """(T,) bool: tokens whose global KV the source has not stored yet."""
        written = np.array([self.written[source][slot] for slot in batch.slots.tolist()])
        return batch.positions >= written[batch.order]

    def mark_written(self, source, batch):
        """The source has stored the global KV of all tokens of the batch."""
        for slot, _, _, end in batch.segments():
            self.written[source][slot] = end

    # ---- per request -----------------------------------------------------------------------

    def write_window(self, layer, batch, records):
        """Put the last W new records of every request into its ring."""
        width = self.config.sliding_window
        ends = batch.starts + batch.lengths[batch.order]
        recent = np.flatnonzero(batch.positions >= ends - width)
        slots, ring_rows = batch.slots[batch.order[recent]], batch.positions[recent] % width
        slots, ring_rows, recent = (beside(x, self.like) for x in (slots, ring_rows, recent))
        self.window[layer][slots, ring_rows] = records[recent]

    def set_history(self, slot, history, classes):
        """history (n - 1,): the request's last classes; classes (t,): those of the new tokens."""
        self.history[slot] = history
        if slot in self.marks:
            self.marks[slot].classes.append(classes)

    def note_pending(self, source, slot, candidates):
        """candidates (t, 2, C): u and g of the new tokens, in case the request is rolled back."""
        if slot in self.marks:
            self.marks[slot].candidates[source].append(candidates)

    # ---- bytes -----------------------------------------------------------------------------

    def bytes_per_token(self):
        """Bytes of global KV that one more token costs, measured on the arrays' own records."""
        pools = (self.main_kv, self.index)
        return sum(_bytes_of_a_row(p[s]) / self.ratio[s] for p in pools for s in self.ratio)

    def bytes_per_request(self):
        """Bytes a request holds whatever its length: rings, carry, Engram history."""
        arrays = [*self.window, *self.carry.values(), self.history]
        return sum(_bytes_of_a_row(array) for array in arrays)

    @property
    def nbytes(self):
        """Bytes of all arrays, free pages and slots included."""
        arrays = [*self.window, *self.carry.values(), *self.main_kv.values(), *self.index.values()]
        return sum(a.nbytes for a in arrays) + self.history.nbytes

    # ---- storage ---------------------------------------------------------------------------

    def _page_count(self, length):
        return -(-length // self.page_tokens)

    def _ring(self, slots):
        shape = (slots, self.config.sliding_window)
        return self.numerics.window_kv.new_records(shape, self.config.head_dim, like=self.like)

    def _carry(self, slots):
        # per slot: the pending token's u and g; ratio 2 leaves at most one token pending
        return np.zeros((slots, 1, 2, self.config.head_dim), np.float32, like=self.like)

    def _pool(self, kind, source, pages):
        rows = pages * (self.page_tokens // self.ratio[source])
        channels = self.config.head_dim if kind == "main_kv" else self.config.index_head_dim
        return getattr(self.numerics, kind).new_records((rows,), channels, like=self.like)

    def _new_slot(self):
        slot = len(self.length)
        self.length.append(None)
        self.pages.append([])
        for per_slot in (*self.written.values(), *self.floor.values()):
            per_slot.append(0)
        if slot == len(self.history):
            self._grow_slots(max(4, 2 * slot))
        return slot

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


def _bytes_of_a_row(array):
    return array.itemsize * int(np.prod(array.shape[1:]))
