"""What the throughput of an engine is measured on: prompts in token ids, and how many tokens each is to generate.

The shared workload is nano-vLLM's benchmark scaled to a small CPU, and other engines run it too; the traces are those of
`octavo bench memory`; the spreads are made up, for one question each.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import islice

from octavo.bench import traces
from octavo.errors import InvalidValueError

SHARED = "shared"

SPREADS = ("fixed", "uniform", "heavy-tailed")
"""All outputs equally long; from a third of the mean to five thirds, as in the shared workload; log-normal, as people chat."""

TAIL = 1.0
"""Deviation of the logarithm: the longest of 64 is then some six times the mean, as in the Azure conversations."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its prompt, how many tokens it is to generate, and when it came in the trace that it is from, where that is known."""

    prompt: list[int]
    tokens: int
    arrival: float | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        return len(self.prompt) + self.tokens


def shared(count: int = 64, low: int = 100, high: int = 512) -> list[Work]:
    """Random ids of SmolLM2's vocabulary, seed 0; lengths drawn evenly. 64 hold 18,641 prompt and 19,344 generated tokens."""
    source = random.Random(0)
    prompts = [[source.randint(3, 40000) for _ in range(source.randint(low, high))] for _ in range(count)]
    return [Work(prompt, source.randint(low, high)) for prompt in prompts]


def spread(kind: str, count: int, mean: int, longest: int) -> list[Work]:
    """Prompts and outputs of `mean` tokens each on average, spread as `kind` of SPREADS says; none of `longest` tokens together or more."""
    source = random.Random(0)

    def draw() -> int:
        if kind == "fixed":
            return mean
        if kind == "uniform":
            return source.randint(max(1, mean // 3), 2 * mean - mean // 3)
        return max(1, round(mean * math.exp(TAIL * source.gauss(0, 1) - TAIL**2 / 2)))

    lengths = [(min(draw(), longest // 2), min(draw(), longest // 2)) for _ in range(count)]
    return [Work([source.randint(3, 40000) for _ in range(prompt)], tokens) for prompt, tokens in lengths]


def load(dataset: str = SHARED, data: str | None = None, count: int = 64, scale: float = 1.0) -> list[Work]:
    """The first `count` requests of a data set, their lengths divided by `scale`; a token is left of each at least.

    Raises InvalidValueError where the data set is unknown or not to be had.
    """
    if not 1 <= scale < math.inf:
        raise InvalidValueError(f"scale: {scale}; allowed: a number from 1, by which lengths are divided")
    if count < 1:
        raise InvalidValueError(f"requests: {count}; allowed: a whole number from 1")
    if dataset == SHARED:
        work = shared(max(64, count))[:count]  # lengths of outputs are drawn after all prompts
    elif dataset in traces.DATASETS:
        work = [Work(request.prompt, len(request.answer), request.arrival) for request in traces.load(dataset, data, count)]
    else:
        raise InvalidValueError(f"dataset: {dataset!r}; allowed: {', '.join([SHARED, *traces.DATASETS])}")
    work = [one for one in work if one.prompt and one.tokens]
    return [replace(one, prompt=one.prompt[: _scaled(len(one.prompt), scale)], tokens=_scaled(one.tokens, scale)) for one in work]


def fitting(work: list[Work], longest: int, vocab_size: int) -> list[Work]:
    """Those that a sequence of `longest` tokens can hold, their ids brought into the vocabulary."""
    return [replace(one, prompt=[token % vocab_size for token in one.prompt]) for one in work if one.length <= longest]


def cut(work: list[Work], count: int, prompt: int, tokens: int) -> list[Work]:
    """A little of it, to warm up with."""
    return [Work(one.prompt[:prompt], min(one.tokens, tokens)) for one in islice(work, count)]


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length / scale))
