"""Models by GPTQ and AWQ are transformers' on the numbers that their codes stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.errors import CheckpointError
from octavo.ops.reference import rounded_to_int8
from tests.loading.packing import SETTINGS, pack_folder
from tests.models.checkpoints import MIXTRAL, PHI3, QWEN3_MOE, ids, make
from tests.models.test_company import PROMPTS, TIGHT, add_tokenizer, answers
from tests.oracle import logits, make_runner, reference_logits

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "llama, gptq": ("gptq", 32, "llama", {"head_dim": 8}),
    "llama, gptq in groups of 128": (
        "gptq, asymmetric",
        128,
        "llama",
        {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1},
    ),
    "qwen2, gptq v2": ("gptq v2, asymmetric", 64, "qwen2", {}),
    "phi 3, awq": ("awq", 32, "phi3", PHI3 | {"rope_scaling": None}),
    "phi 3, gptq": ("gptq", 64, "phi3", PHI3 | {"rope_scaling": None}),
    "qwen3 moe, awq": ("awq", 32, "qwen3_moe", QWEN3_MOE | {"moe_intermediate_size": 32}),
    "mixtral, gptq": ("gptq", 32, "mixtral", MIXTRAL),
}


def is_packed(name: str) -> bool:
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def write(folder: Path, name: str, as_run: bool = False) -> Any:
    """Returns transformers' model on the numbers of what is written, or those that run."""
    kind, group_size, model_type, differences = MODELS[name]
    make(folder, model_type, WIDE | differences)
    plain = folder / "plain"
    plain.mkdir()
    shutil.copy(folder / "config.json", plain)
    save_file(pack_folder(folder, SETTINGS[kind], group_size, is_packed, as_run), plain / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_transformers(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    expected = reference_logits(model, ids(100))
    exact = logits(make_runner(tmp_path, quantization="none"), ids(100))
    assert expected.std() > 0.1
    assert (exact - expected).abs().max() < 2e-4
    add_tokenizer(tmp_path, model.config.vocab_size)
    with LLM(tmp_path, dtype="float32", quantization="none", check_invariants=True, **TIGHT) as llm:
        for prompt, answer in zip(PROMPTS, answers(llm, PROMPTS), strict=True):
            assert answer == reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("qwen3 moe", "mixtral"))])
def test_codes_run_as_they_are(name: str, tmp_path: Path) -> None:
    """transformers' products take activations rounded as ours are; now and then one in the middle is rounded the other way."""
    model = write(tmp_path, name, as_run=True)
    for part, module in model.named_modules():
        if is_packed(f"{part}.weight"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded_to_int8(inputs[0]),))
    runner, texts = make_runner(tmp_path, kv_cache_dtype="float32"), [ids(length) for length in range(5, 20)]
    errors = [float((logits(runner, text) - reference_logits(model, text)).abs().max()) for text in texts]
    assert sorted(errors)[len(texts) // 2] < 2e-5, errors


@pytest.mark.parametrize("name", MODELS)
def test_codes_in_any_company(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    runner = make_runner(tmp_path)
    whole = logits(runner, ids(100))
    assert runner.capacity.weight_bytes < 0.6 * make_runner(tmp_path, quantization="none").capacity.weight_bytes
    for chunk in (1, 7):
        assert torch.equal(logits(runner, ids(100), chunk), whole)
    add_tokenizer(tmp_path, model.config.vocab_size)
    with LLM(tmp_path, prefix_caching=False, max_blocks=200) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM(tmp_path, check_invariants=True, **TIGHT) as llm:
        assert answers(llm, PROMPTS) == alone


def test_biases_of_zeros_that_no_layer_has_are_left_alone(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every matrix."""
    model = write(tmp_path, "llama, gptq")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    held = load_file(path)
    save_file(held | {name: torch.zeros(96).half()}, path)
    found = logits(make_runner(tmp_path, quantization="none"), ids(20))
    assert (found - reference_logits(model, ids(20))).abs().max() < 2e-4
    save_file(held | {name: torch.ones(96).half()}, path)
    with pytest.raises(CheckpointError, match=f"does not use: {name}"):
        make_runner(tmp_path)


def test_the_configuration_that_disagrees_with_a_packed_matrix_is_named(tmp_path: Path) -> None:
    write(tmp_path, "phi 3, gptq")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj.weight \[192, 64\]; the configuration says \[128, 64\]"):
        make_runner(tmp_path)
