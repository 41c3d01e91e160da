"""`octavo bench throughput`: all requests at once, offline; and what continuous batching over paged memory is worth.

Where another way than the engine's own is asked for, the same requests run in every corner asked for (`octavo.bench.corners`), on the
same kernels and the same bytes of KV memory. The sweep asks over which loads the one corner is how much better than the other.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.bench import display, machine, workload
from octavo.bench.corners import BATCHING, FIGURES, MEMORY, Corner, Run, serve, slots
from octavo.bench.machine import Ceilings, Machine, ModelSize
from octavo.bench.workload import Work
from octavo.config import EngineConfig
from octavo.errors import InvalidValueError, shown
from octavo.kv_groups import KVGroups, cut_layers

if TYPE_CHECKING:
    from rich.table import Table

    from octavo import LLM

USUAL = Corner("continuous", "paged")
TRADITIONAL = Corner("static", "reserve")

CONTEXTS = 4
SWEEP_CONTEXTS = (1, 2, 4, 8)
SWEEP_SHORTER = (4, 16)
"""How many times a request is shorter than the context that is reserved for it, on average."""

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8

CLAIMED_RATIO = (10, 23)
CLAIMED_BUSY = {"static": (0.3, 0.4), "continuous": (0.7, 0.9)}
"""What PagedAttention and continuous batching are said to bring."""

COLOURS = {"device": "#d9d9d9", "slots": "#56b4e9", "batch": "#0072b2", "KV memory": "#e69f00"}
"""Of what the busy shares are."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What runs, and on what. left_out: requests that no sequence can hold. context: tokens that `reserve` reserves."""

    dataset: str
    requests: int
    left_out: int
    prompt_tokens: int
    output_tokens: int
    scale: float
    context: int
    kv_memory: int
    kv_bytes_per_token: float
    block_size: int
    max_batch_size: int
    prefill_chunk_size: int | None


@dataclass(kw_only=True)
class Measured:
    """A corner's runs, one a repeat."""

    corner: Corner
    runs: list[Run] = field(default_factory=list)

    def median(self, name: str) -> float:
        return display.summary(getattr(run, name) for run in self.runs)["median"]


