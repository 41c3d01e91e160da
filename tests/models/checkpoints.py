"""Tiny random checkpoints of every model, and of every variation of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GEMMA2: dict[str, Any] = {
    "sliding_window": 17,
    "query_pre_attn_scalar": 40,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window_pattern": 3,
    "sliding_window": 17,
    "rope_theta": 1e6,
    "rope_local_base_freq": 300.0,
    "query_pre_attn_scalar": 40,
    "tie_word_embeddings": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}
PHI3: dict[str, Any] = {"hidden_size": 64, "original_max_position_embeddings": 32, "pad_token_id": 0, "rope_scaling": LONGROPE}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 4.0, "pad_token_id": 0}
SMOLLM3: dict[str, Any] = {"num_hidden_layers": 5, "pad_token_id": 0}
QWEN3_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
OLMO3: dict[str, Any] = {"num_hidden_layers": 5, "sliding_window": 17, "pad_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, six heads of 20": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}),
    "llama, heads wider than the model": ("llama", {"head_dim": 40}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, linear under the old key": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama, yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama, yarn with magnitudes": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_fast": 16,
                "beta_slow": 2,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 17}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows on upper layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3 moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3 moe, shares of all, plain layers between": (
        "qwen3_moe",
        QWEN3_MOE | {"norm_topk_prob": False, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3 moe, window, biases": (
        "qwen3_moe",
        QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 17, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral, window, every expert": ("mixtral", MIXTRAL | {"num_experts_per_tok": 5, "sliding_window": 17}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma 2": ("gemma2", GEMMA2),
    "gemma 2, without caps": ("gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "phi 3": ("phi3", PHI3 | {"rope_scaling": None}),
    "phi 3, window": ("phi3", PHI3 | {"rope_scaling": None, "sliding_window": 17}),
    "phi 3, longrope": ("phi3", PHI3),
    "phi 3, longrope of a part of each head": (
        "phi3",
        PHI3
        | {
            "partial_rotary_factor": 0.5,
            "rope_scaling": {name: value if name == "rope_type" else value[:4] for name, value in LONGROPE.items()},
        },
    ),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3, windows without rotation": (
        "smollm3",
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2},
    ),
    "granite": ("granite", GRANITE),
    "granite, biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo 2": ("olmo2", {"pad_token_id": 0}),
    "olmo 2, biases": ("olmo2", {"pad_token_id": 0, "attention_bias": True}),
    "olmo 3": ("olmo3", OLMO3),
    "olmo 3, stretched": (
        "olmo3",
        OLMO3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.1}},
    ),
    "seed oss": ("seed_oss", {}),
    "seed oss, biases everywhere": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "seed oss, no biases": ("seed_oss", {"attention_bias": False}),
    "gemma 3": ("gemma3_text", GEMMA3),
    "gemma 3, stretched": ("gemma3_text", GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma 3, wide heads and its own head": ("gemma3_text", GEMMA3 | {"head_dim": 256, "tie_word_embeddings": False}),
}


def make(folder: Path, model_type: str, differences: dict[str, Any]) -> Any:
    return saved(folder, transformers.AutoConfig.for_model(model_type, **(BASE | differences)), len(str(differences)))


def saved(folder: Path, config: Any, seed: int) -> Any:
    """A model of random weights, its norms and biases among them."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def ids(count: int) -> list[int]:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(count)).tolist()
