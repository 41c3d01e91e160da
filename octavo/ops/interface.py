"""The seam between models and hardware: every operator a model may call, and the one way to describe a mixed batch to attention.

A backend is an object with these methods. Models receive it once and know nothing of devices. Every backend is checked
against `reference.py` by one conformance suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values inside the block-major region.

    region: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], keys at index 0 and values at index 1 of axis 2.
    """

    region: Tensor
    layer: int

    @property
    def keys(self) -> Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self.region[:, self.layer, 0]

    @property
    def values(self) -> Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self.region[:, self.layer, 1]


@dataclass
class AttentionBatch:
    """Which tokens attend to what: R rows of any mix of chunk and decode, T tokens in all, in row order.

    counts[r]: new tokens of row r. starts[r]: the position of the first. tables[r]: the row's block table, which covers
    starts[r] + counts[r] positions; entries behind a window may be HOLE.
    slots: [T] where each new token's keys and values go, as block id * block_size + offset.
    prepared: what a backend derives from the above, once a step, for all layers.
    """

    counts: list[int]
    starts: list[int]
    tables: list[Any]
    slots: Tensor
    block_size: int
    prepared: dict[Any, Any]


class Ops(Protocol):
    """Operators of one backend on one device. Results of a token never depend on the other tokens of the call."""

    device: torch.device

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """[T] ids and [V, H] weight -> [T, H]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, K] and [N, K] weight -> [T, N], in the dtype of x."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add the residual [T, H], then normalise over the last axis; returns (normalised, sum). x may be [T, heads, D]."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first 2 * cos.shape[-1] features of [T, heads, D]; cos and sin are float32 [T, rotary_dim / 2]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I] holding gate then up -> [T, I]."""

    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        """Store key and value [T, num_kv_heads, D] in their slots, then attend with query [T, num_heads, D] -> same shape.

        Token at position p sees positions max(0, p - window + 1) to p of its own row.
        """
