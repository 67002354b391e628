"""How fast is each kernel, and how far is that from the limit of this GPU?

    python -m dsv41_kernels.bench [OP ...] [--only TEXT] [--json FILE] [--quick]

Every case is validated before it is timed (a fast wrong kernel has no speed), then measured hot and
cold as timing.py says. Columns: the error in the case's own measure; microseconds, cold and hot;
GB/s of the least bytes that must move, or TFLOP/s where arithmetic is the limit, and in which
numbers; the share of the floor that the cold time reaches; the time to beat. <op>/bench.py yields
the cases, among them plain CuPy (the NumPy text on CuPy arrays) and PyTorch where it is installed.
"""

import importlib
import json
import platform
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dsv41.dispatch import use

from . import commands
from .errors import deferred_errors
from .launch import HERE


@dataclass(frozen=True)
class Case:
    """One kernel version on one shape. `call` launches; `check` raises when the result is wrong."""

    op: str  # folder name
    version: str  # "v1", "v3", "numba", "cupy text", "torch"
    shape: str  # as people say it: "B=32, 131072 keys"
    call: Callable[[], None]  # on the current stream, inputs and outputs allocated before
    check: Callable[[], float]  # -> error against the float64 definition
    bytes: int  # least bytes through device memory
    flops: int = 0
    target_us: float | None = None  # the time to beat
    rate: str = "fp16"  # "fp8" where all factors are E4M3 numbers: the rate of its products counts


def operations():
    """Names of all operations with a bench.py."""
    return sorted(path.parent.name for path in HERE.glob("*/bench.py"))


def cases(op, quick=False):
    """The cases of one operation."""
    if op not in operations():
        raise ValueError(f"op: expected one of {', '.join(operations())}, got {op!r}")
    yield from importlib.import_module(f"dsv41_kernels.{op}.bench").cases(quick=quick)


