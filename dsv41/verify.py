"""Where does another run of this model depart from ours, and where first?

Stored intermediates (an .npz under the names of trace.py, with the token ids as `ids`) are
compared in two ways:

    whole      one run from the ids; the first departing tensor, in the order of computation
    by layer   every block run alone from the stored input of that block: streams, pre, the sources'
               main KV, index keys, selections and pool

The first answers "do we agree"; after one rounding that fell the other way everything behind it
may differ, and only the second tells which layers really compute something else. Limits: choices
and masks equal; FLOAT32 within 5e-5 (scores 1e-4) absolute; OFFICIAL within 1e-6 absolute,
which for bf16 values above 2^-12 means equal.
"""

from dataclasses import dataclass

import numpy as np

from .batch import make_batch
from .call import Call, Shared
from .ced import block
from .model import engram_rows
from .quant import OFFICIAL


@dataclass(frozen=True)
class Departure:
    """One tensor's distance: worst element, both values there, and whether it is within limits."""

    name: str
    distance: float
    index: tuple
    ours: object
    theirs: object
    within: bool

    def __str__(self):
        if self.within:
            return f"{self.name:<18} agrees, largest distance {self.distance:.3g}"
        where = ", ".join(str(i) for i in self.index)
        return (
            f"{self.name:<18} departs by {self.distance:.3g} at [{where}]: "
            f"ours {self.ours}, theirs {self.theirs}"
        )


