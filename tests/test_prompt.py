"""The released prompt format, string by string."""

import json
import random
from itertools import groupby

import pytest

from dsv41.prompt import encode_prompt, pieces, render
from dsv41.prompt_tokens import Token

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
EFFORT = (
    "<｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, "
    "the more thorough the reasoning)\n\n"
)
TOOLS = """\n\n## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "weather", "description": "天气", "parameters": {"type": "object"}}
{"name": "now"}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
WEATHER = {"name": "weather", "description": "天气", "parameters": {"type": "object"}}
NOW = {"name": "now"}
FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text, call=None):
    message = {"role": "tool", "content": text}
    return message | ({"tool_call_id": call} if call else {})


def chat(*messages, **options):
    return render(list(messages), thinking=False, **options)


def think(*messages, **options):
    return render(list(messages), **options)


def test_a_question_in_both_modes():
    assert chat(user("hi")) == f"{BOS}<｜User｜>hi<｜Assistant｜></think>"
    assert think(user("hi")) == f"{BOS}{EFFORT}<｜User｜>hi<｜Assistant｜><think>"


def test_a_system_message_follows_the_effort_line():
    assert chat(system("S"), user("hi")) == f"{BOS}<｜System｜>S<｜User｜>hi<｜Assistant｜></think>"
    assert think(system("S"), user("hi")) == f"{BOS}{EFFORT}S<｜User｜>hi<｜Assistant｜><think>"
    assert think(system(""), user("hi")) == think(user("hi"))
    assert chat(system(""), user("hi")) == f"{BOS}<｜System｜><｜User｜>hi<｜Assistant｜></think>"
    assert think(system("S")) == f"{BOS}{EFFORT}S<｜Assistant｜><think>"


@pytest.mark.parametrize(
    "effort, number",
    [
        *((None, 75), ("minimal", 50), ("low", 50), ("medium", 75), ("high", 75)),
        *(("xhigh", 75), ("max", 100), (1, 1), (42, 42), (100, 100)),
    ],
)
def test_the_effort_line_has_its_number(effort, number):
    prompt = think(user("hi"), effort=effort)
    assert prompt.replace(f"Effort: {number} (", "Effort: 75 (") == think(user("hi"))
    assert f"Reasoning Effort: {number} (range 1-100" in prompt
    assert chat(user("hi"), effort=effort) == chat(user("hi"))


def test_no_effort_is_chat_mode():
    assert think(user("hi"), effort="none") == chat(user("hi"))


@pytest.mark.parametrize("effort", [0, 101, -1, 75.0, 0.5, True, "75", "", "ultra", [75]])
def test_other_efforts_are_refused(effort):
    with pytest.raises(ValueError, match=r"effort: expected 1 to 100, minimal, low.*got"):
        think(user("hi"), effort=effort)
    with pytest.raises(ValueError, match="effort"):
        chat(user("hi"), effort=effort)


def test_reasoning_before_the_last_user_turn_is_dropped():
    talk = [user("1"), assistant("A", reasoning="why"), user("2")]
    history = "<｜User｜>1<｜Assistant｜></think>A" + EOS
    assert think(*talk) == f"{BOS}{EFFORT}{history}<｜User｜>2<｜Assistant｜><think>"
    assert chat(*talk) == f"{BOS}{history}<｜User｜>2<｜Assistant｜></think>"


def test_reasoning_after_the_last_user_turn_is_kept_and_the_prompt_stays_closed():
    talk = [user("1"), assistant("A", reasoning="why")]
    assert think(*talk) == f"{BOS}{EFFORT}<｜User｜>1<｜Assistant｜><think>why</think>A{EOS}"
    assert chat(*talk) == f"{BOS}<｜User｜>1<｜Assistant｜></think>A{EOS}"
    without = [user("1"), assistant("A")]
    assert think(*without) == f"{BOS}{EFFORT}<｜User｜>1<｜Assistant｜><think></think>A{EOS}"


def test_with_tools_all_reasoning_is_kept():
    talk = [user("1"), assistant("A", reasoning="why"), user("2")]
    told = f"{BOS}{EFFORT}{TOOLS}<｜User｜>1<｜Assistant｜><think>why</think>A{EOS}"
    assert think(*talk, tools=[WEATHER, NOW]) == f"{told}<｜User｜>2<｜Assistant｜><think>"
    assert "why" not in chat(*talk, tools=[WEATHER, NOW])


def test_a_later_system_message_is_a_turn_and_counts_as_the_users():
    talk = [user("1"), assistant("A", reasoning="why"), system("rule")]
    history = f"<｜User｜>1<｜Assistant｜></think>A{EOS}<｜System｜>rule"
    assert think(*talk) == f"{BOS}{EFFORT}{history}<｜Assistant｜><think>"
    assert chat(*talk) == f"{BOS}{history}<｜Assistant｜></think>"
    assert chat(*talk, user("2")) == f"{BOS}{history}<｜User｜>2<｜Assistant｜></think>"


def test_two_system_messages_are_not_merged():
    prompt = chat(system("S"), system("T"))
    assert prompt == f"{BOS}<｜System｜>S<｜System｜>T<｜Assistant｜></think>"


def test_user_messages_in_a_row_are_one_turn():
    assert chat(user("1"), user("2")) == f"{BOS}<｜User｜>1\n\n2<｜Assistant｜></think>"
    apart = chat(user("1"), system("S"), user("2"))
    assert apart == f"{BOS}<｜User｜>1<｜System｜>S<｜User｜>2<｜Assistant｜></think>"


def test_every_answer_in_a_row_has_its_header():
    prompt = chat(user("1"), assistant("A"), assistant("B"), user("2"))
    answers = f"<｜Assistant｜></think>A{EOS}<｜Assistant｜></think>B{EOS}"
    assert prompt == f"{BOS}<｜User｜>1{answers}<｜User｜>2<｜Assistant｜></think>"


def test_parts_are_joined_by_a_blank_line():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    joined = "a\n\n<｜deepseek_image｜>\n\nb"
    assert chat(user(parts)) == f"{BOS}<｜User｜>{joined}<｜Assistant｜></think>"
    assert f"<｜System｜>{joined}<" in chat(system(parts))
    assert f"<tool_result>{joined}</tool_result>" in chat(user("q"), result(parts))
    assert f"</think>{joined}{EOS}" in chat(user("q"), assistant(parts))
    assert chat(user([])) == chat(user(""))


def test_tools_close_the_system_block():
    for form in ([WEATHER, NOW], [{"type": "function", "function": f} for f in (WEATHER, NOW)]):
        prompt = think(system("S"), user("hi"), tools=form)
        assert prompt == f"{BOS}{EFFORT}S{TOOLS}<｜User｜>hi<｜Assistant｜><think>"
        prompt = chat(user("hi"), tools=form)
        assert prompt == f"{BOS}<｜System｜>{TOOLS}<｜User｜>hi<｜Assistant｜></think>"
    assert chat(user("hi"), tools=[]) == chat(user("hi"))


def test_v41_has_one_space_behind_every_dsml_v4_has_none():
    talk = [user("q"), assistant("", tool_calls=[{"name": "now", "arguments": {"a": 1}}])]
    prompt = chat(*talk, tools=[NOW])
    assert prompt.count("｜DSML｜") == prompt.count("｜DSML｜ ") == 9 + 6
    assert "｜DSML｜  " not in prompt


def test_the_response_format_comes_last_in_the_system_block():
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    told = FORMAT + '{"type": "object", "properties": {"é": {"type": "string"}}}'
    prompt = chat(system("S"), user("hi"), response_schema=schema)
    assert prompt == f"{BOS}<｜System｜>S{told}<｜User｜>hi<｜Assistant｜></think>"
    prompt = think(user("hi"), response_schema=schema, tools=[WEATHER, NOW])
    assert prompt == f"{BOS}{EFFORT}{TOOLS}{told}<｜User｜>hi<｜Assistant｜><think>"
    assert f"{FORMAT}{{}}<｜User｜>" in chat(user("hi"), response_schema={})


CALLS = [
    {
        "id": "x",
        "name": "weather",
        "arguments": {"city": "Paris\n中", "n": 3, "o": {"a": [1.5, None]}},
    },
    {"id": "y", "name": "now", "arguments": {}},
]
BLOCK = """\n\n<｜DSML｜ calls>
<｜DSML｜ invoke name="weather">
<｜DSML｜ parameter name="city" string="true">Paris
中</｜DSML｜ parameter>
<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>
<｜DSML｜ parameter name="o" string="false">{"a": [1.5, null]}</｜DSML｜ parameter>
</｜DSML｜ invoke>
<｜DSML｜ invoke name="now">

