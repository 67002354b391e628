"""How fast are main KV records and index keys packed? 1M rows, the times to beat on an H200."""

from dsv41.quant import INDEX_FP4, MAIN_KV_FP4

from ..records_cases import pack_cases

VERSIONS = ("v1", "v2", "v3")


def cases(quick=False):
    yield from pack_cases("fp4_pack", MAIN_KV_FP4, 512, VERSIONS, 370, quick)
    yield from pack_cases("fp4_pack", INDEX_FP4, 128, VERSIONS, 100, quick)
