"""The step loop over a simulated executor: what goes in, what comes out, and what nothing may break."""

import json
import random

import msgspec
import pytest
from engine_driver import TEXT, answer, make_engine, run, speak

from octavo.errors import InvalidValueError, PromptTooLongError
from octavo.executor.simulated import SimulatedClock, hashed_token
from octavo.plan import StepPlan
from octavo.sampling_params import SamplingParams

# Outputs


def test_answer_has_text_tokens_and_reason():
    engine = make_engine(speak())
    request_id = engine.add("Hi", SamplingParams(max_tokens=100))
    output = run(engine)[0][request_id]
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hi", [72, 105], True)
    (completion,) = output.outputs
    assert completion.text == TEXT
    assert completion.token_ids == [*TEXT.encode(), 256]
    assert (completion.index, completion.finish_reason, completion.stop_reason, completion.error) == (0, "stop", None, None)


def test_deltas_joined_are_the_text_and_never_hold_half_a_character():
    engine = make_engine(speak())
    request_id = engine.add("Hi", SamplingParams(max_tokens=100))
    last, deltas = run(engine)
    assert "".join(deltas[request_id]) == last[request_id].outputs[0].text == TEXT
    assert not any("\ufffd" in delta for delta in deltas[request_id])


def test_answer_cut_within_a_character_ends_with_the_mark_of_one():
    completion = answer(make_engine(speak("a🙂")), max_tokens=3)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("a\ufffd", "length", 3)


@pytest.mark.parametrize("end", [65, 256, 257])
def test_stop_id_is_among_the_tokens_and_not_in_the_text(end):
    completion = answer(make_engine(speak("so", end), eos=()), stop_token_ids=[end], skip_special_tokens=False)
    assert (completion.text, completion.token_ids) == ("so", [*b"so", end])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", end)


def test_special_tokens_are_left_out_unless_they_are_wanted():
    spoken = speak("a", 256)
    assert answer(make_engine(spoken), ignore_eos=True, max_tokens=4).text == "aa"
    assert answer(make_engine(spoken), ignore_eos=True, max_tokens=4, skip_special_tokens=False).text == "a<end>a<end>"


@pytest.mark.parametrize("prompt", ["Hi", [72, 105], {"prompt_token_ids": [72, 105]}])
def test_prompt_may_be_text_or_ids(prompt):
    engine = make_engine(speak())
    request_id = engine.add(prompt, SamplingParams(max_tokens=3))
    output = run(engine)[0][request_id]
    assert output.prompt == (prompt if isinstance(prompt, str) else None)
    assert output.prompt_token_ids == [72, 105]


def test_ids_are_given_or_made():
    engine = make_engine(speak())
    made = [engine.add("Hi", SamplingParams()) for _ in range(2)]
    assert engine.add("Hi", SamplingParams(), "mine") == "mine"
    assert len({*made, "mine"}) == 3
    assert set(run(engine)[0]) == {*made, "mine"}


def test_made_id_never_meets_a_given_one():
    engine = make_engine(speak())
    engine.add("Hi", SamplingParams(), "request-1")
    assert engine.add("Hi", SamplingParams()) != "request-1"
    assert len(run(engine)[0]) == 2


def test_callers_list_may_change_after():
    outputs = []
    for change in (False, True):
        engine, ids = make_engine(), [1, 2, 3]
        request_id = engine.add(ids, SamplingParams(max_tokens=8, seed=1))
        engine.step()
        if change:
            ids += [4, 5]
        output = run(engine)[0][request_id]
        outputs.append((output.outputs[0].token_ids, output.prompt_token_ids))
    assert outputs[0] == outputs[1]


