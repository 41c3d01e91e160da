"""An executor without a model: made-up tokens and seconds, and a strict reader of plans. For tests, and for replaying traffic."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable

from octavo.errors import EngineError
from octavo.executor.base import Executor
from octavo.kv_groups import first_seen
from octavo.plan import (
    HOLE,
    MAX_IN_FLIGHT,
    Assignment,
    BlockCopy,
    Capacity,
    Logprob,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TableUpdate,
    Tier,
)

NextToken = Callable[[Assignment, list[int]], int]
"""(what was asked, every token so far) -> the next one. The output position is len(tokens) - assignment.prompt_length."""

_MASK = 2**64 - 1


class ContractError(EngineError):
    """A plan asks for what no worker could do, or for what would harm another sequence."""


class SimulatedClock:
    """Seconds that pass only when told to; give it to engine and executor alike."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class _Slot:
    """What a worker holds of one sequence.

    marks[i] stands for the keys and values of token i and of all before it, in the first KV group. left[g]: entries of group g's table
    that were given up. unreported: places of samples whose results were not collected. lost: what went wrong with it; useless once that
    was collected, and the plans to come should know.
    """

    __slots__ = ("assignment", "computed", "group_tables", "history", "left", "lost", "marks", "unreported", "useless")

    def __init__(self, assignment: Assignment, computed: int, num_groups: int) -> None:
        self.assignment = assignment
        self.history = list(assignment.history)
        self.computed = computed
        self.group_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.left = [0] * num_groups
        self.marks: list[int] = []
        self.unreported: set[int] = set()
        self.lost: str | None = None
        self.useless = False

    def mark(self, end: int) -> None:
        while len(self.marks) < end:
            place = len(self.marks)
            self.marks.append(_mix((self.marks[-1] if place else 0) ^ self.history[place]))


