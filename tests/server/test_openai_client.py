"""The official client as the judge."""

from __future__ import annotations

import json

import openai
import pytest
from serving import Server

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["smol", "other"]
    assert client.models.retrieve("other").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_a_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0, max_completion_tokens=20)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.model == "smol"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model="other", messages=CAPITAL, temperature=0, max_completion_tokens=20)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_chat_streamed_is_the_chat(client: openai.OpenAI):
    whole = client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0, max_tokens=40, n=2, seed=3)
    chunks = list(client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0, max_tokens=40, n=2, seed=3, stream=True))
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [whole.choices[index].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_last_where_it_is_asked_for(client: openai.OpenAI):
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="smol", messages=CAPITAL, temperature=0, max_tokens=5, stream=True, stream_options=options
    )
    *others, last = list(stream)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == 5


def test_logprobs_of_a_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for one in content:
        assert [top.logprob for top in one.top_logprobs] == sorted((top.logprob for top in one.top_logprobs), reverse=True)
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert bytes(one.bytes).decode() == one.token
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    stream = client.chat.completions.create(
        model="smol", messages=CAPITAL, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3, stream=True
    )
    told = [one for chunk in stream for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert told == content


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI, server: Server):
    text = "The capital of France is"
    ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    answers = []
    for prompt in (text, ids, [text, text], [ids, ids]):
        answer = client.completions.create(model="smol", prompt=prompt, temperature=0, max_tokens=6)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        answers += [choice.text for choice in answer.choices]
    assert len(answers) == 6
    assert len(set(answers)) == 1


def test_echo_scores_the_prompt(client: openai.OpenAI):
    asked = {"model": "smol", "prompt": "One two three", "echo": True, "logprobs": 1, "temperature": 0}
    answer = client.completions.create(**asked, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "One two three"
    assert "".join(choice.logprobs.tokens) == "One two three"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(one <= 0 for one in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, 3, 7]
    assert answer.usage.completion_tokens == 0
    longer = client.completions.create(**asked, max_tokens=2).choices[0]
    assert longer.logprobs.token_logprobs[:3] == choice.logprobs.token_logprobs
    assert "".join(longer.logprobs.tokens) == longer.text
    streamed = list(client.completions.create(**asked, max_tokens=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == longer.text
    assert [one for chunk in streamed for one in chunk.choices[0].logprobs.tokens] == longer.logprobs.tokens


def test_stops_and_seeds(client: openai.OpenAI):
    asked = {"model": "smol", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 30}
    answer = client.completions.create(**asked, stop=["seven", "eight"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "seven"
    assert answer.choices[0].text.endswith("six, ")
    streamed = list(client.completions.create(**asked, stop=["seven"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    drawn = [client.completions.create(**asked | {"temperature": 1}, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_structured_answers(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smol",
        messages=CAPITAL,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )
    assert list(json.loads(answer.choices[0].message.content)) == ["city"]
    answer = client.completions.create(
        model="smol", prompt="Yes or no?", temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")
    answer = client.chat.completions.create(
        model="smol", messages=CAPITAL, max_tokens=200, seed=5, response_format={"type": "json_object"}, temperature=0.3
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"])
def test_tools_are_called_where_they_must(client: openai.OpenAI, choice: object, stream: bool):
    asked = {"model": "smol", "messages": CAPITAL, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked, temperature=0, max_tokens=100, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        finish = chunks[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        finish = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert finish == "tool_calls"
    assert call.id
    arguments = json.loads(call.function.arguments)
    if isinstance(choice, dict):
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")


def test_results_of_tools_are_read(client: openai.OpenAI):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}}
    messages = [
        *CAPITAL,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    answer = client.chat.completions.create(model="smol", messages=messages, tools=TOOLS, temperature=0, max_tokens=10)
    assert answer.usage.prompt_tokens > 60


def test_errors_are_of_the_clients_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="Hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="Hi", suffix="x")
    assert "suffix" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="Hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="Hi " * 5000)
    assert caught.value.code == "context_length_exceeded"
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    with pytest.raises(openai.BadRequestError, match="content"):
        client.chat.completions.create(model="smol", messages=parts)
