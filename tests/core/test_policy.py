"""Who goes first: the order of arrivals, or of priorities that age; and the room they wait in."""

import random

import pytest

from octavo.core.policy import POLICIES, SECONDS_PER_PRIORITY, WaitingRoom, by_priority, first_come_first_served
from octavo.core.request import Request
from octavo.sampling_params import SamplingParams


def make_sequence(name="a", order=0, *, priority=0, arrival=0.0, policy=first_come_first_served):
    request = Request(name, [1], SamplingParams(priority=priority), arrival=arrival, max_length=9)
    (sequence,) = request.sequences
    sequence.rank = (policy(request), order, 0)
    return sequence


def make_sequences(*names):
    return [make_sequence(name, order) for order, name in enumerate(names)]


def drain(room):
    order = []
    while (sequence := room.next()) is not None:
        room.remove(sequence)
        order.append(sequence.request.request_id)
    return "".join(order)


# The waiting room


@pytest.mark.parametrize("seed", range(5))
def test_room_is_left_in_order_of_rank_however_it_was_entered(seed):
    room, sequences = WaitingRoom(), make_sequences(*"abcdefgh")
    random.Random(seed).shuffle(sequences)
    assert room.next() is None
    for sequence in sequences:
        room.add(sequence)
    assert len(room) == 8
    assert room.next() is room.next()
    assert drain(room) == "abcdefgh"
    assert len(room) == 0


def test_answers_of_one_request_go_in_their_order():
    request = Request("a", [1], SamplingParams(n=3), arrival=0.0, max_length=9)
    room = WaitingRoom()
    for sequence in reversed(request.sequences):
        sequence.rank = (0.0, 1, sequence.choice)
        room.add(sequence)
    choices = []
    while (sequence := room.next()) is not None:
        room.remove(sequence)
        choices.append(sequence.choice)
    assert choices == [0, 1, 2]


def test_one_that_ended_is_dropped_wherever_it_stands():
    for gone in "abc":
        room, sequences = WaitingRoom(), make_sequences(*"abc")
        for sequence in sequences:
            room.add(sequence)
        room.remove(sequences["abc".index(gone)])
        assert len(room) == 2
        assert drain(room) == "abc".replace(gone, "")


def test_one_that_is_not_waiting_cannot_be_removed():
    room, (a, b) = WaitingRoom(), make_sequences(*"ab")
    with pytest.raises(KeyError):
        room.remove(a)
    room.add(b)
    room.remove(b)
    with pytest.raises(KeyError):
        room.remove(b)


def test_one_that_comes_back_waits_once():
    room, (a, b) = WaitingRoom(), make_sequences(*"ab")
    room.add(b)
    for _ in range(5):
        room.add(a)
        room.remove(a)
    assert room.next() is b
    room.add(a)
    assert len(room) == 2
    assert drain(room) == "ab"
    assert room.next() is None


@pytest.mark.parametrize("others", [0, 1, 50])
def test_room_does_not_keep_those_that_left(others):
    """The last of the line leaves again and again, its turn never coming."""
    room, (last, *first) = WaitingRoom(), [make_sequence(f"{number}", -number) for number in range(others + 1)]
    for sequence in first:
        room.add(sequence)
    for _ in range(1000):
        room.add(last)
        room.remove(last)
    assert len(room._heap) <= 2 * others + 65
    assert len(room) == others


def test_room_does_not_keep_those_that_left_while_others_change_too():
    source, room = random.Random(1), WaitingRoom()
    sequences = [make_sequence(f"{number}", number) for number in range(40)]
    inside = set()
    for _ in range(5000):
        sequence = source.choice(sequences)
        if sequence in inside:
            inside.remove(sequence)
            room.remove(sequence)
        else:
            inside.add(sequence)
            room.add(sequence)
        assert room.next() is min(inside, key=lambda one: one.rank, default=None)
        assert len(room) == len(inside)
        assert len(room._heap) <= 2 * 40 + 66


# Policies


def test_policies_are_found_by_name():
    assert {"fcfs": first_come_first_served, "priority": by_priority} == POLICIES


def test_first_come_is_first_served_whatever_its_priority():
    early = make_sequence(order=1, priority=9, arrival=0.0)
    late = make_sequence(order=2, priority=-9, arrival=100.0)
    assert early.rank < late.rank


def ranks(*asked):
    """The names in the order in which `priority` serves them; each comes with its priority and its arrival."""
    room = WaitingRoom()
    for order, (name, priority, arrival) in enumerate(asked):
        room.add(make_sequence(name, order, priority=priority, arrival=arrival, policy=by_priority))
    return drain(room)


def test_lower_priorities_go_first():
    assert ranks(("a", 1, 0.0), ("b", 0, 0.0), ("c", -1, 0.0)) == "cba"
    assert ranks(("a", 1, 0.0), ("b", 0, SECONDS_PER_PRIORITY / 2)) == "ba"


def test_equal_priorities_go_in_order_of_arrival():
    assert ranks(("a", 3, 0.0), ("b", 3, 1.0), ("c", 3, 2.0)) == "abc"
    assert ranks(("a", 3, 5.0), ("b", 3, 5.0)) == "ab"


@pytest.mark.parametrize("levels", [1, 2, 7])
def test_age_makes_up_for_priority_at_a_fixed_rate(levels):
    even = levels * SECONDS_PER_PRIORITY
    assert ranks(("old", levels, 100.0), ("new", 0, 100.0 + even - 0.1)) == "newold"
    assert ranks(("old", levels, 100.0), ("new", 0, 100.0 + even)) == "oldnew"
    assert ranks(("old", levels, 100.0), ("new", 0, 100.0 + even + 0.1)) == "oldnew"


@pytest.mark.parametrize("levels", [1, 3, 10])
def test_nobody_starves_under_a_stream_of_better_arrivals(levels):
    """One is served each second and a better one comes each second, so that the queue never empties."""
    room = WaitingRoom()
    room.add(make_sequence("better", 0, policy=by_priority))
    poor = make_sequence("poor", 1, priority=levels, policy=by_priority)
    room.add(poor)
    for second in range(1, 1000):
        served = room.next()
        room.remove(served)
        if served is poor:
            break
        room.add(make_sequence("better", second + 1, arrival=float(second), policy=by_priority))
    assert levels * SECONDS_PER_PRIORITY <= second <= levels * SECONDS_PER_PRIORITY + 3
