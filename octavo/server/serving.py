"""What the routes share: the engine, the names it serves under, and the calls that are live."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from octavo.engine.async_engine import AsyncEngine, Call
from octavo.errors import shown
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics

Result = TypeVar("Result")

ENCODERS = 2
"""Threads that make tokens of texts and compile structures, which may take long for some."""


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


@dataclass
class Ticket:
    """One HTTP call: the id that its answer bears, and what the log tells of it at the end."""

    kind: str
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.request_id}"


class Serving:
    """names: what the model is called, the first one in answers. any_name: whether any other will do too."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, names: Sequence[str], any_name: bool = False) -> None:
        self.engine = engine
        self.metrics = metrics
        self.names = list(names)
        self.created = int(time.time())
        self._any_name = any_name
        self._calls: dict[str, Call] = {}
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="octavo-encode")

    def model_name(self, asked: str) -> str:
        """The name to answer with. Raises ApiError 404 for another model's."""
        if not asked:
            return self.names[0]
        if asked not in self.names and not self._any_name:
            raise ApiError(404, f"model: {shown(asked)}; served here: {', '.join(self.names)}", param="model", code="model_not_found")
        return asked

    def ticket(self, kind: str, request: Request, body_id: str | None, model: str) -> Ticket:
        """For a call that begins. Raises ApiError 400 where its id is that of a live one."""
        self.engine.require_ready()
        request_id = body_id or request.scope["octavo"].get("given_id") or request.scope["octavo"]["request_id"]
        ticket = Ticket(kind, request_id, self.model_name(model))
        request.scope["octavo"]["request_id"] = request_id
        request.scope["octavo"]["figures"] = ticket.figures
        if request_id in self._calls:
            raise ApiError(400, f"request_id: {shown(request_id)} is in use by a live request", param="request_id")
        return ticket

    async def work(self, what: Callable[[], Result]) -> Result:
        """Run something that may take long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, what)

    def begin(self, ticket: Ticket, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams) -> Call:
        """Queue encoded prompts, all or none."""
        if ticket.request_id in self._calls:  # another came while this one was read
            raise ApiError(400, f"request_id: {shown(ticket.request_id)} is in use by a live request", param="request_id")
        ids = [ticket.request_id] if len(prompts) == 1 else [f"{ticket.request_id}/{place}" for place in range(len(prompts))]
        call = self.engine.add([(text, token_ids, params, name) for (text, token_ids), name in zip(prompts, ids, strict=True)])
        self._calls[ticket.request_id] = call
        return call

    def end(self, ticket: Ticket, call: Call) -> None:
        """A call is over, whether it was answered or left."""
        if self._calls.get(ticket.request_id) is call:
            del self._calls[ticket.request_id]
        self.engine.forget(call)

    @contextmanager
    def ended(self, ticket: Ticket, call: Call) -> Iterator[None]:
        try:
            yield
        finally:
            self.end(ticket, call)

    def abort(self, name: str) -> bool:
        """End a live call by its request id, or by the id that its answer bears."""
        call = self._calls.get(name) or self._calls.get(name.partition("-")[2])
        if call is None:
            return False
        ended = [self.engine.abort(request.request_id) for request in call.requests]
        return any(ended)

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)


def new_id() -> str:
    return uuid.uuid4().hex


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await something as long as the client is there. Raises ClientGoneError; what is awaited is then cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, watcher):
            one.cancel()
