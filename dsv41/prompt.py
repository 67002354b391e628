"""What does a conversation look like to the model, and what did it answer?

    BOS <System> effort line, text, tools, response format
    <User> text <Assistant> <think> reasoning </think> answer, tool calls EOS   <User> ...

A prompt stops where the model goes on: after `<think>`, or after `</think>` in chat mode. Reasoning
before the last user turn is dropped, unless there are tools: a chain of calls needs it. Tool
results are user text; a later system message is a turn that the model answers, like a user's.

The tokens of the format are ids; whatever a message says is plain text, even when it spells one of
them. Only `encode_prompt` keeps the two apart: never encode the string of `render` as trusted text.
Source: encoding/encoding.py of the release. Left out: reminders, forced tool choice, continuing an
answer, and tool namespaces (write "space::name").
"""

import json
import re
from dataclasses import dataclass, field
from itertools import groupby

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
EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = 75
KEYS = {  # what a message may hold besides its role
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "reasoning", "tool_calls"},
    "tool": {"content", "tool_call_id"},
}

EFFORT_LINE = (
    "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
FORMAT_SECTION = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
# trap: V4.1 has one space behind every ｜DSML｜, V4 has none
TOOLS_HEAD = f"""

## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), \
you MUST output your complete reasoning inside {THINK}...{END_THINK} \
BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def render(messages, **options):
    """A conversation -> the prompt as one string. Arguments: as `pieces`."""
    return "".join(pieces(messages, **options))


def encode_prompt(tokenizer, messages, **options):
    """A conversation -> the prompt as list of ids. Arguments: as `pieces`."""
    ids = []
    for special, run in groupby(pieces(messages, **options), lambda p: isinstance(p, Token)):
        if special:
            ids += [tokenizer.special_id(token) for token in run]
        else:
            ids += tokenizer.encode("".join(run))
    return ids


def pieces(messages, thinking=True, effort=75, tools=None, response_schema=None, task=None):
    """A conversation -> the prompt as list of str; a Token among them is one id.

    messages: {"role": "system" | "user" | "assistant" | "tool", "content": str, or a list of
    {"type": "text", "text": str} and {"type": "image"}}; an assistant may have "reasoning" and
    "tool_calls" [{"name", "arguments", "id"}], a tool its "tool_call_id". effort: 1 to 100, a name
    from EFFORTS, None for 75, "none" for no thinking. tools: {"name", "description", "parameters"},
    bare or as {"function": ...}. response_schema: a JSON schema. task: a name from TASKS, put to
    the last turn. ValueError names the wrong argument. An image is one token here; a conversation
    that ends with an answer stays closed.
    """
    budget = _budget(effort)
    thinking = thinking and budget is not None
    turns = _turns(messages)
    found, extra = [BOS], _tool_section(tools) + _format_section(response_schema)
    if turns[0].role == "system" or thinking or extra:
        head = turns.pop(0).text() if turns[0].role == "system" else []
        found += [SYSTEM, EFFORT_LINE.format(budget) if thinking else "", *head, *extra]
    asked = max((i for i, turn in enumerate(turns) if turn.role != "assistant"), default=-1)
    for i, turn in enumerate(turns):
        found += _turn_pieces(turn, thinking and (bool(tools) or i > asked))
    return found + _opening(turns, thinking, task)


def _budget(effort):
    """The number of the effort line; None: chat, without thinking."""
    if effort is None:
        return DEFAULT_EFFORT
    if isinstance(effort, str) and effort in {"none", *EFFORTS}:
        return EFFORTS.get(effort)
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    names = ", ".join(EFFORTS)
    raise ValueError(f"effort: expected 1 to 100, {names}, none or None, got {effort!r}")


def _turn_pieces(turn, reasoned):
    """One turn behind its token; an answer with its reasoning or without."""
    if turn.role != "assistant":
        return [USER if turn.role == "user" else SYSTEM, *turn.text()]
    reasoning = [THINK, turn.reasoning] if reasoned else []
    return [ASSISTANT, *reasoning, END_THINK, *turn.text(), *_dsml(turn.calls), EOS]


def _opening(turns, thinking, task):
    """Where the model goes on: nowhere, if it has answered already."""
    answered = bool(turns) and turns[-1].role == "assistant"
    if task not in (None, *TASKS):
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if task is not None and answered:
        raise ValueError("task: the last message is an answer; a task is put to a question")
    if task not in (None, "action"):
        return [TASKS[task]]  # in place of the header
    header = [] if answered else [ASSISTANT, THINK if thinking else END_THINK]
    return header + ([TASKS[task]] if task else [])


@dataclass
class _Turn:
    role: str
    parts: list  # (rank among the tool results or None, pieces)
    reasoning: str = ""
    calls: list = field(default_factory=list)  # (name, [(key, "true" if it is text, value)])

    def text(self):
        """Pieces of the turn, a blank line between parts, tool results in the order of calls."""
        results = iter(sorted((p for p in self.parts if p[0] is not None), key=lambda p: p[0]))
        ordered = [part if part[0] is None else next(results) for part in self.parts]
        return _join("\n\n", [part[1] for part in ordered])


def _join(between, parts):
    """Lists of pieces -> one list."""
    return [piece for part in parts for piece in (between, *part)][1:]


def _turns(messages):
    """Messages -> turns. Neighbouring user and tool messages are one turn."""
    if not messages:
        raise ValueError("messages: expected at least one")
    turns, ranks = [], {}
    for i, message in enumerate(_list(messages, "messages")):
        where = f"messages[{i}]"
        role = _role(message, where)
        parts = _parts(message.get("content"), role, f"{where}.content")
        turn = _Turn(role, [(None, part) for part in parts])
        if role == "assistant":
            turn.reasoning = _plain(message.get("reasoning") or "", f"{where}.reasoning")
            turn.calls = _calls(message.get("tool_calls"), ranks, f"{where}.tool_calls")
        if role == "tool":
            result = ["<tool_result>", *_join("\n\n", parts), "</tool_result>"]
            rank = _rank(message.get("tool_call_id"), ranks, f"{where}.tool_call_id")
            turn = _Turn("user", [(rank, result)])
        if turn.role == "user" and turns and turns[-1].role == "user":
            turns[-1].parts += turn.parts
        else:
            turns.append(turn)
    return turns


def _role(message, where):
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in KEYS:
        raise ValueError(f"{where}.role: expected one of {', '.join(KEYS)}, got {role!r}")
    unknown = sorted(message.keys() - {"role"} - KEYS[role])
    if unknown:
        known = ", ".join(sorted(KEYS[role]))
        raise ValueError(f"{where}.{unknown[0]}: not a key of a {role} message; it has {known}")
    return role


def _parts(content, role, where):
    """str or list of parts -> list of pieces lists."""
    if isinstance(content, str):
        return [[_plain(content, where)]]
    if content is None and role == "assistant":
        return []
    found = []
    for i, part in enumerate(_list(content, where)):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image"):
            raise ValueError(f"{where}[{i}].type: expected text or image, got {kind!r}")
        text = IMAGE if kind == "image" else _plain(part.get("text"), f"{where}[{i}].text")
        found.append([text])
    return found


def _list(value, where):
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: expected a list, got {value!r}")
    return value


def _plain(text, where):
    """What a caller wrote, checked."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a str, got {text!r}")
    if IMAGE in text:
        raise ValueError(f"{where}: contains {IMAGE}; a picture is a part of its own")
    return str(text)  # trap: a caller's Token must not stay one


