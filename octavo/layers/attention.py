"""Self-attention over the paged KV cache, heads grouped."""

from __future__ import annotations

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.weights import Weights
from octavo.ops.interface import AttentionBatch, LayerKV, Ops


class Attention:
    """Projects, rotates, stores keys and values, attends, projects back.

    head_norm: normalise each head of query and key before rotating. window: positions a token sees, its own included.
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
        qkv_bias: bool,
        output_bias: bool,
        head_norm_eps: float | None,
        window: int | None,
    ) -> None:
        self._ops = ops
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._window = window
        self._scale = head_dim**-0.5
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self._qkv = Linear(ops, weights, [f"{name}.{part}_proj" for part in "qkv"], hidden_size, sizes, qkv_bias)
        self._output = Linear(ops, weights, [f"{name}.o_proj"], sizes[0], [hidden_size], output_bias)
        self._norms = None
        if head_norm_eps is not None:
            self._norms = [RMSNorm(ops, weights, f"{name}.{part}_norm", head_dim, head_norm_eps) for part in "qk"]

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv: LayerKV, batch: AttentionBatch) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key, value = heads.split([self._num_heads, self._num_kv_heads, self._num_kv_heads], 1)
        if self._norms:
            query, key = self._norms[0](query), self._norms[1](key)
        out = self._ops.paged_attention(query, key, value, rotation, kv, batch, self._scale, self._window)
        return self._output(out.reshape(x.shape[0], -1))
