"""Runs a scheduler against the simulated executor, auditing both after every move, and keeps book of what came out."""

from __future__ import annotations

from collections import Counter, deque

from octavo.core.request import Request, Sequence
from octavo.core.scheduler import Change, Scheduler
from octavo.executor.simulated import SimulatedClock, SimulatedExecutor, simulated_capacity
from octavo.plan import HOLE, Assignment, StepPlan, StepResult
from octavo.sampling_params import SamplingParams

VOCABULARY = 50

LIMIT = 100_000
"""Tokens that no sequence reaches, even where all that it holds is a window."""


def token_of_history(assignment: Assignment, tokens: list[int]) -> int:
    """Depends on every token before it, so that a history cut or mislabelled changes all that follows."""
    return hash((assignment.seed, assignment.choice, assignment.prompt_length, *tokens)) % VOCABULARY


class Driver:
    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        max_batch_size=8,
        prefill_chunk_size=16,
        in_flight=1,
        next_token=token_of_history,
        committed_blocks=None,
        swap_blocks=0,
        policy="fcfs",
        prefix_caching=True,
        windows=(None,),
        **faults,
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_size=max_batch_size,
            prefill_chunk_size=prefill_chunk_size,
            committed_blocks=committed_blocks,
            swap_blocks=swap_blocks,
            policy=policy,
            prefix_caching=prefix_caching,
            windows=windows,
        )
        capacity = simulated_capacity(
            num_blocks,
            block_size,
            committed_blocks=committed_blocks,
            swap_blocks=swap_blocks,
            longest=self.scheduler.kv.groups.longest(num_blocks, LIMIT) + 1,
            vocab_size=VOCABULARY,
            windows=windows,
        )
        self.executor = SimulatedExecutor(capacity, next_token=next_token, **faults)
        self.clock = SimulatedClock()
        self.in_flight = in_flight
        self.plans: deque[StepPlan] = deque()
        self.history: list[StepPlan] = []
        self.reported: dict[Sequence, list[int]] = {}
        self.ends: Counter[Sequence] = Counter()
        self.scored: dict[Sequence, list] = {}

    def add(self, name="a", prompt=(1, 2, 3), max_tokens=4, *, deadline=None, eos=(), seed=0, **params) -> Sequence:
        prompt = list(prompt)
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, **params),
            arrival=self.clock(),
            max_length=len(prompt) + max_tokens,
            deadline=deadline,
            eos_token_ids=frozenset(eos),
            seed=seed,
        )
        self.scheduler.add(request)
        for sequence in request.sequences:
            self.reported[sequence] = []
        return request.sequences[0]

    def launch(self) -> StepPlan | None:
        """Write a plan and hand it over; None where there was nothing to run."""
        plan = self.scheduler.schedule(self.clock())
        if plan is not None:
            self.plans.append(plan)
            self.history.append(plan)
            self.executor.submit(plan)
        self.check()
        return plan

    def land(self) -> StepResult | None:
        """Take in the oldest plan's result; None where its step raised."""
        plan, result = self.plans.popleft(), None
        try:
            result = self.executor.collect()
        except Exception as error:
            self.scheduler.fail(plan.step, str(error))
            self.note(self.scheduler.take_changes())
        else:
            self.note(self.scheduler.update(result))
        self.check()
        return result

    def step(self) -> StepPlan | None:
        """Fill the flight deck and land one plan. Returns the last plan written."""
        plan = None
        while len(self.plans) < self.in_flight and (written := self.launch()) is not None:
            plan = written
        if self.plans:
            self.land()
        else:
            self.note(self.scheduler.take_changes())
        return plan

    def finish(self, name: str, reason="abort", error=None) -> bool:
        return self.scheduler.finish(name, reason, error)

    def run(self, limit=10_000) -> list[StepPlan]:
        """Step until nothing is left; returns the plans written meanwhile."""
        before = len(self.history)
        for _ in range(limit):
            if not self.scheduler.has_work and not self.plans:
                self.check_idle()
                return self.history[before:]
            self.step()
        raise AssertionError(f"work is left after {limit} steps: {self.scheduler.running}")

    def note(self, changes: list[Change]) -> None:
        for change in changes:
            self.reported[change.sequence] += change.token_ids
            if change.prompt_logprobs:
                self.scored.setdefault(change.sequence, []).extend(change.prompt_logprobs)
            self.ends[change.sequence] += change.sequence.finished

    def check(self) -> None:
        """The core's own audit, and that the tables a worker was told are the tables there are."""
        self.scheduler.check()
        if self.executor.breaches:
            raise AssertionError(self.executor.breaches)
        for sequence in self.scheduler.running:
            told = sequence.table.num_sent
            for group, ids in enumerate(sequence.table.groups):
                known = self.executor.table(sequence.slot, group)
                assert all(one == other for one, other in zip(ids[:told], known, strict=False) if HOLE not in (one, other))

    def check_idle(self) -> None:
        assert self.scheduler.kv.pool.num_used == 0
        assert self.scheduler.kv.swap_free == self.scheduler.kv.swap_total
        assert self.scheduler.stats().running == self.scheduler.stats().waiting == 0
        for sequence, tokens in self.reported.items():
            assert sequence.finished
            assert self.ends[sequence] == 1
            assert tokens == sequence.output_token_ids


def expected(sequence: Sequence, next_token=token_of_history) -> list[int]:
    """What a request alone on a machine without limits would be answered."""
    request = sequence.request
    assignment, tokens = sequence.assignment(), list(request.prompt_token_ids)
    ends = request.eos_token_ids | set(request.params.stop_token_ids)
    while len(tokens) < request.max_length:
        tokens.append(next_token(assignment, tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(request.prompt_token_ids) :]
