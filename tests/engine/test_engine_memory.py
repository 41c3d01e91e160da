"""What a caller sees of shared blocks, several answers, preemption, compaction and growth, over a simulated executor."""

import itertools
import logging
import random
import re

import msgspec
import pytest
from engine_driver import TEXT, answer, check_idle, make_engine, run, speak

from octavo.advice import advise
from octavo.core.stats import Record
from octavo.errors import InvalidValueError
from octavo.executor.simulated import SimulatedClock, hashed_token
from octavo.outputs import Logprob
from octavo.sampling_params import SamplingParams


def drawn(seed, choice, count):
    return [hashed_token(seed, choice, place, 258) for place in range(count)]


def ask(engine, prompt, **params):
    """One request alone -> its output."""
    request_id = engine.add(prompt, SamplingParams(**{"max_tokens": 4, **params}))
    return run(engine)[0][request_id]


def prompt_of(length, first=0):
    return [(first + 7 * place) % 251 for place in range(length)]


# Several answers


@pytest.mark.parametrize("length", [1, 2, 4, 5, 17])
@pytest.mark.parametrize("count", [2, 3])
def test_each_answer_is_what_its_choice_draws(length, count):
    output = ask(make_engine(eos=()), prompt_of(length), n=count, seed=5, max_tokens=9)
    assert [one.index for one in output.outputs] == list(range(count))
    assert [one.token_ids for one in output.outputs] == [drawn(5, choice, 9) for choice in range(count)]
    assert len({tuple(one.token_ids) for one in output.outputs}) == count
    assert {one.finish_reason for one in output.outputs} == {"length"}


def test_answers_share_the_blocks_of_their_prompt():
    engine = make_engine(eos=())
    engine.add(prompt_of(33), SamplingParams(n=4, max_tokens=8))
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.stats().blocks.used)
    assert peak == 8 + 4 * 2  # the prompt's full blocks once, and each answer's own for nine tokens
    assert engine.stats().prompt_tokens == 33


def test_more_answers_than_a_batch_holds_take_turns():
    output = ask(make_engine(eos=(), max_batch_size=3), prompt_of(9), n=20, seed=2, max_tokens=5)
    assert [one.token_ids for one in output.outputs] == [drawn(2, choice, 5) for choice in range(20)]


def test_deltas_are_each_answers_own_and_grow_until_they_are_read():
    ends = {0: "Grüße 🙂", 1: "aus", 2: "東京, ça va?"}

    def spoken(assignment, tokens):
        return [*ends[assignment.choice].encode(), 256][len(tokens) - assignment.prompt_length]

    for patience in (1, 3):
        engine, texts, seen = make_engine(spoken), ["", "", ""], itertools.count(1)
        request_id = engine.add("Hi", SamplingParams(n=3, max_tokens=50))
        while engine.has_work:
            for output in engine.step():
                if next(seen) % patience and not output.finished:
                    continue
                assert output.read().delta == output.outputs[0].delta
                texts = [text + one.delta for text, one in zip(texts, output.outputs, strict=True)]
                assert texts == [one.text for one in output.outputs]
                output.read()
                assert [one.delta for one in output.outputs] == ["", "", ""]
        assert output.request_id == request_id
        assert texts == list(ends.values())
        assert [one.finish_reason for one in output.outputs] == ["stop"] * 3


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort_ends_every_answer(steps):
    engine = make_engine(speak(), prefill_chunk_size=4)
    engine.add(prompt_of(13), SamplingParams(n=3, max_tokens=50), "a")
    for _ in range(steps):
        engine.step()
    assert engine.abort("a")
    output = run(engine)[0]["a"]
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 3
    assert answer(engine).text == TEXT


def test_deadline_ends_every_answer_that_goes_on():
    output = ask(make_engine(speak(), seconds_per_step=1.0), "Hi", n=2, max_tokens=50, timeout_ms=5500)
    assert [one.finish_reason for one in output.outputs] == ["timeout"] * 2


def test_answer_that_fails_leaves_the_others():
    engine = make_engine(speak(), row_error=lambda row, asked: "a NaN" if asked.choice == 1 and row.start > 6 else None)
    output = ask(engine, "Hi", n=3, max_tokens=100)
    assert [one.finish_reason for one in output.outputs] == ["stop", "error", "stop"]
    assert [one.error for one in output.outputs] == [None, "a NaN", None]
    assert [one.text for one in output.outputs][::2] == [TEXT, TEXT]


