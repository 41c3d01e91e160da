"""Who runs in a step, who gives way, and how every request ends."""

import functools
import random
import sys

import core_driver
import msgspec
import pytest
from core_driver import expected

from octavo.core.request import Request, Status
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError, InvalidValueError, InvariantError
from octavo.plan import RowResult, StepPlan, StepResult
from octavo.sampling_params import SamplingParams

Driver = functools.partial(core_driver.Driver, prefix_caching=False)  # these tests count blocks; sharing has its own


def decodes(plan, driver):
    """Rows of one generated token, as opposed to prompts and what is recomputed."""
    return [row for row in plan.rows if row.assign is None and row.count == 1 and row.num_logits == 1]


def prefill_tokens(plan, driver):
    return sum(row.count for row in plan.rows) - len(decodes(plan, driver))


# Rows of a step


def test_prompt_is_computed_in_one_step_where_it_fits():
    driver = Driver()
    sequence = driver.add(prompt=[1] * 10, max_tokens=3)
    first, *rest = driver.run()
    (row,) = first.rows
    assert (row.start, row.count, row.num_logits, row.pending) == (0, 10, 1, 0)
    assert row.assign.history == [1] * 10
    assert [(row.start, row.count, row.num_logits) for plan in rest for row in plan.rows] == [(10, 1, 1), (11, 1, 1)]
    assert sequence.finish_reason == "length"


def test_long_prompt_is_cut_into_chunks_and_samples_after_the_last():
    driver = Driver(prefill_chunk_size=4)
    driver.add(prompt=[1] * 10, max_tokens=2)
    rows = [plan.rows[0] for plan in driver.run()]
    assert [(row.start, row.count, row.num_logits) for row in rows] == [(0, 4, 0), (4, 4, 0), (8, 2, 1), (10, 1, 1)]
    assert [row.assign is not None for row in rows] == [True, False, False, False]


def test_unlimited_chunk_takes_any_prompt_whole():
    driver = Driver(prefill_chunk_size=None, num_blocks=600)
    for name in "ab":
        driver.add(name, [1] * 1000, 1)
    (plan,) = driver.run()
    assert [row.count for row in plan.rows] == [1000, 1000]


def test_step_mixes_decodes_with_chunks():
    driver = Driver(prefill_chunk_size=4)
    driver.add("a", [1, 2, 3], 20)
    driver.step()
    driver.add("b", [1] * 10, 5)
    plan = driver.step()
    assert [(row.start, row.count, row.num_logits) for row in plan.rows] == [(3, 1, 1), (0, 4, 0)]


@pytest.mark.parametrize("chunk", [1, 7, 16, None])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_prefill_tokens_of_a_step_stay_within_the_chunk_size_as_a_whole(chunk, in_flight):
    source = random.Random(7)
    driver = Driver(prefill_chunk_size=chunk, max_batch_size=6, num_blocks=30, in_flight=in_flight)
    for number in range(30):
        driver.add(f"{number}", [1] * source.randint(1, 30), source.randint(1, 30))
    plans = driver.run()
    mixed = 0
    for plan in plans:
        assert chunk is None or prefill_tokens(plan, driver) <= chunk
        assert len(plan.rows) <= 6
        mixed += bool(prefill_tokens(plan, driver)) and bool(decodes(plan, driver))
    assert mixed > 10
    assert max(len(plan.rows) for plan in plans) == 6 or chunk == 1


def test_every_decoding_sequence_has_a_row_in_every_step():
    driver = Driver(prefill_chunk_size=2, max_batch_size=5)
    for name in "abc":
        driver.add(name, [1, 2], 30)
    while len(driver.scheduler.running) < 3:
        driver.step()
    driver.step()
    driver.add("d", [1] * 50, 2)
    for _ in range(10):
        assert len(decodes(driver.step(), driver)) == 3


def test_nothing_to_run_is_no_plan():
    driver = Driver()
    assert driver.launch() is None
    driver.add()
    driver.run()
    assert driver.launch() is None


# Admission


def test_admission_is_in_order_of_arrival():
    driver = Driver(max_batch_size=2, prefill_chunk_size=8)
    sequences = [driver.add(f"{number}", [number] * 5, 3) for number in range(12)]
    order = [row.assign.history[0] for plan in driver.run() for row in plan.rows if row.assign]
    assert order == list(range(12))
    assert all(driver.ends[sequence] == 1 for sequence in sequences)


