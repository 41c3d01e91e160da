"""`octavo bench memory`: what becomes of KV memory under a recorded load, paged and in the traditional ways.

A trace is replayed on a fixed budget of KV memory, every request waiting from the start: by the real scheduler at several block sizes,
and by simulations that reserve for each sequence one contiguous range. Beside it, decode attention is timed at several block sizes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench import attention, contiguous, display, paged, traces
from octavo.bench.usage import Usage
from octavo.config import size
from octavo.errors import InvalidValueError, shown

if TYPE_CHECKING:
    from rich.table import Table

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
KERNEL_BLOCK_SIZES = (4, 16, 64, 128)
USUAL_BLOCK_SIZE = 16

SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Layers, keys and values, heads, their dimension, bfloat16."""

LONG = 131_072
SEQUENCES = 64

COLOURS = {
    "held": "#0072b2",
    "cached": "#56b4e9",
    "reserved": "#e69f00",
    "internal": "#d55e00",
    "external": "#cc79a7",
    "free": "#d9d9d9",
}
"""Parts of the budget, as told apart by most eyes."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to give out memory, and what came of it. ideal_hit_rate: what an endless cache would share of the prompts."""

    name: str
    block_size: int | None
    requests: int
    usage: Usage
    seconds: float
    core: paged.CoreFigures | None = None
    ideal_hit_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is replayed, and on what."""

    dataset: str
    requests: int
    requests_in_trace: int
    prompt_tokens: int
    generated_tokens: int
    longest: int
    kv_memory: int
    kv_bytes_per_token: int
    budget_tokens: int
    context: int
    context_asked_for: bool
    max_batch_size: int
    prefill_chunk_size: int


@dataclass(kw_only=True)
class Report:
    """All figures. ways: the traditional ones first, that of the whole context before all.

    whole: the whole trace at one block size, where the others are of its beginning.
    """

    load: Load
    ways: list[Way] = field(default_factory=list)
    whole: Way | None = None
    short_attention: list[attention.AttentionFigures] = field(default_factory=list)
    long_attention: list[attention.AttentionFigures] = field(default_factory=list)
    long_sequence: paged.LongSequence | None = None

    def throughput(self, way: Way) -> float | None:
        """Tokens a step, as a multiple of the first way's; None where that served nothing."""
        base = self.ways[0].usage.tokens_per_step
        return way.usage.tokens_per_step / base if base else None

    def to_dict(self) -> dict[str, Any]:
        ways = [asdict(way) | {"throughput": self.throughput(way)} for way in self.ways]
        return asdict(self) | {"ways": ways}


def run(
    *,
    dataset: str = "azure-conv",
    data: str | None = None,
    requests: int | str | None = None,
    kv_memory: int | str = "4GiB",
    kv_bytes_per_token: int = SMOLLM2_BYTES_PER_TOKEN,
    context: int | None = None,
    max_batch_size: int = 1024,
    prefill_chunk_size: int = 8192,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    kernels: bool = True,
    out: str | None = None,
    json: bool = False,
) -> None:
    """Replay, and print tables, or JSON; draw a picture where `out` names its file.

    requests: how many, or "all"; None takes as many as replay in about a minute, and the whole trace once more at block size 16.
    context: what the model's reservation is for; None is the least power of two that holds the trace's longest request.
    Raises InvalidValueError for a wrong value, OctavoError where a picture is asked for and cannot be drawn.
    """
    display.check_picture(out)
    everything = traces.load(dataset, data)
    count = _count(requests, traces.find(dataset).sweep)
    chosen = everything[:count]
    if not chosen:
        raise InvalidValueError(f"dataset: {dataset} holds no requests")
    memory = _bytes(kv_memory)
    for name, value in {
        "kv_bytes_per_token": kv_bytes_per_token,
        "max_batch_size": max_batch_size,
        "prefill_chunk_size": prefill_chunk_size,
        "context": 1 if context is None else context,
    }.items():
        if value < 1:
            raise InvalidValueError(f"{name}: {value}; allowed: a whole number from 1")
    longest = max(len(request.prompt) + len(request.answer) for request in everything)
    load = Load(
        dataset=dataset,
        requests=len(chosen),
        requests_in_trace=len(everything),
        prompt_tokens=sum(len(request.prompt) for request in chosen),
        generated_tokens=sum(len(request.answer) for request in chosen),
        longest=longest,
        kv_memory=memory,
        kv_bytes_per_token=kv_bytes_per_token,
        budget_tokens=memory // kv_bytes_per_token,
        context=context or contiguous.next_power_of_two(longest),
        context_asked_for=context is not None,
        max_batch_size=max_batch_size,
        prefill_chunk_size=prefill_chunk_size,
    )
    report = measure(load, chosen, everything if requests is None else chosen, block_sizes, kernels)
    if json:
        display.write_json(report.to_dict(), "-")
    else:
        show(report)
    if out is not None:
        draw(report, out)


