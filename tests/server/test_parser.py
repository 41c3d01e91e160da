"""Answers taken apart, in whatever pieces they come."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.conversation import CALL_END, AnswerParser, EndSearch, News, forced_calls, messages_for
from octavo.server.errors import ApiError
from octavo.server.protocol import Message, NamedTool, Tool

WEATHER = Tool.model_validate(
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}},
        },
    }
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def parse(pieces: list[str], thinks: bool = True, begun: bool = False, calls: bool = True) -> News:
    parser, whole = AnswerParser(thinks=thinks, begun=begun, calls=calls), News()
    for place, piece in enumerate(pieces):
        news = parser.push(piece, ends=place == len(pieces) - 1)
        whole.content += news.content
        whole.reasoning += news.reasoning
        whole.calls += news.calls
    return whole


def test_plain_text_passes_as_it_is():
    for text in (" \n Hello <b> ", "", "\n\n", " a < b <tool", "<think> no"):
        assert parse([text], thinks=False, calls=False).content == text


def test_thoughts_stand_apart():
    news = parse(["<think>\nHm.\n</think>\n\nHello"])
    assert (news.reasoning, news.content) == ("\nHm.\n", "Hello")
    news = parse(["Hm.</think>\n\nHello"], begun=True)
    assert (news.reasoning, news.content) == ("Hm.", "Hello")
    assert parse(["Hello <think> you"]).content == "Hello <think> you"
    assert parse(["Hm. And so on"], begun=True).reasoning == "Hm. And so on"


def test_calls_are_taken_out():
    news = parse([f"Let me see.\n{CALL}\n{CALL}\n"])
    assert news.content == "Let me see."
    assert [call["index"] for call in news.calls] == [0, 1]
    assert [call["function"]["name"] for call in news.calls] == ["get_weather"] * 2
    assert json.loads(news.calls[0]["function"]["arguments"]) == {"city": "Paris"}
    assert len({call["id"] for call in news.calls}) == 2


@settings(deadline=None)
@given(
    st.text('"\\\\x</tol_ca>', max_size=20).flatmap(lambda text: st.tuples(st.just(text + CALL_END + text), st.sets(st.integers(0, 60))))
)
def test_the_end_of_a_call_is_found_however_the_text_grows(given_text: tuple[str, set[int]]):
    text, cuts = given_text
    search = EndSearch()
    found = [search.find(text[:cut]) for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]]
    whole = EndSearch().find(text)
    assert found[-1] == whole
    assert all(place in (-1, whole) for place in found)
    strings = re.sub(r'"(?:[^"\\]|\\.)*"?', lambda string: "_" * len(string[0]), text)
    assert whole == strings.find(CALL_END)


def test_no_more_calls_are_told_than_are_wanted():
    parser = AnswerParser(thinks=False, begun=False, calls=True, most_calls=1)
    news = parser.push(f"{CALL}\n{CALL}\nDone.", ends=True)
    assert [call["index"] for call in news.calls] == [0]


def test_a_call_without_its_last_tag_counts():
    assert len(parse([CALL.removesuffix("</tool_call>")]).calls) == 1


def test_an_argument_may_hold_the_tag():
    arguments = {"city": 'Paris}}</tool_call> "\\', "unit": "</tool_call>"}
    text = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': arguments})}\n</tool_call>"
    for pieces in ([text], list(text), [text.removesuffix("</tool_call>")]):
        (call,) = parse(pieces).calls
        assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>",
        '<tool_call>"</tool_call>\\',
    ],
)
def test_what_is_no_call_is_text(text: str):
    news = parse([text])
    assert (news.content, news.calls) == (text, [])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([" ", "\n", "Hi", "<", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "{", "}", '"', "\\"])),
    st.data(),
)
def test_pieces_change_nothing(words: list[str], data: st.DataObject):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    begun, calls = data.draw(st.booleans()), data.draw(st.booleans())
    whole, cut = parse([text], begun=begun, calls=calls), parse(pieces, begun=begun, calls=calls)
    assert (cut.content, cut.reasoning) == (whole.content, whole.reasoning)
    assert [call["function"] for call in cut.calls] == [call["function"] for call in whole.calls]


def test_tools_are_told_to_a_template_that_knows_none():
    messages = [Message(role="user", content="Hi"), Message(role="tool", content="7", tool_call_id="x")]
    told = messages_for("{{ messages }}", messages, [WEATHER])
    assert [message["role"] for message in told] == ["system", "user", "user"]
    assert "get_weather" in told[0]["content"]
    assert told[2]["content"] == "<tool_response>\n7\n</tool_response>"
    known = messages_for("{{ tools }}", messages, [WEATHER])
    assert [message["role"] for message in known] == ["user", "tool"]


def test_a_forced_call_names_its_tool():
    grammar = forced_calls([WEATHER], "required", several=False)
    assert grammar is not None
    assert "get_weather" in grammar
    assert forced_calls([WEATHER], "auto", several=True) is None
    with pytest.raises(ApiError):
        forced_calls([WEATHER], NamedTool.model_validate({"type": "function", "function": {"name": "other"}}), several=True)
