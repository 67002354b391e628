"""What `make sanitize` launches, and what it says; the watching itself needs a GPU."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from dsv41_kernels import launch, sanitize
from dsv41_kernels.bench import operations

from dsv41 import dispatch
from dsv41.train import many


def test_all_operations_but_one_are_also_met_in_the_model(monkeypatch):
    """rmsnorm_fp8 hands over records, which a model's linears do not ask for."""
    met = set()
    for module in (dispatch, many):
        monkeypatch.setattr(module, "find_kernel", lambda name, backend: met.add(name))
    sanitize.train()
    sanitize.decode()
    assert set(operations()) - met == {"rmsnorm_fp8"}


def test_every_kernel_of_a_source_is_known_by_name():
    for op in {op for op, _ in sanitize.kernel_names()}:
        found = [name for other, name in sanitize.kernel_names() if other == op]
        assert len(found) == launch.source(op).count("__global__ void"), op
    assert {("hc_boundary", "wide"), ("rope_sparse_attn", "cluster")} <= sanitize.kernel_names()


def watched(monkeypatch, fails):
    """-> commands that are run where those fail of which `fails` is true, and what `watch` says."""
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    seen = []

    def run(command):
        seen.append(command)
        return SimpleNamespace(returncode=9 if fails(command) else 0)

    return seen, sanitize.watch(sanitize.TOOLS, ["sinkhorn", "model"], run)


def test_each_tool_watches_a_process_of_its_own(monkeypatch):
    seen, failed = watched(monkeypatch, lambda c: "racecheck" in c and "model" in c)
    assert failed == ["racecheck"] and len(seen) == 4
    for tool, command in zip(("memcheck", *["racecheck"] * 3), seen, strict=True):
        assert command[command.index("--tool") + 1] == tool and "--error-exitcode" in command
        assert command[command.index("--report-api-errors") + 1] == "no", "the driver's answers"
        assert "--kernel-name-exclude" not in command
    assert [command[-1] for command in seen] == ["model", "ordered", "elected", "model"]
    assert seen[3][-3:] == ["--launch", "sinkhorn", "model"]


@pytest.mark.parametrize("control", sanitize.CONTROLS)
def test_where_a_control_is_reported_its_likes_are_left_out(monkeypatch, capsys, control):
    seen, failed = watched(monkeypatch, lambda command: command[-1] == control)
    _, like = sanitize.CONTROLS[control]
    assert not failed
    left = seen[-1][seen[-1].index("--kernel-name-exclude") + 1]
    assert left == ",".join(f"kernel_name={name}" for name in like)
    assert "does not watch " + ", ".join(like) in capsys.readouterr().out
    assert set(like) <= {name for _, name in sanitize.kernel_names()}


def test_where_both_are_reported_both_kinds_are_left_out(monkeypatch):
    seen, failed = watched(monkeypatch, lambda command: command[-1] in sanitize.CONTROLS)
    lists = [b for a, b in pairwise(seen[-1]) if a == "--kernel-name-exclude"]
    names = [name for _, like in sanitize.CONTROLS.values() for name in like]
    assert not failed
    assert lists == [",".join(f"kernel_name={name}" for name in names)]


def test_the_sanitizer_is_looked_for_in_the_toolkit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    with pytest.raises(ValueError, match="not found on PATH"):
        sanitize.sanitizer()
    (tmp_path / "bin").mkdir()
    there = tmp_path / "bin" / "compute-sanitizer"
    there.write_text("")
    there.chmod(0o755)
    assert sanitize.sanitizer() == str(there)


@pytest.fixture
def without_pool(monkeypatch):
    """A cupy that only notes its allocator; a torch that is there."""
    noted = []
    cuda = SimpleNamespace(set_allocator=noted.append, Device=lambda: SimpleNamespace())
    cuda.Device = lambda: SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", np)
    monkeypatch.setattr(launch, "used", set())
    return noted


def test_a_call_that_raises_is_counted_and_the_rest_goes_on(monkeypatch, without_pool, capsys):
    def fail():
        raise RuntimeError("illegal address")

    def found(name):
        yield f"{name} v1", lambda: launch.used.add(("sinkhorn", "sinkhorn"))
        if name == "segment_sums":
            yield f"{name} v2", fail

    monkeypatch.setattr(sanitize, "calls", found)
    lines = []
    assert sanitize.launch_all(["segment_sums", "sinkhorn"], lines.append) == 1
    assert without_pool == [None], "the memory pool hides the ends of arrays"
    assert lines[:2] == ["segment_sums v1", "sinkhorn v1"]
    missed = "segment_sums/segment_sums, segment_sums/segment_sums_v2"
    assert lines[2] == f"1 kernels launched, not launched: {missed}"
    assert "illegal address" in capsys.readouterr().err


def test_peers_are_left_out(monkeypatch):
    names = ("v1", "numba", "cupy text", "torch")
    cases = [SimpleNamespace(version=v, shape="n=1", call=v) for v in names]
    monkeypatch.setattr(sanitize, "cases", lambda op, quick: cases)
    assert [call for _, call in sanitize.calls("sinkhorn")] == ["v1", "numba"]


def test_an_unknown_operation_is_one_clear_line(capsys):
    assert sanitize.main(["sinkhorn", "nothing"]) == 2
    assert capsys.readouterr().err == "sanitize: no such operation: nothing\n"