def measure(
    load: Load,
    chosen: list[traces.TracedRequest],
    everything: list[traces.TracedRequest],
    block_sizes: Sequence[int] = BLOCK_SIZES,
    kernels: bool = True,
) -> Report:
    """Replay in all ways, and time the kernels; `everything` is replayed once at the usual block size where it is more than is chosen."""
    report = Report(load=load)
    with display.progress("Replaying", 3 + len(block_sizes) + (len(everything) > len(chosen)) + 2 * kernels) as done:
        for name, reserve in contiguous.reservations(load.context).items():
            report.ways.append(_contiguous_way(load, chosen, name, reserve))
            done()
        for block_size in block_sizes:
            report.ways.append(_paged_way(load, chosen, block_size))
            done()
        if len(everything) > len(chosen):
            report.whole = _paged_way(load, everything, USUAL_BLOCK_SIZE)
            done()
        report.long_sequence = paged.long_sequence(LONG, bytes_per_token=load.kv_bytes_per_token, block_size=USUAL_BLOCK_SIZE)
        if kernels:
            report.short_attention = attention.measure(attention.lengths(SEQUENCES), KERNEL_BLOCK_SIZES)
            done()
            report.long_attention = attention.measure([LONG], KERNEL_BLOCK_SIZES)
            done()
    return report


def _contiguous_way(load: Load, requests: list[traces.TracedRequest], name: str, reserve: contiguous.Reserve) -> Way:
    began = time.perf_counter()
    usage = contiguous.replay(
        requests,
        budget=load.budget_tokens,
        reserve=reserve,
        context=load.context,
        max_batch_size=load.max_batch_size,
        prefill_chunk_size=load.prefill_chunk_size,
    )
    return Way(name=name, block_size=None, requests=len(requests), usage=usage, seconds=time.perf_counter() - began)


def _paged_way(load: Load, requests: list[traces.TracedRequest], block_size: int) -> Way:
    usage, core = paged.replay(
        requests,
        kv_bytes=load.kv_memory,
        bytes_per_token=load.kv_bytes_per_token,
        block_size=block_size,
        max_batch_size=load.max_batch_size,
        prefill_chunk_size=load.prefill_chunk_size,
    )
    return Way(
        name=f"blocks of {block_size}",
        block_size=block_size,
        requests=len(requests),
        usage=usage,
        seconds=core.seconds,
        core=core,
        ideal_hit_rate=traces.ideal_share(requests, block_size) if traces.find(load.dataset).has_prefixes else None,
    )