def test_many_requests_in_a_small_pool_each_get_their_own_answer():
    source, engine, expected = random.Random(3), make_engine(num_blocks=20, max_batch_size=8, prefill_chunk_size=7, eos=()), {}
    for number in range(40):
        tokens = source.randint(1, 50)
        request_id = engine.add(
            [source.randrange(256) for _ in range(source.randint(1, 20))], SamplingParams(max_tokens=tokens, seed=number)
        )
        expected[request_id] = [hashed_token(number, 0, place, 258) for place in range(tokens)]
    last, _ = run(engine)
    assert {request_id: output.outputs[0].token_ids for request_id, output in last.items()} == expected
    assert engine.stats().preemptions > 5
    assert sum(output.metrics.preemptions for output in last.values()) == engine.stats().preemptions


def test_length_is_bound_by_max_tokens_and_by_the_longest_sequence():
    engine = make_engine(longest=20, eos=())
    assert len(answer(engine, [1] * 5, max_tokens=7).token_ids) == 7
    assert len(answer(engine, [1] * 5, max_tokens=100).token_ids) == 15
    completion = answer(engine, [1] * 19, max_tokens=None)
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_seed_of_the_request_decides_and_the_engines_seed_otherwise():
    def outputs(engine_seed, **params):
        engine = make_engine(seed=engine_seed, eos=())
        for _ in range(2):
            engine.add([1], SamplingParams(max_tokens=8, **params))
        return [output.outputs[0].token_ids for output in run(engine)[0].values()]

    first, second = outputs(1)
    assert first != second
    assert outputs(1) == [first, second]
    assert outputs(2) != [first, second]
    assert outputs(1, seed=5) == outputs(2, seed=5)


