"""Counters, histograms and the figures of KV memory, cheap enough to be always on."""

from __future__ import annotations

import math
from dataclasses import dataclass


class Histogram:
    """Counts of positive values in buckets a quarter of a power of two wide: quantiles within 19%, in constant memory."""

    STEPS = 4
    LOWEST = -40  # 2 ** -40, below a picosecond

    def __init__(self) -> None:
        self._counts = [0] * (self.STEPS * 64)
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        place = int((math.log2(value) - self.LOWEST) * self.STEPS) if value > 0 else 0
        self._counts[min(max(place, 0), len(self._counts) - 1)] += 1
        self.count += 1
        self.total += value

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket that holds the given share of all values; 0.0 where there are none."""
        if self.count == 0:
            return 0.0
        seen, wanted = 0, share * self.count
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return float(2 ** ((place + 1) / self.STEPS + self.LOWEST))
        return math.inf


@dataclass(frozen=True)
class BlockStats:
    """free + cached + used = total, always. `ceiling` is what the pool may grow to, `peak_used` the most ever used."""

    total: int
    free: int
    cached: int
    used: int
    ceiling: int
    peak_used: int


@dataclass(frozen=True)
class Stats:
    """A snapshot of the engine.

    utilization: used / total blocks; under load 0.70 to 0.85 is healthy.
    internal_fragmentation: unused token slots / token slots of used blocks; lastingly above 0.20 the block size is wrong.
    allocation_p99_s: 99th percentile of the time to allocate blocks, in seconds; under 1 ms.
    block_table_ratio: memory of the mapping / memory of the KV blocks; under 0.01.
    """

    blocks: BlockStats
    utilization: float
    internal_fragmentation: float
    allocation_p99_s: float
    block_table_ratio: float
    running: int
    waiting: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    finished: dict[str, int]
    seconds: dict[str, float]
    """Where the time went: `schedule`, `forward` and `step`, which is all of it."""
