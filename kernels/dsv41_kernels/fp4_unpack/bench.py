"""How fast are main KV records and index keys unpacked to bf16? 1M rows."""

from dsv41.quant import INDEX_FP4, MAIN_KV_FP4

from ..records_cases import unpack_cases

VERSIONS = ("v1", "v2", "v3")


def cases(quick=False):
    yield from unpack_cases("fp4_unpack", MAIN_KV_FP4, 512, VERSIONS, 370, quick)
    yield from unpack_cases("fp4_unpack", INDEX_FP4, 128, VERSIONS, None, quick)