# Shared prefixes


def test_what_an_earlier_request_computed_is_shared():
    engine = make_engine(eos=(), block_size=16)
    first, second = (ask(engine, prompt_of(33), seed=4) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert engine.stats().cached_tokens == 32


def test_whole_hit_leaves_the_last_token_to_compute():
    engine = make_engine(eos=(), block_size=16)
    first, second = (ask(engine, prompt_of(32), seed=4) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_cached_tokens_are_unknown_until_a_request_is_admitted():
    engine = make_engine(eos=(), max_batch_size=1)
    engine.add("Hi", SamplingParams(max_tokens=20), "first")
    engine.add("Hi", SamplingParams(max_tokens=20), "second")
    engine.step()
    engine.abort("second")
    assert run(engine)[0]["second"].num_cached_tokens is None


def test_answer_that_was_given_is_a_prefix_of_the_next_turn():
    engine = make_engine(eos=(), block_size=4)
    first = ask(engine, prompt_of(9), max_tokens=8)
    turn = prompt_of(9) + first.outputs[0].token_ids + [1, 2]
    assert ask(engine, turn).num_cached_tokens == 16


def test_several_answers_come_out_the_same_from_a_shared_prefix():
    engine = make_engine(eos=(), block_size=16)
    first, second = (ask(engine, prompt_of(33), seed=4, n=3) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]


def test_salt_keeps_prefixes_apart():
    engine = make_engine(eos=(), block_size=16)
    salts = ["a", "a", None, None, "b", "a"]
    assert [ask(engine, prompt_of(33), cache_salt=salt).num_cached_tokens for salt in salts] == [0, 32, 0, 32, 0, 32]


def test_caching_can_be_switched_off():
    engine = make_engine(eos=(), block_size=16, prefix_caching=False)
    assert [ask(engine, prompt_of(33)).num_cached_tokens for _ in range(2)] == [0, 0]
    blocks = engine.stats().blocks
    assert (blocks.cached, blocks.free) == (0, blocks.total)


def test_prefixes_can_be_forgotten():
    engine = make_engine(eos=(), block_size=16)
    ask(engine, prompt_of(33))
    assert engine.scheduler.reset_prefix_cache() == 2
    blocks = engine.stats().blocks
    assert (blocks.cached, blocks.free) == (0, blocks.total)
    assert ask(engine, prompt_of(33)).num_cached_tokens == 0
    assert ask(engine, prompt_of(33)).num_cached_tokens == 32


def test_prefixes_may_be_forgotten_while_requests_run():
    engine = make_engine(eos=(), block_size=4)
    engine.add(prompt_of(13), SamplingParams(max_tokens=30, seed=1, n=2), "a")
    for _ in range(6):
        engine.step()
        engine.scheduler.reset_prefix_cache()
    assert [one.token_ids for one in run(engine)[0]["a"].outputs] == [drawn(1, choice, 30) for choice in range(2)]
    assert ask(engine, prompt_of(13)).num_cached_tokens == 0


# Prompt logprobs


def check_scores(output):
    """A simulated worker says a token's place, negative, for its logprob."""
    prompt, scores = output.prompt_token_ids, output.prompt_logprobs
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for place, (token_id, one) in enumerate(zip(prompt[1:], scores[1:], strict=True), 1):
        assert one == {token_id: Logprob(-float(place), 1, bytes([token_id]).decode("utf-8", "replace"))}


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33])
@pytest.mark.parametrize("values", [{}, {"prefill_chunk_size": 5}, {"prefix_caching": False}], ids=str)
def test_prompt_logprobs_are_there_for_every_token_cached_or_not(length, values):
    engine = make_engine(eos=(), block_size=16, **values)
    for _ in range(2):
        check_scores(ask(engine, prompt_of(length), prompt_logprobs=0))
    check_scores(ask(engine, prompt_of(length), prompt_logprobs=0, n=3))
    assert ask(engine, prompt_of(length)).prompt_logprobs is None


def test_answer_of_one_token_has_both_its_token_and_the_prompts_logprobs():
    for count in (1, 2):
        output = ask(make_engine(eos=()), prompt_of(9), prompt_logprobs=0, max_tokens=1, n=count, seed=3)
        check_scores(output)
        assert [one.token_ids for one in output.outputs] == [drawn(3, choice, 1) for choice in range(count)]


