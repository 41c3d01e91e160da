"""Qwen3 with experts in place of the feed-forward of every layer, or of every so many, save those named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, shown
from octavo.layers.feed_forward import ExpertsConfig
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    layers, bias = read.whole("num_hidden_layers", high=10_000), read.flag("attention_bias", False)
    window = read.whole("sliding_window", None) if read.flag("use_sliding_window", False) else None
    return DecoderConfig.from_hf(
        hf, qkv_bias=bias, output_bias=bias, normed="head", windows=(window,) * layers, experts=_experts(hf, layers)
    )


def _experts(hf: Mapping[str, Any], layers: int) -> tuple[ExpertsConfig | None, ...]:
    read = Fields(hf)
    count = read.whole("num_experts" if hf.get("num_local_experts") is None else "num_local_experts", low=0)
    if not count:
        return (None,) * layers
    experts = ExpertsConfig(
        count=count,
        chosen=read.whole("num_experts_per_tok", high=count),
        inner=read.whole("moe_intermediate_size"),
        over_chosen=read.flag("norm_topk_prob", False),
    )
    period, plain = read.whole("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise CheckpointError(f"mlp_only_layers: {shown(plain)}; allowed: a list of layers' numbers")
    return tuple(experts if (layer + 1) % period == 0 and layer not in plain else None for layer in range(layers))
