"""Memory as the scheduler manages it: sharing, forking, swapping, growing, compacting, and the reasons it records."""

import pytest
from core_driver import Driver, expected, token_of_history

from octavo.core.policy import SECONDS_PER_PRIORITY
from octavo.errors import InvalidValueError
from octavo.plan import Tier


def reasons(sequence, kind):
    return [event.reason for event in sequence.request.events if event.kind == kind]


def execute(driver, plan):
    """Carry out a plan without rows."""
    assert plan.rows == []
    driver.executor.submit(plan)
    driver.note(driver.scheduler.update(driver.executor.collect()))
    driver.check()


def compact(driver):
    """As the engine does it; returns the report, None where nothing could be given back."""
    plan = driver.scheduler.compact(driver.clock())
    if plan is None:
        return None
    while plan is not None:
        execute(driver, plan)
        plan = driver.scheduler.settle()
    return driver.scheduler.compaction


# Sharing


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_a_prompt_that_hits_in_full_still_computes_its_last_token(length, in_flight):
    driver = Driver(in_flight=in_flight)
    prompt = list(range(length))
    cold = driver.add("cold", prompt, 1)
    driver.run()
    warm = driver.add("warm", prompt, 1)
    driver.run()
    assert warm.output_token_ids == cold.output_token_ids == expected(warm)
    assert (cold.num_cached, warm.num_cached) == (0, (length - 1) // 4 * 4)


def test_blocks_are_shared_while_their_owner_still_runs():
    driver = Driver()
    first = driver.add("first", range(12), 20)
    driver.step()
    second = driver.add("second", range(12), 20)
    driver.step()
    driver.step()
    assert first.table.groups[0][:2] == second.table.groups[0][:2]
    assert driver.scheduler.kv.pool.count(first.table.groups[0][0]) == 2
    assert (second.num_cached, driver.scheduler.stats().cached_tokens) == (8, 8)
    driver.run()


def test_blocks_computed_twice_at_once_become_one():
    driver = Driver(prefill_chunk_size=None)
    twins = [driver.add(name, [*range(9), number], 6) for number, name in enumerate("ab")]
    driver.step()
    driver.step()
    assert twins[0].table.groups[0][:2] == twins[1].table.groups[0][:2]
    assert twins[0].table.groups[0][2] != twins[1].table.groups[0][2]
    driver.add("c", [40] * 30, 2)
    driver.run()
    assert [twin.output_token_ids for twin in twins] == [expected(twin) for twin in twins]


def test_a_preempted_request_resumes_on_its_own_cached_blocks():
    """The hit is known before the tokens are counted, so that it never runs past its table."""
    driver = Driver(num_blocks=26, prefill_chunk_size=16)
    crowd = [driver.add(f"{number}", [*range(32), number], 40) for number in range(3)]
    driver.run()
    assert driver.scheduler.stats().preemptions > 0
    resumed = next(sequence for sequence in crowd if sequence.num_preemptions)
    assert any("blocks shared" in reason for reason in reasons(resumed, "resumed"))
    assert all(sequence.output_token_ids == expected(sequence) for sequence in crowd)
    assert resumed.num_cached == 0 or resumed.num_cached <= 32


@pytest.mark.parametrize(("one", "other"), [({"cache_salt": "a"}, {"cache_salt": "b"}), ({"cache_salt": "a"}, {})])
def test_salts_do_not_meet(one, other):
    driver = Driver()
    sequences = [driver.add(f"{number}", range(13), 2, **params) for number, params in enumerate((one, other, one, other))]
    for _ in sequences:
        driver.step()
    driver.run()
    assert [sequence.num_cached for sequence in sequences[:2]] == [0, 0]
    warm = [driver.add(f"again {number}", range(13), 2, **params) for number, params in enumerate((one, other))]
    driver.run()
    assert [sequence.num_cached for sequence in warm] == [12, 12]


def test_forgotten_prefixes_are_computed_again_also_those_of_running_sequences():
    driver = Driver()
    running = driver.add("running", range(13), 20)
    driver.step()
    driver.step()
    assert driver.scheduler.reset_prefix_cache() == 0
    driver.check()
    late = driver.add("late", range(13), 2)
    driver.run()
    assert (late.num_cached, running.output_token_ids) == (0, expected(running))
    assert driver.scheduler.reset_prefix_cache() == driver.scheduler.stats().blocks.cached + 3
    assert driver.scheduler.stats().blocks.cached == 0


def test_content_that_one_more_gibibyte_would_have_kept_is_counted():
    driver = Driver(num_blocks=8)
    driver.add("a", range(13), 1)
    driver.run()
    driver.add("b", range(20, 49), 1)
    driver.run()
    driver.add("a again", range(13), 1)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.evicted_blocks > 0
    assert stats.missed_tokens + stats.cached_tokens == 12
    assert stats.missed_tokens >= 4


def test_a_request_that_fails_is_not_shared():
    failing = set()
    driver = Driver(row_error=lambda row, assignment: "NaN" if assignment.seed in failing else None)
    bad = driver.add("bad", range(13), 8, seed=7)
    driver.step()
    failing.add(7)
    driver.run()
    assert bad.finish_reason == "error"
    assert driver.scheduler.stats().blocks.cached == 0
    good = driver.add("good", range(13), 2)
    driver.run()
    assert good.num_cached == 0


# Forking


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 11])
def test_answers_share_the_prompt_and_copy_its_tail_at_the_first_write(length, in_flight, prefix_caching):
    driver = Driver(in_flight=in_flight, prefix_caching=prefix_caching)
    first = driver.add("n", range(length), 6, n=3, seed=5)
    plans = driver.run()
    answers = first.request.sequences
    assert [answer.output_token_ids for answer in answers] == [expected(answer) for answer in answers]
    assert len({tuple(answer.output_token_ids) for answer in answers}) == 3
    copies = [copy for plan in plans for copy in plan.copies]
    assert len(copies) == (2 if (length - 1) % 4 else 0)
    computed = sum(row.count for plan in plans for row in plan.rows)
    assert computed == length + 5 + 2 * 6


