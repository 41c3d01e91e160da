"""The Llama decoder, and with it every model that differs from it only in the data of `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.attention import Attention
from octavo.layers.linear import Embedding, Linear, OutputHead
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryConfig, RotaryEmbedding
from octavo.layers.weights import Weights
from octavo.loading.fields import Fields
from octavo.ops.interface import AttentionBatch, LayerKV, Ops


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What distinguishes one decoder from another. windows[i] is layer i's sliding window, None for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: RotaryConfig
    tied: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
        """Read an HF configuration; `differences` are what the model type fixes. Raises CheckpointError naming what is missing."""
        read = Fields(hf)
        if (activation := read.word("hidden_act", "silu")) not in ("silu", "swish"):
            raise CheckpointError(f"hidden_act: {activation!r} is not supported; supported: silu")
        hidden, layers, heads = read.whole("hidden_size"), read.whole("num_hidden_layers", high=10_000), read.whole("num_attention_heads")
        kv_heads = read.whole("num_key_value_heads", heads)
        head_dim = read.whole("head_dim", hidden // heads)
        if heads % kv_heads:
            raise CheckpointError(f"num_attention_heads: {heads} is no multiple of num_key_value_heads: {kv_heads}")
        fields: dict[str, Any] = {
            "vocab_size": read.whole("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": read.whole("intermediate_size"),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": read.number("rms_norm_eps", 1e-6),
            "rotary": RotaryConfig.from_hf(hf, head_dim),
            "tied": read.flag("tie_word_embeddings", False),
            "windows": (None,) * layers,
        }
        return cls(**(fields | differences))


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    bias = read.flag("attention_bias", False)
    return DecoderConfig.from_hf(hf, qkv_bias=bias, output_bias=bias, mlp_bias=read.flag("mlp_bias", False))


class DecoderLayer:
    """Attention, then a gated feed-forward; each normalises its input and adds to the residual stream."""

    def __init__(self, ops: Ops, weights: Weights, name: str, config: DecoderConfig, window: int | None) -> None:
        self._ops = ops
        size, inner = config.hidden_size, config.intermediate_size
        self._input_norm = RMSNorm(ops, weights, f"{name}.input_layernorm", size, config.rms_norm_eps)
        self._attention = Attention(
            ops,
            weights,
            f"{name}.self_attn",
            hidden_size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            head_norm_eps=config.rms_norm_eps if config.head_norm else None,
            window=window,
        )
        self._post_norm = RMSNorm(ops, weights, f"{name}.post_attention_layernorm", size, config.rms_norm_eps)
        self._gate_up = Linear(ops, weights, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], size, [inner, inner], config.mlp_bias)
        self._down = Linear(ops, weights, [f"{name}.mlp.down_proj"], inner, [size], config.mlp_bias)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: tuple[Tensor, Tensor], kv: LayerKV, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._input_norm.add(x, residual)
        x = self._attention(x, rotation, kv, batch)
        x, residual = self._post_norm.add(x, residual)
        return self._down(self._ops.activate_and_mul(self._gate_up(x), "silu")), residual


class Decoder:
    """Token ids to hidden states, and hidden states to logits. length: positions the rotary table covers."""

    def __init__(self, ops: Ops, weights: Weights, config: DecoderConfig, length: int) -> None:
        self.config = config
        self._embed = Embedding(ops, weights, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [DecoderLayer(ops, weights, f"model.layers.{i}", config, window) for i, window in enumerate(config.windows)]
        self._norm = RMSNorm(ops, weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        tied = self._embed if config.tied else None
        self._head = OutputHead(ops, weights, "lm_head", config.vocab_size, config.hidden_size, tied)
        divisors = weights.take("rope_freqs.weight", config.rotary.dim // 2).float().cpu() if "rope_freqs.weight" in weights else None
        self._rotary = RotaryEmbedding(ops, config.rotary, length, divisors)

    def forward(self, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        """[T] ids at [T] positions -> hidden states [T, hidden_size], normalised for the head."""
        rotation = self._rotary(positions)
        x, residual = self._embed(token_ids), None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x, residual = layer(x, residual, rotation, layer_kv, batch)
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], float32."""
        return self._head(hidden)
