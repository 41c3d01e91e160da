"""Seed-OSS: Llama with a switch each for the biases of what attention reads, what it gives, and the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    return DecoderConfig.from_hf(
        {"head_dim": 128, "num_key_value_heads": 8, **hf},
        qkv_bias=read.flag("attention_bias", True),
        output_bias=read.flag("attention_out_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
    )
