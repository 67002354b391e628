"""Compile the Numba kernels for Hopper without a GPU: python tests/numba_ptx.py

Numba asks the current device for its architecture; here an answer is put in its place. A line per
kernel names what must not be in it: double precision, which Numba slips in where a number has no
type, and local memory, where a group ends up when its loops are not unrolled.
"""

import sys
import types

from numba import types as t
from numba.cuda import compile_ptx, dispatcher

from dsv41.quant import ACTIVATION_FP8, INDEX_FP4, MAIN_KV_FP4

HOPPER = (9, 0)
FORMATS = ((MAIN_KV_FP4, 512), (INDEX_FP4, 128), (ACTIVATION_FP8, 512))
BYTES, WORD = t.uint8[::1], t.uint64[::1]


def kernels():
    """-> name, Python function, types of its arguments."""
    from dsv41_kernels.numba_records import pack_kernel, unpack_kernel
    from dsv41_kernels.rmsnorm_fp8.numba_op import norm_kernel

    for bf16 in (False, True):
        for fmt, channels in FORMATS:
            pack = pack_kernel(fmt, channels, bf16).py_func
            yield f"pack {fmt.name} {bf16}", pack, (BYTES, BYTES, WORD, t.uint64)
            unpack = unpack_kernel(fmt, channels, bf16).py_func
            yield f"unpack {fmt.name} {bf16}", unpack, (BYTES, BYTES, t.uint64)

        norm = norm_kernel(5120, bf16).py_func
        yield f"rmsnorm {bf16}", norm, (BYTES, BYTES, BYTES, WORD, t.uint64, t.float32)


def main():
    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=HOPPER)
    for name, function, signature in kernels():
        ptx, _ = compile_ptx(function, signature, cc=HOPPER)
        assert ".visible .entry" in ptx, name
        found = [word for word in (".f64", ".local", "call.uni") if word in ptx]
        print(f"{name}: {' '.join(found) or 'fine'}")


if __name__ == "__main__":
    sys.exit(main())
