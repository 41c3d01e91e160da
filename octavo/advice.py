"""What to change about KV memory, and why: the figures of a record, each held against what is healthy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from octavo.core.stats import Record, Sample

LEAST_UTILIZED, MOST_UTILIZED, WANTED_UTILIZATION = 0.70, 0.85, 0.80
MOST_FRAGMENTED, WANTED_FRAGMENTATION = 0.20, 0.10
SLOWEST_ALLOCATION = 0.001
MOST_MAPPING = 0.01
MOST_MISSED = 0.05
QUEUED = 0.10  # share of the time; a moment's queue is no reason for a larger batch
IDLE_CEILING = 4  # times the peak
FITS = 1.05  # times the prediction; what is measured beyond it is not chance
ASSUMED_COPY_RATE = 4e9
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GIB, MIB = 2**30, 2**20

Severity = Literal["change", "consider", "fine"]


@dataclass(frozen=True)
class Advice:
    """One figure and what follows from it.

    setting: the configuration key to change, None where there is none to change; `value` is spelled as the configuration spells it.
    A setting has the same value wherever it is named in one list.
    """

    setting: str | None
    value: int | str | None
    figure: str
    reason: str
    severity: Severity


def advise(record: Record) -> list[Advice]:
    """A line for each figure, those that are healthy included. Times under load only count, where the record has samples of it."""
    load = _measure(record)
    if load is None and not record.lengths:
        return [Advice(None, None, "no load yet", "Nothing ran while the record was made, so there is nothing to judge yet.", "fine")]
    sizes = _BlockSizes(record, load)
    lines = [
        _utilization(record, load, sizes),
        _fragmentation(load, sizes),
        _allocation(record, load, sizes),
        _mapping(sizes),
        _preemptions(record, load),
        *_recomputation(record, load),
        _prefix_hits(record),
        _next_gib(record, load),
    ]
    ceilings = [line.value for line in lines if line.setting == "kv_cache_memory" and isinstance(line.value, int)]
    spelled: dict[str | None, int | str] = {"kv_cache_memory": _size(max(ceilings))} if ceilings else {}
    return [replace(line, value=spelled.get(line.setting, line.value)) for line in lines]


def predict_fragmentation(lengths: Sequence[tuple[int, int]], block_size: int) -> float:
    """Share of the slots of used blocks that answers of these (prompt, generated) lengths leave empty, no block being shared.

    An answer is counted one step at each length that it stands at, which starts with its prompt and ends before its last token: that
    one is reported and never stored.
    """
    slots = tokens = 0
    for prompt, generated in lengths:
        last = prompt + max(1, generated) - 1
        slots += _slots_up_to(last, block_size) - _slots_up_to(prompt - 1, block_size)
        tokens += (prompt + last) * (last - prompt + 1) // 2
    return 1 - tokens / slots if slots else 0.0


def _slots_up_to(length: int, block_size: int) -> int:
    """Slots of the blocks that hold 1 token, 2 tokens, ... `length` tokens, summed up."""
    full, rest = divmod(length, block_size)
    return block_size * (block_size * full * (full + 1) // 2 + rest * (full + 1))


@dataclass(frozen=True)
class _Load:
    """KV memory while sequences ran: blocks and sequences as means over time, then peaks.

    Shares are made of these means, not averaged themselves, so that hours with one short sequence do not outweigh the rush.
    queued: share of the time that requests waited for a place in a full batch. preemptions: of the window.
    """

    total: float
    used: float
    unused_slots: float
    running: float
    queued: float
    peak_used: int
    peak_held: int
    peak_cached: int
    peak_waiting: int
    peak_demand: int
    preemptions: int

    @property
    def blocks_per_sequence(self) -> float:
        return max(self.used, 1.0) / max(self.running, 1.0)


def _measure(record: Record) -> _Load | None:
    """Each sample holds until the next. Without samples under load the snapshot stands for them, where blocks are used in it."""
    stats, samples = record.stats, record.samples
    spans = [max(0.0, later.time - sample.time) for sample, later in pairwise(samples)]
    loaded = [(sample, span) for sample, span in zip(samples, [*spans, 0.0], strict=False) if sample.running > 0]
    if not loaded and (stats.running or stats.blocks.used):
        blocks = stats.blocks
        unused = round(stats.internal_fragmentation * blocks.used * record.block_size)
        loaded = [(Sample(0.0, blocks.total, blocks.cached, blocks.used, unused, stats.running, stats.waiting, stats.preemptions), 1.0)]
    if not loaded:
        return None
    whole = sum(span for _, span in loaded)
    weights = [span / whole if whole else 1 / len(loaded) for _, span in loaded]
    seen = [sample for sample, _ in loaded]

    def mean(values: list[int]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    return _Load(
        total=mean([sample.total for sample in seen]),
        used=mean([sample.used for sample in seen]),
        unused_slots=mean([sample.unused_slots for sample in seen]),
        running=mean([sample.running for sample in seen]),
        queued=mean([int(sample.waiting > 0 and sample.running >= 0.9 * record.max_batch_size) for sample in seen]),
        peak_used=max(sample.used for sample in seen),
        peak_held=max(sample.used + sample.cached for sample in seen),
        peak_cached=max(sample.cached for sample in seen),
        peak_waiting=max(sample.waiting for sample in seen),
        peak_demand=max(sample.running + sample.waiting for sample in seen),
        preemptions=max(0, samples[-1].preemptions - samples[0].preemptions) if samples else stats.preemptions,
    )


class _BlockSizes:
    """What each block size would cost, and the one to have.

    Both costs pull at one setting, so one limit settles them: the wanted size is the largest, or the smallest that heals the mapping,
    of those predicted to leave less than a tenth empty. Following the advice therefore never leads to its opposite.

    Shared blocks have no empty slots and are counted once, which multiplies the empty slots per filled one by a factor that does not
    depend on the size. So what was measured at the present size scales the prediction for all.
    """

    def __init__(self, record: Record, load: _Load | None) -> None:
        self.present = present = record.block_size
        self.ratio = record.stats.block_table_ratio
        sizes = sorted({*BLOCK_SIZES, present})
        shares = {size: predict_fragmentation(record.lengths, size) for size in sizes}
        empty = {size: share / (1 - share) for size, share in shares.items()}  # slots per filled one
        number = len(record.lengths)
        self.source, self.scaled = f"The lengths of {number:,} answer{'s' * (number != 1)} predict", ""
        self.measured, factor = shares[present], 1.0
        if load:
            self.measured = load.unused_slots / max(load.used * present, 1.0)
            filled = max(load.used * present - load.unused_slots, 1.0)
            if not record.lengths or (present > 1 and not empty[present]):
                self.source = "The mean length predicts"
                empty = {size: record.groups * (size - 1) / 2 * max(load.running, 1.0) / filled for size in sizes}
            if empty[present] and load.unused_slots / filled > FITS * empty[present]:
                factor = load.unused_slots / filled / empty[present]
                self.scaled = f", scaled to the {_percent(self.measured)} measured,"
        self.unscaled = empty[present] / (1 + empty[present])
        self.empty = {size: factor * slots for size, slots in empty.items()}
        self.predicted = {size: slots / (1 + slots) for size, slots in self.empty.items()}
        self.largest = max(size for size in BLOCK_SIZES if self.predicted[size] < WANTED_FRAGMENTATION)
        self.wanted = self._choose()
        self.severity: Severity = "change" if load else "consider"

    def _choose(self) -> int:
        if self.measured > MOST_FRAGMENTED:
            return min(self.largest, self.present)
        if self.ratio > MOST_MAPPING and self.largest > self.present:
            enough = (size for size in BLOCK_SIZES if self.present < size <= self.largest and self.mapping(size) <= MOST_MAPPING)
            return next(enough, self.largest)
        return self.present

    def mapping(self, size: int) -> float:
        """Mapping memory over KV memory: there are half as many blocks to map when they are twice as large."""
        return self.ratio * self.present / size

    @property
    def shrinkage(self) -> float:
        """What the wanted size leaves of the memory that used blocks take now."""
        return (1 + self.empty[self.wanted]) / (1 + self.empty[self.present])

    def prediction(self, size: int) -> str:
        """The prediction for the present size, to be held against what was measured, and the one for this size."""
        present = f"{_percent(self.unscaled)} at {self.present}"
        return f"{self.source} {present} and{self.scaled} {_percent(self.predicted[size])} at {size}."

    @property
    def rescaled(self) -> str:
        """A new size changes what the settings that count blocks are worth."""
        times = f"divide them by {self.wanted // self.present}" if self.wanted > self.present else f"times {self.present // self.wanted}"
        return f"max_blocks and max_blocks_per_seq, where set, count blocks: {times}."


def _utilization(record: Record, load: _Load | None, sizes: _BlockSizes) -> Advice:
    blocks = record.stats.blocks
    if load is None:
        return _fine(f"utilization {_percent(record.stats.utilization)}", "Nothing ran while samples were taken, so it is not judged.")
    ceiling = _ceiling(record)
    share, of_ceiling = load.used / max(load.total, 1.0), load.used / ceiling
    elastic = f" ({_percent(of_ceiling)} of the ceiling)" if _percent(of_ceiling) != _percent(share) else ""
    figure = f"utilization {_percent(share)}{elastic}"
    batch = int(WANTED_UTILIZATION * ceiling / (load.blocks_per_sequence * sizes.shrinkage))
    if of_ceiling > MOST_UTILIZED:
        return _memory_limit(record, load, sizes, figure, batch)
    larger = min(batch, load.peak_demand, 65536)
    if of_ceiling < LEAST_UTILIZED and load.queued >= QUEUED and larger > record.max_batch_size:
        waited = f"Requests waited for a place among {record.max_batch_size} for {_percent(load.queued)} of the time"
        if load.preemptions > 0:
            reason = f"{waited}; but blocks ran out at times, and a larger batch asks for more of them."
            return Advice(None, None, figure, reason, "consider")
        what = f"bring the mean to {WANTED_UTILIZATION:.0%}" if larger == batch else "are all that ever asked at once"
        reason = f"{waited} while memory was free. Each takes {load.blocks_per_sequence:.1f} blocks, and {larger} {what}."
        return Advice("max_batch_size", larger, figure, reason, "change" if share < LEAST_UTILIZED else "consider")
    if share > MOST_UTILIZED:
        return _fine(figure, f"The pool grows ahead of need: it has {blocks.total:,} blocks now, and may have {ceiling:,}.")
    if share >= LEAST_UTILIZED:
        return _fine(figure, f"Between {LEAST_UTILIZED:.0%} and {MOST_UTILIZED:.0%}, memory is used and has room for bursts.")
    return _light_load(record, load, figure)


def _memory_limit(record: Record, load: _Load, sizes: _BlockSizes, figure: str, batch: int) -> Advice:
    """Blocks that waste less come before more memory, which comes before fewer sequences."""
    used = load.used * sizes.shrinkage
    if sizes.wanted < sizes.present and used <= MOST_UTILIZED * _ceiling(record):
        reason = f"Memory is the limit, and blocks of {sizes.wanted} alone bring it to {_percent(used / _ceiling(record))}."
        return Advice("block_size", sizes.wanted, figure, reason, "change")
    wanted = math.ceil(used / WANTED_UTILIZATION) * record.block_bytes
    smaller = f", and so would max_batch_size {batch}" if 1 <= batch < min(load.running, record.max_batch_size) else ""
    reason = f"Memory is the limit: {_size(wanted)} would bring the mean to {WANTED_UTILIZATION:.0%}{smaller}."
    return Advice("kv_cache_memory", wanted, figure, reason, "change")


def _light_load(record: Record, load: _Load, figure: str) -> Advice:
    """Memory may go to others where much of it was never used; what the prefix index keeps counts as used if it was ever hit."""
    ceiling, peak = _ceiling(record), max(load.peak_used, record.stats.blocks.peak_used)
    reason = f"The load is small: {peak:,} of {ceiling:,} blocks at the peak."
    cached = load.peak_cached if record.stats.cached_tokens else 0
    needed = max(2 * peak + cached, record.groups * math.ceil(record.longest / record.block_size)) * record.block_bytes
    spare = ceiling > IDLE_CEILING * peak and 2 * MIB * math.ceil(needed / MIB) <= ceiling * record.block_bytes
    if spare and not _wants_more(record, load):
        return Advice("kv_cache_memory", needed, figure, f"{reason} {_size(needed)} would do, and leave the rest to others.", "consider")
    return _fine(figure, f"{reason} It is not memory that limits it.")


def _fragmentation(load: _Load | None, sizes: _BlockSizes) -> Advice:
    present, wanted = sizes.present, sizes.wanted
    figure = f"internal fragmentation {_percent(sizes.measured)}{'' if load else ' (predicted)'}"
    if wanted < present:
        cost = f"Mapping memory goes from {_percent(sizes.ratio)} to {_percent(sizes.mapping(wanted))}: smaller blocks are more to map."
        reason = f"{sizes.prediction(wanted)} {cost} {sizes.rescaled}"
        return Advice("block_size", wanted, figure, reason, sizes.severity)
    if sizes.measured > MOST_FRAGMENTED:
        return Advice(None, None, figure, f"No block size leaves less empty than {present}.", "consider")
    if wanted > present:
        return _fine(figure, f"{sizes.prediction(wanted)} That leaves room for larger blocks.")
    predicted = f" {sizes.prediction(2 * present)}" if 2 * present in sizes.predicted else ""
    return _fine(figure, f"Up to {MOST_FRAGMENTED:.0%} of the slots may be empty.{predicted}")


def _allocation(record: Record, load: _Load | None, sizes: _BlockSizes) -> Advice:
    blocks, seconds, present = record.stats.blocks, record.stats.allocation_p99_s, record.prealloc_blocks
    figure, limit = f"allocation P99 {_milliseconds(seconds)}", _milliseconds(SLOWEST_ALLOCATION)
    scale = sizes.present / sizes.wanted
    severity: Severity = "fine"
    reason = f"Up to {limit}, requests do not wait for blocks."
    if seconds > SLOWEST_ALLOCATION:
        peak = max(load.peak_held if load else 0, blocks.used + blocks.cached)
        wanted = min(64 * math.ceil(max(peak * scale, 1) / 64), math.ceil(_ceiling(record) * scale))
        if wanted > present * scale:
            held = f"Above {limit}: {peak:,} blocks were held at once, and {present:,} are committed at start"
            of_size = f" of the new size, {sizes.wanted}," if scale != 1 else ""
            reason = f"{held}. {wanted:,}{of_size} spare the pool its growth under load."
            return Advice("prealloc_blocks", wanted, figure, reason, "change")
        covered = f"Above {limit}, though the {present:,} blocks committed at start cover the {peak:,} held at once"
        reason, severity = f"{covered}. Look for a busy machine, or memory that is swapped out.", "consider"
    if present and scale != 1:
        wanted = max(1, round(present * scale))
        reason = f"{reason} Of the new block size, {sizes.wanted}, {wanted:,} take the same memory at start."
        return Advice("prealloc_blocks", wanted, figure, reason, sizes.severity)
    return Advice(None, None, figure, reason, severity)


def _mapping(sizes: _BlockSizes) -> Advice:
    present, wanted = sizes.present, sizes.wanted
    figure = f"mapping memory {_percent(sizes.ratio)}"
    if sizes.ratio <= MOST_MAPPING:
        return _fine(figure, f"Up to {_percent(MOST_MAPPING)} of KV memory, tables and index cost next to nothing.")
    if wanted > present:
        left = "" if sizes.mapping(wanted) <= MOST_MAPPING else f", still above {_percent(MOST_MAPPING)}; larger blocks would waste more"
        reason = f"Blocks of {present} are many to map; at {wanted} it takes {_percent(sizes.mapping(wanted))}{left}."
        return Advice("block_size", wanted, figure, f"{reason} {sizes.prediction(wanted)} {sizes.rescaled}", sizes.severity)
    if wanted < present:
        reason = f"Larger blocks would lower it, but internal fragmentation costs more: see there, block_size {wanted}."
    elif present == BLOCK_SIZES[-1]:
        reason = "The blocks are as large as they can be."
    else:
        reason = f"Larger blocks would lower it, and waste more than they save. {sizes.prediction(2 * present)}"
    return Advice(None, None, figure, reason, "consider")


def _preemptions(record: Record, load: _Load | None) -> Advice:
    stats = record.stats
    figure = f"preemptions {stats.preemptions:,}"
    if stats.preemptions <= 0:
        return _fine(figure, "Blocks never ran out.")
    recently = load.preemptions if load else 0
    lost = f"; {stats.recomputed_tokens:,} tokens were computed again{_seconds(record, stats.recomputed_tokens)}"
    reason = f"Blocks ran out, {recently:,} times in the window. {stats.swap_outs:,} sequences were swapped out{lost}."
    return Advice("kv_cache_memory", _with_next_gib(record), figure, reason, "change" if recently > 0 else "consider")


def _recomputation(record: Record, load: _Load | None) -> list[Advice]:
    """Whether swapping would have cost less than computing again what preemption dropped; no line where nothing was dropped."""
    stats, tokens = record.stats, record.stats.recomputed_tokens
    if tokens <= 0 or stats.prefill_rate <= 0:
        return []
    seconds, held = tokens / stats.prefill_rate, record.groups * tokens * record.block_bytes / record.block_size
    rate = stats.copy_rate or ASSUMED_COPY_RATE
    swapping, figure = 2 * held / rate, f"recomputation {_short(seconds)} s"
    source = "" if stats.copy_rate else " (assumed: none was measured)"
    cost = f"Copying the {_size(math.ceil(held))} out and back takes {_short(swapping)} s at {_short(rate / 1e9)} GB/s{source}"
    if seconds <= swapping:
        return [_fine(figure, f"{cost}: computing again is cheaper.")]
    victims = max(1, stats.preemptions - stats.swap_outs)
    at_once = min(victims, max(1, load.peak_waiting if load else 1))
    wanted, present = math.ceil(held / victims * at_once), stats.blocks.swap_total * record.block_bytes
    if _size(wanted) == _size(present) or wanted <= present:
        return [_fine(figure, f"{cost}, and swap_space has room: the engine weighs both, victim by victim.")]
    reason = f"{cost}. {_size(wanted)} hold {at_once:,} preempted sequences of the mean length, where KV memory itself cannot grow."
    return [Advice("swap_space", _size(wanted), figure, reason, "consider")]


def _prefix_hits(record: Record) -> Advice:
    stats = record.stats
    if stats.prompt_tokens <= 0:
        return _fine("prefix hits 0%", "No prompt has been admitted.")
    figure = f"prefix hits {_percent(stats.cached_tokens / stats.prompt_tokens)}"
    reason = f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens were shared instead of computed"
    if stats.missed_tokens <= 0:
        return _fine(figure, f"{reason}; one more GiB would not have kept others.")
    reason = f"{reason}; one more GiB would have kept another {stats.missed_tokens:,}{_seconds(record, stats.missed_tokens)}."
    if stats.missed_tokens > MOST_MISSED * stats.prompt_tokens:
        return Advice("kv_cache_memory", _with_next_gib(record), figure, reason, "change")
    return _fine(figure, reason)


def _next_gib(record: Record, load: _Load | None) -> Advice:
    """What more memory buys, in the units that the reader thinks in. Whether to have it, other lines say."""
    blocks = GIB // record.block_bytes
    resident = f", or {blocks / load.blocks_per_sequence:,.0f} more sequences like those that ran" if load and load.running else ""
    saved = record.stats.missed_tokens + record.stats.recomputed_tokens
    spared = f" It would have spared computing up to {saved:,} tokens{_seconds(record, saved)}." if saved > 0 else ""
    tokens = blocks * record.block_size // record.groups
    return _fine(f"next GiB {blocks:,} blocks", f"It holds {tokens:,} tokens more{resident}.{spared}")


def _wants_more(record: Record, load: _Load | None) -> bool:
    return "kv_cache_memory" in (_preemptions(record, load).setting, _prefix_hits(record).setting)


def _with_next_gib(record: Record) -> int:
    return _ceiling(record) * record.block_bytes + GIB


def _ceiling(record: Record) -> int:
    return max(record.stats.blocks.ceiling, record.stats.blocks.total, 1)


def _fine(figure: str, reason: str) -> Advice:
    return Advice(None, None, figure, reason, "fine")


def _size(count: int) -> str:
    """Bytes as the configuration spells them, rounded up to whole MiB."""
    mebibytes = math.ceil(count / MIB)
    return f"{mebibytes // 1024}GiB" if mebibytes and mebibytes % 1024 == 0 else f"{mebibytes}MiB"


def _percent(share: float) -> str:
    return f"{_short(100 * share)}%"


def _milliseconds(seconds: float) -> str:
    return f"{_short(1000 * seconds)} ms"


def _seconds(record: Record, tokens: int) -> str:
    rate = record.stats.prefill_rate
    return f", {_short(tokens / rate)} s of prefill at {_short(rate)} tokens/s" if rate > 0 else ""


def _short(value: float) -> str:
    """Three digits that matter, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.0001 else "0"
