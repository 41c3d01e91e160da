"""Self-attention over the paged KV cache, heads grouped."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.norm import NormConfig, RMSNorm
from octavo.layers.weights import Weights
from octavo.ops.interface import AttentionBatch, LayerKV, Ops

Normed: TypeAlias = Literal["head", "projection"]
"""What of query and key is normalised before it is rotated: each head by itself, or all of them as one."""


class Attention:
    """Projects, rotates, stores keys and values, attends, projects back.

    scale: of scores. softcap: they are brought within it by its tanh. window: positions a token sees, its own included.
    fused: the checkpoint has query, key and value as one tensor.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float | None,
        window: int | None,
        qkv_bias: bool,
        output_bias: bool,
        fused: bool,
        normed: Normed | None,
        norm: NormConfig,
    ) -> None:
        self._ops = ops
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._scale, self._softcap, self._window = scale, softcap, window
        self._sizes = sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        names = ["qkv"] if fused else ["q", "k", "v"]
        self._qkv = Linear(ops, weights, [f"{name}.{part}_proj" for part in names], hidden_size, sizes, qkv_bias)
        self._output = Linear(ops, weights, [f"{name}.o_proj"], sizes[0], [hidden_size], output_bias)
        self._normed = normed
        if normed:
            spans = [head_dim, head_dim] if normed == "head" else sizes[:2]
            self._norms = [RMSNorm(ops, weights, f"{name}.{part}_norm", span, norm) for part, span in zip("qk", spans, strict=True)]

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv: LayerKV, batch: AttentionBatch) -> Tensor:
        query, key, value = self._qkv(x).split(self._sizes, 1)
        if self._normed == "projection":
            query, key = self._norms[0](query), self._norms[1](key)
        query, key, value = (part.view(x.shape[0], -1, self._head_dim) for part in (query, key, value))
        if self._normed == "head":
            query, key = self._norms[0](query), self._norms[1](key)
        out = self._ops.paged_attention(query, key, value, rotation, kv, batch, self._scale, self._window, self._softcap)
        return self._output(out.reshape(x.shape[0], -1))
