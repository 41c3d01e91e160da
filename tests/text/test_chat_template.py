from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from octavo.errors import ChatTemplateError, InvalidValueError
from octavo.loading.gguf import read_header
from octavo.text.chat_template import render
from octavo.text.tokenizer import Tokenizer

LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {%- if message.hidden is defined %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
{%- elif message['role'] == 'assistant' %}
 {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}
    {{ raise_exception('Only user and assistant roles are supported, not ' ~ message['role']) }}
{% endif %}{% endfor %}"""

DATED = "{{ strftime_now('%Y') }}|{{ documents is none }}|{{ extra }}|{{ {'é': '<&>'} | tojson }}|{{ messages | length }}"

TOOL = {"type": "function", "function": {"name": "météo", "description": "<b>'\"&", "parameters": {"a": [1, None, True]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "<think>\nx</think>\n\nHello!"},
        {"role": "user", "content": "日本 <b>"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok", "hidden": True}, {"role": "user", "content": "there"}],
]


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


def render_ours(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return render(template, messages, bos_token="<s>", eos_token="</s>", **variables)


@pytest.mark.parametrize("template", [LLAMA3, QWEN, MISTRAL, DATED], ids=["llama 3", "qwen", "mistral", "helpers"])
@pytest.mark.parametrize(
    "variables", [{}, {"tools": [TOOL, TOOL]}, {"enable_thinking": False, "extra": "x"}], ids=["plain", "tools", "own variables"]
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_is_transformers(
    oracle: Oracle, template: str, messages: list[dict[str, Any]], variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    variables = {"add_generation_prompt": add_generation_prompt, **variables}
    if template == MISTRAL and messages[0]["role"] == "system":
        with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
            oracle.render(template, messages, **variables)
        with pytest.raises(ChatTemplateError, match="roles must alternate"):
            render_ours(template, messages, **variables)
    else:
        assert render_ours(template, messages, **variables) == oracle.render(template, messages, **variables)


def test_smollm2s_template(oracle: Oracle, smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_header(smollm2_gguf).metadata)
    assert tokenizer.chat_template is not None
    for messages in CONVERSATIONS:
        assert tokenizer.apply_chat_template(messages) == oracle.render(tokenizer.chat_template, messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "Conversation roles must alternate"),
        ([{"role": "tool", "content": "a"}], "Conversation roles must alternate"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "not tool"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "unsupported operand"),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], "no attribute 'content'"),
    ],
)
def test_a_refusal_is_the_callers_to_mend(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render_ours(MISTRAL, messages)
    assert isinstance(caught.value, InvalidValueError)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{% if %}",
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
