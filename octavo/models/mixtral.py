"""Mixtral: Mistral with experts in place of each feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.layers.feed_forward import ExpertsConfig
from octavo.loading.fields import Fields
from octavo.models import mistral
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    count = read.whole("num_local_experts")
    experts = ExpertsConfig(
        count=count,
        chosen=read.whole("num_experts_per_tok", high=count),
        inner=read.whole("intermediate_size"),
        over_chosen=True,
        block="block_sparse_moe",
        gate_up=("w1", "w3"),
        down="w2",
    )
    config = mistral.configure({"rope_theta": 1_000_000.0, **hf})
    return replace(config, experts=(experts,) * config.num_layers)
