"""How does text become token ids, and how do ids become text again?

    t = load_tokenizer(directory)
    t.encode("Hi <｜User｜>")                  plain text: no special token, whatever is spelled
    t.encode("Hi <｜User｜>", special=True)    trusted text: `<｜User｜>` is one id
    s = t.stream(); s.push(id); s.flush()     text as soon as it is whole, never half a character

A token is a string of bytes, and decoding is joining them; one character may take several tokens.
The byte-pair encoding of tokenizer.json is left to the `tokenizers` library, without the file's
added tokens: with them it finds `<｜User｜>` and `<think>` in any text, since they are not marked
special. A directory with tokens.json instead (the test model) gets the longest known text at every
position, which cannot cover every text. Source: tokenizer.json of the release.
"""

import codecs
import json
import re
from pathlib import Path

from .token_classes import BYTE_OF, REPLACEMENT, decode_vocabulary, read_json

IMAGE = "<｜deepseek_image｜>"  # one position of a picture; never text


def load_tokenizer(directory):
    """Tokenizer of a directory with tokenizer.json, or with tokens.json ("text" and "vocab").

    ValueError when it has neither; ImportError when tokenizer.json is there, its library is not.
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        parsed = read_json(directory / "tokenizer.json")
        texts, spellings = decode_vocabulary(parsed)
        special = {token["content"]: token["id"] for token in parsed.get("added_tokens", [])}
        return Tokenizer(_bytes(texts, spellings), special, _pair_encoder(parsed))
    if (directory / "tokens.json").exists():
        tokens = read_json(directory / "tokens.json")
        texts = tokens["text"]
        special = {s: i for i, s in enumerate(texts) if re.fullmatch("<｜.+｜>", s)}
        return Tokenizer(_bytes(texts, tokens["vocab"]), special, _greedy_encoder(texts, special))
    raise ValueError(f"directory: {directory} has neither tokenizer.json nor tokens.json")


def _bytes(texts, spellings):
    """Bytes of every id. Half a character has no text of its own, only a byte-level spelling."""
    return [
        bytes(BYTE_OF[c] for c in spelling) if REPLACEMENT in text else text.encode()
        for text, spelling in zip(texts, spellings, strict=True)
    ]


def _pair_encoder(parsed):
    """A parsed tokenizer.json -> function text -> ids, which knows no added token."""
    try:
        from tokenizers import Tokenizer as PairEncoder
    except ImportError:
        message = "tokenizer.json needs the tokenizers library: pip install dsv41[text]"
        raise ImportError(message) from None
    plain = {**parsed, "added_tokens": [], "truncation": None, "padding": None}
    encoder = PairEncoder.from_str(json.dumps(plain))
    return lambda text: encoder.encode(text, add_special_tokens=False).ids


def _greedy_encoder(texts, special):
    """Decoded text of every id -> function text -> ids: the longest text that fits, repeatedly."""
    ids = {}
    for id, text in enumerate(texts):
        if text and REPLACEMENT not in text and text not in special:
            ids.setdefault(text, id)
    longest_first = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))

    def encode(text):
        found, position = [], 0
        while position < len(text):
            match = longest_first.match(text, position)
            if match is None:
                seen = text[position : position + 20]
                raise ValueError(f"text: no token fits at {position}: {seen!r}")
            found.append(ids[match[0]])
            position = match.end()
        return found

    return encode


class Tokenizer:
    """tokens: bytes of every id; special: spelling -> id; encode_plain: function text -> ids."""

    def __init__(self, tokens, special, encode_plain):
        self._tokens, self._special, self._encode_plain = tokens, special, encode_plain
        longest_first = sorted(special, key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @property
    def vocab_size(self):
        """Number of ids, special ones included."""
        return len(self._tokens)

    def special_id(self, spelling):
        """Id of a special token, by its exact spelling."""
        if spelling not in self._special:
            raise ValueError(f"tokenizer: no special token is spelled {spelling!r}")
        return self._special[spelling]

    def encode(self, text, special=False):
        """text -> list of ids. With `special`, spelled special tokens become their ids."""
        _require_text(text)
        if not special:
            if IMAGE in text:
                raise ValueError(f"text: {IMAGE} at {text.index(IMAGE)}; a picture is not text")
            return self._encode_plain(text)
        ids = []
        for n, part in enumerate(self._specials.split(text)):  # odd parts are special tokens
            ids += [self._special[part]] if n % 2 else self._encode_plain(part)
        return ids

    def decode(self, ids):
        """ids -> text. Special tokens are spelled out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id):
        """The bytes that an id stands for."""
        if not 0 <= id < len(self._tokens):  # trap: a negative id would count from the end
            raise ValueError(f"id: {id} is not in the vocabulary of {len(self._tokens)}")
        return self._tokens[id]

    def stream(self):
        """A decoder for ids that come one at a time."""
        return Stream(self)


class Stream:
    """Everything `push` and `flush` return, joined, is the tokenizer's `decode` of the ids."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id):
        """The text that this id completes, "" while a character is still open."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self):
        """The end of the text: U+FFFD if a character was left open, else "". Starts afresh."""
        return self._decoder.decode(b"", final=True)


def _require_text(text):
    if not isinstance(text, str):
        raise ValueError(f"text: expected a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text: half a surrogate pair at {error.start}") from None
