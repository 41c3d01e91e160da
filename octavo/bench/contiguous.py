"""The traditional ways, simulated: one buffer, and for each sequence one range of it, reserved at admission for its whole life.

A step gives every decoding sequence a token, and prompts at most `prefill_chunk_size` of them together, in order of admission; the
scheduler's own notion, so that steps of both can be compared. Nothing is computed token by token: only admissions and ends are events.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.bench.traces import TracedRequest
from octavo.bench.usage import Usage

Reserve = Callable[[int], int]
"""Token slots that a sequence stores in the end -> how many are reserved for it."""

UNLIMITED = 2**62


def reservations(context: int) -> dict[str, Reserve]:
    """How much to reserve, for a model of that context; the last one knows the length of the answer in advance."""
    return {
        "whole context": lambda final: context,
        "next power of two": lambda final: min(context, next_power_of_two(final)),
        "exact length (an oracle)": lambda final: final,
    }


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class Buffer:
    """A range of token slots. Ranges of it are taken first-fit; neighbouring holes become one.

    holes: (start, size) of each, in order.
    """

    def __init__(self, size: int) -> None:
        self.holes = [(0, size)]
        self.num_free = size

    def take(self, size: int) -> int | None:
        """Where the range starts; None, changing nothing, where no hole holds it."""
        for place, (start, room) in enumerate(self.holes):
            if room >= size:
                self.holes[place : place + 1] = [(start + size, room - size)] if room > size else []
                self.num_free -= size
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        self.num_free += size
        place = bisect_left(self.holes, (start, 0))
        if place < len(self.holes) and self.holes[place][0] == start + size:
            size += self.holes.pop(place)[1]
        if place and sum(self.holes[place - 1]) == start:
            place -= 1
            start, before = self.holes.pop(place)
            size += before
        self.holes.insert(place, (start, size))


@dataclass(frozen=True, slots=True)
class _Stay:
    """A sequence's life. Prompts form one stream, of which each step computes a chunk; this one's begins at `offset`.

    admitted, decodes, ends: the steps in which it gets its range, computes its last prompt token, and no longer is.
    """

    size: int
    prompt: int
    final: int
    offset: int
    admitted: int
    decodes: int
    ends: int

    def steps(self, horizon: int) -> int:
        return max(0, min(self.ends, horizon) - self.admitted)

    def held(self, horizon: int, chunk: int) -> int:
        """Tokens it holds at the end of each step before the horizon, added up."""
        prefilled = sum((step + 1) * chunk - self.offset for step in range(self.admitted, min(self.decodes, horizon)))
        decoding = max(0, min(self.ends, horizon) - self.decodes)
        return prefilled + decoding * self.prompt + decoding * (decoding - 1) // 2


class _Replay:
    """All requests wait from the start, and the first in line blocks those behind it.

    living: (the step by which it is gone, start, size) of each sequence, the first to go first.
    """

    def __init__(self, requests: list[TracedRequest], budget: int, reserve: Reserve, context: int, max_batch_size: int, chunk: int) -> None:
        self.budget = budget
        self.reserve = reserve
        self.context = context
        self.max_batch_size = max_batch_size
        self.chunk = chunk
        self.buffer = Buffer(budget)
        self.waiting = deque(requests)
        self.stays: list[_Stay] = []
        self.living: list[tuple[int, int, int]] = []
        self.prefilled = 0
        self.resident_max = self.refused = self.cut = 0

    def run(self) -> Usage:
        step = blocked_slots = 0
        while True:
            while self.living and self.living[0][0] <= step:
                _, start, size = heapq.heappop(self.living)
                self.buffer.give_back(start, size)
            blocked = self._admit(step)
            self.resident_max = max(self.resident_max, len(self.living))
            if not self.waiting:
                return self._usage(step, blocked_slots)
            following = self.living[0][0] if self.living else step + 1
            if not blocked and len(self.living) < self.max_batch_size:
                following = min(following, self.prefilled // self.chunk)
            blocked_slots += blocked * (following - step) * self.buffer.num_free
            step = following

    def _admit(self, step: int) -> bool:
        """Admit from the head of the line; returns whether it is memory that keeps the next one out."""
        while self.waiting and len(self.living) < self.max_batch_size and self.prefilled < (step + 1) * self.chunk:
            prompt, wanted = len(self.waiting[0].prompt), len(self.waiting[0].answer)
            answer = min(wanted, self.context - prompt)
            final = prompt + answer - 1
            size = self.reserve(final)
            if answer < 1 or size > self.budget:
                self.refused += 1
                self.waiting.popleft()
                continue
            start = self.buffer.take(size)
            if start is None:
                return True
            self.waiting.popleft()
            self.cut += answer < wanted
            offset = max(self.prefilled, step * self.chunk)
            self.prefilled = offset + prompt
            decodes = (self.prefilled - 1) // self.chunk
            self.stays.append(_Stay(size, prompt, final, offset, step, decodes, decodes + answer))
            heapq.heappush(self.living, (decodes + answer, start, size))
        return False

    def _usage(self, waited: int, blocked_slots: int) -> Usage:
        steps = max((stay.ends for stay in self.stays), default=0)
        horizon = waited or steps
        slots = self.budget * max(1, horizon)
        held = sum(stay.held(horizon, self.chunk) for stay in self.stays)
        given = sum(stay.size * stay.steps(horizon) for stay in self.stays)
        filled = sum(stay.final * stay.steps(horizon) for stay in self.stays)
        return Usage(
            held=held / slots,
            cached=0.0,
            reserved=(filled - held) / slots,
            internal=(given - filled) / slots,
            external=blocked_slots / slots,
            free=1 - (given + blocked_slots) / slots,
            resident_mean=sum(stay.steps(horizon) for stay in self.stays) / max(1, horizon),
            resident_max=self.resident_max,
            steps=steps,
            steps_averaged=horizon,
            refused=self.refused,
            cut=self.cut,
            generated_tokens=sum(stay.final - stay.prompt + 1 for stay in self.stays),
        )


def replay(
    requests: list[TracedRequest], *, budget: int, reserve: Reserve, context: int, max_batch_size: int, prefill_chunk_size: int | None
) -> Usage:
    """Serve all requests in order from `budget` token slots.

    Refused are those whose prompt fills the context, or whose range exceeds the budget; longer answers end at the context.
    """
    return _Replay(requests, budget, reserve, context, max_batch_size, prefill_chunk_size or UNLIMITED).run()
