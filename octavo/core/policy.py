"""Who goes first: the order in which sequences are admitted, and the reverse of which they give way when blocks run out.

A policy is a function of a request that never changes, so that the order is fixed at arrival: one function, one line in POLICIES.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from octavo.core.request import Rank, Request, Sequence

SECONDS_PER_PRIORITY = 10.0
"""How much earlier a request must have come to go before one whose priority is one better: so age wins in the end."""


def first_come_first_served(request: Request) -> float:
    """Arrivals in their order."""
    return 0.0


def by_priority(request: Request) -> float:
    """Lower priorities first, each worth ten seconds of waiting, so that nothing starves. Since all age alike, the order stands."""
    return request.params.priority * SECONDS_PER_PRIORITY + request.arrival


POLICIES: dict[str, Callable[[Request], float]] = {"fcfs": first_come_first_served, "priority": by_priority}


class WaitingRoom:
    """Sequences in order of rank. Every operation costs O(log n); those removed leave when their turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._waiting: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(one.rank, one) for one in self._waiting]
            heapq.heapify(self._heap)

    def next(self) -> Sequence | None:
        """Who is to be admitted next; stays in the room until removed."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None
