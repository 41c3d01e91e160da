"""Tiny GGUF files, written as llama.cpp's converter does: by its names and keys, with what it changes and leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
STORED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
FOLLOWED = STORED | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SEED_OSS = STORED | {"post_attention_layernorm": "post_attention_norm"}
GEMMAS, ROTATING_PAIRS = ("gemma", "gemma2", "gemma3"), ("granite", "smollm3", "llama")
WIDE = (*GEMMAS, "qwen3moe", "seed_oss")
"""Those of which the width of heads is written."""


def tensors(model: Any) -> dict[str, np.ndarray]:
    """By HF's names; experts of one kind are one tensor each."""
    held = {}
    for name, tensor in model.state_dict().items():
        part, stacked, kind = name.partition(".experts.")
        if not stacked:
            held[name] = tensor.numpy()
        elif kind == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            held |= {f"{part}.experts.gate_proj.weight": gate.numpy(), f"{part}.experts.up_proj.weight": up.numpy()}
        else:
            held[f"{name}.weight"] = tensor.numpy()
    return held


def stored_name(name: str, architecture: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    names = {"gemma2": FOLLOWED, "gemma3": FOLLOWED, "olmo2": FOLLOWED, "seed_oss": SEED_OSS}.get(architecture, STORED)
    return f"blk.{layer}.{names[part]}.{kind}"


def write_gguf(path: Path, model: Any, architecture: str, keys: dict[str, Any] | None = None, kind: Kind = Kind.F32) -> None:
    """keys: what this architecture says beside what all do. kind: of matrices."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rotary["rope_theta"])
    if architecture in WIDE:
        writer.add_key_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in (keys or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{key}", value)
    for name, tensor in tensors(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor + np.float32(architecture in GEMMAS and name.endswith("norm.weight"))
        if architecture in ROTATING_PAIRS and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        stored = kind if values.ndim >= 2 and ".gate." not in name else Kind.F32
        writer.add_tensor(stored_name(name, architecture), gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