def run(case, timer):
    """Validate and time a case -> a record for the table and the JSON file."""
    with plain(case):
        error = float(case.check())
        with deferred_errors():
            hot, cold, how = timer.measure(case.call)
    floor, bound = floor_us(case, timer)
    return {
        "op": case.op,
        "version": case.version,
        "shape": case.shape,
        "error": error,
        "bytes": case.bytes,
        "flops": case.flops,
        "floor_us": round(floor, 3),
        "bound": bound,
        "rate": case.rate if case.flops else None,
        "rate_from": timer.fp8_source if case.flops and case.rate == "fp8" else None,
        "cold_us": asdict(cold),
        "hot_us": asdict(hot),
        "launched_as": how,
        "gbps": round(case.bytes / cold.median / 1e3, 1),
        "tflops": round(case.flops / cold.median / 1e6, 2),
        "share": round(floor / cold.median, 4),
        "target_us": case.target_us,
        "sm_mhz": timer.clock_mhz(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def plain(case):
    """Where a case is the NumPy text, no part of that text may be one of our kernels."""
    return use("numpy") if case.version == "cupy text" else nullcontext()


def floor_us(case, timer):
    """-> microseconds that memory or the tensor cores need at least, and which of the two."""
    memory = case.bytes / timer.copy_gbps / 1e3
    math = case.flops / _matrix_rate(case, timer) / 1e6 if case.flops else 0.0
    return (memory, "memory") if memory >= math else (math, "math")


def _matrix_rate(case, timer):
    """TFLOP/s of products of the case's numbers."""
    if case.rate not in ("fp16", "fp8"):
        raise ValueError(f"rate: expected fp16 or fp8, got {case.rate!r}")
    return timer.fp8_tflops if case.rate == "fp8" else timer.matrix_tflops


HEADING = (
    f"{'op':<26}{'version':<12}{'shape':<46}{'error':>9}{'cold us':>10}{'p10':>9}{'p90':>9}"
    f"{'hot us':>10}{'rate':>18}{'floor us':>10}{'share':>7}{'to beat':>9}{'MHz':>6}"
)


def line(r):
    """One row of the table."""
    memory = r["bound"] == "memory"
    rate = f"{r['gbps']:,.0f} GB/s" if memory else f"{r['tflops']:,.0f} TFLOP/s {r['rate']}"
    target = "" if r["target_us"] is None else f"{r['target_us']:,.1f}"
    cold, hot = r["cold_us"], r["hot_us"]
    return (
        f"{r['op']:<26}{r['version']:<12}{r['shape']:<46}{r['error']:>9.1e}"
        f"{cold['median']:>10,.1f}{cold['p10']:>9,.1f}{cold['p90']:>9,.1f}{hot['median']:>10,.1f}"
        f"{rate:>18}{r['floor_us']:>10,.1f}{r['share']:>7.1%}{target:>9}{r['sm_mhz']:>6}"
        + ("" if r["launched_as"] == "graph" else "  (no graph)")
    )


def machine(timer):
    """What the numbers of a run depend on."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "copy_gbps": timer.copy_gbps,
        "cupy": cupy.__version__,
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "python": platform.python_version(),
    }


def bench(names, quick=False, out=print, only=(), keep=lambda records: None):
    """Run the cases of these operations -> records, and how many cases failed.

    only: texts that the version and shape of a case must contain. keep: called with all records so
    far behind every operation, so that a bench that is interrupted loses one at most.
    """
    from .timing import Timer

    timer = Timer(seconds=0.05 if quick else 0.5)
    about, records, failed = machine(timer), [], 0
    out(f"{about['device']}: copies {about['copy_gbps']:,.0f} GB/s\n{HEADING}")
    for op in names:
        try:
            for case in _said(cases(op, quick), only):
                failed += not _try(case, timer, about, records, out)
        except Exception as error:  # a case that cannot even be built stops its op, not the rest
            traceback.print_exc()
            out(f"{op:<26}cannot be measured: {error}")
            failed += 1
        if records:
            keep(records)
    return records, failed


def _said(found, only):
    return (c for c in found if all(text in f"{c.version}, {c.shape}," for text in only))


def call_only(names, quick, only, out=print):
    """Launch each case three times -> how many cases."""
    called = 0
    for case in (case for op in names for case in _said(cases(op, quick), only)):
        for _ in range(3):
            case.call()
        out(f"{case.op} {case.version}, {case.shape}")
        called += 1
    return called


def write(path, command, records):
    """The records as a JSON file, replaced at once; command: its words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [record | {"command": shlex.join(command)} for record in records]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _try(case, timer, about, records, out):
    try:
        records.append({**run(case, timer), **about})
    except Exception as error:
        traceback.print_exc()
        out(f"{case.op:<26}{case.version:<12}{case.shape:<46} FAILED: {error}")
        return False
    out(line(records[-1]))
    return True


def main(argv=None):
    parser = commands.parser("bench", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="folder names (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records there")
    only = 'only cases that say TEXT, such as "v4," or "T=512,"; more than one: all of them'
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=only)
    parser.add_argument("--quick", action="store_true", help="small shapes, few repeats")
    once = "call each case three times, for a profiler to watch; nothing is checked or timed"
    parser.add_argument("--once", action="store_true", help=once)
    arguments, words = parser.parse_args(argv), sys.argv[1:] if argv is None else argv
    keep = partial(write, arguments.json, ["python", "-m", "dsv41_kernels.bench", *words])
    try:
        unknown = set(arguments.ops) - set(operations())
        if unknown:
            raise ValueError(f"no such operation: {', '.join(sorted(unknown))}")
        names = arguments.ops or operations()
        more, failed = {"keep": keep} if arguments.json else {}, 0
        if arguments.once:
            found = call_only(names, arguments.quick, arguments.only)
        else:
            found, failed = bench(names, arguments.quick, only=arguments.only, **more)
        if not found and not failed:
            raise ValueError(f"no case says {' and '.join(arguments.only)}")
    except ModuleNotFoundError as error:
        print(f"bench: needs CuPy: pip install dsv41[cuda13] ({error})", file=sys.stderr)
        return 2
    except (ImportError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
