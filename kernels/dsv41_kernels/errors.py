"""How does a kernel say that its input was bad?

A kernel cannot raise. It writes which element was bad into a word that starts at zero, and the
wrapper turns the word into the definition's ValueError:

    word = max over bad elements of ~(4 * position + kind)        kind: 0 nan, 1 inf, 2 -inf

so that the first bad element wins, whatever the order in which threads run. Reading the word
waits for the GPU, and by default every call does. Inside `with deferred_errors():` the words are
collected and read together at the end of the block: a model's step runs without a stop on the way.
"""

from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

KINDS = ("nan", "inf", "-inf", "a bad value")
WORDS = 4096  # calls between two looks at the words

_deferred = ContextVar("dsv41_deferred_errors", default=False)
_pools = {}  # device -> Words


class Words:
    """Zeroed uint64 words in GPU memory, one for every call, and what to say when one is set."""

    def __init__(self):
        import cupy

        self.words = cupy.zeros(WORDS, cupy.uint64)
        self.pending = []

    def take(self, describe):
        if len(self.pending) == WORDS:
            self.check()
        self.pending.append(describe)
        return self.words[len(self.pending) - 1 : len(self.pending)]

    def check(self):
        """Wait, clear the words, and raise the first call's error if there is one."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        found = self.words[: len(pending)].get()
        self.words[: len(pending)] = 0
        for word, describe in zip(found, pending, strict=True):
            raise_from(word, describe)

    def forget(self):
        """Clear the words without looking: another error is on its way."""
        self.words[: len(self.pending)] = 0
        self.pending = []


def raise_from(word, describe):
    """Raise ValueError(describe(position, kind)) when a kernel has set the word."""
    if word:
        code = (2**64 - 1) ^ int(word)
        raise ValueError(describe(code // 4, KINDS[code % 4]))


@contextmanager
def bad_values(describe, like):
    """A word for one call next to `like`; leaving the block raises, or defers, what it says."""
    if not hasattr(like, "__cuda_array_interface__"):  # Numba's simulator, on NumPy arrays
        word = np.zeros(1, np.uint64)
        yield word
        raise_from(word[0], describe)
        return
    pool = _pool()
    yield pool.take(describe)
    if not _deferred.get():
        pool.check()


@contextmanager
def deferred_errors():
    """Errors of the kernels inside are raised at the end of the block, by one look at the GPU."""
    outer = _deferred.get()
    token = _deferred.set(True)
    try:
        yield
    except BaseException:
        for pool in _pools.values():
            pool.forget()
        raise
    finally:
        _deferred.reset(token)
    if not outer:
        for pool in _pools.values():
            pool.check()


def _pool():
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if device not in _pools:
        _pools[device] = Words()
    return _pools[device]


def at(shape, position):
    """A flat position as the index tuple of an array of this shape."""
    return tuple(int(i) for i in np.unravel_index(position, shape))
