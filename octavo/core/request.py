"""What was asked (`Request`) and one token stream that answers it (`Sequence`), a small explicit state machine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from octavo.outputs import Event, FinishReason
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.kv_manager import BlockTable

Rank = tuple[float, int, int]
"""What the policy says, then the order of arrival, then the choice: no two sequences have the same."""


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
    ends: token ids that end an answer. bad_words: the tokens of the parameters' bad_words, in every spelling that is to be kept out.
    deadline: when the request times out, on the clock that `Scheduler.schedule` is given; None for never.
    scope: adapter and cache salt, where there is one; prefixes are shared within it.
    events: what was done with the request and why, oldest first. num_live: answers that have not ended.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "bad_words",
        "deadline",
        "ends",
        "eos_token_ids",
        "events",
        "max_length",
        "num_live",
        "params",
        "prompt_token_ids",
        "request_id",
        "scope",
        "seed",
        "sequences",
    )

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
        bad_words: list[list[int]] | None = None,
        adapter: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival = arrival
        self.max_length = max_length
        self.deadline = deadline
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.ends = self.eos_token_ids | frozenset(params.stop_token_ids)
        self.seed = seed
        self.bad_words = bad_words or []
        self.adapter = adapter
        self.scope = None if adapter is None and params.cache_salt is None else (adapter, params.cache_salt)
        self.events: list[Event] = []
        self.sequences = [Sequence(self, choice) for choice in range(params.n)]
        self.num_live = params.n

    @property
    def finished(self) -> bool:
        return self.num_live == 0


class Sequence:
    """One stream of tokens, and how far it has come.

    tokens: every known token, prompt first.
    num_computed: tokens whose keys and values a result has confirmed.
    num_scheduled: num_computed and the tokens of plans in flight.
    num_pending: samples that plans in flight will bring.
    num_lost: tokens that were computed when it was last preempted.
    num_scored: leading positions whose prompt logprobs have been reported.
    num_cached: prompt tokens that were shared when it was first admitted; None until then.
    residency: raised whenever the slot is given up, so that a late result can be told from a current one.
    rank: its place in the policy's order; lower goes first.
    table: its block table, while it runs. swapped: its blocks of the host tier, holding num_swapped tokens, while it is swapped out.
    followers: the request's other answers, which wait for this one to compute the prompt. leads: it has some, or scores the prompt.
    wait: why it waits, as a word.

    num_computed <= num_scheduled <= len(tokens) + num_pending, always.
    """

    __slots__ = (
        "choice",
        "error",
        "finish_reason",
        "followers",
        "leads",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_scheduled",
        "num_scored",
        "num_swapped",
        "rank",
        "request",
        "residency",
        "scores_prompt",
        "slot",
        "status",
        "stop_reason",
        "swapped",
        "table",
        "tokens",
        "wait",
    )

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.status = Status.WAITING
        self.slot: int | None = None
        self.table: BlockTable | None = None
        self.swapped: list[int] = []
        self.num_swapped = 0
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_scored = 0
        self.num_lost = 0
        self.num_preemptions = 0
        self.num_cached: int | None = None
        self.scores_prompt = choice == 0 and request.params.prompt_logprobs is not None
        self.residency = 0
        self.rank: Rank = (0.0, 0, choice)
        self.followers: list[Sequence] = []
        self.leads = False
        self.wait = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.choice}, {self.status.value}, {self.num_computed}/{len(self.tokens)})"

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

    def run(self, slot: int) -> None:
        self._enter(Status.RUNNING)
        self.slot = slot
        self.wait = ""

    def preempt(self) -> None:
        """Give up the slot and what was computed, save for what is swapped out. Results in flight are void; draws repeat."""
        self._enter(Status.PREEMPTED)
        self.num_lost = self.num_computed
        self._leave_slot()
        self.num_preemptions += 1

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self._enter(Status.FINISHED)
        self._leave_slot()
        self.finish_reason, self.error = reason, error
        self.request.num_live -= 1

    def note_end(self) -> FinishReason:
        """Why the token added last is the last one."""
        last = self.tokens[-1]
        if last not in self.request.ends:
            return "length"
        if last not in self.request.eos_token_ids:
            self.stop_reason = last
        return "stop"

    def assignment(self, fork_source: int | None = None) -> Assignment:
        request, params = self.request, self.request.params
        hangs_on_ends = params.min_tokens > 0 or params.structured_outputs is not None
        return Assignment(
            params=params,
            seed=request.seed,
            history=list(self.tokens),
            prompt_length=self.num_prompt,
            choice=self.choice,
            adapter=request.adapter,
            ends=sorted(request.ends) if hangs_on_ends else [],
            bad_words=request.bad_words,
            fork_source=fork_source,
        )

    def _enter(self, status: Status) -> None:
        if status not in NEXT[self.status]:
            raise RuntimeError(f"{self!r} cannot become {status.value}")
        self.status = status

    def _leave_slot(self) -> None:
        self.slot = None
        self.num_computed = self.num_scheduled = self.num_pending = 0
        self.residency += 1