</｜DSML｜ invoke>
</｜DSML｜ calls>"""


def test_tool_calls_are_written_as_dsml():
    as_json = [{**c, "arguments": json.dumps(c["arguments"])} for c in CALLS]
    nested = [{"id": c["id"], "type": "function", "function": c} for c in as_json]
    for calls in (CALLS, as_json, nested):
        prompt = chat(user("q"), assistant("let me", tool_calls=calls))
        assert prompt == f"{BOS}<｜User｜>q<｜Assistant｜></think>let me{BLOCK}{EOS}"
    assert chat(user("q"), assistant(None, tool_calls=CALLS)).endswith(f"</think>{BLOCK}{EOS}")


def test_tool_results_are_user_text_in_the_order_of_the_calls():
    asked = [user("q"), assistant("", reasoning="why", tool_calls=CALLS)]
    head = f"{BOS}{EFFORT}{TOOLS}<｜User｜>q<｜Assistant｜><think>why</think>{BLOCK}{EOS}<｜User｜>"
    results = "<tool_result>X</tool_result>\n\n<tool_result>Y</tool_result>"
    for answers in ([result("X", "x"), result("Y", "y")], [result("Y", "y"), result("X", "x")]):
        prompt = think(*asked, *answers, tools=[WEATHER, NOW])
        assert prompt == f"{head}{results}<｜Assistant｜><think>"
        prompt = think(*asked, *answers, user("more"), tools=[WEATHER, NOW])
        assert prompt == f"{head}{results}\n\nmore<｜Assistant｜><think>"


def test_only_results_change_places():
    asked = [user("q"), assistant("", tool_calls=CALLS)]
    prompt = chat(*asked, result("Y", "y"), user("text"), result("X", "x"))
    turn = "<tool_result>X</tool_result>\n\ntext\n\n<tool_result>Y</tool_result>"
    assert prompt.endswith(f"<｜User｜>{turn}<｜Assistant｜></think>")


def test_results_without_an_id_stay_where_they_are():
    prompt = chat(user("q"), assistant("", tool_calls=CALLS), result("2"), result("1"))
    turn = "<tool_result>2</tool_result>\n\n<tool_result>1</tool_result>"
    assert prompt.endswith(f"<｜User｜>{turn}<｜Assistant｜></think>")


def test_an_id_that_is_used_again_means_the_last_call():
    first = assistant("", tool_calls=[{"id": "x", "name": "now", "arguments": {}}])
    again = [{"id": i, "name": "now", "arguments": {}} for i in ("y", "x")]
    talk = [user("q"), first, result("old", "x"), assistant("", tool_calls=again)]
    prompt = chat(*talk, result("X", "x"), result("Y", "y"))
    turn = "<tool_result>Y</tool_result>\n\n<tool_result>X</tool_result>"
    assert prompt.endswith(f"<｜User｜>{turn}<｜Assistant｜></think>")


def test_without_tools_a_result_ends_the_reasoning_before_it():
    asked = [user("q"), assistant("", reasoning="why", tool_calls=CALLS), result("X", "x")]
    assert "why" not in think(*asked)
    answered = think(*asked, assistant("A", reasoning="so"))
    assert answered.endswith(f"</tool_result><｜Assistant｜><think>so</think>A{EOS}")


@pytest.mark.parametrize("name", ["query", "authority", "domain", "title", "read_url"])
def test_a_task_token_stands_in_place_of_the_header(name):
    assert chat(user("q"), task=name) == f"{BOS}<｜User｜>q<｜{name}｜>"
    assert think(user("q"), task=name) == f"{BOS}{EFFORT}<｜User｜>q<｜{name}｜>"


def test_the_action_token_stands_behind_the_header():
    assert chat(user("q"), task="action") == f"{BOS}<｜User｜>q<｜Assistant｜></think><｜action｜>"
    prompt = think(user("q"), task="action")
    assert prompt == f"{BOS}{EFFORT}<｜User｜>q<｜Assistant｜><think><｜action｜>"


class Pieces:
    """A tokenizer whose ids are the strings it is given, so that the pieces can be seen."""

    def special_id(self, spelling):
        return f"[{spelling}]"

    def encode(self, text):
        return [text] if text else []


def test_only_the_format_has_special_tokens():
    talk = [user("<think>1"), user("｜DSML｜"), assistant("</think>"), user("<｜User｜>")]
    assert encode_prompt(Pieces(), talk, thinking=False) == [
        f"[{BOS}]", "[<｜User｜>]", "<think>1\n\n｜DSML｜",
        "[<｜Assistant｜>]", "[</think>]", "</think>", f"[{EOS}]",
        "[<｜User｜>]", "<｜User｜>", "[<｜Assistant｜>]", "[</think>]",
    ]  # fmt: skip


def test_in_a_call_only_the_tags_are_special():
    arguments = {"<think>": "</｜DSML｜ parameter>", "k": ["｜DSML｜"]}
    call = {"name": "｜DSML｜f", "arguments": arguments}
    ids = encode_prompt(Pieces(), [user("q"), assistant("a", tool_calls=[call])], thinking=False)
    dsml = "[｜DSML｜]"
    assert ids[5:] == [
        "a\n\n<", dsml, " calls>\n<", dsml, ' invoke name="｜DSML｜f">\n<',
        dsml, ' parameter name="<think>" string="true"></｜DSML｜ parameter></',
        dsml, " parameter>\n<", dsml, ' parameter name="k" string="false">["｜DSML｜"]</',
        dsml, " parameter>\n</", dsml, " invoke>\n</", dsml, " calls>", f"[{EOS}]",
    ]  # fmt: skip


def test_in_the_tool_section_only_the_instructions_are_special():
    tool = {"name": "f", "description": "<think> ｜DSML｜ <｜User｜>"}
    ids = encode_prompt(Pieces(), [user("q")], tools=[tool], response_schema={"a": "</think>"})
    special = [i for i in ids if i.startswith("[")]
    dsml, open_, close = ["[｜DSML｜]"] * 9, ["[<think>]"] * 2, ["[</think>]"] * 2
    tail = ["[<｜User｜>]", "[<｜Assistant｜>]", "[<think>]"]
    assert special == [f"[{BOS}]", "[<｜System｜>]", *dsml, *open_, *close, *tail]


def test_a_callers_token_does_not_stay_one():
    sly = Token("<｜System｜>")
    call = {"name": sly, "arguments": {sly: sly}}
    talk = [user(sly), assistant(sly, reasoning=sly, tool_calls=[call]), result(sly)]
    count = sum(isinstance(piece, Token) and piece == sly for piece in pieces(talk))
    assert count == 1, "the one in front of the effort line"


def of_maker(recipe, message):
    """The same message for the package deepseek_recipe."""
    content = message["content"]
    if message["role"] == "assistant":
        calls = [(c["id"], c["name"], json.dumps(c["arguments"])) for c in message["tool_calls"]]
        calls = [recipe.ToolCall(*call) for call in calls]
        return recipe.AssistantMessage(content, message["reasoning"], calls)
    if message["role"] == "tool":
        return recipe.ToolMessage(content, message["tool_call_id"])
    kind = recipe.SystemMessage if message["role"] == "system" else recipe.UserMessage
    return kind(content)


def maker_pieces(rendered):
    """Its prompt as [(text, is a special token)], without empty texts."""
    found, end = [], 0
    for start, stop in [*rendered.special_ranges, (len(rendered.prompt),) * 2]:
        found += [(rendered.prompt[end:start], False), (rendered.prompt[start:stop], True)]
        end = stop
    return [pair for pair in found if pair[0]]


def our_pieces(*arguments):
    """Ours in that form: texts between two tokens are one."""
    runs = groupby(pieces(*arguments), lambda piece: isinstance(piece, Token))
    found = [
        (text, special)
        for special, run in runs
        for text in (list(run) if special else ["".join(run)])
    ]
    return [pair for pair in found if pair[0]]


def random_conversation(rng):
    """Messages in any order that ends with a question."""

    words = ["hi", "a\nb", "中😀", "<｜User｜>", "</think>", "｜DSML｜"]

    def text():
        return " ".join(rng.choices(words, k=2))

    messages, last = [system(text())] * rng.randint(0, 1), []
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(["system", "user", "assistant", "tool"])
        if kind == "assistant":
            arguments = {"x": text(), "y z": rng.choice([3, 2.5, None, [1, {"é": True}]])}
            names = [f"{len(messages)}.{n}" for n in range(rng.choice([0, 0, 1, 3]))]
            last = names or last
            calls = [{"id": i, "name": "a::f", "arguments": arguments} for i in names]
            messages.append(assistant(text(), reasoning=text(), tool_calls=calls))
        elif kind == "tool" and last:
            messages.append(result(text(), rng.choice(last)))
        else:
            messages.append(system(text()) if kind == "system" else user(text()))
    return [*messages, user(text())]


def test_random_conversations_are_those_of_the_maker():
    recipe = pytest.importorskip("deepseek_recipe", reason="needs: pip install deepseek-recipe")
    rng = random.Random(0)
    tool = {"name": "f", "description": "天气 <think>", "parameters": {"type": "object"}}
    for _ in range(500):
        talk, thinking = random_conversation(rng), rng.random() < 0.7
        effort = rng.choice(["low", "high", "xhigh", "max"])
        tools, schema = rng.choice([[], [tool]]), rng.choice([None, {"type": "object"}])
        conversation = recipe.Conversation(
            [of_maker(recipe, message) for message in talk],
            thinking_mode=thinking,
            reasoning_effort=effort,
            tools=[recipe.ToolDefinition(**t) for t in tools],
            **({"response_schema": schema} if schema else {}),
        )
        rendered = recipe.DeepseekV41Encoding().render_conversation(conversation)
        assert our_pieces(talk, thinking, effort, tools, schema) == maker_pieces(rendered)


IMAGE = "see <｜deepseek_image｜>"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(messages=[]), "messages: expected at least one"),
        (dict(messages="hi"), "messages: expected a list"),
        (dict(messages=["hi"]), r"messages\[0\].role: expected one of system, user, .* got None"),
        (dict(messages=[user("a"), {"role": "developer", "content": "x"}]), r"messages\[1\].role"),
        (dict(messages=[{"role": ["user"], "content": "x"}]), r"messages\[0\].role"),
        (dict(messages=[{"role": "user"}]), r"messages\[0\].content: expected a list, got None"),
        (dict(messages=[user(None)]), r"messages\[0\].content: expected a list, got None"),
        (dict(messages=[user(["a"])]), r"messages\[0\].content\[0\].type: expected text or image"),
        (dict(messages=[user([{"type": "text"}])]), r"content\[0\].text: expected a str, got None"),
        (dict(messages=[user("a") | {"reasoning": "x"}]), r"messages\[0\].reasoning: not a key of"),
        (dict(messages=[assistant("a", reasoning_content="x")]), r"reasoning_content: not a key"),
        (dict(messages=[assistant("a", reasoning=3)]), r"messages\[0\].reasoning: expected a str"),
        (dict(messages=[user(IMAGE)]), r"messages\[0\].content: contains <｜deepseek_image｜>"),
        (dict(messages=[assistant("", reasoning=IMAGE)]), r"reasoning: contains"),
        (dict(messages=[user([{"type": "text", "text": IMAGE}])]), r"content\[0\].text: contains"),
        (dict(messages=[result("a", "x")]), r"messages\[0\].tool_call_id: no call before has the"),
        (dict(messages=[assistant("", tool_calls=["f"])]), r"tool_calls\[0\]: expected a dict"),
        (dict(messages=[assistant("", tool_calls=[{}])]), r"tool_calls\[0\].name: expected a str"),
        (
            dict(messages=[assistant("", tool_calls=3)]),
            r"messages\[0\].tool_calls: expected a list",
        ),
        (
            dict(messages=[assistant("", tool_calls=[{"id": [], "function": 3}])]),
            r"\[0\]: expected",
        ),
        (dict(messages=[assistant("", tool_calls=[{"id": [1]}])]), r"tool_calls\[0\].id: expected"),
        (dict(messages=[result("a", ["x"])]), r"messages\[0\].tool_call_id: expected a str"),
        (dict(messages=[user("a")], tools=NOW), "tools: expected a list, got {'name': 'now'}"),
        (dict(messages=[user("a")], tools=[{}]), r"tools\[0\]: expected a dict with a name"),
        (dict(messages=[user("a")], tools=["f"]), r"tools\[0\]: expected a dict with a name"),
        (dict(messages=[user("a")], tools=[{"name": "f", "x": {1}}]), r"tools\[0\]: not JSON"),
        (dict(messages=[user("a")], tools=[{"name": IMAGE}]), r"tools\[0\]: contains"),
        (dict(messages=[user("a")], response_schema="x"), "response_schema: expected a dict"),
        (dict(messages=[user("a")], response_schema={"a": float("nan")}), "response_schema: not"),
        (dict(messages=[user("a")], task="sing"), "task: expected one of action, query"),
        (dict(messages=[user("a")], task=["title"]), "task: expected one of action, query"),
        (dict(messages=[user("a"), assistant("b")], task="title"), "task: the last message is"),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        render(**options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (None, "expected a dict or its JSON text, got None"),
        ("[1]", r"expected a dict or its JSON text, got \[1\]"),
        ("{", "not JSON"),
        ({"k": {1}}, "not JSON"),
        ({"k": float("inf")}, "not JSON"),
        ({"k": IMAGE}, "contains <｜deepseek_image｜>"),
        ({"k": [IMAGE]}, "contains <｜deepseek_image｜>"),
        ({3: "x"}, "expected a str, got 3"),
    ],
)
def test_wrong_call_arguments_are_named(arguments, message):
    talk = [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": arguments}])]
    with pytest.raises(ValueError, match=rf"messages\[1\].tool_calls\[0\].arguments.*: {message}"):
        render(talk)


def test_the_messages_are_left_as_they_were():
    talk = [user("1"), user([{"type": "text", "text": "2"}]), assistant("", tool_calls=CALLS)]
    before = json.dumps(talk)
    assert render(talk, tools=[NOW]) == render(talk, tools=[NOW])
    assert json.dumps(talk) == before
