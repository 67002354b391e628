"""How fast are window KV records unpacked to bf16? 1M rows."""

from dsv41.quant import WINDOW_KV_FP8

from ..records_cases import unpack_cases


def cases(quick=False):
    yield from unpack_cases("fp8_unpack", WINDOW_KV_FP8, 512, ("v1", "v2"), None, quick)
