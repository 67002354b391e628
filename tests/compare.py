"""How do two arrays have to agree? The one comparison that every test uses.

    assert_close    two ways of computing the same thing, which round differently
    assert_same     equal to the last bit: codes, records, indices, "a row alone = in a batch"
    assert_any_layout   a function gives those bits for every memory layout of its input

A result is close when both hold, with d = got - want:

    rms(d)  <= rel * rms(want) + floor           the error as a share of the signal
    max |d| <= PEAK * rel * rms(want) + floor    one wrong element does not drown in the mean

`floor` is what rounding leaves where the right answer is zero; pass 0 when tiny values matter.
"""

import numpy as np
from hypothesis import settings

# for @given: the same examples in every run, no time limit on a busy machine
repeatable = settings(derandomize=True, deadline=None, max_examples=100)

REL = {2: 1e-2, 4: 1e-5, 8: 1e-12}  # by bytes of the type of `got`
FLOOR = {2: 1e-3, 4: 1e-6, 8: 1e-13}
PEAK = 10


def assert_close(name, got, want, rel=None, floor=None):
    """got and want agree up to rounding; same shape, same places of NaN, inf and -inf."""
    got, want = _host(got), _host(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    size = got.dtype.itemsize if got.dtype.kind == "f" else 8
    rel = REL[size] if rel is None else rel
    floor = FLOOR[size] if floor is None else floor
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    odd = ~finite & ~((got == want) | (np.isnan(got) & np.isnan(want))) | finite & ~np.isfinite(got)
    _reject(name, odd, got, want, "NaN or inf in different places")
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    signal, mean = _rms(np.where(finite, want, 0)), _rms(error)
    worst = error == np.max(error, initial=0)
    if mean > rel * signal + floor:
        _reject(name, worst, got, want, f"error ratio {mean / max(signal, 1e-300):.3g} > {rel:g}")
    limit = PEAK * rel * signal + floor
    _reject(name, worst & (error > limit), got, want, f"off by more than {limit:.3g}")


def assert_same(name, got, want):
    """got and want have the same bits. A list as `want` takes the type of `got`."""
    got = _host(got)
    want = _host(want) if hasattr(want, "dtype") else np.asarray(want, got.dtype)
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    _reject(name, _bits(got) != _bits(want), got, want, "not the same bits")


def assert_any_layout(name, function, x):
    """function(x) has the same bits whatever the strides of x are, and leaves x as it was."""
    for layout, view in _layouts(x):
        before = view.copy()
        view.flags.writeable = False
        got, want = function(view), function(np.ascontiguousarray(view))
        assert_same(f"{name}: input in {layout}", view, before)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for part, (g, w) in enumerate(pairs):
            assert_same(f"{name}: result {part} of an input in {layout}", g, w)


def _layouts(x):
    """The values of x behind other strides, with NaN (or all bits set) between them."""
    width = x.shape[-1]
    poison = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).max
    wide = np.full((*x.shape[:-1], 2 * width + 3), poison, x.dtype)
    apart, padded = wide.copy(), wide.copy()
    apart[..., 1 : 2 * width : 2], padded[..., 3 : width + 3] = x, x
    yield "C order", x.copy()
    yield "Fortran order", np.asfortranarray(x)
    yield "every second column", apart[..., 1 : 2 * width : 2]
    yield "a wider buffer", padded[..., 3 : width + 3]
    yield "a broadcast row", np.broadcast_to(x[:1], x.shape)


def _reject(name, wrong, got, want, why):
    """Fail when any element is `wrong`, naming the first of them and both values."""
    if wrong.any():
        at = tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))
        count = f"{np.count_nonzero(wrong)} of {wrong.size}"
        raise AssertionError(f"{name}: {why} ({count}); at {at} got {got[at]}, want {want[at]}")


def _rms(x):
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def _bits(x):
    """x as unsigned integers of its width, so that -0 differs from 0 and NaN equals itself."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def _host(x):
    """x as a NumPy array; CUDA arrays are copied over."""
    return x.get() if hasattr(x, "__cuda_array_interface__") else np.asarray(x)
