"""Root-mean-square normalisation, https://arxiv.org/abs/1910.07467."""

from __future__ import annotations

from torch import Tensor

from octavo.layers.weights import Weights
from octavo.ops.interface import Ops


class RMSNorm:
    def __init__(self, ops: Ops, weights: Weights, name: str, size: int, eps: float) -> None:
        self._ops = ops
        self._eps = eps
        self.weight = weights.take(f"{name}.weight", size)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the residual, then normalise; returns (normalised, the sum, which is the next residual)."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)
