"""Two ways to batch and two ways to give out KV memory, on one engine: the same kernels, the same pool, the same requests.

- continuous: a request joins the batch as soon as there is room. static: the traditional way: requests are taken in order of arrival,
  every row runs until the longest of its group has ended, and the next group begins when all have.
- paged: blocks as they are needed, by the engine. reserve: the traditional way: each request is given room for the longest possible
  sequence, so that no more run at once than whole contexts fit in the pool, and no prefix is shared.

The traditional ways get the benefit of every doubt: a static group's prompts are not padded, and over paged memory it is as large as
its lengths, known in advance, allow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.bench.workload import Work
from octavo.engine.engine import Engine
from octavo.errors import EngineError, InvalidValueError
from octavo.executor.base import Executor
from octavo.plan import StepPlan, StepResult
from octavo.sampling_params import SamplingParams

BATCHING = ("static", "continuous")
MEMORY = ("reserve", "paged")


@dataclass(frozen=True)
class Corner:
    """batching: of BATCHING. memory: of MEMORY."""

    batching: str
    memory: str

    def __str__(self) -> str:
        return f"{self.batching}, {self.memory}"


@dataclass(kw_only=True)
class Run:
    """What came of the requests, all submitted at once.

    A row of a step is useful where it brings its request further than ever before, and no further than its own last token: neither
    padding nor recomputation is. useful_row_seconds: useful rows times the seconds of their step's forward pass.
    token_seconds: likewise tokens that useful rows have in KV memory. kv_tokens_read: what attention reads at least.
    most_rows: sequences that ran at once, at most. slots: those that might have, of the memory reserved; most_rows where it is paged.
    """

    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    rows: int = 0
    useful_rows: int = 0
    sampled_rows: int = 0
    computed_tokens: int = 0
    kv_tokens_read: int = 0
    forward_seconds: float = 0.0
    useful_row_seconds: float = 0.0
    token_seconds: float = 0.0
    blocks_used: int = 0
    preemptions: int = 0
    most_rows: int = 1
    slots: int = 0
    budget_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def useful_rows_per_step(self) -> float:
        return self.useful_rows / max(1, self.steps)

    @property
    def device_busy(self) -> float:
        """Share of the time that the device computes anything at all."""
        return self.forward_seconds / self.seconds

    @property
    def slot_busy(self) -> float:
        """Share of the slots' time in which the device computes for the request that has the slot."""
        return self.useful_row_seconds / (self.slots * self.seconds)

    @property
    def kv_busy(self) -> float:
        """Share of the KV memory's time in which it holds tokens that the device computes with; sharing may take it above 1."""
        return self.token_seconds / (self.budget_tokens * self.seconds)


FIGURES = (
    *("seconds", "output_tokens_per_s", "total_tokens_per_s", "steps", "useful_rows_per_step"),
    *("device_busy", "slot_busy", "kv_busy", "blocks_used", "preemptions"),
)
"""Of a run, those that are worth a median."""


