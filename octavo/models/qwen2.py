"""Qwen2: Llama with biases on query, key and value, and windows on the upper layers where they are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(hf, qkv_bias=True, windows=windows(hf))


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The layers named in `layer_types`, or those from `max_window_layers` on."""
    layers = hf["num_hidden_layers"]
    if not hf.get("use_sliding_window"):
        return (None,) * layers
    full = hf.get("max_window_layers", 28)
    types = hf.get("layer_types") or ["sliding_attention" if layer >= full else "full_attention" for layer in range(layers)]
    return tuple(hf["sliding_window"] if kind == "sliding_attention" else None for kind in types)
