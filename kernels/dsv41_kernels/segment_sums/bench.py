"""How fast are rows added up that belong to the same token, as the embedding's gradient needs?"""

import cupy
import numpy as np

from ..bench import Case
from .cupy_op import segment_sums

MAY_DIFFER = 1e-4


def cases(quick=False):
    for rows, channels in ((1024, 256), (1024, 255)) if quick else ((65536, 1024),):
        yield _case(rows, channels)


def _case(rows, channels):
    rng = np.random.default_rng(0)
    values = cupy.asarray(rng.normal(size=(rows, channels)).astype(np.float32))
    first = np.unique(np.concatenate([[0], rng.integers(0, rows, rows // 4)]))
    moved = cupy.asarray(first)
    want = np.add.reduceat(values.get().astype(np.float64), first)
    shape, size = f"{rows} rows x {channels}", values.nbytes + 4 * len(first) * channels

    def check():
        error = float(np.abs(segment_sums(values, moved).get() - want).max())
        assert error < MAY_DIFFER, f"off by {error}"
        return error

    version = "v1" if channels % 4 else "v2"
    return Case("segment_sums", version, shape, lambda: segment_sums(values, moved), check, size)
