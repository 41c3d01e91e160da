"""The server in this process, where its threads can be held and its parts broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from octavo import LLM
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.errors import UnavailableError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.server import answers
from octavo.server.app import ServerOptions, make_app
from octavo.server.errors import ApiError
from octavo.worker import logits_processors

PROMPT = "Name the capital of France."


class Gate:
    """Holds whoever encodes a prompt, until it is opened."""

    def __init__(self, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: AsyncEngine = app.state.serving.engine
        tokenizer = self.engine.llm.tokenizer
        encode, self._open = tokenizer.encode, threading.Event()

        def held(*args: Any, **more: Any) -> list[int]:
            assert self._open.wait(20)
            return encode(*args, **more)

        monkeypatch.setattr(tokenizer, "encode", held)

    async def holds(self, count: int) -> None:
        """Until so many prompts are being read."""
        while self.engine._num_expected != count:
            await asyncio.sleep(0.005)

    def open(self) -> None:
        self._open.set()


@contextlib.asynccontextmanager
async def inside(model: Path, **options: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    app = make_app(lambda: LLM(model, max_model_len=512, prealloc_blocks=32), ServerOptions(names=["smol"], **options))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://inside", timeout=60) as client:
        while not app.state.serving.engine.is_ready:
            await asyncio.sleep(0.01)
        yield app, client


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def ask(client: httpx.AsyncClient, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | more))


def test_what_is_read_counts_as_waiting_and_has_its_id(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with inside(smollm2_gguf, max_waiting=2) as (app, client):
            gate = Gate(app, monkeypatch)
            read = ask(client, request_id="first"), ask(client, prompt=[PROMPT], request_id="second")
            await gate.holds(2)
            overloaded = await ask(client)
            assert overloaded.status_code == 429
            assert overloaded.headers["retry-after"]
            same = await ask(client, request_id="first")
            assert same.status_code == 400
            assert "in use" in same.text
            gate.open()
            assert [(await one).status_code for one in read] == [200, 200]
            assert (await ask(client, request_id="first")).status_code == 200

    run(scenario)


def test_a_call_larger_than_what_may_wait_is_let_in_when_nothing_waits(smollm2_gguf: Path):
    async def scenario() -> None:
        async with inside(smollm2_gguf, max_waiting=2) as (_, client):
            answer = await ask(client, prompt=[PROMPT] * 5)
            assert answer.status_code == 200
            assert len(answer.json()["choices"]) == 5

    run(scenario)


def test_a_deadline_that_passes_while_a_prompt_is_read(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            gate = Gate(app, monkeypatch)
            began = time.monotonic()
            for stream in (False, True):
                answer = await ask(client, timeout_ms=100, stream=stream)
                assert answer.status_code == 408
                assert answer.json()["error"]["code"] == "timeout"
            assert time.monotonic() - began < 10  # the gate would hold for 20
            gate.open()
            await gate.holds(0)

    run(scenario)


def test_deleted_while_it_is_read(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            gate = Gate(app, monkeypatch)
            answer = ask(client, request_id="gone", max_tokens=400)
            await gate.holds(1)
            assert (await client.delete("/v1/requests/cmpl-gone")).status_code == 200
            gate.open()
            (choice,) = (await answer).json()["choices"]
            assert choice["finish_reason"] == "abort"

    run(scenario)


def test_a_client_that_leaves_while_its_prompt_is_read(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            gate = Gate(app, monkeypatch)
            leave = asyncio.Event()
            body = json.dumps({"prompt": PROMPT, "request_id": "left"}).encode()
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await leave.wait()
                return {"type": "http.disconnect"}

            async def send(_: Any) -> None:
                pass

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b"", "root_path": ""}
            call = asyncio.ensure_future(app(scope, receive, send))
            await gate.holds(1)
            leave.set()
            await call
            assert gate.engine._num_expected == 0
            gate.open()
            assert (await ask(client, request_id="left")).status_code == 200

    run(scenario)


def test_a_drain_waits_for_what_is_read_and_refuses_it(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            gate = Gate(app, monkeypatch)
            answer = ask(client)
            await gate.holds(1)
            drain = asyncio.ensure_future(gate.engine.drain(30))
            await asyncio.sleep(0.05)
            assert not drain.done()
            gate.open()
            assert (await answer).status_code == 503
            await drain

    run(scenario)


def test_a_fault_of_the_server_is_a_500_with_an_id(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            monkeypatch.setattr(app.state.serving.engine.llm.engine, "check", lambda params: 1 // 0)
            with caplog.at_level("INFO", "octavo.server"):
                answer = await ask(client, request_id="broken")
            assert answer.status_code == 500
            assert answer.headers["x-request-id"] == "broken"
            assert answer.json()["error"]["type"] == "server_error"
            assert "ZeroDivisionError" in caplog.text
            assert "id=broken method=POST path=/v1/completions status=500" in caplog.text

    run(scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_questions_are_refused_when_the_engine_has_stopped(smollm2_gguf: Path):
    def boom() -> None:
        raise RuntimeError("the step thread breaks")

    async def scenario() -> None:
        engine = AsyncEngine(lambda: LLM(smollm2_gguf, max_model_len=512, prealloc_blocks=32))
        await engine.start()
        engine._commands.put(boom)
        for _ in range(2):  # one that waits when the thread breaks, and one that comes after
            with pytest.raises(UnavailableError, match="the step thread breaks"):
                await engine.call(Engine.stats)
        await engine.close()

    run(scenario)


def test_questions_are_refused_when_the_engine_is_closed_and_those_who_left_harm_nobody(smollm2_gguf: Path):
    async def scenario() -> None:
        engine = AsyncEngine(lambda: LLM(smollm2_gguf, max_model_len=512, prealloc_blocks=32))
        await engine.start()
        left = asyncio.ensure_future(engine.call(Engine.stats))
        await asyncio.sleep(0)
        left.cancel()
        assert (await engine.call(Engine.stats)).running == 0
        await engine.close()
        with pytest.raises(UnavailableError, match="closed"):
            await engine.call(Engine.stats)

    run(scenario)


def test_a_row_of_nan_is_one_requests_error(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    """S10 over HTTP: the others are as without it."""

    def poison(prompt_token_ids: list[int], token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, torch.nan)

    monkeypatch.setitem(logits_processors._registered, "poison", poison)

    async def scenario() -> None:
        async with inside(smollm2_gguf) as (_, client):
            alone = await ask(client, temperature=0)
            good, bad = await asyncio.gather(ask(client, temperature=0), ask(client, logits_processors=["poison"]))
            assert bad.status_code == 500
            assert "NaN" in bad.json()["error"]["message"]
            assert good.json()["choices"] == alone.json()["choices"]
            again = await ask(client, temperature=0)
            assert again.json()["choices"] == alone.json()["choices"]

    run(scenario)


def test_what_the_template_refuses_is_a_400(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    """A9."""

    async def scenario() -> None:
        async with inside(smollm2_gguf) as (app, client):
            templates = app.state.serving.engine.llm.tokenizer._vocabulary.chat_templates
            monkeypatch.setitem(templates, "default", "{{ raise_exception('roles must alternate') }}")
            messages = [{"role": "user", "content": "Hi"}] * 2
            answer = await client.post("/v1/chat/completions", json={"messages": messages})
            assert answer.status_code == 400
            assert "roles must alternate" in answer.json()["error"]["message"]

    run(scenario)


def output(*answers: CompletionOutput) -> RequestOutput:
    return RequestOutput("one", None, [1], list(answers), True, RequestMetrics(0.0))


def test_one_prompt_past_its_deadline_leaves_the_others_their_answers():
    late = CompletionOutput(0, "", [], finish_reason="timeout")
    answers._require_answers([output(late), output(CompletionOutput(0, "Paris", [5], finish_reason="timeout"))])
    with pytest.raises(ApiError) as error:
        answers._require_answers([output(late), output(late)])
    assert error.value.status_code == 408
