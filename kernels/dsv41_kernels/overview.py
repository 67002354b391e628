"""What is available on this machine? `python -m dsv41 kernels`

Every @op definition with its module and the kernels that exist for it. On a CUDA machine each
kernel is then checked against its definition on a small shape and timed quickly, and the launches
of a tiny model's step are counted; the figures come from `python -m dsv41_kernels.bench`.
"""

import importlib
import importlib.util
import pkgutil

import dsv41
from dsv41.dispatch import OPS

from .launch import HERE


def definitions():
    """name -> definition of every @op, after importing every module of dsv41."""
    for module in pkgutil.walk_packages(dsv41.__path__, "dsv41."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return dict(sorted(OPS.items()))


def kernels_of(name):
    """Which kernels a definition has, by file: "cupy", "numba"."""
    return [b for b in ("cupy", "numba") if (HERE / name / f"{b}_op.py").exists()]


def device():
    """-> name of the current GPU, or why there is none."""
    if importlib.util.find_spec("cupy") is None:
        return None, "CuPy is not installed (pip install dsv41[cuda13])"
    import cupy

    try:
        found = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"no CUDA device: {error}"
    return found["name"].decode(), ""


def report(out=print):
    """Print the overview; returns the number of kernels that failed their check."""
    out(f"{'operation':<26}{'definition':<28}kernels")
    for name, definition in definitions().items():
        found = kernels_of(name) or ["the NumPy text on CuPy arrays"]
        out(f"{name:<26}{definition.__module__:<28}{', '.join(found)}")
    gpu, reason = device()
    if gpu is None:
        out(f"\nno kernel runs here: {reason}")
        return 0
    from .bench import bench, operations
    from .launches import report as launches

    out("")
    failed = bench(operations(), quick=True, out=out)[1]
    out("")
    launches(out=out)
    return failed
