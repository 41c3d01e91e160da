"""Chat templates against transformers. Those of real models cannot lie here: each file of `chat_templates` is written for these tests,
and does what the templates of the family it is named after do."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ChatTemplateError, InvalidValueError
from octavo.loading.gguf import read_header
from octavo.server.errors import translated
from octavo.text.chat_template import render
from octavo.text.tokenizer import Tokenizer

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))}
ALTERNATING = TEMPLATES["05_mistral_tools"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "météo",
        "description": "<b>'\"& of a place,\nnow",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["Paris", "北京"]},
                "days": {"type": ["integer", "null"], "default": None},
                "where": {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}, "required": ["at"]},
                "more": {"type": "object", "additionalProperties": {"type": "boolean"}},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


NESTED = call(1, "météo", place="Paris", days=None, where={"at": [1, 2.5, {"é": "<&>\"'\n\u2028"}]}, more={"a": True})
QUESTION = said("user", " How warm is it?\n")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [said("user", "Hi")],
    "three turns": [said("user", " Hi \n"), said("assistant", "Hello!\n"), said("user", "日本 <b> 🎈 {{ no template }}?")],
    "ends with an answer": [said("user", "Hi"), said("assistant", " Hello ")],
    "system": [said("system", " Be brief. "), said("user", "Hi")],
    "system, modes": [said("system", "Be brief. /no_think"), said("user", "a\tb"), said("assistant", "ok"), said("user", "12321")],
    "thoughts in a text": [said("user", "Hi"), said("assistant", "<think>\nhm\n</think>\n\nHello!"), said("user", "Go on")],
    "thoughts beside": [said("user", "Hi"), said("assistant", "Hello!", reasoning_content="hm\n")],
    "a call": [QUESTION, said("assistant", None, tool_calls=[NESTED]), said("tool", '{"t": 20}', name="météo", tool_call_id="call00001")],
    "a call, answered": [
        said("system", "Use tools."),
        QUESTION,
        said("assistant", "", tool_calls=[NESTED]),
        said("tool", "20°", tool_call_id="call00001"),
        said("assistant", "It is 20°."),
        said("user", "Thanks"),
    ],
    "two calls": [
        QUESTION,
        said("assistant", "Two at once:", tool_calls=[NESTED, call(2, "clock")]),
        said("tool", "20", tool_call_id="call00001"),
        said("tool", "12:00", tool_call_id="call00002"),
    ],
    "parts": [said("user", [{"type": "text", "text": " Look: "}, {"type": "image"}]), said("assistant", "A cat."), said("user", "Yes")],
    "two of a role": [said("user", "Hi"), said("user", "there")],
    "system, later": [said("user", "Hi"), said("system", "Be brief.")],
    "an unknown role": [said("narrator", "Once"), said("user", "Hi")],
    "a short id": [QUESTION, said("assistant", None, tool_calls=[NESTED | {"id": "1"}])],
    "hidden": [said("user", "Hi"), said("assistant", "ok", hidden=True), said("user", "there", name="Ann")],
    "nothing said": [said("user", "Hi"), said("assistant", None), said("user", "there")],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER, CLOCK]},
    "documents": {"documents": [{"title": "Cats", "text": "Cats\r\npurr."}, {"doc_id": 7, "text": "<Dogs>"}], "citation_mode": "off"},
    "without thoughts": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    "its own": {
        "date_string": "3 Mar 2025",
        "builtin_tools": ["code_interpreter", "météo"],
        "tools_in_user_message": False,
        "tools": [CLOCK],
        "controls": {"length": "short", "citations": True},
        "documents": [{"text": "é"}],
        "enable_thinking": True,
        "bos_token": "<other>",
    },
}


class Oracle:
    """transformers' rendering, with a tokenizer that has nothing but its special tokens."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        from tokenizers import Tokenizer as HFTokenizer
        from tokenizers import models

        tokens = {"<s>": 0, "</s>": 1}
        backend = HFTokenizer(models.WordLevel(tokens, unk_token="<s>"))
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")

    def render(self, template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


class FixedTime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2031, 2, 3, 4, 5, 6)


@pytest.fixture
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.chat_template.datetime", FixedTime)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedTime)


