"""The scheduler's own time with short and long queues; it must not grow with the queue.

    python -m octavo.bench.core [STEPS]

64 sequences run while 10, 1,000 or 10,000 requests wait, each with a deadline; for every one that ends another arrives. The
simulated executor's time is left out.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass

from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.executor.simulated import SimulatedExecutor, simulated_capacity
from octavo.sampling_params import SamplingParams

RUNNING = 64
QUEUED = (10, 1000, 10_000)
PROMPT, GENERATED, BLOCK = 128, 128, 16
ROUNDS = 3


@dataclass
class Figures:
    """Seconds of the scheduler's own work."""

    steps: float = 0.0
    arrivals: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_arrivals: int = 0

    @property
    def per_step(self) -> float:
        return self.steps / self.num_steps

    @property
    def per_token(self) -> float:
        return self.steps / self.num_tokens

    @property
    def per_arrival(self) -> float:
        return self.arrivals / max(1, self.num_arrivals)


def measure(queued: int, num_steps: int) -> Figures:
    """Run steps with a queue of constant length."""
    num_blocks = (RUNNING + 1) * -(-(PROMPT + GENERATED) // BLOCK)
    scheduler = Scheduler(num_blocks=num_blocks, block_size=BLOCK, max_batch_size=RUNNING, prefill_chunk_size=512)
    executor = SimulatedExecutor(simulated_capacity(num_blocks, BLOCK, vocab_size=50_000), verify=False)
    params = SamplingParams(max_tokens=GENERATED)
    numbers = itertools.count()

    def arrive() -> None:
        number = next(numbers)
        prompt, length = [number % 50_000] * PROMPT, PROMPT + 1 + (number * 37) % GENERATED
        scheduler.add(Request(f"{number}", prompt, params, arrival=0.0, max_length=length, deadline=1e6 + number, seed=number))

    def step(figures: Figures) -> None:
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = executor.execute(plan)
        executed = time.perf_counter()
        changes = scheduler.update(result)
        ended = sum(change.sequence.finished for change in changes)
        updated = time.perf_counter()
        for _ in range(ended):
            arrive()
        figures.arrivals += time.perf_counter() - updated
        figures.steps += planned - began + updated - executed
        figures.num_steps += 1
        figures.num_tokens += sum(len(change.token_ids) for change in changes)
        figures.num_arrivals += ended

    for _ in range(RUNNING + queued):
        arrive()
    for _ in range(2 * GENERATED):
        step(Figures())
    figures = Figures()
    for _ in range(num_steps):
        step(figures)
    return figures


def main(num_steps: int = 1000) -> None:
    best: dict[int, Figures] = {}
    for _ in range(ROUNDS):
        for queued in QUEUED:
            figures = measure(queued, num_steps)
            if queued not in best or figures.steps < best[queued].steps:
                best[queued] = figures
    print(f"core alone, {RUNNING} running, best of {ROUNDS} rounds of {num_steps} steps, microseconds")
    print(f"{'queued':>8}{'a step':>12}{'a token':>12}{'an arrival':>12}")
    for queued, figures in best.items():
        print(f"{queued:>8,}{figures.per_step * 1e6:>12.1f}{figures.per_token * 1e6:>12.2f}{figures.per_arrival * 1e6:>12.1f}")
    print(f"a step, longest queue / shortest: {best[QUEUED[-1]].per_step / best[QUEUED[0]].per_step:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
