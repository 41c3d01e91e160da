"""Blocks named, shared, copied, swapped, moved and evicted in any order: each sequence reads its own tokens, and no one else's."""

import math

import pytest
from core_driver import LIMIT, VOCABULARY, Driver, expected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.kv_manager import UNNAMED, KVManager
from octavo.core.request import Request, Status
from octavo.errors import InvalidValueError, InvariantError
from octavo.plan import HOLE, Tier
from octavo.sampling_params import SamplingParams

WINDOWS = st.sampled_from([(None,), (None,), (3,), (None, 2), (None, 5, 5), (None, None, 4), (7, 2), (1,), (None, 1)])

DICE = st.randoms(use_true_random=True)
"""One draw a step, from which everything else follows: cheap, and evenly spread."""


class Memory(RuleBasedStateMachine):
    """Manager, pool and index, against the content of every block.

    The keys and values of a token depend on all before it, and so stand here for the scope and those tokens, and for the KV group.
    `device` and `host` hold them by block; copies are carried out as late as a plan would, right before something is written.
    """

    @initialize(
        num_blocks=st.integers(4, 16),
        more=st.integers(0, 6),
        block_size=st.sampled_from([1, 2, 3, 4]),
        swap_blocks=st.sampled_from([0, 2, 5, 12]),
        windows=WINDOWS,
        dice=DICE,
    )
    def start(self, num_blocks, more, block_size, swap_blocks, windows, dice):
        num_blocks *= len(windows)
        self.manager = KVManager(
            num_blocks, block_size, lambda: 0.0, ceiling=num_blocks + more, swap_blocks=swap_blocks * len(windows), windows=windows
        )
        self.pool, self.index, self.size, self.windows = self.manager.pool, self.manager.index, block_size, windows
        self.contents = {}
        self.named = {}
        self.running, self.swapped = [], []
        self.streams = [[]]
        for _ in range(3):
            self.comes_and_computes_its_prompt(dice)

    def marks(self, sequence, start, end, group=0):
        return [(group, sequence.request.scope, tuple(sequence.tokens[: place + 1])) for place in range(start, end)]

    def needed(self, length):
        """(group, place) of the blocks that a sequence of so many computed tokens holds: what its next token sees, its last at least."""
        for group, window in enumerate(self.windows):
            seen = 0 if window is None else max(0, min(length - window + 1, length - self.size))
            yield from ((group, place) for place in range(-(-length // self.size)) if (place + 1) * self.size > seen)

    def carry_out(self, contents, copies):
        """`copies` in their order, as a worker does it before the forward pass."""
        for copy in copies:
            contents[copy.target_tier, copy.target] = list(contents[copy.source_tier, copy.source])

    def write(self, sequence, start, end):
        self.carry_out(self.contents, self.manager.take_copies())
        for group, ids in enumerate(sequence.table.groups):
            for place, mark in enumerate(self.marks(sequence, start, end, group), start):
                block_id = ids[place // self.size]
                assert self.pool.count(block_id) == 1
                assert block_id not in self.index
                self.contents.setdefault((Tier.DEVICE, block_id), [None] * self.size)[place % self.size] = mark

    def schedule(self, sequence, count):
        """Compute some more tokens; their result is yet to come. False where there is no room."""
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        if not self.manager.allocate(sequence, end):
            groups, before = [list(ids) for ids in sequence.table.groups], self.books()
            tails = [block_id for ids in groups for block_id in ids[start // self.size :][:1]]
            shared = sum(self.pool.count(block_id) > 1 or block_id in self.index for block_id in tails)
            missing = max(0, self.manager.blocks_for(end) - len(groups[0]))
            assert missing * len(groups) + shared > self.pool.num_available
            assert not self.manager.allocate(sequence, end)
            assert (sequence.table.groups, self.books()) == (groups, before)
            return False
        sequence.num_scheduled = end
        self.write(sequence, start, end)
        return True

    def books(self):
        counts = [self.pool.count(block_id) for block_id in range(self.pool.total)]
        return counts, self.pool.num_free, self.pool.num_cached, len(self.index), self.manager.swap_free, list(self.manager.copies)

    def begin(self, sequence):
        """Match and begin, where there is room."""
        nodes = self.manager.match(sequence)
        longest = len(sequence.tokens) - 1
        if sequence.scores_prompt:
            longest = min(longest, sequence.num_scored)
        known = {self.contents_of(block_id)[-1] for block_id in range(self.pool.total) if block_id in self.index}
        is_known = {
            (group, place): self.marks(sequence, end - 1, end, group)[0] in known
            for group in range(len(self.windows))
            for place, end in enumerate(range(self.size, longest + 1, self.size))
        }
        hit = max(end for end in range(longest // self.size + 1) if all(is_known[at] for at in self.needed(end * self.size)))
        start, lacking = hit * self.size, []
        if sequence.swapped and sequence.num_swapped > start:
            start = sequence.num_swapped
            lacking = [at for at in self.needed(start) if not is_known.get(at)]
        else:
            assert len(nodes) == hit
        if self.manager.num_missing(sequence, len(sequence.tokens), nodes) > self.pool.num_available:
            return False
        copied = len(self.manager.copies)
        assert self.manager.begin(sequence, nodes) == len(lacking)
        assert len(self.manager.copies) == copied + len(lacking)
        assert sequence.num_computed == sequence.num_scheduled == start
        assert sequence.swapped == []
        assert sequence.table.num_sent == 0
        self.running.append(sequence)
        return True

    def leave(self, sequence, keep=True):
        self.running.remove(sequence)
        self.manager.free(sequence, keep)
        self.streams.append(sequence.tokens)
        sequence.num_computed = sequence.num_scheduled = 0

    def make_sequence(self, tokens, salt, **params):
        request = Request("a", tokens, SamplingParams(cache_salt=salt, **params), arrival=0.0, max_length=10_000)
        return request.sequences[0]

    def arrive(self, dice, **params):
        """A stream of bits, so that what is computed was often computed before: the beginning of an earlier one, and a few more."""
        stream = dice.choice(self.streams[-6:])
        tokens = stream[: round(len(stream) * dice.choice([1, 1, 0.7, 0.4, 0]))] + dice.choices([0, 1], k=dice.randint(1, 8))
        tokens = tokens[: self.pool.ceiling * self.size // (2 * len(self.windows))]
        self.streams.append(tokens)
        sequence = self.make_sequence(tokens, dice.choice([None, None, None, None, "x"]), **params)
        sequence.num_scored = dice.randint(0, len(tokens) - 1) if sequence.scores_prompt else 0
        return sequence if self.begin(sequence) else None

    def compute_all(self, sequence):
        """Compute all that is known; False where there is no room."""
        return self.schedule(sequence, len(sequence.tokens) - sequence.num_scheduled)

    @precondition(lambda self: len(self.running) < 6)
    @rule(dice=DICE)
    def begins(self, dice):
        self.arrive(dice, prompt_logprobs=dice.choice([None, 1]))

    @precondition(lambda self: len(self.running) < 6)
    @rule(dice=DICE)
    def comes_and_computes_its_prompt(self, dice):
        sequence = self.arrive(dice)
        if sequence is not None and self.compute_all(sequence):
            self.confirm_one(sequence)
            if dice.random() < 0.5:
                self.leave(sequence)

    @precondition(lambda self: len(self.running) < 5)
    @rule(dice=DICE)
    def twins_compute_the_same_before_either_is_confirmed(self, dice):
        twins = [self.arrive(dice)]
        if twins[0] is not None:
            other = self.make_sequence(twins[0].tokens + dice.choices([0, 1], k=dice.randint(0, 5)), twins[0].request.params.cache_salt)
            twins.append(other if self.begin(other) else None)
        for twin in [twin for twin in twins if twin is not None and self.compute_all(twin)]:
            self.confirm_one(twin)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def computes(self, dice):
        sequence = dice.choice(self.running)
        left = len(sequence.tokens) - sequence.num_scheduled
        if left and self.schedule(sequence, dice.randint(1, left)) and dice.random() < 0.5:
            self.confirm_one(sequence)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def generates(self, dice):
        sequence = dice.choice(self.running)
        for _ in range(dice.randint(1, 9)):
            if not self.compute_all(sequence):
                break
            self.confirm_one(sequence)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def is_confirmed(self, dice):
        self.confirm_one(dice.choice(self.running))

    def confirm_one(self, sequence):
        """A result comes: whole blocks are named, and where all is computed a token is generated."""
        table = sequence.table
        sequence.num_computed = sequence.num_scheduled
        self.manager.name(sequence)
        if table.num_named != UNNAMED:
            assert table.num_named == sequence.num_computed // self.size
            for group, ids in enumerate(table.groups):
                for place, block_id in enumerate(ids[: table.num_named]):
                    if block_id != HOLE:
                        node, marks = self.index.node(block_id), self.marks(sequence, place * self.size, (place + 1) * self.size)
                        assert self.named.setdefault(node.number, marks) == marks
                        assert node.block_ids[group] == block_id
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(sum(sequence.tokens) % 2)

    @precondition(lambda self: 0 < len(self.running) < 6)
    @rule(dice=DICE)
    def forks(self, dice):
        parent = dice.choice(self.running)
        if not parent.num_computed:
            return
        length = dice.randint(1, parent.num_computed)
        has_all = all(parent.table.groups[group][place] != HOLE for group, place in self.needed(length))
        assert self.manager.can_fork(parent, length) == has_all
        if not has_all:
            return
        tokens = parent.tokens[:length] + dice.choices([0, 1], k=dice.randint(1, 5))
        child = self.make_sequence(tokens, parent.request.params.cache_salt)
        used = self.pool.num_used
        self.manager.fork(parent, child, length)
        assert self.pool.num_used == used
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def ends(self, dice):
        self.leave(dice.choice(self.running), keep=dice.random() < 0.7)

    @precondition(lambda self: self.running and self.manager.swap_total)
    @rule(dice=DICE)
    def is_swapped_out(self, dice):
        sequence = dice.choice(self.running)
        wanted, before = len(list(self.needed(sequence.num_computed))), self.books()
        if self.manager.swap_out(sequence):
            assert len(sequence.swapped) == wanted > 0
            self.leave(sequence)
            self.swapped.append(sequence)
        else:
            assert wanted == 0 or wanted > self.manager.swap_free
            assert self.books() == before

    @precondition(lambda self: self.swapped)
    @rule(dice=DICE)
    def comes_back(self, dice):
        sequence = dice.choice(self.swapped)
        if ended := dice.random() < 0.2:
            self.manager.drop_swapped(sequence)
        if ended or self.begin(sequence):
            self.swapped.remove(sequence)

    @rule(dice=DICE)
    def blocks_are_overwritten(self, dice):
        """Someone else takes blocks, evicting what is cached, writes them and gives them back."""
        taken = self.pool.take(min(self.pool.num_available, dice.choice([1, 1, 2, 4, 99])))
        self.carry_out(self.contents, self.manager.take_copies())
        for block_id in taken:
            assert block_id not in self.index
            self.contents[Tier.DEVICE, block_id] = ["overwritten"] * self.size
        self.pool.give_back(taken)

    @rule(dice=DICE)
    def pool_shrinks_and_grows(self, dice):
        live = self.pool.total - self.pool.num_free
        total, before = live + dice.choice([-1, 0, 0, 1, 3]), self.books()
        tables = [sequence.table for sequence in self.running]
        if live <= total <= self.pool.total:
            moved = self.pool.num_live_above(total)
            assert self.manager.compact(total, tables) == moved
            assert (len(self.manager.copies), self.pool.total) == (len(before[-1]) + moved, total)
            self.carry_out(self.contents, self.manager.take_copies())  # with the tail still there
            self.contents = {place: marks for place, marks in self.contents.items() if place[0] is Tier.HOST or place[1] < total}
        else:
            with pytest.raises(InvariantError):
                self.manager.compact(total, tables)
            assert self.books() == before
        self.pool.grow(self.pool.total + dice.randint(0, 9))

    @rule(dice=DICE)
    def prefixes_are_forgotten(self, dice):
        if dice.random() < 0.2:
            cached = self.pool.num_cached
            assert self.manager.reset([sequence.table for sequence in self.running]) == cached
            assert len(self.index) == self.pool.num_cached == 0

    @invariant()
    def everything_is_in_order(self):
        if not hasattr(self, "manager"):
            return
        manager, pool, size = self.manager, self.pool, self.size
        manager.check(self.running, self.swapped)
        assert pool.num_free + pool.num_cached + pool.num_used == pool.total
        contents = dict(self.contents)
        self.carry_out(contents, manager.copies)
        for sequence in self.running:
            for group, (ids, window) in enumerate(zip(sequence.table.groups, self.windows, strict=True)):
                seen = 0 if window is None else max(0, sequence.num_computed - window + 1)
                for place, mark in enumerate(self.marks(sequence, seen, sequence.num_scheduled, group), seen):
                    assert contents[Tier.DEVICE, ids[place // size]][place % size] == mark
        for sequence in self.swapped:
            for block_id, (group, place) in zip(sequence.swapped, self.needed(sequence.num_swapped), strict=True):
                marks = self.marks(sequence, place * size, min((place + 1) * size, sequence.num_swapped), group)
                assert contents[Tier.HOST, block_id][: len(marks)] == marks
        for block_id in range(pool.total):
            if block_id in self.index:
                assert contents[Tier.DEVICE, block_id] == self.contents_of(block_id)
        slots = size * pool.num_used
        assert 0 <= manager.unused_slots(self.running) <= slots

    def contents_of(self, block_id):
        """What a named block holds."""
        node = self.index.node(block_id)
        group = node.block_ids.index(block_id)
        return [(group, scope, tokens) for _, scope, tokens in self.named[node.number]]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for sequence in list(self.running):
            self.leave(sequence)
        for sequence in self.swapped:
            self.manager.drop_swapped(sequence)
        self.manager.check([], [])
        assert (self.pool.num_used, self.manager.swap_free) == (0, self.manager.swap_total)


class LongMemory(Memory):
    """The same, for long."""


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))

TestLongMemory = pytest.mark.slow(LongMemory.TestCase)
TestLongMemory.settings = settings(TestMemory.settings, max_examples=2500, stateful_step_count=80)


class Service:
    """A scheduler and a simulated worker, and everything that can happen to them; `dice` decide what."""

    def __init__(self, dice, **shape):
        self.dice = dice
        self.sequences = []
        self.rows_until_failure = math.inf
        self.step_fails = self.step_failed = False
        self.most_blocks = shape["commit_limit"] or shape["num_blocks"]
        self.committed = shape["committed_blocks"] or shape["num_blocks"]
        self.driver = Driver(row_error=self.row_error, step_error=self.step_error, **shape)
        self.scheduler, self.executor = self.driver.scheduler, self.driver.executor

    def row_error(self, row, assignment):
        self.rows_until_failure -= 1
        if self.rows_until_failure:
            return None
        self.rows_until_failure = math.inf
        return "row"

    def step_error(self, plan):
        failing, self.step_fails = self.step_fails, False
        self.step_failed |= failing
        return RuntimeError("step") if failing else None

    def arrive(self):
        dice, pool, number = self.dice, self.scheduler.kv.pool, len(self.driver.reported)
        groups = self.scheduler.kv.groups
        room = groups.longest(pool.ceiling, 2 * pool.ceiling * groups.block_size)
        known = dice.choice(self.sequences[-6:]).tokens if self.sequences and dice.random() < 0.7 else []
        prompt = known[: round(len(known) * dice.choice([1, 0.7, 0.5]))] + dice.choices([0, 1], k=dice.randint(1, 6))
        max_tokens = max(1, round((room - len(prompt)) * dice.choice([0, 0.2, 0.5, 1.0, 1.0, 1.1])) + 1)
        options = {
            "seed": dice.randint(0, 2),
            "n": dice.choice([1, 1, 1, 2, 3]),
            "prompt_logprobs": dice.choice([None, None, 0]),
            "cache_salt": dice.choice([None, None, None, "x"]),
            "priority": dice.randint(-1, 1),
            "eos": dice.sample(range(VOCABULARY), dice.choice([0, 0, 2])),
            "deadline": self.driver.clock() + dice.randint(1, 60) if dice.random() < 0.15 else None,
        }
        if groups.most(0, len(prompt) + max_tokens - 1) > pool.ceiling:
            with pytest.raises(InvalidValueError):
                self.driver.add(f"{number}", prompt, max_tokens, **options)
        else:
            self.sequences += self.driver.add(f"{number}", prompt, max_tokens, **options).request.sequences

    def abort(self):
        out = [sequence for sequence in self.sequences if sequence.status is Status.PREEMPTED]
        some = out if out and self.dice.random() < 0.5 else self.sequences[-12:]
        if some:
            request = self.dice.choice(some).request
            live = not request.finished
            assert self.driver.finish(request.request_id) == live
            assert request.finished
            self.driver.check()

    def step(self, times):
        for _ in range(times):
            self.driver.clock.advance(self.dice.choice([0, 0, 0, 1]))
            self.driver.step()
            blocks = self.scheduler.stats().blocks
            assert blocks.free + blocks.cached + blocks.used == blocks.total <= blocks.ceiling
            assert blocks.total <= self.executor.committed
            for sequence in self.scheduler.running:
                named, whole = sequence.table.num_named, sequence.num_computed // self.scheduler.kv.block_size
                # What came back from the host tier, or was forked from that, is named with its next result.
                assert named in (UNNAMED, whole) or (named < whole and self.scheduler.kv.swap_total)

    def half_a_step(self):
        if self.dice.random() < 0.5 and len(self.driver.plans) < self.driver.in_flight:
            self.driver.launch()
        elif self.driver.plans:
            self.driver.land()

    def fly(self, plan):
        """A plan without rows."""
        assert plan.rows == []
        self.driver.plans.append(plan)
        self.driver.history.append(plan)
        self.executor.submit(plan)
        self.driver.check()

    def compact(self, write):
        """`write` a plan that compacts; its tail is given back by the next one, or at once."""
        while self.driver.plans:
            self.driver.land()
        pool = self.scheduler.kv.pool
        before, live = pool.total, pool.total - pool.num_free
        plan = write(self.driver.clock())
        if plan is None:
            assert pool.total == before
            return
        report = self.scheduler.compaction
        assert (report.blocks_before, report.blocks_after) == (before, pool.total)
        assert max(live, min(self.committed, before)) <= pool.total < before
        assert report.blocks_moved <= min(live, before - pool.total)
        self.fly(plan)
        if self.dice.random() < 0.5:
            self.settle()

    def settle(self):
        while self.driver.plans:
            self.driver.land()
        for _ in range(2):  # once more where the first was refused
            if (plan := self.scheduler.settle()) is not None:
                self.fly(plan)
                self.driver.land()
        assert self.scheduler.settle() is None

    def reset(self):
        cached = self.scheduler.kv.pool.num_cached
        assert self.scheduler.reset_prefix_cache() == cached
        assert self.scheduler.kv.pool.num_cached == 0
        self.driver.check()

    def disturb(self):
        """One of the things that come from outside the flow of steps."""
        deed = self.dice.choice(["abort", "abort", "compact", "compact", "rest", "settle", "reset", "row", "step"])
        if deed == "row":
            self.rows_until_failure = self.dice.randint(1, 20)
        elif deed == "step":
            self.step_fails = True
        elif deed == "compact":
            self.compact(lambda now: self.scheduler.compact(now, self.dice.choice([None, None, self.dice.randint(1, 20)])))
        elif deed == "rest":
            self.compact(self.scheduler.rest)
        else:
            getattr(self, deed)()

    def finish(self):
        """Let everything end, and look at what came out."""
        self.step_fails, self.rows_until_failure = False, math.inf
        self.driver.run()
        for sequence in self.sequences:
            self.judge(sequence)
        self.probe()
        self.settle()
        pool = self.scheduler.kv.pool
        assert self.step_failed or self.executor.committed == pool.total
        self.reset()
        assert pool.num_free == pool.total

    def judge(self, sequence):
        oracle, output = expected(sequence), sequence.output_token_ids
        ended = sequence.finish_reason in ("stop", "length")
        assert output == oracle[: len(output)]
        assert (len(output) == len(oracle)) == ended
        if sequence.finish_reason == "error":
            legal = sequence.error in ("row", "step") or sequence.error.endswith("raised")
            impossible = self.scheduler.kv.groups.most(0, sequence.request.max_length - 1) > self.most_blocks
            assert legal or (impossible and "the pool cannot grow: " in sequence.error)
        scored = [(first.token_id, first.logprob) for first, *_ in self.driver.scored.get(sequence, [])]
        wanted = [(sequence.tokens[place], -place) for place in range(1, sequence.num_prompt)] if sequence.scores_prompt else []
        assert scored == (wanted if ended else wanted[: len(scored)])

    def probe(self):
        """Whoever comes after all that is answered, from blocks that are cached or not."""
        room = self.scheduler.kv.groups.longest(self.most_blocks, LIMIT)
        for number, earlier in enumerate(self.dice.sample(self.sequences, min(3, len(self.sequences)))):
            if len(earlier.tokens) < room:
                probe = self.driver.add(f"probe {number}", earlier.tokens, 2, n=2)
                self.driver.run()
                for sequence in probe.request.sequences:
                    assert sequence.finish_reason == "length"
                    self.judge(sequence)


def shape(dice):
    """Of a service: mostly too small, often one that begins smaller still, and now and then one that cannot grow."""
    windows = dice.choice([(None,), (None,), (3,), (None, 2), (None, 5, 5), (None, None, 9), (11, 2)])
    num_blocks = dice.randint(3, 16) * len(windows)
    committed = dice.choice([None, dice.randint(1, num_blocks), dice.randint(1, 3)])
    return {
        "num_blocks": num_blocks,
        "block_size": dice.choice([1, 2, 4]),
        "max_batch_size": dice.randint(1, 6),
        "prefill_chunk_size": dice.choice([1, 3, 8, None]),
        "in_flight": dice.randint(1, 2),
        "policy": dice.choice(["fcfs", "priority"]),
        "prefix_caching": dice.random() < 0.9,
        "windows": windows,
        "swap_blocks": dice.choice([0, 4, 12, 40]) * len(windows),
        "committed_blocks": committed,
        "commits_per_step": dice.choice([None, 1, 2]),
        "commit_limit": dice.randint(committed or num_blocks, num_blocks) if dice.random() < 0.3 else None,
        # Computing anew costs more than swapping, or less, or now one and now the other.
        "seconds_per_token": dice.choice([0, 1e-9, 5e-4]),
    }


class Traffic(RuleBasedStateMachine):
    """Scheduler and simulated worker: what comes out is what each request alone would have been answered."""

    @initialize(dice=DICE)
    def start(self, dice):
        self.service = Service(dice, **shape(dice))

    @rule(dice=DICE)
    def arrive(self, dice):
        self.service.dice = dice
        for _ in range(dice.randint(1, 4)):
            self.service.arrive()

    @rule(dice=DICE)
    def steps(self, dice):
        self.service.dice = dice
        self.service.step(dice.choice([1, 2, 5, 20]))

    @rule(dice=DICE)
    def half_a_step(self, dice):
        self.service.dice = dice
        self.service.half_a_step()

    @rule(dice=DICE)
    def disturb(self, dice):
        self.service.dice = dice
        self.service.disturb()

    def teardown(self):
        if hasattr(self, "service"):
            self.service.finish()


class LongTraffic(Traffic):
    """The same, for long."""


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))

TestLongTraffic = pytest.mark.slow(LongTraffic.TestCase)
TestLongTraffic.settings = settings(TestTraffic.settings, max_examples=800, stateful_step_count=50)


# Cases that random traffic meets seldom


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("eos", [[], range(VOCABULARY)])
def test_answer_of_one_token_to_a_scored_prompt_is_reported_as_ended_once(max_tokens, eos):
    """One row brings the prompt's scores, the first token and the end."""
    driver = Driver()
    sequence = driver.add(prompt=[1, 2, 3], max_tokens=max_tokens, eos=eos, prompt_logprobs=0)
    driver.run()
    assert driver.reported[sequence] == expected(sequence)
    assert [first.token_id for first, *_ in driver.scored[sequence]] == [2, 3]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_prompt_scored_in_part_and_computed_anew_in_smaller_chunks_is_scored_once(in_flight):
    """Preempted in the middle of its prompt, and back without a cache, in chunks that end before what was scored."""
    driver = Driver(num_blocks=12, prefill_chunk_size=8, in_flight=in_flight, prefix_caching=False)
    driver.add("first", [1] * 4, 34)
    scored = driver.add("scored", list(range(34)), 3, prompt_logprobs=0)
    while not scored.num_preemptions:
        driver.scheduler.prefill_chunk_size = 8 if scored.num_scheduled < 16 else 1
        driver.step()
        assert not scored.finished
    assert 16 <= scored.num_scored < 33
    driver.scheduler.prefill_chunk_size = 3
    driver.run()
    assert scored.output_token_ids == expected(scored)
    assert [(first.token_id, -first.logprob) for first, *_ in driver.scored[scored]] == [(place, place) for place in range(1, 34)]


def test_tokens_of_one_that_gave_way_and_never_came_back_are_not_told_as_recomputed():
    driver = Driver(num_blocks=10)
    for number, name in enumerate("abc"):
        driver.add(name, [number] * 8, 30)
    while not driver.scheduler.stats().preemptions:
        driver.step()
    driver.finish("c")
    driver.finish("b")
    driver.run()
    assert driver.scheduler.stats().recomputed_tokens == 0


def test_recomputed_tokens_are_never_below_zero():
    """Preempted before any result of it came, and back when another had computed the same."""
    driver = Driver(num_blocks=34, block_size=1, in_flight=2)
    for name in "ab":
        driver.add(name, [1] * 16, 10)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions == 1
    assert stats.recomputed_tokens >= 0


def test_pool_that_gave_back_memory_after_a_refusal_grows_to_what_it_had():
    """Seven blocks are refused and six are there; compacted to five, it must find the sixth again."""
    driver = Driver(num_blocks=9, committed_blocks=5, commit_limit=6, prefix_caching=False)
    refused = driver.add("refused", [1] * 26, 2)
    driver.run()
    assert (refused.finish_reason, driver.scheduler.kv.pool.total) == ("error", 6)
    driver.add("small", [3], 1)
    driver.run()
    for plan in (driver.scheduler.compact, lambda now: driver.scheduler.settle()):
        driver.executor.submit(plan(driver.clock()))
        driver.scheduler.update(driver.executor.collect())
    assert driver.scheduler.kv.pool.total == driver.executor.committed == 5
    sequence = driver.add("fits", [2] * 22, 2)
    driver.run()
    assert (sequence.finish_reason, sequence.error) == ("length", None)
    assert sequence.output_token_ids == expected(sequence)
