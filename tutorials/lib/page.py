"""How does a page prove what it says, draw, and ask?

    versions()                      one line: what the page ran with
    same(label, got, want)          equal to the last bit, or the page stops
    close(label, got, want, within) equal up to an absolute difference
    with figure(title) as axes:     a PNG of 6 x 3 inches, in a script only its title
    check("01.name", answer)        an exercise, against an oracle on fresh random inputs

A blank (`...`) is no mistake: `check` says what to fill in and the page goes on. While the pages
are built, `strict()` turns it into an error. Importing this module puts the checkout on the path,
so that a chapter runs without an install.
"""

import importlib
import io
import platform
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "kernels", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Okabe and Ito's palette, which colour-blind readers tell apart
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"
INK, FAINT = "#333333", "#DDDDDD"


def versions(*packages):
    """Print the versions line: Python, NumPy, ml_dtypes and `packages`."""
    names = ("numpy", "ml_dtypes", *packages)
    print(f"versions: Python {platform.python_version()}", end="")
    print("".join(f", {name} {version(name)}" for name in names))


# ---- asserts --------------------------------------------------------------------------------


def same(label, got, want):
    """Same shape and bits, or NaN on both sides; a list as `want` takes the type of got."""
    got = np.asarray(got)
    want = want if hasattr(want, "dtype") else np.asarray(want, got.dtype)
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"{label}: {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
        )
    both_nan = (got != got) & (want != want)
    _require(label, got, want, (_bits(got) == _bits(want)) | both_nan)


def close(label, got, want, within):
    """|got - want| <= within everywhere; same shape; NaN is close to nothing."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{label}: shape {got.shape}, expected {want.shape}")
    _require(label, got, want, np.abs(got - want) <= within)


def _bits(x):
    return x.view(f"u{x.itemsize}") if x.dtype.kind == "f" else x


def _require(label, got, want, right):
    if not np.all(right):
        worst = tuple(int(i) for i in np.unravel_index(np.argmin(right), np.shape(right)))
        where = f" at {worst}" if worst else ""
        raise AssertionError(f"{label}: got {got[worst]}, expected {want[worst]}{where}")
    print(f"✓ {label}")


# ---- figures --------------------------------------------------------------------------------

STYLE = {
    "figure.figsize": (6, 3),
    "figure.dpi": 80,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


@contextmanager
def figure(title, rows=1, columns=1, **subplots):
    """Yield the axes (an array when there are several), then show them under `title`.

    The PNG holds no date and no version, so the same matplotlib writes the same bytes.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawing = Figure()
        FigureCanvasAgg(drawing)
        axes = drawing.subplots(rows, columns, **subplots)
        yield axes
        if rows * columns == 1:
            axes.set_title(title)
        else:
            drawing.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
        buffer = io.BytesIO()
        drawing.savefig(buffer, format="png", metadata={"Software": None})
    _show(title, buffer.getvalue())


def _show(title, png):
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        from IPython.display import display

        display({"image/png": png, "text/plain": f"figure: {title}"}, raw=True)
    else:
        print(f"figure: {title}")


# ---- exercises ------------------------------------------------------------------------------


class Blank(Exception):
    """An exercise is not filled in yet (raised while the pages are built, printed otherwise)."""


class Wrong(AssertionError):
    """An answer differs from the oracle; the message says for which input, and gives the hint."""

    def _render_traceback_(self):  # IPython shows this instead of a stack trace
        return [str(self)]


@dataclass(frozen=True)
class Exercise:
    """What `check` knows: a right answer, inputs to try it on, and two sentences for the reader.

    `inputs(rng)` gives argument tuples; None when the answer is a value, and oracle() its value.
    `within` is the allowed absolute difference, 0 for equal numbers.
    """

    oracle: Callable
    blank: str
    hint: str
    inputs: Callable | None = None
    within: float = 0.0


_is_strict = False


@contextmanager
def strict():
    """Inside, a blank is an error."""
    global _is_strict
    before, _is_strict = _is_strict, True
    try:
        yield
    finally:
        _is_strict = before


def check(name, answer, seed=None):
    """Try `answer` (a function, or a value) on fresh random inputs; `seed` repeats a failure."""
    chapter, _, key = name.partition(".")
    exercise = importlib.import_module(f"lib.oracles.ch{chapter}").EXERCISES[key]
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    try:
        tried = _try(name, exercise, answer, seed)
    except Blank as blank:
        if _is_strict:
            raise
        print(f"○ {blank}")
        return
    print(f"✓ {name}: right" + (f" on {tried} fresh inputs" if exercise.inputs else ""))


def _try(name, exercise, answer, seed):
    blank = Blank(f"{name} is blank: {exercise.blank}")
    if exercise.inputs is None:
        cases, call = [()], lambda: answer
    else:
        cases, call = list(exercise.inputs(np.random.default_rng(seed))), answer
    if call is ...:
        raise blank
    for arguments in cases:
        got, want = _call(call, arguments, blank), exercise.oracle(*arguments)
        if not _agree(got, want, exercise.within):
            given = ", ".join(_short(argument) for argument in arguments)
            what = f"for {given} it gives" if arguments else "it is"
            again = f"\n  the same inputs again: check(..., seed={seed})" if arguments else ""
            raise Wrong(
                f"✗ {name}: {what} {_short(got)}, expected {_short(want)}\n"
                f"  hint: {exercise.hint}{again}"
            )
    return len(cases)


def _call(answer, arguments, blank):
    try:
        got = answer(*arguments)
    except TypeError as error:
        if "ellipsis" in str(error).lower():  # `...` inside an expression
            raise blank from None
        raise
    if got is None or got is ...:
        raise blank
    return got


def _agree(got, want, within):
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype.kind not in "biuf":
        return False
    with np.errstate(invalid="ignore"):  # inf - inf
        near = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= within
    return bool(np.all(near | (got == want) | (np.isnan(got) & np.isnan(want))))


def _short(x):
    if np.ndim(x) == 0:
        return str(x)
    return np.array2string(np.asarray(x), threshold=8, edgeitems=3, precision=6)
