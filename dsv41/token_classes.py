"""Which tokens count as the same word? (Engram's token folding)

Engram hashes classes, not ids: " The", "the" and "THE" are one class. Every id is decoded alone,
its text is normalised, and equal texts share a class, numbered in order of first appearance:

    NFKC, NFD, drop all marks (Mn, Mc, Me), lowercase, runs of blanks to one space, strip

A lone space stays a space; a text that normalises to nothing is kept as it was; a token that is
not whole UTF-8 (it decodes to U+FFFD) is known by its spelling in the vocabulary. The count
matters as much as the classes, since the hash multipliers are drawn from it: 99,092 for the
released tokenizer. Source: inference/engram.py of the release; the steps are those of the
`tokenizers` library, whose results a test compares with this text. Nothing but tokenizer.json is
needed here.
"""

import json
import re
import unicodedata
from pathlib import Path

import numpy as np

# what the tokenizers library strips: Unicode White_Space, without the separators U+001C .. U+001F
SPACES = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    chr(c) for c in range(0x2000, 0x200B)
)
BLANKS = re.compile(r"[ \t\r\n]+")
REPLACEMENT = "\ufffd"


def token_classes(texts, spellings):
    """texts: decoded text of every id; spellings: its vocabulary string -> classes (V,) int64."""
    seen = {}
    keys = (fold(text, spelling) for text, spelling in zip(texts, spellings, strict=True))
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.int64)


def fold(text, spelling):
    """The key under which a token's text is filed."""
    if REPLACEMENT in text:
        return spelling
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c)[0] != "M")
    folded = "".join(c.lower() for c in folded)  # letter by letter: no final-sigma rule
    folded = BLANKS.sub(" ", folded)
    if folded != " ":
        folded = folded.strip(SPACES)
    return folded or text


def load_token_classes(directory):
    """Classes (V,) int64 from a directory's tokenizer.json, or from tokens.json with the decoded
    texts ("text") and vocabulary strings ("vocab") of all ids.
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        return token_classes(*decode_vocabulary(read_json(directory / "tokenizer.json")))
    if (directory / "tokens.json").exists():
        tokens = read_json(directory / "tokens.json")
        if not isinstance(tokens, dict) or not tokens.get("text") or not tokens.get("vocab"):
            raise ValueError("tokenizer: tokens.json needs lists under text and vocab")
        return token_classes(tokens["text"], tokens["vocab"])
    raise ValueError(f"tokenizer: Engram needs {directory / 'tokenizer.json'}, which is missing")


def decode_vocabulary(tokenizer):
    """tokenizer: a parsed tokenizer.json with a byte-level BPE -> texts, spellings of all ids."""
    try:
        tokenizer["model"]["vocab"].items()
    except (TypeError, KeyError, AttributeError):
        raise ValueError("tokenizer: no model.vocab in the file") from None
    spelling = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    spelling |= {t["id"]: t["content"] for t in tokenizer.get("added_tokens", [])}
    if sorted(spelling) != list(range(len(spelling))):
        raise ValueError("tokenizer: token ids are not 0, 1, 2, ... without holes")
    spellings = [spelling[id] for id in range(len(spelling))]
    return [_decode(s) for s in spellings], spellings


def _decode(spelling):
    """Byte-level spelling -> text; a character outside the byte alphabet makes it plain text."""
    if all(c in BYTE_OF for c in spelling):
        return bytes(BYTE_OF[c] for c in spelling).decode("utf-8", errors="replace")
    return spelling


def _byte_alphabet():
    """Character -> byte: printable Latin-1 stands for itself, the rest is moved above U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


BYTE_OF = _byte_alphabet()


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"tokenizer: {path} is not JSON ({error})") from None
