"""A client of OpenAI's completions that takes little of the machine it shares with the server, and notes when tokens come.

Requests are bytes before the clock runs. Each has a connection of its own, so that none fails because the server closed an idle one;
the answer goes through httptools' parser, and of its events only what is counted is decoded.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.bench.workload import Work
from octavo.errors import InvalidValueError, OctavoError, described, shown

ENDINGS = ("length", "stop", None)
"""Reasons to finish that a whole answer may give."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it goes over the wire, and its lengths in tokens."""

    content: bytes
    prompt_tokens: int
    tokens: int


@dataclass(kw_only=True, slots=True)
class Answer:
    """What became of a call. Times are the processor clock's, `time.perf_counter`.

    due: when it was to be sent. sent: when its connection was begun. times: when chunks came that carry tokens. output_tokens: as the
    server counts, else a token a chunk. failure: its kind; None where the answer is whole.
    """

    due: float
    sent: float
    asked_tokens: int
    prompt_tokens: int
    output_tokens: int = 0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    failure: str | None = None
    detail: str = ""

    @property
    def late(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where all came in one chunk."""
        if len(self.times) < 2 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between chunks."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    @property
    def e2e(self) -> float:
        """From sending to the end of the stream."""
        return self.ended - self.sent


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


_chunk = msgspec.json.Decoder(_Chunk).decode


class Client:
    """Asks one server."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        """Raises InvalidValueError where the URL is none."""
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidValueError(f"url: {shown(url)}; allowed: http://HOST:PORT or https://HOST:PORT")
        self.url = parts.geturl()
        self._timeout = timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._name = parts.hostname if self._tls else None
        self._address: tuple[str, int] = (parts.hostname, port or (443 if self._tls else 80))
        self._path = parts.path
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    def call(self, model: str, prompt: list[int] | str, work: Work) -> Call:
        """Ask for as many tokens as `work` does, whatever the model would rather do; `prompt` is its own in the form that is sent."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": work.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Call(self._request("POST", "/v1/completions", msgspec.json.encode(body)), len(work.prompt), work.tokens)

    async def models(self) -> list[_Card]:
        """What is served. Raises OctavoError where the server does not say."""
        stream = _Stream(self._request("GET", "/v1/models"), Answer(due=0.0, sent=0.0, asked_tokens=0, prompt_tokens=0))
        await self._exchange(stream)
        if stream.status != 200:
            answer = stream.answer
            raise OctavoError(f"url: {self.url}/v1/models does not answer ({f'{answer.failure}: {answer.detail}'.rstrip(': ')})")
        try:
            return msgspec.json.decode(stream.body, type=_Models).data
        except msgspec.DecodeError as error:
            raise OctavoError(f"url: {self.url}/v1/models does not list models ({error})") from None

    async def complete(self, call: Call, due: float | None = None) -> Answer:
        """Send a call, and read the answer to its end; failures are in it."""
        sent = time.perf_counter()
        answer = Answer(due=sent if due is None else due, sent=sent, asked_tokens=call.tokens, prompt_tokens=call.prompt_tokens)
        await self._exchange(_Stream(call.content, answer))
        return answer

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + body

    async def _exchange(self, stream: _Stream) -> None:
        transport = None
        try:
            async with asyncio.timeout(self._timeout):
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_connection(lambda: stream, *self._address, ssl=self._tls, server_hostname=self._name)
                self._address = transport.get_extra_info("peername")[:2]  # the name is looked up once
                await stream.ended
        except TimeoutError:
            stream.fail("timeout", f"after {self._timeout:g} s")
        except OSError as error:
            stream.fail("no connection", described(error))
        finally:
            if transport is not None:
                transport.abort()


class _Stream(asyncio.Protocol):
    """Writes a request when it is connected, and its answer's events into an `Answer`. body: of an answer that is no stream."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self.answer = answer
        self.status = 0
        self.body = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._is_events = False
        self._line = b""
        self._is_done = False
        self._is_over = False
        self._finish_reason: str | None = None

    def fail(self, kind: str, detail: object) -> None:
        """The first failure counts, and ends the answer."""
        if self._is_over:
            return
        self.answer.failure, self.answer.detail = kind, " ".join(str(detail).split())[:300]
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail("malformed", described(error.__context__ or error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_done:
            self._conclude()
        elif self.status not in (0, 200):
            self.fail(f"HTTP {self.status}", _message(self.body))
        else:
            self.fail("disconnect", error or "the connection was closed before the answer's end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_events = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_events:
            self.body += body
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        self._conclude()

    def _take(self, data: bytes) -> None:
        answer = self.answer
        if data == b"[DONE]":
            self._is_done = True
            answer.ended = self._now
            return
        chunk = _chunk(data)
        if chunk.error is not None:
            self.fail("error event", _message(data))
        if chunk.usage is not None:
            answer.prompt_tokens, answer.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            # A token whose text is held back comes with an empty one; a finish without text may carry none.
            if choice.text or choice.finish_reason is None:
                answer.times.append(self._now)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _conclude(self) -> None:
        """All has come that will come."""
        answer = self.answer
        if self._is_over:
            return
        if self.status != 200:
            self.fail(f"HTTP {self.status}", _message(self.body))
        elif not self._is_events:
            self.fail("no stream", self.body.decode(errors="replace"))
        elif not (self._is_done or self._finish_reason):
            self.fail("incomplete", "the stream has no end")
        elif self._finish_reason not in ENDINGS:
            self.fail("ended early", self._finish_reason)
        elif not answer.times:
            self.fail("no tokens", "the stream carries none")
        else:
            answer.output_tokens = answer.output_tokens or len(answer.times)
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self.answer.ended = self.answer.ended or time.perf_counter()
        if not self.ended.done():  # cancelled where time is up
            self.ended.set_result(None)


def _message(body: bytes) -> str:
    """What an error's body says, in any of the forms there are."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