def test_prompt_logprobs_survive_preemption():
    source, engine = random.Random(5), make_engine(eos=(), num_blocks=14, prefill_chunk_size=3, max_batch_size=6)
    for number in range(12):
        params = SamplingParams(max_tokens=source.randint(1, 25), prompt_logprobs=0, seed=number)
        engine.add([source.randrange(3) for _ in range(source.randint(1, 22))], params)
    last, _ = run(engine)
    assert engine.stats().preemptions > 3
    for output in last.values():
        check_scores(output)


def test_special_tokens_of_the_prompt_have_their_names():
    output = ask(make_engine(), [1, 256, 257], prompt_logprobs=0)
    assert [one.decoded_token for scores in output.prompt_logprobs[1:] for one in scores.values()] == ["<end>", "ok"]


def test_more_logprobs_than_tokens_are_refused_with_both_numbers():
    engine = make_engine()
    engine.capacity = engine.executor.capacity = msgspec.structs.replace(engine.capacity, vocab_size=5)
    with pytest.raises(InvalidValueError, match="prompt_logprobs: 6; the vocabulary has 5 tokens"):
        engine.add([1], SamplingParams(prompt_logprobs=6))
    assert not engine.has_work


# Why


def kinds(output):
    return [event.kind for event in output.metrics.events]


def test_events_tell_what_was_done_with_a_request_and_why():
    engine = make_engine(eos=(), num_blocks=8, max_batch_size=3, seconds_per_step=1.0)
    ids = [engine.add(prompt_of(9, number), SamplingParams(max_tokens=14)) for number in range(4)]
    last, _ = run(engine)
    assert kinds(last[ids[0]]) == ["queued", "admitted"]
    seen = {kind for output in last.values() for kind in kinds(output)}
    assert seen == {"queued", "waits", "admitted", "preempted", "resumed"}
    assert sum(kinds(output).count("preempted") for output in last.values()) == engine.stats().preemptions > 0
    for output in last.values():
        events = output.metrics.events
        assert kinds(output)[0] == "queued"
        assert kinds(output).count("preempted") == kinds(output).count("resumed") == output.metrics.preemptions
        assert [event.time for event in events] == sorted(event.time for event in events)
        assert output.metrics.arrival <= events[0].time
        assert events[-1].time <= output.metrics.finished
        assert all(re.search(r"\d", event.reason) for event in events)


def test_the_wait_is_told_by_its_cause():
    engine = make_engine(eos=(), max_batch_size=1)
    engine.add(prompt_of(9), SamplingParams(max_tokens=5), "first")
    engine.add(prompt_of(9), SamplingParams(max_tokens=5), "second")
    events = run(engine)[0]["second"].metrics.events
    assert [(event.kind, event.reason) for event in events[:2]] == [
        ("queued", "1 wait before it, 0 run"),
        ("waits", "the batch is full: 1 run"),
    ]
    engine = make_engine(eos=(), prefill_chunk_size=6)
    engine.add(prompt_of(9), SamplingParams(max_tokens=5), "first")
    engine.add(prompt_of(9), SamplingParams(max_tokens=5), "second")
    assert "the step's 6 prefill tokens are taken" in [event.reason for event in run(engine)[0]["second"].metrics.events]
    engine = make_engine(eos=(), num_blocks=6)
    engine.add(prompt_of(9), SamplingParams(max_tokens=5), "first")
    engine.add(prompt_of(13, 1), SamplingParams(max_tokens=5), "second")
    (reason,) = [event.reason for event in run(engine)[0]["second"].metrics.events if event.kind == "waits"]
    assert re.fullmatch(r"\d+ blocks are wanted and \d+ of 6 available, \d+ of them spoken for", reason)


def test_events_name_the_answer_they_are_about():
    output = ask(make_engine(eos=()), prompt_of(9), n=3)
    assert [(event.kind, event.choice) for event in output.metrics.events] == [
        ("queued", 0),
        ("admitted", 0),
        ("admitted", 1),
        ("admitted", 2),
    ]
    assert output.metrics.events[2].reason == "forked from choice 0 after 8 tokens"


def test_what_was_swapped_out_says_so_and_comes_back():
    # Copies are so cheap here, and computing so dear, that every victim is swapped.
    engine = make_engine(eos=(), num_blocks=10, swap_blocks=40, max_batch_size=4, seconds_per_token=1.0)
    ids = [engine.add(prompt_of(9, number), SamplingParams(max_tokens=20, seed=number)) for number in range(5)]
    last, _ = run(engine)
    stats = engine.stats()
    assert stats.swap_outs == stats.preemptions > 0
    for number, request_id in enumerate(ids):
        assert last[request_id].outputs[0].token_ids == drawn(number, 0, 20)
    events = [event for output in last.values() for event in output.metrics.events]
    assert all("swapped out: to compute" in event.reason for event in events if event.kind == "preempted")
    assert any(re.search(r"\d+ of \d+ swapped blocks copied back", event.reason) for event in events if event.kind == "resumed")


