"""What does a conversation look like to the model, and what did it answer?

    BOS <System> effort line, text, tools, response format
    <User> text <Assistant> <think> reasoning </think> answer, tool calls EOS   <User> ...

A prompt stops where the model is to go on: after `<think>`, or after `</think>` in chat mode. Old
reasoning is dropped up to the last user turn, unless there are tools: a chain of calls needs it.
Messages follow one another as turns; tool results are user text, and a system message that is not
the first is a turn that the model answers, like a user's.

The tokens of the format are ids; whatever a message says is plain text, even when it spells one of
them. Only `encode_prompt` keeps the two apart: never encode the string of `render` as trusted text.
Source: encoding/encoding.py of the release. Left out: reminders, forced tool choice, names of tools
split into space and name (write "space::name"), and continuing an assistant turn.
"""

import json
import re
from dataclasses import dataclass, field
from itertools import groupby

from . import tokenizer as _tokenizer


class Token(str):
    """A spelling that is one id of the prompt. Any other str of a prompt is plain text."""


BOS, EOS = Token("<｜begin▁of▁sentence｜>"), Token("<｜end▁of▁sentence｜>")
SYSTEM, USER, ASSISTANT = Token("<｜System｜>"), Token("<｜User｜>"), Token("<｜Assistant｜>")
THINK, END_THINK = Token("<think>"), Token("</think>")
DSML = Token("｜DSML｜")
IMAGE = Token(_tokenizer.IMAGE)
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
    "Reasoning Effort: {} "
    "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
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


def render(messages, thinking=True, effort=75, tools=None, response_schema=None, task=None):
    """A conversation -> the prompt as one string.

    messages: list of {"role": "system" | "user" | "assistant" | "tool", "content": str, or a list
    of {"type": "text", "text": str} and {"type": "image"}}; an assistant may have "reasoning" and
    "tool_calls" [{"name", "arguments", "id"}], a tool its "tool_call_id". effort: 1 to 100, a name
    from EFFORTS, None for 75, "none" for no thinking. tools: list of {"name", "description",
    "parameters"}, bare or as {"function": ...}. task: a name from TASKS, put to the last turn.
    ValueError names the argument that is wrong. A conversation that ends with an answer stays
    closed; an image is one token here.
    """
    return "".join(_pieces(messages, thinking, effort, tools, response_schema, task))


def encode_prompt(tokenizer, messages, **options):
    """The same conversation -> list of ids. options: as `render`."""
    ids = []
    for special, run in groupby(_pieces(messages, **options), lambda p: isinstance(p, Token)):
        if special:
            ids += [tokenizer.special_id(token) for token in run]
        else:
            ids += tokenizer.encode("".join(run))
    return ids


def _pieces(messages, thinking=True, effort=75, tools=None, response_schema=None, task=None):
    """The prompt in order: a Token is one id, text between two of them is encoded as one run."""
    budget = _budget(effort)
    thinking = thinking and budget is not None
    turns = _turns(messages)
    extra = _tool_section(tools) + _format_section(response_schema)
    if turns[0].role != "system" and (thinking or extra):
        turns.insert(0, _Turn("system"))
    pieces = [BOS]
    if turns[0].role == "system":
        line = [EFFORT_LINE.format(budget)] if thinking else []
        pieces += [SYSTEM, *line, *turns.pop(0).text(), *extra]
    asked = max((i for i, turn in enumerate(turns) if turn.role != "assistant"), default=-1)
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            pieces += _answer(turn, thinking and (bool(tools) or i > asked))
        else:
            pieces += [USER if turn.role == "user" else SYSTEM, *turn.text()]
    return pieces + _opening(turns, thinking, task)


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


def _answer(turn, reasoned):
    """A past assistant turn, with its reasoning or without."""
    reasoning = [THINK, turn.reasoning] if reasoned else []
    return [ASSISTANT, *reasoning, END_THINK, *turn.text(), *_dsml(turn.calls), EOS]


