"""CUDA kernels: every source compiles for Hopper without spills, and equals its definition."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dsv41_kernels import bench, errors, launch, nvrtc, overview, readme, timing
from dsv41_kernels.arguments import cuda_array
from fake_cuda import on_device

from dsv41.dispatch import OPS, choose_backend, errors_at_end, find_kernel
from dsv41.mhc import sinkhorn
from dsv41.train.mhc import sinkhorn_backward
from dsv41.train.ops import segment_sums

ROOT = Path(__file__).parent.parent / "kernels" / "dsv41_kernels"
SOURCES = sorted(ROOT.glob("*/kernel.cu"))


def usage_by_nvcc(op, arch, macros, folder):
    """Like nvrtc.usage, for a machine that has a toolkit but not the wheel."""
    text, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    text.write_text(launch.source(op))
    flags = [f"-D{key}={value}" for key, value in macros.items()]
    command = ["nvcc", f"-arch={arch}", *flags, "--cubin", "-Xptxas", "-v", "-o", cubin, text]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return nvrtc.read_log(done.stderr)


@pytest.mark.parametrize("op", nvrtc.operations())
def test_source_compiles_for_hopper_without_spills(op, tmp_path):
    """v1 may be slow, every later version must fit into its registers."""
    for arch, macros in launch.builds(op):
        if nvrtc.available():
            found = nvrtc.usage(op, arch, macros)
        elif shutil.which("nvcc"):
            found = usage_by_nvcc(op, arch, macros, tmp_path)
        else:
            pytest.skip("no CUDA compiler: pip install nvidia-cuda-nvrtc")
        assert found, f"{op}: no kernel in it"
        spilled = [k for k in found if k.spills and not k.name.endswith("_v1")]
        assert not spilled, f"{op} {macros}: {spilled}"


def test_a_spill_is_seen():
    """Too many live values for 32 registers a thread: the report must say so."""
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    text = """extern "C" __global__ void __launch_bounds__(1024, 2) wide(float* x) {
      float v[64];
      for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
    }"""
    (found,) = nvrtc.read_log(nvrtc.compile_source(text, ("-arch=sm_90",)))
    assert found.name == "wide" and found.registers == 32 and found.spills > 0


def test_a_source_that_does_not_compile_says_where():
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    with pytest.raises(ValueError, match=r"kernel.cu\(1\): error"):
        nvrtc.compile_source("__global__ void f() { undefined(); }", ("-arch=sm_90",))


def test_our_headers_are_part_of_the_source(tmp_path, monkeypatch):
    """CuPy's cache is keyed by the source: a changed header has to change it."""
    monkeypatch.setattr(launch, "HERE", tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "kernel.cu").write_text(
        '#include "a.cuh"\n#include <cuda_bf16.h>\n#include "b.cuh"\n// build: sm_90a N=2 M=3\n'
    )
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "some" / "b.cuh").write_text("int near;\n")
    with pytest.raises(FileNotFoundError, match=r'some: no file for #include "b.cuh"'):
        launch.source("some")
    (tmp_path / "b.cuh").write_text("int shared;\n")
    text = launch.source("some")
    assert text.index("int shared;") < text.index("int a;") < text.index("int near;")
    assert '"a.cuh"' not in text and "#include <cuda_bf16.h>" in text
    assert launch.builds("some") == [("sm_90a", {"N": "2", "M": "3"})]
    assert "-arch=sm_90a" in launch.options("sm_90a", {"N": 2})


def test_nothing_is_launched_for_no_blocks():
    calls = []

    def record(blocks, threads, arguments, shared_mem):
        calls.append((blocks, threads, arguments, shared_mem))

    launch.launch(record, launch.grid(0), 256, ())
    launch.launch(record, launch.grid(257), 256, ("x",), 64)
    assert calls == [((2,), (256,), ("x",), 64)]


def test_the_first_bad_element_of_a_kernel_becomes_a_value_error():
    def describe(position, kind):
        return f"{kind} at {errors.at((2, 3), position)}"

    with errors.bad_values(describe, np.zeros(1)) as word:
        assert word[0] == 0
    with pytest.raises(ValueError, match=r"inf at \(1, 2\)"):
        with errors.bad_values(describe, np.zeros(1)) as word:
            for position, kind in ((5, 1), (7, 0)):
                word[0] = max(word[0], np.uint64(2**64 - 1 - (4 * position + kind)))