# Refusals


def test_refused_request_leaves_its_id_free():
    engine = make_engine(speak(), num_blocks=5, longest=1000)
    with pytest.raises(InvalidValueError, match="the request may reach 103 tokens; the pool holds 20"):
        engine.add([1, 2, 3], SamplingParams(max_tokens=100), "a")
    with pytest.raises(InvalidValueError, match="20"):
        engine.add([1] * 30, SamplingParams(max_tokens=1), "a")
    assert not engine.has_work
    assert engine.stats().refused == 2
    engine.add("Hi", SamplingParams(max_tokens=3), "a")
    assert run(engine)[0]["a"].outputs[0].text == "Gr\ufffd"


# Who goes first


def ends_in_order(engine, requests):
    for name, params in requests:
        engine.add(prompt_of(5), SamplingParams(max_tokens=3, **params), name)
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finished]
    return order


REQUESTS = [("usual", {}), ("later", {"priority": 5}), ("first", {"priority": -5}), ("second", {"priority": -1}), ("third", {})]


def test_lower_priorities_go_first_and_arrivals_in_order_among_equals():
    order = ends_in_order(make_engine(policy="priority", max_batch_size=1), REQUESTS)
    assert order == ["first", "second", "usual", "third", "later"]


def test_priorities_count_for_nothing_where_arrival_decides():
    order = ends_in_order(make_engine(max_batch_size=1), REQUESTS)
    assert order == [name for name, _ in REQUESTS]


def test_age_wins_over_priority_in_the_end():
    clock = SimulatedClock()
    engine = make_engine(policy="priority", max_batch_size=1, seconds_per_step=1.0, clock=clock)
    engine.add(prompt_of(5), SamplingParams(max_tokens=1, priority=3), "patient")
    waited = 0
    while True:  # a request of a better priority always waits too
        engine.add(prompt_of(5), SamplingParams(max_tokens=1))
        waited += 1
        if any(output.request_id == "patient" for output in engine.step()):
            break
    assert 25 <= waited <= 35


def test_who_came_last_in_the_order_gives_way():
    engine = make_engine(policy="priority", eos=(), num_blocks=10, max_batch_size=3)
    for name, priority in (("low", 9), ("high", 0), ("middle", 5)):
        engine.add(prompt_of(9, priority), SamplingParams(max_tokens=20, priority=priority, seed=priority), name)
    last, _ = run(engine)
    preempted = {name: output.metrics.preemptions for name, output in last.items()}
    assert preempted["high"] == 0
    assert preempted["low"] > 0
    assert {name: output.outputs[0].token_ids for name, output in last.items()} == {
        "low": drawn(9, 0, 20),
        "high": drawn(0, 0, 20),
        "middle": drawn(5, 0, 20),
    }


# The pool


def test_compaction_amid_a_request_changes_nothing_it_says():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4, prefix_caching=False)
    for number in range(6):
        engine.add(prompt_of(9, number), SamplingParams(max_tokens=5 if number < 5 else 40, seed=number, n=1 + number % 2), str(number))
    last, reports = {}, []
    for number in range(400):
        if not engine.has_work:
            break
        last |= {output.request_id: output for output in engine.step()}
        if number % 3 == 2 and (report := engine.compact()) is not None:
            reports.append(report)
            assert engine.stats().blocks.total == report.blocks_after == engine.executor.committed
            assert engine.stats().blocks.free <= engine.scheduler._lacking or report.blocks_after == 4
    for number in range(6):
        answers = [one.token_ids for one in last[str(number)].outputs]
        assert answers == [drawn(number, choice, 5 if number < 5 else 40) for choice in range(1 + number % 2)]
    assert any(report.blocks_moved for report in reports)
    for report in reports:
        assert report.blocks_before > report.blocks_after >= 4
        assert report.bytes_moved == report.blocks_moved * engine.capacity.block_bytes
        assert report.bytes_returned == (report.blocks_before - report.blocks_after) * engine.capacity.block_bytes
        assert report.seconds > 0
    check_idle(engine)


