import shutil

import numpy as np
import pytest
from reference import GOLDEN

from dsv41.cli import main


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_demo_prints_plan_cache_and_agreement(capsys):
    code, out, _ = run(capsys, "demo", GOLDEN)
    assert code == 0
    assert "reindex" in out and "106.00 bytes per token" in out
    assert "153 of 153 tensors agree" in out and "123 of 123 tensors agree" in out


def test_inspect_lists_plan_axes_and_tensors(capsys):
    code, out, _ = run(capsys, "inspect", GOLDEN, "--axes")
    assert code == 0
    assert "publish" in out and "attention heads" in out
    assert "routed experts" in out and "F8_E8M0" in out


def test_ledger_prints_the_family_and_draws_the_figures(capsys, tmp_path):
    code, out, _ = run(capsys, "ledger", "--figures", tmp_path)
    assert code == 0
    assert "890" in out and "3,514.25" in out and "389,120" in out
    for name in ("kv_bytes.png", "decode_flops.png", "strategies.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_ledger_of_a_directory(capsys):
    code, out, _ = run(capsys, "ledger", GOLDEN)
    assert code == 0
    assert "106" in out


def test_verify_agrees_with_the_reference(capsys):
    code, out, _ = run(capsys, "verify", GOLDEN, GOLDEN / "prompt_bf16q.npz")
    assert code == 0
    assert out == "one run: 123 of 123 tensors agree\n"


def test_verify_names_the_first_departure_and_the_layer_that_computes_something_else(
    capsys, tmp_path
):
    """A departure in layer 3 spreads to all later layers; only layer 3 itself is to blame."""
    with np.load(GOLDEN / "prompt_fp32.npz") as archive:
        arrays = dict(archive)
    arrays["L03.attn.out"] = arrays["L03.attn.out"] + 0
    arrays["L03.attn.out"][70, 5] += 1
    np.savez(tmp_path / "other.npz", **arrays)
    code, out, _ = run(capsys, "verify", GOLDEN, tmp_path / "other.npz", "--numerics", "float32")
    assert code == 1
    assert out.startswith("L03.attn.out")
    assert "departs by 1 at [70, 5]" in out
    assert "layer 2 from its stored input: all" in out
    assert "layer 3 from its stored input: first L03.attn.out" in out
    assert "layer 4 from its stored input: all" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "nowhere"], "dir: no checkpoint at nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", GOLDEN / "config.json"], "config.json"),
        (["demo", GOLDEN / "config.json"], "config.json"),
        (["generate", GOLDEN, "--prompt", f"@{GOLDEN}"], str(GOLDEN)),
        (["generate", GOLDEN, "--prompt", " ", "--store", GOLDEN / "config.json"], "config.json"),
        (["verify", GOLDEN, "nowhere.npz"], "arrays: no file nowhere.npz"),
        (["verify", GOLDEN, GOLDEN / "config.json"], "not an .npz"),
        (["ledger", "--context", "0"], "context: expected positive"),
        (["ledger", "nowhere"], "config: no file"),
        (["bench", "--prompt", "0"], "prompt: expected"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and message in err


def test_inspect_of_a_broken_directory_names_what_is_missing(capsys, tmp_path):
    shutil.copy(GOLDEN / "config.json", tmp_path)
    code, _, err = run(capsys, "inspect", tmp_path)
    assert code == 2
    assert "model.safetensors" in err


def test_demo_without_reference_arrays_says_so(capsys, tmp_path):
    for name in ("config.json", "model.safetensors", "tokens.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    code, out, _ = run(capsys, "demo", tmp_path)
    assert code == 0
    assert "no reference arrays here" in out and "finite: True" in out


def test_bench_prints_both_models(capsys):
    code, out, _ = run(capsys, "bench", "--prompt", "8", "--steps", "1")
    assert code == 0
    assert out.count("t/s") == 24 + 6 and "10M, tokens of context" in out