def test_deferred_errors_are_raised_once_at_the_end(fake_cuda):
    x, reached = on_device(np.zeros(1)), []
    with pytest.raises(ValueError, match="second: nan at 3"):
        with errors.deferred_errors():
            for n, name in enumerate(("first", "second", "third")):
                with errors.bad_values(lambda p, k, name=name: f"{name}: {k} at {p}", x) as word:
                    word[0] = np.uint64(2**64 - 1 - 4 * 3) if n else 0
                reached.append(name)
    assert reached == ["first", "second", "third"]
    with errors.deferred_errors(), errors.bad_values(lambda p, k: "stale", x):
        pass


def test_an_error_inside_a_step_clears_what_kernels_reported(fake_cuda):
    x = on_device(np.zeros(1))
    with pytest.raises(KeyError):
        with errors_at_end(), errors.bad_values(lambda p, k: "hidden", x) as word:
            word[0] = 1
            raise KeyError
    with errors_at_end(), errors.bad_values(lambda p, k: "stale", x):
        pass


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((2, 4), np.float32), TypeError, "x: expected a CUDA array, got a numpy.ndarray"),
        ([1.0], TypeError, "x: expected a CUDA array, got a builtins.list"),
        (on_device(np.zeros((2, 4))), TypeError, "x: expected float32, got float64"),
        (on_device(np.zeros(4, np.float32)), ValueError, r"x: expected 2 axes, got shape \(4,\)"),
    ],
)
def test_arguments_that_a_kernel_could_not_survive(fake_cuda, x, error, message):
    with pytest.raises(error, match=message):
        cuda_array("x", x, np.float32, ndim=2)


def test_arguments_of_another_layout_are_copied(fake_cuda):
    x = on_device(np.arange(24, dtype=np.float32).reshape(4, 6))
    assert cuda_array("x", x, np.float32) is x
    for view in (x.T, x[:, 1:], x[:, ::2], x.reshape(-1)[1:]):
        got = cuda_array("x", view, np.float32)
        assert got.flags.c_contiguous and got.data.ptr % 16 == 0 and np.array_equal(got, view)


def test_arguments_of_another_gpu_are_refused(fake_cuda, monkeypatch):
    x = on_device(np.zeros((2, 4), np.float32))
    monkeypatch.setattr(type(x), "device", SimpleNamespace(id=1))
    with pytest.raises(ValueError, match="x: lives on GPU 1, the current one is 0"):
        cuda_array("x", x, np.float32)


class FakeTimer:
    """1 microsecond hot, 2 cold, on a machine that copies 1000 GB/s."""

    copy_gbps, matrix_tflops, fp8_tflops, fp8_source = 1000.0, 500.0, 800.0, "a product"

    def measure(self, call):
        call()
        return timing.spread([1.0]), timing.spread([1.5, 2.0, 2.5]), "graph"

    def clock_mhz(self):
        return 1700


def test_a_case_is_checked_before_it_is_timed(monkeypatch):
    def wrong():
        raise AssertionError("off by one")

    order = []
    good = bench.Case("op", "v1", "n=1", lambda: order.append("call"), lambda: 0.5, 10**6, 10**9)
    record = run_case(monkeypatch, good)
    assert (record["floor_us"], record["bound"], record["share"]) == (2.0, "math", 1.0)
    assert (record["gbps"], record["tflops"], record["error"]) == (500.0, 500.0, 0.5)
    assert record["cold_us"] == {"median": 2.0, "p10": 1.6, "p90": 2.4} and order == ["call"]
    assert "op" in bench.line(record)
    with pytest.raises(AssertionError, match="off by one"):
        run_case(monkeypatch, replace(good, check=wrong))
    assert order == ["call"]


def without_a_gpu(monkeypatch, cases):
    """Let `bench` run these cases here."""
    fake = SimpleNamespace(Timer=lambda seconds: FakeTimer())
    monkeypatch.setitem(sys.modules, "dsv41_kernels.timing", fake)
    monkeypatch.setattr(bench, "machine", lambda timer: {"device": "GPU", "copy_gbps": 1.0})
    monkeypatch.setattr(bench, "cases", cases)
    monkeypatch.setattr(bench, "deferred_errors", nullcontext)


def test_what_an_interrupted_bench_has_measured_is_in_its_file(monkeypatch, tmp_path, capsys):
    def cases(op, quick):
        if op == "sinkhorn":
            raise KeyboardInterrupt
        return [bench.Case(op, "v1", "n=1", lambda: None, lambda: 0.0, 1)]

    without_a_gpu(monkeypatch, cases)
    file = tmp_path / "new" / "some.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["fp4_pack", "sinkhorn", "--json", str(file)])
    (record,) = json.loads(file.read_text())
    assert record["op"] == "fp4_pack"
    assert record["command"] == f"python -m dsv41_kernels.bench fp4_pack sinkhorn --json {file}"
    assert [path.name for path in file.parent.iterdir()] == ["some.json"]


