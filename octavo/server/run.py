"""The process: sockets, signals, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.engine.llm import LLM
from octavo.errors import OctavoError
from octavo.server.app import ServerOptions, make_app

MAX_HEADERS = 64 << 10
"""Bytes of a request's head."""

SWITCH_SECONDS = 0.0005
"""How long one thread keeps the interpreter from the other. The step thread needs it for a moment between two kernels, and Python's
own 5 ms would be longer than most of them."""


def serve(
    make: Callable[[], LLM], options: ServerOptions, *, host: str, port: int, drain_seconds: float, started: Callable[[LLM, str], None]
) -> None:
    """Serve until a signal comes: the first one drains, a second ends at once. started: called when the model is there, with the URL.

    Raises what loading raises, and OctavoError where the address cannot be had.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    failures: list[BaseException] = []

    def loaded(error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)
            server.should_exit = True
            return
        gc.collect()
        gc.freeze()
        started(app.state.serving.engine.llm, f"http://{f'[{host}]' if ':' in host else host}:{server.port}")

    app = make_app(make, options, loaded)

    class Protocol(_Protocol):
        patience = options.patience

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config, lambda: app.state.serving.engine.drain(drain_seconds))
    try:
        server.run()
    except SystemExit:  # uvicorn has said why, to its log
        raise OctavoError(f"{host}:{port}: the address cannot be listened on; is another server there?") from None
    if failures:
        raise failures[0]


class _Server(uvicorn.Server):
    """Drains when it is told to end."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Any]) -> None:
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The one that is listened on, also where any was asked for."""
        return int(self.servers[0].sockets[0].getsockname()[1]) if self.servers else self.config.port

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._draining is None:
            logging.getLogger("octavo.server").info("draining; a second signal ends at once")
            self._draining = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._drain()
        self.should_exit = True


class _Protocol(HttpToolsProtocol):
    """Does not wait for ever for a request's head, nor keep one of any size."""

    patience = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS and not self._within(data):
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)

    def _within(self, data: bytes) -> bool:
        """Whether the head's end is in sight: what follows it is the body."""
        return b"\r\n\r\n" in data[:MAX_HEADERS] and self._head_bytes - len(data) < MAX_HEADERS

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(self.patience, self._refuse, b"408 Request Timeout")

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._head_came()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