def test_compaction_after_every_step_takes_no_block_that_somebody_waits_for():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4)
    engine.add(prompt_of(9), SamplingParams(max_tokens=40, seed=1), "a")
    for _ in range(200):
        if not engine.has_work:
            break
        engine.step()
        engine.compact()
    assert not engine.has_work


def test_compaction_of_a_pool_that_nobody_uses_leaves_what_was_committed_at_start():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=8, prefix_caching=False)
    assert engine.compact() is None
    ask(engine, prompt_of(60), max_tokens=40)
    grown = engine.stats().blocks.total
    report = engine.compact()
    assert (report.blocks_before, report.blocks_after, report.blocks_moved) == (grown, 8, 0)
    assert engine.executor.committed == 8
    assert engine.compact() is None


def test_compaction_keeps_cached_prefixes_until_they_are_forgotten():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=2, block_size=4)
    ask(engine, prompt_of(41), max_tokens=4)
    assert engine.compact().blocks_after == 11
    assert ask(engine, prompt_of(41)).num_cached_tokens == 40
    engine.scheduler.reset_prefix_cache()
    assert engine.compact().blocks_after == 2
    assert ask(engine, prompt_of(41)).num_cached_tokens == 0


def test_cached_prefixes_are_kept_while_the_pool_may_grow():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=2)
    ask(engine, prompt_of(41))
    ask(engine, prompt_of(90, 3))
    assert engine.stats().evicted_blocks == 0
    assert ask(engine, prompt_of(41)).num_cached_tokens == 40


def test_memory_is_given_back_at_rest_where_it_was_not_needed_since_the_last():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4, prefix_caching=False)
    ask(engine, prompt_of(100), max_tokens=40)
    grown = engine.stats().blocks.total
    assert grown > 30
    ask(engine, prompt_of(100), max_tokens=40)
    engine.rest()
    assert engine.stats().blocks.total >= 35  # that was just needed
    assert engine.rest().blocks_after == 4
    assert engine.rest() is None
    assert engine.stats().blocks.total == 4
    assert ask(engine, prompt_of(100), max_tokens=40, seed=3).outputs[0].token_ids == drawn(3, 0, 40)


@pytest.mark.parametrize("pace", [None, 1, 3])
def test_pool_grows_with_its_work(pace):
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=2, commits_per_step=pace)
    ids = [engine.add(prompt_of(9, number), SamplingParams(max_tokens=20, seed=number)) for number in range(6)]
    last, _ = run(engine)
    for number, request_id in enumerate(ids):
        assert last[request_id].outputs[0].token_ids == drawn(number, 0, 20)
    blocks = engine.stats().blocks
    assert 2 < blocks.total <= blocks.ceiling == 64


def test_blocks_asked_for_at_start_come_beside_the_work_and_stay():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4, prealloc_blocks=30, commits_per_step=2)
    sizes = [engine.stats().blocks.total]
    request_id = engine.add(prompt_of(5), SamplingParams(max_tokens=20, seed=1))
    while engine.has_work:
        for output in engine.step():
            last = output.read()
        sizes.append(engine.stats().blocks.total)
    assert last.request_id == request_id
    assert last.outputs[0].token_ids == drawn(1, 0, 20)
    assert sizes == [min(4 + 2 * step, 30) for step in range(len(sizes))]
    assert engine.compact() is None
    assert engine.stats().blocks.total == 30


def test_growth_that_is_refused_is_told_once_and_work_goes_on(caplog):
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4, commit_limit=10)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for _ in range(2):
            ids = [engine.add(prompt_of(9, number), SamplingParams(max_tokens=20, seed=number)) for number in range(6)]
            last, _ = run(engine)
            for number, request_id in enumerate(ids):
                assert last[request_id].outputs[0].token_ids == drawn(number, 0, 20)
    (record,) = caplog.records
    assert re.fullmatch(r"\d+ blocks are wanted and memory is there for 10", record.getMessage())
    assert engine.stats().blocks.total == 10


def test_request_that_the_pool_cannot_grow_for_ends_alone():
    engine = make_engine(eos=(), num_blocks=64, committed_blocks=4, commit_limit=6)
    large = engine.add(prompt_of(60), SamplingParams(max_tokens=5), "large")
    small = engine.add(prompt_of(5), SamplingParams(max_tokens=5, seed=1), "small")
    last, _ = run(engine)
    assert last[small].outputs[0].token_ids == drawn(1, 0, 5)
    completion = last[large].outputs[0]
    assert completion.finish_reason == "error"
    assert re.search(r"\d+ blocks are wanted and \d+ of 6 available.*the pool cannot grow: .*memory is there for 6", completion.error)


