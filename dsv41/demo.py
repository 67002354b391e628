"""What can be seen of the model in a minute, on a laptop?

With a trained checkpoint, the miniature in data/mini by default: its layers, the bytes of its
cache, a text it continues, a fact it finds again two thousand tokens later, drafts it accepts,
and how close a bounded replay comes. With the reference checkpoint of the tests: how many of the
released code's tensors it reproduces. Everything is computed when asked; nothing is a recording.
"""

import time
from pathlib import Path

import numpy as np

from . import FLOAT32, OFFICIAL, load
from .plan import format_plan

ROOT = Path(__file__).resolve().parent.parent
MINI, GOLDEN = ROOT / "data" / "mini", ROOT / "tests" / "golden" / "v41_tiny_a"
MODES = (("prompt_fp32", FLOAT32), ("prompt_bf16q", OFFICIAL))
PROMPT = "The str.split() method returns a list of the words in the string, using"


def demo(directory, say=print):
    """Show a checkpoint -> True unless something that should hold did not."""
    if not directory.exists():
        raise ValueError(f"dir: no checkpoint at {directory}")
    started = time.perf_counter()
    model = load(directory)
    say(f"{directory.name}: loaded in {time.perf_counter() - started:.2f} s\n")
    say(format_plan(model.config.plan) + "\n")
    show_cache(model, say)
    paths = [(directory / f"{stem}.npz", numerics) for stem, numerics in MODES]
    holds = [agrees(model, *pair, say) for pair in paths if pair[0].exists()]
    if (directory / "tokenizer.json").exists() and not holds:
        holds = [show_text(model, say), show_recall(model, say), show_replay(model, say)]
    if not holds:
        finite = np.isfinite(model.logits(range(min(8, model.config.vocab_size)))).all()
        say(f"no tokenizer and no reference arrays here; logits of 8 tokens are finite: {finite}")
    return all(holds)


def show_cache(model, say):
    """Bytes that an open request holds and that each further token adds, measured on the arrays."""
    cache = model.new_cache(OFFICIAL)
    model.open(cache)
    cache.reserve(0, 1)
    say(
        f"cache: {cache.bytes_per_token():,.2f} bytes per token of context, "
        f"{cache.bytes_per_request():,} bytes per request\n"
    )


def agrees(model, path, numerics, say):
    """Compare with the reference arrays in an .npz file -> whether all of them agree."""
    from .verify import compare_whole, load_arrays, prompt_ids

    arrays = load_arrays(path)
    started = time.perf_counter()
    found = compare_whole(model, arrays, numerics)
    seconds = time.perf_counter() - started
    within = [d for d in found if d.within]
    say(
        f"{numerics.name:<9} {len(prompt_ids(arrays))} tokens in {seconds:.2f} s: "
        f"{len(within)} of {len(found)} tensors agree with the reference, "
        f"logits within {found[-1].distance:.2g}"
    )
    return len(within) == len(found)


def show_text(model, say, prompt=PROMPT, tokens=80):
    """Continue a prompt, greedily and drafting -> whether the text is the one without drafts."""
    told, texts = [], []
    for draft in (False, True):
        text = model.generate(prompt, tokens, draft=draft, finished=told.append)
        texts.append("".join(text))
    say(f"prompt: {prompt}\n\n{prompt}{texts[1]}\n")
    plain, drafted = told
    say(f"without drafts: {plain}\nwith drafts:    {drafted}")
    say(f"the same text, token by token: {texts[0] == texts[1]}\n")
    return texts[0] == texts[1]


def show_recall(model, say, distance=2048, count=8):
    """Ask for facts that were named `distance` tokens ago -> whether 3 of 4 answers are right."""
    from .train.recall import chance, probe, words_of

    words, generator = words_of(model.tokenizer), np.random.default_rng(0)
    text = np.array(model.tokenizer.encode(heldout_text(60_000)))
    right = 0
    for number in range(count):
        asked = probe(generator, words, text, distance)
        cache = model.new_cache(OFFICIAL)
        ids = [model.config.bos_token_id, *asked.ids[:-1].tolist()]
        logits = model.step(cache, [model.open(cache)], [ids], tails=[1])
        guess, truth = int(np.argmax(logits)), int(asked.ids[-1])
        right += guess == truth
        if not number:
            question, said = (
                model.tokenizer.decode(x) for x in (asked.ids[-7:-1].tolist(), [guess])
            )
            say(f"...{question.strip()}{said}     (named {distance:,} tokens before)")
    blind, shown = chance(words)
    say(
        f"recall across {distance:,} tokens: {right} of {count}; "
        f"chance would give {count * blind:.1f}, any value shown {count * shown:.1f}\n"
    )
    return right >= 0.75 * count


def show_replay(model, say):
    """A stored prefix whose windows are gone -> whether replaying one window beats forgetting."""
    from .worth import replay

    ids = np.array(model.tokenizer.encode(heldout_text(12_000)))
    texts = [np.concatenate([[model.config.bos_token_id], ids[at : at + 1055]]) for at in (0, 1055)]
    near, far, same = replay(model, texts)
    say(
        f"bounded replay of {model.config.sliding_window} tokens behind a stored prefix of 1,024: "
        f"KL from the exact model {near:.4f} nats,\nwith the last window alone {far:.4f}; "
        f"the best next token is the same at {same:.0%} of positions"
    )
    return near < far


def heldout_text(characters):
    """The beginning of the held-out sample, which the miniature was not trained on."""
    path = ROOT / "data" / "corpus" / "heldout.txt"
    return path.read_text(encoding="utf-8")[:characters].replace("\f\n", "")