def _opening(turns, thinking, task):
    """Where the model goes on: nowhere, if it has answered already."""
    answered = bool(turns) and turns[-1].role == "assistant"
    if task is not None and task not in TASKS:
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
    parts: list = field(default_factory=list)  # (rank among the tool results or None, pieces)
    reasoning: str = ""
    calls: list = field(default_factory=list)  # (name, arguments)

    def text(self):
        """Pieces of the turn, a blank line between parts, tool results in the order of calls."""
        results = iter(sorted((p for p in self.parts if p[0] is not None), key=lambda p: p[0]))
        ordered = [part if part[0] is None else next(results) for part in self.parts]
        return _joined([pieces for _, pieces in ordered])


def _joined(parts):
    return [piece for part in parts for piece in ("\n\n", *part)][1:]


def _turns(messages):
    """Messages -> turns. Neighbouring user and tool messages are one turn."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages: expected a list of at least one message")
    turns, ranks = [], {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = _role(message, where)
        parts = _parts(message.get("content"), role, f"{where}.content")
        turn = _Turn(role, [(None, part) for part in parts])
        if role == "assistant":
            turn.reasoning = _plain(message.get("reasoning") or "", f"{where}.reasoning")
            turn.calls = _calls(message.get("tool_calls") or [], ranks, f"{where}.tool_calls")
        if role == "tool":
            result = ["<tool_result>", *_joined(parts), "</tool_result>"]
            turn = _Turn("user", [(_rank(message.get("tool_call_id"), ranks, where), result)])
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
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: expected a str or a list of parts, got {content!r}")
    found = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image"):
            raise ValueError(f"{where}[{i}].type: expected text or image, got {kind!r}")
        text = IMAGE if kind == "image" else _plain(part.get("text"), f"{where}[{i}].text")
        found.append([text])
    return found


def _plain(text, where):
    """What a caller wrote, checked."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a str, got {text!r}")
    if IMAGE in text:
        raise ValueError(f"{where}: contains {IMAGE}; a picture is a part of its own")
    return str(text)  # trap: a caller's Token must not stay one


def _calls(calls, ranks, where):
    """Tool calls of a message -> [(name, arguments)]; notes in ranks how each id is ordered."""
    found = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}]"
        if not isinstance(call, dict):
            raise ValueError(f"{at}: expected a dict, got {call!r}")
        function = call.get("function", call)
        if call.get("id"):
            ranks[call["id"]] = max(ranks.values(), default=-1) + 1
        name = _plain(function.get("name"), f"{at}.name")
        found.append((name, _arguments(function.get("arguments"), f"{at}.arguments")))
    return found


def _arguments(arguments, where):
    """A dict, or the JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: expected a dict or its JSON text, got {arguments!r}")
    return arguments


def _rank(call_id, ranks, where):
    """A tool result without an id stays where it is, as all do that share a rank."""
    if call_id is not None and call_id not in ranks:
        raise ValueError(f"{where}.tool_call_id: no call before has the id {call_id!r}")
    return ranks.get(call_id, -1)


def _dsml(calls):
    """Tool calls -> pieces, with the blank line before the block."""
    if not calls:
        return []
    pieces = _marked(f"\n\n<{DSML} calls>\n")
    for name, arguments in calls:
        pieces += [*_marked(f'<{DSML} invoke name="'), name, '">\n']
        pieces += _joined_lines([_parameter(*item) for item in arguments.items()])
        pieces += _marked(f"\n</{DSML} invoke>\n")
    return pieces + _marked(f"</{DSML} calls>")


def _parameter(name, value):
    is_text = isinstance(value, str)
    text = value if is_text else _json(value, f"tool_calls: argument {name}")
    head, tail = f'" string="{str(is_text).lower()}">', f"</{DSML} parameter>"
    return [*_marked(f'<{DSML} parameter name="'), name, head, text, *_marked(tail)]


def _joined_lines(lines):
    return [piece for line in lines for piece in ("\n", *line)][1:]


def _marked(template):
    """The format's own text: DSML and think spellings in it are tokens."""
    parts = re.split(f"({DSML}|{THINK}|{END_THINK})", template)
    return [Token(part) if n % 2 else part for n, part in enumerate(parts)]


def _tool_section(tools):
    """Instructions and one JSON schema a line."""
    if not tools:
        return []
    functions = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
    for i, function in enumerate(functions):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{i}]: expected a dict with a name, got {tools[i]!r}")
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
        return _plain(json.dumps(value, ensure_ascii=False, allow_nan=False), where)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
