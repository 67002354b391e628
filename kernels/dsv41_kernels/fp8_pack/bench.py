"""How fast are window KV records packed? 1M rows."""

from dsv41.quant import WINDOW_KV_FP8

from ..records_cases import pack_cases


def cases(quick=False):
    yield from pack_cases("fp8_pack", WINDOW_KV_FP8, 512, ("v1", "v2"), None, quick)
