"""The default model's very numbers in float32, from its GGUF and from an HF folder, against transformers on real prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from tests.oracle import logits, make_runner, prompts, reference_logits

NEW_TOKENS = 64

EXACT = {"dtype": "float32", "quantization": "none"}

MODES: dict[str, dict[str, Any]] = {
    "float32": EXACT,
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "default": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
"""How the model may run: what holds for its output holds in each."""


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Any:
    read = transformers.AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    fields = read.config.to_dict()
    del fields["quantization_config"]
    config = transformers.LlamaConfig(**fields)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(read.state_dict())
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2-hf")
    model.save_pretrained(path, max_shard_size="300MB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, **EXACT, max_batch_size=32, max_model_len=2048, prealloc_blocks=0, check_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def token_ids(llm: LLM, data: Path) -> list[list[int]]:
    return [llm.tokenizer.encode(prompt) for prompt in prompts(data, 16)]


@pytest.fixture(scope="module")
def together(llm: LLM, token_ids: list[list[int]]) -> list[list[int]]:
    """What the sixteen prompts give all at once: the run that every other must equal."""
    return answers(llm.generate(token_ids, greedy()))


def greedy(count: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_logits_equal_transformers(form: str, smollm2_gguf: Path, folder: Path, model: Any, llm: LLM, data: Path) -> None:
    text = (data / "shakespeare" / "tinyshakespeare_600k.txt").read_text()[:8000]
    tokens = llm.tokenizer.encode(text)
    runner = make_runner(smollm2_gguf if form == "gguf" else folder, **EXACT)
    for at, count in ((0, 20), (20, 200), (220, 1000)):
        prompt = tokens[at : at + count]
        assert len(prompt) == count
        difference = (logits(runner, prompt, chunk=256) - reference_logits(model, prompt)).abs().max().item()
        print(f"{form}, {count} tokens: largest difference of a logit {difference:.1e}")
        assert difference < 2e-4


def test_greedy_tokens_equal_transformers(token_ids: list[list[int]], together: list[list[int]], model: Any) -> None:
    """Each token is the oracle's choice after the tokens before it, so the whole is its greedy continuation."""
    for prompt, answer in zip(token_ids, together, strict=True):
        expected = reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1)
        assert answer == expected.tolist()
        assert len(answer) == NEW_TOKENS


def test_chat_answers_paris(llm: LLM) -> None:
    """In float32: the likeliest first tokens lie within what bfloat16 rounds."""
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=40))[0]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == llm.tokenizer.eos_token_id


@pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_prompts_one_by_one_give_the_same(count: int, llm: LLM, token_ids: list[list[int]], together: list[list[int]]) -> None:
    assert [answers(llm.generate([prompt], greedy()))[0] for prompt in token_ids[:count]] == together[:count]


@pytest.fixture(scope="module")
def beginnings(llm: LLM, token_ids: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts' first tokens, of four lengths, and how they go on."""
    cut = [prompt[:length] for prompt, length in zip(token_ids[2:10:2], (40, 17, 33, 20), strict=True)]
    return cut, answers(llm.generate(cut, greedy(12)))


@pytest.mark.parametrize(
    "settings",
    [
        *({"block_size": size} for size in (1, 4, 8, 32, 64)),
        *({"prefill_chunk_size": size} for size in (1, 7, 16)),
        *({"max_batch_size": size} for size in (1, 2, 3)),
    ],
    ids=str,
)
def test_block_size_chunk_size_and_batch_size_change_nothing(
    settings: dict[str, Any], smollm2_gguf: Path, beginnings: tuple[list[list[int]], list[list[int]]]
) -> None:
    cut, expected = beginnings
    with LLM(smollm2_gguf, **EXACT, max_model_len=1024, prealloc_blocks=0, check_invariants=True, **settings) as other:
        assert answers(other.generate(cut, greedy(12))) == expected


@pytest.mark.parametrize("mode", MODES)
def test_long_prompts_in_any_chunks_and_batches_up_to_32(mode: str, smollm2_gguf: Path, token_ids: list[list[int]]) -> None:
    running = [token_id for prompt in token_ids for token_id in prompt]
    work = [running[:520], running[200:500], *(running[start : start + 9] for start in range(30))]
    found = []
    for settings in (
        {"max_batch_size": 32},
        {"max_batch_size": 32, "prefill_chunk_size": None},
        {"max_batch_size": 11, "prefill_chunk_size": 97, "block_size": 4},
    ):
        with LLM(smollm2_gguf, **MODES[mode], max_model_len=1024, prealloc_blocks=0, check_invariants=True, **settings) as llm:
            found.append(answers(llm.generate(work, greedy(6))))
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("mode", MODES)
def test_preemption_dozens_of_times_changes_nothing(mode: str, smollm2_gguf: Path, token_ids: list[list[int]]) -> None:
    work = [prompt[:4] for prompt in token_ids]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(len(work))]
    found = {}
    for name, settings in {"roomy": {}, "tight": {"block_size": 1, "max_blocks": 60, "prefill_chunk_size": 64}}.items():
        with LLM(smollm2_gguf, **MODES[mode], max_model_len=64, prealloc_blocks=0, check_invariants=True, **settings) as llm:
            found[name] = answers(llm.generate(work, params))
            preemptions = llm.stats().preemptions
            assert llm.stats().blocks.used == 0
    print(f"{mode}: {preemptions} preemptions")
    assert found["tight"] == found["roomy"]
    assert preemptions >= 24


@pytest.mark.parametrize(("mode", "dtype"), [("bfloat16", "bfloat16"), ("default", "float32"), ("int8 KV", "float32")])
def test_a_row_never_depends_on_its_neighbours(mode: str, dtype: str, smollm2_gguf: Path, token_ids: list[list[int]]) -> None:
    params = [SamplingParams(temperature=0.9 * (i % 2), seed=7, max_tokens=24, ignore_eos=True) for i in range(len(token_ids))]
    with LLM(smollm2_gguf, **MODES[mode], max_model_len=1024, prealloc_blocks=0, check_invariants=True) as llm:
        assert llm.capacity.dtype == dtype
        together = answers(llm.generate(token_ids, params))
        for place in range(0, 16, 3):
            assert answers(llm.generate([token_ids[place]], params[place])) == [together[place]]