# Failures


def test_failing_step_ends_its_own_requests_and_frees_everything():
    failing = iter([None, None, None, OSError("gone")])
    engine = make_engine(speak(), step_error=lambda plan: next(failing, None), max_batch_size=4, block_size=4)
    ids = [
        engine.add(prompt_of(13), SamplingParams(max_tokens=100, n=3)),
        engine.add(prompt_of(13, 5), SamplingParams(max_tokens=100, n=3)),
    ]
    last, _ = run(engine)
    ends = [one.finish_reason for request_id in ids for one in last[request_id].outputs]
    assert ends.count("error") == 4
    assert ends.count("stop") == 2
    assert all(one.error == "OSError: gone" for request_id in ids for one in last[request_id].outputs if one.finish_reason == "error")
    assert all(one.text == TEXT for request_id in ids for one in last[request_id].outputs if one.finish_reason == "stop")


def test_blocks_of_a_step_that_failed_are_shared_with_nobody():
    failing = iter([OSError("gone")])
    engine = make_engine(speak(), step_error=lambda plan: next(failing, None), block_size=4)
    assert ask(engine, prompt_of(33)).outputs[0].finish_reason == "error"
    assert ask(engine, prompt_of(33), max_tokens=100).num_cached_tokens == 0
    assert ask(engine, prompt_of(33), max_tokens=100).num_cached_tokens == 32


@pytest.mark.parametrize("seed", range(3))
def test_no_failure_stops_the_engine_or_touches_another_request(seed):
    """Steps and rows that fail at random, in a pool that is too small and grows, with swap, forks, salts, scores and aborts."""
    source = random.Random(seed)
    engine = make_engine(
        eos=(),
        num_blocks=24,
        committed_blocks=8,
        swap_blocks=10,
        commits_per_step=2,
        max_batch_size=6,
        prefill_chunk_size=7,
        policy="priority" if seed else "fcfs",
        seconds_per_token=1.0,
        step_error=lambda plan: RuntimeError("a fault") if plan.rows and source.random() < 0.02 else None,
        row_error=lambda row, asked: "a NaN" if source.random() < 0.005 else None,
    )
    wanted, last = {}, {}
    for number in range(60):
        count, length = source.randint(1, 25), source.randint(1, 3)
        params = SamplingParams(
            max_tokens=count,
            n=length,
            seed=number,
            priority=source.randint(-2, 2),
            cache_salt=source.choice([None, "x"]),
            prompt_logprobs=source.choice([None, None, 0]),
        )
        wanted[engine.add([source.randrange(2) for _ in range(source.randint(1, 20))], params)] = (number, count, length)
        for _ in range(source.randint(0, 8)):
            last |= {output.request_id: output for output in engine.step()}
        if source.random() < 0.2:
            engine.abort(source.choice(list(wanted)))
        if source.random() < 0.2:
            engine.compact()
        if source.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    check_idle(engine)
    ends = {"length": 0, "error": 0, "abort": 0}
    for request_id, (number, count, length) in wanted.items():
        output = last[request_id]
        assert output.finished
        for choice, one in enumerate(output.outputs):
            ends[one.finish_reason] += 1
            assert one.token_ids == drawn(number, choice, count)[: len(one.token_ids)]
            assert one.finish_reason != "length" or len(one.token_ids) == count
        if output.prompt_logprobs is not None and output.outputs[0].finish_reason == "length":
            check_scores(output)
        assert len(output.outputs) == length
    assert min(ends.values()) > 0
    assert engine.stats().preemptions > 0


# The record


def test_record_goes_to_json_and_back_and_can_be_read_by_who_advises():
    engine = make_engine(eos=(), num_blocks=10, max_batch_size=3, seconds_per_step=0.05, swap_blocks=4)
    assert advise(engine.record())
    for number in range(6):
        engine.add(prompt_of(9, number), SamplingParams(max_tokens=20))
    run(engine)
    record = engine.record()
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    assert advise(record)
    assert record.lengths == [(9, 20)] * 6
    assert len(record.samples) > 3
    assert (record.block_size, record.block_bytes, record.longest, record.max_batch_size) == (4, 1024, 40, 3)
    assert record.stats.seconds["check"] > 0
