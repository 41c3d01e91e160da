"""Granite: Llama with a multiplier each for embedding, scores, what joins the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    bias = read.flag("attention_bias", False)
    return DecoderConfig.from_hf(
        hf,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias", False),
        embedding_scale=read.number("embedding_multiplier", 1.0),
        attention_scale=read.number("attention_multiplier", 1.0),
        residual_multiplier=read.number("residual_multiplier", 1.0),
        logits_divisor=read.number("logits_scaling", 1.0),
    )
