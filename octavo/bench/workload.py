"""nano-vLLM's benchmark scaled to a small CPU: 64 random prompts of 100 to 512 tokens, 100 to 512 tokens generated each.

    python -m octavo.bench.workload [MODEL] [--setting value ...]

Prints one JSON line: output tokens per second with all requests at once, and single-stream decode.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from octavo import LLM, SamplingParams
from octavo.config import parse_flag


def requests(count: int = 64, low: int = 100, high: int = 512) -> list[tuple[list[int], int]]:
    """(prompt token ids, tokens to generate) per request, seed 0; the ids lie in SmolLM2's vocabulary."""
    source = random.Random(0)
    prompts = [[source.randint(3, 40000) for _ in range(source.randint(low, high))] for _ in range(count)]
    return [(prompt, source.randint(low, high)) for prompt in prompts]


def fixed(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def main(model: str = "smollm2-135m", *flags: str) -> None:
    texts = {name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    settings: dict[str, Any] = {name: parse_flag(name, value) for name, value in texts.items()}
    began = time.perf_counter()
    llm = LLM(model, {"scheduler": {"max_batch_size": 64}}, **settings)
    loaded = time.perf_counter() - began
    work = requests()

    def timed(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate([work[1][0][:128]], fixed(tokens))
        return time.perf_counter() - began

    timed(8)
    first = timed(1)
    single = 128 / (timed(129) - first)
    before = llm.stats()
    began = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in work], [fixed(tokens) for _, tokens in work])
    seconds = time.perf_counter() - began
    stats = llm.stats()
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompt_tokens = sum(len(prompt) for prompt, _ in work)
    figures = {
        "engine": "octavo",
        "dtype": llm.capacity.dtype,
        "load_s": loaded,
        "first_token_128_s": first,
        "single_tokens_per_s": single,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": produced,
        "output_tokens_per_s": produced / seconds,
        "total_tokens_per_s": (prompt_tokens + produced) / seconds,
        "device_busy": (stats.seconds["forward"] - before.seconds["forward"]) / seconds,
        "steps": stats.steps - before.steps,
        "preemptions": stats.preemptions,
    }
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}))
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
