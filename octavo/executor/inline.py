"""One worker in this process, on the thread that calls."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.errors import EngineError
from octavo.executor.base import Executor
from octavo.loading.checkpoint import Checkpoint
from octavo.plan import StepPlan, StepResult
from octavo.text.grammar import Grammars
from octavo.worker.runner import Runner


class InlineExecutor(Executor):
    takes_callables = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        on_tensor: Callable[[int, int], None] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner: Runner | None = Runner(checkpoint, config, on_tensor, grammars)
        self.capacity = self._runner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        if self._runner is None:
            raise EngineError("the engine is closed")
        return self._runner.execute(plan)

    def mapping_bytes(self) -> int:
        return self._runner.mapping_bytes() if self._runner else 0

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None