def slots(corner: Corner, engine: Engine, context: int) -> int:
    """How many sequences may run at once. Raises InvalidValueError where the pool holds no whole context and has to."""
    most = engine.config.scheduler.max_batch_size
    if corner.memory == "paged":
        return most
    blocks, wanted = engine.capacity.num_blocks, engine.scheduler.kv.groups.most(0, context)
    if blocks < wanted:
        raise InvalidValueError(
            f"memory: 'reserve'; the pool has {blocks} blocks and a whole context of {context} tokens takes {wanted}; "
            "give more kv_cache_memory or less max_model_len"
        )
    return min(most, blocks // wanted)


def serve(
    engine: Engine, corner: Corner, work: Sequence[Work], context: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Run, list[list[int]]]:
    """Answer all requests -> figures, and each request's own tokens. context: tokens of the longest possible sequence.

    The engine must be idle. Nothing is shared with earlier runs. Raises InvalidValueError where a request cannot run, EngineError where
    one ends before its time.
    """
    if engine.has_work:
        raise EngineError("a benchmark needs an engine that is idle")
    engine.scheduler.reset_prefix_cache()
    limit = slots(corner, engine, context)
    watch = _Watch(engine, work)
    before = engine.stats().preemptions
    answers: list[list[int]] = [[] for _ in work]
    waiting, live = deque(range(len(work))), dict[str, int]()

    def submit(number: int, tokens: int) -> None:
        salt = f"{number}" if corner.memory == "reserve" else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=number, cache_salt=salt)
        live[engine.add(work[number].prompt, params)] = number

    began = clock()
    try:
        while waiting or live:
            if corner.batching == "continuous":
                # Paged, all wait in the scheduler, which admits as many as it has room for.
                while waiting and (corner.memory == "paged" or len(live) < limit):
                    number = waiting.popleft()
                    submit(number, work[number].tokens)
            elif not live:
                group = [waiting.popleft() for _ in range(_group_size(engine, corner, [work[n] for n in waiting], limit, context))]
                longest = max(work[number].tokens for number in group)
                for number in group:
                    submit(number, longest)
            for output in engine.step():
                output.read()
                if output.finished:
                    number, answer = live.pop(output.request_id), output.outputs[0]
                    answers[number] = answer.token_ids[: work[number].tokens]
                    if len(answers[number]) < work[number].tokens:
                        raise EngineError(f"request {number} ended early: {answer.finish_reason} {answer.error or ''}".rstrip())
        run = watch.run
        run.seconds = clock() - began
    finally:
        for request_id in live:
            engine.forget(request_id)
        engine.executor = watch.executor
    run.prompt_tokens = sum(len(one.prompt) for one in work)
    run.output_tokens = sum(one.tokens for one in work)
    run.preemptions = engine.stats().preemptions - before
    run.budget_tokens = engine.capacity.num_blocks * engine.capacity.block_size // len(engine.capacity.windows)
    run.slots = limit if corner.memory == "reserve" else run.most_rows
    return run, answers


def _group_size(engine: Engine, corner: Corner, waiting: Sequence[Work], limit: int, context: int) -> int:
    """How many of those next in line make a static group: what is reserved for, or as many as fit padded to their longest."""
    if corner.memory == "reserve":
        return min(limit, len(waiting))
    groups, pool = engine.scheduler.kv.groups, engine.capacity.num_blocks
    count = 1
    while count < min(limit, len(waiting)):
        group = waiting[: count + 1]
        longest = max(one.tokens for one in group)
        # The last token of a sequence is never stored.
        if sum(groups.most(0, min(len(one.prompt) + longest, context) - 1) for one in group) > pool:
            break
        count += 1
    return count


@dataclass
class _Watch(Executor):
    """Stands before the engine's executor while requests run, and notes what each plan asks for. Requests are told by their seed."""

    engine: Engine
    work: Sequence[Work]
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        self.executor = self.engine.executor
        self.capacity = self.executor.capacity
        self.engine.executor = self
        self._numbers: dict[int, int] = {}
        self._reached = [0] * len(self.work)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        run, useful, held = self.run, 0, 0
        for row in plan.rows:
            if row.assign is not None:
                self._numbers[row.slot] = row.assign.seed
            number, end = self._numbers[row.slot], row.start + row.count
            run.computed_tokens += row.count
            run.kv_tokens_read += end
            run.sampled_rows += row.num_logits > 0
            if self._reached[number] < end < self.work[number].length:
                self._reached[number] = end
                useful += 1
                held += end
        run.steps += bool(plan.rows)
        run.rows += len(plan.rows)
        run.useful_rows += useful
        run.forward_seconds += result.forward_seconds
        run.useful_row_seconds += useful * result.forward_seconds
        run.token_seconds += held * result.forward_seconds
        run.blocks_used = max(run.blocks_used, self.engine.scheduler.kv.pool.num_used)
        run.most_rows = max(run.most_rows, len(plan.rows))
        return result

    def mapping_bytes(self) -> int:
        return self.executor.mapping_bytes()

    def close(self) -> None:
        self.executor.close()
