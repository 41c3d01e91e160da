"""Writes the plan of each step, and takes in what came of it.

There are no phases. A sequence has known tokens and computed tokens, and a step lets computed catch up to known: a prompt,
a chunk of one, a generated token and the resumption of a preempted sequence are one case.
"""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping
from operator import attrgetter

import msgspec

from octavo.core.kv_manager import NO_UPDATES, BlockTable, KVManager
from octavo.core.policy import POLICIES, WaitingRoom
from octavo.core.prefix_index import Node
from octavo.core.request import Request, Sequence, Status
from octavo.core.stats import BlockStats, CompactionReport, History, Rate, Record, Sample, Stats
from octavo.errors import EngineError, InvalidValueError, InvariantError
from octavo.outputs import Event, EventKind, FinishReason
from octavo.plan import MAX_IN_FLIGHT, Assignment, Logprob, Row, RowResult, StepPlan, StepResult

UNLIMITED = 1 << 62

STEPS_BETWEEN_MATCHES = 16
"""How often a sequence that found no room is matched anew: its prefix may have been computed meanwhile."""

SECONDS_CLOSED = 10.0
"""How long a pool that could not grow is left at its size."""

FAILURES_ALLOWED = 3
"""Plans in a row that may raise while the pool is to grow for somebody, before it is held that it cannot."""

GROWS = "the pool grows from {} blocks to {}"


class Change(msgspec.Struct, gc=False):
    """What a step, an abort or a deadline did to a sequence: tokens it gained, what was scored, and whether that was its end.

    The sequence may have gone on by the time that somebody reads this: of it, only what does not change is to be read.
    """

    sequence: Sequence
    token_ids: list[int]
    finished: bool = False
    prompt_logprobs: list[list[Logprob]] | None = None
    logprobs: list[list[Logprob]] | None = None


_Flight = tuple[Sequence, int, int, bool]
"""What the scheduler must remember of a row until its result comes: whose it is, its residency, where it ends, whether it samples."""


class _InFlight(msgspec.Struct):
    """What it must remember of a plan. prefilled: tokens of chunks. swapped: who was swapped out by its copies. moves: it compacts."""

    step: int
    flights: list[_Flight]
    prefilled: int
    swapped: list[Sequence]
    moves: bool