def _calls(calls, ranks, where):
    """Tool calls of a message, checked; `ranks` learns the place of each id."""
    found = []
    for i, call in enumerate(_list(calls or [], where)):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"{where}[{i}]: expected a dict, got {call!r}")
        if call.get("id"):
            ranks[_plain(call["id"], f"{where}[{i}].id")] = i
        name = _plain(function.get("name"), f"{where}[{i}].name")
        found.append((name, _arguments(function.get("arguments"), f"{where}[{i}].arguments")))
    return found


def _arguments(arguments, where):
    """A dict, or the JSON text of one -> [(key, "true" or "false", value as text)]."""
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, where)
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: expected a dict or its JSON text, got {arguments!r}")
    return [
        (_plain(key, where), "true", _plain(value, f"{where}.{key}"))
        if isinstance(value, str)
        else (_plain(key, where), "false", _json(value, f"{where}.{key}"))
        for key, value in arguments.items()
    ]


def _rank(call_id, ranks, where):
    """Where a tool result belongs among its neighbours; without an id, where it is."""
    if call_id is None:
        return -1
    if _plain(call_id, where) not in ranks:
        raise ValueError(f"{where}: no call before has the id {call_id!r}")
    return ranks[call_id]


def _dsml(calls):
    """Tool calls -> pieces, with the blank line before the block."""
    if not calls:
        return []
    found = _marked(f"\n\n<{DSML} calls>\n")
    for name, arguments in calls:
        found += [*_marked(f'<{DSML} invoke name="'), name, '">\n']
        found += _join("\n", [_parameter(*argument) for argument in arguments])
        found += _marked(f"\n</{DSML} invoke>\n")
    return found + _marked(f"</{DSML} calls>")


def _parameter(key, is_text, value):
    head, tail = _marked(f'<{DSML} parameter name="'), _marked(f"</{DSML} parameter>")
    return [*head, key, f'" string="{is_text}">', value, *tail]


def _marked(template):
    """The format's own text: DSML and think spellings in it are tokens."""
    parts = re.split(f"({DSML}|{THINK}|{END_THINK})", template)
    return [Token(part) if n % 2 else part for n, part in enumerate(parts)]


def _tool_section(tools):
    """Instructions and one JSON schema a line."""
    if not tools:
        return []
    functions = []
    for i, tool in enumerate(_list(tools, "tools")):
        functions.append(tool.get("function", tool) if isinstance(tool, dict) else None)
        if not isinstance(functions[i], dict) or not isinstance(functions[i].get("name"), str):
            raise ValueError(f"tools[{i}]: expected a dict with a name, got {tool!r}")
    schemas = "\n".join(_json(function, f"tools[{i}]") for i, function in enumerate(functions))
    return [*_marked(TOOLS_HEAD), schemas, TOOLS_TAIL]


def _format_section(response_schema):
    if response_schema is None:
        return []
    if not isinstance(response_schema, dict):
        raise ValueError(f"response_schema: expected a dict, got {response_schema!r}")
    return [FORMAT_SECTION, _json(response_schema, "response_schema")]


def _json(value, where):
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    return _plain(text, where)


def _parse_json(text, where):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


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
        arguments[key] = value if is_text == "true" else _parse_json(value, where)
        position = parameter.end()
    return {"name": invoke[1], "arguments": arguments}, end.end()


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


def _expect(tag, text, position):
    found = TAGS[tag].match(text, position)
    if found is None:
        seen = text[position : position + 60] or "the end"
        raise ValueError(f"text: expected a whole <{DSML} {tag}> at {position}, found {seen!r}")
    return found
