"""Counters, histograms and the figures of KV memory, cheap enough to be always on."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.request import Sequence


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
    """free + cached + used = total, always; total is what is committed.

    ceiling: what the pool may grow to. peak_used: the most ever used. swap_total, swap_used: blocks of the host tier.
    """

    total: int
    free: int
    cached: int
    used: int
    ceiling: int
    peak_used: int
    swap_total: int = 0
    swap_used: int = 0


@dataclass(frozen=True)
class Stats:
    """A snapshot of the engine.

    utilization: used / total blocks; under load 0.70 to 0.85 is healthy. utilization_of_ceiling: used / ceiling.
    internal_fragmentation: unused token slots / token slots of used blocks, shared ones counted once; lastingly above 0.20 the
        block size is wrong.
    allocation_p99_s: 99th percentile of the time to allocate blocks, in seconds; under 1 ms.
    block_table_ratio: memory of the mapping (block objects, tables, index) / memory of the committed KV blocks; under 0.01.
    prompt_tokens: of admitted requests; cached_tokens: those of them that were shared instead of computed.
    recomputed_tokens: computed once more after a preemption. preemptions = those that recompute + swap_outs.
    missed_tokens: computed although an earlier request had computed them, where one more GiB of KV memory would have kept them.
    prefill_rate: tokens a second of steps that prefill, as measured; 0.0 where there were none. copy_rate: bytes a second.
    """

    blocks: BlockStats
    utilization: float
    utilization_of_ceiling: float
    internal_fragmentation: float
    allocation_p99_s: float
    block_table_ratio: float
    running: int
    waiting: int
    swapped: int
    preemptions: int
    swap_outs: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    missed_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    evicted_blocks: int
    copied_blocks: int
    prefill_rate: float
    copy_rate: float
    finished: dict[str, int]
    refused: int
    seconds: dict[str, float]
    """Where the time went: `schedule`, `forward`, `check` and `step`, which is all of it."""


@dataclass(frozen=True)
class Sample:
    """KV memory at one moment. unused_slots: token slots of used blocks that hold no token. preemptions: so far."""

    time: float
    total: int
    cached: int
    used: int
    unused_slots: int
    running: int
    waiting: int
    preemptions: int


@dataclass(frozen=True)
class Record:
    """What `octavo advise` reads, from a live engine or a file: the settings that matter, the figures, and how they went over time.

    samples: of the rolling window, oldest first. lengths: (prompt, generated) tokens of the answers that ended last.
    groups: of how many KV groups a block serves one, so that a token is in as many blocks.
    """

    block_size: int
    block_bytes: int
    prealloc_blocks: int
    max_batch_size: int
    longest: int
    stats: Stats
    samples: list[Sample]
    lengths: list[tuple[int, int]]
    groups: int = 1


@dataclass(frozen=True)
class CompactionReport:
    """What compaction did: the pool's blocks before and after, blocks and bytes moved, bytes given back, and how long it took."""

    blocks_before: int
    blocks_after: int
    blocks_moved: int
    bytes_moved: int
    bytes_returned: int
    seconds: float = 0.0


class Rate:
    """Amount a second over what was measured lately, `assumed` until then."""

    DECAY = 0.95

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * self.DECAY + amount
        self._seconds = self._seconds * self.DECAY + seconds

    @property
    def measured(self) -> float:
        """0.0 where nothing was."""
        return self._amount / self._seconds if self._seconds else 0.0

    @property
    def value(self) -> float:
        return self.measured or self._assumed


class History:
    """The rolling window: samples of KV memory, and the lengths of the answers that ended last. `due` is when to sample again."""

    INTERVAL = 0.1
    SAMPLES = 3000
    LENGTHS = 4096

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=self.SAMPLES)
        self.lengths: deque[tuple[int, int]] = deque(maxlen=self.LENGTHS)
        self.due = -math.inf

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.due = sample.time + self.INTERVAL

    def ended(self, sequence: Sequence) -> None:
        if sequence.finish_reason in ("stop", "length"):
            self.lengths.append((sequence.num_prompt, len(sequence.tokens) - sequence.num_prompt))
