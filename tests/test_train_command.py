"""python -m dsv41 train, from a description and a corpus to a model that loads."""

import json

import numpy as np
import pytest

from dsv41 import load
from dsv41.cli import main
from dsv41.train import bench, command
from dsv41.train.command import read_description

RUN = {"length": 256, "batch": 1, "recall": 1, "steps": 2, "warmup": 1, "quantised_from": 1}
RUN |= {"draft_steps": 1, "anchors": 2, "evaluate_every": 1}
DESCRIPTION = {"model": "mini", "recall": {"facts": 2, "questions": 3}, "run": RUN}


@pytest.fixture
def corpus(tmp_path):
    """A folder as `python -m dsv41 data` writes it, with two short splits."""
    rng, folder = np.random.default_rng(0), tmp_path / "corpus"
    folder.mkdir()
    for name, sizes in (("train", (700, 300)), ("heldout", (600,))):
        rng.integers(300, 4000, sum(sizes)).astype("<u2").tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.starts.npy", np.cumsum([0, *sizes]))
    (folder / "manifest.json").write_text(json.dumps({"heldout": {"bytes": 2000}}))
    return folder


def describe(tmp_path, **changes):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**DESCRIPTION, **changes}))
    return path


def train(capsys, *arguments):
    code = main(["train", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_a_run_stops_resumes_and_ends_in_a_model(capsys, tmp_path, corpus, monkeypatch):
    """One step and an early end; the rest with the drafter; then from the model, drafter alone."""
    monkeypatch.setattr(command.recall, "DISTANCES", (128,))
    out, where = tmp_path / "out", ("--corpus", corpus, "--out", tmp_path / "out")
    code, said = train(capsys, describe(tmp_path), *where, "--minutes", 1e-9)
    assert (code, "3 of 3 steps to go" in said) == (0, True)
    code, said = train(capsys, describe(tmp_path), *where)
    assert code == 0 and "step 3/3" in said and "recall 128:" in said
    log = [json.loads(line) for line in open(out / "log.jsonl")]
    assert [r["step"] for r in log] == [0, 1, 2] and "heldout" in log[1] and "tv" in log[2]
    assert (out / "loss.png").exists() and np.isfinite(load(out / "model").logits([0, 9])).all()

    alone = {"start": str(out / "model"), "run": RUN | {"steps": 0, "quantised_from": 0}}
    where = ("--corpus", corpus, "--out", tmp_path / "more")
    code, said = train(capsys, describe(tmp_path, **alone), *where)
    assert code == 0 and "step 1/1" in said
    ids = [0, 300, 400, 500]
    same = load(out / "model").logits(ids) == load(tmp_path / "more" / "model").logits(ids)
    assert same.all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", 'needs an object with "model" and "run"'),
        ('{"run": {}}', 'needs an object with "model" and "run"'),
        ('{"model": "mini"}', 'needs an object with "model" and "run"'),
        ('{"model": "mini", "run": {"lenght": 3}}', "run: no field lenght"),
        ('{"model": "mini", "run": {"length": "256"}}', "length: expected a whole number"),
        ('{"model": "mini", "run": {"recall": 1}}', 'recall: .* needs "facts" and "questions"'),
        ('{"model": "maxi", "run": {}}', "preset: expected one of"),
        ("{", "is not JSON"),
    ],
)
def test_a_description_that_is_wrong_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_description(path)


def test_a_corpus_that_is_missing_or_empty_is_one_clear_line(capsys, tmp_path, corpus):
    code, said = train(capsys, describe(tmp_path), "--corpus", tmp_path / "nowhere")
    assert code == 2 and "corpus: no train documents in" in said and "dsv41 data" in said
    np.save(corpus / "train.starts.npy", np.array([0]))
    code, said = train(capsys, describe(tmp_path), "--corpus", corpus)
    assert code == 2 and "are empty" in said


def test_documents_too_short_to_hide_facts_in(capsys, tmp_path, corpus):
    path = describe(tmp_path, run=RUN | {"length": 2048})
    code, said = train(capsys, path, "--corpus", corpus, "--out", tmp_path / "out")
    assert code == 2 and "recall: no document of 2048 tokens" in said


def test_the_benchmark_says_speed_shares_and_what_the_host_does(monkeypatch):
    monkeypatch.setattr(bench, "ON_CPU", {"batch": 1, "recall": 0, "length": 64})
    lines = list(bench.report(steps=1))
    assert "tokens/s" in lines[0] and "loss and gradients" in lines[1]
    assert "function calls" in lines[2] and "%" in lines[3]
