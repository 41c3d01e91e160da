"""Qwen2: Llama with biases on query, key and value, and windows on the upper layers where they are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models.layer_kinds import windows
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(hf, qkv_bias=True, windows=upper_windows(hf))


def upper_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Of the layers named in `layer_types`, or those from `max_window_layers` on."""
    read = Fields(hf)
    if not read.flag("use_sliding_window", False):
        return (None,) * read.whole("num_hidden_layers", high=10_000)
    full = read.whole("max_window_layers", 28, low=0)
    return windows(hf, read.whole("sliding_window"), lambda layer: layer >= full)
