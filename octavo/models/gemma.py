"""Gemma: Llama gated by GELU, its embedding scaled, one added to its norms' weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.norm import NormConfig
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return from_hf(hf)


def from_hf(hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
    """What all Gemmas have in common, and `differences`."""
    read = Fields(hf)
    bias = read.flag("attention_bias", False)
    common: dict[str, Any] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm": NormConfig(read.number("rms_norm_eps", 1e-6), offset=1.0, wide=True),
        "embedding_scale": read.whole("hidden_size") ** 0.5,
    }
    usual = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return DecoderConfig.from_hf({**usual, **hf}, **common, **differences)
