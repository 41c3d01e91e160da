"""Who is admitted next, and who gives way when blocks run out. A new policy is one class and one line in POLICIES."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from octavo.core.request import Sequence


class Policy(Protocol):
    """The waiting room. Every operation costs O(1), or O(log n) where an order must be kept."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """A new arrival."""

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence; it resumes before anyone who came later."""

    def remove(self, sequence: Sequence) -> None:
        """Drop a waiting sequence that ended."""

    def next(self) -> Sequence | None:
        """Who is to be admitted next; stays in the room until removed."""

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who gives way of these running sequences, in order of admission, never none."""


class FirstComeFirstServed:
    """Admit in order of arrival, preempt the latest arrival.

    Running sequences thus always came before waiting ones, and a preempted one goes to the head of the queue.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        self._queue[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        self._queue[sequence] = None
        self._queue.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence]

    def next(self) -> Sequence | None:
        return next(iter(self._queue), None)

    def victim(self, running: list[Sequence]) -> Sequence:
        return running[-1]


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed}
