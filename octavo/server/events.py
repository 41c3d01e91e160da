"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = 15.0
"""Seconds without an event after which a comment says that the server is still there."""

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % _encode(content)


class EventStream(Response):
    """Sends events until there are no more, or the client goes; then calls `on_end`, once and in any case."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            tasks = [asyncio.ensure_future(work) for work in (self._send(send), self._gone(receive), self._keep_alive(send))]
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            self._on_end()

    async def _send(self, send: Send) -> None:
        async for content in self._events:
            await send({"type": "http.response.body", "body": content, "more_body": True})
            self._sent = time.monotonic()
        await send({"type": "http.response.body", "body": b""})

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._sent + KEEP_ALIVE - time.monotonic()))
            if time.monotonic() - self._sent >= KEEP_ALIVE:
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
