"""What do the committed measurements say about an operation?

    records(op)   the results of kernels/results/*.json for it, as the table of kernels/README.md
                  takes them: of the same version and shape the latest
    report(op)    one line a version and shape, or one line that nothing was measured yet

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
    """Print what was measured of `op`; -> the records."""
    found = records(op, folder)
    for r in found:
        cold = r["cold_us"]["median"]
        print(f"measured on {r['device']}, {r['date']}: {op} {r['version']}, {r['shape']}:", end="")
        print(f" {cold:,.1f} µs, {r['share']:.0%} of the floor of {r['floor_us']:,.1f} µs")
    if not found:
        print(f"nothing was measured yet: kernels/results has no record of {op}")
        print(f"on a GPU: python -m dsv41_kernels.bench {op} --json kernels/results/NAME.json")
    return found
