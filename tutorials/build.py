"""How does a chapter's .py become a page that anyone can rebuild, byte for byte?

    python tutorials/build.py [NN ...]           execute chapters (default: all), write the .ipynb
    python tutorials/build.py --check [NN ...]   execute again, compare with the committed .ipynb
    python tutorials/build.py --text [NN ...]    new prose and links only, nothing is executed

The source is NN_name.py in percent format: a cell starts with `# %%`, a text cell with
`# %% [markdown]`, tags follow as `# %% tags=["exercise"]`. The page holds ids from the cell index,
counts, text and PNG: no times, no paths, no warnings. A link ../dsv41/formats.py#Minifloat.encode
becomes a link to the line.

Exercises are published as blanks, and the page must run with them. Both commands also rehearse:
each blank must fail with its message, each solution in solutions/NN_name.py must pass its `check`.
A failing cell, a dead kernel, a page over its limits or over its time ends with exit code 1, and so
do chapters that take 12 minutes together. Comparing ignores images and the versions line, and lets
printed decimals differ by one in the last place.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from lib import page  # noqa: E402

SECONDS, CELLS, BYTES = 90, 40, 300_000
ALL_SECONDS = 12 * 60  # for all chapters, rehearsals included
README_FIGURE = HERE / "the_map.png"  # the first figure of chapter 00, for the README
AT_LEAST = {"asserts": 8, "breaks": 1, "plots": 1, "exercises": 2}


# ---- percent format -------------------------------------------------------------------------


@dataclass
class Cell:
    """kind is "code" or "markdown"; source has no comment signs and no trailing newline."""

    kind: str
    source: str
    tags: list = field(default_factory=list)


def parse(text, name="chapter"):
    """Percent text -> list of Cell. ValueError names the line that is not understood."""
    cells, lines = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# %%"):
            lines = []
            cells.append((*_header(line, f"{name}:{number}"), lines))
        elif cells:
            markdown = cells[-1][0] == "markdown" and line
            lines.append(_uncomment(line, f"{name}:{number}") if markdown else line)
        elif line:
            raise ValueError(f"{name}:{number}: text before the first cell: {line!r}")
    return [Cell(kind, "\n".join(lines).strip("\n"), tags) for kind, tags, lines in cells]


def _header(line, where):
    match = re.fullmatch(r"# %%( \[markdown\])?(?: tags=(\[.*\]))?", line)
    if not match:
        raise ValueError(f"{where}: expected '# %%[ [markdown]][ tags=[...]]', got {line!r}")
    return "markdown" if match[1] else "code", json.loads(match[2] or "[]")


def _uncomment(line, where):
    if line != "#" and not line.startswith("# "):
        raise ValueError(f"{where}: a text cell holds comments only, got {line!r}")
    return line[2:]


def to_percent(cells):
    """The inverse of `parse`."""
    return "\n\n".join(_cell_text(cell) for cell in cells) + "\n"


def _cell_text(cell):
    markdown = cell.kind == "markdown"
    tags = f" tags={json.dumps(cell.tags)}" if cell.tags else ""
    lines = cell.source.splitlines()
    body = [f"# {line}".rstrip() for line in lines] if markdown else lines
    return "\n".join(["# %%" + " [markdown]" * markdown + tags, *body])


def chapters(wanted=()):
    """Paths of the chapters' sources, in order; `wanted` are numbers such as "01"."""
    found = {path.name[:2]: path for path in sorted(HERE.glob("[0-9][0-9]_*.py"))}
    unknown = [number for number in wanted if number not in found]
    if unknown:
        raise SystemExit(f"no chapter {', '.join(unknown)}; there are {', '.join(found)}")
    return [found[number] for number in (wanted or found)]


def read(path):
    return parse(path.read_text(encoding="utf-8"), path.name)


# ---- exercises ------------------------------------------------------------------------------


def exercise_name(cell):
    """The name in `check("01.name", ...)`."""
    names = re.findall(r'^check\("([^"]+)"', cell.source, re.MULTILINE)
    if len(names) != 1:
        raise ValueError(f"an exercise cell has one line check(...), got {names}:\n{cell.source}")
    return names[0]


def solutions(path):
    """Chapter's path -> {exercise name: filled cell}."""
    cells = read(path.parent / "solutions" / path.name)
    return {exercise_name(cell): cell for cell in cells if "exercise" in cell.tags}


def rehearse(path):
    """Run the chapter in this process: blanks must fail with their message, solutions pass.

    Returns complaints; other cells may raise whatever is wrong with them.
    """
    cells, filled, complaints = read(path), solutions(path), []
    names = [exercise_name(cell) for cell in cells if "exercise" in cell.tags]
    if sorted(names) != sorted(filled):
        complaints.append(f"exercises {sorted(names)}, but solutions of {sorted(filled)}")
    space = {"__name__": "__main__"}
    with page.strict(), contextlib.redirect_stdout(io.StringIO()):
        for index, cell in enumerate(cells):
            where = f"{path.stem}, cell {index}"
            if "exercise" in cell.tags and exercise_name(cell) in filled:
                complaints += _try_exercise(cell, filled[exercise_name(cell)], space, where)
            elif cell.kind == "code" and "exercise" not in cell.tags:
                exec(compile(cell.source, where, "exec"), space)
    return complaints


