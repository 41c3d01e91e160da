"""Writes the plan of each step, and takes in what came of it.

There are no phases. A sequence has known tokens and computed tokens, and a step lets computed catch up to known: a prompt,
a chunk of one, a generated token and the resumption of a preempted sequence are one case.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.core.kv_manager import KVManager
from octavo.core.policy import POLICIES
from octavo.core.request import Request, Sequence, Status
from octavo.core.stats import BlockStats, Stats
from octavo.errors import EngineError, InvalidValueError, InvariantError
from octavo.outputs import FinishReason
from octavo.plan import MAX_IN_FLIGHT, Row, StepPlan, StepResult


@dataclass(slots=True)
class Change:
    """What a step, an abort or a deadline did to a sequence: tokens it gained, and whether it ended."""

    sequence: Sequence
    token_ids: list[int]


@dataclass(slots=True)
class _Flight:
    """What the scheduler must remember of a row until its result comes."""

    sequence: Sequence
    residency: int
    end: int
    samples: bool


class Scheduler:
    """Decides what runs. Not thread-safe; time is passed in, and `clock` measures latencies only.

    `running` stands in order of admission; a step walks it from the front, and victims are taken from what is not planned yet.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_batch_size: int = 32,
        prefill_chunk_size: int | None = 256,
        policy: str = "fcfs",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kv = KVManager(num_blocks, block_size, clock)
        self.max_batch_size = max_batch_size
        self.prefill_chunk_size = prefill_chunk_size
        self.running: list[Sequence] = []
        self._waiting = POLICIES[policy]()
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: deque[tuple[int, list[_Flight]]] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._changes: list[Change] = []
        self._step = 0
        self._preemptions = 0
        self._tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._changes)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidValueError where its id is in use, or where its prompt can never fit the pool."""
        if request.request_id in self._requests:
            raise InvalidValueError(f"request_id: {request.request_id!r} is in use by a live request")
        if self.kv.blocks_for(request.max_length - 1) > self.kv.pool.total:
            raise InvalidValueError(
                f"the request may reach {request.max_length} tokens; the pool holds {self.kv.pool.total * self.kv.block_size}"
            )
        if len(request.prompt_token_ids) >= request.max_length or not request.prompt_token_ids:
            raise InvalidValueError(f"the prompt has {len(request.prompt_token_ids)} tokens; allowed: 1 to {request.max_length - 1}")
        self._requests[request.request_id] = request
        self._tokens["prompt"] += len(request.prompt_token_ids)
        for sequence in request.sequences:
            self._waiting.add(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), request))

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside; its blocks are free at once. False where no such request is live."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if not sequence.finished:
                self._end(sequence, reason, error)
                self._changes.append(Change(sequence, []))
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """Write the next plan; None where there is nothing to run, or two plans are in flight already."""
        self._expire(now)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        rows: list[Row] = []
        flights: list[_Flight] = []
        budget = self.prefill_chunk_size if self.prefill_chunk_size is not None else 1 << 62
        preemptions = self._preemptions

        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            decoding = sequence.decoding
            count = min(sequence.num_to_schedule, 1 if decoding else budget)
            if count > 0:
                if not self._make_room(sequence, sequence.num_scheduled + count, place):
                    continue  # it gave way itself, and the next one stands in its place
                budget -= 0 if decoding else count
                self._plan_row(sequence, count, rows, flights)
            place += 1

        if preemptions == self._preemptions:
            for admitted, count in self._admit(budget):
                self._plan_row(admitted, count, rows, flights, assign=True)

        if not rows:
            return None
        self._step += 1
        plan = StepPlan(step=self._step, pool_blocks=self.kv.pool.total, released=self._released, copies=[], rows=rows)
        self._released = []
        self._in_flight.append((self._step, flights))
        return plan

    def update(self, result: StepResult) -> list[Change]:
        """Take in the oldest plan's result; returns what changed since the last call."""
        flights = self._land(result.step)
        if len(result.rows) != len(flights):
            raise EngineError(f"step {result.step} planned {len(flights)} rows and reports {len(result.rows)}")
        for flight, row in zip(flights, result.rows, strict=True):
            sequence = flight.sequence
            if sequence.residency != flight.residency:
                continue  # preempted or ended meanwhile
            if row.slot != sequence.slot:
                raise EngineError(f"step {result.step} planned slot {sequence.slot} and reports slot {row.slot}")
            error = row.error or ("the worker sampled nothing" if flight.samples and not row.token_ids else None)
            if error is not None:
                self._end(sequence, "error", error)
                self._changes.append(Change(sequence, []))
                continue
            sequence.num_computed = flight.end
            if flight.samples:
                sequence.num_pending -= 1
                self._accept(sequence, row.token_ids)
        return self.take_changes()

    def fail(self, step: int, error: str) -> None:
        """The oldest plan raised: end the sequences it computed, and no others."""
        for flight in self._land(step):
            if flight.sequence.residency == flight.residency:
                self._end(flight.sequence, "error", error)
                self._changes.append(Change(flight.sequence, []))

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def stats(self, kv_bytes: int = 0, worker_mapping_bytes: int = 0, seconds: Mapping[str, float] | None = None) -> Stats:
        """A snapshot. The worker's bytes give the share of mapping memory; `seconds` are the step loop's."""
        pool = self.kv.pool
        slots = pool.num_used * self.kv.block_size
        return Stats(
            blocks=BlockStats(pool.total, pool.num_free, 0, pool.num_used, pool.total, pool.peak_used),
            utilization=pool.num_used / pool.total,
            internal_fragmentation=self.kv.unused_slots() / slots if slots else 0.0,
            allocation_p99_s=self.kv.allocation_seconds.quantile(0.99),
            block_table_ratio=(self.kv.mapping_bytes() + worker_mapping_bytes) / kv_bytes if kv_bytes else 0.0,
            running=len(self.running),
            waiting=len(self._waiting),
            preemptions=self._preemptions,
            steps=self._step,
            prompt_tokens=self._tokens["prompt"],
            generated_tokens=self._tokens["generated"],
            recomputed_tokens=self._tokens["recomputed"],
            finished=dict(self._finished),
            seconds=dict(seconds or {}),
        )

    def check(self) -> None:
        """Audit every invariant of the core. Raises InvariantError."""
        self.kv.check(self.running)
        slots = [sequence.slot for sequence in self.running]
        if sorted([*slots, *self._free_slots]) != list(range(self.max_batch_size)):  # type: ignore[type-var]
            raise InvariantError(f"slots {slots} and free slots {self._free_slots} do not add up to {self.max_batch_size}")
        live = [sequence for request in self._requests.values() for sequence in request.sequences if not sequence.finished]
        if len(live) != len(self.running) + len(self._waiting):
            raise InvariantError(f"{len(live)} live sequences, {len(self.running)} running and {len(self._waiting)} waiting")
        if any(request.finished for request in self._requests.values()):
            raise InvariantError("a finished request is still kept")
        for sequence in live:
            if (sequence.status is Status.RUNNING) != (sequence.slot is not None):
                raise InvariantError(f"{sequence!r} is in slot {sequence.slot}")
            if not 0 <= sequence.num_computed <= sequence.num_scheduled <= len(sequence.tokens) + sequence.num_pending:
                raise InvariantError(f"{sequence!r} has {sequence.num_scheduled} scheduled and {sequence.num_pending} pending tokens")
        if not self._in_flight and any(sequence.num_scheduled != sequence.num_computed for sequence in live):
            raise InvariantError("tokens are scheduled and no plan is in flight")

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Move waiting sequences to the running ones while there is room and budget; returns each with its first chunk, allocated.

        Room is all its known tokens and the next one, after what the running sequences still need: the rest of what they
        know, and one block ahead each. Less would admit a sequence only to preempt it. Alone, it always fits.
        """
        admitted: list[tuple[Sequence, int]] = []
        spoken_for = sum(self._blocks_ahead(sequence) for sequence in self.running) if len(self._waiting) else 0
        while budget > 0 and len(self.running) < self.max_batch_size:
            sequence = self._waiting.next()
            if sequence is None:
                break
            wanted = self.kv.blocks_for(min(len(sequence.tokens) + 1, sequence.request.max_length - 1))
            if self.running and wanted + spoken_for > self.kv.pool.num_free:
                break
            self._waiting.remove(sequence)
            sequence.run(self._free_slots.pop())
            self.running.append(sequence)
            count = min(sequence.num_to_schedule, budget)
            budget -= count
            admitted.append((sequence, count))
            if not self.kv.allocate(sequence, count):
                raise InvariantError(f"{sequence!r} was admitted without room")
            spoken_for += self._blocks_ahead(sequence)
        return admitted

    def _blocks_ahead(self, sequence: Sequence) -> int:
        """Blocks a running sequence will soon ask for."""
        ahead = min(len(sequence.tokens) + self.kv.block_size, sequence.request.max_length - 1)
        return max(0, self.kv.blocks_for(ahead) - self.kv.num_held(sequence))

    def _make_room(self, sequence: Sequence, num_tokens: int, place: int) -> bool:
        """Allocate, preempting as long as needed, never a row already planned. False where the sequence itself gave way."""
        while not self.kv.allocate(sequence, num_tokens):
            victim = self._waiting.victim(self.running[place:])
            self._tokens["recomputed"] += victim.num_scheduled
            self._leave(victim)
            victim.preempt()
            self._waiting.put_back(victim)
            self._preemptions += 1
            if victim is sequence:
                return False
        return True

    def _plan_row(self, sequence: Sequence, count: int, rows: list[Row], flights: list[_Flight], assign: bool = False) -> None:
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        known = len(sequence.tokens)
        samples = end == known + sequence.num_pending
        assert sequence.slot is not None
        rows.append(
            Row(
                slot=sequence.slot,
                start=start,
                count=count,
                num_logits=int(samples),
                tables=self.kv.table_updates(sequence),
                pending=max(0, end - known),
                assign=sequence.assignment() if assign else None,
            )
        )
        flights.append(_Flight(sequence, sequence.residency, end, samples))
        sequence.num_scheduled = end
        sequence.num_pending += samples

    def _accept(self, sequence: Sequence, token_ids: list[int]) -> None:
        for place, token_id in enumerate(token_ids):
            reason = sequence.append(token_id)
            if reason is not None:
                self._end(sequence, reason)
                token_ids = token_ids[: place + 1]
                break
        self._tokens["generated"] += len(token_ids)
        self._changes.append(Change(sequence, token_ids))

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish(reason, error=error)
        self._forget(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and slot. Plans run in order, so what is in flight cannot harm the next owner."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.kv.free(sequence)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)

    def _forget(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self._finished[sequence.finish_reason] += 1
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def _land(self, step: int) -> list[_Flight]:
        if not self._in_flight or self._in_flight[0][0] != step:
            raise EngineError(f"step {step} is not the oldest plan in flight")
        return self._in_flight.popleft()[1]

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finished):
            _, _, request = heapq.heappop(self._deadlines)
            if not request.finished:
                self.finish(request.request_id, "timeout")
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # most of them ended long before their deadline
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)
