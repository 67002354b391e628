"""What do the committed measurements say about an operation?

    records(op)   the results of kernels/results/*.json for it, as the table of kernels/README.md
                  takes them: of the same version and shape the latest
    report(op)    prints them, a row a shape, or that nothing was measured yet

A chapter that shows a time asks here, so a page never holds a time that no file holds. Times are
medians of the GPU that the line names; a new result file changes a page when it is built again.
"""

import json

from .page import ROOT

RESULTS = ROOT / "kernels" / "results"
PEERS = ("numba", "torch", "cupy text")


def records(op, folder=RESULTS):
    """-> list of dicts, in the order of shape and version."""
    latest = {}
    for path in sorted(folder.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            key = record["shape"], record["version"]
            if record["op"] == op and (key not in latest or latest[key]["date"] <= record["date"]):
                latest[key] = record
    return [latest[key] for key in sorted(latest)]


def report(op, folder=RESULTS):
    """Print what was measured of `op`, a row a shape, a column a version; -> the records."""
    found = records(op, folder)
    groups = {}
    for r in found:
        groups.setdefault((r["device"], r["date"]), {}).setdefault(r["shape"], []).append(r)
    for (device, date), shapes in sorted(groups.items()):
        columns = sorted({r["version"] for rows in shapes.values() for r in rows}, key=_column)
        print(f"measured on {device}, {date}: {op}, µs with a cold L2")
        print("".join(f"{name:>11}" for name in ("floor", *columns)))
        for shape, rows in sorted(shapes.items(), key=lambda item: best(item[1])["bytes"]):
            times = {r["version"]: f"{r['cold_us']['median']:,.1f}" for r in rows}
            first = best(rows)
            print(f"{shape}: {first['version']} reaches {first['share']:.0%} of the floor")
            told = (f"{first['floor_us']:,.1f}", *(times.get(name, "") for name in columns))
            print("".join(f"{time:>11}" for time in told).rstrip())
    if not found:
        print(f"nothing was measured yet: kernels/results has no record of {op}")
        print(f"on a GPU: python -m dsv41_kernels.bench {op} --json kernels/results/NAME.json")
    return found


def best(rows):
    """Of records of one shape the fastest of our kernels, or of all if none is ours."""
    ours = [r for r in rows if r["version"].startswith("v")]
    return min(ours or rows, key=lambda r: r["cold_us"]["median"])


def _column(version):
    """v1, v2, ..., then what they are compared with."""
    return not version.startswith("v"), PEERS.index(version) if version in PEERS else 0, version
