"""What comes back to the caller: vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "timeout", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's raw log-probability, its rank among all tokens, 1 the likeliest, and its text."""

    logprob: float
    rank: int
    decoded_token: str


EventKind = Literal["queued", "waits", "admitted", "preempted", "resumed", "refused"]


@dataclass(frozen=True, slots=True)
class Event:
    """What the scheduler did with a request, and why, with the numbers that decided. `time` is the engine's monotonic clock's."""

    time: float
    kind: EventKind
    reason: str
    choice: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One generated answer. `finish_reason` is None while it runs.

    text, token_ids and logprobs are cumulative, or under the output kind `delta` what came since the last `RequestOutput.read`.
    logprobs: where asked, {token id: Logprob} for each token: its own and the likeliest. cumulative_logprob: the sum of their own, so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text, or stop token id, that ended the output, where one of the request's own did."""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    """What went wrong, where `finish_reason` is `error`."""
    delta: str = ""
    """Text added between the last two calls of `RequestOutput.read`: since the previous output of a stream."""
    unread: str = field(default="", repr=False)
    """Text added since then."""
    was_read: bool = field(default=False, repr=False)
    """Whether all that is here has been read."""

    def drop_read(self) -> None:
        """Leave room for what is new."""
        if self.was_read:
            self.text, self.token_ids, self.was_read = "", [], False
            if self.logprobs is not None:
                self.logprobs = []


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, on the engine's monotonic clock; `events` tells why each wait, preemption and resumption came about."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far; `finished` once every answer has its finish reason.

    num_cached_tokens: prompt tokens whose keys and values were there already; None until the request is admitted.
    prompt_logprobs: where asked, None for the first prompt token, then {token id: Logprob} for each: its own and the likeliest.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def delta(self) -> str:
        """Text added to the first answer since the previous output of a stream."""
        return self.outputs[0].delta

    def read(self) -> RequestOutput:
        """Make what is unread the deltas; returns the output itself, which goes on growing."""
        for answer in self.outputs:
            answer.delta, answer.unread, answer.was_read = answer.unread, "", True
        return self
