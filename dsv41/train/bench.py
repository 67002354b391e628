"""How many tokens does the miniature learn from in a second, and what holds it back?

A few steps of the run in data/runs/mini/run.json, with the shipped training sample as corpus, on
random weights: the speed does not depend on what they are. The first step is not counted; it
compiles kernels and fills caches. Then one more step is watched: where the host spends its time, by
module of the package, and on a GPU how long kernels were running, where PyTorch is there to read
that. On a GPU the host only starts work, so a step takes the longer of the two, and more wherever
one waits for the other. `python -m dsv41 bench --train [--device cuda]` prints it.
"""

import cProfile
import pstats
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..token_classes import load_token_classes
from ..tokenizer import load_tokenizer
from .command import DATA, RecallDocuments, read_description
from .data import read_documents
from .loop import Trainer

ON_CPU = {"batch": 1, "recall": 0, "length": 2048}  # a whole step would take minutes


def report(device="cpu", steps=5):
    """Yield lines: the step's size, tokens/s and the share of its parts, then what was watched."""
    trainer = sample_trainer(device)
    try:
        yield from _timed(trainer, steps)
        yield from _watched(trainer, device)
    finally:
        trainer.scratch.cleanup()


def sample_trainer(device, config=DATA / "runs" / "mini" / "run.json"):
    """A Trainer of the run in `config` over the shipped sample, in a folder that goes away."""
    description = read_description(config)
    run = replace(description["run"], wide_until=0, **(ON_CPU if device == "cpu" else {}))
    tokenizer = load_tokenizer(DATA / "tokenizer")
    texts = read_documents(DATA / "corpus" / "train.txt")
    documents = [np.array(tokenizer.encode(text), np.int64) for text in texts]
    more = RecallDocuments(documents, run, description["recall"]) if run.recall else None
    like = None
    if device == "cuda":
        from dsv41_kernels.device import cuda_like

        like = cuda_like()
    classes, scratch = load_token_classes(DATA / "tokenizer"), tempfile.TemporaryDirectory()
    folder = Path(scratch.name)
    trainer = Trainer(description["model"], run, documents, classes, folder, more, like)
    trainer.scratch = scratch
    return trainer


def _timed(trainer, steps):
    trainer.step()
    records = [trainer.step() for _ in range(steps)]
    tokens, seconds = (sum(r[key] for r in records) for key in ("tokens", "seconds"))
    parts = np.sum([r["parts"] for r in records], axis=0) / seconds
    yield f"{tokens // steps:,} tokens a step, {steps} steps: {tokens / seconds:,.0f} tokens/s"
    names = ("data", "loss and gradients", "update")
    yield "  ".join(f"{name} {share:.0%}" for name, share in zip(names, parts, strict=True))


def _watched(trainer, device):
    """One step under the profiler: own time of the host by module."""
    profile = cProfile.Profile()
    profile.enable()
    seconds = trainer.step()["seconds"]
    profile.disable()
    stats, own, calls = pstats.Stats(profile).stats, Counter(), 0
    for (file, _, name), (_, count, mine, _, _) in stats.items():
        calls += count
        known = "dsv41" in file
        where = Path(file).with_suffix("").parts[-2:] if known else ("libraries", name)
        own["/".join(where) if known else "inside NumPy or CuPy"] += mine
    yield f"one step under the profiler: {seconds:.2f} s, {calls:,} function calls; own time"
    yield "  ".join(f"{name} {mine / seconds:.0%}" for name, mine in own.most_common(8))
    if device == "cuda":
        from dsv41_kernels.busy import kernels_of

        yield from kernels_of(lambda: trainer.step()["seconds"])
