"""What was asked (`Request`) and one token stream that answers it (`Sequence`), a small explicit state machine."""

from __future__ import annotations

import enum

from octavo.outputs import FinishReason
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


NEXT = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set(),
}


class Request:
    """A prompt and what was asked of it.

    max_length: tokens, prompt included, at which every answer ends; never more than the longest sequence the engine holds.
    deadline: when the request times out, on the clock that `Scheduler.schedule` is given; None for never.
    """

    __slots__ = ("arrival", "deadline", "eos_token_ids", "max_length", "params", "prompt_token_ids", "request_id", "seed", "sequences")

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float,
        max_length: int,
        deadline: float | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival = arrival
        self.max_length = max_length
        self.deadline = deadline
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.seed = seed
        self.sequences = [Sequence(self, choice) for choice in range(params.n)]

    @property
    def finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)


class Sequence:
    """One stream of tokens, and how far it has come.

    tokens: every known token, prompt first.
    num_computed: tokens whose keys and values a result has confirmed.
    num_scheduled: num_computed and the tokens of plans in flight.
    num_pending: samples that plans in flight will bring.
    residency: raised whenever the slot is given up, so that a late result can be told from a current one.

    num_computed <= num_scheduled <= len(tokens) + num_pending, always.
    """

    __slots__ = (
        "choice",
        "error",
        "finish_reason",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_scheduled",
        "request",
        "residency",
        "slot",
        "status",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens = list(request.prompt_token_ids)
        self.status = Status.WAITING
        self.slot: int | None = None
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_preemptions = 0
        self.residency = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.choice}, {self.status.value}, {self.num_computed}/{len(self.tokens)})"

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_to_schedule(self) -> int:
        """Tokens that may still be scheduled: none where the samples in flight will end the sequence."""
        ahead = len(self.tokens) + self.num_pending
        return ahead - self.num_scheduled if ahead < self.request.max_length else max(0, len(self.tokens) - self.num_scheduled)

    @property
    def decoding(self) -> bool:
        """Whether one generated token is all that is left to compute."""
        return self.num_scheduled >= self.num_prompt and len(self.tokens) + self.num_pending - self.num_scheduled <= 1

    def run(self, slot: int) -> None:
        self._enter(Status.RUNNING)
        self.slot = slot

    def preempt(self) -> None:
        """Give up everything but the known tokens. Results in flight are void; draws repeat, so nothing is lost."""
        self._enter(Status.PREEMPTED)
        self._leave_slot()
        self.num_preemptions += 1

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self._enter(Status.FINISHED)
        self._leave_slot()
        self.finish_reason, self.error = reason, error

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; returns why it must be the last, if it must."""
        self.tokens.append(token_id)
        if token_id in self.request.eos_token_ids:
            return "stop"
        if token_id in self.request.params.stop_token_ids:
            self.stop_reason = token_id
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_length else None

    def assignment(self) -> Assignment:
        return Assignment(
            params=self.request.params,
            seed=self.request.seed,
            history=list(self.tokens),
            prompt_length=self.num_prompt,
            choice=self.choice,
        )

    def _enter(self, status: Status) -> None:
        if status not in NEXT[self.status]:
            raise RuntimeError(f"{self!r} cannot become {status.value}")
        self.status = status

    def _leave_slot(self) -> None:
        self.slot = None
        self.num_computed = self.num_scheduled = self.num_pending = 0
        self.residency += 1
