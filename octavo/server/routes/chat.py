"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.engine import Engine
from octavo.errors import PromptTooLongError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server import answers, errors
from octavo.server.conversation import THINK, AnswerParser, News, forced_calls, messages_for, tool_dict
from octavo.server.errors import ApiError
from octavo.server.protocol import ChatCompletion, ChatCompletionRequest
from octavo.server.serving import EncodedPrompts, Serving

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=errors.documented(404, 408, 429, 500, 503, streams=True))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation. With `stream: true` the answer comes as server-sent events."""
    serving: Serving = request.app.state.serving
    ticket = serving.ticket("chatcmpl", request, body)
    llm = serving.engine.llm
    grammar = _grammar(body)
    changed: dict[str, Any] = {"output_kind": "delta" if body.stream else "final", "logprobs": _logprobs(body)}
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = body.params(llm.recommended, **changed | {"max_tokens": limit} | ({"structured_outputs": grammar} if grammar else {}))

    def read() -> tuple[EncodedPrompts, ChatWriter]:
        text, token_ids = _encode(llm.engine, body, params)
        return [(None, token_ids)], ChatWriter(body, llm.engine, text, constrained=params.structured_outputs is not None)

    return await answers.answer(request, serving, ticket, body, params, 1, read)


def template_variables(body: Any) -> dict[str, Any]:
    """What a conversation's template is given beside its messages. Raises ApiError 400 for what is not the caller's to give."""
    variables = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "chat_template", "add_generation_prompt", "documents"):
        if name in variables:
            where = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{where}: given; allowed: the template's own variables", param=where)
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {}), **variables}
    if body.tools:
        variables["tools"] = [tool_dict(tool) for tool in body.tools]
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables


def templated(engine: Engine, body: Any) -> str:
    """The conversation as one text. Raises ChatTemplateError, and ApiError for what the template knows nothing of."""
    tools = body.tools if getattr(body, "tool_choice", None) != "none" else None
    variables = template_variables(body)
    if not tools:
        variables.pop("tools", None)
    tokenizer = engine.tokenizer
    if documents := getattr(body, "documents", None):
        if "documents" not in (tokenizer.chat_template or ""):
            raise ApiError(400, "documents: given; the model's chat template knows of none", param="documents")
        variables["documents"] = documents
    return tokenizer.apply_chat_template(messages_for(tokenizer.chat_template, body.messages, tools), **variables)


def _encode(engine: Engine, body: ChatCompletionRequest, params: SamplingParams) -> tuple[str, list[int]]:
    engine.check(params)
    text = templated(engine, body)
    try:
        return text, engine.encode(engine.tokenizer.encode_templated(text))[1]
    except PromptTooLongError as error:
        raise PromptTooLongError(f"messages{str(error).removeprefix('prompt')}") from None


def _logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: given; allowed: with logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _grammar(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """What response_format and tool_choice make of the answer, as structured_outputs. Raises ApiError where they contradict."""
    wanted: list[tuple[str, dict[str, Any]]] = []
    form = body.response_format
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice: given; allowed: with tools", param="tool_choice")
    if form is not None and form.type == "json_object":
        wanted.append(("response_format", {"json_object": True}))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(400, "response_format.json_schema.schema: it is missing", param="response_format.json_schema.schema")
        wanted.append(("response_format", {"json": form.json_schema.schema_}))
    if body.tools and (calls := forced_calls(body.tools, body.tool_choice, body.parallel_tool_calls is not False)) is not None:
        wanted.append(("tool_choice", {"grammar": calls}))
    if body.structured_outputs is not None:
        wanted.append(("structured_outputs", {}))
    if len(wanted) > 1:
        names = " and ".join(name for name, _ in wanted)
        raise ApiError(400, f"{names}: each says what the answer must be; allowed: one of them", param=wanted[-1][0])
    return wanted[0][1] if wanted else None


class ChatWriter:
    stream_kind, whole_kind = "chat.completion.chunk", "chat.completion"
    hidden_tokens = 0

    def __init__(self, body: ChatCompletionRequest, engine: Engine, text: str, constrained: bool) -> None:
        self._body = body
        self._engine = engine
        thinks = not constrained and THINK in (engine.tokenizer.chat_template or "")
        calls = bool(body.tools) and body.tool_choice != "none"
        begun = thinks and text.rstrip().endswith(THINK)
        most_calls = 1 if body.parallel_tool_calls is False else None
        self._parsers = [AnswerParser(thinks=thinks, begun=begun, calls=calls, most_calls=most_calls) for _ in range(body.n or 1)]
        self._scores: list[list[dict[int, Logprob]]] = [[] for _ in self._parsers]
        self._token_ids: list[list[int]] = [[] for _ in self._parsers]
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._prompt_told = False

    def chunks(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for answer in output.outputs:
            index = answer.index
            ends = answer.finish_reason is not None and index not in self._ended
            if not (answer.delta or answer.token_ids or ends):
                continue
            self._scores[index] += answer.logprobs or []
            self._token_ids[index] += answer.token_ids
            news = self._parsers[index].push(answer.delta, ends)
            is_first = index not in self._begun
            if not (is_first or ends or news.content or news.reasoning or news.calls):
                continue
            self._begun.add(index)
            if ends:
                self._ended.add(index)
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
            delta |= _said(news)
            told = ends and answer.finish_reason not in ("error", "timeout")  # those have an event of their own
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": self._logprobs(self._scores[index])}
            choice["finish_reason"] = self._finish(answer) if told else None
            choice |= answers.finish_fields(answer) if told else {}
            if self._body.return_token_ids:
                choice["token_ids"] = self._token_ids[index]
            self._scores[index], self._token_ids[index] = [], []
            yield {"choices": [choice]} | ({} if self._prompt_told else self._prompt(output))
            self._prompt_told = True

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return {"choices": [self._choice(answer) for answer in output.outputs]} | self._prompt(output)

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What an answer, or a stream's first chunk, tells of the prompt."""
        found: dict[str, Any] = {}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = answers.readable(output.prompt_logprobs)
        return found

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        news = self._parsers[answer.index].push(answer.text, ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": news.content or (None if news.calls else "")}
        if news.reasoning:
            message["reasoning_content"] = news.reasoning
        if news.calls:
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in news.calls]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs or []),
            "finish_reason": self._finish(answer),
        } | answers.finish_fields(answer)
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _finish(self, answer: CompletionOutput) -> str | None:
        called = self._parsers[answer.index].num_calls > 0
        return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason

    def _logprobs(self, scores: list[dict[int, Logprob]]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        most, content = self._body.top_logprobs or 0, []
        for known in scores:
            own, *_ = known.items()
            top = [self._score(*one) for one in known.items() if one[1].rank <= most]
            content.append(self._score(*own) | {"top_logprobs": top})
        return {"content": content}

    def _score(self, token_id: int, one: Logprob) -> dict[str, Any]:
        return {"token": one.decoded_token, "logprob": one.logprob, "bytes": list(self._engine.tokenizer.token_bytes(token_id))}


def _said(news: News) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if news.reasoning:
        said["reasoning_content"] = news.reasoning
    if news.content:
        said["content"] = news.content
    if news.calls:
        said["tool_calls"] = news.calls
    return said