def test_answers_do_not_wait_for_a_first_one_that_has_gone():
    driver = Driver(row_error=lambda row, assignment: "NaN" if assignment.choice == 0 else None)
    first = driver.add("n", range(9), 4, n=3)
    driver.run()
    assert [answer.finish_reason for answer in first.request.sequences] == ["error", "length", "length"]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_request_takes_all_its_answers_along(steps):
    driver = Driver(prefill_chunk_size=4)
    first = driver.add("n", range(9), 40, n=3)
    for _ in range(steps):
        driver.step()
    assert driver.finish("n")
    driver.run()
    assert [answer.finish_reason for answer in first.request.sequences] == ["abort"] * 3


# Preemption


def test_what_is_cheaper_to_copy_is_swapped_and_comes_back_before_new_ones():
    driver = Driver(num_blocks=20, swap_blocks=40)
    crowd = [driver.add(f"{number}", [number] * 14, 30) for number in range(4)]
    order = []
    while driver.scheduler.has_work:
        driver.step()
        waiting = [s for s in crowd if s.swapped]
        for sequence in driver.scheduler.running:
            if sequence not in order:
                order.append(sequence)
                assert not waiting or all(s.rank < sequence.rank for s in waiting) is False
    stats = driver.scheduler.stats()
    assert stats.swap_outs == stats.preemptions > 0
    assert stats.recomputed_tokens == 0
    assert all(sequence.output_token_ids == expected(sequence) for sequence in crowd)
    swapped = next(sequence for sequence in crowd if sequence.num_preemptions)
    assert "swapped out: to compute" in reasons(swapped, "preempted")[0]
    assert "copied back" in reasons(swapped, "resumed")[0]


def test_swapped_sequences_resume_before_new_ones_are_admitted():
    driver = Driver(num_blocks=16, swap_blocks=64, max_batch_size=4)
    old = [driver.add(f"{number}", [number] * 14, 30, n=2) for number in range(2)]
    late = []
    for number in range(200):
        driver.step()
        if number < 100:
            late.append(driver.add(f"late {number}", [number % 7] * 5, 3))
        admitted = [sequence for sequence in late if reasons(sequence, "admitted")]
        swapped = [answer for one in old for answer in one.request.sequences if answer.swapped]
        if swapped:
            newest = max(event.time for sequence in admitted for event in sequence.request.events) if admitted else 0
            assert not [s for s in driver.scheduler.running if s in late and s.num_computed == 0], newest
    driver.run()
    assert driver.scheduler.stats().swap_outs > 0
    assert all(sequence.output_token_ids == expected(sequence) for sequence in late)


