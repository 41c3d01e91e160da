"""`octavo bench latency`: one request at a time. Time to first token over prompt lengths, decode speed over context lengths, and
where the time of a step goes.

The profile puts timers around the functions named in STAGES while it runs, and takes them away again: the engine itself has none.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.bench import display, machine
from octavo.bench.machine import Machine
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import EngineError, InvalidValueError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = "128,512,2048"

PROFILE_CONTEXT, PROFILE_STEPS = 128, 64
"""Tokens of each sequence when the profile begins, and decode steps it lasts."""

STAGES = {
    "schedule": ("scheduler", "schedule"),
    "update": ("scheduler", "update"),
    "prepare batch": ("runner", "prepare"),
    "build batch": ("batch", "build"),
    "forward": ("ops", "run"),
    "output head": ("model", "logits"),
    "sample": ("sampler", "sample"),
    "detokenize": ("engine", "_apply"),
}
"""Where a timer goes: an object of the engine, and its function. Time within an inner one is not counted with the outer one."""

REST = "the rest"


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """Seconds from submitting a prompt of so many tokens to its first token, one a repeat."""

    prompt_length: int
    seconds: list[float]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Seconds between tokens after a context of so many tokens, those of all repeats; and tokens a second, one a repeat."""

    context_length: int
    intervals: list[float]
    tokens_per_s: list[float]

    @property
    def p99(self) -> float:
        """The least interval that 99% of all do not exceed."""
        return sorted(self.intervals)[-(-99 * len(self.intervals) // 100) - 1]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds by stage over decode steps of so many sequences; `seconds` are those of the steps."""

    sequences: int
    steps: int
    seconds: float
    stages: dict[str, float]

    @property
    def overhead(self) -> float:
        """Seconds a step beside the model: all stages but `forward` and `output head`."""
        return (self.seconds - self.stages.get("forward", 0.0) - self.stages.get("output head", 0.0)) / self.steps


@dataclass(kw_only=True)
class Report:
    """All figures."""

    model: str
    dtype: str
    machine: Machine
    output_tokens: int
    repeats: int
    prefill_chunk_size: int | None
    first_tokens: list[FirstToken] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Every field, and medians, least and most."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        for first, row in zip(self.first_tokens, content["first_tokens"], strict=True):
            row["summary"] = display.summary(first.seconds)
        for decode, row in zip(self.decodes, content["decodes"], strict=True):
            row["summary"] = {
                "tokens_per_s": display.summary(decode.tokens_per_s),
                "interval_median_s": statistics.median(decode.intervals),
                "interval_p99_s": decode.p99,
            }
        for profile, row in zip(self.profiles, content["profiles"], strict=True):
            row["overhead_s"] = profile.overhead
            row["overhead_share"] = profile.overhead * profile.steps / profile.seconds
        return content


def run(
    model: str,
    config: EngineConfig,
    *,
    prompt_lengths: str = LENGTHS,
    context_lengths: str = LENGTHS,
    output_tokens: int = 128,
    repeats: int = 5,
    warm_up: bool = True,
    profile: bool = False,
    sequences: int = 64,
    json: str | None = None,
    out: str | None = None,
) -> None:
    """Measure, and print tables; write JSON to the file `json` (- prints it instead) and a picture to `out`.

    Lengths have commas between them; an empty text is none. profile: at one sequence, and at `sequences`.
    Raises InvalidValueError for a wrong value, OctavoError where a picture is asked for and cannot be drawn.
    """
    prompts, contexts = _lengths("prompt_lengths", prompt_lengths), _lengths("context_lengths", context_lengths)
    for name, value, low in (("output_tokens", output_tokens, 2), ("repeats", repeats, 1), ("sequences", sequences, 1)):
        if value < low:
            raise InvalidValueError(f"{name}: {value}; allowed: a whole number from {low}")
    if out is not None and not prompts and not contexts:
        raise InvalidValueError("out: a picture shows prompt_lengths and context_lengths, and both are empty")
    display.check_picture(out)
    display.check_file("json", json)
    if profile and config.scheduler.max_batch_size < sequences:
        config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_batch_size=sequences))
    from octavo import LLM

    with LLM(model, config) as llm:
        print(f"{model}: {llm.capacity}", file=sys.stderr)
        # All are checked before minutes are spent on some.
        for name, lengths, generated in (("prompt_lengths", prompts, 1), ("context_lengths", contexts, output_tokens)):
            if lengths and max(lengths) + generated > llm.capacity.longest:
                raise InvalidValueError(
                    f"{name}: {max(lengths)}; allowed: {llm.capacity.longest - generated} at most, as a sequence may have "
                    f"{llm.capacity.longest} tokens ({llm.capacity.bound_by}), {generated} of them generated"
                )
        report = Report(
            model=model,
            dtype=llm.capacity.dtype,
            machine=machine.describe(),
            output_tokens=output_tokens,
            repeats=repeats,
            prefill_chunk_size=config.scheduler.prefill_chunk_size,
        )
        if warm_up:
            answer(llm.engine, random_prompt(llm.engine, 32, 0), 8)
        with display.progress("Measuring", len(prompts) + len(contexts) + 2 * profile) as done:
            for length in prompts:
                report.first_tokens.append(first_token(llm.engine, length, repeats))
                done()
            for length in contexts:
                report.decodes.append(decode(llm.engine, length, output_tokens, repeats))
                done()
            for count in dict.fromkeys((1, sequences)) if profile else ():
                report.profiles.append(profiled(llm.engine, count))
                done()
    if json is not None:
        display.write_json(report.to_dict(), json)
    if json != "-":
        show(report)
    if out is not None:
        draw(report, out)


