"""Every architecture of GGUF gives what the folder of the same weights gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.models.checkpoints import GEMMA2, GRANITE, MIXTRAL, OLMO3, QWEN3_MOE, SMOLLM3, ids, make
from tests.models.gguf_files import write_gguf
from tests.oracle import logits, make_runner, reference_logits

# The converter writes no width of heads but for Gemma: it is that of the model by their number.
NARROW: dict[str, Any] = {"head_dim": 12}
SCALES = {"embedding_scale": 6.0, "attention.scale": 0.1, "residual_scale": 0.22, "logit_scale": 4.0}
FILES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", "gemma", {"tie_word_embeddings": True}, {}),
    "gemma 2": (
        "gemma2",
        "gemma2",
        GEMMA2 | {"query_pre_attn_scalar": 16},
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "mixtral": ("llama", "mixtral", MIXTRAL | NARROW, {"expert_count": 5, "expert_used_count": 2}),
    "qwen3 moe": (
        "qwen3moe",
        "qwen3_moe",
        QWEN3_MOE,
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24},
    ),
    "granite": ("granite", "granite", GRANITE | NARROW, SCALES),
    "olmo 2": ("olmo2", "olmo2", {"pad_token_id": 0} | NARROW, {}),
    "olmo 3": ("olmo2", "olmo3", OLMO3 | NARROW | {"rope_theta": 500_000.0}, {}),
    "seed oss": ("seed_oss", "seed_oss", {}, {}),
    "smollm3": ("smollm3", "smollm3", SMOLLM3 | NARROW, {}),
    "smollm3, biases": ("smollm3", "smollm3", SMOLLM3 | NARROW | {"attention_bias": True, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_quantized_experts_are_transformers_on_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    architecture, model_type, differences, keys = FILES[name]
    inner = {"moe_intermediate_size": 32, "intermediate_size": 96}
    model = make(tmp_path, model_type, differences | inner | {"hidden_size": 64, "head_dim": 16})
    keys = keys | ({"expert_feed_forward_length": 32} if name == "qwen3 moe" else {})
    stored = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", model, architecture, keys, stored)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not part.endswith("gate.weight"):
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), stored), stored)))
    runner = make_runner(tmp_path / "model.gguf", quantization="none")
    assert (logits(runner, ids(100)) - reference_logits(model, ids(100))).abs().max() < 2e-4
    runner = make_runner(tmp_path / "model.gguf")
    assert torch.equal(logits(runner, ids(100)), logits(runner, ids(100), 7))
    assert runner.capacity.weight_bytes < 0.5 * make_runner(tmp_path / "model.gguf", quantization="none").capacity.weight_bytes


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_and_a_folder_of_the_same_weights_agree(name: str, tmp_path: Path) -> None:
    architecture, model_type, differences, keys = FILES[name]
    model = make(tmp_path, model_type, differences)
    write_gguf(tmp_path / "model.gguf", model, architecture, keys)
    found = logits(make_runner(tmp_path / "model.gguf"), ids(100))
    assert (found - logits(make_runner(tmp_path), ids(100))).abs().max() < 1e-5
    assert (found - reference_logits(model, ids(100))).abs().max() < 2e-4