class Scheduler:
    """Decides what runs. Not thread-safe; time is passed in, and `clock` measures latencies only.

    `running` stands in the policy's order; a step walks it from the front, and victims are taken from the back, from what is not
    planned yet.

    num_blocks: the pool's ceiling. committed_blocks: what it begins with, all of them where None; prealloc_blocks: what it is on the
    way to then, and keeps. It grows ahead of need.
    block_bytes: bytes of one block, for the estimates and figures.
    windows: of each KV group, positions that a token sees, None for all.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        committed_blocks: int | None = None,
        prealloc_blocks: int = 0,
        block_size: int = 16,
        block_bytes: int = 1 << 20,
        windows: tuple[int | None, ...] = (None,),
        max_batch_size: int = 32,
        prefill_chunk_size: int | None = 256,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        swap_blocks: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        committed = num_blocks if committed_blocks is None else committed_blocks
        self.kv = KVManager(
            committed,
            block_size,
            clock,
            ceiling=num_blocks,
            swap_blocks=swap_blocks,
            prefix_caching=prefix_caching,
            block_bytes=block_bytes,
            windows=windows,
            chunk=prefill_chunk_size,
        )
        self.max_batch_size = max_batch_size
        self.prefill_chunk_size = prefill_chunk_size
        self.running: list[Sequence] = []
        self.history = History()
        self.growth_refused: str | None = None
        """Why the pool could not grow when it last should have."""
        self.compaction: CompactionReport | None = None
        """The last one, its seconds left to who carries it out."""
        self._preallocated = max(committed, prealloc_blocks)
        self._wanted_blocks = self._told_blocks = self._preallocated
        self._peak_live = 0
        self._policy = POLICIES[policy]
        self._waiting = WaitingRoom()
        self._swapped: deque[Sequence] = deque()
        self._blocked: tuple[Sequence, int, int] | None = None
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._swapping: list[Sequence] = []
        self._lacking = 0
        self._closed_until = 0.0
        self._failures = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._order = itertools.count(1)
        self._changes: list[Change] = []
        self._now = 0.0
        self._step = 0
        self._prefill_rate = Rate(1000.0)  # tokens a second, until it is measured
        self._copy_rate = Rate(4e9)  # bytes a second, likewise
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._changes or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidValueError for an id that is live, or a length that can never fit."""
        if request.request_id in self._requests:
            raise InvalidValueError(f"request_id: {request.request_id!r} is in use by a live request")
        groups, ceiling = self.kv.groups, self.kv.pool.ceiling
        refusal = None
        if groups.most(0, request.max_length - 1) > ceiling:
            refusal = f"the request may reach {request.max_length} tokens; the pool holds {groups.longest(ceiling, request.max_length)}"
        elif not 0 < len(request.prompt_token_ids) < request.max_length:
            refusal = f"the prompt has {len(request.prompt_token_ids)} tokens; allowed: 1 to {request.max_length - 1}"
        if refusal:
            self._counts["refused"] += 1
            request.events.append(Event(request.arrival, "refused", refusal))
            raise InvalidValueError(refusal)
        self._requests[request.request_id] = request
        ahead = f"{len(self._waiting) + len(self._swapped)} wait before it, {len(self.running)} run"
        request.events.append(Event(request.arrival, "queued", ahead))
        order, value = next(self._order), self._policy(request)
        for sequence in request.sequences:
            sequence.rank = (value, order, sequence.choice)
        first, *others = request.sequences
        first.followers = others
        first.leads = bool(others) or first.scores_prompt
        self._waiting.add(first)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, order, request))

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside; its blocks are free at once. False where no such request is live."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.sequences[0].followers, followers = [], set(request.sequences[0].followers)
        for sequence in request.sequences:
            if not sequence.finished:
                if sequence in followers:
                    self._waiting.add(sequence)
                self._end(sequence, reason, error)
                self._changes.append(Change(sequence, [], finished=True))
        return True

    def stop(self, sequence: Sequence, stop_reason: str) -> None:
        """End one answer at a stop text; its blocks are free at once. One that has ended otherwise meanwhile ends for this reason now."""
        if not sequence.finished:
            self._end(sequence, "stop")
        else:
            self._finished[sequence.finish_reason or "stop"] -= 1
            self._finished["stop"] += 1
        sequence.finish_reason, sequence.stop_reason = "stop", stop_reason

    def schedule(self, now: float) -> StepPlan | None:
        """Write the next plan; None where there is nothing to run, or two plans are in flight already."""
        self._now = now
        self._expire(now)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        if self.kv.pool.is_closed and now >= self._closed_until:
            self.kv.pool.is_closed = False
        if now >= self.history.due:
            self._sample()
        rows: list[Row] = []
        flights: list[_Flight] = []
        self._lacking = 0
        budget = self.prefill_chunk_size if self.prefill_chunk_size is not None else UNLIMITED
        running, place, prefilled = self.running, 0, budget
        spoken_for, num_groups = 0, len(self.kv.groups)  # blocks that running sequences will soon ask for, at most
        while place < len(running):
            sequence = running[place]
            start = sequence.num_scheduled
            pending = sequence.num_pending
            known = len(sequence.tokens)
            count = known + pending - start
            if count == 1 and start >= sequence.num_prompt:
                if pending and known + pending >= sequence.request.max_length:
                    place += 1  # the sample in flight will end it
                    continue
                table, slot = sequence.table, sequence.slot
                assert table is not None
                assert slot is not None
                if start >= table.limit and not self._make_room(sequence, start + 1, place):
                    place += sequence.status is Status.RUNNING
                    continue
                updates = NO_UPDATES if table.num_sent == table.num_blocks else self.kv.table_updates(sequence)
                rows.append(Row(slot, start, 1, 1, updates, pending=pending) if pending else Row(slot, start, 1, 1, updates))
                flights.append((sequence, sequence.residency, start + 1, True))
                sequence.num_scheduled = start + 1
                sequence.num_pending = pending + 1
                spoken_for += num_groups
            else:
                if (count := min(sequence.num_to_schedule, budget)) > 0:
                    if not self._make_room(sequence, start + count, place):
                        place += sequence.status is Status.RUNNING
                        continue
                    budget -= count
                    self._plan_row(sequence, count, rows, flights)
                spoken_for += self._blocks_ahead(sequence)
            place += 1

        # Nobody is admitted in a step that lacked blocks for those who run: they come first, also when the pool grows for them.
        if not self._lacking and (self._waiting or self._swapped):
            budget = self._admit(budget, spoken_for, rows, flights)
        self._grow_ahead()
        growing = self._wanted_blocks > self.kv.pool.total
        if not rows and (self._in_flight or not (growing and self._requests)):
            return None
        return self._plan(rows, flights, prefilled - budget)

    def compact(self, now: float, target: int | None = None) -> StepPlan | None:
        """A plan that moves live blocks down so that the pool fits in `target` blocks (the fewest that can be, where None), never
        fewer than `prealloc_blocks`. None where nothing would be given back, or a plan is in flight.

        The next plan gives the tail back; `settle` writes it where there is no other.
        """
        pool = self.kv.pool
        live = pool.total - pool.num_free
        # What somebody waits for stays, or it would never come.
        awaited = self._lacking if self._requests else 0
        target = max(1, live + awaited, min(self._preallocated, pool.total), target or 0)
        if self._in_flight or target >= pool.total:
            return None
        self._now = now
        before = pool.total
        moved = self.kv.compact(target, self._tables())
        size = self.kv.block_bytes
        self.compaction = CompactionReport(before, target, moved, moved * size, (before - target) * size)
        plan = self._plan([], [], 0)  # still with the tail, which the copies read
        self._in_flight[-1].moves = moved > 0
        self._wanted_blocks = target
        pool.is_closed = False  # what is given back can be had again
        return plan

    def rest(self, now: float) -> StepPlan | None:
        """What to do while idle: compact, where what no step since the last rest has needed is worth the copying.

        The rule: a quarter more than was needed stays, as growth ahead of need would add it again; beyond that, at least an eighth of
        the pool is given back, and no more bytes are moved than given back.
        """
        pool = self.kv.pool
        live = pool.total - pool.num_free
        needed, self._peak_live = max(self._peak_live, live), live
        target = min(max(needed + needed // 4, self._preallocated), pool.total)
        returned = pool.total - target
        if returned * 8 < pool.total or pool.num_live_above(target) > returned:
            return None
        return self.compact(now, target)

    def settle(self) -> StepPlan | None:
        """A plan without rows where the worker's pool is not what it is to be, None where it is, or one is in flight."""
        if self._in_flight or self._wanted_blocks == self._told_blocks:
            return None
        return self._plan([], [], 0)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; returns the blocks that were kept for theirs only. What running sequences hold is not shared any more."""
        return self.kv.reset(self._tables())

    def update(self, result: StepResult) -> list[Change]:
        """Take in the oldest plan's result; returns what changed since the last call."""
        landed = self._land(result.step)
        if len(result.rows) != len(landed.flights):
            raise EngineError(f"step {result.step} planned {len(landed.flights)} rows and reports {len(result.rows)}")
        self._failures = 0
        self._note_result(result, landed.prefilled)
        changes = self._changes
        generated = 0
        for (sequence, residency, end, samples), row in zip(landed.flights, result.rows, strict=True):
            if sequence.residency != residency:
                continue  # preempted or ended meanwhile
            if row.slot != sequence.slot:
                raise EngineError(f"step {result.step} planned slot {sequence.slot} and reports slot {row.slot}")
            token_ids = row.token_ids
            if row.error is not None or (samples and not token_ids):
                self._end(sequence, "error", row.error or "the worker sampled nothing")
                changes.append(Change(sequence, [], finished=True))
                continue
            sequence.num_computed = end
            if end >= sequence.table.next_name:  # type: ignore[union-attr]
                self.kv.name(sequence)
            scores = self._lead(sequence, row) if sequence.leads else None
            if samples:
                sequence.num_pending -= 1
                tokens, request = sequence.tokens, sequence.request
                for place, token_id in enumerate(token_ids):
                    tokens.append(token_id)
                    generated += 1
                    if token_id in request.ends or len(tokens) >= request.max_length:
                        token_ids = token_ids[: place + 1]
                        self._end(sequence, sequence.note_end())
                        break
                changes.append(Change(sequence, token_ids, sequence.finished, scores, row.logprobs))
            elif scores:
                changes.append(Change(sequence, [], prompt_logprobs=scores))
        self._counts["generated"] += generated
        return self.take_changes()

    def fail(self, step: int, error: str) -> None:
        """The oldest plan raised: end the sequences it computed, and no others; where it should have moved blocks, all that run.

        Whoever it should have swapped out is recomputed. A pool that was to grow stays at its size for a while.
        """
        landed = self._land(step)
        swapped = landed.swapped
        if landed.moves:
            self.compaction = None
            self.reset_prefix_cache()
            lost = list(self.running)
            swapped = swapped + [sequence for later in self._in_flight for sequence in later.swapped]
        else:
            lost = [sequence for sequence, residency, _, _ in landed.flights if sequence.residency == residency]
        if not landed.flights and self._wanted_blocks > self.kv.pool.total:
            self._failures += 1
            if self._failures >= FAILURES_ALLOWED:
                self._close(error)
        for sequence in swapped:
            if sequence in self._swapped:
                self._swapped.remove(sequence)
                self.kv.drop_swapped(sequence)
                self._waiting.add(sequence)
            elif sequence.status is Status.RUNNING and sequence not in lost:
                lost.append(sequence)  # it came back in the plan after this one
        for sequence in lost:
            self._end(sequence, "error", error)
            self._changes.append(Change(sequence, [], finished=True))

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def stats(self, worker_mapping_bytes: int = 0, seconds: Mapping[str, float] | None = None) -> Stats:
        """A snapshot. The worker's bytes count as mapping memory; `seconds` are the step loop's."""
        pool, kv, counts = self.kv.pool, self.kv, self._counts
        slots = pool.num_used * kv.block_size
        return Stats(
            blocks=BlockStats(
                total=pool.total,
                free=pool.num_free,
                cached=pool.num_cached,
                used=pool.num_used,
                ceiling=pool.ceiling,
                peak_used=pool.peak_used,
                swap_total=kv.swap_total,
                swap_used=kv.swap_total - kv.swap_free,
            ),
            utilization=pool.num_used / pool.total if pool.total else 0.0,
            utilization_of_ceiling=pool.num_used / pool.ceiling,
            internal_fragmentation=kv.unused_slots(self.running) / slots if slots else 0.0,
            allocation_p99_s=kv.allocation_seconds.quantile(0.99),
            block_table_ratio=(kv.mapping_bytes(self.running) + worker_mapping_bytes) / (max(pool.total, 1) * kv.block_bytes),
            running=len(self.running),
            waiting=len(self._waiting),
            swapped=len(self._swapped),
            preemptions=counts["preemptions"],
            swap_outs=counts["swap_outs"],
            steps=self._step,
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            missed_tokens=counts["missed"],
            generated_tokens=counts["generated"],
            recomputed_tokens=counts["recomputed"],
            evicted_blocks=pool.num_evicted,
            copied_blocks=kv.num_copied,
            prefill_rate=self._prefill_rate.measured,
            copy_rate=self._copy_rate.measured,
            finished=dict(self._finished),
            refused=counts["refused"],
            seconds=dict(seconds or {}),
        )

    def record(self, longest: int, stats: Stats) -> Record:
        """What `octavo advise` reads."""
        self._sample()
        return Record(
            block_size=self.kv.block_size,
            block_bytes=self.kv.block_bytes,
            prealloc_blocks=self._preallocated,
            max_batch_size=self.max_batch_size,
            longest=longest,
            stats=stats,
            samples=list(self.history.samples),
            lengths=list(self.history.lengths),
            groups=len(self.kv.groups),
        )

    def check(self) -> None:
        """Audit every invariant of the core. Raises InvariantError."""
        swapped = [sequence for sequence in self._swapped if sequence.swapped]
        self.kv.check(self.running, swapped)
        slots = [sequence.slot for sequence in self.running]
        if sorted([*slots, *self._free_slots]) != list(range(self.max_batch_size)):  # type: ignore[type-var]
            raise InvariantError(f"slots {slots} and free slots {self._free_slots} do not add up to {self.max_batch_size}")
        live = [sequence for request in self._requests.values() for sequence in request.sequences if not sequence.finished]
        following = sum(len(request.sequences[0].followers) for request in self._requests.values())
        if len(live) != len(self.running) + len(self._waiting) + len(self._swapped) + following:
            raise InvariantError(
                f"{len(live)} live sequences; {len(self.running)} run, {len(self._waiting)} wait, {len(self._swapped)} are swapped out, "
                f"{following} follow"
            )
        if any(request.finished for request in self._requests.values()):
            raise InvariantError("a finished request is still kept")
        if self.running != sorted(self.running, key=_RANK):
            raise InvariantError("the running sequences are out of order")
        for sequence in live:
            if (sequence.status is Status.RUNNING) != (sequence.slot is not None) or (sequence.slot is None) != (sequence.table is None):
                raise InvariantError(f"{sequence!r} is in slot {sequence.slot} with table {sequence.table}")
            if not 0 <= sequence.num_computed <= sequence.num_scheduled <= len(sequence.tokens) + sequence.num_pending:
                raise InvariantError(f"{sequence!r} has {sequence.num_scheduled} scheduled and {sequence.num_pending} pending tokens")
        if not self._in_flight and any(sequence.num_scheduled != sequence.num_computed for sequence in live):
            raise InvariantError("tokens are scheduled and no plan is in flight")

    def _plan(self, rows: list[Row], flights: list[_Flight], prefilled: int) -> StepPlan:
        self._step += 1
        self._told_blocks = self._wanted_blocks
        plan = StepPlan(
            step=self._step,
            pool_blocks=self._wanted_blocks,
            released=self._released,
            copies=self.kv.take_copies(),
            rows=rows,
            hurry=self._lacking > 0,
        )
        self._released = []
        self._in_flight.append(_InFlight(self._step, flights, prefilled, self._swapping, False))
        self._swapping = []
        return plan

    def _tables(self) -> list[BlockTable]:
        return [sequence.table for sequence in self.running if sequence.table is not None]

    def _sample(self) -> None:
        pool = self.kv.pool
        waiting = len(self._waiting) + len(self._swapped)
        unused = self.kv.unused_slots(self.running)
        running, preemptions = len(self.running), self._counts["preemptions"]
        self.history.add(Sample(self._now, pool.total, pool.num_cached, pool.num_used, unused, running, waiting, preemptions))

    def _admit(self, budget: int, spoken_for: int, rows: list[Row], flights: list[_Flight]) -> int:
        """Move waiting sequences to the running ones while there is room and budget, swapped ones first; returns the budget left.

        Room is all its known tokens and the next one, after what the running sequences still need (`spoken_for`, at most): the rest of
        what they know, and one block ahead each. Less would admit a sequence only to preempt it. Alone, it always fits.
        """
        kv, exact = self.kv, False
        while True:
            sequence = self._swapped[0] if self._swapped else self._waiting.next()
            if sequence is None:
                break
            if len(self.running) >= self.max_batch_size:
                self._wait(sequence, "batch", "the batch is full: {} run", len(self.running))
                break
            if budget <= 0:
                self._wait(sequence, "budget", "the step's {} prefill tokens are taken", self.prefill_chunk_size)
                break
            if self._blocked is not None and self.running:
                blocked, lacking, until = self._blocked
                if blocked is sequence and lacking > kv.pool.num_available and self._step < until:
                    break
            known = len(sequence.tokens)
            leader = self._leader(sequence)
            nodes: list[Node] = [] if leader else kv.match(sequence)
            reach = min(known + 1, sequence.request.max_length - 1)
            wanted = kv.num_to_fork(sequence.num_prompt - 1, reach) if leader else kv.num_missing(sequence, reach, nodes)
            if wanted + spoken_for > kv.pool.num_available and not exact:
                spoken_for, exact = sum(map(self._blocks_ahead, self.running)), True
            lacking = wanted + spoken_for
            if lacking > kv.pool.num_available:
                if self._grows_for(lacking):
                    self._wait(sequence, "growth", GROWS, kv.pool.total, self._wanted_blocks)
                    break
                if self.running:
                    self._blocked = (sequence, lacking, self._step + STEPS_BETWEEN_MATCHES)
                    self._wait(sequence, "blocks", self._lack(wanted, spoken_for))
                    break
                if wanted > kv.pool.num_available:  # the pool could not grow to its ceiling
                    self._end(sequence, "error", f"{self._lack(wanted)}; the pool cannot grow: {self.growth_refused}")
                    self._changes.append(Change(sequence, [], finished=True))
                    continue
            if self._swapped:
                self._swapped.popleft()
            else:
                self._waiting.remove(sequence)
            source = self._seat(sequence, leader, nodes)
            count = min(sequence.num_to_schedule, budget)
            budget -= count
            if not kv.allocate(sequence, sequence.num_scheduled + count):
                raise InvariantError(f"{sequence!r} was admitted without room")
            self._plan_row(sequence, count, rows, flights, sequence.assignment(source))
            spoken_for += self._blocks_ahead(sequence)
        return budget

    def _seat(self, sequence: Sequence, leader: Sequence | None, nodes: list[Node]) -> int | None:
        """Give a sequence slot and table; returns the slot it is forked from, if it is."""
        resumes, swapped, copied = sequence.num_preemptions > 0, len(sequence.swapped), 0
        first = not resumes and sequence.choice == 0
        if first:
            self._counts["missed"] += self.kv.missed(sequence, nodes)
        sequence.run(self._free_slots.pop())
        insort(self.running, sequence, key=_RANK)
        if leader:
            self.kv.fork(leader, sequence, sequence.num_prompt - 1)
        else:
            copied = self.kv.begin(sequence, nodes)
        computed = sequence.num_computed
        if sequence.num_cached is None:
            sequence.num_cached = computed
        if first:
            self._counts["prompt"] += sequence.num_prompt
            self._counts["cached"] += computed
        if resumes:
            self._counts["recomputed"] += max(0, sequence.num_lost - computed)
            back = f", {copied} of {swapped} swapped blocks copied back" if swapped else ""
            self._note(sequence, "resumed", f"{computed} of {len(sequence.tokens)} tokens are there, {len(nodes)} blocks shared{back}")
        elif leader:
            self._note(sequence, "admitted", f"forked from choice {leader.choice} after {computed} tokens")
        else:
            self._note(sequence, "admitted", f"{computed} of {sequence.num_prompt} tokens shared, {self.kv.pool.num_free} blocks free")
        return leader.slot if leader else None

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """Whom a waiting answer can be forked from: the request's first one, where it runs, has computed the prompt, and has no
        window that has left the prompt's end behind."""
        if sequence.choice == 0 or sequence.num_preemptions or sequence.num_prompt < 2:
            return None
        first = sequence.request.sequences[0]
        if first.status is not Status.RUNNING or first.num_computed < first.num_prompt - 1:
            return None
        return first if self.kv.can_fork(first, first.num_prompt - 1) else None

    def _lead(self, sequence: Sequence, row: RowResult) -> list[list[Logprob]] | None:
        """What a first answer does for all while it computes the prompt: score it, and let the others follow. Returns the scores."""
        last = sequence.num_prompt - 1
        if sequence.scores_prompt:
            sequence.num_scored = max(sequence.num_scored, min(sequence.num_computed, last))
        if sequence.num_computed >= last:
            self._release_followers(sequence)
            sequence.leads = False
        return row.prompt_logprobs

    def _release_followers(self, leader: Sequence) -> None:
        for follower in leader.followers:
            self._waiting.add(follower)
        leader.followers = []

    def _blocks_ahead(self, sequence: Sequence) -> int:
        """Blocks a running sequence will soon ask for."""
        return self.kv.num_ahead(sequence, min(len(sequence.tokens) + self.kv.block_size, sequence.request.max_length - 1))

    def _make_room(self, sequence: Sequence, num_tokens: int, place: int) -> bool:
        """Allocate, preempting as long as needed, never a row already planned. False where the sequence itself gave way, or is to
        wait for the pool to grow."""
        while not self.kv.allocate(sequence, num_tokens):
            entries = self.kv.blocks_for(num_tokens) - self.kv.blocks_for(sequence.num_scheduled) + 1
            lacking = entries * len(self.kv.groups)
            if self._grows_for(lacking):
                self._wait(sequence, "growth", GROWS, self.kv.pool.total, self._wanted_blocks)
                return False
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                self._end(sequence, "error", f"{self._lack(lacking)}; the pool cannot grow: {self.growth_refused}")
                self._changes.append(Change(sequence, [], finished=True))
                return False
            self._preempt(victim, lacking)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, lacking: int) -> None:
        """Take a running sequence's slot and blocks, swapping it out where that is cheaper than computing it again.

        To recompute costs its tokens, less those that others keep, at the measured rate; to swap costs its bytes out, and in again
        less what others keep, at the rate measured for copies.
        """
        kv = self.kv
        tokens, shared = victim.num_computed, kv.num_shared(victim)
        blocks = kv.num_to_swap(victim)
        recompute = max(0, tokens - shared * kv.block_size) / self._prefill_rate.value
        swap = (blocks + kv.num_to_swap(victim, shared)) * kv.block_bytes / self._copy_rate.value
        compared = f"to compute {tokens} tokens again takes {recompute:.3g} s, to swap {blocks} blocks {swap:.3g} s"
        if not kv.swap_total:
            swaps, compared = False, "there is no swap space"
        elif swap >= recompute:
            swaps = False
        elif not (swaps := kv.swap_out(victim)):
            compared += f", and {kv.swap_free} of {kv.swap_total} swap blocks are free"
        self._counts["preemptions"] += 1
        if swaps:
            self._counts["swap_outs"] += 1
        reason = f"{self._lack(lacking)}; {'swapped out' if swaps else 'to be recomputed'}: {compared}"
        self._leave(victim)
        victim.preempt()
        self._note(victim, "preempted", reason)
        if swaps:
            self._swapped.appendleft(victim)
            self._swapping.append(victim)
        else:
            self._waiting.add(victim)

    def _plan_row(self, sequence: Sequence, count: int, rows: list[Row], flights: list[_Flight], assign: Assignment | None = None) -> None:
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        known = len(sequence.tokens)
        samples = end == known + sequence.num_pending
        num_logits = int(samples)
        if sequence.scores_prompt and (unscored := max(start, sequence.num_scored)) < sequence.num_prompt - 1:
            num_logits = max(num_logits, end - unscored)
        assert sequence.slot is not None
        rows.append(
            Row(
                slot=sequence.slot,
                start=start,
                count=count,
                num_logits=num_logits,
                tables=self.kv.table_updates(sequence),
                pending=max(0, end - known),
                assign=assign,
            )
        )
        flights.append((sequence, sequence.residency, end, samples))
        sequence.num_scheduled = end
        sequence.num_pending += samples

    def _grows_for(self, lacking: int) -> bool:
        """Whether the pool grows, or is told to, where blocks are lacking."""
        pool = self.kv.pool
        self._lacking = max(self._lacking, lacking)
        if self._wanted_blocks <= pool.total and not pool.evicts:
            more = max(lacking - pool.num_available, pool.total // 8, 1)
            self._wanted_blocks = min(pool.ceiling, pool.total + more)
        return self._wanted_blocks > pool.total

    def _grow_ahead(self) -> None:
        """Ask for more blocks before they are needed, so that they are committed beside the work and not in its way."""
        pool = self.kv.pool
        free = pool.num_free
        self._peak_live = max(self._peak_live, pool.total - free)
        if not pool.evicts and free * 8 < pool.total and self._wanted_blocks <= pool.total and self.running:
            self._wanted_blocks = min(pool.ceiling, pool.total + max(pool.total // 4, len(self.running)))

    def _note_result(self, result: StepResult, prefilled: int) -> None:
        """Take in what concerns the pool and the rates."""
        pool = self.kv.pool
        if pool.total < result.committed_blocks and pool.total < self._wanted_blocks:
            pool.grow(min(result.committed_blocks, self._wanted_blocks))
        if result.growth_refused is not None and pool.total < self._wanted_blocks:
            self._close(result.growth_refused)
        # A step that decodes more than it prefills says little of what prefilling takes.
        if prefilled >= 4 * len(result.rows) and result.forward_seconds > 0:
            self._prefill_rate.add(prefilled, result.forward_seconds)
        if result.copied_bytes and result.copy_seconds > 0:
            self._copy_rate.add(result.copied_bytes, result.copy_seconds)

    def _close(self, refusal: str) -> None:
        """The pool stays at its size, for a while."""
        self.growth_refused = refusal
        self._wanted_blocks = self.kv.pool.total
        self.kv.pool.is_closed = True
        self._closed_until = self._now + SECONDS_CLOSED

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.status is Status.RUNNING:
            self._leave(sequence, keep=reason != "error")
        elif sequence.swapped:
            self._swapped.remove(sequence)
            self.kv.drop_swapped(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish(reason, error=error)
        if sequence.followers:
            self._release_followers(sequence)
        self._finished[reason] += 1
        self.history.ended(sequence)
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def _leave(self, sequence: Sequence, keep: bool = True) -> None:
        """Free a running sequence's blocks and slot. Plans run in order, so what is in flight cannot harm the next owner."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.kv.free(sequence, keep)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)

    def _land(self, step: int) -> _InFlight:
        if not self._in_flight or self._in_flight[0].step != step:
            raise EngineError(f"step {step} is not the oldest plan in flight")
        return self._in_flight.popleft()

    def _lack(self, wanted: int, spoken_for: int = 0) -> str:
        pool = self.kv.pool
        spoken = f", {spoken_for} of them spoken for" if spoken_for else ""
        return f"{wanted} blocks are wanted and {pool.num_available} of {pool.total} available{spoken}"

    def _note(self, sequence: Sequence, kind: EventKind, reason: str) -> None:
        sequence.request.events.append(Event(self._now, kind, reason, sequence.choice))

    def _wait(self, sequence: Sequence, cause: str, reason: str, *numbers: object) -> None:
        """Record why a sequence waits, once for each cause in a row."""
        if sequence.wait != cause:
            sequence.wait = cause
            self._note(sequence, "waits", reason.format(*numbers))

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finished):
            _, _, request = heapq.heappop(self._deadlines)
            if not request.finished:
                self.finish(request.request_id, "timeout")
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # most of them ended long before their deadline
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)


_RANK = attrgetter("rank")
