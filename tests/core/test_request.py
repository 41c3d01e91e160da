"""The state machine of a sequence, and the counts that hang on it."""

import pytest

from octavo.core.request import NEXT, Request, Status
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams


def make_sequence(prompt=(5, 6, 7), max_length=8, eos=(), **params):
    request = Request("a", list(prompt), SamplingParams(**params), arrival=0.0, max_length=max_length, eos_token_ids=frozenset(eos), seed=3)
    return request.sequences[0]


REACH = {
    Status.WAITING: lambda sequence: None,
    Status.RUNNING: lambda sequence: sequence.run(0),
    Status.PREEMPTED: lambda sequence: (sequence.run(0), sequence.preempt()),
    Status.FINISHED: lambda sequence: sequence.finish("abort"),
}
MOVES = {
    Status.RUNNING: lambda sequence: sequence.run(1),
    Status.PREEMPTED: lambda sequence: sequence.preempt(),
    Status.FINISHED: lambda sequence: sequence.finish("length"),
}
LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@pytest.mark.parametrize("start", Status)
@pytest.mark.parametrize("end", list(MOVES))
def test_every_transition_is_legal_or_refused(start, end):
    sequence = make_sequence()
    REACH[start](sequence)
    assert sequence.status is start
    if (start, end) in LEGAL:
        MOVES[end](sequence)
        assert sequence.status is end
    else:
        slot = sequence.slot
        with pytest.raises(RuntimeError, match=f"cannot become {end.value}"):
            MOVES[end](sequence)
        assert (sequence.status, sequence.slot) == (start, slot)


def test_transitions_stand_as_drawn():
    assert {(start, end) for start, ends in NEXT.items() for end in ends} == LEGAL


def test_preemption_keeps_the_tokens_and_forgets_the_progress():
    sequence = make_sequence()
    sequence.run(4)
    sequence.tokens.append(9)
    sequence.num_computed, sequence.num_scheduled, sequence.num_pending = 3, 4, 1
    residency = sequence.residency
    sequence.preempt()
    assert sequence.tokens == [5, 6, 7, 9]
    assert sequence.output_token_ids == [9]
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_pending, sequence.slot) == (0, 0, 0, None)
    assert sequence.num_preemptions == 1
    assert sequence.residency != residency
    assert sequence.num_to_schedule == 4


def test_resumption_tells_the_worker_the_whole_history():
    sequence = make_sequence()
    sequence.run(0)
    sequence.tokens.append(9)
    sequence.preempt()
    sequence.run(1)
    assignment = sequence.assignment()
    assert assignment.history == [5, 6, 7, 9]
    assert assignment.prompt_length == 3
    assert (assignment.seed, assignment.choice) == (3, 0)
    assignment.history.append(1)
    assert sequence.tokens == [5, 6, 7, 9]


def test_end_is_kept_with_its_reason():
    sequence = make_sequence()
    sequence.run(0)
    sequence.finish("error", "broken")
    assert (sequence.finish_reason, sequence.error, sequence.finished, sequence.request.finished) == ("error", "broken", True, True)


@pytest.mark.parametrize(
    ("token", "eos", "params", "reason", "stop_reason"),
    [
        (9, (), {}, None, None),
        (9, (9, 10), {}, "stop", None),
        (10, (9, 10), {}, "stop", None),
        (9, (9,), {"ignore_eos": True}, None, None),
        (9, (), {"stop_token_ids": [8, 9]}, "stop", 9),
        (9, (9,), {"stop_token_ids": [9], "ignore_eos": True}, "stop", 9),
        (9, (9,), {"stop_token_ids": [9]}, "stop", None),
    ],
)
def test_what_ends_a_sequence(token, eos, params, reason, stop_reason):
    sequence = make_sequence(eos=eos, **params)
    sequence.tokens.append(token)
    assert (token in sequence.request.ends) == (reason is not None)
    assert sequence.note_end() == (reason or "length")
    assert sequence.stop_reason == stop_reason
    assert sequence.output_token_ids == [token]


def test_prompt_list_is_not_the_callers():
    prompt = [1, 2, 3]
    sequence = make_sequence(prompt=prompt)
    sequence.tokens.append(9)
    assert prompt == [1, 2, 3]


def test_nothing_is_scheduled_beyond_what_is_known_to_come():
    sequence = make_sequence(max_length=5)
    sequence.run(0)
    assert sequence.num_to_schedule == 3
    sequence.num_scheduled, sequence.num_pending = 3, 1
    assert sequence.num_to_schedule == 1
    sequence.num_scheduled, sequence.num_pending = 4, 2
    assert sequence.num_to_schedule == 0


def test_chunk_of_a_prompt_leaves_the_rest_to_schedule():
    sequence = make_sequence()
    sequence.run(0)
    sequence.num_scheduled = 2
    assert sequence.num_to_schedule == 1


def test_answers_are_sequences_of_their_own_with_one_prompt():
    request = make_sequence(n=3).request
    first, second, third = request.sequences
    assert [sequence.choice for sequence in request.sequences] == [0, 1, 2]
    first.run(0)
    first.tokens.append(9)
    assert (second.tokens, third.tokens, request.prompt_token_ids) == ([5, 6, 7], [5, 6, 7], [5, 6, 7])
    assert second.assignment(fork_source=0) == Assignment(
        params=request.params, seed=3, history=[5, 6, 7], prompt_length=3, choice=1, fork_source=0
    )
    first.finish("stop")
    second.finish("abort")
    assert not request.finished
    third.finish("error", "broken")
    assert request.finished


def test_prompt_logprobs_are_the_first_answers_to_compute():
    assert [sequence.scores_prompt for sequence in make_sequence(n=2, prompt_logprobs=0).request.sequences] == [True, False]
    assert not make_sequence().scores_prompt


@pytest.mark.parametrize(
    ("adapter", "salt", "scope"),
    [(None, None, None), ("law", None, ("law", None)), (None, "x", (None, "x")), ("law", "x", ("law", "x"))],
)
def test_adapter_and_salt_bound_what_is_shared(adapter, salt, scope):
    request = Request("a", [1], SamplingParams(cache_salt=salt), arrival=0.0, max_length=2, adapter=adapter)
    assert request.scope == scope


def test_why_a_sequence_waits_is_forgotten_once_it_runs():
    sequence = make_sequence()
    sequence.wait = "blocks"
    sequence.run(0)
    assert sequence.wait == ""
