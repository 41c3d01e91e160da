"""OLMo 2: Llama with norms of what joins the residual stream in place of norms of the stream, and of query and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.norm import NormConfig
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig, LayerNorms


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return from_hf(hf)


def from_hf(hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
    """What OLMo 2 and 3 have in common, and `differences`."""
    read = Fields(hf)
    bias = read.flag("attention_bias", False)
    norms = LayerNorms(
        before_attention=None, after_attention="post_attention_layernorm", before_mlp=None, after_mlp="post_feedforward_layernorm"
    )
    common: dict[str, Any] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "normed": "projection",
        "norm": NormConfig(read.number("rms_norm_eps", 1e-5), wide=True),
        "layer_norms": norms,
    }
    return DecoderConfig.from_hf(hf, **common, **differences)
