"""What do the committed measurements say about an operation?

    records(op)   the results of kernels/results/*.json for it, as the table of kernels/README.md
                  takes them: of the same version and shape the latest
    report(op)    prints them shape by shape, or that nothing was measured yet

A chapter that shows a time asks here, so a page never holds a time that no file holds. Times are
medians of the GPU that the line names; a new result file changes a page when it is built again.
"""

import json

from .page import ROOT

RESULTS = ROOT / "kernels" / "results"


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
    """Print what was measured of `op`, shape by shape, fastest first; -> the records."""
    found = records(op, folder)
    groups = {}
    for r in found:
        groups.setdefault((r["device"], r["date"]), {}).setdefault(r["shape"], []).append(r)
    for (device, date), shapes in sorted(groups.items()):
        print(f"measured on {device}, {date}: {op}, µs with a cold L2, and share of the floor")
        for shape, rows in shapes.items():
            rows = sorted(rows, key=lambda r: r["cold_us"]["median"])
            print(f"  {shape}, floor {rows[0]['floor_us']:,.1f} µs")
            told = (f"{r['version']} {r['cold_us']['median']:,.1f} {r['share']:.0%}" for r in rows)
            print("      " + "   ".join(told))
    if not found:
        print(f"nothing was measured yet: kernels/results has no record of {op}")
        print(f"on a GPU: python -m dsv41_kernels.bench {op} --json kernels/results/NAME.json")
    return found
