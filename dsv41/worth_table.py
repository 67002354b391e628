"""Ask a trained model what each of its parts is worth, and lay the answers out as a table.

`python -m dsv41 worth DIR` runs all of worth.py's questions on held-out text, one line as soon as
each is answered, and writes the numbers to a JSON file on request; `table` turns such numbers into
the lines that a README shows. Recall is asked 20 times at each distance. Source: worth.py.
"""

import json

import numpy as np

from .dispatch import replaced
from .model import load
from .quant import OFFICIAL
from .worth import (
    CACHES,
    bits_per_byte,
    chance,
    drafts,
    expert_shares,
    nothing,
    pieces,
    recall,
    replay,
    without_engram,
    without_pool,
)

DISTANCES, ASKED = (128, 512, 1024, 2048, 3072), 20
LENGTH = 4096  # tokens of a piece
SHOWN = {
    "bits per byte": "{:.4f}".format,
    "recall": lambda value: ", ".join(f"{d}: {share:.0%}" for d, share in value.items()),
    "replay": "{:.4f}".format,
    "drafts": "{kept:.2f} kept, {with:.1f} tokens/s with them, {without:.1f} without".format_map,
    "experts": "{:.2f}".format,
}


def report(model, documents, text_bytes, seed=0, say=print, only=tuple(SHOWN)):
    """Ask everything, or `only` these kinds -> {kind: {name: answer}}, in the order of worth.py's
    list.

    documents: arrays of ids, with `text_bytes` bytes of text in all; say: called with each line.
    """
    if unknown := set(only) - set(SHOWN):
        raise ValueError(f"only: expected some of {', '.join(SHOWN)}, got {min(unknown)!r}")
    parts = pieces(documents, LENGTH, model.config.bos_token_id, model.config.eos_token_id)
    kinds = {
        "bits per byte": _bits(model, parts, text_bytes, np.random.default_rng(seed)),
        "recall": _recall(model, np.concatenate(documents), seed),
        "replay": _replay(model, parts),
        "drafts": _drafts(model, parts),
        "experts": _experts(model, parts),
    }
    found = {}
    for kind in (kind for kind in kinds if kind in only):
        found[kind] = {}
        for name, value in kinds[kind]:
            found[kind][name] = value
            say(f"{kind:<15}{name:<34}{SHOWN[kind](value)}")
    return found


def _bits(model, parts, text_bytes, generator):
    yield "as shipped", bits_per_byte(model, parts, text_bytes)
    for name, numerics in CACHES.items():
        yield name, bits_per_byte(model, parts, text_bytes, numerics)
    yield "no Engram", bits_per_byte(without_engram(model), parts, text_bytes)
    if model.config.candidate_source_layer_id is not None:
        yield "no candidate pool", bits_per_byte(without_pool(model), parts, text_bytes)
    for name, ops in (("entries by chance", chance(generator)), ("windows only", nothing())):
        with replaced(**ops):
            value = bits_per_byte(model, parts, text_bytes)
        yield name, value


def _recall(model, text, seed):
    from .train.recall import probes, words_of

    words, generator = words_of(model.tokenizer), np.random.default_rng(seed)
    reach = [d for d in DISTANCES if d < len(text) - 600]
    asked = probes(np.random.default_rng(seed), words, text, reach, ASKED)
    ways = ("learned", {}), ("by chance", chance(generator)), ("nothing", nothing())
    for name, ops in ways if asked else ():
        with replaced(**ops):
            value = recall(model, asked)
        yield f"selected: {name}", value


def _replay(model, parts):
    texts = [ids[:1568] for ids in parts if len(ids) >= 1568][:12]
    near, alone, same = replay(model, texts) if texts else [float("nan")] * 3
    yield "KL(exact || bounded replay)", near
    yield "KL(exact || last window alone)", alone
    yield "share of equal best tokens", same


def _drafts(model, parts):
    prompts = [ids[:256] for ids in parts if len(ids) >= 256][:8]
    for temperature in (0.0, 1.0) if prompts else ():
        kept, with_them, without = drafts(model, prompts, 96, temperature)
        value = {"kept": kept, "with": with_them, "without": without}
        yield f"temperature {temperature:g}", value


def _experts(model, parts):
    yield from zip(("least", "most"), expert_shares(model, parts, OFFICIAL), strict=True)


def table(found):
    """What `report` found, or json read it back -> lines of a Markdown table."""
    rows = [
        f"| {kind} | {name} | {SHOWN[kind](value)} |"
        for kind in SHOWN
        for name, value in found.get(kind, {}).items()
    ]
    return "\n".join(["| measure | model | value |", "| --- | --- | --- |", *rows])


def main_worth(arguments):
    """The command: dir, text (Paths), bytes (int or None), json (Path or None), only (kinds)."""
    from .train.data import read_documents

    model, documents, size = load(arguments.dir), [], 0
    for text in read_documents(arguments.text):
        if arguments.bytes and size >= arguments.bytes:
            break
        documents.append(np.array(model.tokenizer.encode(text), np.int64))
        size += len(text.encode())
    if not size:
        raise ValueError(f"text: {arguments.text} holds no document")
    print(f"{arguments.dir}: {len(documents)} documents, {size:,} bytes of {arguments.text.name}")
    found = report(model, documents, size, only=arguments.only or tuple(SHOWN)) | {
        "text": {"documents": len(documents), "bytes": size},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
