"""Phi-3: Llama with query, key and value as one tensor, and gate and up as another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    return DecoderConfig.from_hf(
        hf, fused=True, windows=(read.whole("sliding_window", None),) * read.whole("num_hidden_layers", high=10_000)
    )
