"""A run of a few steps: learns, resumes bitwise, survives kills, names what is wrong."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import dsv41
from dsv41 import load
from dsv41.figures import draw_losses
from dsv41.presets import preset
from dsv41.tensors import flatten
from dsv41.token_classes import load_token_classes
from dsv41.train import loop
from dsv41.train.command import DATA, export, starting_params
from dsv41.train.gradients import clip, micro_batches
from dsv41.train.loop import Trainer
from dsv41.train.model import Documents, Options, evaluate
from dsv41.train.run import Run

CONFIG = dsv41.preset("tiny").but(vision_config=None)
CLASSES = np.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
RUN = Run(length=24, batch=2, steps=6, warmup=2, decay_from=3, quantised_from=4, save_every=2)


def documents():
    """Counting in a circle: the next token is always the one after."""
    starts = np.random.default_rng(0).integers(3, 200, 40)
    return [np.arange(start, start + 30) % 50 + 3 for start in starts]


def trainer(folder, run=RUN, config=CONFIG, **options):
    return Trainer(config, run, documents(), CLASSES, folder, **options)


def bits(trained):
    arrays = {**flatten(trained.params), **trained.optimizer.state_dict()}
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("straight"))
    return run, [run.step() for _ in range(6)]


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(straight, tmp_path):
    """Through the start of the quantised steps, with a state written and read in between."""
    for _ in range(3):
        part = trainer(tmp_path)
        for _ in range(2):
            part.step()
        part.save()
    assert part.done == 6
    assert bits(part) == bits(straight[0])


def test_the_loss_falls(tmp_path):
    run = trainer(tmp_path, replace(RUN, steps=30, peak=0.02, warmup=3, quantised_from=99))
    losses = [run.step()["loss"] for _ in range(25)]
    assert losses[0] > 5 and min(losses[-3:]) < losses[0] - 1


def test_a_step_reports_what_happened(straight):
    record = straight[1][5]
    assert record["step"] == 5 and record["tokens"] == 48
    assert record["loss"] > 0 and record["norm"] > 0 and record["seconds"] > 0
    low, high = record["load"]
    assert 0 <= low <= 1 <= high


def test_the_router_bias_follows_the_load_and_nothing_else_moves_it(straight):
    start = loop.to_masters(loop.random_params(CONFIG, np.random.default_rng(RUN.seed)))
    before, after = (p["layers"][3]["ffn"]["gate"]["bias"] for p in (start, straight[0].params))
    moved = np.abs(after - before)
    assert moved.max() <= 6 * 0.001 + 1e-6 and moved.max() >= 0.001 - 1e-6


def test_a_state_of_another_run_or_model_is_refused(tmp_path):
    run = trainer(tmp_path)
    run.save()
    with pytest.raises(ValueError, match=r"belongs to another (run|model)"):
        trainer(tmp_path, replace(RUN, peak=1.0))
    with pytest.raises(ValueError, match=r"belongs to another (run|model)"):
        trainer(tmp_path, config=CONFIG.but(routed_scaling_factor=1.0))
    assert trainer(tmp_path, replace(RUN, save_every=5)).done == 0


@pytest.mark.parametrize("room", [0.0, 0.5, 0.9999])
def test_a_disk_that_takes_part_of_a_state_leaves_the_last_good_one(tmp_path, room):
    """In a process whose files may only grow to that share of the state; the system says no."""
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
import test_train_loop as t
run = t.trainer({str(tmp_path)!r})
run.step(); run.save(); run.step()
most = int({room} * run.state_file.stat().st_size)
good = run.state_file.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    run.save()
except OSError as error:
    assert error.errno == 27, error  # EFBIG
    sys.exit(5 if run.state_file.read_bytes() == good else "the good state is gone")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.returncode == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]
    assert trainer(tmp_path).done == 1


def test_a_kill_during_a_save_loses_only_the_steps_since_the_last_one(tmp_path):
    """The process dies after writing half of the new state."""
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import numpy as np, test_train_loop as t
run = t.trainer({str(tmp_path)!r})
run.step(); run.save(); run.step()
np.savez = lambda file, **arrays: (file.write(b"half"), file.flush(), os._exit(9))
run.save()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.returncode == 9
    assert trainer(tmp_path).done == 1


def test_a_loss_that_is_not_finite_stops_with_the_step(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    before = bits(run)
    broken = lambda *_: (float("nan"), {}, {})  # noqa: E731
    monkeypatch.setattr(loop, "loss_and_grads", broken)
    with pytest.raises(FloatingPointError, match="the loss of step 0 is nan"):
        run.step()
    assert run.done == 0 and bits(run) == before


def test_the_first_gradient_that_is_not_finite_is_named():
    grads = {"a": np.ones(3, np.float32), "b": {"c": np.array([1, np.inf], np.float32)}}
    with pytest.raises(FloatingPointError, match=r"step 7: the gradient of b\.c is not finite"):
        clip(grads, 1.0, 7)


def test_clipping_scales_all_gradients_by_one_factor():
    rows = (np.array([2, 5]), np.full((2, 2), 3, np.float32))
    grads = {"a": np.full(7, 4, np.float32), "table": rows}
    norm = clip(grads, 1.0, 0)
    assert norm == pytest.approx(np.sqrt(7 * 16 + 4 * 9))
    assert grads["a"][0] / rows[1][0, 0] == pytest.approx(4 / 3)
    assert 7 * grads["a"][0] ** 2 + 4 * rows[1][0, 0] ** 2 == pytest.approx(1)
    assert clip(grads, 2.0, 0) == pytest.approx(1)


def test_recall_documents_join_the_batch(tmp_path):
    asked = []

    def more(step):
        asked.append(step)
        return [np.arange(10)]

    run = trainer(tmp_path, more=more)
    assert run.step()["tokens"] == 58
    assert asked == [0]


def test_held_out_bits_per_byte_by_hand(straight):
    """Three predicted tokens; the end of the document is not text and does not count."""
    run = straight[0]
    ids = np.array([0, 9, 10, 11, CONFIG.eos_token_id])
    weights, numerics = run._weights(run.done)
    nats, count = evaluate(weights, CONFIG, [ids[:-1]], numerics, Options(CLASSES))
    assert count == 3
    assert run.evaluate([[ids]], text_bytes=3) == pytest.approx(nats / 3 / np.log(2), rel=1e-5)


def test_micro_batches_give_the_gradients_of_the_whole_batch(tmp_path):
    """Engram rows are merged, losses weighted by their targets, loads added up."""
    whole, parts = trainer(tmp_path / "a"), trainer(tmp_path / "b", replace(RUN, micro=24))
    documents = whole._documents(0)
    assert len(micro_batches(documents, 24)) > 1
    (a, about_a), (b, about_b) = (t._loss_and_grads(documents, 0) for t in (whole, parts))
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    for name, ours in a.items():
        theirs = b[name]
        if isinstance(ours, tuple):
            assert np.array_equal(ours[0], theirs[0])
            ours, theirs = ours[1], theirs[1]
        if "indexer" not in name and "gate" not in name:  # their losses are means of their own
            assert np.abs(ours - theirs).max() < 2e-5 * max(1, np.abs(ours).max()), name
    assert about_a["losses"]["loss"] == pytest.approx(about_b["losses"]["loss"], rel=1e-5)
    for layer, counts in about_a["load"].items():
        assert np.array_equal(counts, about_b["load"][layer])


def test_the_drafter_learns_behind_the_last_step_and_alone(tmp_path):
    """Its loss falls, nothing of the frozen model moves, and micro-batches change nothing."""
    about = replace(RUN, steps=1, draft_steps=12, draft_peak=0.01, anchors=4, warmup=1)
    run, parts = trainer(tmp_path / "a", about), trainer(tmp_path / "b", replace(about, micro=24))
    run.step(), parts.step()
    before = {k: v.copy() for k, v in flatten(run.params).items()}
    records = [run.step() for _ in range(12)]
    assert records[-1]["tv"] < records[0]["tv"] and records[-1]["ce"] < records[0]["ce"]
    assert all(r["loss"] == r["ce"] and "index" not in r for r in records)
    for name, leaf in flatten(run.params).items():
        trains = name.startswith("mtp.")
        assert trains or np.array_equal(leaf, before[name]), name
    assert not np.array_equal(
        run.params["mtp"][0]["ffn"]["gate"]["bias"], before["mtp.0.ffn.gate.bias"]
    )
    assert parts.step()["ce"] == pytest.approx(records[0]["ce"], rel=0.01)


def test_selections_are_wide_at_first(tmp_path, monkeypatch):
    seen, plain = [], loop.loss_and_grads
    monkeypatch.setattr(
        loop, "loss_and_grads", lambda w, c, *a: (seen.append(c.index_topk), plain(w, c, *a))[1]
    )
    run = trainer(tmp_path, replace(RUN, wide_until=1, wide_topk=10))
    run.step(), run.step()
    assert seen == [10, CONFIG.index_topk]


def test_micro_batches_split_between_documents_only():
    documents = Documents([np.arange(n) for n in (5, 4, 12, 1, 1)])
    sizes = [[len(ids) for ids in part.ids] for part in micro_batches(documents, 9)]
    assert sizes == [[5, 4], [12], [1, 1]]
    assert len(micro_batches(documents, 0)) == 1


def test_log_lines_are_json(straight, tmp_path):
    run = trainer(tmp_path)
    run.log(straight[1][0])
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] == 48


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("length", 1, "expected 2 or more, got 1"),
        ("batch", 0, "expected 1 or more, got 0"),
        ("evaluate_every", 0, "expected 1 or more, got 0"),
        ("save_every", -3, "expected 1 or more, got -3"),
        ("draft_steps", -1, "expected 0 or more, got -1"),
        ("micro", -5, "expected 0 or more"),
        ("recall", 1.5, "expected a whole number, got 1.5"),
        ("length", "24", "expected a whole number, got '24'"),
        ("peak", 0, "expected 0 or more, got 0"),
        ("clip", float("nan"), "expected 0 or more, got nan"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=f"^{field}: {message}"):
        replace(RUN, **{field: value})


def test_documents_that_cannot_be_meant_are_refused(tmp_path):
    for some, run, message in [
        ([], RUN, "documents: there is none"),
        ([np.array([], int)], RUN, "documents: there is none"),
        ([np.array([9, CONFIG.vocab_size])], RUN, "documents: id 288 is outside 0 .. 287"),
        (documents(), replace(RUN, length=10**7), "length: samples of 10000000 tokens are longer"),
    ]:
        with pytest.raises(ValueError, match=message):
            Trainer(CONFIG, run, some, CLASSES, tmp_path)
    assert not list(tmp_path.iterdir())


# ---- what stops a run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.2.attn.wq_b.weight", "layers.4.ffn.gate.weight", "norm.weight"]
)
def test_a_weight_that_is_not_finite_is_named_with_the_step(tmp_path, name):
    run = trainer(tmp_path)
    run.step()
    flatten(run.params)[name].flat[3] = np.nan
    with pytest.raises(FloatingPointError, match=f"^step 1: {re.escape(name)} is not finite"):
        run.step()
    assert run.done == 1


def test_the_first_tensor_that_overflows_is_named(tmp_path):
    """Finite weights whose product is not: the trace knows where it began."""
    run = trainer(tmp_path)
    run.params["layers"][1]["attn"]["wo_b"]["weight"] *= np.float32(1e38)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match=r"^step 0: L0[12]\."):
        run.step()


def test_another_corpus_or_recall_is_another_run(tmp_path):
    trainer(tmp_path, about={"recall": {"facts": 3}}).save()
    with pytest.raises(ValueError, match=r"data: .*belongs to another data"):
        trainer(tmp_path, about={"recall": {"facts": 4}})
    with pytest.raises(ValueError, match=r"corpus: .*belongs to another corpus"):
        Trainer(CONFIG, RUN, documents()[1:], CLASSES, tmp_path)


def test_a_state_cut_short_is_one_clear_error(tmp_path):
    run = trainer(tmp_path)
    run.save()
    whole = run.state_file.read_bytes()
    for size in (0, 100, len(whole) // 2):
        run.state_file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"state: .*state\.npz cannot be read"):
            trainer(tmp_path)


def test_steps_that_are_done_again_stand_in_the_log_once(tmp_path):
    run = trainer(tmp_path)
    for number in range(4):
        run.log(run.step())
        if number == 1:
            run.save()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # torn by a kill
    (tmp_path / "state.77.tmp.npz").write_bytes(b"half")
    again = trainer(tmp_path)
    assert not (tmp_path / "state.77.tmp.npz").exists()
    again.log(again.step())
    steps = [json.loads(line)["step"] for line in open(tmp_path / "log.jsonl")]
    assert steps == [0, 1, 2]


def test_the_log_is_drawn(straight, tmp_path):
    run = trainer(tmp_path)
    for record in straight[1]:
        run.log({**record, "heldout": 3.0} if record["step"] == 5 else record)
    draw_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step"):
        draw_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")


def test_a_run_goes_on_from_a_checkpoint_that_stays_what_it_is(tmp_path):
    """The shipped miniature as masters: read as stored, they are the checkpoint's own numbers, and
    while only the drafter learns they remain so.
    """
    config, directory = preset("mini"), DATA / "mini"
    start = starting_params(config, directory)
    about = replace(RUN, steps=0, draft_steps=2, draft_peak=0.01, anchors=2, quantised_from=0)
    classes = load_token_classes(DATA / "tokenizer")
    run = Trainer(config, about, [np.arange(300, 340)], classes, tmp_path, start=start)
    before = {k: v.copy() for k, v in flatten(run.params).items()}
    run.step()
    export(run, tmp_path / "model")
    again, ids = load(tmp_path / "model"), np.arange(300, 350)
    assert np.array_equal(again.logits(ids), load(directory).logits(ids))
    moved = [k for k, v in flatten(run.params).items() if not np.array_equal(v, before[k])]
    assert moved and all(name.startswith("mtp.") for name in moved)


def test_a_checkpoint_of_another_config_is_no_start():
    with pytest.raises(ValueError, match=r"start: the model in .*mini has another config"):
        starting_params(CONFIG, DATA / "mini")


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="steps: expected some"):
        Run(steps=0)


def test_the_biases_speed_goes_from_one_end_to_the_other():
    """A router that stops following its loads with the rate stays uneven."""
    run = replace(RUN, steps=40, peak=1e-2, final=1e-4, warmup=4, decay_from=10, draft_steps=40)
    run = replace(run, bias_speed=3e-3, bias_final=5e-4)
    assert run.speed(4) == run.speed(9) == 3e-3
    assert run.speed(39) < run.speed(25) < run.speed(11) < 3e-3
    assert run.speed(39) == pytest.approx(5e-4, rel=0.05)
    assert run.speed(79) == pytest.approx(5e-4, rel=0.05), "the drafter's phase has ends of its own"
    assert replace(run, bias_final=3e-3).speed(39) == pytest.approx(3e-3), "constant, as released"
    assert replace(run, bias_final=0.0).speed(0) >= 0
