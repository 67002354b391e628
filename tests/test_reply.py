"""Replies that are taken apart, read back or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt import BLOCK, CALLS, EOS, NOW, assistant, user

from dsv41.prompt import render
from dsv41.reply import parse_reply, parse_tool_calls

PARSED = [{"name": c["name"], "arguments": c["arguments"]} for c in CALLS]


def test_a_reply_is_taken_apart():
    answer = {"reasoning": "why\n", "content": "A\n\n", "tool_calls": []}
    assert parse_reply(f"why\n</think>A\n\n{EOS}") == answer
    assert parse_reply("why\n</think>A\n\n") == answer
    assert parse_reply("A</think>B", thinking=False) == {
        "reasoning": "",
        "content": "A</think>B",
        "tool_calls": [],
    }
    called = {"reasoning": "why", "content": "let me", "tool_calls": PARSED}
    assert parse_reply(f"why</think>let me{BLOCK}{EOS}") == called
    assert parse_reply(f"let me{BLOCK}", thinking=False) == called | {"reasoning": ""}


def test_a_reply_cut_off_while_thinking_is_all_reasoning():
    assert parse_reply("I wond") == {"reasoning": "I wond", "content": "", "tool_calls": []}


def test_calls_that_are_only_thought_of_are_no_calls():
    reply = parse_reply(f"maybe{BLOCK}?</think>no")
    assert reply == {"reasoning": f"maybe{BLOCK}?", "content": "no", "tool_calls": []}


def test_a_reply_goes_back_into_the_conversation_as_it_came():
    text = f"why</think>let me{BLOCK}{EOS}"
    prompt = render([user("q")], tools=[NOW])
    message = {"role": "assistant", **parse_reply(text)}
    assert render([user("q"), message], tools=[NOW]) == prompt + text


NAMES = st.text(st.characters(exclude_characters="｜\n", exclude_categories=["Cs"]), min_size=1)
WORDS = st.text(st.characters(exclude_characters="｜", exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "name": NAMES.filter(lambda name: '">' not in name),
                "arguments": st.dictionaries(
                    NAMES.filter(lambda key: '" string="' not in key), VALUES, max_size=3
                ),
            }
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_calls_are_read_back(calls):
    text = render([user("q"), assistant("A", tool_calls=calls)], thinking=False)
    answer = text.partition("</think>")[2]
    assert parse_reply(answer, thinking=False) == {
        "reasoning": "",
        "content": "A",
        "tool_calls": calls,
    }


def test_text_without_calls_has_none():
    assert parse_tool_calls("just <b> text ｜DSML｜") == []
    assert parse_tool_calls("") == []


CALL = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
PARAMETER = '<｜DSML｜ parameter name="k" string="{}">{}</｜DSML｜ parameter>'


def test_a_call_by_hand():
    text = "A\n\n" + CALL.format(PARAMETER.format("true", " 3 \n"))
    assert parse_tool_calls(text) == [{"name": "f", "arguments": {"k": " 3 \n"}}]
    text = CALL.format(PARAMETER.format("false", " 3 "))
    assert parse_tool_calls(text + EOS) == [{"name": "f", "arguments": {"k": 3}}]


GOOD = CALL.format(PARAMETER.format("false", "3"))


@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD.replace("｜DSML｜ ", "｜DSML｜"), "expected a whole <｜DSML｜ calls> at 0, found"),
        (GOOD.replace("calls", "tool_calls"), "expected a whole <｜DSML｜ calls> at 0"),
        ("ab" + GOOD[GOOD.index("<｜DSML｜ invoke") :], "expected a whole <｜DSML｜ calls> at 2"),
        ("</｜DSML｜ calls>", "expected a whole <｜DSML｜ calls> at 0"),
        ("<｜DSML｜ calls>\n</｜DSML｜ calls>", "expected a whole <｜DSML｜ invoke>"),
        (GOOD.replace(' name="f"', ""), "expected a whole <｜DSML｜ invoke>"),
        (GOOD.replace('name="f"', 'name=""'), "expected a whole <｜DSML｜ invoke>"),
        (GOOD.replace(' string="false"', ""), "expected a whole <｜DSML｜ parameter>"),
        (GOOD.replace('"false"', '"no"'), "expected a whole <｜DSML｜ parameter>"),
        (GOOD.replace("3</｜DSML｜ parameter>", "3"), "expected a whole <｜DSML｜ parameter>"),
        (GOOD.replace("</｜DSML｜ invoke>", "x</｜DSML｜ invoke>"), "expected .* parameter>"),
        (GOOD.replace("</｜DSML｜ invoke>", ""), "expected a whole <｜DSML｜ parameter>"),
        (GOOD.replace("</｜DSML｜ calls>", ""), "expected a whole .* invoke> at .* 'the end'"),
        (GOOD[:-5], "expected a whole <｜DSML｜ invoke>"),
        (CALL.format(PARAMETER.format("true", "<｜DSML｜ x>")), "expected a whole .* parameter>"),
        (CALL.format(PARAMETER.format("true", "</｜DSML｜ invoke>")), "expected a whole .* param"),
        (CALL.format(PARAMETER.format("false", "x")), "text: tool call f, parameter k: not JSON"),
        (CALL.format(PARAMETER.format("false", "")), "text: tool call f, parameter k: not JSON"),
        (CALL.format(PARAMETER.format("true", "x") * 2), "tool call f, parameter k: given twice"),
        (GOOD + " more", "text: tool calls end an answer, but 'more' follows"),
        (GOOD + GOOD, "text: tool calls end an answer, but '<｜DSML｜ calls>"),
    ],
)
def test_malformed_calls_are_refused(text, message):
    assert parse_tool_calls(GOOD) == [{"name": "f", "arguments": {"k": 3}}]
    with pytest.raises(ValueError, match=message):
        parse_tool_calls(text)
    with pytest.raises(ValueError, match=message):
        parse_reply(text, thinking=False)
