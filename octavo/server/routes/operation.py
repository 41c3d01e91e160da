"""For those who run the server: is it well, what does it do, and what should it stop doing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.engine.engine import Engine
from octavo.errors import UnavailableError
from octavo.server import errors
from octavo.server.errors import ApiError
from octavo.server.protocol import Aborted, CacheReset, ErrorResponse, Health, Version
from octavo.server.serving import Serving

router = APIRouter()

STOPPED: dict[int | str, dict[str, Any]] = {503: {"model": ErrorResponse, "description": errors.MEANINGS[503]}}


@router.get("/health", response_model=Health, responses=STOPPED)
async def health(request: Request) -> Health:
    """Whether the server lives: also while it loads or drains, but not when its engine has stopped."""
    serving: Serving = request.app.state.serving
    if serving.engine.error is not None:
        raise ApiError(503, f"the engine has stopped: {serving.engine.error}")
    return Health(status="ok")


@router.get("/ready", response_model=Health, responses=STOPPED)
async def ready(request: Request) -> Health:
    """Whether it takes requests."""
    serving: Serving = request.app.state.serving
    serving.engine.require_ready()
    return Health(status="ready")


@router.get("/version", response_model=Version)
async def show_version() -> Version:
    """Octavo's version."""
    return Version(version=version("octavo"))


@router.get("/metrics", response_class=Response, responses={200: {"description": "Prometheus' text format", "content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms."""
    serving: Serving = request.app.state.serving
    try:
        stats = await serving.engine.call(Engine.stats)
        block_size = serving.engine.llm.capacity.block_size
    except UnavailableError:
        stats, block_size = None, 0
    return Response(serving.metrics.text(stats, block_size), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats", responses=errors.documented(503))
async def stats(request: Request) -> Response:
    """The engine's figures: what `llm.stats()` returns."""
    serving: Serving = request.app.state.serving
    return Response(msgspec.json.encode(await serving.engine.call(Engine.stats)), media_type="application/json")


@router.get("/record", responses=errors.documented(503))
async def record(request: Request) -> Response:
    """What `octavo advise --url` reads: the figures, the settings that matter, and how memory went."""
    serving: Serving = request.app.state.serving
    return Response(msgspec.json.encode(await serving.engine.call(Engine.record)), media_type="application/json")


@router.delete("/v1/requests/{request_id:path}", response_model=Aborted, responses=errors.documented(404, 503))
async def abort(request_id: str, request: Request) -> Aborted:
    """End a live request, by its request id or by the id of its answer; what it has so far is answered."""
    serving: Serving = request.app.state.serving
    if not serving.abort(request_id):
        raise ApiError(404, f"no live request {request_id[:200]!r}", code="request_not_found")
    return Aborted(id=request_id, aborted=True)


@router.post("/reset_prefix_cache", response_model=CacheReset, responses=errors.documented(503))
async def reset_prefix_cache(request: Request) -> CacheReset:
    """Forget all prefixes."""
    serving: Serving = request.app.state.serving
    return CacheReset(blocks=await serving.engine.call(lambda engine: engine.scheduler.reset_prefix_cache()))
