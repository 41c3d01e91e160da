"""What comes back to the caller: vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "timeout", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One generated answer. `text` and `token_ids` are cumulative; `finish_reason` is None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended the output, where one of the request's own did."""
    error: str | None = None
    """What went wrong, where `finish_reason` is `error`."""


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, on the engine's monotonic clock."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far; `finished` once every answer has its finish reason."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    delta: str = field(default="")
    """Text added since the previous output of a stream."""
