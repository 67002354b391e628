"""How does a training run go, and how does it survive being killed?

    batch(step)                  a function of (seed, step): packed documents, recall documents
    loss_and_grads               float32 forward and hand-written backward (model.py)
    clip, optimizer, bias        one update; the router's biases follow the loads
    every `save_every` steps     weights, optimizer state and step in one file, replaced at once

A run that is resumed computes the same bits as one that never stopped, because nothing else is
random or remembered. From `quantised_from` on the forward pass reads every weight, activation and
cache record through the format it will be stored in (QAT): gradients pass straight through. Behind
the last of `steps` the model is frozen and its drafter learns for `draft_steps` more. On a CUDA
machine the same text runs on CuPy arrays. Source: report, sections 2.5 and 4.2; the sizes are
ours.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ..dispatch import beside, errors_at_end, to_host
from ..init import random_params
from ..quant import FLOAT32, OFFICIAL, WEIGHT_FP8
from ..tensors import flatten, nest
from .draft import draft_loss_and_grads, sample_anchors
from .gradients import accumulate, clip, micro_batches
from .losses import bits_per_byte
from .model import (
    Documents,
    Options,
    best_tokens,
    evaluate,
    first_not_finite,
    loss_and_grads,
    stored_weights,
)
from .optimizer import Optimizer
from .packing import BOS, Batches
from .recall import accuracy
from .run import check_documents, digest
from .schedule import balance_bias


class Trainer:
    """A run's weights, optimizer and place, and the data it reads.

    documents: list of 1-D id arrays. more(step) -> list of further id arrays for the step, or None.
    like: a CuPy array to train next to, or None. start: params to begin with, as `load_params`
    gives them, or None for random ones. about: what else makes the run what it is, in JSON's types.
    folder: where state.npz and log.jsonl live.
    """

    def __init__(
        self,
        config,
        run,
        documents,
        classes,
        folder,
        more=None,
        like=None,
        start=None,
        about=None,
    ):
        check_documents(documents, config, run)
        self.config, self.run, self.folder = config, run, Path(folder)
        self.classes, self.more, self.like = classes, more, like
        self.identity = [asdict(run), config.to_dict(), digest(documents), about]
        self.wide = config.but(index_topk=run.wide_topk) if run.wide_until else config
        self.batches = Batches(documents, run.length, run.batch, run.seed)
        start = start or random_params(config, np.random.default_rng(run.seed))
        self.params = to_masters(start, like)
        self.optimizer = Optimizer(config, self.params)
        self.done = 0  # steps
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("state.*.tmp.npz"):  # by a kill while saving
            left_over.unlink()
        if self.state_file.exists():
            self._load()
        self._cut_log()

    @property
    def state_file(self):
        return self.folder / "state.npz"

    def step(self):
        """One update -> a dict of what happened; seconds are of data, gradients and update."""
        clock, step = [time.perf_counter()], self.done
        documents = self._documents(step)
        clock.append(time.perf_counter())
        grads, info = self._learn(documents, step)
        norm = clip(grads, self.run.clip, step)  # reads all gradients, so a GPU has finished them
        clock.append(time.perf_counter())
        rate = self.run.rate(step)
        self.optimizer.step(grads, rate)
        self._balance(info["load"], step)
        self.done += 1
        clock.append(time.perf_counter())
        record = {"step": step, **info["losses"], "norm": norm, "rate": rate}
        record |= {"load": load_range(info["load"]), "tokens": sum(map(len, documents.ids))}
        record |= {"seconds": clock[-1] - clock[0]}
        return record | {"parts": np.diff(clock).round(4).tolist()}

    def _learn(self, documents, step):
        """Gradients of the step's phase; a number that is not finite stops it and is named."""
        learn = self._loss_and_grads if step < self.run.steps else self._draft_loss_and_grads
        try:
            with errors_at_end():
                return learn(documents, step)
        except (ValueError, FloatingPointError) as error:
            weights, numerics = self._weights(step)
            options = Options(self.classes)
            name = first_not_finite(weights, self.config, documents, numerics, options)
            if name is None:
                raise
            raise FloatingPointError(f"step {step}: {name} is not finite ({error})") from error

    def log(self, record):
        """Append a record to log.jsonl, numbers rounded to six digits."""
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(short) + "\n")

    def evaluate(self, documents, text_bytes):
        """Bits per byte of held-out documents (lists of ids, bos and eos included)."""
        nats = sum(self._nats(some) for some in documents)
        return bits_per_byte(nats, text_bytes)

    def recall(self, asked):
        """{distance: share of right answers} of a list of `recall.Recall`, a few at a time."""
        weights, numerics = self._weights(self.done)
        guesses, size = [], max(1, self.run.length * self.run.batch // len(asked[-1].ids))
        for begin in range(0, len(asked), size):
            some = asked[begin : begin + size]
            documents = [np.concatenate([[BOS], one.ids]) for one in some]
            first = np.cumsum([0, *map(len, documents)])[:-1]
            at = np.concatenate([f + one.answers for f, one in zip(first, some, strict=True)])
            options = Options(self.classes)
            found = best_tokens(weights, self.config, documents, at, numerics, options)
            guesses += np.split(found, np.cumsum([len(one.answers) for one in some])[:-1])
        return accuracy(asked, guesses)

    def save(self):
        """Write state.npz; a kill at any moment leaves the old file or the new one."""
        arrays = {f"params/{k}": to_host(v) for k, v in flatten(self.params).items()}
        arrays |= {f"state/{k}": to_host(v) for k, v in self.optimizer.state_dict().items()}
        arrays |= {"done": np.array(self.done), "run": np.array(json.dumps(self.identity))}
        temporary = self.folder / f"state.{os.getpid()}.tmp.npz"
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.state_file)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self):
        try:
            with np.load(self.state_file, allow_pickle=False) as file:
                saved = dict(file)
            found, self.done = json.loads(str(saved["run"])), int(saved["done"])
        except (ValueError, KeyError, EOFError, OSError, BadZipFile) as error:
            raise ValueError(f"state: {self.state_file} cannot be read ({error})") from None
        own = json.loads(json.dumps(self.identity))
        for what, a, b in zip(("run", "model", "corpus", "data"), found, own, strict=True):
            if _lasting(a) != _lasting(b):
                raise ValueError(f"{what}: {self.state_file} belongs to another {what}")
        params = {k[7:]: saved[k] for k in saved if k.startswith("params/")}
        state = {k[6:]: saved[k] for k in saved if k.startswith("state/")}
        self.params = nest({k: beside(v, self.like) for k, v in params.items()})
        self.optimizer = Optimizer(self.config, self.params)
        self.optimizer.load_state_dict(state)  # which copies each array to where its own lives

    def _cut_log(self):
        """Drop the log's lines behind the state: those steps are done again."""
        path = self.folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and _step(line) < self.done]
        if len(kept) < len(lines):
            path.write_text("".join(kept), encoding="utf-8")

    def _documents(self, step):
        packed = self.batches(step)
        ids = [
            row[segments == number]
            for row, segments in zip(packed.ids, packed.segments, strict=True)
            for number in range(segments.max() + 1)
        ]
        return Documents(ids + (self.more(step) if self.more else []))

    def _balance(self, load, step):
        """Move the biases of the routers that chose, of the model's layers or the drafter's."""
        part, speed = "layers" if step < self.run.steps else "mtp", self.run.speed(step)
        for layer, counts in load.items():
            balance_bias(self.params[part][layer]["ffn"]["gate"], counts, speed)

    def _weights(self, step):
        """What the forward pass reads at this step, and its numerics."""
        if step < self.run.quantised_from:
            return self.params, FLOAT32
        return stored_weights(self.params, self.config), OFFICIAL

    def _loss_and_grads(self, documents, step):
        """Gradients of the mean over all predicted tokens, micro-batch by micro-batch."""
        weights, numerics = self._weights(step)
        options = Options(self.classes, self.run.balance, self.run.index)
        config = self.wide if step < self.run.wide_until else self.config
        parts, grads, load = micro_batches(documents, self.run.micro), None, {}
        whole = len(documents.targets()[0])
        sums = {"next_token": 0.0, "index": 0.0, "balance": 0.0}
        for part in parts:
            loss, some, info = loss_and_grads(weights, config, part, numerics, options)
            if not np.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step} is {loss}")
            share = info["targets"] / whole
            grads = some if len(parts) == 1 else accumulate(grads, some, share)
            sums = {name: total + share * info[name] for name, total in sums.items()}
            load = {layer: load.get(layer, 0) + count for layer, count in info["load"].items()}
        losses = {"loss": sums["next_token"], "index": sums["index"], "balance": sums["balance"]}
        return grads, {"losses": losses, "load": load}

    def _draft_loss_and_grads(self, documents, step):
        """The drafter's gradients, micro-batch by micro-batch, at anchors drawn for the step."""
        weights, numerics = self._weights(step)
        generator, parts = np.random.default_rng((self.run.seed, step, 2)), []
        for part in micro_batches(documents, self.run.micro):
            part = Documents([ids for ids in part.ids if len(ids) > 2])
            parts.append((part, sample_anchors(part, self.run.anchors, generator)))
        whole, grads, losses, load = sum(len(a) for _, some in parts for a in some), None, {}, {}
        for part, anchors in parts:
            loss, some, info = draft_loss_and_grads(
                weights, self.config, part, anchors, numerics, Options(self.classes)
            )
            if not np.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step} is {loss}")
            share = sum(map(len, anchors)) / whole
            grads = some if len(parts) == 1 else accumulate(grads, some, share)
            for name in ("ce", "tv", "confidence"):
                losses[name] = losses.get(name, 0.0) + share * info[name]
            for stage, count in info["load"].items():  # drafts are text
                load[stage] = load.get(stage, 0) + np.stack([count, 0 * count])
        return grads, {"losses": {"loss": losses["ce"], **losses}, "load": load}

    def _nats(self, documents):
        weights, numerics = self._weights(self.done)
        wanted = [ids != self.config.eos_token_id for ids in documents]
        asked = Documents(documents, wanted=wanted)
        return evaluate(weights, self.config, asked, numerics, Options(self.classes))[0]


def _lasting(description):
    """A description without what may change when a run goes on."""
    if not isinstance(description, dict):
        return description
    return {k: v for k, v in description.items() if not k.endswith("_every")}


def _step(line):
    return json.loads(line)["step"]


def to_masters(params, like=None):
    """Dense params with Engram tables decoded, as float32 masters of their own beside `like`."""
    leaves = {}
    for name, leaf in flatten(params).items():
        if name.endswith("engram.embed.scale"):
            continue
        if name.endswith("engram.embed.weight"):
            scale = flatten(params)[name.removesuffix("weight") + "scale"]
            leaf = WEIGHT_FP8.dequantize(leaf, scale)
        leaves[name] = beside(np.array(leaf, np.float32), like)
    return nest(leaves)


def load_range(load):
    """{layer: (2, E)} -> the smallest and largest share of a text expert, times E, over layers."""
    shares = [to_host(x[0]) / max(int(to_host(x[0]).sum()), 1) * x.shape[1] for x in load.values()]
    return [float(np.min(shares)), float(np.max(shares))]