def render_ours(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return render(template, messages, **{"bos_token": "<s>", "eos_token": "</s>", **variables})


def outcome(rendered: Callable[[], str]) -> tuple[str | None, str | None]:
    """(the text, what was raised)."""
    try:
        return rendered(), None
    except ChatTemplateError as error:
        return None, str(error).removeprefix("the model's chat template refuses these messages: ")
    except Exception as error:
        return None, str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_is_transformers_to_the_character(oracle: Oracle, fixed_time: None, name: str) -> None:
    texts, errors = set(), set()
    for conversation, messages in CONVERSATIONS.items():
        before = json.dumps(messages)
        for kind, variables in VARIABLES.items():
            for add_generation_prompt in (True, False):
                given = {"add_generation_prompt": add_generation_prompt, **variables}
                ours = outcome(lambda given=given, messages=messages: render_ours(TEMPLATES[name], messages, **given))
                theirs = outcome(lambda given=given, messages=messages: oracle.render(TEMPLATES[name], messages, **given))
                assert ours == theirs, f"{conversation}, {kind}"
                texts.add(ours[0])
                errors.add(ours[1])
        assert json.dumps(messages) == before
    assert len(texts - {None}) >= 15, "the template has too little to say to tell anything"
    if "raise_exception" in TEMPLATES[name]:
        assert any((error and error in TEMPLATES[name]) or "not narrator" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("name", "variables", "shown"),
    [
        ("02_llama3_date_and_tools", {}, "Today Date: 03 Feb 2031\n"),
        ("02_llama3_date_and_tools", {"date_string": "today"}, "Today Date: today\n"),
        ("02_llama3_date_and_tools", {"tools": [WEATHER]}, '\n                "place": {\n                    "type": "string",'),
        ("03_qwen_tools", {"tools": [WEATHER]}, '"météo", "description": "<b>\'\\"& of a place,\\nnow"'),
        ("04_qwen_thinking", {"enable_thinking": False}, "<think>\n\n</think>"),
        ("11_command_r_documents", {"documents": [{"title": "Cats"}]}, "Document: 0\ntitle: Cats\n"),
        ("12_granite_controls", {"controls": {"length": "short"}}, 'assistant {"length": "short"}<'),
        ("13_macros_that_recurse", {"tools": [WEATHER]}, "    at: number[],\n"),
        ("17_gpt_oss_channels", {"reasoning_effort": "high"}, "Current date: 2031-02-03\n\nReasoning: high<"),
    ],
)
def test_what_is_given_is_told(fixed_time: None, name: str, variables: dict[str, Any], shown: str) -> None:
    pytest.importorskip("transformers")
    assert shown in render_ours(TEMPLATES[name], [said("user", "Hi")], add_generation_prompt=True, **variables)


def test_what_is_set_between_the_marks_of_training_stays_there(oracle: Oracle) -> None:
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}{% set y = 3 %}{{ x }}{% endgeneration %}{{ x }}{{ y is defined }}"
    assert render_ours(template, [said("user", "Hi")]) == oracle.render(template, [said("user", "Hi")]) == "21False"


def test_smollm2s_template(oracle: Oracle, smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_header(smollm2_gguf).metadata)
    template = tokenizer.chat_template
    assert template is not None
    for name, messages in CONVERSATIONS.items():
        ours = outcome(lambda messages=messages: tokenizer.apply_chat_template(messages))
        assert ours == outcome(lambda messages=messages: oracle.render(template, messages, add_generation_prompt=True)), name


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([said("user", "a"), said("user", "b")], "Turns must go user, assistant"),
        ([said("user", "a"), said("assistant", "b"), said("narrator", "c")], "Turns must go user, assistant"),
        ([said("user", "a"), said("narrator", "b")], "Roles are user, assistant and tool"),
        ([said("user", "a"), said("assistant", None, tool_calls=[call(1, "f") | {"id": "1"}])], "nine letters or digits"),
        ([said("user", None)], "can only concatenate|unsupported operand"),
        ([said("user", "a"), {"role": "tool"}], "no attribute 'content'"),
    ],
)
def test_a_refusal_is_the_callers_to_mend(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render_ours(ALTERNATING, messages)
    assert isinstance(caught.value, InvalidValueError)
    assert translated(caught.value).status_code == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{% if %}",
        "{% generation %}",
        "{% include 'x' %}",
        "{{ strftime_now(5) }}",
        "{{ namespace | tojson }}",
    ],
)
def test_a_template_can_neither_escape_nor_break_the_engine(template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ChatTemplateError):
        render(template, messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render(None, [])


def test_the_date_is_todays(bpe_metadata: Callable[[str], dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata("qwen2") | {"tokenizer.chat_template": "{{ strftime_now('%Y') }} {{ date_string }}"})
    assert tokenizer.apply_chat_template([], date_string="today") == f"{datetime.now().year} today"
