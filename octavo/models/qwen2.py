"""Qwen2: Llama with biases on query, key and value, and windows on the upper layers where they are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, shown
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(hf, qkv_bias=True, windows=windows(hf))


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The layers named in `layer_types`, or those from `max_window_layers` on."""
    read = Fields(hf)
    layers = read.whole("num_hidden_layers", high=10_000)
    if not read.flag("use_sliding_window", False):
        return (None,) * layers
    full, window = read.whole("max_window_layers", 28, low=0), read.whole("sliding_window")
    types = hf.get("layer_types") or ["sliding_attention" if layer >= full else "full_attention" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"layer_types: {shown(types)}; allowed: a list of {layers} names")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