@pytest.mark.parametrize("seed", [2**40, 2**63 - 1])
def test_plans_can_be_encoded_with_any_engine_seed(seed):
    engine = make_engine(seed=seed)
    engine.add([1], SamplingParams())
    plan = engine.scheduler.schedule(0.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_engine_seeds_that_differ_give_seeds_that_differ():
    used = set()
    for seed in (0, 1, 2**32, 2**33, 2**62):
        engine = make_engine(seed=seed)
        engine.add([1], SamplingParams())
        used.add(engine.scheduler.schedule(0.0).rows[0].assign.seed % 2**64)
    assert len(used) == 5


# Bad input


BAD_PROMPTS = [
    "",
    [],
    {"prompt_token_ids": []},
    [-1],
    [258],
    [1, 2.0],
    [True],
    ["a"],
    [None],
    None,
    5,
    (1, 2),
    {"prompt": [1]},
    {},
    {"prompt_token_ids": "Hi"},
    {"prompt_token_ids": [1], "more": 1},
    b"Hi",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_bad_prompt_is_refused_and_the_engine_goes_on(prompt):
    engine = make_engine(speak())
    with pytest.raises(InvalidValueError, match=r"^prompt: ") as caught:
        engine.add(prompt, SamplingParams())
    assert "\n" not in str(caught.value)
    assert not engine.has_work
    assert answer(engine).text == TEXT


def test_id_outside_the_vocabulary_is_named_with_what_is_allowed():
    with pytest.raises(InvalidValueError, match="token id 258; allowed: 0 to 257"):
        make_engine().add([0, 257, 258], SamplingParams())


@pytest.mark.parametrize(
    ("values", "limit", "name"), [({"longest": 20}, 20, "the model's context"), ({"num_blocks": 5}, 20, "the KV pool")]
)
def test_too_long_a_prompt_is_refused_with_both_numbers_and_what_binds(values, limit, name):
    engine = make_engine(speak(), **values)
    with pytest.raises(PromptTooLongError, match=rf"20 tokens.* may have {limit} \({name}\)"):
        engine.add([1] * 20, SamplingParams(max_tokens=1))
    assert answer(engine, [1] * 19).finish_reason == "length"


def test_stop_id_outside_the_vocabulary_is_refused():
    engine = make_engine(speak())
    with pytest.raises(InvalidValueError, match="stop_token_ids: 258; allowed: 0 to 257"):
        engine.add("Hi", SamplingParams(stop_token_ids=[257, 258]))
    assert not engine.has_work


def test_live_id_is_refused_and_may_be_used_again_after():
    engine = make_engine(speak())
    engine.add("Hi", SamplingParams(max_tokens=50), "a")
    engine.step()
    with pytest.raises(InvalidValueError, match="'a' is in use"):
        engine.add("Ho", SamplingParams(), "a")
    assert run(engine)[0]["a"].outputs[0].text == TEXT
    engine.add("Ho", SamplingParams(max_tokens=1), "a")
    assert run(engine)[0]["a"].outputs[0].text == "G"


# Ends from outside


def test_abort_ends_a_request_with_what_it_has():
    engine = make_engine(speak())
    engine.add("Hi", SamplingParams(max_tokens=100), "a")
    engine.add("Ho", SamplingParams(max_tokens=100), "b")
    for _ in range(3):
        engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert not engine.abort("nobody")
    last, _ = run(engine)
    assert (last["a"].outputs[0].finish_reason, last["a"].outputs[0].text, last["a"].finished) == ("abort", "Gr\ufffd", True)
    assert last["b"].outputs[0].text == TEXT


def test_abort_while_waiting_gives_an_empty_answer():
    engine = make_engine(speak(), max_batch_size=1)
    engine.add("Hi", SamplingParams(max_tokens=50), "a")
    engine.add("Hi", SamplingParams(max_tokens=50), "b")
    engine.step()
    engine.abort("b")
    last, _ = run(engine)
    assert (last["b"].outputs[0].finish_reason, last["b"].outputs[0].token_ids, last["b"].metrics.first_token) == ("abort", [], None)


@pytest.mark.parametrize("end", ["abort", "forget"])
@pytest.mark.parametrize("steps", [0, 2])
def test_id_used_again_before_the_next_step_is_another_request(end, steps):
    engine = make_engine(speak())
    engine.add("Other", SamplingParams(max_tokens=100), "other")
    engine.add("Hi", SamplingParams(max_tokens=100), "a")
    for _ in range(steps):
        engine.step()
    getattr(engine, end)("a")
    engine.add("Ho", SamplingParams(max_tokens=100), "a")
    for output in engine.step():
        if output.request_id == "a" and output.prompt == "Ho":
            assert output.outputs[0].finish_reason is None
    output = run(engine)[0]["a"]
    assert (output.prompt, output.outputs[0].text, output.outputs[0].finish_reason) == ("Ho", TEXT, "stop")


def test_forgotten_request_leaves_no_output():
    engine = make_engine(speak())
    engine.add("Hi", SamplingParams(max_tokens=50), "a")
    engine.add("Hi", SamplingParams(max_tokens=50), "b")
    engine.step()
    engine.forget("a")
    assert set(run(engine)[0]) == {"b"}
    engine.add("Hi", SamplingParams(max_tokens=50), "a")
    engine.forget("a")
    engine.forget("a")
    assert not engine.has_work
    assert answer(engine).text == TEXT


def test_timeout_of_the_request_or_of_the_engine_ends_it():
    for settings, params in (({}, {"timeout_ms": 2500}), ({"timeout_ms": 2500}, {}), ({"timeout_ms": 1}, {"timeout_ms": 2500})):
        engine = make_engine(speak(), seconds_per_step=1.0, **settings)
        completion = answer(engine, **params)
        assert (completion.finish_reason, completion.text, len(completion.token_ids)) == ("timeout", "Gr\ufffd", 3)


def test_timeout_includes_the_wait():
    engine = make_engine(speak(), max_batch_size=1, seconds_per_step=1.0)
    first = engine.add("Hi", SamplingParams(max_tokens=10))
    second = engine.add("Hi", SamplingParams(max_tokens=10, timeout_ms=5000))
    last, _ = run(engine)
    assert (last[first].outputs[0].finish_reason, last[second].outputs[0].finish_reason) == ("length", "timeout")
    assert last[second].metrics.finished == pytest.approx(5.0, abs=1.0)


# Failures


def test_failing_step_ends_its_requests_with_the_message_and_no_others():
    failing = iter([None, None, MemoryError("no room"), None])
    engine = make_engine(speak(), step_error=lambda plan: next(failing, None), max_batch_size=2)
    ids = [engine.add("Hi", SamplingParams(max_tokens=100)) for _ in range(3)]
    last, _ = run(engine)
    for request_id in ids[:2]:
        completion = last[request_id].outputs[0]
        assert (completion.finish_reason, completion.error) == ("error", "MemoryError: no room")
        assert completion.text == "Gr"
    assert last[ids[2]].outputs[0].text == TEXT
    assert answer(engine).text == TEXT
    assert engine.stats().finished == {"error": 2, "stop": 2}


def test_failing_row_ends_alone():
    engine = make_engine(
        speak(), row_error=lambda row, assignment: "no finite logits" if assignment.history[0] == 66 and row.start > 4 else None
    )
    good, bad = engine.add("Alice", SamplingParams(max_tokens=100)), engine.add("Bob", SamplingParams(max_tokens=100))
    last, _ = run(engine)
    assert (last[bad].outputs[0].finish_reason, last[bad].outputs[0].error) == ("error", "no finite logits")
    assert last[good].outputs[0].text == TEXT


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_engine_is_usable_after_an_interrupt(interrupt):
    failing = iter([None, interrupt()])
    engine = make_engine(speak(), step_error=lambda plan: next(failing, None))
    engine.add("Hi", SamplingParams(max_tokens=100))
    engine.step()
    with pytest.raises(interrupt):
        engine.step()
    run(engine)
    assert answer(engine).text == TEXT


# Figures


def test_times_are_in_order():
    engine = make_engine(speak(), max_batch_size=2, seconds_per_step=0.5, seconds_per_token=0.25, clock=SimulatedClock(100.0))
    ids = [engine.add("Hi", SamplingParams(max_tokens=5)) for _ in range(4)]
    last, _ = run(engine)
    for place, request_id in enumerate(ids):
        metrics = last[request_id].metrics
        assert metrics.arrival == 100.0
        assert metrics.arrival < metrics.first_token < metrics.finished
        # Two prompts of two tokens, then four decode steps, then the next two requests.
        assert metrics.first_token == 100.0 + 1.5 + (0 if place < 2 else 1.5 + 4 * 1.0 - 1.5 + 1.5)
    assert last[ids[0]].metrics.finished == 100.0 + 1.5 + 4 * 1.0


def test_answer_of_one_token_begins_and_ends_at_once():
    engine = make_engine(speak(), seconds_per_step=1.0)
    request_id = engine.add("Hi", SamplingParams(max_tokens=1))
    metrics = run(engine)[0][request_id].metrics
    assert (metrics.arrival, metrics.first_token, metrics.finished) == (0.0, 1.0, 1.0)


def test_stats_count_what_was_done():
    engine = make_engine(speak(), seconds_per_step=1.0)
    answer(engine, "Hello", max_tokens=7)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (5, 7, 7)
    assert stats.finished == {"length": 1}
    assert stats.seconds["forward"] == 7.0
    assert 0 < stats.seconds["schedule"] < stats.seconds["step"]


def test_idle_engine_steps_to_no_effect():
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_work
    assert engine.stats().steps == 0


def test_day_of_traffic_is_replayed_in_seconds():
    clock = SimulatedClock()
    engine = make_engine(clock=clock, seconds_per_step=20.0, num_blocks=400, eos=())
    arrivals = [place * 86400 / 300 for place in range(300)]
    finished = 0
    while finished < 300:
        while arrivals and arrivals[0] <= clock():
            arrivals.pop(0)
            engine.add([1] * 20, SamplingParams(max_tokens=30))
        outputs = engine.step()
        finished += sum(output.finished for output in outputs)
        if not engine.has_work and arrivals:
            clock.advance(max(0.0, arrivals[0] - clock()))
    assert 86000 < clock() < 90000
    assert json.dumps(engine.stats().finished) == '{"length": 300}'
