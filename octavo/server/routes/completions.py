"""`/v1/completions`: the plain continuation of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.engine import Engine, Prompt
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server import answers, errors
from octavo.server.errors import ApiError
from octavo.server.protocol import Completion, CompletionRequest
from octavo.server.serving import EncodedPrompts, Serving

router = APIRouter()


@router.post("/v1/completions", response_model=Completion, responses=errors.documented(404, 408, 429, 500, 503, streams=True))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts. With `stream: true` the answer comes as server-sent events."""
    serving: Serving = request.app.state.serving
    ticket = serving.ticket("cmpl", request, body)
    engine = serving.engine.llm.engine
    prompts = _prompts(body.prompt)
    scored = body.max_tokens == 0
    if scored and not body.echo:
        raise ApiError(400, "max_tokens: 0; allowed: a whole number from 1, or 0 with echo: true", param="max_tokens")
    if scored and body.structured_outputs is not None:
        raise ApiError(400, "max_tokens: 0; allowed: from 1 with structured_outputs", param="max_tokens")
    changed: dict[str, Any] = {"output_kind": "delta" if body.stream else "final", "logprobs": body.logprobs}
    if body.max_tokens is not None:
        changed["max_tokens"] = max(1, body.max_tokens)
    if scored:
        changed["min_tokens"] = 0
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        changed["prompt_logprobs"] = body.logprobs
    params = body.params(serving.engine.llm.recommended, **changed)

    def read() -> tuple[EncodedPrompts, CompletionWriter]:
        return _encode(engine, prompts, body, params), CompletionWriter(body, engine)

    return await answers.answer(request, serving, ticket, body, params, len(prompts), read)


def _prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt: it is empty; at least one token is needed", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _encode(engine: Engine, prompts: list[Prompt], body: CompletionRequest, params: SamplingParams) -> EncodedPrompts:
    engine.check(params)
    bare = body.add_special_tokens is False
    encoded: EncodedPrompts = []
    for prompt in prompts:
        if bare and isinstance(prompt, str):
            encoded.append((prompt, engine.encode(engine.tokenizer.encode(prompt, add_special_tokens=False))[1]))
        else:
            encoded.append(engine.encode(prompt))
    return encoded


class CompletionWriter:
    stream_kind = whole_kind = "text_completion"

    def __init__(self, body: CompletionRequest, engine: Engine) -> None:
        self.hidden_tokens = int(body.max_tokens == 0)
        self._body = body
        self._engine = engine
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._offsets: dict[int, int] = {}

    def chunks(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for answer in output.outputs:
            index = place * len(output.outputs) + answer.index
            ends = answer.finish_reason is not None and index not in self._ended
            is_first = index not in self._begun
            if not (answer.delta or answer.token_ids or ends):
                continue
            if answer.finish_reason in ("error", "timeout"):  # an event of its own tells
                ends = False
            self._begun.add(index)
            if answer.finish_reason is not None:
                self._ended.add(index)
            yield {"choices": [self._choice(index, output, answer, answer.delta, is_first, ends)]}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for place, output in enumerate(outputs):
            for answer in output.outputs:
                choices.append(self._choice(place * len(output.outputs) + answer.index, output, answer, answer.text, True, True))
        return {"choices": choices}

    def _choice(self, index: int, output: RequestOutput, answer: CompletionOutput, text: str, is_first: bool, ends: bool) -> dict[str, Any]:
        body, echoes = self._body, bool(self._body.echo) and is_first
        token_ids, scores = answer.token_ids, answer.logprobs
        finish = answer.finish_reason if ends else None
        if self.hidden_tokens:
            text, token_ids, scores = "", [], [] if scores is not None else None
            finish = "length" if ends else None
        if echoes:
            prompt = output.prompt
            text = (self._engine.tokenizer.decode(output.prompt_token_ids, False) if prompt is None else prompt) + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        if body.logprobs is not None:
            both = [*((output.prompt_logprobs or []) if echoes else []), *(scores or [])]
            ids = [*(output.prompt_token_ids if echoes else []), *token_ids]
            choice["logprobs"] = self._logprobs(index, ids, both)
        if ends and not self.hidden_tokens:
            choice |= answers.finish_fields(answer)
        if body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = answers.readable(output.prompt_logprobs)
        return choice

    def _logprobs(self, index: int, token_ids: list[int], scores: list[dict[int, Logprob] | None]) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._offsets.get(index, 0)
        for token_id, known in zip(token_ids, scores, strict=False):
            own = None if known is None else known[token_id]
            token = self._engine.tokenizer.decode([token_id], False, True) if own is None else own.decoded_token
            found["tokens"].append(token)
            found["token_logprobs"].append(None if own is None else own.logprob)
            found["top_logprobs"].append(None if known is None else _by_text(known))
            found["text_offset"].append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return found


def _by_text(scores: dict[int, Logprob]) -> dict[str, float]:
    """Of tokens that read alike the likeliest counts."""
    found: dict[str, float] = {}
    for one in scores.values():
        found[one.decoded_token] = max(one.logprob, found.get(one.decoded_token, one.logprob))
    return found