def load_arrays(path):
    """Stored intermediates as a dict; only plain arrays, never pickles."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise ValueError(f"arrays: no file {path}") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"arrays: {path} is not an .npz of plain arrays ({error})") from None
    if "ids" not in arrays:
        raise ValueError(f"arrays: {path} holds no token ids under the name ids")
    return arrays


def compare_whole(model, arrays, numerics=OFFICIAL):
    """Run the stored ids once -> list of Departure, in the order of computation, logits last."""
    ids = prompt_ids(arrays)
    trace = {}
    types, embedding = arrays.get("token_types"), arrays.get("embedding")
    if types is None:
        embedding = None  # the stored embedding is only a trace: compare it, do not feed it
    trace["logits"] = None
    logits = model.logits(
        ids, numerics, trace, token_types=types, embedding=embedding, batch_invariant=False
    )
    del trace["logits"]
    trace["logits"] = logits
    stored = {**arrays, "logits": _first_request(arrays, "logits", logits.ndim)}
    return [
        compare(name, value, stored[name], numerics)
        for name, value in trace.items()
        if stored.get(name) is not None
    ]


def compare_by_layer(model, arrays, numerics=OFFICIAL):
    """Run every block alone from its stored input -> {layer: list of Departure}.

    Layers whose inputs are not all stored are left out.
    """
    return {
        layer.index: [
            compare(name, value, arrays[name], numerics)
            for name, value in run_layer(model, arrays, layer, numerics).items()
            if name in arrays
        ]
        for layer in model.config.plan
        if all(name in arrays for name in inputs_of(layer))
    }


def prompt_ids(arrays):
    """The ids of the first request, cut to the rows that the stored logits cover."""
    ids = arrays["ids"]
    ids = ids[0] if ids.ndim == 2 else ids
    return ids[: arrays["logits"].shape[-2]] if "logits" in arrays else ids


def inputs_of(layer):
    """Names of the stored tensors that a block needs."""
    before = layer.index - 1
    names = [f"L{before:02d}.x_out", f"L{before:02d}.hc_ffn.pre"] if layer.index else ["embedding"]
    if layer.mode in ("reuse", "reindex"):
        names.append(f"L{layer.kv_source:02d}.cmp.main_kv")
    if layer.mode == "reindex":
        names.append(f"L{layer.kv_source:02d}.idx.k")
    if layer.mode == "reuse":
        names.append(f"L{layer.index_source:02d}.idx.topk")
    if layer.candidates == "consume":
        names.append(f"L{layer.kv_source:02d}.cand.mask")
    return names


def run_layer(model, arrays, layer, numerics):
    """One block from its stored input -> the trace of that block."""
    config, trace = model.config, {}
    ids = prompt_ids(arrays)
    cache = model.new_cache(numerics)
    types = arrays.get("token_types")
    batch = make_batch([ids], [0], [model.open(cache)], None if types is None else [types])
    cache.begin(batch)
    memory = engram_rows(config, model.classes, batch, cache)
    shared = _stored_sources(arrays, layer, cache, config, numerics)
    call = Call(batch, cache, config, numerics, memory, shared, trace)
    streams, pre = _stored_streams(arrays, layer, config)
    block(streams, pre, model.params["layers"][layer.index], layer, call)
    return trace


def _stored_streams(arrays, layer, config):
    if layer.index:
        before = f"L{layer.index - 1:02d}"
        return arrays[f"{before}.x_out"], arrays[f"{before}.hc_ffn.pre"]
    streams = np.repeat(arrays["embedding"][:, None], config.hc_mult, axis=1)
    pre = np.zeros(streams.shape[:2], np.float32)
    pre[:, 0] = 1
    return streams, pre


def _stored_sources(arrays, layer, cache, config, numerics):
    """Put what the block reads of other layers into the cache and a fresh Shared."""
    shared = Shared()
    kv, keys, topk, mask = (
        arrays.get(f"L{source:02d}.{name}") if source is not None else None
        for source, name in (
            (layer.kv_source, "cmp.main_kv"),
            (layer.kv_source, "idx.k"),
            (layer.index_source, "idx.topk"),
            (layer.kv_source, "cand.mask"),
        )
    )
    if layer.mode in ("reuse", "reindex"):
        at = cache.rows(layer.kv_source, 0, np.arange(len(kv)))
        cache.main_kv[layer.kv_source][at] = numerics.main_kv.encode(kv)
        if layer.mode == "reindex":
            cache.index[layer.kv_source][at] = numerics.index.encode(keys)
        else:
            shared.selected[layer.index_source] = topk.astype(np.int64)
    if layer.candidates == "consume":
        shared.pool = _blocks_of(mask, config)
    return shared


def _blocks_of(mask, config):
    """Candidate mask (T, N) -> block numbers (T, B), ascending, -1 padded."""
    size, budget = config.candidate_block_size, config.candidate_topk_blocks
    padded = np.pad(mask, ((0, 0), (0, -mask.shape[1] % size)))
    kept = padded.reshape(len(mask), -1, size).any(axis=2)
    blocks = np.full((len(mask), budget), -1)
    for row, found in enumerate(map(np.flatnonzero, kept)):
        blocks[row, : len(found)] = found
    return blocks


def _first_request(arrays, name, ndim):
    value = arrays.get(name)
    return value[0] if value is not None and value.ndim > ndim else value


def compare(name, ours, theirs, numerics):
    """-> Departure. Shapes must agree; NaN agrees with nothing; -inf agrees with -inf."""
    if ours.shape != theirs.shape:
        return Departure(name, np.inf, (), f"shape {ours.shape}", f"shape {theirs.shape}", False)
    if ours.size == 0:
        return Departure(name, 0.0, (), None, None, True)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, 0.0, np.abs(a - b))
    distance = np.where(np.isnan(distance), np.inf, distance)
    index = np.unravel_index(np.argmax(distance), distance.shape)
    index = tuple(int(i) for i in index)
    worst = float(distance[index])
    limit = limit_of(name, theirs, numerics)
    return Departure(name, worst, index, ours[index], theirs[index], worst <= limit)


def limit_of(name, theirs, numerics):
    """Largest distance that still agrees."""
    if theirs.dtype.kind != "f":
        return 0.0
    if numerics.bf16:
        return 1e-6
    return 1e-4 if name.endswith("idx.score") else 5e-5