class SimulatedExecutor(Executor):
    """Answers plans as a worker would, and holds them to their contract.

    next_token: by default a function of (seed, choice, output position).
    row_error: names what goes wrong with a row, None for nothing. step_error: what a step raises, None for nothing.
    seconds_per_step, seconds_per_token: a step's simulated duration; `clock`, where given, advances by it.
    commit_limit: blocks at which the pool's growth is refused. commits_per_step: blocks it grows by beside a step that has rows.
    verify: False answers without checks, for measuring the scheduler alone.

    `execute` runs one plan; `submit` and `collect` keep two in flight. Raises ContractError where a plan breaks its
    contract, and is of no use after; `breaches` remembers it, for an engine ends requests where an executor raises.
    """

    def __init__(
        self,
        capacity: Capacity | None = None,
        *,
        next_token: NextToken | None = None,
        row_error: Callable[[Row, Assignment], str | None] = lambda row, assignment: None,
        step_error: Callable[[StepPlan], BaseException | None] = lambda plan: None,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        clock: SimulatedClock | None = None,
        commit_limit: int | None = None,
        commits_per_step: int | None = None,
        verify: bool = True,
    ) -> None:
        self.capacity = capacity or simulated_capacity()
        self.next_token = next_token or self._hashed_token
        self.row_error = row_error
        self.step_error = step_error
        self.seconds_per_step = seconds_per_step
        self.seconds_per_token = seconds_per_token
        self.clock = clock
        self.commit_limit = commit_limit
        self.commits_per_step = commits_per_step
        self.verify = verify
        self.committed = self.capacity.committed_blocks
        self.breaches: list[str] = []
        self._slots: dict[int, _Slot] = {}
        self._holders: defaultdict[int, set[int]] = defaultdict(set)
        self._contents: dict[tuple[Tier, int], list[int | None]] = {}
        self._flights: deque[tuple[StepResult | BaseException, list[tuple[Row, _Slot]]]] = deque()
        self._step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Carry out a plan; its result, or what the step raises, waits for `collect`."""
        self._require(len(self._flights) < MAX_IN_FLIGHT, f"step {plan.step} is the third in flight")
        self._require(plan.step > self._step, f"step {plan.step} follows step {self._step}")
        self._step = plan.step
        self._prepare(plan)
        flown = [(row, self._slots[row.slot]) for row in plan.rows]
        error = self.step_error(plan)
        if error is not None:
            for _, slot in flown:
                slot.lost = f"step {plan.step} raised"
        self._flights.append((self._run(plan) if error is None else error, flown))

    def collect(self) -> StepResult:
        """The oldest plan's result. Raises what its step raised."""
        outcome, flown = self._flights.popleft()
        if isinstance(outcome, BaseException):
            for _, slot in flown:
                slot.useless = True
            raise outcome
        for (row, slot), answer in zip(flown, outcome.rows, strict=True):
            slot.useless = answer.error is not None
            first = row.start + row.count - len(row.draft_ids)
            slot.unreported.difference_update(range(first, first + len(answer.token_ids)))
        return outcome

    def table(self, slot: int, group: int = 0) -> list[int]:
        """The block table that the plans so far amount to."""
        return list(self._slots[slot].group_tables[group])

    def history(self, slot: int) -> list[int]:
        return list(self._slots[slot].history)

    @property
    def assigned_slots(self) -> set[int]:
        return set(self._slots)

    def mapping_bytes(self) -> int:
        return sum(sys.getsizeof(table) for slot in self._slots.values() for table in slot.group_tables)

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._holders.clear()
        self._contents.clear()
        self._flights.clear()

    def _hashed_token(self, assignment: Assignment, tokens: list[int]) -> int:
        return hashed_token(assignment.seed, assignment.choice, len(tokens) - assignment.prompt_length, self.capacity.vocab_size)

    def _require(self, kept: bool, breach: str) -> None:
        if self.verify and not kept:
            self.breaches.append(breach)
            raise ContractError(breach)

    def _prepare(self, plan: StepPlan) -> None:
        """Slots, tables and blocks as they stand when the forward pass begins."""
        self._require(
            plan.pool_blocks <= self.capacity.num_blocks, f"{plan.pool_blocks} blocks are wanted and {self.capacity.num_blocks} exist"
        )
        for number in plan.released:
            self._require(number in self._slots, f"slot {number} is released and was not assigned")
            self._release(number)
        self._resize(plan)
        for copy in plan.copies:
            self._copy(copy)
        numbers = [row.slot for row in plan.rows]
        self._require(len(set(numbers)) == len(numbers), f"a slot has two rows: {numbers}")
        for row in plan.rows:
            if row.assign is not None:
                self._assign(row, row.assign)
            self._require(row.slot in self._slots, f"a row for slot {row.slot}, which is not assigned")
            slot = self._slots[row.slot]
            self._require(not slot.useless, f"slot {row.slot} goes on although {slot.lost!r} was reported")
            slot.history += row.token_ids
            for group, update in enumerate(row.tables):
                self._update_table(row.slot, group, update)
            if self.verify:
                self._leave_behind(row.slot, row.start)
        if self.verify:
            # Only now does every slot hold what it will hold while the rows run.
            for row in plan.rows:
                self._verify_row(row, set(numbers))

    def _resize(self, plan: StepPlan) -> None:
        wanted = plan.pool_blocks
        if wanted < self.committed:
            for place in [place for place in self._contents if place[0] is Tier.DEVICE and place[1] >= wanted]:
                del self._contents[place]
            self.committed = wanted
        pace = self.commits_per_step if self.commits_per_step is not None and plan.rows else wanted
        limit = wanted if self.commit_limit is None else self.commit_limit
        self.committed = max(self.committed, min(wanted, limit, self.committed + pace))

    def _copy(self, copy: BlockCopy) -> None:
        for tier, block_id in ((copy.source_tier, copy.source), (copy.target_tier, copy.target)):
            there = self.committed if tier is Tier.DEVICE else self.capacity.swap_blocks
            self._require(0 <= block_id < there, f"a copy names block {block_id} of {there} in tier {tier}")
        source = self._contents.get((copy.source_tier, copy.source))
        self._require(source is not None, f"block {copy.source} is copied and holds nothing")
        self._contents[copy.target_tier, copy.target] = list(source or [])

    def _assign(self, row: Row, assignment: Assignment) -> None:
        self._require(row.slot not in self._slots, f"slot {row.slot} is assigned anew and was not released")
        self._require(
            1 <= assignment.prompt_length <= len(assignment.history), f"slot {row.slot} has a prompt of {assignment.prompt_length}"
        )
        legal = all(0 <= token_id < self.capacity.vocab_size for token_id in assignment.history)
        self._require(legal, f"slot {row.slot} has a token outside the vocabulary")
        # What a cache may have spared is not taken on trust: the blocks read are compared.
        self._slots[row.slot] = _Slot(assignment, row.start, len(self.capacity.windows))

    def _release(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        for table in slot.group_tables if slot else []:
            for block_id in table:
                self._holders[block_id].discard(number)

    def _update_table(self, number: int, group: int, update: TableUpdate) -> None:
        self._require(group < len(self.capacity.windows), f"slot {number} has a table of group {group} of {len(self.capacity.windows)}")
        slot = self._slots[number]
        table = slot.group_tables[group]
        self._require(0 <= update.start <= len(table), f"slot {number}'s table of {len(table)} blocks changes from {update.start} on")
        for block_id in update.block_ids:
            there = block_id == HOLE or 0 <= block_id < self.committed
            self._require(there, f"slot {number} names block {block_id} of {self.committed}")
        if self.verify:
            for block_id in table[update.start :]:
                self._holders[block_id].discard(number)
            for block_id in update.block_ids:
                self._holders[block_id].add(number)
        table[update.start :] = update.block_ids
        slot.left[group] = min(slot.left[group], update.start)

    def _leave_behind(self, number: int, start: int) -> None:
        """What lies behind the windows of the token at `start` is given up: it may be others' by now."""
        slot = self._slots[number]
        for group, (table, window) in enumerate(zip(slot.group_tables, self.capacity.windows, strict=True)):
            behind = min(len(table), first_seen(window, start, self.capacity.block_size))
            for place in range(slot.left[group], behind):
                self._holders[table[place]].discard(number)
                table[place] = HOLE
            slot.left[group] = max(slot.left[group], behind)

    def _verify_row(self, row: Row, planned: set[int]) -> None:
        slot, end, name = self._slots[row.slot], row.start + row.count, f"slot {row.slot}"
        known, drafts = len(slot.history), len(row.draft_ids)
        self._require(row.count > 0, f"{name} has a row of {row.count} tokens")
        self._require(end <= self.capacity.longest, f"{name} reaches {end} tokens of {self.capacity.longest}")
        if slot.lost is None:
            self._require(row.start == slot.computed, f"{name} starts at {row.start} and has computed {slot.computed}")
            self._require(end <= known + drafts, f"{name} computes up to {end} and {known + drafts} tokens are known")
            self._require(not drafts or end == known + drafts, f"{name} verifies drafts that do not end its row")
            pending = sum(row.start <= place < end for place in slot.unreported)
            self._require(row.pending == pending, f"{name} has {pending} unreported samples and its row says {row.pending}")
            wanted = drafts + 1 if end == known + drafts else 0
            scores_prompt = _scores_prompt(slot.assignment) and wanted <= row.num_logits <= row.count
            self._require(row.num_logits == wanted or scores_prompt, f"{name} needs {wanted} logits and asks for {row.num_logits}")
        block_size = self.capacity.block_size
        for table in slot.group_tables:
            self._require(end <= len(table) * block_size, f"{name} computes up to {end} and has {len(table)} blocks of {block_size}")
            for block_id in table[row.start // block_size : (end - 1) // block_size + 1]:
                self._require(block_id != HOLE, f"{name} writes into a hole")
                self._require(block_id < self.committed, f"{name} writes block {block_id} of {self.committed}")
                # A slot without a row may hold a table that its next row will change; what it then reads is compared.
                others = (self._holders[block_id] & planned) - {row.slot}
                self._require(not others, f"{name} writes block {block_id}, which slots {sorted(others)} hold")

    def _run(self, plan: StepPlan) -> StepResult:
        num_tokens = sum(row.count for row in plan.rows)
        seconds = self.seconds_per_step + self.seconds_per_token * num_tokens
        if self.clock is not None:
            self.clock.advance(seconds)
        rows = [self._run_row(row, self._slots[row.slot]) for row in plan.rows]
        refused = plan.pool_blocks > self.committed == self.commit_limit
        return StepResult(
            step=plan.step,
            rows=rows,
            committed_blocks=self.committed,
            growth_refused=f"{plan.pool_blocks} blocks are wanted and memory is there for {self.commit_limit}" if refused else None,
            forward_seconds=seconds,
        )

    def _run_row(self, row: Row, slot: _Slot) -> RowResult:
        slot.lost = slot.lost or self.row_error(row, slot.assignment)
        if slot.lost:
            return RowResult(slot=row.slot, error=slot.lost)
        end = slot.computed = row.start + row.count
        accepted: list[int] = []
        scored = None
        if _scores_prompt(slot.assignment):
            targets = range(end - row.num_logits + 1, min(end + 1, slot.assignment.prompt_length))
            scored = [[Logprob(slot.history[place], -float(place), 1)] for place in targets] or None
        if row.num_logits and end >= len(slot.history):
            for draft in [*row.draft_ids, None]:
                token_id = self.next_token(slot.assignment, slot.history)
                slot.unreported.add(len(slot.history))
                slot.history.append(token_id)
                accepted.append(token_id)
                if token_id != draft:
                    break
            slot.computed = len(slot.history) - 1
        if self.verify:
            self._read_and_write(row, slot)
        return RowResult(slot=row.slot, token_ids=accepted, prompt_logprobs=scored)

    def _read_and_write(self, row: Row, slot: _Slot) -> None:
        """Every block read must hold this sequence's tokens, whoever computed them; then the row's own are stored."""
        block_size, end = self.capacity.block_size, slot.computed
        slot.mark(end)
        for group, (table, window) in enumerate(zip(slot.group_tables, self.capacity.windows, strict=True)):
            for place in range(first_seen(window, row.start, block_size), -(-end // block_size)):
                block = self._contents.setdefault((Tier.DEVICE, table[place]), [None] * block_size)
                first = place * block_size
                filled = min(max(row.start - first, 0), block_size)
                marks = [mark ^ group for mark in slot.marks[first : min(end, first + block_size)]]
                right = table[place] != HOLE and block[:filled] == marks[:filled]
                self._require(right, f"slot {row.slot} reads block {table[place]}, which holds another sequence's tokens")
                block[filled : len(marks)] = marks[filled:]


def _scores_prompt(assignment: Assignment) -> bool:
    return assignment.params.prompt_logprobs is not None and assignment.choice == 0


def hashed_token(seed: int, choice: int, position: int, vocab_size: int) -> int:
    """The token that a simulated worker draws by default."""
    return _mix(_mix(_mix(seed & _MASK) ^ choice) ^ position) % vocab_size


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def simulated_capacity(
    num_blocks: int = 64,
    block_size: int = 16,
    *,
    committed_blocks: int | None = None,
    prealloc_blocks: int = 0,
    swap_blocks: int = 0,
    longest: int | None = None,
    vocab_size: int = 256,
    block_bytes: int = 1024,
    windows: tuple[int | None, ...] = (None,),
) -> Capacity:
    """A worker's capacity, bound by its pool unless `longest` is given; all of it committed unless said."""
    return Capacity(
        num_blocks=num_blocks,
        committed_blocks=num_blocks if committed_blocks is None else committed_blocks,
        prealloc_blocks=prealloc_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        swap_blocks=swap_blocks,
        longest=num_blocks * block_size if longest is None else longest,
        bound_by="the KV pool" if longest is None else "the model's context",
        vocab_size=vocab_size,
        dtype="float32",
        device="simulated",
        windows=windows,
    )
