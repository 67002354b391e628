"""python -m dsv41 train CONFIG: what is a run made of, from the command line?

CONFIG is a JSON object: "model" a preset's name, "run" the fields of loop.Run, "recall" how a
recall document is made (facts, questions), and where it goes on from another model, "start", that
model's directory. The corpus folder is what `python -m dsv41 data` wrote.
The run's folder gets log.jsonl, state.npz to resume from, model/ in the released layout with the
tokenizer beside it, and loss.png where matplotlib is installed. `--minutes` ends a session early;
the same command goes on where it stopped.
"""

import json
import shutil
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint, load_params
from ..dispatch import to_host
from ..figures import draw_losses
from ..presets import preset
from ..save import save
from ..tensors import flatten, nest
from ..token_classes import load_token_classes
from ..tokenizer import load_tokenizer
from . import recall
from .data import DATA, load_ids
from .loop import Trainer
from .packing import BOS, EOS
from .run import Run

SHORTEST = 8  # recall documents in one sample, at most
SAVE_SECONDS = 60


def main_train(arguments):
    """The command: config, corpus, out (Paths), device, minutes."""
    description = read_description(arguments.config)
    trainer, heldout = open_run(description, arguments.corpus, arguments.out, arguments.device)
    asked = recall_probes(description, arguments.corpus)
    until = time.monotonic() + 60 * arguments.minutes if arguments.minutes else np.inf
    run, stopped, saved = trainer.run, stop_signals(), time.monotonic()
    print(f"{run.all_steps - trainer.done} of {run.all_steps} steps to go", file=sys.stderr)
    while trainer.done < run.all_steps and time.monotonic() < until and not stopped:
        record = trainer.step()
        is_due = trainer.done % run.evaluate_every == 0 or trainer.done == run.steps
        if is_due and trainer.done <= run.steps:
            record["heldout"] = trainer.evaluate(*heldout)
            record["recall"] = trainer.recall(asked) if asked else {}
        trainer.log(record)
        _show(record, run.all_steps)
        if trainer.done % run.save_every == 0 or time.monotonic() - saved > SAVE_SECONDS:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
    export(trainer, arguments.out / "model")
    _draw(arguments.out)


def stop_signals():
    """-> a list that holds something once the process is asked to end: the step in flight is
    finished and saved. A kill that cannot be heard loses what SAVE_SECONDS have done.
    """
    heard = []
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda number, _: heard.append(number))
    return heard


