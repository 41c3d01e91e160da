"""The traditional ways: small cases by hand, and many against a simulation that walks through every step and slot."""

from __future__ import annotations

import random

import pytest

from octavo.bench.contiguous import Buffer, Reserve, next_power_of_two, replay, reservations
from octavo.bench.traces import TracedRequest
from octavo.bench.usage import Usage


def request(prompt: int, answer: int) -> TracedRequest:
    return TracedRequest([0] * prompt, [0] * answer)


def exact(final: int) -> int:
    return final


def test_neighbouring_holes_become_one() -> None:
    buffer = Buffer(10)
    assert [buffer.take(size) for size in (4, 3, 3)] == [0, 4, 7]
    assert buffer.holes == []
    buffer.give_back(4, 3)
    buffer.give_back(0, 4)
    assert buffer.holes == [(0, 7)]
    assert buffer.take(5) == 0
    assert buffer.holes == [(5, 2)]
    buffer.give_back(7, 3)
    assert buffer.holes == [(5, 5)]
    buffer.give_back(0, 5)
    assert buffer.holes == [(0, 10)]
    assert buffer.num_free == 10


def test_the_first_hole_that_fits_is_taken_and_none_where_all_are_too_small() -> None:
    buffer = Buffer(10)
    for size in (2, 2, 4, 2):
        buffer.take(size)
    for start, size in ((0, 2), (4, 4)):
        buffer.give_back(start, size)
    assert buffer.num_free == 6
    assert buffer.take(5) is None
    assert buffer.holes == [(0, 2), (4, 4)]
    assert buffer.take(3) == 4
    assert buffer.take(2) == 0


def test_holes_keep_the_head_of_the_line_out_and_it_those_behind() -> None:
    requests = [
        request(3, 2),  # slots 0 to 3, steps 0 and 1
        request(1, 3),  # slots 4 to 6, steps 0 to 2
        request(2, 2),  # slots 7 to 9, steps 0 and 1
        request(5, 2),  # six slots: there are seven in step 2, in two holes
        request(1, 1),  # would fit
    ]
    usage = replay(requests, budget=10, reserve=exact, context=16, max_batch_size=8, prefill_chunk_size=None)
    assert usage == Usage(
        held=pytest.approx((7 + 6 + 5) / 30),
        cached=0.0,
        reserved=pytest.approx((1 + 3 + 1) / 30),
        internal=0.0,
        external=pytest.approx(7 / 30),
        free=pytest.approx(0.0),
        resident_mean=pytest.approx(7 / 3),
        resident_max=3,
        steps=5,
        steps_averaged=3,
        refused=0,
        cut=0,
        generated_tokens=10,
    )


def test_the_context_is_reserved_whole_refuses_longer_prompts_and_ends_longer_answers() -> None:
    requests = [request(2, 3), request(8, 1), request(6, 5)]
    usage = replay(requests, budget=12, reserve=lambda final: 8, context=8, max_batch_size=8, prefill_chunk_size=100)
    assert (usage.refused, usage.cut, usage.generated_tokens) == (1, 1, 3 + 2)
    assert usage.steps == 3 + 2
    assert usage.internal == pytest.approx((8 - 4) / 12)
    assert usage.held + usage.reserved == pytest.approx(4 / 12)
    assert usage.external == pytest.approx(4 / 12)


def test_nothing_fits_a_budget_below_one_reservation() -> None:
    usage = replay([request(2, 3)] * 3, budget=7, reserve=lambda final: 8, context=8, max_batch_size=8, prefill_chunk_size=None)
    assert (usage.refused, usage.steps, usage.generated_tokens, usage.free) == (3, 0, 0, 1.0)


def test_what_is_reserved() -> None:
    whole, power, oracle = reservations(4096).values()
    assert [(whole(final), power(final), oracle(final)) for final in (1, 5, 1025, 4096)] == [
        (4096, 1, 1),
        (4096, 8, 5),
        (4096, 2048, 1025),
        (4096, 4096, 4096),
    ]
    assert [next_power_of_two(number) for number in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


def walk(requests: list[TracedRequest], budget: int, reserve: Reserve, context: int, batch: int, chunk: int) -> dict[str, float]:
    """The same, slot by slot and step by step."""
    owners: list[int | None] = [None] * budget
    sequences: list[dict[str, int]] = []
    waiting = list(enumerate(requests))
    sums = dict.fromkeys(("held", "reserved", "internal", "external", "free", "resident_mean"), 0)
    step = refused = cut = generated = most = averaged = 0
    while waiting or sequences:
        left = chunk
        for sequence in sequences:
            done = min(left, sequence["prompt"] - sequence["filled"])
            if sequence["filled"] < sequence["prompt"]:
                sequence["filled"] += done
                left -= done
            else:
                sequence["filled"] += 1
        blocked = False
        while waiting and len(sequences) < batch and left > 0:
            name, first = waiting[0]
            prompt, answer = len(first.prompt), min(len(first.answer), context - len(first.prompt))
            size = reserve(prompt + answer - 1)
            if answer < 1 or size > budget:
                refused += 1
                waiting.pop(0)
                continue
            starts = [start for start in range(budget - size + 1) if not any(owner is not None for owner in owners[start : start + size])]
            if not starts:
                blocked = True
                break
            waiting.pop(0)
            owners[starts[0] : starts[0] + size] = [name] * size
            cut += answer < len(first.answer)
            done = min(left, prompt)
            left -= done
            sequences.append({"name": name, "prompt": prompt, "final": prompt + answer - 1, "size": size, "filled": done})
        most = max(most, len(sequences))
        if waiting:
            averaged += 1
            sums["held"] += sum(sequence["filled"] for sequence in sequences)
            sums["reserved"] += sum(sequence["final"] - sequence["filled"] for sequence in sequences)
            sums["internal"] += sum(sequence["size"] - sequence["final"] for sequence in sequences)
            sums["external" if blocked else "free"] += owners.count(None)
            sums["resident_mean"] += len(sequences)
        generated += sum(sequence["filled"] >= sequence["prompt"] for sequence in sequences)
        step += bool(sequences)
        gone = {sequence["name"] for sequence in sequences if sequence["filled"] >= sequence["final"]}
        sequences = [sequence for sequence in sequences if sequence["name"] not in gone]
        owners = [None if owner in gone else owner for owner in owners]
    counts = {"steps": step, "refused": refused, "cut": cut, "generated_tokens": generated, "resident_max": most}
    if not averaged:
        return counts
    shares = {name: total / averaged / (1 if name == "resident_mean" else budget) for name, total in sums.items()}
    return counts | shares | {"steps_averaged": averaged}


@pytest.mark.parametrize("seed", range(150))
def test_events_and_steps_agree(seed: int) -> None:
    source = random.Random(seed)
    requests = [request(source.randint(1, 20), source.randint(1, 12)) for _ in range(source.randint(1, 25))]
    context = source.choice([16, 32])
    reserve = source.choice(list(reservations(context).values()))
    budget, batch, chunk = source.randint(12, 120), source.randint(1, 8), source.choice([1, 3, 8, 20, 1000])
    usage = replay(requests, budget=budget, reserve=reserve, context=context, max_batch_size=batch, prefill_chunk_size=chunk)
    parts = (usage.held, usage.cached, usage.reserved, usage.internal, usage.external, usage.free)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > -1e-9
    walked = walk(requests, budget, reserve, context, batch, chunk)
    assert {name: getattr(usage, name) for name in walked} == pytest.approx(walked)
