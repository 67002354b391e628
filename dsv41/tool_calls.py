"""How are tools shown to the model, and how are its calls written? (DSML)

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    <｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A call is a block of tags; a text parameter stands as it is, any other as JSON. Nothing is escaped:
the ｜DSML｜ of a tag is one id, the same spelling in a value is text. `tool_section` explains it
and lists the schemas; `dsml` writes the calls of earlier answers; reply.py reads new ones.
Source: encoding/encoding.py of the release. Left out: tool namespaces (write "space::name").
"""

import re

from .prompt_tokens import (
    DSML,
    END_THINK,
    THINK,
    Token,
    joined,
    json_text,
    listed,
    parse_json,
    plain,
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


def tool_section(tools):
    """Instructions and one JSON schema a line."""
    if not tools:
        return []
    functions = []
    for i, tool in enumerate(listed(tools, "tools")):
        functions.append(tool.get("function", tool) if isinstance(tool, dict) else None)
        if not isinstance(functions[i], dict) or not isinstance(functions[i].get("name"), str):
            raise ValueError(f"tools[{i}]: expected a dict with a name, got {tool!r}")
    schemas = "\n".join(json_text(function, f"tools[{i}]") for i, function in enumerate(functions))
    return [*_marked(TOOLS_HEAD), schemas, TOOLS_TAIL]


def checked_calls(calls, ranks, where):
    """Tool calls of a message, checked; `ranks` learns the place of each id."""
    found = []
    for i, call in enumerate(listed(calls or [], where)):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"{where}[{i}]: expected a dict, got {call!r}")
        if call.get("id"):
            ranks[plain(call["id"], f"{where}[{i}].id")] = i
        name = plain(function.get("name"), f"{where}[{i}].name")
        found.append((name, _arguments(function.get("arguments"), f"{where}[{i}].arguments")))
    return found


def _arguments(arguments, where):
    """A dict, or the JSON text of one -> [(key, "true" or "false", value as text)]."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments, where)
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: expected a dict or its JSON text, got {arguments!r}")
    return [
        (plain(key, where), "true", plain(value, f"{where}.{key}"))
        if isinstance(value, str)
        else (plain(key, where), "false", json_text(value, f"{where}.{key}"))
        for key, value in arguments.items()
    ]


def dsml(calls):
    """Tool calls -> pieces, with the blank line before the block."""
    if not calls:
        return []
    found = _marked(f"\n\n<{DSML} calls>\n")
    for name, arguments in calls:
        found += [*_marked(f'<{DSML} invoke name="'), name, '">\n']
        found += joined("\n", [_parameter(*argument) for argument in arguments])
        found += _marked(f"\n</{DSML} invoke>\n")
    return found + _marked(f"</{DSML} calls>")


def _parameter(key, is_text, value):
    head, tail = _marked(f'<{DSML} parameter name="'), _marked(f"</{DSML} parameter>")
    return [*head, key, f'" string="{is_text}">', value, *tail]


def _marked(template):
    """The format's own text: DSML and think spellings in it are tokens."""
    parts = re.split(f"({DSML}|{THINK}|{END_THINK})", template)
    return [Token(part) if n % 2 else part for n, part in enumerate(parts)]