@dataclass(kw_only=True)
class Report:
    """All figures of one load."""

    model: str
    dtype: str
    load: Load
    machine: Machine
    size: ModelSize
    corners: list[Measured]
    ceilings: Ceilings | None = None
    peak_rss: int = 0

    def ratio(self, measured: Measured) -> float:
        """Its output tokens a second as a multiple of the first corner's, medians of both."""
        return measured.median("output_tokens_per_s") / self.corners[0].median("output_tokens_per_s")

    def busy(self, run: Run) -> dict[str, float]:
        """Shares of the whole time, in the order of COLOURS; `batch` is of the most sequences that ran at once in any corner."""
        most = max(run.most_rows for one in self.corners for run in one.runs)
        return {
            "device": run.device_busy,
            "slots": run.slot_busy,
            "batch": run.useful_row_seconds / (most * run.seconds),
            "KV memory": run.kv_busy,
        }

    def median_busy(self, measured: Measured, of: str) -> float:
        return display.summary(self.busy(run)[of] for run in measured.runs)["median"]

    def read_rate(self, run: Run) -> float:
        """Bytes of weights and KV memory that the steps need, a second."""
        return (run.steps * self.size.weight_bytes + run.kv_tokens_read * self.load.kv_bytes_per_token) / run.seconds

    def product_rate(self, run: Run) -> float:
        """Operations of the matrix products a second, those of attention left out."""
        products = run.computed_tokens * self.size.body_parameters + run.sampled_rows * self.size.head_parameters
        return 2 * products / run.seconds

    def to_dict(self) -> dict[str, Any]:
        """Every field, and of each corner the ratio, and median, least and most of its figures."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        for measured, corner in zip(self.corners, content["corners"], strict=True):
            rates: dict[str, Callable[[Run], float]] = {"read_rate": self.read_rate, "product_rate": self.product_rate}
            corner["throughput"] = self.ratio(measured)
            corner["summary"] = {name: display.summary(getattr(run, name) for run in measured.runs) for name in FIGURES}
            corner["summary"] |= {name: display.summary(map(rate, measured.runs)) for name, rate in rates.items()}
            corner["busy"] = {of: display.summary(self.busy(run)[of] for run in measured.runs) for of in COLOURS}
        return content


@dataclass(kw_only=True)
class Point:
    """One load of the sweep: how outputs are spread, how many times requests are shorter than the context, contexts the pool holds."""

    spread: str
    shorter: int
    contexts: int
    report: Report

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self) | {"report": self.report.to_dict()}


def run(
    model: str,
    config: EngineConfig,
    *,
    dataset: str = workload.SHARED,
    data: str | None = None,
    requests: int = 64,
    scale: float = 1.0,
    repeats: int = 3,
    warm_up: bool = True,
    batching: str = "continuous",
    memory: str = "paged",
    contexts: Sequence[int] = (),
    sweep: bool = False,
    json: str | None = None,
    out: str | None = None,
) -> None:
    """Measure, and print tables; write JSON to the file `json` (- prints it instead) and a picture to `out`.

    batching, memory: one way, or both. contexts: how many whole contexts KV memory has room for; where none is named and another way
    than the engine's own is asked for, CONTEXTS, and SWEEP_CONTEXTS in a sweep. A sweep is of the two opposite corners unless others
    are asked for, and takes no dataset, data or scale.
    Raises InvalidValueError for a wrong value, OctavoError where a picture is asked for and cannot be drawn.
    """
    corners = [Corner(one, other) for one in _ways("batching", batching, BATCHING) for other in _ways("memory", memory, MEMORY)]
    for name, value in {"repeats": repeats, "requests": requests, "contexts": min(contexts, default=1)}.items():
        if value < 1:
            raise InvalidValueError(f"{name}: {value}; allowed: a whole number from 1")
    sized = config.memory.max_blocks is not None or config.memory.kv_cache_memory != "auto"
    if sized and (contexts or sweep):
        named = "max_blocks" if config.memory.max_blocks is not None else "kv_cache_memory"
        raise InvalidValueError(f"{named}: it sets the KV memory that {'the sweep varies' if sweep else 'contexts sets'}; give one of them")
    if len(contexts) > 1 and not sweep:
        raise InvalidValueError(f"contexts: {shown(list(contexts))}; allowed: one, or several with sweep")
    if sweep and (dataset, data, scale) != (workload.SHARED, None, 1.0):
        raise InvalidValueError("sweep: it makes up its own requests; dataset, data and scale are not for it")
    display.check_picture(out)
    display.check_file("json", json)
    if sweep:
        corners = [TRADITIONAL, USUAL] if corners == [USUAL] else corners
        content: Report | list[Point] = _sweep(model, config, corners, requests, repeats, warm_up, contexts or SWEEP_CONTEXTS)
        shown_as, drawn_as = show_sweep, draw_sweep
    else:
        work = workload.load(dataset, data, requests, scale)
        room = contexts[0] if contexts else CONTEXTS if corners != [USUAL] and not sized else None
        with _open(model, config, room) as opened, display.progress("Measuring", repeats * len(corners)) as done:
            content = opened.measure(work, corners, repeats, warm_up, done, dataset=dataset, scale=scale)
        shown_as, drawn_as = show, draw  # type: ignore[assignment]
    if json is not None:
        display.write_json(content.to_dict() if isinstance(content, Report) else [point.to_dict() for point in content], json)
    if json != "-":
        shown_as(content)  # type: ignore[arg-type]
    if out is not None:
        drawn_as(content, out)  # type: ignore[arg-type]


def _ways(name: str, wanted: str, known: Sequence[str]) -> Sequence[str]:
    if wanted not in (*known, "both"):
        raise InvalidValueError(f"{name}: {wanted!r}; allowed: {', '.join(known)}, both")
    return known if wanted == "both" else [wanted]


@dataclass(kw_only=True)
class _Opened:
    """A loaded model and what is known about it. context: tokens of the longest sequence, were the pool no limit."""

    llm: LLM
    model: str
    context: int
    size: ModelSize

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.llm.close()

    def measure(
        self, work: list[Work], corners: list[Corner], repeats: int, warm_up: bool, done: Callable[[], None], **about: Any
    ) -> Report:
        """Run the corners in turn, `repeats` times."""
        engine, capacity = self.llm.engine, self.llm.capacity
        settings = engine.config.scheduler
        fitting = workload.fitting(work, capacity.longest, capacity.vocab_size)
        if not fitting:
            raise InvalidValueError(
                f"requests: none of {len(work)} fits in {capacity.longest} tokens ({capacity.bound_by}); a larger scale makes them shorter"
            )
        for corner in corners:
            slots(corner, engine, self.context)
        if warm_up:
            serve(engine, USUAL, workload.cut(fitting, settings.max_batch_size, WARM_UP_PROMPT, WARM_UP_TOKENS), self.context)
        measured = [Measured(corner=corner) for corner in corners]
        for _ in range(repeats):
            for one in measured:
                one.runs.append(serve(engine, one.corner, fitting, self.context)[0])
                done()
        load = Load(
            requests=len(fitting),
            left_out=len(work) - len(fitting),
            prompt_tokens=sum(len(one.prompt) for one in fitting),
            output_tokens=sum(one.tokens for one in fitting),
            context=self.context,
            kv_memory=capacity.num_blocks * capacity.block_bytes,
            kv_bytes_per_token=len(capacity.windows) * capacity.block_bytes / capacity.block_size,
            block_size=capacity.block_size,
            max_batch_size=settings.max_batch_size,
            prefill_chunk_size=settings.prefill_chunk_size,
            **about,
        )
        peak = peak_rss()  # before the ceilings are measured, which take memory of their own
        return Report(
            model=self.model,
            dtype=capacity.dtype,
            load=load,
            machine=machine.describe(),
            size=self.size,
            corners=measured,
            ceilings=machine.measure(),
            peak_rss=peak,
        )


def _open(model: str, config: EngineConfig, contexts: int | None) -> _Opened:
    """Load a model, its pool sized to hold so many whole contexts where that is said."""
    from octavo import LLM, models
    from octavo.loading import open_checkpoint
    from octavo.loading.hub import resolve

    path = resolve(model)
    checkpoint = open_checkpoint(path)
    try:
        block_size = config.memory.block_size
        shape = models.find(checkpoint, config.model.model_impl)[0]
        limits = [shape.context]
        if config.model.max_model_len is not None:
            limits.append(config.model.max_model_len)
        if config.memory.max_blocks_per_seq != "auto":
            limits.append(config.memory.max_blocks_per_seq * block_size)
        if contexts is not None:
            windows, _ = cut_layers(shape.windows, min(limits))
            groups = KVGroups(windows, block_size, config.scheduler.prefill_chunk_size)
            blocks = max(2 * len(groups), contexts * groups.most(0, min(limits)))
            config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, max_blocks=blocks))
        llm = LLM(path, config)
        print(f"{model}: {llm.capacity}", file=sys.stderr)
        return _Opened(llm=llm, model=model, context=min(limits), size=machine.model_size(llm, checkpoint))
    finally:
        checkpoint.close()


def _sweep(
    model: str, config: EngineConfig, corners: list[Corner], requests: int, repeats: int, warm_up: bool, contexts: Sequence[int]
) -> list[Point]:
    """The model is loaded anew for each size of the pool."""
    points = []
    with display.progress("Sweeping", len(contexts) * len(SWEEP_SHORTER) * len(workload.SPREADS) * repeats * len(corners)) as done:
        for count in contexts:
            with _open(model, config, count) as opened:
                for shorter in SWEEP_SHORTER:
                    for spread in workload.SPREADS:
                        work = workload.spread(spread, requests, max(1, opened.context // shorter // 2), opened.context)
                        name = f"{spread}, context / {shorter}"
                        report = opened.measure(work, corners, repeats, warm_up, done, dataset=name, scale=1.0)
                        points.append(Point(spread=spread, shorter=shorter, contexts=count, report=report))
    return points


def peak_rss() -> int:
    """Most bytes of memory that this process ever held, loading included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def show(report: Report) -> None:
    """Print the report in tables."""
    console = display.console()
    for line in _notes(report):
        console.print(line, soft_wrap=True)
    console.print(_speed_table(report))
    console.print(_share_table(report))
    for line in _legend(report):
        console.print(f"- {line}", soft_wrap=True)


