"""Errors as OpenAI's clients read them: one object, a status that says whose fault it is, and the field where there is one."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from octavo.errors import EngineError, InvalidValueError, OverloadedError, PromptTooLongError, UnavailableError, UnsupportedError, shown
from octavo.server.protocol import ErrorResponse

TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "overloaded_error"}
MEANINGS = {
    400: "the request cannot be read, a value is out of range, or something is asked for that is not supported",
    401: "no valid API key",
    404: "no such model, or no such live request",
    405: "the path takes other methods",
    408: "the deadline passed before the first token, or the body came too slowly",
    413: "the body is too large",
    429: "too much waits already; Retry-After says when to try again",
    500: "the model failed on this request",
    503: "loading, shutting down, or stopped",
}


class ApiError(HTTPException):
    """Ends a call with a status. param: the field at fault. headers: more of the response's."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str) -> None:
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})
        self.param, self.code = param, code


def content(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response(error: ApiError) -> Response:
    body = msgspec.json.encode(content(error.status_code, error.detail, error.param, error.code))
    return Response(body, error.status_code, error.headers, "application/json")


def translated(error: Exception) -> ApiError:
    """Any error as the one to answer with."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            return ApiError(429, str(error), code="overloaded", Retry_After=str(error.retry_after))
        case UnavailableError():
            return ApiError(503, str(error), code="unavailable", Retry_After="5")
        case InvalidValueError() | UnsupportedError():
            head, colon, _ = str(error).partition(":")
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            return ApiError(400, str(error), param=head if colon and " " not in head else None, code=code)
        case EngineError():
            return ApiError(500, str(error))
        case RequestValidationError():
            return invalid(error.errors())
        case HTTPException():
            headers = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
            return ApiError(error.status_code, str(error.detail), **headers)
    return ApiError(500, "a fault of the server; its log tells more")


def invalid(errors: Any) -> ApiError:
    """Of what pydantic says against a body, what went deepest: of a union, the alternative that was meant."""
    error = max(errors, key=lambda one: len(one["loc"]))
    place = [part for part in error["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    # A union's alternatives are named in the path, by their types.
    names = [part for part in place if part not in ("str", "int") and not str(part)[:1].isupper()]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    value, kind = error.get("input"), error["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
    if not path:
        return ApiError(400, f"the body: {error['msg']}")
    if kind in ("extra_forbidden", "none_required"):
        return ApiError(400, f"{path}: {shown(value)}; not supported here", param=path, code="unsupported_parameter")
    if kind == "missing":
        return ApiError(400, f"{path}: it is missing", param=path)
    return ApiError(400, f"{path}: {shown(value)}; {error['msg']}", param=path)


async def handle(_: Request, error: Exception) -> Response:
    """For all that a route raises."""
    return response(translated(error))


def documented(*statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    found: dict[int | str, dict[str, Any]] = {}
    if streams:
        found[200] = {"description": "the answer, or with `stream: true` its events", "content": {"text/event-stream": {}}}
    return found | {status: {"model": ErrorResponse, "description": MEANINGS[status]} for status in sorted({400, 401, 413, *statuses})}