def test_a_full_swap_space_falls_back_to_recomputation():
    driver = Driver(num_blocks=20, swap_blocks=4)
    crowd = [driver.add(f"{number}", [number] * 14, 30, n=2) for number in range(4)]
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions > stats.swap_outs
    assert all(answer.output_token_ids == expected(answer) for one in crowd for answer in one.request.sequences)
    found = [reason for one in crowd for reason in reasons(one, "preempted")]
    assert any("of 4 swap blocks are free" in reason for reason in found)


def test_what_is_cheaper_to_compute_is_recomputed_although_there_is_swap_space():
    driver = Driver(num_blocks=20, swap_blocks=40)
    driver.scheduler._copy_rate.add(1.0, 1.0)  # a byte a second
    crowd = [driver.add(f"{number}", [number] * 14, 30) for number in range(4)]
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.swap_outs, stats.preemptions > 0, stats.recomputed_tokens > 0) == (0, True, True)
    assert all(sequence.output_token_ids == expected(sequence) for sequence in crowd)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_swapped_sequences_that_are_aborted_give_their_blocks_back(tier):
    driver = Driver(num_blocks=20, swap_blocks=40)
    crowd = [driver.add(f"{number}", [number] * 14, 30) for number in range(4)]
    while not any(sequence.swapped for sequence in crowd):
        driver.step()
    for sequence in crowd:
        if bool(sequence.swapped) == (tier is Tier.HOST):
            driver.finish(sequence.request.request_id)
    assert tier is Tier.DEVICE or driver.scheduler.kv.swap_free == 40
    driver.run()


def test_recomputation_keeps_the_tokens_generated_and_the_prompt_as_it_was():
    driver = Driver(num_blocks=24, prefix_caching=False)
    pair = [driver.add(name, [number] * 8, 64) for number, name in enumerate("ab")]
    driver.run()
    assert driver.scheduler.stats().preemptions > 0
    for sequence in pair:
        assert (len(sequence.request.prompt_token_ids), sequence.output_token_ids) == (8, expected(sequence))


def test_streams_cancelled_in_a_full_pool_leave_nothing_used():
    driver = Driver(num_blocks=20, swap_blocks=6, in_flight=2)
    crowd = [driver.add(f"{number}", [number % 3] * 14, 30, n=1 + number % 2) for number in range(8)]
    for number in range(8):
        driver.launch()
        driver.launch()
        if number % 2:
            driver.finish(f"{number}")
        while driver.plans:
            driver.land()
    driver.run()
    assert driver.scheduler.stats().blocks.used == 0
    ended = [answer for one in crowd[::2] for answer in one.request.sequences]
    assert all(answer.output_token_ids == expected(answer) for answer in ended)


# Prompt logprobs


@pytest.mark.parametrize("prefill_chunk_size", [1, 3, 16, None])
@pytest.mark.parametrize("num_blocks", [18, 64])
def test_every_prompt_token_is_scored_once_whatever_is_cached(num_blocks, prefill_chunk_size):
    driver = Driver(num_blocks=num_blocks, prefill_chunk_size=prefill_chunk_size)
    prompt = list(range(17))
    driver.add("cold", prompt, 9)
    scoring = [driver.add(f"{number}", prompt, 50, prompt_logprobs=1) for number in range(4)]
    driver.step()
    driver.run()
    for sequence in scoring:
        assert [tokens[0].token_id for tokens in driver.scored[sequence]] == prompt[1:]
        assert sequence.output_token_ids == expected(sequence)
    assert (num_blocks == 64) == (driver.scheduler.stats().preemptions == 0)


def test_a_prompt_preempted_half_scored_is_scored_to_its_end():
    driver = Driver(num_blocks=20, prefill_chunk_size=3)
    driver.add("long", [7] * 30, 48)
    scoring = driver.add("scoring", range(40), 5, prompt_logprobs=0)
    for _ in range(12):
        driver.step()
    driver.run()
    assert [tokens[0].token_id for tokens in driver.scored[scoring]] == list(range(1, 40))
    assert scoring.output_token_ids == expected(scoring)


# Policy


