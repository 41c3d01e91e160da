"""The seam between models and hardware: every operator a model may call, and the one way to describe a mixed batch to attention.

A backend is an object with these methods. Models receive it once and know nothing of devices. Every backend is checked
against `reference.py` by one conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from octavo.quantization import Grouped


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What one block of KV memory holds, and its size; how it lies in there is the backend's.

    dtype: float32, bfloat16, float16, or int8, where each token's key and value of a head have a float32 scale.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def head_bytes(self) -> int:
        """Keys, or values, of one head in one layer."""
        scale = 4 if self.dtype == torch.int8 else 0
        return self.block_size * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_bytes


@dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values inside the block-major region.

    region: uint8 [num_blocks, shape.num_bytes]; a block is [num_layers, keys then values, num_kv_heads, head_bytes].
    layer: its place in a block. group: the KV group whose blocks hold it.
    """

    region: Tensor
    shape: BlockShape
    layer: int
    group: int = 0


Matrix: TypeAlias = Any
"""A weight [N, K], N its outputs, as a backend holds it: what `Ops.matrix` gave, with a `shape` and its size in memory, `nbytes`."""


@dataclass
class AttentionBatch:
    """Which tokens attend to what: R rows of any mix of chunk and decode, T tokens in all, in row order.

    counts[r]: new tokens of row r. starts[r]: the position of the first. tables[g][r]: the row's block table of KV group g, which
    covers starts[r] + counts[r] positions; entries behind a window may be HOLE, or stale.
    slots: [G, T] where each new token's keys and values go, as block id * block_size + offset.
    prepared: what a backend derives from the above, once a step, for all layers.
    """

    counts: list[int]
    starts: list[int]
    tables: list[list[Any]]
    slots: Tensor
    block_size: int
    prepared: dict[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How N rows are drawn from, a column each. Weights are exp((logit - peak) / temperature), in float32.

    temperature, min_p: float32 [N], the first above 0. top_k: int64 [N], 0 for no limit. top_p, uniform: float64 [N], the second in [0, 1).
    Kept are the top_k largest logits, of them those that weigh at least min_p, the peak weighing 1, and of them the fewest largest whose
    share of the weight reaches top_p; of equal logits the lower ids. Drawn is the first id at which the weights of those kept, added up
    in the order of ids, exceed `uniform` of all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


Activation: TypeAlias = Literal["silu", "gelu_tanh"]

Forward: TypeAlias = Callable[[Tensor, Tensor, list[LayerKV], AttentionBatch], Tensor]


class Ops(Protocol):
    """Operators of one backend on one device. Results of a token never depend on the other tokens of the call."""

    device: torch.device

    def loading(self) -> AbstractContextManager[None]:
        """Around the calls of `matrix`: what they and their callers take for a moment is given back to the system."""

    def run(self, forward: Forward, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        """Call a model's `forward`, or do again what it did on an earlier call with as many tokens.

        The result may be overwritten by the next call. `forward` is the same in every call, and so is `kv`.
        """

    def matrix(self, weight: Tensor | Grouped) -> Matrix:
        """Take a weight [N, K] over, in whatever layout suits its products; it need not be kept elsewhere."""

    def embedding(self, ids: Tensor, weight: Matrix, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """[T] ids and [V, H] weight -> [T, H], times scale."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """[T, K] and [N, K] weight -> [T, N], in `dtype`, or else in that of x.

        With a grouped weight, x is first rounded to int8, each 32 values with a scale of their own (the largest is 127 of it).
        """

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, multiplier: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """As `add`, then normalise over the last axis; returns (normalised, sum). Without a residual the sum is x, [T, H] or [T, heads, D].

        The weight is of x's dtype or float32; what is normalised takes the weight's before it is multiplied with it.
        """

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
        """x * multiplier + residual, [T, H]."""

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2 * I] holding gate then up -> activation(gate) * up, [T, I]."""

    def route(self, logits: Tensor, count: int, over_chosen: bool) -> tuple[Tensor, Tensor]:
        """float32 [T, E] -> the `count` experts of the largest logits of each row, of equal ones the lower first.

        Returns int64 [T, count], in that order, and float32 weights [T, count]: shares of the softmax over all, or over those chosen.
        """

    def experts(
        self, x: Tensor, choices: Tensor, weights: Tensor, gate_up: list[Matrix], down: list[Matrix], activation: Activation
    ) -> Tensor:
        """[T, H] through the gated feed-forwards that each token chose -> [T, H], their sum by weight.

        choices: int64 [T, count]. weights: float32 [T, count]. gate_up: an expert's [2 * I, H]. down: an expert's [H, I].
        What experts give is float32, and added in the order of the token's choices.
        """

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """float32 [N, V] -> cap * tanh(x / cap), in place."""

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Make the chosen rows [M] of float32 [N, V] logits minus infinity where their bits, int32 [M, W], 32 ids a word, are 0 or end."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [N, V] -> each row's largest value [N], NaN where the row holds one, and the first place it stands at [N]."""

    def sample(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        """float32 [N, V] logits whose largest values, finite, are peaks [N] -> a token id drawn for each row [N]."""

    def score(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What float32 [N, V] logits say of a token each, [N], and then of their `count` likeliest, of equal ones the lower ids first.

        Returns [N, 1 + count] log-probabilities, NaN for rows that hold NaN or whose largest logit is not finite; ids; and ranks, 1 more
        than there are larger logits.
        """

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Rotate query [T, num_heads, D] and key [T, num_kv_heads, D], store key and value, then attend -> [T, num_heads, D].

        rotation: cos and sin, float32 [T, R / 2]; the first R features of a head are rotated. Token at position p sees
        positions max(0, p - window + 1) to p of its own row. What lies in KV memory beyond those must be finite.
        softcap: scores s become softcap * tanh(s / softcap).
        """
