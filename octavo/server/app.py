"""The application: routes, errors and the door before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.llm import LLM
from octavo.errors import OctavoError
from octavo.server import errors
from octavo.server.door import Door
from octavo.server.metrics import Metrics
from octavo.server.routes import chat, completions, models, operation
from octavo.server.serving import ClientGoneError, Serving

ROUTERS = (completions.router, chat.router, models.router, operation.router)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """names: what the model is called; any_name: any other will do too. keys: API keys; none, and nobody needs one.

    origins: of pages that browsers may let in. max_waiting, max_waiting_tokens: what may wait to be admitted; 0 is no limit. max_body:
    bytes. patience: seconds for a request to be sent. compat: metrics also under vLLM's names. json_log: lines of the log as JSON.
    """

    names: Sequence[str]
    any_name: bool = False
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    max_waiting: int = 1024
    max_waiting_tokens: int = 2_000_000
    max_body: int = 16 << 20
    patience: float = 30.0
    compat: bool = False
    json_log: bool = False


def make_app(make: Callable[[], LLM], options: ServerOptions, loaded: Callable[[BaseException | None], None] | None = None) -> FastAPI:
    """make: loads the model, on the engine's thread, while the server answers already. loaded: told when that is done, or why not."""
    metrics = Metrics(options.names[0], options.compat)
    engine = AsyncEngine(make, max_waiting=options.max_waiting, max_waiting_tokens=options.max_waiting_tokens, observer=metrics)
    serving = Serving(engine, metrics, options.names, options.any_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def load() -> None:
            error = None
            try:
                await engine.start()
            except Exception as failure:
                error = failure
                engine.error = str(failure)
            if loaded is not None:
                loaded(error)

        loading = asyncio.ensure_future(load())
        try:
            yield
        finally:
            await loading
            await engine.close()
            serving.close()

    app = FastAPI(title="Octavo", version=version("octavo"), description=__doc__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = serving
    for router in ROUTERS:
        app.include_router(router)
    for kind in (RequestValidationError, HTTPException, OctavoError):  # any other is the door's to answer
        app.add_exception_handler(kind, errors.handle)
    app.add_exception_handler(ClientGoneError, _left)
    app.add_middleware(
        Door, metrics=metrics, keys=options.keys, max_body=options.max_body, patience=options.patience, as_json=options.json_log
    )
    if options.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.origins), allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without the status 422, which FastAPI expects of itself: what does not fit a schema is a 400 here."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        app.openapi_schema = found
    return app.openapi_schema


async def _left(_: Request, error: Exception) -> Response:
    """Nobody reads this; the log does."""
    return Response(status_code=499)