def read_description(path):
    """A run's JSON file -> dict with "model", "run" (a Run), "recall" and "start"."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config: no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path} is not JSON ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("run"), dict) or "model" not in raw:
        raise ValueError(f'config: {path} needs an object with "model" and "run"')
    known = {f.name for f in fields(Run)}
    if unknown := set(raw["run"]) - known:
        raise ValueError(f"run: no field {', '.join(sorted(unknown))} in {path}")
    run, recall_sizes = Run(**raw["run"]), raw.get("recall")
    if run.recall and set(recall_sizes or ()) != {"facts", "questions"}:
        raise ValueError(f'recall: {path} needs "facts" and "questions", got {recall_sizes}')
    start = raw.get("start")
    return {"model": preset(raw["model"]), "run": run, "recall": recall_sizes, "start": start}


def open_run(description, corpus, out, device="cpu"):
    """-> Trainer, resumed if `out` has a state, and what `evaluate` takes: documents, bytes."""
    config, run = description["model"], description["run"]
    documents = [ids for ids in load_ids(corpus, "train") if len(ids)]
    classes = load_token_classes(DATA / "tokenizer")
    more = RecallDocuments(documents, run, description["recall"]) if run.recall else None
    like = None
    if device == "cuda":
        from dsv41_kernels.device import cuda_like

        like = cuda_like()
    start = starting_params(config, description["start"]) if description["start"] else None
    about = {"recall": description["recall"], "start": description["start"]}
    trainer = Trainer(config, run, documents, classes, out, more, like, start, about)
    return trainer, heldout_pieces(corpus, run.length)


def starting_params(config, directory):
    """The params of a checkpoint of this config, its drafter included."""
    checkpoint = Checkpoint(directory)
    if checkpoint.config != config:
        raise ValueError(f"start: the model in {directory} has another config than the run's")
    parts = ("text", "dspark") if config.num_nextn_predict_layers else ("text",)
    return load_params(checkpoint, parts=parts)


class RecallDocuments:
    """Recall documents of a step, from (seed, step) alone, with the corpus as filler.

    A sample is one document or is shared by 2, 4 or 8 shorter ones, whose facts are nearer: those
    are learned first, and the rest follows. Questions are as dense in all of them.
    """

    def __init__(self, documents, run, sizes):
        self.documents, self.run, self.sizes = documents, run, sizes
        self.words = recall.words_of(load_tokenizer(DATA / "tokenizer"))
        self.long = [n for n, ids in enumerate(documents) if len(ids) >= run.length]
        if not self.long:
            raise ValueError(f"recall: no document of {run.length} tokens to hide facts in")

    def __call__(self, step):
        generator, lengths = np.random.default_rng((self.run.seed, step, 1)), []
        for _ in range(self.run.recall):
            parts = 2 ** int(generator.integers(SHORTEST.bit_length()))  # 1, 2, 4 or 8
            lengths += [self.run.length // parts] * parts
        return [self._one(generator, length) for length in lengths]

    def _one(self, generator, length):
        filler = self.documents[self.long[generator.integers(len(self.long))]]
        start = generator.integers(max(1, len(filler) - length))
        filler = np.asarray(filler[start : start + length], np.int64)
        questions = max(1, self.sizes["questions"] * length // self.run.length)
        sizes = {"facts": self.sizes["facts"], "questions": questions}
        made = recall.document(generator, self.words, filler, length - 1, **sizes)
        return np.concatenate([[BOS], made.ids])


def heldout_pieces(corpus, length):
    """-> lists of at most 8 pieces of held-out documents, and the bytes of their text."""
    pieces = []
    for ids in load_ids(corpus, "heldout"):
        whole = np.concatenate([[BOS], ids, [EOS]]).astype(np.int64)
        # a later piece begins with the last token of the piece before, so that all are predicted
        pieces += [whole[at : at + length] for at in range(0, len(whole) - 1, length - 1)]
    text = json.loads((Path(corpus) / "manifest.json").read_text(encoding="utf-8"))
    return [pieces[i : i + 8] for i in range(0, len(pieces), 8)], text["heldout"]["bytes"]


def recall_probes(description, corpus, count=32):
    """`count` probes at each distance that fits into a sample, with held-out text between; none
    for a run without recall documents.
    """
    run = description["run"]
    if not run.recall:
        return []
    text = np.concatenate([np.asarray(ids) for ids in load_ids(corpus, "heldout")])
    words = recall.words_of(load_tokenizer(DATA / "tokenizer"))
    facts = description["recall"]["facts"]
    room = run.length - 2 * words.size * facts - words.size  # a probe's front is that long
    distances = [d for d in recall.DISTANCES if 64 < d <= room]
    generator = np.random.default_rng((run.seed, 3))
    return recall.probes(generator, words, text, distances, count, facts)


def export(trainer, directory):
    """Write the masters in the released layout, with the tokenizer, and read them back."""
    params = nest({name: to_host(leaf) for name, leaf in flatten(trainer.params).items()})
    for layer in trainer.config.engram_layer_ids:
        table = params["layers"][layer]["engram"]["embed"]["weight"]
        params["layers"][layer]["engram"]["embed"]["weight"] = np.asarray(table, np.float32)
    save(directory, trainer.config, params)
    shutil.copy(DATA / "tokenizer" / "tokenizer.json", directory)
    Checkpoint(directory).check()


def _draw(folder):
    """loss.png beside the log, where there is one and matplotlib is installed."""
    if not (folder / "log.jsonl").exists():
        return
    try:
        draw_losses(folder / "log.jsonl", folder / "loss.png")
    except ImportError as error:
        print(error, file=sys.stderr)


def _show(record, steps):
    bits = f"  held-out {record['heldout']:.4f} bits/byte" if "heldout" in record else ""
    for distance, share in record.get("recall", {}).items():
        bits += f"  recall {distance}: {share:.0%}"
    speed = record["tokens"] / record["seconds"]
    low, high = record["load"]
    names = ("index",) if "index" in record else ("tv", "confidence")
    others = "".join(f"  {name} {record[name]:.3f}" for name in names)
    print(
        f"step {record['step'] + 1}/{steps}  loss {record['loss']:.4f}{others}"
        f"  norm {record['norm']:.2f}  load {low:.2f}..{high:.2f}  {speed:,.0f} tokens/s{bits}",
        file=sys.stderr,
        flush=True,
    )