def test_priority_decides_who_is_admitted_and_who_gives_way():
    driver = Driver(num_blocks=20, policy="priority", max_batch_size=2)
    low = [driver.add(f"low {number}", [number] * 14, 30, priority=3) for number in range(3)]
    driver.step()
    high = driver.add("high", [40] * 14, 30, priority=0)
    while driver.scheduler.has_work:
        driver.clock.advance(0.001)
        driver.step()
    assert high.num_preemptions == 0
    assert admitted(low[1]) < admitted(high) < admitted(low[2])
    assert all(sequence.output_token_ids == expected(sequence) for sequence in [*low, high])


def test_age_wins_over_priority_in_the_end():
    driver = Driver(policy="priority", max_batch_size=1)
    driver.add("running", [1] * 5, 4)
    driver.step()
    old = driver.add("old", [2] * 5, 4, priority=1)
    late = []
    for number in range(20):
        driver.clock.advance(SECONDS_PER_PRIORITY / 8)
        late.append(driver.add(f"{number}", [3] * 5, 4, priority=0))
        driver.step()
    driver.run()
    before = [sequence for sequence in late if admitted(sequence) < admitted(old)]
    assert 0 < len(before) < 10


def admitted(sequence):
    return next(event.time for event in sequence.request.events if event.kind == "admitted")


# Growth


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("commits_per_step", [None, 1, 3])
@pytest.mark.parametrize("committed_blocks", [0, 2, 10])
def test_the_pool_grows_and_nobody_gives_way_meanwhile(committed_blocks, commits_per_step, in_flight):
    driver = Driver(num_blocks=100, committed_blocks=committed_blocks, commits_per_step=commits_per_step, in_flight=in_flight)
    crowd = [driver.add(f"{number}", [number] * 14, 30) for number in range(6)]
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions == 0
    assert committed_blocks < stats.blocks.total <= stats.blocks.ceiling == 100
    assert stats.blocks.peak_used <= stats.blocks.total
    assert all(sequence.output_token_ids == expected(sequence) for sequence in crowd)
    assert "the pool grows from" in "".join(reason for one in crowd for reason in reasons(one, "waits"))


def test_the_pool_grows_before_blocks_run_out():
    driver = Driver(num_blocks=400, committed_blocks=40, commits_per_step=2, max_batch_size=2)
    pair = [driver.add(name, [number] * 8, 300) for number, name in enumerate("ab")]
    driver.run()
    assert not any(reasons(sequence, "waits") for sequence in pair)
    assert driver.scheduler.stats().blocks.total > 150


def test_where_memory_is_short_the_pool_stays_and_work_goes_on():
    driver = Driver(num_blocks=100, committed_blocks=8, commit_limit=20)
    crowd = [driver.add(f"{number}", [number] * 14, 30) for number in range(4)]
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.blocks.total, stats.blocks.ceiling) == (20, 100)
    assert "memory is there for 20" in driver.scheduler.growth_refused
    assert stats.preemptions > 0
    assert all(sequence.output_token_ids == expected(sequence) for sequence in crowd)
    with pytest.raises(InvalidValueError, match="may reach 490 tokens; the pool holds 400"):
        driver.add("large", [1] * 50, 440)
    assert driver.scheduler.stats().refused == 1
    driver.executor.commit_limit = None
    driver.clock.advance(60.0)  # memory is there again, and after a while it is asked for
    large = driver.add("large", [1] * 50, 200)
    driver.run()
    assert (large.finish_reason, driver.scheduler.stats().blocks.total > 60) == ("length", True)


def test_growth_that_raises_ends_nobody_once_and_whom_it_was_for_in_the_end():
    raising = [1]
    driver = Driver(num_blocks=20, committed_blocks=0, step_error=lambda plan: RuntimeError("no thread") if raising.pop() else None)
    raising += [0] * 100 + [1, 1]
    first = driver.add("first", [1] * 5, 5)
    driver.run()
    assert first.finish_reason == "length"
    raising[:] = [1] * 1000
    second = driver.add("second", [2] * 60, 5)
    driver.run()
    assert (second.finish_reason, "no thread" in second.error) == ("error", True)


def test_whoever_cannot_fit_a_pool_that_could_not_grow_ends_alone():
    driver = Driver(num_blocks=100, committed_blocks=8, commit_limit=10)
    large, small = driver.add("large", [1] * 20, 100), driver.add("small", [2] * 5, 5)
    prompt = driver.add("prompt", [3] * 60, 1)
    driver.run()
    assert [one.finish_reason for one in (large, small, prompt)] == ["error", "length", "error"]
    assert "blocks are wanted and" in large.error
    assert "memory is there for 10" in prompt.error
    assert small.output_token_ids == expected(small)