def test_once_calls_and_neither_checks_nor_times(monkeypatch, capsys):
    called = []

    def wrong():
        raise AssertionError("checked")

    shapes = ("T=1, D=64", "T=512, D=64")
    made = [bench.Case("op", "v4", s, lambda s=s: called.append(s), wrong, 1) for s in shapes]
    without_a_gpu(monkeypatch, lambda op, quick: made)
    assert bench.main(["sinkhorn", "--once", "--only", "T=512,"]) == 0
    assert called == [shapes[1]] * 3 and capsys.readouterr().out == "op v4, T=512, D=64\n"
    assert bench.main(["sinkhorn", "--once", "--only", "T=7,"]) == 2


def test_only_the_cases_that_say_so_are_run(monkeypatch):
    shapes = [("v1", "T=512, D=64"), ("v4", "T=512, D=64"), ("v4", "T=5, D=64")]
    made = [bench.Case("op", v, s, lambda: None, lambda: 0.0, 1) for v, s in shapes]
    without_a_gpu(monkeypatch, lambda op, quick: made)

    def run(*only):
        records, failed = bench.bench(["op"], out=lambda line: None, only=only)
        assert failed == 0
        return [(r["version"], r["shape"]) for r in records]

    assert run() == shapes and run("v4,", "T=512,") == [shapes[1]] and run("T=5,") == [shapes[2]]
    assert bench.main(["sinkhorn", "--only", "v9"]) == 2


def test_the_text_is_timed_without_kernels_in_its_parts(monkeypatch):
    """The text of an operation calls others, which would find their kernels by themselves."""
    seen = []
    case = bench.Case("op", "v1", "n=1", lambda: seen.append(choose_backend()), lambda: 0.0, 1)
    monkeypatch.setenv("DSV41_BACKEND", "cupy")
    for version in ("v1", "torch", "cupy text"):
        run_case(monkeypatch, replace(case, version=version))
    assert seen == ["cupy", "cupy", "numpy"]


def test_the_floor_of_fp8_products_is_that_of_fp8_products(monkeypatch):
    case = bench.Case("op", "v1", "n=1", lambda: None, lambda: 0.0, 10**6, 10**9, rate="fp8")
    record = run_case(monkeypatch, case)
    assert (record["floor_us"], record["rate"], record["rate_from"]) == (1.25, "fp8", "a product")
    assert "500 TFLOP/s fp8" in bench.line(record)
    plain = run_case(monkeypatch, replace(case, flops=0))
    assert (plain["bound"], plain["rate"], plain["rate_from"]) == ("memory", None, None)
    with pytest.raises(ValueError, match="rate: expected fp16 or fp8, got 'int8'"):
        bench.floor_us(replace(case, rate="int8"), FakeTimer())


def test_without_pytorch_fp8_counts_as_twice_float16(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    timer = object.__new__(timing.Timer)
    timer.matrix_tflops = 700.0
    assert (timer.fp8_tflops, timer.fp8_source) == (1400.0, "2 x fp16")


def run_case(monkeypatch, case):
    monkeypatch.setattr(bench, "deferred_errors", nullcontext)
    return bench.run(case, FakeTimer())


def test_the_overview_lists_every_definition(capsys):
    lines = []
    assert overview.report(lines.append) == 0 or overview.device()[0] is not None
    text = "\n".join(lines)
    assert all(re.search(rf"^{name} ", text, re.MULTILINE) for name in OPS)
    assert re.search(r"^sinkhorn +dsv41.mhc +cupy", text, re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.parent.name)
def test_every_kernel_folder_belongs_to_a_definition(path):
    assert path.parent.name in OPS
    assert (path.parent / "cupy_op.py").exists()


def on_both(cupy, op, *arguments):
    """-> the definition's result, and that of the kernel, as NumPy arrays."""
    assert find_kernel(op.__name__, "cupy") is not None
    moved = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return op.definition(*arguments), op(*moved).get()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000])
def test_sinkhorn(cupy, size, count):
    logits = np.random.default_rng(0).normal(0, 5, (count, size, size)).astype(np.float32)
    logits[:1] = 1000 * np.eye(size)
    want, got = on_both(cupy, sinkhorn, logits, 20, 1e-6)
    assert np.abs(want - got).max(initial=0) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 255, 1000])
