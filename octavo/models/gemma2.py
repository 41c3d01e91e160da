"""Gemma 2: Gemma with norms on both sides of attention and feed-forward, windows on every other layer, scores and logits capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError
from octavo.loading.fields import Fields
from octavo.models import gemma
from octavo.models.layer_kinds import windows
from octavo.models.llama import DecoderConfig, LayerNorms

SANDWICH = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    return from_hf(
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **hf},
        windows=windows(hf, Fields(hf).whole("sliding_window", 4096), lambda layer: layer % 2 == 0),
    )


def from_hf(hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
    """What Gemma 2 and 3 have in common, and `differences`."""
    read = Fields(hf)
    if read.flag("use_bidirectional_attention", False):
        raise CheckpointError("use_bidirectional_attention: True is not supported; every token sees those before it only")
    common: dict[str, Any] = {
        "layer_norms": SANDWICH,
        "attention_scale": read.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": read.number("attn_logit_softcapping", None),
        "logits_softcap": read.number("final_logit_softcapping", None),
    }
    return gemma.from_hf(hf, **common, **differences)