def _lengths(name: str, wanted: str) -> list[int]:
    try:
        lengths = [int(word) for word in wanted.split(",") if word.strip()]
    except ValueError:
        lengths = [0]
    if min(lengths, default=1) < 1:
        raise InvalidValueError(f"{name}: {wanted!r}; allowed: whole numbers from 1 with commas between them")
    return lengths


def random_prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Ids of the whole vocabulary."""
    source = random.Random(seed)
    return [source.randrange(engine.capacity.vocab_size) for _ in range(length)]


def answer(engine: Engine, prompt: list[int], tokens: int, clock: Callable[[], float] = time.perf_counter) -> tuple[float, list[float]]:
    """Run one request alone -> when it was submitted, and when each of its tokens came. Nothing is shared with earlier ones."""
    engine.scheduler.reset_prefix_cache()
    times: list[float] = []
    began = clock()
    _submit(engine, prompt, tokens)
    while engine.has_work:
        for output in engine.step():
            times += [clock()] * (len(output.read().outputs[0].token_ids) - len(times))
            _require(output.outputs[0])
    return began, times


def first_token(engine: Engine, length: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> FirstToken:
    """Another prompt in every repeat."""
    answers = (answer(engine, random_prompt(engine, length, repeat), 1, clock) for repeat in range(repeats))
    return FirstToken(prompt_length=length, seconds=[times[0] - began for began, times in answers])


def decode(engine: Engine, length: int, tokens: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Decode:
    """The first token ends the prefill, so that `tokens` of them have one interval less between them."""
    runs = [answer(engine, random_prompt(engine, length, repeat), tokens, clock)[1] for repeat in range(repeats)]
    return Decode(
        context_length=length,
        intervals=[later - earlier for times in runs for earlier, later in itertools.pairwise(times)],
        tokens_per_s=[(len(times) - 1) / (times[-1] - times[0]) for times in runs],
    )


def profiled(engine: Engine, sequences: int, context: int = PROFILE_CONTEXT, steps: int = PROFILE_STEPS) -> Profile:
    """Time by stage of `steps` steps in which so many sequences decode. Raises InvalidValueError where they do not fit in KV memory."""
    capacity = engine.capacity
    context = min(context, capacity.longest // 2)
    steps = min(steps, capacity.longest - context - 2)
    settings = engine.config.scheduler
    chunks = sequences if settings.prefill_chunk_size is None else -(-sequences * context // settings.prefill_chunk_size)
    generated = min(steps + 2 + chunks, capacity.longest - context)
    blocks = sequences * engine.scheduler.kv.groups.most(0, context + generated)
    if blocks > capacity.num_blocks:
        raise InvalidValueError(
            f"sequences: {sequences}; they take {blocks} KV blocks of {context + generated} tokens each and there are "
            f"{capacity.num_blocks} ({capacity.ceiling_by or 'the KV pool'})"
        )
    engine.scheduler.reset_prefix_cache()
    for number in range(sequences):
        _submit(engine, random_prompt(engine, context, number), generated)
    # Those who came first go on decoding while the last are prefilled, and must not end before.
    while sum(one.num_computed >= one.num_prompt for one in engine.scheduler.running) < sequences:
        for output in engine.step():
            _require(output.read().outputs[0])
        if not engine.has_work:
            raise EngineError(f"{sequences} sequences never ran at once")
    taken, count = 0.0, 0
    with timers(engine) as stages:
        while len(engine.scheduler.running) == sequences and count < steps:
            began = time.perf_counter()
            engine.step()
            taken += time.perf_counter() - began
            count += 1
    while engine.has_work:
        engine.step()
    if not count:
        raise EngineError(f"no step had {sequences} sequences that decode")
    found = {name: stages[name] for name in STAGES if name in stages}
    return Profile(sequences=sequences, steps=count, seconds=taken, stages=found | {REST: taken - sum(found.values())})


@contextmanager
def timers(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds by stage, each less those of stages within it. A stage that this engine does not have stays away."""
    seconds: defaultdict[str, float] = defaultdict(float)
    within: list[float] = []
    placed: list[tuple[Any, str, Any]] = []

    def put(stage: str, owner: Any, name: str) -> None:
        original, own = getattr(owner, name), vars(owner).get(name)

        def timed(*values: Any, **named: Any) -> Any:
            within.append(0.0)
            began = time.perf_counter()
            try:
                return original(*values, **named)
            finally:
                taken = time.perf_counter() - began
                seconds[stage] += taken - within.pop()
                if within:
                    within[-1] += taken

        placed.append((owner, name, own))
        setattr(owner, name, timed)

    runner = getattr(engine.executor, "_runner", None)
    owners: dict[str, Any] = {"engine": engine, "scheduler": engine.scheduler}
    if runner is not None:
        from octavo.worker import batch, sampler

        owners |= {"runner": runner, "ops": runner._ops, "model": runner.model, "batch": batch, "sampler": sampler}
    try:
        for stage, (owner, name) in STAGES.items():
            if hasattr(owners.get(owner), name):
                put(stage, owners[owner], name)
        yield seconds
    finally:
        for owner, name, own in placed:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _submit(engine: Engine, prompt: list[int], tokens: int) -> None:
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def _require(completion: Any) -> None:
    if completion.finish_reason not in (None, "length"):
        raise EngineError(f"the request ended early: {completion.finish_reason} {completion.error or ''}".rstrip())