def _notes(report: Report) -> Iterator[str]:
    load = report.load
    scaled = f", lengths divided by {load.scale:g}" if load.scale != 1 else ""
    yield (
        f"{report.model} ({report.dtype}), {load.dataset}{scaled}: {load.requests:,} requests, {load.prompt_tokens:,} prompt and "
        f"{load.output_tokens:,} generated tokens, all submitted at once; {len(report.corners[0].runs)} repeats, median (least..most)."
    )
    if load.left_out:
        yield f"{load.left_out:,} requests are left out, for no sequence holds so many tokens."
    tokens = load.kv_memory / load.kv_bytes_per_token
    yield (
        f"KV memory: {load.kv_memory:,} bytes, {tokens:,.0f} tokens of {load.kv_bytes_per_token:,.0f} bytes, in blocks of "
        f"{load.block_size}: {tokens / load.context:.3g} whole contexts of {load.context:,}. At most {load.max_batch_size} sequences in a "
        f"step; peak memory of the process {report.peak_rss / 2**20:,.0f} MiB."
    )
    yield str(report.machine)


def _speed_table(report: Report) -> Table:
    table = display.table("Throughput", "seconds", "output tokens/s", "all tokens/s", "ratio", "steps", "useful rows a step", "preempted")
    for one in report.corners:
        runs = one.runs
        table.add_row(
            str(one.corner),
            display.spread((run.seconds for run in runs), ".2f"),
            display.spread(run.output_tokens_per_s for run in runs),
            display.spread(run.total_tokens_per_s for run in runs),
            f"{report.ratio(one):.2f} x",
            display.spread((run.steps for run in runs), ",.0f"),
            display.spread(run.useful_rows_per_step for run in runs),
            display.spread((run.preemptions for run in runs), ",.0f"),
        )
    return table


