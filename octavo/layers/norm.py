"""Root-mean-square normalisation, https://arxiv.org/abs/1910.07467, and the residual stream that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.weights import Weights
from octavo.ops.interface import Ops


@dataclass(frozen=True)
class NormConfig:
    """offset: what is added to the weights of the checkpoint. wide: weights are float32, and a result is rounded once."""

    eps: float
    offset: float = 0.0
    wide: bool = False


class RMSNorm:
    """multiplier: of what `add` adds to the residual stream."""

    def __init__(self, ops: Ops, weights: Weights, name: str, size: int, config: NormConfig, multiplier: float = 1.0) -> None:
        self._ops = ops
        self._eps, self._multiplier = config.eps, multiplier
        self.weight = weights.stack([f"{name}.weight"], size, dtype=torch.float32 if config.wide else None)
        if config.offset:
            self.weight += config.offset

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add to the residual, then normalise; returns (normalised, the sum, which is the next residual)."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual, self._multiplier)


class Sum:
    """Stands where a layer reads the residual stream as it is."""

    def __init__(self, ops: Ops, multiplier: float = 1.0) -> None:
        self._ops = ops
        self._multiplier = multiplier

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else self._ops.add(x, residual, self._multiplier)
        return total, total
