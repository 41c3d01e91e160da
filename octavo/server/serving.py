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
from octavo.server.protocol import MAX_LABEL, SamplingBody

Result = TypeVar("Result")
EncodedPrompts = list[tuple[str | None, list[int]]]

ENCODERS = 2
"""Threads that make tokens of texts and compile structures, which may take long for some."""

NO_TOKEN = "the deadline passed before the first token"


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


@dataclass
class Ticket:
    """One HTTP call from its arrival: the id that its answer bears, and what the log tells of it at the end.

    arrival: by time.monotonic. call: what is queued of it; before that `aborted` says that it is to end at once.
    """

    kind: str
    request_id: str
    model: str
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    call: Call | None = None
    aborted: bool = False
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
        self._tickets: dict[str, Ticket] = {}
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="octavo-encode")

    def model_name(self, asked: str) -> str:
        """The name to answer with. Raises ApiError 404 for another model's."""
        if not asked:
            return self.names[0]
        if asked not in self.names and not self._any_name:
            raise ApiError(404, f"model: {shown(asked)}; served here: {', '.join(self.names)}", param="model", code="model_not_found")
        return asked

    def ticket(self, kind: str, request: Request, body: SamplingBody) -> Ticket:
        """For a call that begins. Raises ApiError 400 where its id is that of a live one."""
        self.engine.require_ready()
        known = request.scope["octavo"]
        request_id = body.request_id or known.get("given_id") or known["request_id"]
        ticket = Ticket(kind, request_id, self.model_name(body.model))
        known["request_id"], known["figures"] = request_id, ticket.figures
        if body.user is not None:
            ticket.figures["user"] = body.user[:MAX_LABEL]
        if request_id in self._tickets:
            raise ApiError(400, f"request_id: {shown(request_id)} is in use by a live request", param="request_id")
        return ticket

    async def work(self, what: Callable[[], Result]) -> Result:
        """Run something that may take long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, what)

    async def begin(
        self, request: Request, ticket: Ticket, params: SamplingParams, count: int, read: Callable[[], tuple[EncodedPrompts, Result]]
    ) -> tuple[Call, Result]:
        """Queue a call's prompts, all or none; it is live from here until `end`.

        read: encodes `count` prompts, which may take long, so it runs beside the event loop; meanwhile they count as waiting. What it
        returns beside them is returned. Raises ApiError 408 where the deadline passes before it is done, ClientGoneError, OverloadedError.
        """
        self._tickets[ticket.request_id] = ticket
        try:
            deadline = self.engine.llm.engine.deadline(params, ticket.arrival)
            with self.engine.expected(count):
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    prompts, beside = await unless_gone(request, self.work(read))
            ids = [ticket.request_id] if count == 1 else [f"{ticket.request_id}/{place}" for place in range(count)]
            wanted = [(text, token_ids, params, name) for (text, token_ids), name in zip(prompts, ids, strict=True)]
            ticket.call = self.engine.add(wanted, ticket.arrival)
        except BaseException as error:
            self.end(ticket)
            if isinstance(error, TimeoutError):
                raise ApiError(408, NO_TOKEN, code="timeout") from None
            raise
        if ticket.aborted:
            self._abort(ticket.call)
        return ticket.call, beside

    def end(self, ticket: Ticket) -> None:
        """A call is over, whether it was answered or left."""
        if self._tickets.get(ticket.request_id) is ticket:
            del self._tickets[ticket.request_id]
        if ticket.call is not None:
            self.engine.forget(ticket.call)

    @contextmanager
    def ended(self, ticket: Ticket) -> Iterator[None]:
        try:
            yield
        finally:
            self.end(ticket)

    def abort(self, name: str) -> bool:
        """End a live call by its request id, or by the id that its answer bears. False where there is none, or it has ended."""
        ticket = self._tickets.get(name) or self._tickets.get(name.partition("-")[2])
        if ticket is None or name not in (ticket.request_id, ticket.id):
            return False
        ticket.aborted = True
        return ticket.call is None or self._abort(ticket.call)

    def _abort(self, call: Call) -> bool:
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
