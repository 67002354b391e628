"""What did the model answer?

    reasoning </think> content, blank line, <｜DSML｜ calls> ... </｜DSML｜ calls> EOS

`parse_reply` takes the text that the model wrote behind a prompt apart, so that the result can go
back into the conversation as a message. Tool calls end an answer. A block that is not whole, or
that text follows, is an error, never half a call; only the space between tags is free. Calls inside
the reasoning are only thought of, and stay there.

The writing side is tool_calls.py. Source: encoding/encoding.py of the release.
"""

import re

from .prompt_tokens import DSML, END_THINK, EOS, parse_json

TAGS = {
    "calls": re.compile(rf"<{DSML} calls>\s*"),
    "invoke": re.compile(rf'<{DSML} invoke name="([^\n｜]+)">\s*'),
    "parameter": re.compile(
        rf'<{DSML} parameter name="([^\n｜]*)" string="(true|false)">'
        rf"((?:(?!</?{DSML}).)*)</{DSML} parameter>\s*",
        re.DOTALL,
    ),
    "/invoke": re.compile(rf"</{DSML} invoke>\s*"),
}


def parse_reply(text, thinking=True):
    """What the model wrote behind a prompt -> {"reasoning", "content", "tool_calls"}.

    A thinking reply without `</think>` was cut off: it is all reasoning. With {"role": "assistant"}
    the result is a message. ValueError: malformed tool calls.
    """
    text = text.removesuffix(EOS)
    reasoning, _, answer = text.partition(END_THINK) if thinking else ("", "", text)
    content, block, _ = answer.partition(f"<{DSML} calls>")
    content = content.removesuffix("\n\n") if block else content
    return {"reasoning": reasoning, "content": content, "tool_calls": parse_tool_calls(answer)}


def parse_tool_calls(text):
    """The DSML block that ends an answer -> [{"name": str, "arguments": dict}]; [] without one.

    ValueError says what was expected where. A value that spells a DSML tag itself is one, too:
    text, unlike ids, does not tell it from the format.
    """
    first = re.search(f"</?{DSML}", text)
    if first is None:
        return []
    calls, position = [], _expect("calls", text, first.start()).end()
    while not calls or not text.startswith(f"</{DSML} calls>", position):
        call, position = _parse_call(text, position)
        calls.append(call)
    rest = text[position:].removeprefix(f"</{DSML} calls>").removesuffix(EOS).strip()
    if rest:
        raise ValueError(f"text: tool calls end an answer, but {rest[:40]!r} follows")
    return calls


def _parse_call(text, position):
    """One invoke at `position` -> the call, and where it ends."""
    invoke = _expect("invoke", text, position)
    arguments, position = {}, invoke.end()
    while not (end := TAGS["/invoke"].match(text, position)):
        parameter = _expect("parameter", text, position)
        key, is_text, value = parameter.groups()
        where = f"text: tool call {invoke[1]}, parameter {key}"
        if key in arguments:
            raise ValueError(f"{where}: given twice")
        arguments[key] = value if is_text == "true" else parse_json(value, where)
        position = parameter.end()
    return {"name": invoke[1], "arguments": arguments}, end.end()


def _expect(tag, text, position):
    found = TAGS[tag].match(text, position)
    if found is None:
        seen = text[position : position + 60] or "the end"
        raise ValueError(f"text: expected a whole <{DSML} {tag}> at {position}, found {seen!r}")
    return found