def test_short_late_request_does_not_overtake_one_that_must_wait_for_blocks():
    driver = Driver(num_blocks=6)
    driver.add("a", [1] * 12, 8)
    driver.step()
    big, small = driver.add("big", [2] * 14, 1), driver.add("small", [3], 1)
    while big.status is Status.WAITING:
        assert small.status is Status.WAITING
        driver.step()
    driver.run()


def test_no_one_is_admitted_on_blocks_that_running_sequences_will_soon_need():
    driver = Driver(num_blocks=10, prefill_chunk_size=None)
    for name in "abc":
        driver.add(name, [1] * 7, 4)
    driver.step()
    assert driver.scheduler.kv.pool.num_free == 4
    late = driver.add("late", [2] * 10, 3)
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    assert late.output_token_ids == expected(late)


def test_batch_size_bounds_the_running():
    driver = Driver(max_batch_size=3)
    for number in range(9):
        driver.add(f"{number}", max_tokens=5)
    for _ in range(10):
        driver.step()
        assert len(driver.scheduler.running) <= 3
    driver.run()


def test_slot_is_reused_after_its_release():
    driver = Driver(max_batch_size=1)
    driver.add("a", max_tokens=1)
    driver.add("b", max_tokens=1)
    first, second = driver.run()
    assert first.rows[0].slot == second.rows[0].slot == 0
    assert (first.released, second.released) == ([], [0])


# Preemption


def crowd(driver, number=6, prompt=10, tokens=30, seed=0):
    source = random.Random(seed)
    return [
        driver.add(f"{index}", [source.randrange(50) for _ in range(prompt)], tokens, seed=source.randrange(100)) for index in range(number)
    ]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_preemption_changes_no_output(in_flight):
    driver = Driver(num_blocks=16, in_flight=in_flight)
    sequences = crowd(driver)
    driver.run()
    assert driver.scheduler.stats().preemptions > 5
    for sequence in sequences:
        assert sequence.output_token_ids == expected(sequence)
        assert sequence.num_prompt == 10


def test_latest_arrival_gives_way_and_resumes_before_new_ones():
    driver = Driver(num_blocks=15)
    first, second, third = (driver.add(name, [1] * 8, 30) for name in "abc")
    while not driver.scheduler.stats().preemptions:
        driver.step()
    assert third.status is Status.PREEMPTED
    assert first.status is second.status is Status.RUNNING
    late = driver.add("late", [1], 1)
    while third.status is Status.PREEMPTED:
        assert late.status is Status.WAITING
        driver.step()
    driver.run()
    assert first.num_preemptions == 0


def test_running_sequences_always_came_before_waiting_ones():
    driver = Driver(num_blocks=12, max_batch_size=5)
    sequences = crowd(driver, 12)
    for number, sequence in enumerate(sequences):
        sequence.request.arrival = number
    while driver.scheduler.has_work:
        driver.step()
        running = [sequence.request.arrival for sequence in sequences if sequence.status is Status.RUNNING]
        waiting = [sequence.request.arrival for sequence in sequences if sequence.status in (Status.WAITING, Status.PREEMPTED)]
        assert not running or not waiting or max(running) < min(waiting)
    assert driver.scheduler.stats().preemptions > 5


