"""What in a prompt belongs to the format, and what is somebody's text?

    pieces = [BOS, USER, "hi <think>", ASSISTANT, THINK]      a Token is one id, a plain str is text

A prompt is built as a list of pieces. The tokens of the format are listed here, each with its
spelling; only code of the format makes a `Token`. Whatever a caller hands in goes through `plain`
or `json_text` and is a plain str from then on, even when it spells a token. The picture's token is
refused in any text: its position stands for an array, which no text can bring along.

`where` is the caller's name for a value, such as messages[2].content; every error begins with it.
Source: encoding/encoding.py of the release.
"""

import json

from .tokenizer import IMAGE as IMAGE_SPELLING


class Token(str):
    """A spelling that is one id of the prompt. Any other str of a prompt is plain text."""


BOS, EOS = Token("<｜begin▁of▁sentence｜>"), Token("<｜end▁of▁sentence｜>")
SYSTEM, USER, ASSISTANT = Token("<｜System｜>"), Token("<｜User｜>"), Token("<｜Assistant｜>")
THINK, END_THINK = Token("<think>"), Token("</think>")
DSML = Token("｜DSML｜")
IMAGE = Token(IMAGE_SPELLING)
TASKS = {
    name: Token(f"<｜{name}｜>")
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}


def plain(text, where):
    """What a caller wrote, checked."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a str, got {text!r}")
    if IMAGE in text:
        raise ValueError(f"{where}: contains {IMAGE}; a picture is a part of its own")
    return str(text)  # trap: a caller's Token must not stay one


def json_text(value, where):
    """Something of a caller as JSON text, checked."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    return plain(text, where)


def parse_json(text, where):
    """JSON text -> what it says."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def listed(value, where):
    """A list or tuple of a caller, checked."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: expected a list, got {value!r}")
    return value


def joined(between, parts):
    """Lists of pieces -> one list."""
    return [piece for part in parts for piece in (between, *part)][1:]
