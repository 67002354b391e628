"""Which kernel is how fast? The tables of kernels/README.md, from kernels/results/*.json and
kernels/profiles.json alone.

    python -m dsv41_kernels.bench --json kernels/results/NAME.json     measure (on a GPU)
    python -m dsv41_kernels.profiles --json kernels/profiles.json      look into what is late
    python -m dsv41_kernels.readme [--check]                           write, or compare, the table

A line is one operation on one shape. "Measured" is the fastest RawKernel version, cold, as median
microseconds with the 10th and 90th percentile, then hot; share is the floor over the cold time. The
columns behind it are other ways to compute the same from the same inputs. What has not been
measured says so; no number is typed by hand.
"""

import json
import sys

from . import commands
from .launch import HERE
from .overview import definitions, kernels_of

README = HERE.parent / "README.md"
RESULTS = HERE.parent / "results"
PROFILES = HERE.parent / "profiles.json"
PROFILED = (
    "| op | shape | kernel | µs | MHz | issued | tensor cores | GB/s | memory | states of warps |"
)
PEERS = ("numba", "torch", "cupy text")
HEADING = (
    "| op | definition | versions | shape | bytes | floor µs | measured µs, cold (p10–p90) / hot "
    "| share | to beat | Numba | PyTorch | NumPy text on CuPy | command |"
)


def load(folder=RESULTS):
    """Records of all result files; of a version measured twice on a device the last date counts."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            key = tuple(record[k] for k in ("device", "op", "shape", "version"))
            if key not in found or found[key]["date"] <= record["date"]:
                found[key] = record
    return list(found.values())


def section(records):
    """The text between the markers: a heading per device, then the table."""
    names, lines = definitions(), []
    for device in sorted({r["device"] for r in records}):
        mine = [r for r in records if r["device"] == device]
        dates = _span(sorted({r["date"] for r in mine}))
        copies = _span([f"{c:,.0f}" for c in sorted({r["copy_gbps"] for r in mine})])
        lines += [f"### {device}, {dates}", ""]
        lines += [f"Copies run at {copies} GB/s; a floor uses the rate of its own run.", ""]
        lines += [*table(mine, names), "", *missed(mine)]
    measured = {r["op"] for r in records}
    waiting = [name for name in names if kernels_of(name) and name not in measured]
    if waiting:
        lines += [f"Not measured yet: {', '.join(f'`{name}`' for name in waiting)}.", ""]
    return "\n".join(lines).strip()


def _span(ordered):
    """First and last of a sorted list as text, or the only one."""
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def table(records, names):
    """Markdown lines, one row per op and shape in the order of the files."""
    rows = {}
    for record in records:
        rows.setdefault((record["op"], record["shape"]), []).append(record)
    yield HEADING
    yield "| --- " * (HEADING.count("|") - 1) + "|"
    for (op, shape), group in sorted(rows.items(), key=lambda item: item[0][0]):
        yield row(op, shape, group, names)


def fastest_of(records):
    """{(op, shape): the record of the version of ours that takes the least time}."""
    found = {}
    for r in (r for r in records if r["version"] not in PEERS):
        other = found.setdefault((r["op"], r["shape"]), r)
        if r["cold_us"]["median"] < other["cold_us"]["median"]:
            found[r["op"], r["shape"]] = r
    return found


def missed(records):
    """Markdown lines: the shapes whose fastest version takes longer than the time to beat."""
    found = {
        (*place, best["target_us"]): best["cold_us"]["median"]
        for place, best in fastest_of(records).items()
        if best["target_us"]
    }
    late = {place: time for place, time in found.items() if time > place[2]}
    yield f"{len(found) - len(late)} of {len(found)} times to beat are met."
    if late:
        yield from ("Missed:", "", "| op | shape | measured µs | to beat | times |")
        yield "| --- | --- | --- | --- | --- |"
        for (op, shape, target), time in sorted(late.items(), key=lambda e: -e[1] / e[0][2]):
            yield _join(f"`{op}`", shape, _us(time), _us(target), f"{time / target:.2f}")
    yield ""


def profiled(profiles):
    """Markdown: what profiles.py found, a row per kernel."""
    lines = [PROFILED, "| --- " * (PROFILED.count("|") - 1) + "|"]
    for p in profiles:
        states = ", ".join(f"{name} {share:.0%}" for name, share in p["states"].items())
        cells = [f"`{p['kernel']}`", f"{p['us']:,.1f}", f"{p['sm_mhz']:,.0f}", f"{p['issued']:.0%}"]
        cells += [f"{p['tensor']:.0%}", f"{p['gbps']:,.0f}", f"{p['memory']:.0%}", states]
        lines.append(_join(f"`{p['op']}`", p["shape"], *cells))
    return "\n".join(lines)


def _how(record):
    """Calls that no graph could record are timed with what the host does for them."""
    return "" if record["launched_as"] == "graph" else ", with the host"


def row(op, shape, group, names):
    """One row of the table."""
    ours = [r for r in group if r["version"] not in PEERS]
    where = f"`{names[op].__module__}`" if op in names else ""
    if not ours:
        measured = "not measured"
        return _join(f"`{op}`", where, "", shape, "", "", measured, "", "", *_peers(group), "")
    best = min(ours, key=lambda r: r["cold_us"]["median"])
    cold, hot = best["cold_us"], best["hot_us"]
    measured = (
        f"{best['version']}: {_us(cold['median'])} ({_us(cold['p10'])}–{_us(cold['p90'])})"
        f" / {_us(hot['median'])}" + _how(best)
    )
    versions = ", ".join(f"{r['version']} {_us(r['cold_us']['median'])}" for r in ours)
    target = "" if best["target_us"] is None else _us(best["target_us"])
    cells = [f"{best['bytes']:,}", _us(best["floor_us"]), measured, f"{best['share']:.1%}", target]
    return _join(f"`{op}`", where, versions, shape, *cells, *_peers(group), f"`{best['command']}`")


def _peers(group):
    cold = {r["version"]: _us(r["cold_us"]["median"]) for r in group}
    return [cold.get(peer, "") for peer in PEERS]


def _us(value):
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _join(*cells):
    return "| " + " | ".join(cells) + " |"


def sections():
    """All that README.md shows of the results: {name of the section: text}."""
    profiles = json.loads(PROFILES.read_text(encoding="utf-8"))
    return {"measured": section(load()), "profiled": profiled(profiles)}


def render(text, sections):
    """The README with what is between each section's marks made anew."""
    for name, made in sections.items():
        begin, end = (f"<!-- {name}: {which} -->" for which in ("begin", "end"))
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    return text


def main(argv=None):
    parser = commands.parser("readme", __doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 if stale")
    check = parser.parse_args(argv).check
    text = README.read_text(encoding="utf-8")
    made = render(text, sections())
    if check:
        return int(made != text)
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
