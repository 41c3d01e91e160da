"""SmolLM3: Llama with layers in which positions do not enter, one of four where nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import CheckpointError, shown
from octavo.loading.fields import Fields
from octavo.models.layer_kinds import windows
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    bias, period = read.flag("attention_bias", False), read.whole("no_rope_layer_interval", 4)
    layers = read.whole("num_hidden_layers", high=10_000)
    rotates = hf.get("no_rope_layers") or [int((layer + 1) % period != 0) for layer in range(layers)]  # in spite of its name: 1 does
    if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
        raise CheckpointError(f"no_rope_layers: {shown(rotates)}; allowed: {layers} times 0 or 1")
    window = read.whole("sliding_window", None) if read.flag("use_sliding_window", False) else None
    config = DecoderConfig.from_hf(
        {"rope_theta": 2_000_000.0, "tie_word_embeddings": True, **hf},
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias", False),
        windows=windows(hf, window, lambda layer: not rotates[layer]),
    )
    return replace(config, rotaries=tuple(config.rotary if turns else None for turns in rotates))
