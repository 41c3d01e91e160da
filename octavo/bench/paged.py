"""The paged way: a trace through the real scheduler and its block tables, with an executor that computes nothing.

What is timed is the core's own work, `schedule` and `update`; the executor's is left out. It is processor time, so that whatever else
the machine does is left out too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.bench.traces import TracedRequest
from octavo.bench.usage import Usage
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.stats import Stats
from octavo.errors import EngineError, InvalidValueError
from octavo.executor.simulated import SimulatedClock, SimulatedExecutor, simulated_capacity
from octavo.plan import RowResult, StepPlan, StepResult
from octavo.sampling_params import SamplingParams

SECONDS_PER_STEP = 0.02
"""Simulated; it paces what the core does by the clock."""

STEPS_PER_SAMPLE = 8
"""Of a replay that generates more than FEW_TOKENS; of others every step is looked at."""

FEW_TOKENS = 200_000

BYTES_PER_TABLE_ENTRY = 8
"""Of a worker's block tables."""


@dataclass(frozen=True, kw_only=True)
class CoreFigures:
    """What the paging cost. mapping_bytes: at most, of core and executor; mapping_share: of the budget.

    hit_rate: prompt tokens shared / prompt tokens. core_seconds: spent in `schedule` and `update`. seconds: of the whole replay.
    """

    mapping_bytes: int
    mapping_share: float
    preemptions: int
    recomputed_tokens: int
    hit_rate: float
    evicted_blocks: int
    core_seconds: float
    core_us_per_generated_token: float
    core_us_per_token: float
    core_us_per_step: float
    allocation_p99_us: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LongSequence:
    """The core's own time for one sequence: all steps of its prompt, the median of those, and decode steps at its end."""

    tokens: int
    block_size: int
    blocks: int
    prefill_chunk_size: int
    prefill_seconds: float
    prefill_step_us: float
    decode_step_us: float
    decode_step_us_best: float
    mapping_bytes: int
    mapping_share: float


def replay(
    requests: list[TracedRequest],
    *,
    kv_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_batch_size: int,
    prefill_chunk_size: int | None,
    steps_per_sample: int | None = None,
) -> tuple[Usage, CoreFigures]:
    """Serve all requests in order from so many bytes. Memory is looked at in every `steps_per_sample`-th step.

    Raises InvalidValueError where not even a block fits.
    """
    gc.collect()  # another replay's garbage is not this one's cost
    began = time.perf_counter()
    budget = kv_bytes // bytes_per_token
    run = _Run(requests, kv_bytes, bytes_per_token, block_size, max_batch_size, prefill_chunk_size)
    if steps_per_sample is None:
        steps_per_sample = STEPS_PER_SAMPLE if sum(len(request.answer) for request in requests) > FEW_TOKENS else 1
    core_seconds, samples = 0.0, []
    for step, seconds in enumerate(run.steps()):
        core_seconds += seconds
        if step % steps_per_sample == 0:
            samples.append(run.stats())
    stats = run.stats()
    if run.scheduler.has_work or sum(stats.finished.values()) != stats.finished.get("length", 0):
        raise EngineError(f"the replay ended early: {stats}")
    waited = [sample for sample in samples if sample.waiting] or samples
    usage = Usage(
        held=_mean(sample.blocks.used * (1 - sample.internal_fragmentation) for sample in waited) * block_size / budget,
        cached=_mean(sample.blocks.cached for sample in waited) * block_size / budget,
        reserved=0.0,
        internal=_mean(sample.blocks.used * sample.internal_fragmentation for sample in waited) * block_size / budget,
        external=0.0,
        free=1 - _mean(sample.blocks.used + sample.blocks.cached for sample in waited) * block_size / budget,
        resident_mean=_mean(sample.running for sample in waited),
        resident_max=max((sample.running for sample in samples), default=0),
        steps=stats.steps,
        steps_averaged=min(stats.steps, len(waited) * steps_per_sample),
        refused=run.refused,
        cut=0,
        generated_tokens=stats.generated_tokens,
    )
    mapping_share = max((sample.block_table_ratio for sample in samples), default=0.0)
    return usage, CoreFigures(
        mapping_bytes=round(mapping_share * stats.blocks.total * block_size * bytes_per_token),
        mapping_share=mapping_share,
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        hit_rate=stats.cached_tokens / max(1, stats.prompt_tokens),
        evicted_blocks=stats.evicted_blocks,
        core_seconds=core_seconds,
        core_us_per_generated_token=core_seconds * 1e6 / max(1, stats.generated_tokens),
        core_us_per_token=core_seconds * 1e6 / max(1, stats.prompt_tokens + stats.generated_tokens),
        core_us_per_step=core_seconds * 1e6 / max(1, stats.steps),
        allocation_p99_us=stats.allocation_p99_s * 1e6,
        seconds=time.perf_counter() - began,
    )