# Compaction


def test_live_blocks_move_down_and_the_tail_is_given_back():
    driver = Driver(num_blocks=64, committed_blocks=4, prefix_caching=False)
    first = driver.add("first", [1] * 60, 2)
    kept = driver.add("kept", [2] * 14, 40)
    while not first.finished:
        driver.step()
    before = driver.scheduler.stats().blocks
    report = compact(driver)
    after = driver.scheduler.stats().blocks
    assert (report.blocks_before, report.blocks_after) == (before.total, after.total)
    assert after.total == max(4, after.used) < before.total
    assert 0 < report.blocks_moved <= after.used
    assert report.bytes_returned == (before.total - after.total) * driver.scheduler.kv.block_bytes
    assert driver.executor.committed == after.total
    driver.run()
    assert kept.output_token_ids == expected(kept)


def test_nothing_moves_where_nothing_is_given_back():
    driver = Driver(num_blocks=8)
    assert compact(driver) is None
    driver.add("a", range(13), 2)
    driver.launch()
    assert driver.scheduler.compact(0.0) is None  # a plan is in flight
    driver.land()
    driver.run()


def test_compaction_keeps_what_is_shared_and_cached():
    driver = Driver(num_blocks=64, committed_blocks=1)
    driver.add("gone", [9] * 100, 1, cache_salt="x")
    driver.run()
    first = driver.add("n", range(14), 12, n=3)
    driver.add("cached", range(20, 33), 1)
    for _ in range(4):
        driver.step()
    kv = driver.scheduler.kv
    kv.pool.forget(kv.index.node(next(iter(kv.pool._cached))))
    driver.check()
    assert compact(driver) is not None
    answers = first.request.sequences
    warm = driver.add("warm", range(20, 33), 1)
    driver.run()
    assert warm.num_cached == 12
    assert [answer.output_token_ids for answer in answers] == [expected(answer) for answer in answers]


def test_at_rest_only_what_was_not_needed_lately_is_given_back():
    driver = Driver(num_blocks=64, committed_blocks=4, prefix_caching=False)
    driver.add("large", [1] * 120, 4)
    driver.run()
    assert driver.scheduler.rest(0.0) is None  # all of it was needed just now
    driver.add("small", [1] * 8, 4)
    driver.run()
    plan = driver.scheduler.rest(0.0)
    execute(driver, plan)
    execute(driver, driver.scheduler.settle())
    assert driver.scheduler.stats().blocks.total == 4
    assert driver.scheduler.rest(0.0) is None
    driver.add("large again", [1] * 120, 4)
    driver.run()


# Reasons


def test_every_wait_and_every_end_of_it_has_its_reason():
    driver = Driver(num_blocks=12, max_batch_size=2, prefill_chunk_size=8)
    a, b, c = (driver.add(name, [number] * 10, 16) for number, name in enumerate("abc"))
    driver.run()
    assert reasons(a, "queued") == ["0 wait before it, 0 run"]
    assert reasons(c, "queued") == ["2 wait before it, 0 run"]
    assert any("prefill tokens are taken" in reason for reason in reasons(b, "waits"))
    assert any("the batch is full: 2 run" in reason or "blocks are wanted" in reason for reason in reasons(c, "waits"))
    assert all(reasons(sequence, "admitted") for sequence in (a, b, c))
    preempted = [sequence for sequence in (a, b, c) if sequence.num_preemptions]
    for sequence in preempted:
        assert len(reasons(sequence, "preempted")) == len(reasons(sequence, "resumed")) == sequence.num_preemptions
        assert "there is no swap space" in reasons(sequence, "preempted")[0]
    kinds = [event.kind for event in c.request.events]
    assert len(kinds) < 20  # a cause is noted once, not at every step


def test_a_token_depends_on_all_before_it():
    """Without that the comparisons above would show little."""
    driver = Driver()
    one, other = driver.add("one", [1, 2, 3], 4), driver.add("other", [4, 2, 3], 4)
    driver.run()
    assert one.output_token_ids != other.output_token_ids
    assert one.output_token_ids[0] == token_of_history(one.assignment(), [1, 2, 3])
