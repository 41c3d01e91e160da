"""What `octavo bench serve` puts on a server: when requests are sent, with which prompts, and what a measurement tells of their answers.

In an open loop requests are sent when their time comes, whatever became of those before; in a closed one an answer's end makes room for
the next request. No prompt of one measurement begins like one of another, so that none finds in a cache what an earlier one left; what
prompts share within a measurement they go on sharing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.serve_client import Answer, Call, Client
from octavo.bench.workload import Work

CLOSED = "closed"

PERCENTILES = (50, 90, 99)
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were "
    "her all she there would their we him been has when who will more no if out so said what up its about into than them can only "
    "other new some could time these two may then do first any my now such like our over man me even most made after also did many "
    "before must through back years where much your way well down should because each just those people how too little state good "
    "very make world still own see men work long get here between both life being under never day same another know while last "
    "might us great old year off come since against go came right used take three"
)
WORDS = _COMMON.split()
"""A token each in most vocabularies."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """When requests are sent. rate: a second. concurrency: how many are in flight in a closed loop. time_stretch: of a trace's times."""

    arrivals: str
    rate: float | None = None
    concurrency: int | None = None
    time_stretch: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} in flight"
        return f"{self.arrivals}, {f'times x {self.time_stretch:g}' if self.rate is None else f'{self.rate:g}/s'}"

    def times(self, work: Sequence[Work], seed: int) -> list[float]:
        """Seconds after the first request at which each is due. Poisson's gaps are the same for all rates, but for their length."""
        if self.rate is None:
            arrivals = [one.arrival or 0.0 for one in work]
            return [(arrival - arrivals[0]) * (self.time_stretch or 1.0) for arrival in arrivals]
        if self.arrivals == "constant":
            return [number / self.rate for number in range(len(work))]
        source = random.Random(seed)
        return list(itertools.accumulate((source.expovariate(self.rate) for _ in work[1:]), initial=0.0))


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What a good answer takes at most, in milliseconds; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def given(self) -> dict[str, float]:
        return {name: limit for name, limit in dataclasses.asdict(self).items() if limit is not None}

    def met_by(self, answer: Answer) -> bool:
        """A whole answer's; a figure that it does not have is good."""
        return answer.failure is None and all((getattr(answer, name) or 0.0) * 1e3 <= limit for name, limit in self.given.items())


@dataclass(kw_only=True)
class Run:
    """One measurement. client_busy: share of one processor that the client took."""

    load: Load
    answers: list[Answer]
    client_busy: float = 0.0

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure is None]

    @property
    def seconds(self) -> float:
        """From the time the first request was due to the last end."""
        return max(answer.ended for answer in self.answers) - min(answer.due for answer in self.answers)

    @property
    def failures(self) -> dict[str, int]:
        return dict(Counter(answer.failure for answer in self.answers if answer.failure is not None))

    @property
    def failure_details(self) -> dict[str, str]:
        """Of each kind of failure the first one's."""
        return {answer.failure: answer.detail for answer in reversed(self.answers) if answer.failure is not None}

    def values(self, name: str) -> list[float]:
        """Of the whole answers' latencies `name`, which is one of LATENCIES, in seconds."""
        if name == "itl":
            return [gap for answer in self.whole for gap in answer.gaps]
        return [value for answer in self.whole if (value := getattr(answer, name)) is not None]

    def figures(self, objectives: Objectives) -> dict[str, Any]:
        """All that is told of it. Tokens and latencies are of whole answers."""
        whole, seconds = self.whole, self.seconds
        output, prompt = (sum(getattr(answer, name) for answer in whole) for name in ("output_tokens", "prompt_tokens"))
        sent = [answer.sent for answer in self.answers]
        span = max(sent) - min(sent)
        good = sum(map(objectives.met_by, whole)) if objectives.given else None
        is_open = self.load.concurrency is None
        return {
            **dataclasses.asdict(self.load),
            "seconds": seconds,
            "requests": len(self.answers),
            "completed": len(whole),
            "short": sum(answer.output_tokens < answer.asked_tokens for answer in whole),
            "failures": self.failures,
            "failure_details": self.failure_details,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": (prompt + output) / seconds,
            "sent_per_s": (len(sent) - 1) / span if span else None,
            "requests_per_s": len(whole) / seconds,
            "goodput_per_s": None if good is None else good / seconds,
            "good_share": None if good is None else good / len(self.answers),
            **{f"{name}_s": percentiles(self.values(name)) for name in LATENCIES},
            "late_s": percentiles([answer.late for answer in self.answers]) if is_open else None,
            "client_busy": self.client_busy,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The least values that are not exceeded by so many in a hundred; None of nothing."""
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in PERCENTILES} if ordered else None


def fresh(work: list[Work], vocab_size: int) -> list[list[int]]:
    """Prompts whose first token is another one each time, the same for all that had the same."""
    shift = random.SystemRandom().randrange(vocab_size)
    return [[(one.prompt[0] + shift) % vocab_size, *one.prompt[1:]] for one in work]


def texts(work: list[Work]) -> list[str]:
    """Prompts of a word a token, other words each time. What begins with the same tokens begins with the same words."""
    salt = random.SystemRandom().getrandbits(32)
    return [" ".join(WORDS[hash((salt, place, token)) % len(WORDS)] for place, token in enumerate(one.prompt)) for one in work]


async def measure(client: Client, load: Load, calls: list[Call], times: list[float]) -> Run:
    """Send all calls as `load` says, and read all answers; times are those of an open loop."""
    busy, began = time.process_time(), time.perf_counter()
    if load.concurrency is None:
        answers = await open_loop(client, calls, times)
    else:
        answers = await closed_loop(client, calls, load.concurrency)
    share = (time.process_time() - busy) / (time.perf_counter() - began)
    return Run(load=load, answers=answers, client_busy=share)


async def open_loop(client: Client, calls: list[Call], times: list[float]) -> list[Answer]:
    """Send each at its time."""
    began = time.perf_counter()
    tasks = []
    for call, offset in zip(calls, times, strict=True):
        while (wait := began + offset - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(client.complete(call, began + offset)))
    return await asyncio.gather(*tasks)


async def closed_loop(client: Client, calls: list[Call], concurrency: int) -> list[Answer]:
    """Keep so many in flight."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(calls))

    async def one_after_another() -> None:
        for place, call in waiting:
            answers[place] = await client.complete(call)

    await asyncio.gather(*(one_after_another() for _ in range(min(concurrency, len(calls)))))
    return [answers[place] for place in range(len(calls))]
