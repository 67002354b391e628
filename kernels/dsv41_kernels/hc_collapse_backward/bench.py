"""hc_collapse_backward against its text on CuPy arrays; its inputs are in ../hc_bench.py."""

from functools import partial

from .. import hc_bench

cases = partial(hc_bench.cases, "hc_collapse_backward")
