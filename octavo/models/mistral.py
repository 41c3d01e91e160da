"""Mistral: Llama, where every layer may see a sliding window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(hf, windows=(hf.get("sliding_window"),) * hf["num_hidden_layers"])
