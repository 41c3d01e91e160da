"""`octavo bench serve`: how a server of OpenAI's API fares under load, whichever it is, as its clients see it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench import display, workload
from octavo.bench.serve_client import Call, Client
from octavo.bench.serve_load import CLOSED, LATENCIES, PERCENTILES, Load, Objectives, Run, fresh, measure, percentiles, texts
from octavo.bench.workload import Work
from octavo.errors import InvalidValueError, OctavoError

if TYPE_CHECKING:
    from rich.table import Table

URL = "http://127.0.0.1:8000"
ARRIVALS = ("poisson", "constant", "trace")

VOCABULARY = 49_152
"""SmolLM2's."""

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8

COLOURS = {50: "#0072b2", 99: "#e69f00"}


@dataclass(kw_only=True)
class Report:
    """All measurements, and what they were of. left_out: requests that no sequence can hold."""

    url: str
    model: str
    dataset: str
    scale: float
    requests: int
    left_out: int
    prompt_tokens: int
    output_tokens: int
    text: bool
    seed: int
    objectives: Objectives
    runs: list[Run] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, and of each answer its own."""
        about = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name not in ("objectives", "runs")}
        content: dict[str, Any] = about | {"objectives_ms": self.objectives.given, "runs": []}
        for run in self.runs:
            began = min(answer.due for answer in run.answers)
            answers = [
                {
                    "due_s": answer.due - began,
                    "sent_s": answer.sent - began,
                    "ttft_s": answer.ttft,
                    "tpot_s": answer.tpot,
                    "e2e_s": answer.e2e,
                    "prompt_tokens": answer.prompt_tokens,
                    "output_tokens": answer.output_tokens,
                    "failure": answer.failure,
                }
                for answer in run.answers
            ]
            content["runs"].append(run.figures(self.objectives) | {"answers": answers})
        return content


def run(
    *,
    url: str = URL,
    model: str | None = None,
    api_key: str | None = None,
    dataset: str = workload.SHARED,
    data: str | None = None,
    requests: int = 64,
    scale: float = 1.0,
    text: bool = False,
    vocab_size: int | None = None,
    arrivals: str | None = None,
    rates: Sequence[float] = (),
    time_stretch: float | None = None,
    concurrency: int | None = None,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    slo_e2e_ms: float | None = None,
    timeout: float = 600.0,
    warmup: int = 1,
    seed: int = 0,
    json: str | None = None,
    out: str | None = None,
) -> None:
    """Measure, and print tables; write JSON to the file `json` (- prints it instead) and a picture to `out`.

    model: the first that the server lists, where it is None. rates: a measurement each; arrivals are then poisson unless said otherwise.
    vocab_size: prompts' ids stay below it, and below VOCABULARY where it is None.
    Raises InvalidValueError for a wrong value, OctavoError where the server does not answer, or a picture cannot be drawn.
    """
    positive = {"time_stretch": time_stretch, "slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms, "slo_e2e_ms": slo_e2e_ms}
    for name, number in [*positive.items(), ("timeout", timeout), *(("rate", rate) for rate in rates)]:
        if number is not None and not 0 < number < math.inf:
            raise InvalidValueError(f"{name}: {number}; allowed: a number above 0")
    for name, count, low in (("concurrency", concurrency, 1), ("vocab_size", vocab_size, 1), ("warmup", warmup, 0)):
        if count is not None and count < low:
            raise InvalidValueError(f"{name}: {count}; allowed: a whole number from {low}")
    if text and vocab_size is not None:
        raise InvalidValueError("vocab_size: with text no ids are sent")
    loads = _loads(arrivals, rates, time_stretch, concurrency)
    display.check_picture(out)
    display.check_file("json", json)
    client = Client(url, api_key, timeout)
    work = workload.load(dataset, data, requests, scale)
    if loads[0].arrivals == "trace":
        if any(one.arrival is None for one in work):
            raise InvalidValueError(f"arrivals: 'trace'; {dataset} does not say when requests came")
        work = sorted(work, key=lambda one: one.arrival or 0.0)

    async def measured() -> Report:
        name, longest = await _model(client, model)
        fitting = workload.fitting(work, longest or sys.maxsize, sys.maxsize if text else vocab_size or VOCABULARY)
        if not fitting:
            raise InvalidValueError(f"requests: none of {len(work)} fits in {longest} tokens; a larger scale makes them shorter")
        report = Report(
            url=client.url,
            model=name,
            dataset=dataset,
            scale=scale,
            requests=len(fitting),
            left_out=len(work) - len(fitting),
            prompt_tokens=sum(len(one.prompt) for one in fitting),
            output_tokens=sum(one.tokens for one in fitting),
            text=text,
            seed=seed,
            objectives=Objectives(ttft=slo_ttft_ms, tpot=slo_tpot_ms, e2e=slo_e2e_ms),
        )

        def calls(some: list[Work]) -> list[Call]:
            prompts: Sequence[list[int] | str] = texts(some) if text else fresh(some, vocab_size or VOCABULARY)
            return [client.call(name, prompt, one) for prompt, one in zip(prompts, some, strict=True)]

        if warmup:
            await _warm_up(client, calls(workload.cut(fitting, warmup, WARM_UP_PROMPT, WARM_UP_TOKENS)))
        for load in loads:
            print(f"{load}: {len(fitting)} requests", file=sys.stderr)
            report.runs.append(await measure(client, load, calls(fitting), load.times(fitting, seed) if load.concurrency is None else []))
        return report

    from uvloop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        report = runner.run(measured())
    if json is not None:
        display.write_json(report.to_dict(), json)
    if json != "-":
        show(report)
    if out is not None:
        draw(report, out)


def _loads(arrivals: str | None, rates: Sequence[float], time_stretch: float | None, concurrency: int | None) -> list[Load]:
    if arrivals not in (None, *ARRIVALS):
        raise InvalidValueError(f"arrivals: {arrivals!r}; allowed: {', '.join(ARRIVALS)}")
    if arrivals != "trace" and time_stretch is not None:
        raise InvalidValueError("time_stretch: it is of the times of arrivals trace")
    if concurrency is not None:
        if rates or arrivals is not None:
            raise InvalidValueError(f"concurrency: answers decide when requests are sent, not {'a rate' if rates else 'arrivals'}")
        return [Load(arrivals=CLOSED, concurrency=concurrency)]
    if arrivals == "trace":
        if rates:
            raise InvalidValueError("rate: the trace's times decide; time_stretch changes them")
        return [Load(arrivals=arrivals, time_stretch=time_stretch or 1.0)]
    if not rates:
        raise InvalidValueError("rate: not given; one of rate, arrivals trace and concurrency says when requests are sent")
    return [Load(arrivals=arrivals or "poisson", rate=rate) for rate in rates]


async def _model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    """The name to ask for, and the longest sequence where the server tells it. A server that lists none may be asked by name."""
    try:
        cards = await client.models()
    except OctavoError:
        if wanted is None:
            raise
        return wanted, None
    if wanted is None and not cards:
        raise OctavoError(f"url: {client.url}/v1/models lists no model")
    name = wanted or cards[0].id
    return name, next((card.max_model_len for card in cards if card.id == name), None)


async def _warm_up(client: Client, calls: list[Call]) -> None:
    """All at once. Raises OctavoError where one fails, as those that count would."""
    for answer in await asyncio.gather(*map(client.complete, calls)):
        if answer.failure is not None:
            raise OctavoError(f"url: {client.url} fails to warm up: {f'{answer.failure}: {answer.detail}'.rstrip(': ')}")


def show(report: Report) -> None:
    """Print the report in tables."""
    console = display.console()
    figures = [run.figures(report.objectives) for run in report.runs]
    for line in _notes(report):
        console.print(line, soft_wrap=True)
    console.print(_rate_table(report, figures))
    console.print(_latency_table(report, figures))
    for line in _legend(report, figures):
        console.print(f"- {line}", soft_wrap=True, markup=False)


def _notes(report: Report) -> Iterator[str]:
    scaled = f", lengths divided by {report.scale:g}" if report.scale != 1 else ""
    kind = "words" if report.text else "tokens"
    yield (
        f"{report.model} at {report.url}, {report.dataset}{scaled}: {report.requests:,} requests, {report.prompt_tokens:,} prompt {kind}, "
        f"{report.output_tokens:,} tokens to generate."
    )
    if report.left_out:
        yield f"{report.left_out:,} requests are left out, for no sequence holds so many tokens."


def _rate_table(report: Report, figures: list[dict[str, Any]]) -> Table:
    columns = ["seconds", "completed", "failed", "sent/s", "completed/s", "output tokens/s", "all tokens/s"]
    columns += ["good/s", "good, %"] * bool(report.objectives.given)
    table = display.table("Throughput", *columns, "sent late, ms: P99", "client busy, %")
    for run, figure in zip(report.runs, figures, strict=True):
        good = [_cell(figure["goodput_per_s"], ".2f"), _cell(figure["good_share"], ".1f", 100)] * bool(report.objectives.given)
        table.add_row(
            str(run.load),
            f"{figure['seconds']:.2f}",
            f"{figure['completed']:,}",
            f"{figure['requests'] - figure['completed']:,}",
            _cell(figure["sent_per_s"], ".2f"),
            f"{figure['requests_per_s']:.2f}",
            f"{figure['output_tokens_per_s']:.1f}",
            f"{figure['total_tokens_per_s']:.1f}",
            *good,
            _cell(figure["late_s"] and figure["late_s"]["p99"], ".1f", 1e3),
            f"{figure['client_busy'] * 100:.1f}",
        )
    return table


def _latency_table(report: Report, figures: list[dict[str, Any]]) -> Table:
    first, *others = (f"P{share}" for share in PERCENTILES)
    columns = (column for title in LATENCIES.values() for column in (f"{title}: {first}", *others))
    table = display.table("Latencies, ms", *columns)
    for run, figure in zip(report.runs, figures, strict=True):
        known = [figure[f"{name}_s"] or {} for name in LATENCIES]
        table.add_row(str(run.load), *(_cell(one.get(f"p{share}"), ",.1f", 1e3) for one in known for share in PERCENTILES))
    return table


def _cell(value: float | None, form: str, factor: float = 1) -> str:
    return "" if value is None else format(value * factor, form)


def _legend(report: Report, figures: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "TTFT: from sending to the first token. TPOT: time of a token after the first, an answer's mean. ITL: between chunks that carry "
        "tokens, of all answers. E2E: to the end of the stream. Tokens and latencies are of completed requests."
    )
    if report.runs[0].load.concurrency is None:
        yield "Sent late: after its time. Where that is not small beside the latencies, or the client is busy, the client measures itself."
    if report.objectives.given:
        yield "Good: completed within " + ", ".join(f"{LATENCIES[name]} {limit:g} ms" for name, limit in report.objectives.given.items())
    for run, figure in zip(report.runs, figures, strict=True):
        for kind, count in figure["failures"].items():
            yield f"{run.load}: {count:,} x {kind} ({figure['failure_details'][kind]})"
        if figure["short"]:
            yield f"{run.load}: {figure['short']:,} answers have fewer tokens than were asked for"


def draw(report: Report, out: str) -> None:
    """Write a picture of the report; its name's ending decides the format."""
    figure = display.figure_class()(figsize=(13, 4.5), layout="constrained")
    load = report.runs[0].load
    kind = f"{load.arrivals} arrivals" if len(report.runs) > 1 else str(load)
    figure.suptitle(f"{report.model}, {report.dataset}: {report.requests:,} requests, {kind}")
    if len(report.runs) > 1:
        _draw_rates(report, figure.subplots(1, 2))
    else:
        _draw_shares(report.runs[0], figure.subplots(1, len(LATENCIES), sharey=True))
    figure.savefig(out, dpi=120)


def _draw_rates(report: Report, both: Sequence[Any]) -> None:
    for axes, name in zip(both, ("ttft", "tpot"), strict=True):
        found = [(run.load.rate or 0.0, known) for run in report.runs if (known := percentiles(run.values(name)))]
        for share, colour in COLOURS.items():
            points = sorted((rate, known[f"p{share}"] * 1e3) for rate, known in found)
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"P{share}")
        axes.set(xlabel="requests sent a second", ylabel="ms", title=LATENCIES[name], ylim=(0, None))
        axes.legend(frameon=False)


def _draw_shares(run: Run, all_axes: Sequence[Any]) -> None:
    for axes, (name, title) in zip(all_axes, LATENCIES.items(), strict=True):
        values = sorted(value * 1e3 for value in run.values(name))
        axes.step(values, [(place + 1) / len(values) for place in range(len(values))], where="post", color=COLOURS[50])
        axes.set(xlabel="ms", title=title, ylim=(0, 1))
    all_axes[0].set(ylabel="share that takes no longer")
