"""What the memory manager does to sequences never shows in what they say: the default model, disturbed in every way and not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.oracle import prompts

Answers = list[list[list[int]]]
"""Token ids by request and choice."""

MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "default": {},
}


@pytest.fixture(scope="module")
def work(smollm2_gguf: Path, data: Path) -> list[list[int]]:
    """Eight prompts in three families, each beginning alike."""
    with LLM(smollm2_gguf, max_model_len=64, prealloc_blocks=0) as llm:
        heads = [llm.tokenizer.encode(text)[:length] for text, length in zip(prompts(data, 3), (24, 17, 33), strict=True)]
        tails = [llm.tokenizer.encode(text)[:7] for text in prompts(data, 8)]
    return [heads[i % 3] + tail[: 3 + i % 5] for i, tail in enumerate(tails)]


def parameters(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, n=1 + (i % 4 == 3), max_tokens=14 + i % 3, ignore_eos=True) for i in range(count)
    ]


def run(llm: LLM, work: list[list[int]], between: Callable[[LLM, int], None] = lambda llm, step: None) -> Answers:
    """Answer all at once, calling `between` after every step."""
    engine = llm.engine
    ids = [engine.add(prompt, params) for prompt, params in zip(work, parameters(len(work)), strict=True)]
    outputs: dict[str, Any] = {}
    step = 0
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
        between(llm, step)
    assert llm.stats().blocks.used == 0
    return [[answer.token_ids for answer in outputs[request_id].outputs] for request_id in ids]


@pytest.fixture(scope="module")
def undisturbed(smollm2_gguf: Path, work: list[list[int]]) -> dict[str, Answers]:
    found = {}
    for mode, settings in MODES.items():
        with LLM(smollm2_gguf, **settings, max_model_len=128, prefix_caching=False) as llm:
            found[mode] = run(llm, work)
            stats = llm.stats()
            assert (stats.preemptions, stats.cached_tokens, stats.evicted_blocks) == (0, 0, 0)
    return found


def compact(llm: LLM, step: int) -> None:
    if step % 4 == 0 and (report := llm.compact()) is not None:
        llm.moved = getattr(llm, "moved", 0) + report.blocks_moved  # type: ignore[attr-defined]


TIGHT = {"block_size": 4, "max_blocks": 30, "prefill_chunk_size": 32}

DISTURBANCES: dict[str, tuple[dict[str, Any], Callable[[LLM, int], None], Callable[[LLM], int]]] = {
    "sharing": ({"block_size": 4, "prefill_chunk_size": 32}, lambda llm, step: None, lambda llm: llm.stats().cached_tokens),
    "recomputation": (TIGHT, lambda llm, step: None, lambda llm: llm.stats().preemptions),
    "recomputation without sharing": (TIGHT | {"prefix_caching": False}, lambda llm, step: None, lambda llm: llm.stats().preemptions),
    "swapping": (TIGHT | {"swap_space": "32MiB"}, lambda llm, step: None, lambda llm: llm.stats().swap_outs),
    "eviction": (TIGHT | {"max_batch_size": 2}, lambda llm, step: None, lambda llm: llm.stats().evicted_blocks),
    "growth": ({"prealloc_blocks": 1, "block_size": 4}, lambda llm, step: None, lambda llm: llm.stats().blocks.total - 1),
    "compaction": ({"prealloc_blocks": 4, "block_size": 2, "prefix_caching": False}, compact, lambda llm: getattr(llm, "moved", 0)),
    "compaction of shared blocks": ({"prealloc_blocks": 4, "block_size": 2, "max_batch_size": 5}, compact, lambda llm: llm.moved),
    "forgotten prefixes": (
        {"block_size": 4, "prefill_chunk_size": 32},
        lambda llm, step: step % 3 == 0 and llm.reset_prefix_cache(),
        lambda llm: llm.stats().cached_tokens,
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_no_disturbance_shows(
    disturbance: str, mode: str, smollm2_gguf: Path, work: list[list[int]], undisturbed: dict[str, Answers]
) -> None:
    settings, between, count = DISTURBANCES[disturbance]
    with LLM(smollm2_gguf, **MODES[mode], max_model_len=128, check_invariants=True, **settings) as llm:
        assert run(llm, work, between) == undisturbed[mode]
        print(f"{mode}, {disturbance}: {count(llm)} times; {llm.stats().blocks}")
        assert count(llm) > 0
        if disturbance == "sharing":  # once more, with every prompt in the cache
            assert run(llm, work, between) == undisturbed[mode]


def test_a_long_sequence_moves_while_it_decodes_and_memory_is_given_back(smollm2_gguf: Path) -> None:
    with LLM(smollm2_gguf, max_model_len=2048, prealloc_blocks=0, prefix_caching=False, max_blocks=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        alone = llm.generate([[7] * 40], params)[0].outputs[0].token_ids
        stream = llm.stream([7] * 40, params)
        engine = llm.engine
        engine.add([5] * 1500, SamplingParams(max_tokens=1, ignore_eos=True))
        next(stream)
        engine.add([7] * 300, SamplingParams(max_tokens=1, ignore_eos=True))
        for _ in range(10):
            output = next(stream)
        before = resident_kib()
        report = llm.compact()
        assert report is not None
        freed = before - resident_kib()
        print(report, f"resident memory fell by {freed / 1024:.1f} MiB")
        assert report.bytes_returned > 20 << 20
        assert freed * 1024 > 0.9 * report.bytes_returned - (4 << 20)
        for output in stream:
            assert output.outputs[0].token_ids == alone[: len(output.outputs[0].token_ids)]
        assert output.outputs[0].token_ids == alone


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