def test_sinkhorn_backward(cupy, count):
    rng = np.random.default_rng(0)
    dcomb, logits = rng.normal(0, 2, (2, count, 4, 4)).astype(np.float32)
    want, got = on_both(cupy, sinkhorn_backward, dcomb, logits, 20, 1e-6)
    assert np.abs(want - got).max(initial=0) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 31, 64, 300])
def test_segment_sums(cupy, channels):
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (1000, channels)).astype(np.float32)
    first = np.unique(np.concatenate([[0], rng.integers(0, 1000, 50)]))
    want, got = on_both(cupy, segment_sums, values, first)
    assert np.abs(want - got).max() < 1e-4
    assert np.array_equal(got, on_both(cupy, segment_sums, values, first)[1])


def test_kernel_modules_import_without_a_gpu_library_only_when_asked():
    """The package itself imports anywhere; only an op's module needs CuPy."""
    assert importlib.import_module("dsv41_kernels").__doc__
    assert importlib.import_module("dsv41_kernels.launch").grid(257) == (2,)


RECORD = {
    "op": "sinkhorn",
    "version": "v1",
    "shape": "T=8",
    "bytes": 4096,
    "floor_us": 1.0,
    "cold_us": {"median": 4.0, "p10": 3.5, "p90": 5.25},
    "hot_us": {"median": 2.0, "p10": 2.0, "p90": 2.0},
    "launched_as": "graph",
    "share": 0.25,
    "target_us": None,
    "device": "Some GPU",
    "copy_gbps": 4000.0,
    "date": "2026-01-02",
    "command": "python -m dsv41_kernels.bench sinkhorn",
}


def test_the_readme_shows_the_results_and_nothing_else():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.render(text, readme.sections()) == text, "run python -m dsv41_kernels.readme"


def test_what_stands_around_the_sections_of_the_readme_stays():
    text = "top <!-- a: begin -->stale<!-- a: end --> middle <!-- b: begin --><!-- b: end --> tail"
    made = readme.render(text, {"a": "one", "b": "two"})
    assert (
        made.split()
        == text.replace("stale", " one ").replace("begin --><", "begin --> two <").split()
    )


def test_the_readme_says_what_was_missed_and_by_how_much():
    def record(shape, version, median, target):
        return {
            "op": "some",
            "shape": shape,
            "version": version,
            "cold_us": {"median": median},
            "target_us": target,
        }

    met = [record("n=1", "v1", 9.0, 5), record("n=1", "v2", 4.0, 5), record("n=2", "v2", 1.0, None)]
    assert list(readme.missed(met)) == ["1 of 1 times to beat are met.", ""]
    late = [record("n=3", "v1", 8.0, 5), record("n=3", "numba", 4.0, 5), record("n=4", "v1", 20, 5)]
    first, _, *lines = readme.missed(met + late)
    assert first == "1 of 3 times to beat are met."
    assert lines[-3:-1] == [
        "| `some` | n=4 | 20.0 | 5.0 | 4.00 |",
        "| `some` | n=3 | 8.0 | 5.0 | 1.60 |",
    ]


def test_a_row_of_the_readme_names_the_fastest_version(tmp_path):
    faster = RECORD | {"version": "v2", "cold_us": {"median": 2.0, "p10": 1.5, "p90": 1234.5}}
    peer = RECORD | {"version": "torch", "cold_us": {"median": 0.5, "p10": 0.5, "p90": 0.5}}
    older = faster | {"date": "2026-01-01", "cold_us": {"median": 0.1, "p10": 0.1, "p90": 0.1}}
    (tmp_path / "a.json").write_text(json.dumps([RECORD, faster, peer]))
    (tmp_path / "b.json").write_text(json.dumps([older]))
    made = readme.section(readme.load(tmp_path))
    assert "### Some GPU, 2026-01-02" in made
    assert "| `sinkhorn` | `dsv41.mhc` | v1 4.0, v2 2.0 | T=8 | 4,096 | 1.0 |" in made
    assert "| v2: 2.0 (1.5–1,234) / 2.0 | 25.0% |  |  | 0.5 |  |" in made
    (tmp_path / "a.json").write_text(json.dumps([RECORD | {"launched_as": "stream"}]))
    (tmp_path / "b.json").unlink()
    made = readme.section(readme.load(tmp_path))
    assert "| v1: 4.0 (3.5–5.2) / 2.0, with the host |" in made
    assert "`fp4_pack`" in made.split("Not measured yet")[1]
