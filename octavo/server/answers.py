"""From the engine's outputs to what OpenAI's clients read: what completions and chats have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response

from octavo.engine.async_engine import Call
from octavo.errors import OctavoError, described
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling_params import MAX_ANSWERS, SamplingParams
from octavo.server import errors
from octavo.server.errors import ApiError
from octavo.server.events import DONE, KEEP_ALIVE, EventStream, event
from octavo.server.protocol import SamplingBody
from octavo.server.serving import NO_TOKEN, EncodedPrompts, Serving, Ticket, unless_gone


class Writer(Protocol):
    """Makes choices of outputs: of one kind of call, for one call, as it has state for each answer."""

    stream_kind: str
    """The `object` of a chunk."""

    whole_kind: str

    def chunks(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What chunks hold, `choices` and further fields, for what is new in an output."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """`choices`, and further fields of the answer."""

    @property
    def hidden_tokens(self) -> int:
        """Generated tokens that are not told, for each answer."""


async def answer(
    request: Request,
    serving: Serving,
    ticket: Ticket,
    body: SamplingBody,
    params: SamplingParams,
    count: int,
    read: Callable[[], tuple[EncodedPrompts, Writer]],
) -> Response:
    """Run a call and answer it, whole or as a stream. read: encodes its `count` prompts, and says who writes the answer."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: given; allowed: with stream: true", param="stream_options")
    if count * params.n > MAX_ANSWERS:
        raise ApiError(400, f"n: {params.n}, for {count} prompts; allowed: {MAX_ANSWERS} answers of a call at most", param="n")
    call, writer = await serving.begin(request, ticket, params, count, read)
    if body.stream:
        return await _streamed(request, serving, ticket, body, call, writer)
    with serving.ended(ticket):
        outputs = await unless_gone(request, call.outputs())
    _require_answers(outputs)
    generated = sum(len(one.token_ids) - writer.hidden_tokens for output in outputs for one in output.outputs)
    usage = _usage(call, generated, outputs)
    ticket.figures |= _figures(usage, outputs)
    content = {"id": ticket.id, "object": writer.whole_kind, "created": ticket.created, "model": ticket.model}
    return Response(msgspec.json.encode(content | writer.whole(outputs) | {"usage": usage}), media_type="application/json")


async def _streamed(request: Request, serving: Serving, ticket: Ticket, body: SamplingBody, call: Call, writer: Writer) -> Response:
    """What ends before its first token has a status of its own, so that is waited for, though not for ever."""
    events = _events(ticket, body, call, writer)
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request, asyncio.wait({first}, timeout=KEEP_ALIVE))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        serving.end(ticket)
        raise

    async def from_first() -> AsyncIterator[bytes]:
        try:
            yield await first
        except ApiError as error:
            yield event(errors.content(error.status_code, error.detail, code=error.code)) + DONE
            return
        async for content in events:
            yield content

    return EventStream(from_first(), lambda: serving.end(ticket))


async def _events(ticket: Ticket, body: SamplingBody, call: Call, writer: Writer) -> AsyncIterator[bytes]:
    """Raises ApiError where the first output says that there is no answer."""
    base: dict[str, Any] = {"id": ticket.id, "object": writer.stream_kind, "created": ticket.created, "model": ticket.model}
    options = body.stream_options
    told, always = (bool(options.include_usage), bool(options.continuous_usage_stats)) if options else (False, False)
    generated = -writer.hidden_tokens * sum(request.params.n for request in call.requests)
    last: dict[int, RequestOutput] = {}
    try:
        async for place, output in call:
            last[place] = output
            new = sum(len(one.token_ids) for one in output.outputs)
            if len(last) == 1 and not new and generated <= 0:
                _require_answers([output])
            generated += new
            content = b""
            for chunk in writer.chunks(place, output):
                if always:
                    chunk["usage"] = _usage(call, generated, list(last.values()))
                elif told:
                    chunk["usage"] = None
                content += event(base | chunk)
            if (failure := _failure(output)) is not None:
                content += event(failure)
            if content:
                yield content
        usage = _usage(call, generated, list(last.values()))
        ticket.figures |= _figures(usage, list(last.values()))
        if told:
            yield event(base | {"choices": [], "usage": usage})
    except ApiError:
        raise
    except OctavoError as error:
        yield event(errors.content(500, str(error)))
    except Exception as error:
        yield event(errors.content(500, described(error)))
        raise
    yield DONE


def _require_answers(outputs: list[RequestOutput]) -> None:
    """Raises ApiError where the model failed, or nothing at all came before the deadline."""
    all_answers = [one for output in outputs for one in output.outputs]
    for one in all_answers:
        if one.finish_reason == "error":
            raise ApiError(500, one.error or "the model failed")
    if all(one.finish_reason == "timeout" and not one.token_ids for one in all_answers):
        raise ApiError(408, NO_TOKEN, code="timeout")


def _failure(output: RequestOutput) -> dict[str, Any] | None:
    """The event that ends a stream that has begun and cannot be brought to its end."""
    if output.finished:
        for one in output.outputs:
            if one.finish_reason == "error":
                return errors.content(500, one.error or "the model failed")
            if one.finish_reason == "timeout":
                return errors.content(408, "the deadline passed; the answer is cut", code="timeout")
    return None


def _usage(call: Call, generated: int, outputs: list[RequestOutput]) -> dict[str, Any]:
    """generated: less than nothing where tokens are hidden that did not come."""
    generated = max(0, generated)
    prompt = sum(len(request.prompt_token_ids) for request in call.requests)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": details,
    }


def _figures(usage: dict[str, Any], outputs: list[RequestOutput]) -> dict[str, Any]:
    """For the log."""
    firsts = [output.metrics.first_token - output.metrics.arrival for output in outputs if output.metrics.first_token is not None]
    ends = sorted({str(one.finish_reason) for output in outputs for one in output.outputs})
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token": round(min(firsts), 4) if firsts else None,
        "finish": ",".join(ends),
    }


def finish_fields(answer: CompletionOutput) -> dict[str, Any]:
    """`stop_reason` only where there is one, as OpenAI has no such field."""
    return {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}


def readable(scores: list[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """Prompt logprobs as JSON has them."""
    if scores is None:
        return None
    return [None if one is None else {str(token_id): asdict(score) for token_id, score in one.items()} for one in scores]
