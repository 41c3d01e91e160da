"""The Llama decoder, and with it every model that differs from it only in the data of `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.attention import Attention, Normed
from octavo.layers.feed_forward import Experts, ExpertsConfig, FeedForward
from octavo.layers.linear import Embedding, OutputHead
from octavo.layers.norm import NormConfig, RMSNorm, Sum
from octavo.layers.rotary import NoRotation, RotaryConfig, RotaryEmbedding
from octavo.layers.weights import Weights
from octavo.loading.fields import Fields
from octavo.ops.interface import Activation, AttentionBatch, LayerKV, Ops

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By HF's names."""


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """A layer's norms by their names in the checkpoint, None where there is none: of the residual stream, and of what is added to it."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What distinguishes one decoder from another.

    rotary: its context is the model's. rotaries[i] is layer i's, None where positions do not enter.
    windows[i] is layer i's sliding window, None for full attention. experts[i] are layer i's, None for one feed-forward.
    residual_multiplier: of what attention and feed-forward add to the residual stream. logits_divisor: of the logits.
    attention_softcap, logits_softcap: scores and logits are brought within it by its tanh.
    fused: the checkpoint has query, key and value as one tensor, and so gate and up.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormConfig
    rotary: RotaryConfig
    rotaries: tuple[RotaryConfig | None, ...]
    tied: bool
    windows: tuple[int | None, ...]
    experts: tuple[ExpertsConfig | None, ...]
    attention_scale: float
    activation: Activation
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    normed: Normed | None = None
    layer_norms: LayerNorms = LayerNorms()
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    @property
    def context(self) -> int:
        """Tokens that a sequence may have."""
        return self.rotary.context

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
        """Read an HF configuration; `differences` are what the model type fixes. Raises CheckpointError naming what is missing."""
        read = Fields(hf)
        activation = read.word("hidden_activation", None) or read.word("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise CheckpointError(f"hidden_act: {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        hidden, layers, heads = read.whole("hidden_size"), read.whole("num_hidden_layers", high=10_000), read.whole("num_attention_heads")
        kv_heads = read.whole("num_key_value_heads", heads)
        head_dim = read.whole("head_dim", hidden // heads)
        if heads % kv_heads:
            raise CheckpointError(f"num_attention_heads: {heads} is no multiple of num_key_value_heads: {kv_heads}")
        rotary = RotaryConfig.from_hf(hf, head_dim)
        fields: dict[str, Any] = {
            "vocab_size": read.whole("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": read.whole("intermediate_size"),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "norm": NormConfig(read.number("rms_norm_eps", 1e-6)),
            "rotary": rotary,
            "rotaries": (rotary,) * layers,
            "tied": read.flag("tie_word_embeddings", False),
            "windows": (None,) * layers,
            "experts": (None,) * layers,
            "attention_scale": head_dim**-0.5,
            "activation": ACTIVATIONS[activation],
        }
        return cls(**(fields | differences))


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    bias = read.flag("attention_bias", False)
    return DecoderConfig.from_hf(hf, qkv_bias=bias, output_bias=bias, mlp_bias=read.flag("mlp_bias", False))


class DecoderLayer:
    """Attention, then a gated feed-forward, or experts; each reads the residual stream and adds to it."""

    def __init__(self, ops: Ops, weights: Weights, name: str, config: DecoderConfig, layer: int) -> None:
        size, norms, experts = config.hidden_size, config.layer_norms, config.experts[layer]

        def before(part: str | None) -> RMSNorm | Sum:
            multiplier = config.residual_multiplier
            return RMSNorm(ops, weights, f"{name}.{part}", size, config.norm, multiplier) if part else Sum(ops, multiplier)

        def after(part: str | None) -> Callable[[Tensor], Tensor]:
            return RMSNorm(ops, weights, f"{name}.{part}", size, config.norm) if part else lambda x: x

        self._before_attention = before(norms.before_attention)
        self._attention = Attention(
            ops,
            weights,
            f"{name}.self_attn",
            hidden_size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=config.windows[layer],
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            fused=config.fused,
            normed=config.normed,
            norm=config.norm,
        )
        self._after_attention = after(norms.after_attention)
        self._before_mlp = before(norms.before_mlp)
        self._mlp: Callable[[Tensor], Tensor]
        if experts is None:
            shape, bias = (size, config.intermediate_size), config.mlp_bias
            self._mlp = FeedForward(ops, weights, f"{name}.mlp", *shape, config.activation, bias=bias, fused=config.fused)
        else:
            self._mlp = Experts(ops, weights, name, size, experts, config.activation)
        self._after_mlp = after(norms.after_mlp)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: tuple[Tensor, Tensor], kv: LayerKV, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """What the layer before adds, and the residual stream it adds to -> the same of this layer."""
        x, residual = self._before_attention.add(x, residual)
        x = self._after_attention(self._attention(x, rotation, kv, batch))
        x, residual = self._before_mlp.add(x, residual)
        return self._after_mlp(self._mlp(x)), residual


class Decoder:
    """Token ids to hidden states, and hidden states to logits. length: positions the rotary tables cover."""

    def __init__(self, ops: Ops, weights: Weights, config: DecoderConfig, length: int) -> None:
        self.config = config
        self._embed = Embedding(ops, weights, "model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale)
        self._layers = [DecoderLayer(ops, weights, f"model.layers.{i}", config, i) for i in range(config.num_layers)]
        self._norm = RMSNorm(ops, weights, "model.norm", config.hidden_size, config.norm, config.residual_multiplier)
        tied = self._embed if config.tied else None
        ends = (config.logits_divisor, config.logits_softcap)
        self._head = OutputHead(ops, weights, "lm_head", config.vocab_size, config.hidden_size, tied, *ends)
        divisors = weights.take("rope_freqs.weight", config.rotary.dim // 2).float().cpu() if "rope_freqs.weight" in weights else None
        kinds: list[RotaryConfig | None] = []
        for kind in config.rotaries:
            if kind not in kinds:
                kinds.append(kind)
        self._rotations = [NoRotation() if kind is None else RotaryEmbedding(ops, kind, length, divisors) for kind in kinds]
        self._rotation_of = [kinds.index(kind) for kind in config.rotaries]

    def forward(self, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        """[T] ids at [T] positions -> hidden states [T, hidden_size], normalised for the head."""
        rotations = [rotation(positions) for rotation in self._rotations]
        x, residual = self._embed(token_ids), None
        for layer, which, layer_kv in zip(self._layers, self._rotation_of, kv, strict=True):
            x, residual = layer(x, residual, rotations[which], layer_kv, batch)
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], float32."""
        return self._head(hidden)