def show(report: Report) -> None:
    """Print the report in tables."""
    console = display.console()
    load = report.load
    part = "" if load.requests == load.requests_in_trace else f" of {load.requests_in_trace:,}"
    console.print(
        f"[bold]{load.dataset}[/]: {load.requests:,}{part} requests, {load.prompt_tokens:,} prompt and {load.generated_tokens:,} generated "
        f"tokens, on {load.kv_memory / 2**30:.4g} GiB of KV memory: {load.budget_tokens:,} tokens of {load.kv_bytes_per_token:,} bytes.",
        soft_wrap=True,
    )
    for line in _notes(report):
        console.print(f"- {line}", soft_wrap=True)
    console.print(_usage_table(report))
    console.print(_cost_table(report))
    if report.short_attention:
        console.print(_attention_table(report))
    for line in _closing(report):
        console.print(f"- {line}", soft_wrap=True)


def _notes(report: Report) -> Iterator[str]:
    load = report.load
    rule = (
        "as asked for"
        if load.context_asked_for
        else f"the least power of two that holds the trace's longest request, {load.longest:,} tokens"
    )
    yield f"The whole context is {load.context:,} tokens: {rule}."
    yield (
        "All requests wait from the start, in the trace's order. Shares of the budget and sequences at once are averages over the steps "
        "after which some still wait."
    )
    yield (
        f"A step gives each decoding sequence one token, and prompts {load.prefill_chunk_size:,} together; at most {load.max_batch_size:,} "
        "sequences run. Throughput is generated tokens a step: what it would be if all steps took equally long."
    )
    for way in report.ways:
        if way.usage.refused:
            yield f"{way.name}: {way.usage.refused:,} of {way.requests:,} requests are refused, for they never fit."
        if way.usage.cut:
            yield f"{way.name}: {way.usage.cut:,} answers end early, at the context."
    if any(way.usage.steps_averaged >= way.usage.steps > 0 for way in report.ways):
        yield "Where all requests fit at once, averages are over all steps; take less --kv-memory to see it run out."


def _usage_table(report: Report) -> Table:
    columns = (*COLOURS, "at once: mean", "most", "steps", "tokens a step", "throughput")
    table = display.table("Where the memory goes, % of the budget", *columns)
    for way in report.ways:
        usage, throughput = way.usage, report.throughput(way)
        table.add_row(
            way.name,
            *(f"{getattr(usage, part) * 100:.1f}" for part in COLOURS),
            f"{usage.resident_mean:.1f}",
            f"{usage.resident_max:,}",
            f"{usage.steps:,}",
            f"{usage.tokens_per_step:.1f}",
            "" if throughput is None else f"{throughput:.2f} x",
            end_section=way is report.ways[2],
        )
    return table


def _cost_table(report: Report) -> Table:
    has_ideal = any(way.ideal_hit_rate is not None for way in report.ways)
    table = display.table(
        "What paging costs: memory of the mapping, and the core's own time, in microseconds a generated token and a token of any kind",
        "mapping, MiB",
        "% of budget",
        "preempted",
        "recomputed",
        "shared, %",
        *(["ideally, %"] * has_ideal),
        "evicted",
        "us generated",
        "us any",
        "alloc P99, us",
        "replay, s",
    )
    for way in [*report.ways, *filter(None, [report.whole])]:
        core = way.core
        if core is None:
            continue
        table.add_row(
            f"{way.name}, whole trace" if way is report.whole else way.name,
            f"{core.mapping_bytes / 2**20:.2f}",
            f"{core.mapping_share * 100:.3f}",
            f"{core.preemptions:,}",
            f"{core.recomputed_tokens:,}",
            f"{core.hit_rate * 100:.1f}",
            *(["" if way.ideal_hit_rate is None else f"{way.ideal_hit_rate * 100:.1f}"] * has_ideal),
            f"{core.evicted_blocks:,}",
            f"{core.core_us_per_generated_token:.2f}",
            f"{core.core_us_per_token:.2f}",
            f"{core.allocation_p99_us:.1f}",
            f"{way.seconds:.1f}",
        )
    return table


