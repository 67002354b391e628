"""What does a conversation look like to the model?

    BOS <System> effort line, text, tools, response format
    <User> text <Assistant> <think> reasoning </think> answer, tool calls EOS   <User> ...

A prompt stops where the model goes on: after `<think>`, or after `</think>` in chat mode. Reasoning
before the last user turn is dropped, unless there are tools: a chain of calls needs it. Tool
results are user text; a later system message is a turn that the model answers, like a user's.

The tokens of the format are ids; whatever a message says is plain text, even when it spells one of
them. Only `encode_prompt` keeps the two apart: never encode the string of `render` as trusted text.
tool_calls.py writes tool calls, reply.py reads the answer. Source: encoding/encoding.py of the
release. Left out: reminders, forced tool choice, continuing an answer.
"""

from dataclasses import dataclass, field
from itertools import groupby

from .prompt_tokens import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    IMAGE,
    SYSTEM,
    TASKS,
    THINK,
    USER,
    Token,
    joined,
    json_text,
    listed,
    plain,
)
from .tool_calls import checked_calls, dsml, tool_section

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
    found, extra = [BOS], tool_section(tools) + _format_section(response_schema)
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
    return [ASSISTANT, *reasoning, END_THINK, *turn.text(), *dsml(turn.calls), EOS]


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
        return joined("\n\n", [part[1] for part in ordered])


def _turns(messages):
    """Messages -> turns. Neighbouring user and tool messages are one turn."""
    if not messages:
        raise ValueError("messages: expected at least one")
    turns, ranks = [], {}
    for i, message in enumerate(listed(messages, "messages")):
        where = f"messages[{i}]"
        role = _role(message, where)
        parts = _parts(message.get("content"), role, f"{where}.content")
        turn = _Turn(role, [(None, part) for part in parts])
        if role == "assistant":
            turn.reasoning = plain(message.get("reasoning") or "", f"{where}.reasoning")
            turn.calls = checked_calls(message.get("tool_calls"), ranks, f"{where}.tool_calls")
        if role == "tool":
            result = ["<tool_result>", *joined("\n\n", parts), "</tool_result>"]
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
        return [[plain(content, where)]]
    if content is None and role == "assistant":
        return []
    found = []
    for i, part in enumerate(listed(content, where)):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image"):
            raise ValueError(f"{where}[{i}].type: expected text or image, got {kind!r}")
        text = IMAGE if kind == "image" else plain(part.get("text"), f"{where}[{i}].text")
        found.append([text])
    return found


def _rank(call_id, ranks, where):
    """Where a tool result belongs among its neighbours; without an id, where it is."""
    if call_id is None:
        return -1
    if plain(call_id, where) not in ranks:
        raise ValueError(f"{where}: no call before has the id {call_id!r}")
    return ranks[call_id]


def _format_section(response_schema):
    if response_schema is None:
        return []
    if not isinstance(response_schema, dict):
        raise ValueError(f"response_schema: expected a dict, got {response_schema!r}")
    return [FORMAT_SECTION, json_text(response_schema, "response_schema")]
