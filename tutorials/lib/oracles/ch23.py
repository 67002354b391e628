"""Chapter 23: batches by trying, waves by simulating, misses by running the cache."""

from collections import OrderedDict

from ..page import Exercise


def _tokens_to_ridge(rows, columns, weight_bytes, rate, bandwidth):
    def arithmetic_longer(tokens):
        size = rows * columns * weight_bytes + 2 * tokens * (rows + columns)
        return 2 * tokens * rows * columns / rate >= size / bandwidth

    last = 1
    while not arithmetic_longer(last):
        last *= 2
        if last > 2**40:
            return -1
    first = last // 2
    while last - first > 1:  # not longer at `first`, longer at `last`
        middle = (first + last) // 2
        first, last = (first, middle) if arithmetic_longer(middle) else (middle, last)
    return last


def _layers(rng):
    yield 5120, 1280, 1, 785e12, 4300e9
    yield 2304, 5120, 0.53125, 785e12, 4300e9
    yield 64, 64, 2, 785e12, 4300e9  # so narrow that activations alone take longer
    for _ in range(5):
        rows, columns = (int(128 * rng.integers(4, 80)) for _ in range(2))
        yield rows, columns, (0.53125, 1, 2)[int(rng.integers(3))], 700e12, 4300e9


def _used_share(blocks, sms):
    free = [0] * sms
    for _ in range(blocks):
        next_one = free.index(min(free))
        free[next_one] += 1
    return sum(free) / (sms * max(free))


def _grids(rng):
    yield 1, 132
    yield 132, 132
    yield 133, 132
    for _ in range(6):
        yield int(rng.integers(1, 700)), int(rng.integers(1, 200))


def _missed(blocks, capacity, rounds):
    cache, missed = OrderedDict(), 0
    for block in list(range(blocks)) * rounds:
        missed += block not in cache
        cache[block] = True
        cache.move_to_end(block)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return missed


def _caches(rng):
    yield 50, 50, 3
    yield 51, 50, 3
    yield 1, 1, 1
    for _ in range(6):
        yield tuple(int(number) for number in rng.integers(1, 60, 3))


EXERCISES = {
    "tokens_to_ridge": Exercise(
        _tokens_to_ridge,
        blank="return the first T at which 2 T N K / rate is not less than bytes / bandwidth",
        hint="bytes are w N K + 2 T (N + K); solve for T and round up; if activations alone take "
        "longer than the products there is none",
        inputs=_layers,
    ),
    "used_share": Exercise(
        _used_share,
        blank="return the blocks over what all SMs could have run meanwhile",
        hint="the last wave may be nearly empty: 133 blocks on 132 SMs take two waves",
        inputs=_grids,
        within=1e-12,
    ),
    "missed": Exercise(
        _missed,
        blank="return how many reads were not in the cache",
        hint="if all blocks fit, only the first round misses; if one does not fit, what is needed "
        "next was always thrown out just before",
        inputs=_caches,
    ),
}
