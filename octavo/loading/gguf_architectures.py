"""What `general.architecture` of a GGUF file stands for: HF's names for the model and its tensors, and what converters change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FOLLOWED_NAMES = {name: hf for name, hf in LAYER_NAMES.items() if name not in ("attn_norm", "ffn_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of layers whose norms come after attention and feed-forward."""
EXPERTS_NAMES = LAYER_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Experts of one kind are one tensor there, and one each in HF's."""
MIXTRAL_NAMES = LAYER_NAMES | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
SANDWICHED_NAMES = FOLLOWED_NAMES | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """keys: what the metadata may say beside what all models say, by HF's name: its key after the architecture's name, and its type.

    implied: from HF's configuration so far, what no key says. interleaved: the two halves of query and key heads are interleaved.
    norm_offset: what the file's norm weights hold more than HF's.
    """

    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    keys: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    interleaved: bool = False
    norm_offset: float = 0.0


EXPERTS_KEYS = {"num_local_experts": ("expert_count", int), "num_experts_per_tok": ("expert_used_count", int)}
GELU = {"hidden_act": "gelu_pytorch_tanh"}


def _gemma(largest: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """The largest, of so many layers, scales scores by the width of the model that each head stands for."""

    def implied(config: Mapping[str, Any]) -> Mapping[str, Any]:
        by_width = config["num_hidden_layers"] == largest
        scalar = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        return {**GELU, "query_pre_attn_scalar": scalar}

    return implied


ARCHITECTURES = {
    # Mixtral goes by the same name, with experts.
    "llama": Architecture(
        model_type="llama",
        layer_names=MIXTRAL_NAMES,
        keys=EXPERTS_KEYS,
        implied=lambda config: {"model_type": "mixtral"} if config.get("num_local_experts") else {},
        interleaved=True,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        layer_names=EXPERTS_NAMES,
        keys=EXPERTS_KEYS | {"moe_intermediate_size": ("expert_feed_forward_length", int)},
        implied=lambda config: {"norm_topk_prob": True},
    ),
    "gemma": Architecture(model_type="gemma", implied=lambda config: GELU, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2",
        layer_names=SANDWICHED_NAMES,
        keys={
            "sliding_window": ("attention.sliding_window", int),
            "attn_logit_softcapping": ("attn_logit_softcapping", float),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        implied=_gemma(largest=46),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        layer_names=SANDWICHED_NAMES,
        keys={
            "sliding_window": ("attention.sliding_window", int),
            "sliding_window_pattern": ("attention.sliding_window_pattern", int),
            "rope_local_base_freq": ("rope.freq_base_swa", float),
        },
        implied=_gemma(largest=62),
        norm_offset=1.0,
    ),
    "granite": Architecture(
        model_type="granite",
        keys={
            "embedding_multiplier": ("embedding_scale", float),
            "attention_multiplier": ("attention.scale", float),
            "residual_multiplier": ("residual_scale", float),
            "logits_scaling": ("logit_scale", float),
        },
        interleaved=True,
    ),
    # OLMo 3 goes by the same name, with a window.
    "olmo2": Architecture(
        model_type="olmo2",
        layer_names=FOLLOWED_NAMES,
        keys={"sliding_window": ("attention.sliding_window", int)},
        implied=lambda config: {"model_type": "olmo3"} if "sliding_window" in config else {},
    ),
    "seed_oss": Architecture(model_type="seed_oss", layer_names=LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Architecture(model_type="smollm3", interleaved=True),
}
