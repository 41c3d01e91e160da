"""Whatever comes, in whatever order: the books stay in order, every request ends once, and no one disturbs another."""

from __future__ import annotations

import random

import pytest
from core_driver import VOCABULARY, Driver, expected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.core.request import Status
from octavo.errors import InvalidValueError


def check_outputs(sequences):
    """Whoever was let to its end has the oracle's tokens, and whoever was not has the first of them."""
    for sequence in sequences:
        oracle, output = expected(sequence), sequence.output_token_ids
        assert sequence.status is Status.FINISHED
        if sequence.finish_reason in ("stop", "length"):
            assert output == oracle
        else:
            assert output == oracle[: len(output)]
            assert len(output) < len(oracle)
        if sequence.finish_reason == "error":
            assert sequence.error in ("row", "step") or sequence.error.endswith("raised")


class Traffic(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 20),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_batch_size=st.integers(1, 6),
        prefill_chunk_size=st.sampled_from([1, 2, 5, 16, None]),
        in_flight=st.integers(1, 2),
    )
    def start(self, **shape):
        self.failing_rows: set[int] = set()
        self.step_fails = False
        self.driver = Driver(row_error=self.row_error, step_error=self.step_error, **shape)
        self.sequences = []

    def row_error(self, row, assignment):
        return "row" if self.failing_rows and assignment.seed in self.failing_rows else None

    def step_error(self, plan):
        failing, self.step_fails = self.step_fails, False
        return RuntimeError("step") if failing else None

    @rule(
        count=st.integers(1, 6),
        prompt_length=st.integers(0, 20),
        share=st.floats(0.05, 1.05),
        patience=st.sampled_from([None, None, 5, 100]),
        ends=st.sets(st.integers(0, VOCABULARY - 1), max_size=2),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sets(st.integers(0, VOCABULARY - 1), max_size=1),
    )
    def arrive(self, count, prompt_length, share, patience, ends, ignore_eos, stop_token_ids):
        driver = self.driver
        for _ in range(count):
            number = len(self.sequences)
            prompt = [(number * 7 + place * place) % VOCABULARY for place in range(prompt_length)]
            room = driver.scheduler.kv.pool.total * driver.scheduler.kv.block_size
            max_tokens = max(1, int(room * share) - prompt_length)
            deadline = None if patience is None else driver.clock() + patience
            options = {"eos": ends, "ignore_eos": ignore_eos, "stop_token_ids": sorted(stop_token_ids), "deadline": deadline}
            if not prompt or prompt_length + max_tokens - 1 > room:
                with pytest.raises(InvalidValueError):
                    driver.add(f"{number}", prompt, max_tokens, **options)
            else:
                self.sequences.append(driver.add(f"{number}", prompt, max_tokens, seed=number, **options))
        driver.check()

    @rule(times=st.integers(1, 60), seconds=st.sampled_from([0, 0, 1]))
    def step(self, times, seconds):
        for _ in range(times):
            self.driver.clock.advance(seconds)
            self.driver.step()

    @rule(launch=st.booleans())
    def half_a_step(self, launch):
        if launch and len(self.driver.plans) < self.driver.in_flight:
            self.driver.launch()
        elif self.driver.plans:
            self.driver.land()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.sequences[-8:]))
        live = not sequence.finished
        assert self.driver.finish(sequence.request.request_id) == live
        self.driver.check()

    @precondition(lambda self: any(not sequence.finished for sequence in self.sequences))
    @rule(data=st.data())
    def row_fails(self, data):
        sequence = data.draw(st.sampled_from([sequence for sequence in self.sequences if not sequence.finished]))
        self.failing_rows.add(sequence.request.seed)

    @rule()
    def next_step_fails(self):
        self.step_fails = True

    @precondition(lambda self: any(not sequence.finished for sequence in self.sequences))
    @rule(data=st.data())
    def live_id_comes_again(self, data):
        sequence = data.draw(st.sampled_from([sequence for sequence in self.sequences if not sequence.finished]))
        with pytest.raises(InvalidValueError, match="in use"):
            self.driver.add(sequence.request.request_id)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.step_fails = False
        self.driver.run()
        check_outputs(self.sequences)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=250, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_crowded_pool(seed, in_flight):
    """Long runs in which preemption is the rule, and now and then something fails."""
    source = random.Random(seed)
    block_size = source.choice([1, 2, 4, 8])
    driver = Driver(
        num_blocks=96 // block_size,
        block_size=block_size,
        max_batch_size=source.randint(4, 12),
        prefill_chunk_size=source.choice([1, 5, 16, None]),
        in_flight=in_flight,
        row_error=lambda row, assignment: "row" if source.random() < 0.0005 else None,
        step_error=lambda plan: RuntimeError("step") if source.random() < 0.002 else None,
    )
    sequences = []
    while len(sequences) < 80 or driver.scheduler.has_work or driver.plans:
        if len(sequences) < 80 and source.random() < 0.2:
            number = len(sequences)
            prompt = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 10))]
            deadline = driver.clock() + source.randint(50, 500) if source.random() < 0.1 else None
            sequences.append(driver.add(f"{number}", prompt, source.randint(20, 80), deadline=deadline, seed=number))
        if sequences and source.random() < 0.002:
            driver.finish(source.choice(sequences).request.request_id)
        driver.clock.advance(1.0)
        driver.step()
    driver.check_idle()
    check_outputs(sequences)
    assert driver.scheduler.stats().preemptions > 30
    assert driver.scheduler.stats().finished["length"] > 30