def test_resumption_brings_prompt_and_generated_tokens():
    driver = Driver(num_blocks=10)
    sequences = [driver.add(name, [number] * 8, 30) for number, name in enumerate("abc")]
    plans = driver.run()
    resumed = [row.assign for plan in plans for row in plan.rows if row.assign and len(row.assign.history) > 8]
    assert resumed
    for assign in resumed:
        sequence = sequences[assign.history[0]]
        assert assign.history == sequence.tokens[: len(assign.history)]
        assert assign.prompt_length == 8
    assert driver.scheduler.stats().recomputed_tokens > 0
    assert driver.scheduler.stats().prompt_tokens == 24
    assert driver.scheduler.stats().generated_tokens == 90


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_sequence_alone_always_progresses(block_size, chunk, in_flight):
    driver = Driver(num_blocks=48 // block_size, block_size=block_size, prefill_chunk_size=chunk, in_flight=in_flight)
    sequence = driver.add(prompt=[1] * 20, max_tokens=29)
    while driver.scheduler.has_work:
        before = sequence.num_computed
        driver.step()
        assert sequence.finished or sequence.num_computed > before or in_flight == 2
    assert sequence.output_token_ids == expected(sequence)
    assert driver.scheduler.stats().preemptions == 0
    driver.check_idle()


def test_first_arrival_is_never_preempted_and_always_in_the_step():
    driver = Driver(num_blocks=12)
    first, *_ = crowd(driver, 8)
    while not first.finished:
        before = len(first.tokens) + first.num_computed
        driver.step()
        assert first.finished or len(first.tokens) + first.num_computed > before
    assert first.num_preemptions == 0


# What is refused


def test_request_that_can_never_fit_is_refused_with_both_numbers():
    driver = Driver(num_blocks=4, block_size=16)
    with pytest.raises(InvalidValueError, match=r"160 tokens; the pool holds 64"):
        driver.add(prompt=[1] * 60, max_tokens=100)
    other = driver.add("b", [1] * 60, 5)
    driver.run()
    assert other.finish_reason == "length"


def test_longest_request_that_fits_uses_every_block():
    driver = Driver(num_blocks=4, block_size=4)
    with pytest.raises(InvalidValueError):
        driver.add(prompt=[1] * 10, max_tokens=8)
    driver.add(prompt=[1] * 10, max_tokens=7)
    driver.run()
    assert driver.scheduler.stats().blocks.peak_used == 4


@pytest.mark.parametrize(("prompt", "max_length"), [([], 5), ([1] * 5, 5), ([1] * 6, 5)])
def test_prompt_of_no_token_or_too_many_is_refused_with_both_numbers(prompt, max_length):
    driver = Driver()
    request = Request("a", prompt, SamplingParams(), arrival=0.0, max_length=max_length)
    with pytest.raises(InvalidValueError, match=rf"{len(prompt)} tokens; allowed: 1 to 4"):
        driver.scheduler.add(request)
    assert not driver.scheduler.has_work
    driver.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_live_id_is_refused_and_the_live_request_goes_on(steps):
    driver = Driver()
    sequence = driver.add("a", max_tokens=6)
    for _ in range(steps):
        driver.step()
    with pytest.raises(InvalidValueError, match="'a' is in use"):
        driver.add("a", [9])
    driver.run()
    assert sequence.output_token_ids == expected(sequence)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_id_may_be_used_again_after_any_end(in_flight):
    driver = Driver(in_flight=in_flight)
    driver.add("a", max_tokens=2)
    driver.run()
    aborted = driver.add("a", [1], 50)
    for _ in range(3):
        driver.step()
    driver.finish("a")
    again = driver.add("a", [2, 2], 5)
    driver.run()
    assert (aborted.finish_reason, again.finish_reason) == ("abort", "length")
    assert again.output_token_ids == expected(again)


# Ends


@pytest.mark.parametrize("in_flight", [1, 2])
def test_stop_ids_eos_and_length_end_a_sequence_where_they_should(in_flight):
    driver = Driver(in_flight=in_flight, next_token=lambda assignment, tokens: len(tokens) - assignment.prompt_length)
    by_length = driver.add("length", max_tokens=4)
    by_eos = driver.add("eos", max_tokens=9, eos=[3, 5])
    past_eos = driver.add("past", max_tokens=9, eos=[3], ignore_eos=True)
    by_stop = driver.add("stop", max_tokens=9, stop_token_ids=[6, 2])
    both = driver.add("both", max_tokens=4, eos=[3])
    at_once = driver.add("at once", max_tokens=9, eos=[0])
    driver.run()
    assert (by_length.output_token_ids, by_length.finish_reason) == ([0, 1, 2, 3], "length")
    assert (by_eos.output_token_ids, by_eos.finish_reason, by_eos.stop_reason) == ([0, 1, 2, 3], "stop", None)
    assert (past_eos.output_token_ids, past_eos.finish_reason) == (list(range(9)), "length")
    assert (by_stop.output_token_ids, by_stop.finish_reason, by_stop.stop_reason) == ([0, 1, 2], "stop", 2)
    assert (both.output_token_ids, both.finish_reason) == ([0, 1, 2, 3], "stop")
    assert (at_once.output_token_ids, at_once.finish_reason) == ([0], "stop")


def test_token_that_ends_a_sequence_is_never_computed():
    driver = Driver()
    driver.add(prompt=[1, 2, 3], max_tokens=4)
    assert sum(row.count for plan in driver.run() for row in plan.rows) == 3 + 4 - 1


def test_blocks_are_free_as_soon_as_the_last_token_is_reported():
    driver = Driver()
    driver.add(max_tokens=2)
    driver.step()
    assert driver.scheduler.kv.pool.num_used == 1
    driver.step()
    assert driver.scheduler.kv.pool.num_used == 0


def waiting(driver, sequence):
    assert sequence.status is Status.WAITING


def running(driver, sequence):
    driver.step()
    assert sequence.status is Status.RUNNING


def in_the_middle_of_its_prompt(driver, sequence):
    driver.step()
    assert 0 < sequence.num_computed < sequence.num_prompt


def with_one_plan_in_flight(driver, sequence):
    driver.launch()
    assert sequence.num_scheduled > sequence.num_computed


def with_two_plans_in_flight(driver, sequence):
    driver.in_flight = 2
    for _ in range(6):
        driver.step()
    driver.launch()
    assert len(driver.plans) == 2
    assert sequence.num_pending


def preempted(driver, sequence):
    while sequence.status is not Status.PREEMPTED:
        driver.step()


def preempted_with_plans_in_flight(driver, sequence):
    driver.in_flight = 2
    while sequence.status is not Status.PREEMPTED or not driver.plans:
        driver.step()


MOMENTS = [
    waiting,
    running,
    in_the_middle_of_its_prompt,
    with_one_plan_in_flight,
    with_two_plans_in_flight,
    preempted,
    preempted_with_plans_in_flight,
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_end_from_outside_frees_at_once_and_disturbs_no_one(moment, reason):
    driver = Driver(num_blocks=10, max_batch_size=3, prefill_chunk_size=5 if moment is in_the_middle_of_its_prompt else 32)
    if moment in (preempted, preempted_with_plans_in_flight):
        others = [driver.add("other", [1] * 8, 25)]
        sequence = driver.add("mine", [2] * 8, 25, deadline=10.0)
    else:
        sequence = driver.add("mine", [2] * 8, 25, deadline=10.0)
        others = [driver.add("other", [1] * 8, 25)]
    moment(driver, sequence)
    if reason == "abort":
        assert driver.finish("mine")
    else:
        driver.clock.advance(10.0)
        driver.launch()
        if len(driver.plans) == 2:
            driver.land()
    assert (sequence.finish_reason, sequence.status) == (reason, Status.FINISHED)
    assert sequence.table is None
    assert not driver.finish("mine")
    driver.check()
    driver.run()
    for other in others:
        assert (other.finish_reason, other.output_token_ids) == ("length", expected(other))
    assert sequence.output_token_ids == expected(sequence)[: len(sequence.output_token_ids)]


def test_unknown_id_cannot_be_ended():
    driver = Driver()
    assert not driver.finish("nobody")
    assert not driver.scheduler.has_work


def test_slot_of_an_aborted_sequence_is_released_in_the_next_plan():
    driver = Driver()
    sequence, other = driver.add("a", max_tokens=50), driver.add("b", max_tokens=50)
    driver.step()
    slot = sequence.slot
    driver.finish("a")
    assert driver.step().released == [slot]
    assert driver.executor.assigned_slots == {other.slot}


def test_end_from_outside_is_reported_even_where_nothing_else_runs():
    driver = Driver()
    sequence = driver.add()
    driver.finish("a")
    assert driver.scheduler.has_work
    driver.step()
    assert driver.ends[sequence] == 1
    assert not driver.scheduler.has_work


def test_deadline_ends_a_request_when_it_is_reached_and_not_before():
    driver = Driver()
    sequence, other = driver.add("a", max_tokens=50, deadline=1.0), driver.add("b", max_tokens=50, deadline=2.0)
    driver.clock.advance(0.999)
    driver.step()
    assert sequence.status is Status.RUNNING
    driver.clock.advance(0.001)
    driver.step()
    assert sequence.finish_reason == "timeout"
    assert len(sequence.output_token_ids) == 1
    assert other.status is Status.RUNNING
    driver.run()
    assert other.finish_reason == "length"


def test_deadline_passes_while_waiting():
    driver = Driver(max_batch_size=1)
    driver.add("a", max_tokens=50)
    sequence = driver.add("b", deadline=1.0)
    driver.step()
    driver.clock.advance(1.0)
    driver.step()
    assert (sequence.finish_reason, sequence.output_token_ids) == ("timeout", [])
    driver.run()


def test_request_that_ended_in_time_is_not_timed_out_after():
    driver = Driver()
    sequence = driver.add("a", max_tokens=2, deadline=1.0)
    driver.run()
    driver.clock.advance(5.0)
    again = driver.add("a", max_tokens=2)
    driver.run()
    assert (sequence.finish_reason, again.finish_reason) == ("length", "length")


def test_deadlines_of_ended_requests_do_not_pile_up():
    driver = Driver(num_blocks=2000)
    driver.add("long", max_tokens=7000, deadline=1e8)  # stands at the top of the heap all the while
    for number in range(1000):
        driver.add(f"{number}", max_tokens=1, deadline=1e9)
        driver.step()
    assert len(driver.scheduler._deadlines) < 200


def test_a_step_that_preempts_admits_nobody():
    driver = Driver(num_blocks=6, block_size=1, max_batch_size=8)
    for number in range(6):
        driver.add(f"{number}", [1], max_tokens=5)
    seen = 0
    while driver.scheduler.has_work:
        before = driver.scheduler.stats().preemptions
        driver.step()
        if driver.scheduler.stats().preemptions > before:
            seen += 1
            assert all(row.assign is None for row in driver.history[-1].rows)
    assert seen > 0


def test_whom_nobody_would_have_room_for_is_not_admitted():
    """Three sequences that grow to four blocks each: admitted all at once into eight blocks, they would preempt one another."""
    driver = Driver(num_blocks=8, block_size=2, max_batch_size=8)
    for number in range(8):
        driver.add(f"{number}", [1, 2, 3], max_tokens=5)
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.stats().preemptions <= 8


# Failures


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("place", [0, 3])
def test_failing_row_ends_alone(in_flight, place):
    def row_error(row, assignment):
        return "not a number" if assignment.history[0] == 7 and row.start + row.count - assignment.prompt_length == place else None

    driver = Driver(in_flight=in_flight, row_error=row_error)
    others = [driver.add("a", [1, 2], 10), driver.add("b", [3, 4], 10)]
    bad = driver.add("bad", [7, 7], 10)
    driver.run()
    assert (bad.finish_reason, bad.error) == ("error", "not a number")
    assert bad.output_token_ids == expected(bad)[:place]
    for other in others:
        assert other.output_token_ids == expected(other)


def test_row_may_fail_in_the_middle_of_its_prompt():
    driver = Driver(prefill_chunk_size=4, row_error=lambda row, assignment: "broken" if row.start == 4 else None)
    sequence = driver.add(prompt=[1] * 12)
    driver.run()
    assert (sequence.finish_reason, sequence.error, sequence.output_token_ids) == ("error", "broken", [])


def test_failing_step_ends_its_sequences_and_no_others():
    driver = Driver(max_batch_size=2, step_error=lambda plan: ValueError("no memory") if plan.step == 3 else None)
    first, second, later = (driver.add(name, max_tokens=5) for name in "abc")
    for _ in range(3):
        driver.step()
    assert driver.scheduler.kv.pool.num_used == 0
    assert [(s.finish_reason, s.error) for s in (first, second)] == [("error", "no memory")] * 2
    assert [len(s.output_token_ids) for s in (first, second)] == [2, 2]
    driver.run()
    assert later.output_token_ids == expected(later)


def test_failing_step_spares_what_only_the_next_plan_in_flight_computes():
    driver = Driver(in_flight=2, prefill_chunk_size=4, step_error=lambda plan: ValueError("broken") if plan.step == 1 else None)
    first, second = driver.add("a", [1] * 4, 5), driver.add("b", [2] * 4, 5)
    driver.launch()
    driver.launch()
    assert [len(plan.rows) for plan in driver.plans] == [1, 2]
    driver.run()
    assert first.finish_reason == "error"
    assert (second.finish_reason, second.output_token_ids) == ("length", expected(second))


def test_only_the_oldest_plan_can_be_reported():
    driver = Driver(in_flight=2)
    driver.add(max_tokens=9)
    driver.launch()
    driver.launch()
    for call in (
        lambda: driver.scheduler.fail(2, "late"),
        lambda: driver.scheduler.update(StepResult(step=2, rows=[], committed_blocks=0)),
    ):
        with pytest.raises(EngineError, match="step 2 is not the oldest"):
            call()
    driver.run()


def test_result_with_too_few_rows_is_refused():
    driver = Driver()
    driver.add()
    driver.launch()
    with pytest.raises(EngineError, match="planned 1 rows and reports 0"):
        driver.scheduler.update(StepResult(step=1, rows=[], committed_blocks=0))


# Two plans in flight


def test_no_third_plan_is_written():
    driver = Driver(in_flight=2)
    driver.add(max_tokens=9)
    assert driver.launch()
    assert driver.launch()
    assert driver.launch() is None
    driver.land()
    assert driver.launch()


def test_second_plan_names_its_unreported_inputs():
    driver = Driver(in_flight=2)
    driver.add(prompt=[1, 2, 3], max_tokens=9)
    first, second = driver.launch(), driver.launch()
    assert (first.rows[0].pending, second.rows[0].pending) == (0, 1)
    assert (second.rows[0].start, second.rows[0].count) == (3, 1)


@pytest.mark.parametrize("num_blocks", [14, 90])
@pytest.mark.parametrize("chunk", [3, 16])
def test_two_plans_in_flight_give_the_same_outputs_as_one(num_blocks, chunk):
    outputs = []
    for in_flight in (1, 2):
        driver = Driver(num_blocks=num_blocks, prefill_chunk_size=chunk, in_flight=in_flight)
        sequences = crowd(driver, 8)
        sequences += [driver.add("short", [4], 1), driver.add("stopped", [5, 6], 30, eos=range(0, 50, 7))]
        driver.run()
        outputs.append([(s.output_token_ids, s.finish_reason) for s in sequences])
        assert (driver.scheduler.stats().preemptions > 3) == (num_blocks == 14)
    assert outputs[0] == outputs[1]


def test_late_result_of_a_preempted_sequence_is_dropped():
    driver = Driver(num_blocks=10, in_flight=2)
    sequences = crowd(driver, 3, prompt=8)
    dropped = 0
    while driver.scheduler.has_work or driver.plans:
        while driver.launch() is not None:
            pass
        dropped += any(sequence.status is Status.PREEMPTED for sequence in sequences) and len(driver.plans) > 0
        if driver.plans:
            driver.land()
        else:
            driver.note(driver.scheduler.take_changes())
    assert dropped > 3
    driver.check_idle()
    assert [sequence.output_token_ids for sequence in sequences] == [expected(sequence) for sequence in sequences]


def test_failing_plan_spares_a_sequence_that_was_preempted_meanwhile():
    def preempted_in_flight(failing_step):
        driver = Driver(num_blocks=15, in_flight=2, step_error=lambda plan: ValueError("broken") if plan.step == failing_step else None)
        *_, last = (driver.add(name, [1] * 8, 30) for name in "abc")
        while last.status is not Status.PREEMPTED:
            if driver.launch() is None:
                driver.land()
        return driver, last

    driver, _ = preempted_in_flight(None)
    flying = driver.plans[0]
    assert len(flying.rows) == 3
    driver, last = preempted_in_flight(flying.step)
    driver.run()
    assert [sequence.finish_reason for sequence in driver.reported] == ["error", "error", "length"]
    assert last.output_token_ids == expected(last)


# The plan as data


class Replayer:
    """A worker that knows nothing but the tables it was told, written without a look at the real one."""

    def __init__(self):
        self.tables = {}

    def read(self, plan):
        for slot in plan.released:
            del self.tables[slot]
        for row in plan.rows:
            if row.assign is not None:
                assert row.slot not in self.tables
                self.tables[row.slot] = []
            for update in row.tables:
                self.tables[row.slot] = self.tables[row.slot][: update.start] + update.block_ids


@pytest.mark.parametrize("in_flight", [1, 2])
def test_table_changes_replayed_are_the_managers_tables(in_flight):
    driver, replayer = Driver(num_blocks=16, in_flight=in_flight), Replayer()
    crowd(driver, 10)
    while driver.scheduler.has_work or driver.plans:
        while (plan := driver.launch()) is not None:
            replayer.read(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))
            for sequence in driver.scheduler.running:
                assert replayer.tables[sequence.slot] == sequence.table.groups[0]
        if driver.plans:
            driver.land()
        else:
            driver.note(driver.scheduler.take_changes())
    assert driver.scheduler.stats().preemptions


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
def test_plans_and_results_survive_encoding(form):
    driver = Driver(num_blocks=16, row_error=lambda row, assignment: "broken" if assignment.seed == 3 and row.start > 12 else None)
    crowd(driver, 5)
    driver.add("odd", [1, 2], 5, seed=-(2**63), stop_token_ids=[3], top_p=0.5, timeout_ms=1.5)
    while driver.scheduler.has_work:
        plan = driver.launch()
        result = driver.land()
        assert form.decode(form.encode(plan), type=StepPlan) == plan
        assert form.decode(form.encode(result), type=StepResult) == result


# Figures and audits


def test_stats_add_up():
    driver = Driver(max_batch_size=2)
    for name in "abc":
        driver.add(name, [1] * 5, 3)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 1, 1)
    assert (stats.blocks.total, stats.blocks.used, stats.blocks.free) == (64, 4, 60)
    assert stats.utilization == 4 / 64
    assert stats.internal_fragmentation == 6 / 16
    assert 0 < stats.block_table_ratio < 0.01
    driver.finish("c")
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.finished == {"length": 2, "abort": 1}
    assert (stats.prompt_tokens, stats.generated_tokens, stats.recomputed_tokens) == (10, 6, 0)  # c was never admitted
    assert (stats.blocks.used, stats.blocks.peak_used, stats.internal_fragmentation) == (0, 4, 0.0)


