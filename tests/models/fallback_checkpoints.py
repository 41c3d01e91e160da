"""Tiny random checkpoints of types that have no code of Octavo's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.models.checkpoints import saved

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # windows
    "sliding_window": 17,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # other names
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "n_inner": 80,
    "init_std": 0.2,
    "word_embed_proj_dim": 64,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 1,
}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "ministral": {"layer_types": ["sliding_attention"] * 4},
    "llama4_text": {"layer_types": ["chunked_attention"] * 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
}
"""What a type needs beside, or otherwise."""


def make(folder: Path, model_type: str, **differences: Any) -> Any:
    """Save a model, and return it. Of SMALL it gets what its configuration knows."""
    usual = transformers.AutoConfig.for_model(model_type)
    known = {*usual.to_dict(), *usual.attribute_map}
    given = {name: value for name, value in SMALL.items() if name in known} | OWN.get(model_type, {}) | differences
    return saved(folder, transformers.AutoConfig.for_model(model_type, **given), 0)
