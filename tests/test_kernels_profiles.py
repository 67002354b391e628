"""What is read off ncu's report; the watching itself needs a GPU."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dsv41_kernels import profiles, readme

STATES = {"barrier": 3.0, "long_scoreboard": 6.0, "wait": 0.5, "selected": 1.0, "drain": 1.5}
COLUMNS = [
    ("Kernel Name", "", "{}"),
    ("gpu__time_duration.sum", "ns", "12,500"),
    ("gpc__cycles_elapsed.avg.per_second", "hz", "1980000000"),
    ("smsp__issue_active.avg.per_cycle_active", "inst/cycle", "0.25"),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "8.0"),
    ("dram__bytes.sum.per_second", "Gbyte/s", "2400"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", "50.5"),
    *(
        (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio", "inst", str(value))
        for name, value in STATES.items()
    ),
]


def raw(*kernels):
    """Lines of ncu's raw page."""
    names, units, values = zip(*COLUMNS, strict=True)
    rows = [names, units, *([v.format(kernel) for v in values] for kernel in kernels)]
    quoted = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return ["==PROF== Connected to process 1", *quoted]


def test_numbers_come_in_the_units_of_the_table():
    (found,) = map(profiles.profile, profiles.read_raw(raw("wide(const float *)")))
    assert found == {
        "kernel": "wide",
        "us": 12.5,
        "sm_mhz": 1980,
        "issued": 0.25,
        "tensor": 0.08,
        "gbps": 2400,
        "memory": 0.505,
        "states": {"long_scoreboard": 0.5, "barrier": 0.25, "drain": 0.125, "selected": 0.0833},
    }
    (row,) = readme.profiled([{"op": "some", "shape": "T=8", **found}]).splitlines()[2:]
    assert row == (
        "| `some` | T=8 | `wide` | 12.5 | 1,980 | 25% | 8% | 2,400 | 50% "
        "| long_scoreboard 50%, barrier 25%, drain 12%, selected 8% |"
    )


def test_a_report_without_kernels_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="ncu: ==ERROR== no permission"):
        profiles.read_raw(["==ERROR== no permission"])


def test_only_the_fastest_versions_that_are_late_are_looked_into():
    def record(version, median, target, shape="T=8"):
        times = {"cold_us": {"median": median}, "target_us": target}
        return {"op": "some", "version": version, "shape": shape, **times}

    late = [record("v1", 9, 5), record("v2", 6, 5), record("torch", 1, None)]
    met = [record("v1", 9, 5, "T=1"), record("v2", 4, 5, "T=1"), record("v1", 9, None, "T=2")]
    assert profiles.wanted(late + met) == {"some": [("v2", "T=8")]}


def test_kernels_behind_a_mark_belong_to_its_case(monkeypatch):
    monkeypatch.setattr(profiles.shutil, "which", lambda name: f"/somewhere/{name}")
    commands = []

    def run(command):
        commands.append(command)
        lines = raw("layer_marker()", "encode(int)", "scores(int)", "layer_marker()", "scores(int)")
        Path(command[command.index("--log-file") + 1]).write_text("\n".join(lines))
        return SimpleNamespace(returncode=0)

    late = [("v2", "B=1, keys"), ("v3", "B=2, keys")]
    found = profiles.watch("some", late, run)
    places = [(p["version"], p["shape"], p["kernel"]) for p in found]
    assert places == [(*late[0], "encode"), (*late[0], "scores"), (*late[1], "scores")]
    assert commands[0][-4:] == ["--launch", "some", "v2|B=1, keys", "v3|B=2, keys"]


def test_a_case_that_is_gone_is_an_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setattr(profiles, "cases", lambda op: [SimpleNamespace(version="v2", shape="T=1")])
    assert profiles.main(["--launch", "some", "v1|T=1"]) == 1
    assert "some: results of a case that bench.py does not have" in capsys.readouterr().err
    monkeypatch.setattr(profiles.shutil, "which", lambda name: name)
    with pytest.raises(ValueError, match="some: not watched"):
        profiles.watch("some", [("v1", "T=1")], lambda command: SimpleNamespace(returncode=1))


def test_without_ncu_there_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(profiles.shutil, "which", lambda name: None)
    monkeypatch.setattr(profiles, "wanted", lambda records: {"some": [("v1", "T=1")]})
    assert profiles.main([]) == 2
    assert capsys.readouterr().err.startswith("profiles: ncu: not found on PATH")