def _share_table(report: Report) -> Table:
    ceilings = report.ceilings
    table = display.table("Busy, and achieved, %", *COLOURS, "at once", "KV blocks", "GB/s", "%", "GFLOP/s", "%")
    for one in report.corners:
        runs = one.runs
        reads, products = [report.read_rate(run) for run in runs], [report.product_rate(run) for run in runs]
        table.add_row(
            str(one.corner),
            *(display.spread((report.busy(run)[of] for run in runs), ".1f", 100) for of in COLOURS),
            display.spread((run.most_rows for run in runs), ",.0f"),
            display.spread((run.blocks_used for run in runs), ",.0f"),
            display.spread(reads, ".1f", 1e-9),
            display.spread(reads, ".0f", 100 / ceilings.read_bandwidth) if ceilings else "",
            display.spread(products, ".1f", 1e-9),
            display.spread(products, ".0f", 100 / ceilings.product_rate) if ceilings else "",
        )
    return table


def _legend(report: Report) -> Iterator[str]:
    yield (
        "Busy is a share of the whole time. Device: it computes. Slots: a sequence of those that may run at once in this corner does, and "
        "for its own answer, neither padding nor computing anew. Batch: the same, of as many as ran at once in any corner. KV memory: it "
        "holds tokens of such sequences."
    )
    if [one.corner for one in report.corners][:: len(report.corners) - 1 or 1] == [TRADITIONAL, USUAL]:
        low, high = CLAIMED_RATIO
        yield f"Claimed for the last corner against the first: {low} to {high} times, and 70 to 90% busy instead of 30 to 40%."
    if report.ceilings:
        reads, products = report.ceilings.read_bandwidth / 1e9, report.ceilings.product_rate / 1e9
        yield (
            f"Achieved: bytes of weights and KV memory that the steps need, and operations of their matrix products without attention, a "
            f"second; beside what one loop reaches here now: {reads:.1f} GB/s ({report.ceilings.read_how}) and {products:,.0f} GFLOP/s "
            f"({report.ceilings.product_how}). Products of quantized weights are of integers, and may pass 100%."
        )


