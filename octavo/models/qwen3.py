"""Qwen3: Llama with each head of query and key normalised before rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig
from octavo.models.qwen2 import upper_windows


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    bias = Fields(hf).flag("attention_bias", False)
    return DecoderConfig.from_hf(hf, qkv_bias=bias, output_bias=bias, normed="head", windows=upper_windows(hf))
