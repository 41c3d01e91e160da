"""What sampling costs beside a decode step: python -m octavo.bench.sampling [MODEL] [ROUNDS]

64 sequences decode, each way of sampling in turn: `greedy`, `top_k and top_p`, penalties, log-probabilities; told is the time of the
sampler in a step, and its share of the step. Then 32 sequences with a JSON schema, and without of the same lengths, in alternation:
tokens a second.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.display import summary
from octavo.bench.latency import random_prompt
from octavo.worker import sampler

SEQUENCES, CONTEXT, TOKENS = 64, 128, 48
STRUCTURED, LONGEST = 32, 160

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50 and top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0, "logprobs": 5},
}

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 8,
            "maxItems": 8,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 4, "maxLength": 24},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "role": {"enum": ["author", "editor", "reader"]},
                },
                "required": ["name", "age", "role"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


@contextmanager
def timed_sampler(taken: list[float]) -> Iterator[None]:
    original = sampler.sample

    def timed(*values: Any) -> Any:
        began = time.perf_counter()
        found = original(*values)
        taken.append(time.perf_counter() - began)
        return found

    sampler.sample = timed  # type: ignore[assignment]
    try:
        yield
    finally:
        sampler.sample = original


def cost(llm: LLM, sampled: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step's sampling, and of the step, in the median of those in which all sequences decode."""
    engine, taken, steps = llm.engine, [], []  # type: ignore[var-annotated]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0, output_kind="final", **sampled)
    for number in range(SEQUENCES):
        engine.add(random_prompt(engine, CONTEXT, number), params)
    with timed_sampler(taken):
        while engine.has_work:
            before, began = len(taken), time.perf_counter()
            engine.step()
            steps += [time.perf_counter() - began] * (len(taken) - before)
    whole = slice(-TOKENS // 2, -2)
    return statistics.median(taken[whole]), statistics.median(steps[whole])


def structured(llm: LLM, asked: Any, lengths: list[int]) -> tuple[float, list[int]]:
    """Tokens a second of 32 sequences, of as many tokens at most, or without a structure of just as many; and how many each had."""
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=length, ignore_eos=asked is None, structured_outputs=asked)
        for number, length in enumerate(lengths)
    ]
    llm.engine.scheduler.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate([random_prompt(llm.engine, CONTEXT, number) for number in range(STRUCTURED)], params)
    found = [len(output.outputs[0].token_ids) for output in outputs]
    return sum(found) / (time.perf_counter() - began), found


def main(model: str = "smollm2-135m", rounds: str = "3") -> None:
    found: dict[str, dict[str, list[float]]] = {}
    rates: dict[str, list[float]] = {"free": [], "schema": [], "ratio": []}
    with LLM(model, max_batch_size=SEQUENCES) as llm:
        _, lengths = structured(llm, {"json": SCHEMA}, [LONGEST] * STRUCTURED)  # builds what there is one of
        for _ in range(int(rounds)):
            for name, sampled in WAYS.items():
                taken, step = cost(llm, sampled)
                figures = found.setdefault(name, {"sampling_ms": [], "share_percent": []})
                figures["sampling_ms"].append(taken * 1000)
                figures["share_percent"].append(100 * taken / step)
            free, bound = structured(llm, None, lengths)[0], structured(llm, {"json": SCHEMA}, lengths)[0]
            for name, value in (("free", free), ("schema", bound), ("ratio", bound / free)):
                rates[name].append(value)
    content = {name: {figure: summary(values) for figure, values in figures.items()} for name, figures in found.items()}
    print(json.dumps({"sampling": content, "structured": {name: summary(values) for name, values in rates.items()}}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
