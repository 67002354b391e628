"""The package as others get it: from a wheel, without a GPU, without the repository around it."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "dsv41").glob("**/*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(out.glob("*.whl"))


def test_both_packages_import_from_a_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    tops = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"dsv41", "dsv41_kernels"}
    code = "import dsv41, dsv41_kernels, dsv41.cli; print(dsv41.__file__, dsv41_kernels.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert all(path.startswith(str(tmp_path)) for path in found.stdout.split())


def test_the_kernels_folder_shadows_no_other_package():
    """A package called `kernels` exists on PyPI; an __init__ here would hide it from our users."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_the_numpy_text_needs_no_gpu_library_and_no_framework(path):
    ours = {"dsv41_kernels"}  # imported where a model is moved to a GPU
    allowed = {*sys.stdlib_module_names, "numpy", "ml_dtypes", "matplotlib", "tokenizers", *ours}
    assert set(imports_of(path)) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_functions_fit_on_a_screen(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 25 or node.name.startswith(
                ("_v41_flash", "_tiny", "_mini", "_parser")
            ), node.name


def test_the_repository_reads_nothing_outside_itself():
    """No path leads out of the repository or into one machine."""
    tracked = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".md", ".toml", ".cu", ".cuh"}]
    skip = {".venv", "build", "out"}
    for path in tracked:
        if skip & set(path.relative_to(ROOT).parts) or path == Path(__file__):
            continue
        text = path.read_text()
        for word in ("../shared", "/work/", "/root/", "/tmp/"):
            assert word not in text, f"{path} mentions {word}"
