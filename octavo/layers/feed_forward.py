"""A layer's feed-forward, https://arxiv.org/abs/2002.05202: one for all tokens, or experts of which each token chooses a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.weights import Weights
from octavo.ops.interface import Activation, Ops


class FeedForward:
    """down(activation(gate) * up). fused: the checkpoint has gate and up as one tensor."""

    def __init__(
        self, ops: Ops, weights: Weights, name: str, size: int, inner: int, activation: Activation, *, bias: bool, fused: bool
    ) -> None:
        self._ops, self._activation = ops, activation
        parts = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
        self._gate_up = Linear(ops, weights, [f"{name}.{part}" for part in parts], size, [inner, inner], bias)
        self._down = Linear(ops, weights, [f"{name}.down_proj"], inner, [size], bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._ops.activate_and_mul(self._gate_up(x), self._activation))


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """count: experts. chosen: how many of them a token goes through. inner: features within each.

    over_chosen: an expert's weight is its share of the softmax over those chosen, not over all.
    block: the name in a layer of what holds the router, `gate`, and the experts. gate_up, down: a feed-forward's names in an expert.
    """

    count: int
    chosen: int
    inner: int
    over_chosen: bool
    block: str = "mlp"
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class Experts:
    """The sum of the feed-forwards that a token chose, by weight. The router is never quantized: a choice may turn on its last digits."""

    def __init__(self, ops: Ops, weights: Weights, name: str, size: int, config: ExpertsConfig, activation: Activation) -> None:
        self._ops, self._activation = ops, activation
        self._chosen, self._over_chosen = config.chosen, config.over_chosen
        block = f"{name}.{config.block}"
        self._router = ops.matrix(weights.take(f"{block}.gate.weight", config.count, size))
        experts = [f"{block}.experts.{expert}" for expert in range(config.count)]
        self._gate_up = [
            weights.matrix([f"{expert}.{part}.weight" for part in config.gate_up], 2 * config.inner, size) for expert in experts
        ]
        self._down = [weights.matrix([f"{expert}.{config.down}.weight"], size, config.inner) for expert in experts]

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._ops.linear(x, self._router, dtype=torch.float32)
        choices, weights = self._ops.route(logits, self._chosen, self._over_chosen)
        return self._ops.experts(x, choices, weights, self._gate_up, self._down, self._activation)
