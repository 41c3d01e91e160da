"""Gemma 3: norms on both sides of attention and feed-forward; local layers see a window, and rotate by a base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import CheckpointError
from octavo.layers.norm import NormConfig
from octavo.layers.rotary import RotaryConfig
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig, LayerNorms
from octavo.models.windows import windows

SANDWICH = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    if read.flag("use_bidirectional_attention", False):
        raise CheckpointError("use_bidirectional_attention: True is not supported; every token sees those before it only")
    bias, period = read.flag("attention_bias", False), read.whole("sliding_window_pattern", 6)
    full, local = _rotations(hf)
    config = DecoderConfig.from_hf(
        {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **hf, "rope_parameters": full},
        windows=windows(hf, read.whole("sliding_window", 4096), lambda layer: (layer + 1) % period != 0),
        attention_scale=read.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        normed="head",
        norm=NormConfig(read.number("rms_norm_eps", 1e-6), offset=1.0, wide=True),
        layer_norms=SANDWICH,
        embedding_scale=read.whole("hidden_size") ** 0.5,
    )
    local_rotary = RotaryConfig.from_hf({**hf, "rope_parameters": local}, config.head_dim)
    return replace(config, rotaries=tuple(local_rotary if window else config.rotary for window in config.windows))


def _rotations(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rotary parameters of global and of local layers: HF's `rope_parameters` by kind of layer, or the older keys beside each other."""
    read = Fields(hf)
    given = read.section("rope_parameters")
    full = {"rope_theta": read.number("rope_theta", 1e6), **read.section("rope_scaling").values, **given.section("full_attention").values}
    local = {"rope_theta": read.number("rope_local_base_freq", 10_000.0), **given.section("sliding_attention").values}
    if factor := Fields(full).number("factor", None):
        # The context that the configuration names is the stretched one.
        full.setdefault("original_max_position_embeddings", int(read.whole("max_position_embeddings") / factor))
    return full, local