def _try_exercise(blank, filled, space, where):
    complaints, name = [], exercise_name(blank)
    try:
        exec(compile(blank.source, where, "exec"), space)
        complaints.append(f"{where}: the blank of {name} passes")
    except page.Blank as message:
        if not str(message).startswith(f"{name} is blank: "):
            complaints.append(f"{where}: unclear message: {message}")
    except Exception as error:
        complaints.append(f"{where}: the blank of {name} ends in {error!r}, not in its message")
    try:
        exec(compile(filled.source, f"solution of {name}", "exec"), space)
    except Exception as error:
        complaints.append(f"solution of {name}: {error}")
    return complaints


# ---- notebook -------------------------------------------------------------------------------


def notebook(cells):
    """Cells -> the page as a dict, not executed. Ids come from the cell index."""
    return {
        "cells": [_notebook_cell(index, cell) for index, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _notebook_cell(index, cell):
    tags = {"tags": cell.tags} if cell.tags else {}
    source = _link_lines(cell.source) if cell.kind == "markdown" else cell.source
    made = {"id": f"cell-{index:02}", "cell_type": cell.kind, "metadata": tags, "source": source}
    return made | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {})


def _link_lines(source):
    return re.sub(r"\((\.\./[\w/]+\.py)#([A-Za-z_][\w.]*)\)", _line_link, source)


def _line_link(match):
    target, body = match[1], ast.parse((HERE / match[1]).read_text(encoding="utf-8")).body
    for name in match[2].split("."):
        found = [node for node in body if name in _names(node)]
        if not found:
            raise ValueError(f"{target} has no {match[2]}")
        body = getattr(found[0], "body", [])
    return f"({target}#L{found[0].lineno})"


def _names(node):
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", None)]


def dumps(page_dict):
    """The page's text: sorted keys, sources and streams as lists of lines, one final newline."""
    listed = json.loads(json.dumps(page_dict))
    for cell in listed["cells"]:
        cell["source"] = cell["source"].splitlines(keepends=True)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = output["text"].splitlines(keepends=True)
    return json.dumps(listed, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def loads(text):
    """The inverse of `dumps`."""
    loaded = json.loads(text)
    for cell in loaded["cells"]:
        cell["source"] = "".join(cell["source"])
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = "".join(output["text"])
    return loaded


def execute(page_dict, timeout=SECONDS):
    """The page with its outputs, run in a fresh kernel; what a cell raises is raised here."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.from_dict(page_dict)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    client = NotebookClient(
        node,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=40"],  # errors only: it warns of its own sockets
    )
    client.resources = {"metadata": {"path": str(HERE)}}
    client.execute(env=environment)
    executed = json.loads(json.dumps(page_dict))
    code = [
        pair for pair in zip(executed["cells"], node.cells, strict=True) if "outputs" in pair[0]
    ]
    for count, (cell, ran) in enumerate(code, 1):
        cell["execution_count"] = count
        cell["outputs"] = _tidy(ran.outputs, cell["id"])
    return executed


def _tidy(outputs, cell_id):
    """Text and PNG only, streams joined. ValueError on a warning or a path of this machine."""
    tidy = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                raise ValueError(f"{cell_id} writes to stderr: {output.text.strip()}")
            if tidy and tidy[-1]["output_type"] == "stream":
                tidy[-1]["text"] += output.text
                continue
            tidy.append({"output_type": "stream", "name": "stdout", "text": output.text})
        else:
            data = {kind: output.data[kind].strip() for kind in ("image/png", "text/plain")
                    if kind in output.data}  # fmt: skip
            alt = data.get("text/plain", "").removeprefix("figure: ")  # for screen readers
            metadata = {"image/png": {"alt": alt}} if "image/png" in data else {}
            tidy.append({"output_type": "display_data", "metadata": metadata, "data": data})
    if str(HERE.parent) in json.dumps(tidy):
        raise ValueError(f"{cell_id} shows a path of this machine")
    return tidy


# ---- compare --------------------------------------------------------------------------------

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def differences(committed, fresh):
    """What a reader would see change, as lines; empty when the pages agree."""
    old, new = committed["cells"], fresh["cells"]
    if len(old) != len(new):
        return [f"{len(old)} cells committed, the source has {len(new)}"]
    found = []
    for before, after in zip(old, new, strict=True):
        parts = ("id", "cell_type", "metadata", "source", "execution_count")
        changed = [part for part in parts if before.get(part) != after.get(part)]
        found += [f"{after['id']}: {part} differs" for part in changed]
        was, now = _texts(before), _texts(after)
        if len(was) != len(now):
            found.append(f"{after['id']}: {len(was)} lines of output committed, {len(now)} now")
        found += [
            f"{after['id']}: output {a!r}, committed {b!r}"
            for a, b in zip(now, was, strict=False)
            if not text_agrees(a, b)
        ]
    return found


def _texts(cell):
    texts = [o.get("text") or o["data"].get("text/plain", "") for o in cell.get("outputs", [])]
    return "\n".join(texts).splitlines()


def text_agrees(a, b):
    """Equal words; equal numbers, up to one unit in the last of three or more printed digits."""
    if a.startswith("versions: ") and b.startswith("versions: "):
        return True
    if NUMBER.split(a) != NUMBER.split(b):
        return False
    pairs = zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    return all(_number_agrees(x, y) for x, y in pairs)


def _number_agrees(a, b):
    if a == b:
        return True
    digits, _, exponent = a.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    if not decimals or len(digits.replace(".", "").strip("-0")) < 3:
        return False
    unit = 10.0 ** (int(exponent or 0) - decimals)
    return abs(float(a) - float(b)) <= 1.01 * unit


# ---- limits ---------------------------------------------------------------------------------


def count(cells):
    """What a chapter has: cells, labelled asserts, breaks, plots and exercises."""
    code = [cell for cell in cells if cell.kind == "code" and "exercise" not in cell.tags]
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source))]
    calls = [node.func.id for node in nodes
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]  # fmt: skip
    asserts = sum(isinstance(node, ast.Assert) and node.msg is not None for node in nodes)
    return {
        "cells": len(cells),
        "asserts": asserts + calls.count("same") + calls.count("close"),
        "breaks": sum("break" in cell.tags for cell in cells),
        "plots": calls.count("figure"),
        "exercises": sum("exercise" in cell.tags for cell in cells),
    }


def over_limits(cells, text):
    """Complaints about a chapter's cells and the text of its page."""
    counts, size = count(cells), len(text.encode())
    few = [f"{counts[key]} {key}, at least {n}" for key, n in AT_LEAST.items() if counts[key] < n]
    many = [f"{counts['cells']} cells, at most {CELLS}"] if counts["cells"] > CELLS else []
    return few + many + ([f"{size} bytes, at most {BYTES}"] if size > BYTES else [])


# ---- command --------------------------------------------------------------------------------


def build(path, check):
    """Execute one chapter; write its page, or compare. Returns complaints."""
    target = path.with_suffix(".ipynb")
    if check and not target.exists():
        return [f"{target.name} is missing; write it with build.py {path.name[:2]}"]
    complaints = rehearse(path)
    start = time.perf_counter()
    fresh = execute(notebook(read(path)))
    seconds, text = time.perf_counter() - start, dumps(fresh)
    complaints += over_limits(read(path), text)
    if seconds > SECONDS:
        complaints.append(f"{seconds:.0f} s, at most {SECONDS}")
    if check:
        complaints += differences(loads(target.read_text(encoding="utf-8")), fresh)
    elif not complaints:
        target.write_text(text, encoding="utf-8")
        if path.stem == f"00_{README_FIGURE.stem}":
            README_FIGURE.write_bytes(first_figure(fresh))
    counts = ", ".join(f"{n} {key}" for key, n in count(read(path)).items())
    print(f"{path.stem}: {counts}; {seconds:.1f} s, {len(text) / 1000:.0f} kB")
    return complaints


def first_figure(page_dict):
    """The PNG of a page's first figure, as bytes."""
    outputs = [o for cell in page_dict["cells"] for o in cell.get("outputs", [])]
    shown = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return base64.b64decode(shown[0])


def refresh_text(path):
    """New prose and line links in the committed page, outputs kept; refuses new code."""
    target = path.with_suffix(".ipynb")
    old, new = loads(target.read_text(encoding="utf-8")), notebook(read(path))
    code = [[c["source"] for c in p["cells"] if c["cell_type"] == "code"] for p in (old, new)]
    if code[0] != code[1]:
        return [f"code changed; execute it with build.py {path.name[:2]}"]
    ran = iter([cell for cell in old["cells"] if cell["cell_type"] == "code"])
    for cell in new["cells"]:
        if cell["cell_type"] == "code":
            before = next(ran)
            cell |= {key: before[key] for key in ("outputs", "execution_count")}
    target.write_text(dumps(new), encoding="utf-8")
    return []


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Execute the chapters into notebooks.")
    parser.add_argument("chapters", nargs="*", metavar="NN", help="numbers; default: all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="compare with the committed pages")
    how.add_argument("--text", action="store_true", help="refresh prose and links, execute nothing")
    options = parser.parse_args(arguments)
    failed, start = False, time.perf_counter()
    for path in chapters(options.chapters):
        try:
            complaints = refresh_text(path) if options.text else build(path, options.check)
        except Exception as error:  # a failing cell, a time-out, a dead kernel
            complaints = [f"{type(error).__name__}: {_plain(error)}"]
        for complaint in complaints:
            print(f"{path.stem}: {complaint}", file=sys.stderr)
        failed = failed or bool(complaints)
    seconds = time.perf_counter() - start
    if seconds > ALL_SECONDS:
        print(f"all: {seconds:.0f} s, at most {ALL_SECONDS}", file=sys.stderr)
    return int(failed or seconds > ALL_SECONDS)


def _plain(error):
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()


if __name__ == "__main__":
    sys.exit(main())
