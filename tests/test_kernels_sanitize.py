"""What `make sanitize` launches, and what it says; the watching itself needs a GPU."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from dsv41_kernels import launch, nvrtc, sanitize
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


@pytest.mark.parametrize("as_they_are", [False, True])
def test_each_tool_watches_a_process_of_its_own(monkeypatch, as_they_are):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    seen = []

    def run(command):
        seen.append(command)
        return SimpleNamespace(returncode=9 if "racecheck" in command else 0)

    names = ["sinkhorn", "model"]
    assert sanitize.watch(sanitize.TOOLS, names, as_they_are, run) == ["racecheck"]
    for tool, command in zip(sanitize.TOOLS, seen, strict=True):
        assert command[command.index("--tool") + 1] == tool and "--error-exitcode" in command
        assert command[command.index("--report-api-errors") + 1] == "no", "the driver's answers"
        assert "--launch" in command and command[-2:] == names
    plain = ["--as-they-are" in command for command in seen]
    assert plain == [True, as_they_are], "memcheck watches what is used"


@pytest.mark.parametrize("arguments", [["--launch"], ["--launch", "--as-they-are"]])
def test_what_racecheck_cannot_follow_is_built_another_way(monkeypatch, without_pool, arguments):
    monkeypatch.setattr(launch, "macros_of_all", {})
    monkeypatch.setattr(sanitize, "calls", lambda name: [])
    assert sanitize.main(["sinkhorn", *arguments]) == 0
    assert launch.macros_of_all == ({} if "--as-they-are" in arguments else {"WATCHED": 1})


WATCHED = [
    (op, *build)
    for op in ("hc_boundary", "index_scores", "rope_sparse_attn")
    for build in launch.builds(op)
    if "HEADS" not in build[1] or build[1].get("PACKED") == "1"
]


@pytest.mark.parametrize(("op", "arch", "macros"), WATCHED)
def test_watched_builds_compile(op, arch, macros):
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    assert "ARRIVING" in launch.source(op)
    assert nvrtc.usage(op, arch, macros | {"WATCHED": 1})


MISTAKES = {  # what is taken away from a source: an order that only it has
    "scores_v5": ("index_scores", "kernel.cu", "    wait_for(ring.full + s, parity);\n"),
    "wide": ("hc_boundary", "one_pass.cuh", "      desk.done.wait(round);\n"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", MISTAKES)
def test_racecheck_sees_a_wait_that_is_not_there(cupy, kernel, tmp_path):
    try:
        sanitize.sanitizer()
    except ValueError as error:
        pytest.skip(str(error))
    op, file, wait = MISTAKES[kernel]
    package = tmp_path / "dsv41_kernels"
    shutil.copytree(launch.HERE, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / op / file
    text = source.read_text(encoding="utf-8")
    assert text.count(wait) == 1
    source.write_text(text.replace(wait, ""), encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "dsv41_kernels.sanitize", "--tool", "racecheck", op]
    environment = os.environ | {"PYTHONPATH": path, "CUPY_CACHE_DIR": str(tmp_path / "cache")}
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert said.endswith("found something: racecheck\n"), said
    assert "Race reported" in said and f"access at {kernel}+" in said, said


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
