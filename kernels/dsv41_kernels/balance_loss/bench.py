"""balance_loss against its text on CuPy arrays; its inputs are in ../between_bench.py."""

from functools import partial

from .. import between_bench

cases = partial(between_bench.cases, "balance_loss")