def _attention_table(report: Report) -> Table:
    some = report.short_attention[0]
    about = f"{some.sequences} of about {some.tokens // some.sequences:,} tokens: median"
    title = f"Decode attention, us a layer ({some.backend}, {some.threads} threads)"
    table = display.table(title, about, "best", f"1 of {report.long_attention[0].tokens:,} tokens: median", "best")
    for short, long in zip(report.short_attention, report.long_attention, strict=True):
        figures = (short.layer_us, short.layer_us_best, long.layer_us, long.layer_us_best)
        table.add_row(f"blocks of {short.block_size}", *(f"{figure:,.0f}" for figure in figures))
    return table


def _closing(report: Report) -> Iterator[str]:
    long = report.long_sequence
    if long is not None:
        yield (
            f"One sequence of {long.tokens:,} tokens is {long.blocks:,} blocks of {long.block_size}. The core takes "
            f"{long.prefill_seconds:.3f} s for its prompt in chunks of {long.prefill_chunk_size} ({long.prefill_step_us:.0f} us each) and "
            f"{long.decode_step_us:.1f} us for a decode step at its end ({long.decode_step_us_best:.1f} at best); its tables and index are "
            f"{long.mapping_bytes / 2**20:.2f} MiB, {long.mapping_share * 100:.3f}% of its KV memory."
        )
    if report.whole is not None and report.whole.core is not None:
        core, usage = report.whole.core, report.whole.usage
        yield (
            f"The whole trace, {report.whole.requests:,} requests with {usage.generated_tokens:,} generated tokens, takes "
            f"{usage.steps:,} steps and {report.whole.seconds:.1f} s to replay at block size {USUAL_BLOCK_SIZE}, "
            f"{core.core_seconds:.1f} of them the core's."
        )


def draw(report: Report, out: str) -> None:
    """Write a picture of the report; its name's ending decides the format."""
    figure = display.figure_class()(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    load = report.load
    figure.suptitle(f"{load.dataset}: {load.requests:,} requests on {load.kv_memory / 2**30:.4g} GiB of KV memory")
    names, begins = [way.name for way in report.ways], [0.0] * len(report.ways)
    for part, colour in COLOURS.items():
        shares = [getattr(way.usage, part) * 100 for way in report.ways]
        left.barh(names, shares, left=begins, color=colour, label=part)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    left.invert_yaxis()
    left.set(xlim=(0, 100), xlabel="share of KV memory, %, average while requests wait", title="Where the memory goes")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(COLOURS), frameon=False)

    sizes = [str(way.block_size) for way in report.ways if way.core]
    sequences = [way.usage.resident_mean for way in report.ways if way.core]
    mapping = [way.core.mapping_share * 100 for way in report.ways if way.core]
    (at_once,) = right.plot(sizes, sequences, "o-", color=COLOURS["held"], label="sequences at once (mean)")
    base = right.axhline(report.ways[0].usage.resident_mean, color="#555555", linestyle="--", label=f"the same, {report.ways[0].name}")
    right.set(xlabel="block size, tokens", ylabel="sequences at once", title="What the block size trades", ylim=(0, None))
    other = right.twinx()
    (mapped,) = other.plot(sizes, mapping, "s-", color=COLOURS["internal"], label="mapping memory")
    target = other.axhline(1.0, color=COLOURS["internal"], linestyle=":", label="mapping memory's target, below 1%")
    other.set(ylabel="mapping memory, % of KV memory", yscale="log")
    lines = [at_once, base, mapped, target]
    right.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
    figure.savefig(out, dpi=120)


def _count(requests: int | str | None, usual: int) -> int | None:
    """How many requests to replay, None for all."""
    if requests is None or requests == "all":
        return usual if requests is None else None
    try:
        count = int(requests)
    except ValueError:
        count = 0
    if count < 1:
        raise InvalidValueError(f"requests: {shown(requests)}; allowed: a whole number from 1, or all")
    return count


def _bytes(text: int | str) -> int:
    try:
        count: int = size().parse(int(text) if str(text).isdecimal() else text)
    except ValueError:
        raise InvalidValueError(f"kv_memory: {shown(text)}; allowed: {size().allowed}") from None
    return count