def show_sweep(points: list[Point]) -> None:
    """Print how much better the last corner is than the first, load by load."""
    console = display.console()
    first, last = points[0].report.corners[0], points[0].report.corners[-1]
    report = points[0].report
    console.print(f"{report.model} ({report.dtype}), {report.load.requests} requests a load; {last.corner} against {first.corner}.")
    console.print(str(report.machine), soft_wrap=True)
    table = display.table(
        f"How many times the throughput of {first.corner} the others have, and how busy batch and KV memory are, %",
        *("contexts in the pool", "output", *(str(one.corner) for one in report.corners[1:])),
        *(f"{of}: {one.corner}" for of in ("batch", "KV memory") for one in (first, last)),
    )
    for point in points:
        corners = point.report.corners
        table.add_row(
            f"requests a {_ordinal(point.shorter)} of the context",
            f"{point.contexts}",
            point.spread,
            *(f"{point.report.ratio(one):.1f} x" for one in corners[1:]),
            *(f"{point.report.median_busy(one, of) * 100:.0f}" for of in ("batch", "KV memory") for one in (corners[0], corners[-1])),
        )
    console.print(table)
    low, high = CLAIMED_RATIO
    holds = [point for point in points if low <= point.report.ratio(point.report.corners[-1])]
    console.print(
        f"- At least {low} times in {len(holds)} of {len(points)} loads"
        + (": " + "; ".join(f"{point.spread}, / {point.shorter}, {point.contexts} contexts" for point in holds) if holds else "")
        + f". The claim is {low} to {high} times.",
        soft_wrap=True,
    )


def _ordinal(number: int) -> str:
    return f"{number}th"


def draw(report: Report, out: str) -> None:
    """Write a picture of the report; its name's ending decides the format."""
    figure = display.figure_class()(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    load = report.load
    figure.suptitle(f"{report.model}, {load.dataset}: {load.requests:,} requests on {load.kv_memory / 2**20:,.0f} MiB of KV memory")
    names = [f"{one.corner.batching}\n{one.corner.memory}" for one in report.corners]
    rates = [display.summary(run.output_tokens_per_s for run in one.runs) for one in report.corners]
    errors = [[rate["median"] - rate["min"] for rate in rates], [rate["max"] - rate["median"] for rate in rates]]
    bars = left.bar(names, [rate["median"] for rate in rates], yerr=errors, capsize=4, color=COLOURS["batch"])
    left.bar_label(bars, [f"{report.ratio(one):.2f} x" for one in report.corners])
    left.set(ylabel="output tokens a second", title="Throughput: median, least and most")
    width = 0.8 / len(COLOURS)
    for place, (of, colour) in enumerate(COLOURS.items()):
        at = [corner + (place - 1.5) * width for corner in range(len(names))]
        right.bar(at, [report.median_busy(one, of) * 100 for one in report.corners], width, color=colour, label=of)
    for band in CLAIMED_BUSY.values():
        right.axhspan(band[0] * 100, band[1] * 100, color="#009e73", alpha=0.12, zorder=0)
    right.set_xticks(range(len(names)), names)
    right.set(ylim=(0, 100), ylabel="share of the whole time, %", title="Busy (bands: 30 to 40 and 70 to 90%, as claimed)")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(COLOURS), frameon=False)
    figure.savefig(out, dpi=120)


def draw_sweep(points: list[Point], out: str) -> None:
    """Write a picture of the last corner's ratio to the first over the pool's size."""
    figure = display.figure_class()(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for shorter in sorted({point.shorter for point in points}):
        for spread in dict.fromkeys(point.spread for point in points):
            some = [point for point in points if (point.shorter, point.spread) == (shorter, spread)]
            ratios = [point.report.ratio(point.report.corners[-1]) for point in some]
            axes.plot([point.contexts for point in some], ratios, "o-", label=f"{spread}, a {_ordinal(shorter)} of the context")
    axes.axhspan(*CLAIMED_RATIO, color="#009e73", alpha=0.12)
    corners = points[0].report.corners
    axes.set(xlabel="whole contexts that KV memory holds", ylabel=f"times the throughput of {corners[0].corner}", ylim=(0, None))
    axes.set(title=f"{corners[-1].corner} against {corners[0].corner} (band: 10 to 23 times, as claimed)")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120)
