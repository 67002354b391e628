"""Chapters: pages are what their sources say, blanks fail, solutions pass, limits hold."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"


def _load_build():
    spec = importlib.util.spec_from_file_location("tutorials_build", TUTORIALS / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _load_build()
page = build.page
Cell = build.Cell
CHAPTERS = build.chapters()
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)

TINY = """\
# %% [markdown]
# # Title
#
# One, two. $x^2$

# %%
import math

print(f"pi {math.pi:.3f}")

# %% tags=["exercise"]
def answer(code):
    return ...


check("01.e5m2", answer)
"""


def cells(*sources):
    return [Cell("code", source) for source in sources]


def run(*sources, timeout=60):
    pytest.importorskip("nbclient", reason='pip install -e ".[notebooks]" to execute pages')
    return build.execute(build.notebook(cells(*sources)), timeout=timeout)


# ---- percent format -------------------------------------------------------------------------


def test_parse_gives_kind_tags_and_source():
    parsed = build.parse(TINY)
    assert [cell.kind for cell in parsed] == ["markdown", "code", "code"]
    assert parsed[0].source == "# Title\n\nOne, two. $x^2$"
    assert parsed[1].source == 'import math\n\nprint(f"pi {math.pi:.3f}")'
    assert [cell.tags for cell in parsed] == [[], [], ["exercise"]]


def test_writing_and_parsing_are_inverse():
    assert build.to_percent(build.parse(TINY)) == TINY


@each_chapter
def test_chapter_survives_the_round_trip(path):
    assert build.parse(build.to_percent(build.read(path))) == build.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)\n", "x:1: text before the first cell"),
        ("# %% [markdown]\nno comment\n", "x:2: a text cell holds comments only"),
        ("# %% [raw]\n# a\n", "x:1: expected"),
    ],
)
def test_parse_names_the_line_it_does_not_understand(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build.parse(text, "x")


# ---- writing --------------------------------------------------------------------------------


def test_written_text_is_stable_and_loads_back():
    made = build.notebook(build.parse(TINY))
    made["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "a\nb\n"}]
    text = build.dumps(made)
    assert build.loads(text) == made
    assert build.dumps(build.loads(text)) == text
    assert text.endswith("}\n") and '"a\\n"' in text and "cell-02" in text


def test_link_to_a_symbol_becomes_a_link_to_its_line():
    cell = Cell(
        "markdown", "[f](../dsv41/formats.py#Minifloat.encode), [g](../dsv41/quant.py#TILE)"
    )
    source = build.notebook([cell])["cells"][0]["source"]
    for file, line in re.findall(r"dsv41/(\w+\.py)#L(\d+)", source):
        found = (TUTORIALS.parent / "dsv41" / file).read_text().splitlines()[int(line) - 1]
        assert "def encode" in found or "TILE =" in found
    assert source.count("#L") == 2
    with pytest.raises(ValueError, match="has no nothing"):
        build.notebook([Cell("markdown", "[f](../dsv41/formats.py#nothing)")])


# ---- executing ------------------------------------------------------------------------------


def test_execution_twice_gives_the_same_bytes():
    drawing = "from lib.page import figure\nwith figure('line') as ax:\n    ax.plot([1, 2])"
    first, second = (build.dumps(run("print('a')\nprint('b')", drawing)) for _ in range(2))
    assert first == second
    assert "image/png" in first and "figure: line" in first and "timing" not in first
    assert '"alt": "line"' in first


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "CellExecutionError"),
        ("import time; time.sleep(60)", "CellTimeoutError"),
        ("import os; os._exit(1)", "DeadKernelError"),
        ("import warnings; warnings.warn('look')", "ValueError"),
        ("import lib.page; print(lib.page.ROOT)", "ValueError"),
    ],
    ids=["error", "time-out", "dead kernel", "warning", "path"],
)
def test_a_page_that_goes_wrong_is_not_written(source, error):
    with pytest.raises(Exception) as raised:
        run(source, timeout=3)
    assert type(raised.value).__name__ == error


# ---- comparing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "agree"),
    [
        ("error 0.1234", "error 0.1235", True),
        ("error 0.1234", "error 0.1236", False),
        ("1.234e-05", "1.235e-05", True),
        ("1.234e-05", "1.234e-04", False),
        ("890 bytes", "891 bytes", False),
        ("0.5", "0.4", False),
        ("✓ equal", "✓ close", False),
        ("versions: numpy 2.4", "versions: numpy 2.1", True),
    ],
)
def test_text_agrees_up_to_the_last_printed_digit(a, b, agree):
    assert build.text_agrees(a, b) == agree


def test_differences_name_the_cell():
    old, new = (build.notebook(build.parse(TINY)) for _ in range(2))
    assert build.differences(old, new) == []
    new["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "pi 3.142\n"}]
    new["cells"][0]["source"] += "!"
    assert build.differences(old, new) == [
        "cell-00: source differs",
        "cell-01: 0 lines of output committed, 1 now",
    ]
    assert build.differences(old, {"cells": []}) == ["3 cells committed, the source has 0"]


# ---- asserts and exercises ------------------------------------------------------------------


def test_same_wants_equal_bits_and_close_a_distance(capsys):
    page.same("nan", np.float32([np.nan, 1]), np.float32([np.nan, 1]))
    page.close("near", [1.0], [1.01], within=0.02)
    assert capsys.readouterr().out == "✓ nan\n✓ near\n"
    with pytest.raises(AssertionError, match=r"zero: got -0.0, expected 0.0 at \(0,\)"):
        page.same("zero", np.float32([-0.0]), np.float32([0.0]))
    with pytest.raises(AssertionError, match="type: float64"):
        page.same("type", np.ones(2), np.ones(2, np.float32))
    with pytest.raises(AssertionError, match="near: got nan"):
        page.close("near", [np.nan], [np.nan], within=1)


def test_a_blank_is_printed_for_readers_and_raised_while_building(capsys):
    for blank in (lambda code: ..., lambda code: None, lambda code: ... + 1, ...):
        page.check("01.e5m2", blank)
        assert capsys.readouterr().out.startswith("○ 01.e5m2 is blank: return the value")
        with page.strict(), pytest.raises(page.Blank, match=r"^01\.e5m2 is blank: "):
            page.check("01.e5m2", blank)


def test_a_wrong_answer_shows_input_expectation_and_hint():
    with pytest.raises(
        page.Wrong, match=r"for 1 it gives 0.0, expected 1.5\S+\n  hint: s is bit 7"
    ):
        page.check("01.e5m2", lambda code: 0.0, seed=1)


def test_an_answer_of_another_shape_or_kind_is_wrong():
    for answer in (lambda code: [0.0, 0.0], lambda code: "0"):
        with pytest.raises(page.Wrong):
            page.check("01.e5m2", answer)


def test_rehearsal_reports_blanks_that_pass_and_solutions_that_do_not(tmp_path):
    (tmp_path / "solutions").mkdir()
    chapter, solution = tmp_path / "01_x.py", tmp_path / "solutions" / "01_x.py"
    head = "# %%\nfrom lib.page import check\n\n"
    cell = '# %% tags=["exercise"]\ndef f(code):\n    return VALUE\n\n\ncheck("01.e5m2", f)\n'
    chapter.write_text(head + cell.replace("VALUE", "..."))
    solution.write_text(cell.replace("VALUE", "0.0"))
    (complaint,) = build.rehearse(chapter)
    assert complaint.startswith("solution of 01.e5m2: ✗ 01.e5m2: for 1 it gives 0.0")
    chapter.write_text(head + cell.replace("VALUE", "0.0"))
    assert "ends in Wrong" in build.rehearse(chapter)[0]
    solution.write_text(cell.replace("01.e5m2", "01.other"))
    assert build.rehearse(chapter)[0] == "exercises ['01.e5m2'], but solutions of ['01.other']"


def test_a_page_shows_the_latest_measurement_or_that_there_is_none(tmp_path, capsys):
    from lib.measured import records, report

    assert report("fp4_pack", tmp_path) == []
    assert "nothing was measured yet" in capsys.readouterr().out
    result = {"op": "fp4_pack", "version": "v3", "shape": "1M rows", "device": "GPU", "error": 0}
    result |= {"share": 0.5, "floor_us": 100.0, "bytes": 1}
    for name, date, median in (("b", "2026-01-01", 300.0), ("a", "2026-02-01", 200.0)):
        found = [result | {"date": date, "cold_us": {"median": median}}, result | {"op": "other"}]
        found += [found[0] | {"version": "v1", "cold_us": {"median": 1000.0}, "share": 0.1}]
        more = {"shape": "2M rows", "bytes": 2, "share": 0.25}
        found += [found[0] | more | {"cold_us": {"median": 2 * median}}]
        found += [found[0] | more | {"version": "torch", "cold_us": {"median": 80.0}}]
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert [r["date"] for r in records("fp4_pack", tmp_path)] == ["2026-02-01"] * 4
    report("fp4_pack", tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "measured on GPU, 2026-02-01: fp4_pack, µs with a cold L2",
        "      floor         v1         v3      torch",
        "1M rows: v3 reaches 50% of the floor",
        "      100.0    1,000.0      200.0",
        "2M rows: v3 reaches 25% of the floor",
        "      100.0                 400.0       80.0",
    ]


# ---- every chapter --------------------------------------------------------------------------


@each_chapter
def test_blanks_fail_with_their_message_and_solutions_pass(path):
    if "NUMBA_ENABLE_CUDASIM" not in path.read_text(encoding="utf-8"):
        assert build.rehearse(path) == []
        return
    # trap: Numba reads the variable once, and another test may have imported it for a GPU
    code = f"import build, pathlib; print(build.rehearse(pathlib.Path({str(path)!r})))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=TUTORIALS, capture_output=True, text=True
    )
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr


@each_chapter
def test_chapter_runs_as_a_script_from_anywhere_with_its_blanks(path, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", path], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n○ ") == build.count(build.read(path))["exercises"]


@each_chapter
def test_page_is_made_from_its_source_and_was_executed(path):
    committed = build.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    fresh = build.notebook(build.read(path))
    for old, new in zip(committed["cells"], fresh["cells"], strict=True):
        again = f"run tutorials/build.py {path.name[:2]}"
        assert old["source"] == new["source"], f"{old['id']} differs from the source; {again}"
    code = [cell for cell in committed["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(line["text"].startswith("versions: ") for line in code[0]["outputs"])
    assert len([cell for cell in code if "○" in str(cell["outputs"])]) == len(
        [cell for cell in code if "exercise" in str(cell["metadata"])]
    )


@each_chapter
def test_page_is_written_in_its_canonical_bytes_and_within_limits(path):
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert build.dumps(build.loads(text)) == text
    assert build.over_limits(build.read(path), text) == []


def test_chapters_that_take_too_long_together_fail(monkeypatch, capsys):
    monkeypatch.setattr(build, "refresh_text", lambda path: [])
    assert build.main(["--text", "01"]) == 0
    monkeypatch.setattr(build, "ALL_SECONDS", 0)
    assert build.main(["--text", "01"]) == 1
    assert "all: 0 s, at most 0" in capsys.readouterr().err


def test_limits_are_counted():
    few = build.over_limits(build.parse(TINY) * 14, "x" * 300_001)
    assert few == [
        "0 asserts, at least 8",
        "0 breaks, at least 1",
        "0 plots, at least 1",
        "42 cells, at most 40",
        "300001 bytes, at most 300000",
    ]
    code = replace(Cell("code", 'assert 1, "one"\nassert 1\nsame("a", 1, 1)'), tags=["break"])
    assert build.count([code]) | {"cells": 0} == {
        "cells": 0, "asserts": 2, "breaks": 1, "plots": 0, "exercises": 0
    }  # fmt: skip


@each_chapter
def test_relative_links_lead_to_files(path):
    cells = build.read(path) + build.read(TUTORIALS / "solutions" / path.name)
    for cell in (cell for cell in cells if cell.kind == "markdown"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", cell.source):
            assert target.startswith("http") or (TUTORIALS / target).exists(), target


def test_the_install_that_pages_name_has_what_a_trained_model_needs():
    """Chapters read text with data/mini; the package imports tokenizers only when asked to."""
    project = tomllib.loads((TUTORIALS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert "tokenizers" in project["optional-dependencies"]["notebooks"]
    for path in CHAPTERS:
        assert re.search(r'pip install -e "\.\[notebooks(,simulator)?\]"', path.read_text("utf-8"))


def test_readme_lists_the_chapters_that_exist():
    listed = re.findall(r"\((\d\d_\w+)\.ipynb\)", (TUTORIALS / "README.md").read_text("utf-8"))
    assert listed == [path.stem for path in CHAPTERS]


def test_readme_shows_the_first_figure_of_the_map():
    page_text = (TUTORIALS / "00_the_map.ipynb").read_text("utf-8")
    assert build.README_FIGURE.read_bytes() == build.first_figure(build.loads(page_text))
    assert f"]({build.README_FIGURE.name})" in (TUTORIALS / "README.md").read_text("utf-8")
