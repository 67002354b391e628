"""How do documents of any length fill samples of one length, and stay apart?

    document -> bos, tokens, eos -> pieces of at most L -> fullest sample that has room -> samples

A document longer than L is cut at every L tokens, so the cuts do not depend on chance; a later
piece has no bos and knows nothing of the earlier ones. Pieces go from long to short into the
sample where they leave least room (best fit). What stays empty at a sample's end is padding, and
counted. Nothing is predicted across an edge: the last token of a piece has no target, and
`segments` tells the model where window, groups, n-grams and positions begin anew.

Chance decides only which of equally long pieces comes first, and the order of the samples. It is
drawn from (seed, epoch), so the batch of a step is a function of (seed, step): a run that resumes
at a step sees the same bits. Source: report, section 4.1, which leaves 1e-4 padding at most.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

BOS, EOS, PAD = 0, 1, 2
NO_TARGET = -1


class Piece(NamedTuple):
    """Tokens start .. stop - 1 of a document, counted with its bos and eos."""

    document: int
    start: int
    stop: int


class Packed(NamedTuple):
    """Arrays (B, L) int64."""

    ids: np.ndarray
    targets: np.ndarray  # the next token of the piece, NO_TARGET where there is none
    segments: np.ndarray  # number of the piece in its sample, -1 for padding
    positions: np.ndarray  # position in the piece


def pack(documents, length, generator):
    """documents: list of 1-D id arrays -> samples, each a list of Piece of `length` tokens at most.

    Every token of every document, its bos and its eos are in exactly one piece.
    """
    if length < 2:
        raise ValueError(f"length: expected 2 or more tokens in a sample, got {length}")
    pieces = list(_pieces(documents, length))
    sizes = np.array([piece.stop - piece.start for piece in pieces])
    by_size = np.lexsort((generator.permutation(len(pieces)), -sizes))
    samples, room = [], []  # room: sorted (tokens left, sample)
    for piece, size in zip((pieces[i] for i in by_size), sizes[by_size].tolist(), strict=True):
        fit = bisect_left(room, (size,))
        left, sample = room.pop(fit) if fit < len(room) else (length, len(samples))
        if sample == len(samples):
            samples.append([])
        samples[sample].append(piece)
        if left > size:
            insort(room, (left - size, sample))
    return [samples[i] for i in generator.permutation(len(samples))]


def _pieces(documents, length):
    for number, ids in enumerate(documents):
        size = len(ids) + 2
        for start in range(0, size, length):
            yield Piece(number, start, min(start + length, size))


def padding(samples, length):
    """Share of all positions that hold no token."""
    used = sum(piece.stop - piece.start for sample in samples for piece in sample)
    return 1 - used / (len(samples) * length)


def fill(samples, documents, length):
    """B samples of `pack` -> Packed."""
    shape = (len(samples), length)
    ids, segments = np.full(shape, PAD, np.int64), np.full(shape, -1, np.int64)
    targets, positions = np.full(shape, NO_TARGET, np.int64), np.zeros(shape, np.int64)
    for row, sample in enumerate(samples):
        at = 0
        for number, piece in enumerate(sample):
            tokens = _tokens(documents[piece.document], piece)
            here = slice(at, at + len(tokens))
            ids[row, here], segments[row, here] = tokens, number
            targets[row, at : at + len(tokens) - 1] = tokens[1:]
            positions[row, here] = np.arange(len(tokens))
            at += len(tokens)
    return Packed(ids, targets, segments, positions)


def _tokens(ids, piece):
    """The piece's tokens; bos is token 0 of its document, eos the last."""
    inner = ids[max(piece.start - 1, 0) : piece.stop - 1]
    bos = [BOS] if piece.start == 0 else []
    eos = [EOS] if piece.stop == len(ids) + 2 else []
    return np.concatenate([bos, inner, eos]).astype(np.int64)


class Batches:
    """Batch by step. Samples that fill no whole batch at an epoch's end are left out of it."""

    def __init__(self, documents, length, batch, seed):
        self.documents, self.length, self.batch, self.seed = documents, length, batch, seed
        self.epoch, self.samples = -1, []
        self._open(0)
        self.steps_per_epoch = len(self.samples) // batch  # the same in every epoch
        if not self.steps_per_epoch:
            raise ValueError(f"batch: {batch} samples asked for, {len(self.samples)} there")

    def __call__(self, step):
        """Packed of step 0, 1, 2, ...; depends on nothing that was asked before."""
        epoch, place = divmod(step, self.steps_per_epoch)
        self._open(epoch)
        chosen = self.samples[place * self.batch : (place + 1) * self.batch]
        return fill(chosen, self.documents, self.length)

    def _open(self, epoch):
        if epoch != self.epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self.samples = pack(self.documents, self.length, generator)
            self.epoch = epoch