def long_sequence(
    tokens: int, *, bytes_per_token: int, block_size: int = 16, prefill_chunk_size: int = 256, decoded: int = 64
) -> LongSequence:
    """One sequence that grows to `tokens`, the last `decoded` of them generated, in a pool that just holds it."""
    request = TracedRequest([0] * (tokens - decoded), [0] * decoded)
    blocks = -(-tokens // block_size)
    run = _Run([request], blocks * block_size * bytes_per_token, bytes_per_token, block_size, 1, prefill_chunk_size)
    seconds, stats = [], run.stats()
    for step_seconds in run.steps():
        seconds.append(step_seconds)
        stats = run.stats()
    prefill, decode = seconds[: 1 - decoded], seconds[1 - decoded :]
    return LongSequence(
        tokens=tokens,
        block_size=block_size,
        blocks=stats.blocks.used,
        prefill_chunk_size=prefill_chunk_size,
        prefill_seconds=sum(prefill),
        prefill_step_us=statistics.median(prefill) * 1e6,
        decode_step_us=statistics.median(decode) * 1e6,
        decode_step_us_best=min(decode) * 1e6,
        mapping_bytes=round(stats.block_table_ratio * blocks * block_size * bytes_per_token),
        mapping_share=stats.block_table_ratio,
    )


class _Recorded(SimulatedExecutor):
    """Answers with what the trace has recorded. It checks nothing, so as to take less time than what is measured."""

    def __init__(self, requests: list[TracedRequest], num_blocks: int, block_size: int, clock: SimulatedClock) -> None:
        super().__init__(simulated_capacity(num_blocks, block_size), clock=clock, verify=False)
        self._requests = requests
        self._assigned: dict[int, tuple[list[int], int]] = {}
        self._blocks: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            self._assigned.pop(slot, None)
            self._blocks.pop(slot, None)
        results = []
        for row in plan.rows:
            slot = row.slot
            if row.assign is not None:
                self._assigned[slot] = self._requests[row.assign.seed].answer, row.assign.prompt_length
            for update in row.tables:
                self._blocks[slot] = update.start + len(update.block_ids)
            if row.num_logits:
                answer, prompt_length = self._assigned[slot]
                results.append(RowResult(slot=slot, token_ids=[answer[row.start + row.count - prompt_length]]))
            else:
                results.append(RowResult(slot=slot))
        assert self.clock is not None
        self.clock.advance(SECONDS_PER_STEP)
        return StepResult(step=plan.step, rows=results, committed_blocks=plan.pool_blocks, forward_seconds=SECONDS_PER_STEP)

    def mapping_bytes(self) -> int:
        return BYTES_PER_TABLE_ENTRY * sum(self._blocks.values())


class _Run:
    """Everything this benchmark knows of the scheduler."""

    def __init__(
        self,
        requests: list[TracedRequest],
        kv_bytes: int,
        bytes_per_token: int,
        block_size: int,
        max_batch_size: int,
        prefill_chunk_size: int | None,
    ) -> None:
        block_bytes = block_size * bytes_per_token
        num_blocks = kv_bytes // block_bytes
        if num_blocks < 1:
            raise InvalidValueError(f"kv_memory: {kv_bytes} bytes do not hold one block of {block_size} tokens, {block_bytes} bytes")
        self.clock = SimulatedClock()
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            committed_blocks=num_blocks,
            block_size=block_size,
            block_bytes=block_bytes,
            max_batch_size=max_batch_size,
            prefill_chunk_size=prefill_chunk_size,
        )
        self.executor = _Recorded(requests, num_blocks, block_size, self.clock)
        self.refused = 0
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        for place, request in enumerate(requests):
            length = len(request.prompt) + len(request.answer)
            try:
                self.scheduler.add(Request(str(place), request.prompt, params, arrival=0.0, max_length=length, seed=place))
            except InvalidValueError:
                self.refused += 1

    def steps(self) -> Iterator[float]:
        """Run all steps; after each is executed, and before its result is taken in, the core's seconds since the one before."""
        clock, scheduler, execute = time.thread_time, self.scheduler, self.executor.execute
        core = 0.0
        while True:
            began = clock()
            plan = scheduler.schedule(self.clock.now)
            core += clock() - began
            if plan is None:
                return
            result = execute(plan)
            yield core
            began = clock()
            scheduler.update(result)
            core = clock() - began

    def stats(self) -> Stats:
        return self.scheduler.stats(self.executor.mapping_bytes())


def _mean(values: Iterable[float]) -> float:
    """0.0 of none."""
    return statistics.fmean([*values] or [0.0])