def free_a_slot_in_use(scheduler):
    scheduler._free_slots.append(0)


def forget_a_sequence(scheduler):
    scheduler._waiting.remove(scheduler._waiting.next())


def compute_what_was_not_scheduled(scheduler):
    scheduler.running[0].num_computed += 1


def schedule_what_never_flew(scheduler):
    scheduler.running[0].num_computed -= 1


def finish_behind_its_back(scheduler):
    scheduler._waiting.next().finish("abort")


def leak_a_block(scheduler):
    scheduler.kv.pool.take(1)


@pytest.mark.parametrize(
    "damage",
    [free_a_slot_in_use, forget_a_sequence, compute_what_was_not_scheduled, schedule_what_never_flew, finish_behind_its_back, leak_a_block],
)
def test_check_finds_books_in_disorder(damage):
    driver = Driver(max_batch_size=2)
    for name in "abc":
        driver.add(name, max_tokens=5)
    driver.step()
    driver.scheduler.check()
    damage(driver.scheduler)
    with pytest.raises(InvariantError):
        driver.scheduler.check()


def test_scheduler_measures_allocation_with_the_clock_it_is_given():
    ticks = iter(range(0, 1000, 2))
    scheduler = Scheduler(num_blocks=4, clock=lambda: float(next(ticks)))
    scheduler.add(Request("a", [1], SamplingParams(), arrival=0.0, max_length=5))
    plan = scheduler.schedule(0.0)
    scheduler.update(StepResult(step=plan.step, rows=[RowResult(slot=0, token_ids=[1])], committed_blocks=4))
    assert 2.0 <= scheduler.stats().allocation_p99_s <= 2.4


