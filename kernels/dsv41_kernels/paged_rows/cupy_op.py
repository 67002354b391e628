"""Entry numbers to pool rows on a GPU; the contract is dsv41.cache.paged_rows' docstring."""

import cupy
import numpy as np

from dsv41.cache import paged_rows as text

from ..arguments import cuda_array
from ..launch import THREADS, grid, kernel, launch


def paged_rows(entries, pages, request, per_page):
    each, request = _requests(entries.shape, request)
    if each is None:
        return text.definition(entries, pages, request, per_page)
    entries = cuda_array("entries", entries, np.int64)
    pages = cuda_array("pages", pages, np.int64, ndim=2)
    request, rows = cuda_array("request", request, np.int64), cupy.empty_like(entries)
    sizes = (np.int64(n) for n in (entries.size, each, *pages.shape, per_page))
    run, arguments = kernel("paged_rows", "paged_rows"), (entries, pages, request, rows, *sizes)
    launch(run, grid(entries.size), THREADS, arguments)
    return rows


def _requests(shape, request):
    """How many entries in a row share a request, and the requests; None: in no such pattern."""
    if np.ndim(request) == 0:
        return max(1, int(np.prod(shape))), cupy.asarray(request, np.int64).reshape(1)
    if len(shape) == 2 and request.shape == (shape[0], 1):
        return max(1, shape[1]), request
    return None, request
