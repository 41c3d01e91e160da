"""Every model's greedy text is transformers', and the same whatever else the engine does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams
from tests.models.checkpoints import CASES, ids, make
from tests.oracle import logits, make_runner, reference_logits

NAMES = [
    "qwen3 moe",
    "mixtral",
    "phi 3, longrope",
    "smollm3",
    "granite",
    "olmo 2",
    "olmo 3",
    "seed oss, biases everywhere",
    "gemma",
    "gemma 2",
    "gemma 3",
]
WINDOWED = ["mistral, window", "qwen2, windows on upper layers", "gemma 2", "gemma 3"]
TIGHT: dict[str, Any] = {"block_size": 4, "prefill_chunk_size": 16, "max_batch_size": 6}
PROMPTS = [ids(32)[: 20 + length] + ids(40 + length)[:length] for length in (1, 3, 9, 2, 12, 5)]
"""Their first twenty tokens are alike."""


def add_tokenizer(folder: Path, size: int) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def tight(llm: LLM) -> dict[str, Any]:
    """Settings under which the same model is short of blocks."""
    return TIGHT | {"max_blocks": 30 * len(llm.capacity.windows)}


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, *CASES[name])
    add_tokenizer(tmp_path, model.config.vocab_size)
    with LLM(tmp_path, dtype="float32", prefix_caching=False, max_blocks=200) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        short = tight(llm)
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert answer == reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
    with LLM(tmp_path, dtype="float32", check_invariants=True, **short) as llm:
        assert answers(llm, PROMPTS) == alone
        assert answers(llm, PROMPTS[::-1]) == alone[::-1]
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_in_every_form_a_row_never_depends_on_its_neighbours(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = make(tmp_path, *CASES[name])
    add_tokenizer(tmp_path, model.config.vocab_size)
    with LLM(tmp_path, **settings, prefix_caching=False, max_blocks=200) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        short = tight(llm)
    with LLM(tmp_path, **settings, check_invariants=True, **short) as llm:
        assert answers(llm, PROMPTS) == alone


@pytest.mark.parametrize("name", WINDOWED)
def test_a_conversation_longer_than_its_blocks_would_hold_without_windows(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, *CASES[name])
    add_tokenizer(tmp_path, model.config.vocab_size)
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "prefill_chunk_size": 4, "check_invariants": True}
    with LLM(tmp_path, **settings) as llm:
        windows, groups = llm.capacity.windows, llm.engine.scheduler.kv.groups
        assert any(windows)
    with LLM(tmp_path, **settings, max_blocks=groups.most(0, 124)) as llm:
        assert llm.capacity.num_blocks < 31 * len(windows)
        prompt: list[int] = []
        answer: list[int] = []
        for turn in (ids(75), ids(9)):  # the second goes on from all of the first, of which windows have kept the end
            prompt = [*prompt, *answer, *turn]
            answer = answers(llm, [prompt])[0]
            assert answer == reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert llm.stats().cached_tokens == 92
        assert llm.stats().preemptions == 0


@pytest.mark.parametrize("name", ["mistral, window", "qwen2, windows on upper layers", "gemma 3"])
@pytest.mark.parametrize("settings", [{"swap_space": "4MiB"}, {"kv_cache_dtype": "int8", "prealloc_blocks": 4}], ids=str)
def test_no_disturbance_shows_where_layers_have_windows(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Several answers to a prompt, swapped, recomputed, moved and forgotten."""
    model = make(tmp_path, *CASES[name])
    add_tokenizer(tmp_path, model.config.vocab_size)
    work = [*PROMPTS, ids(70), ids(70)[:60] + ids(9), ids(66)]

    def run(llm: LLM, requests: list[int], moves: bool = False) -> list[list[list[int]]]:
        engine, outputs, step = llm.engine, {}, 0
        params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, n=1 + i % 3, max_tokens=24, ignore_eos=True) for i in requests]
        names = [engine.add(work[i], asked) for i, asked in zip(requests, params, strict=True)]
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step()}
            step += 1
            if moves and step % 5 == 0:
                llm.compact()
            if moves and step % 17 == 0:
                llm.reset_prefix_cache()
        assert llm.stats().blocks.used == 0
        return [[answer.token_ids for answer in outputs[name].outputs] for name in names]

    kv = {key: value for key, value in settings.items() if key == "kv_cache_dtype"}
    with LLM(tmp_path, dtype="float32", prefix_caching=False, max_blocks=1000, **kv) as llm:
        alone = [run(llm, [i])[0] for i in range(len(work))]
        short = tight(llm)
    short["max_blocks"] = short["max_blocks"] * 3 // 5
    with LLM(tmp_path, dtype="float32", check_invariants=True, **short, **settings) as llm:
        assert run(llm, list(range(len(work)))) == alone
        assert run(llm, list(range(len(work))), moves=True) == alone
        stats = llm.stats()
        print(f"{name}: {stats.preemptions} preemptions, {stats.swap_outs} by swap, {stats.cached_tokens} cached tokens, {stats.blocks}")
        assert stats.preemptions > 0
        assert stats.cached_tokens > 0
        assert stats.copied_blocks > 0


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_to_float32_as_in_transformers(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, *CASES[name])
    exact = reference_logits(model, ids(100))
    theirs = (reference_logits(model.bfloat16(), ids(100)) - exact).norm() / exact.norm()
    found = (logits(make_runner(tmp_path, dtype="bfloat16"), ids(100)) - exact).norm() / exact.norm()
    print(f"{name}: off by {found:.2%}, transformers by {theirs:.2%}")
    assert found < 1.1 * theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_of_few_tokens_is_recorded(name: str, dtype: str, tmp_path: Path) -> None:
    """No operator of torch's own stands between the kernels."""
    make(tmp_path, *CASES[name])
    runner = make_runner(tmp_path, dtype=dtype)
    found = logits(runner, ids(30), chunk=1)
    assert getattr(runner._ops, "_recordings", {1: ...})[1] is not None
    assert torch.equal(found, logits(runner, ids(30)))
