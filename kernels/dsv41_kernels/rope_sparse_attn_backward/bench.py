"""Against the text on CuPy arrays; the inputs are in ../between_bench.py."""

from functools import partial

from .. import between_bench

cases = partial(between_bench.cases, "rope_sparse_attn_backward")