def show(report: Report) -> None:
    """Print the report in tables."""
    console = display.console()
    chunk = "in one step" if report.prefill_chunk_size is None else f"in chunks of {report.prefill_chunk_size}"
    console.print(
        f"{report.model} ({report.dtype}), one request at a time, prompts {chunk}; {report.repeats} repeats, median and spread.",
        soft_wrap=True,
    )
    console.print(str(report.machine), soft_wrap=True)
    if report.first_tokens:
        console.print(_first_token_table(report))
    if report.decodes:
        console.print(_decode_table(report))
    if report.profiles:
        console.print(_profile_table(report))
        for profile in report.profiles:
            share = profile.overhead * profile.steps / profile.seconds
            console.print(
                f"- Beside the model a step of {profile.sequences} takes {profile.overhead * 1e3:.3f} ms, {share * 100:.1f}% of it. "
                f"Timers are around {profile.steps} decode steps; what they take themselves counts as well."
            )


def _first_token_table(report: Report) -> Table:
    table = display.table("Time to first token", "ms", "prompt tokens/s")
    for one in report.first_tokens:
        rates = [one.prompt_length / seconds for seconds in one.seconds]
        table.add_row(f"prompt of {one.prompt_length:,}", display.spread(one.seconds, ".1f", 1e3), display.spread(rates, ",.0f"))
    return table


def _decode_table(report: Report) -> Table:
    table = display.table(f"Decode, {report.output_tokens} tokens", "tokens/s", "between tokens, ms: median", "P99")
    for one in report.decodes:
        figures = (statistics.median(one.intervals), one.p99)
        table.add_row(f"after {one.context_length:,}", display.spread(one.tokens_per_s), *(f"{seconds * 1e3:.2f}" for seconds in figures))
    return table


def _profile_table(report: Report) -> Table:
    columns = (column for one in report.profiles for column in (f"{one.sequences} at once: ms", "%"))
    table = display.table("Where the time of a decode step goes", *columns)
    for stage in dict.fromkeys(name for one in report.profiles for name in one.stages):
        seconds = [(one.stages.get(stage, 0.0), one) for one in report.profiles]
        table.add_row(
            stage, *(cell for taken, one in seconds for cell in (f"{taken / one.steps * 1e3:.3f}", f"{taken / one.seconds * 100:.1f}"))
        )
    table.add_section()
    table.add_row("a step", *(cell for one in report.profiles for cell in (f"{one.seconds / one.steps * 1e3:.3f}", "100.0")))
    return table


def draw(report: Report, out: str) -> None:
    """Write a picture of the report; its name's ending decides the format."""
    figure = display.figure_class()(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{report.model} ({report.dtype}), one request at a time: median, least and most")
    firsts = [display.summary(one.seconds) for one in report.first_tokens]
    _line(left, [one.prompt_length for one in report.first_tokens], firsts, 1e3)
    left.set(xlabel="prompt, tokens", ylabel="ms", title="Time to first token", ylim=(0, None))
    speeds = [display.summary(one.tokens_per_s) for one in report.decodes]
    _line(right, [one.context_length for one in report.decodes], speeds, 1)
    right.set(xlabel="context, tokens", ylabel="tokens a second", title="Decode", ylim=(0, None))
    figure.savefig(out, dpi=120)


def _line(axes: Any, lengths: list[int], figures: list[dict[str, float]], factor: float) -> None:
    medians = [figure["median"] * factor for figure in figures]
    below = [(figure["median"] - figure["min"]) * factor for figure in figures]
    above = [(figure["max"] - figure["median"]) * factor for figure in figures]
    axes.errorbar(lengths, medians, yerr=[below, above], fmt="o-", capsize=4, color="#0072b2")
