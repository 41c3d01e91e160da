"""What every request passes before a route sees it: its id, the key, the size and pace of its body, and the line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError, response, translated
from octavo.server.metrics import Metrics
from octavo.server.serving import new_id

OPEN = ("/health", "/ready", "/version", "/metrics")
"""Paths that need no key: they tell nothing of who asks what."""

ID = re.compile(r"[!-~]{1,128}")

logger = logging.getLogger("octavo.server")


class Door:
    """keys: one of them must be the bearer token; none, and all may pass. max_body: bytes. patience: seconds for a body."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, keys: Sequence[str], max_body: int, patience: float, as_json: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._patience = patience
        self._as_json = as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        known: dict[str, Any] = {"request_id": new_id(), "figures": {}}
        if ID.fullmatch(given):
            known["request_id"] = known["given_id"] = given
        scope["octavo"] = known
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", known["request_id"].encode())]
            await send(message)

        try:
            try:
                self._check(scope, headers)
                await self._app(scope, self._measured(receive), answer)
            except ApiError as error:
                if not status:
                    await response(error)(scope, receive, answer)
            except Exception as error:
                logger.exception("request %s failed", known["request_id"])
                if status:  # what is left of it cannot be sent, and the client sees that
                    raise
                await response(translated(error))(scope, receive, answer)
        finally:
            self._log(scope, status or 499, time.perf_counter() - began, known)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            # All keys are compared, each in constant time, so that the time tells nothing.
            equal = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if not any(equal) or scheme.lower() != b"bearer":
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", WWW_Authenticate="Bearer")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _measured(self, receive: Receive) -> Receive:
        size, whole, deadline = 0, False, time.monotonic() + self._patience

        async def measured() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {self._patience:g} seconds", Connection="close") from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._max_body:
                raise self._too_large()
            return message

        return measured

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is too large; allowed: {self._max_body} bytes", code="body_too_large", Connection="close")

    def _log(self, scope: Scope, status: int, seconds: float, known: dict[str, Any]) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.responded(route, status)
        quiet = route in OPEN
        line = {"id": known["request_id"], "method": scope["method"], "path": scope["path"], "status": status}
        line |= {"seconds": round(seconds, 4), **known["figures"]}
        if self._as_json:
            text = json.dumps(line)
        else:
            text = " ".join(f"{name}={_plain(value)}" for name, value in line.items())
        logger.log(logging.DEBUG if quiet else logging.INFO, "%s", text)


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
