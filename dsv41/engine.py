"""How do many requests grow their texts together? (prefill, decode, continuous batching)

An engine holds requests and one cache. Each `step` runs the model once over whatever is due:

    a request that is still reading      the next piece of its prompt, up to `chunk` tokens in all
    a request that is writing            its newest token, and behind it the drafts to be verified

Requests join and leave between steps, and one may be put aside (`preempt`) and come back. The
default numerics are batch-invariant, so a request's text does not depend on its company or on the
chunks. Drafting changes no greedy text; a drawn text keeps its law, but not its draws. Unless
`exact`, only the last window of a prompt runs through the decoder half (replay.py).

The newest token of a writing request, its anchor, has been chosen but not yet been run. Verifying n
drafts feeds n + 1 tokens, keeps some, takes the others back (rollback.py), and leaves a new anchor.
Source: report, section 3.2. Left out: images in prompts.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from .draft import Drafter
from .quant import OFFICIAL
from .replay import decoder_start
from .request import Request, check_submission
from .rollback import mark, restore, rollback, snapshot
from .sampling import Sampling, distribution, draw, verify
from .schedule import draft_lengths

INVARIANT = OFFICIAL.but(batch_invariant=True)


class Engine:
    """Continuous batching over one model.

    exact: run every prompt token through every layer. draft: speculate with DSpark.
    steps_per_second: the scheduler's cost model, tokens -> steps/s (default: every draft is
    verified). prefix: a PrefixCache. max_batch: requests that are open at once; the rest wait.
    """

    def __init__(
        self,
        model,
        numerics=INVARIANT,
        *,
        chunk=512,
        exact=False,
        draft=False,
        steps_per_second=None,
        prefix=None,
        max_batch=16,
        page_tokens=64,
    ):
        if chunk < 1 or max_batch < 1:
            raise ValueError(f"chunk, max_batch: expected positive, got {chunk}, {max_batch}")
        self.model, self.chunk, self.max_batch = model, chunk, max_batch
        self.exact = exact or (prefix is not None and prefix.exact)
        self.cache = model.new_cache(numerics, page_tokens)
        if prefix is not None:
            prefix.check(self.cache)
            if exact and not prefix.exact:
                raise ValueError(
                    "exact: a bounded prefix is an approximation; take another strategy"
                )
        self.drafter = Drafter(model, self.cache) if draft else None
        self.steps_per_second, self.prefix = steps_per_second, prefix
        self.waiting, self.running = deque(), []

    # ---- requests --------------------------------------------------------------------------

    def submit(self, prompt, max_tokens=64, sampling=None, stop=None):
        """Queue a prompt (ids) -> Request. stop: token ids, default the config's eos."""
        prompt = self.model.check_ids(prompt).tolist()
        sampling = sampling or Sampling()
        stop = {self.model.config.eos_token_id} if stop is None else set(stop)
        check_submission(max_tokens, sampling, stop)
        limit = self.model.config.max_position_embeddings
        if len(prompt) + max_tokens > limit:
            raise ValueError(
                f"max_tokens: {len(prompt)} prompt tokens and {max_tokens} more exceed {limit}"
            )
        request = Request(prompt, max_tokens, sampling, frozenset(stop))
        self.waiting.append(request)
        return request

    def preempt(self, request):
        """Put a running request aside; it comes back when there is room, where it was."""
        if request not in self.running:
            raise ValueError("request: only a running request can be put aside")
        self.running.remove(request)
        drafts = self.drafter.take(request.slot) if self.drafter else None
        request.aside = (snapshot(self.cache, request.slot), drafts)
        self._close(request)
        self.waiting.append(request)

    def cancel(self, request):
        """Drop a request, running or waiting."""
        if request in self.running:
            self.running.remove(request)
            self._close(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("request: this engine does not hold it")
        request.finish = "cancelled"

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def run(self):
        """Step until nothing is left; yields (request, new tokens) as they appear."""
        while self.busy:
            yield from self.step()

    # ---- one step --------------------------------------------------------------------------

    def step(self):
        """Run the model once -> list of (request, new tokens) for those that wrote something."""
        self._admit()
        if not self.running:
            return []
        drafts = self._draft([r for r in self.running if not r.reading])
        feeds = self._feeds(drafts)
        requests = list(feeds)
        logits = self._run_model(requests, feeds, drafts)
        wrote = self._read_logits(requests, logits, drafts)
        for request in requests:
            if self.prefix:
                self.prefix.save(self.cache, request.slot, request.ids)
            if request.finish:
                self.running.remove(request)
                self._close(request)
        return wrote

    def _run_model(self, requests, feeds, drafts):
        """-> the logits of all rows that are read; features go to the drafter."""
        features = [] if self.drafter else None
        before = [self.cache.length[r.slot] for r in requests]
        decoder_from = [self._decoder_from(r) for r in requests]
        logits = self.model.step(
            self.cache,
            [r.slot for r in requests],
            list(feeds.values()),
            decoder_from=decoder_from,
            tails=[self._tail(r, feeds[r]) for r in requests],
            features=features,
        )
        self._observe(requests, before, decoder_from, drafts, features)
        return logits

    def _admit(self):
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting.popleft()
            if request.aside:
                saved, drafts = request.aside
                request.slot, request.aside = restore(self.cache, saved), None
                if drafts:
                    self.drafter.give(request.slot, drafts)
            else:
                request.slot = self.model.open(self.cache)
                if self.prefix:
                    self.prefix.resume(self.cache, request.slot, request.prompt)
            self.running.append(request)

    def _feeds(self, drafts):
        """{request: ids to run now}: writers first, then prompts until `chunk` tokens are full."""
        feeds = {r: [r.tokens[-1], *proposal.tokens] for r, proposal in drafts.items()}
        room = max(1, self.chunk - sum(map(len, feeds.values())))
        for request in (r for r in self.running if r.reading):
            at, total = self.cache.length[request.slot], len(request.prompt)
            end = min(at + room, total)
            if self.prefix:
                end = min(end, self.prefix.stop_before(self.cache, at, total))
            if room:
                feeds[request] = request.prompt[at:end]
                request.computed += end - at
                room -= end - at
        return feeds

    def _decoder_from(self, request):
        if self.exact or not request.reading:
            return self.cache.length[request.slot]
        start = self.cache.floor["decoder"][request.slot]
        return decoder_start(len(request.prompt), start, self.model.config)

    def _tail(self, request, ids):
        """How many rows' logits are wanted: all of a writer's, the last of a finished prompt."""
        if not request.reading:
            return len(ids)
        return int(self.cache.length[request.slot] + len(ids) == len(request.prompt))

    def _draft(self, writers):
        """Propose and mark: {writing request: its `_Proposal`}, empty ones without a drafter."""
        drafts = {r: _Proposal([], []) for r in writers}
        able = [r for r in writers if self._may_draft(r)]
        if not able:
            return drafts
        laws = {r: [] for r in able}

        def choose(i, logits):
            law = distribution(logits, able[i].sampling)
            laws[able[i]].append(law)
            return draw(law, able[i].generator)

        slots, anchors = [r.slot for r in able], [r.tokens[-1] for r in able]
        proposed = self.drafter.propose(slots, anchors, choose)
        room = [r.max_tokens - len(r.tokens) - 1 for r in able]
        lengths = [min(n, len(p.tokens)) for n, p in zip(room, proposed, strict=True)]
        if self.steps_per_second:
            survival = [p.survival[:n] for n, p in zip(lengths, proposed, strict=True)]
            others = len(writers) - len(able)
            lengths = draft_lengths(survival, self.steps_per_second, others).tolist()
        for request, draft, length in zip(able, proposed, lengths, strict=True):
            drafts[request] = _Proposal(draft.tokens[:length].tolist(), laws[request][:length])
            if length:
                mark(self.cache, request.slot, length + 1)
        return drafts

    def _may_draft(self, request):
        enough = request.max_tokens - len(request.tokens) > 1
        return self.drafter is not None and enough and request.slot in self.drafter.first

    # ---- after the model -------------------------------------------------------------------

    def _observe(self, requests, before, decoder_from, drafts, features):
        """Cut the features by request; prompts are committed, drafted tokens wait for a verdict."""
        self._features = {}
        if not features:  # no drafter, or no token reached its layers
            return
        rows, begin = np.concatenate(features, axis=1), 0
        for request, length, start in zip(requests, before, decoder_from, strict=True):
            end = self.cache.length[request.slot]
            positions = np.arange(max(length, start), end)
            own = rows[begin : begin + len(positions)]
            begin += len(positions)
            if request in drafts:
                self._features[request] = (positions, own)
            elif len(positions):
                self.drafter.observe(request.slot, positions, own)

    def _read_logits(self, requests, logits, drafts):
        wrote, begin = [], 0
        for request in requests:
            if request in drafts:
                count = len(drafts[request].tokens) + 1
                new = self._verify(request, logits[begin : begin + count], drafts[request])
            elif self.cache.length[request.slot] == len(request.prompt):
                count = 1
                law = distribution(logits[begin], request.sampling)
                new = [draw(law, request.generator)]
                request.first_token = time.perf_counter()
            else:
                continue
            begin += count
            wrote.append((request, self._append(request, new)))
        return wrote

    def _verify(self, request, logits, proposal):
        """Keep what the main model agrees with, take the rest back -> the new tokens."""
        target = [distribution(row, request.sampling) for row in logits]
        kept, token = verify(target, proposal.laws, proposal.tokens, request.generator)
        slot = request.slot
        if proposal.tokens:
            rollback(self.cache, slot, self.cache.length[slot] - len(proposal.tokens) + kept)
            request.accepted.append(kept)
        if request in self._features:
            positions, rows = self._features[request]
            self.drafter.observe(slot, positions[: kept + 1], rows[: kept + 1])
        return [*proposal.tokens[:kept], token]

    def _append(self, request, new):
        """Add new tokens up to a stop token or the limit -> those that were added."""
        added = []
        for token in new[: request.max_tokens - len(request.tokens)]:
            added.append(token)
            if token in request.stop:
                request.finish = "stop"
                break
        request.tokens += added
        if request.finish is None and len(request.tokens) == request.max_tokens:
            request.finish = "length"
        return added

    def _close(self, request):
        if self.drafter:
            self.drafter.forget(request.slot)
        if self.prefix:
            self.prefix.forget(request.slot)
        self.cache.release(request.slot)
        request.slot = None


@dataclass(frozen=True)
class _Proposal:
    """Drafted tokens of one request and the laws they were drawn from."""

    tokens: list
    laws: list
