"""Every architecture of GGUF gives what the folder of the same weights gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    "smollm3": ("smollm3", "smollm3", SMOLLM3 | NARROW, {}),
    "smollm3, biases": ("smollm3", "smollm3", SMOLLM3 | NARROW | {"attention_bias": True, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_and_a_folder_of_the_same_weights_agree(name: str, tmp_path: Path) -> None:
    architecture, model_type, differences, keys = FILES[name]
    model = make(tmp_path, model_type, differences)
    write_gguf(tmp_path / "model.gguf", model, architecture, keys)
    found = logits(make_runner(tmp_path / "model.gguf"), ids(100))
    assert (found - logits(make_runner(tmp_path), ids(100))).abs().max() < 1e-5
    assert (found - reference_logits(model, ids(100))).abs().max() < 2e-4
