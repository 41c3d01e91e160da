"""Matrix products with a weight, and the embedding that may share it."""

from __future__ import annotations

from torch import Tensor

from octavo.layers.weights import Weights
from octavo.ops.interface import Ops


class Linear:
    """x @ weight.T + bias, for one projection or several of the same input, stacked.

    names: the projections' names in the checkpoint, without `.weight`. sizes: their output features.
    """

    def __init__(self, ops: Ops, weights: Weights, names: list[str], in_features: int, sizes: list[int], bias: bool = False) -> None:
        self._ops = ops
        self.weight = weights.stack([f"{name}.weight" for name in names], sum(sizes), in_features)
        self.bias = weights.stack([f"{name}.bias" for name in names], sum(sizes)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)


class Embedding:
    """Token ids to vectors."""

    def __init__(self, ops: Ops, weights: Weights, name: str, vocab_size: int, hidden_size: int) -> None:
        self._ops = ops
        self.weight = weights.take(f"{name}.weight", vocab_size, hidden_size)

    def __call__(self, ids: Tensor) -> Tensor:
        return self._ops.embedding(ids, self.weight)


class OutputHead:
    """Hidden states to logits; `tied` shares the embedding's weight."""

    def __init__(self, ops: Ops, weights: Weights, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None) -> None:
        self._ops = ops
        self.weight = tied.weight if tied else weights.take(f"{name}.weight", vocab_size, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight)