def test_default_token_is_a_function_of_seed_choice_and_position():
    outputs = []
    for _ in range(2):
        driver = Driver(next_token=None)
        sequences = [driver.add("a", [1], 20, seed=1), driver.add("b", [2, 2], 20, seed=1), driver.add("c", [1], 20, seed=2)]
        driver.run()
        outputs.append([sequence.output_token_ids for sequence in sequences])
    first, second, third = outputs[0]
    assert outputs[0] == outputs[1]
    assert first == second != third


def test_work_of_a_step_does_not_grow_with_the_queue():
    """Counted in interpreted instructions, which no busy machine can change."""
    # The waiting room is a heap, so an admission may take a few steps more.
    assert instructions_of_steps(queued=3000) <= 1.01 * instructions_of_steps(queued=30)


def instructions_of_steps(queued):
    scheduler = Scheduler(num_blocks=10_000, max_batch_size=8)
    for number in range(queued):
        scheduler.add(Request(f"{number}", [1] * 20, SamplingParams(), arrival=0.0, max_length=40, deadline=1e9))
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    def step():
        plan = scheduler.schedule(0.0)
        rows = [RowResult(slot=row.slot, token_ids=[1] * row.num_logits) for row in plan.rows]
        scheduler.update(StepResult(step=plan.step, rows=rows, committed_blocks=10_000))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(30):  # admissions, decoding, ends and further admissions
            step()
    finally:
        sys.settrace(before)
    assert count > 1000
    return count
