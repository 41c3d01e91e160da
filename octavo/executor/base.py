"""Where plans are carried out: in this process, in others, or nowhere at all (the simulator)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from octavo.plan import Capacity, StepPlan, StepResult


class Executor(ABC):
    """Runs plans in order. `capacity` is the least over all workers."""

    capacity: Capacity
    takes_callables = False
    """Whether a plan's parameters may hold callables, which cannot be sent anywhere."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan. Whatever it raises ends the plan's sequences, and the executor must go on working after."""

    def mapping_bytes(self) -> int:
        """Memory of block tables held by the workers."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give up workers and memory."""
