"""First come, first served."""

import pytest

from octavo.core.policy import POLICIES, FirstComeFirstServed
from octavo.core.request import Request
from octavo.sampling_params import SamplingParams


def make_sequences(*names):
    return [Request(name, [1], SamplingParams(), arrival=0.0, max_length=9).sequences[0] for name in names]


def drain(policy):
    order = []
    while (sequence := policy.next()) is not None:
        policy.remove(sequence)
        order.append(sequence.request.request_id)
    return "".join(order)


def test_arrivals_are_admitted_in_order():
    policy = FirstComeFirstServed()
    assert policy.next() is None
    for sequence in make_sequences(*"abcd"):
        policy.add(sequence)
    assert len(policy) == 4
    assert policy.next() is policy.next()
    assert drain(policy) == "abcd"
    assert len(policy) == 0


def test_preempted_ones_go_before_new_ones_in_their_own_order():
    policy = FirstComeFirstServed()
    a, b, c, d, e = make_sequences(*"abcde")
    policy.add(d)
    running = [a, b, c]
    while running:
        victim = policy.victim(running)
        running.remove(victim)
        policy.put_back(victim)
    policy.add(e)
    assert drain(policy) == "abcde"


def test_latest_arrival_is_the_victim():
    running = make_sequences(*"abc")
    assert FirstComeFirstServed().victim(running) is running[2]


def test_one_that_ended_is_dropped_wherever_it_stands():
    for gone in "abc":
        policy = FirstComeFirstServed()
        sequences = make_sequences(*"abc")
        for sequence in sequences:
            policy.add(sequence)
        policy.remove(sequences["abc".index(gone)])
        assert drain(policy) == "abc".replace(gone, "")


def test_one_that_is_not_waiting_cannot_be_dropped():
    policy = FirstComeFirstServed()
    with pytest.raises(KeyError):
        policy.remove(make_sequences("a")[0])


def test_policies_are_found_by_name():
    assert {"fcfs": FirstComeFirstServed} == POLICIES
