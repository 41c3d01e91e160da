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

NAMES = ["qwen3 moe", "mixtral", "phi 3, longrope", "smollm3", "granite", "olmo 2", "olmo 3", "gemma", "gemma 2", "gemma 3"]
TIGHT: dict[str, Any] = {"block_size": 4, "max_blocks": 30, "prefill_chunk_size": 16, "max_batch_size": 6}
PROMPTS = [ids(32)[: 20 + length] + ids(40 + length)[:length] for length in (1, 3, 9, 2, 12, 5)]
"""Their first twenty tokens are alike."""


def add_tokenizer(folder: Path, size: int) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, *CASES[name])
    add_tokenizer(tmp_path, model.config.vocab_size)
    with LLM(tmp_path, dtype="float32", prefix_caching=False, max_blocks=200) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert answer == reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
    with LLM(tmp_path, dtype="float32", check_invariants=True, **TIGHT) as llm:
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
    with LLM(tmp_path, **settings, check_invariants=True, **TIGHT) as llm:
        assert answers(llm, PROMPTS) == alone


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
