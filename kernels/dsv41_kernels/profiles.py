"""What do the kernels wait for that miss their times to beat?

    python -m dsv41_kernels.profiles [OP ...] [--json kernels/profiles.json]

NVIDIA's ncu, which comes with the CUDA toolkit, watches one call of each case in
kernels/results/*.json that takes longer than the time to beat, at the clock that the GPU has anyway
and with empty caches. Of every kernel of a call it tells microseconds; the clock of the
multiprocessors; in which share of its cycles a scheduler issued an instruction while it had warps;
in which share tensor cores worked; bytes through device memory a second, and their share of what is
possible; and in which states warps were, the most frequent ones, under ncu's names: `barrier` waits
for other warps, `long_scoreboard` for memory, `short_scoreboard` mostly for shared memory, `gmma`
for a warpgroup's products, `no_instruction` for code, `wait` for a fixed number of cycles.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from . import commands
from .bench import cases, write
from .launches import MARKER, mark
from .readme import fastest_of, load, profiled

SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis")
NUMBERS = {  # of a profile: the column of ncu's raw page, and what it is divided by
    "us": ("gpu__time_duration.sum", 1e3),
    "sm_mhz": ("gpc__cycles_elapsed.avg.per_second", 1e6),
    "issued": ("smsp__issue_active.avg.per_cycle_active", 1),
    "tensor": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 100),
    "gbps": ("dram__bytes.sum.per_second", 1e9),
    "memory": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 100),
}
UNITS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "hz": 1, "khz": 1e3, "mhz": 1e6, "ghz": 1e9}
UNITS |= {"byte/s": 1, "kbyte/s": 1e3, "mbyte/s": 1e6, "gbyte/s": 1e9, "tbyte/s": 1e12}
STATE = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SHOWN = 4  # states


def wanted(records):
    """{op: [(version, shape)]}: the fastest versions that miss their times."""
    late = {}
    for (op, shape), best in fastest_of(records).items():
        if best["target_us"] and best["cold_us"]["median"] > best["target_us"]:
            late.setdefault(op, []).append((best["version"], shape))
    return late


def read_raw(lines):
    """ncu's raw page as CSV -> a list of dicts, one per kernel, in the units of UNITS."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if not rows:
        raise ValueError("ncu: " + (" ".join(line.strip() for line in lines) or "said nothing"))
    names, units, *kernels = rows
    return [_kernel(names, units, row) for row in kernels]


def _kernel(names, units, row):
    found = {}
    for name, unit, text in zip(names, units, row, strict=True):
        try:
            found[name] = float(text.replace(",", "")) * UNITS.get(unit.lower(), 1)
        except ValueError:
            found[name] = text
    return found


def profile(kernel):
    """What a record keeps of a kernel of `read_raw`."""
    states = {m[1]: kernel[name] for name in kernel if (m := STATE.fullmatch(name))}
    total = sum(states.values())
    first = sorted(states.items(), key=lambda item: -item[1])[:SHOWN]
    numbers = {name: round(kernel[key] / unit, 4) for name, (key, unit) in NUMBERS.items()}
    return {
        "kernel": kernel["Kernel Name"].partition("(")[0],
        **numbers,
        "states": {name: round(value / total, 4) for name, value in first},
    }


def watch(op, late, run=subprocess.run):
    """Profiles of the cases `late` of an operation."""
    if not late:
        return []
    path = shutil.which("ncu")
    if path is None:
        raise ValueError("ncu: not found on PATH; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        sections = [word for name in SECTIONS for word in ("--section", name)]
        options = ["--clock-control", "none", "--profile-from-start", "off", *sections]
        options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        child = [sys.executable, "-m", "dsv41_kernels.profiles", "--launch", op]
        told = [f"{version}|{shape}" for version, shape in late]
        if run([path, *options, *child, *told]).returncode:
            raise ValueError(f"{op}: not watched")
        kernels = read_raw(log.read_text(encoding="utf-8").splitlines())
    found, place = [], -1
    for each in map(profile, kernels):
        if each["kernel"] == MARKER:
            place += 1
        else:
            version, shape = late[place]
            found.append({"op": op, "version": version, "shape": shape, **each})
    return found


def launch_late(op, late):
    """One profiled call of each of these cases, in this order, each behind a mark."""
    import cupy

    sys.modules["torch"] = None  # as if it were not installed: nothing of it is called
    left = dict.fromkeys(late)  # case by version and shape
    for case in cases(op):
        if (case.version, case.shape) in left:
            left[case.version, case.shape] = case
        if None not in left.values():
            break
    if None in left.values():
        raise ValueError(f"{op}: results of a case that bench.py does not have; measure again")
    for case in left.values():
        for watched in (False, False, True):
            cupy.cuda.Device().synchronize()
            if watched:
                cupy.cuda.profiler.start()
                mark()
            case.call()
            cupy.cuda.Device().synchronize()
            if watched:
                cupy.cuda.profiler.stop()


def main(argv=None):
    parser = commands.parser("profiles", __doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="folder names (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the profiles there")
    parser.add_argument("--launch", nargs="+", metavar="TEXT", help="an operation and its cases")
    arguments, words = parser.parse_args(argv), sys.argv[1:] if argv is None else argv
    if arguments.launch:
        op, *told = arguments.launch
        try:
            launch_late(op, [tuple(text.split("|", 1)) for text in told])
        except ValueError as error:
            print(f"profiles: {error}", file=sys.stderr)
            return 1
        return 0
    command = ["python", "-m", "dsv41_kernels.profiles", *words]
    date = {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
    found, late = [], wanted(load())
    try:
        for op in arguments.ops or late:
            found += [each | date for each in watch(op, late.get(op, []))]
            if arguments.json:
                write(arguments.json, command, found)
    except ValueError as error:
        print(f"profiles: {error}", file=sys.stderr)
        return 2
    print(profiled(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
