"""Matrix products with a weight, and the embedding that may share it."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.weights import Weights
from octavo.ops.interface import Ops

OUTER_BITS = 8
"""What quantization leaves the embedding and the head at least. The head's errors meet the logits with nothing after them to even
them out: of all matrices it loses most by 4 bits, and it is read once a step."""


class Linear:
    """x @ weight.T + bias, for one projection or several of the same input, stacked.

    names: the projections' names in the checkpoint, without `.weight`. sizes: their output features.
    """

    def __init__(self, ops: Ops, weights: Weights, names: list[str], in_features: int, sizes: list[int], bias: bool = False) -> None:
        self._ops = ops
        self.matrix = weights.matrix([f"{name}.weight" for name in names], sum(sizes), in_features)
        # Kernels add it before they round to the dtype of activations.
        self.bias = weights.stack([f"{name}.bias" for name in names], sum(sizes), dtype=torch.float32) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.matrix, self.bias)


class Embedding:
    """Token ids to vectors, times scale, which is rounded to the dtype of activations first: so models that have one were trained."""

    def __init__(self, ops: Ops, weights: Weights, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self._ops = ops
        self._dtype = weights.dtype
        self._scale = torch.tensor(scale, dtype=weights.dtype).item()
        self.matrix = weights.matrix([f"{name}.weight"], vocab_size, hidden_size, OUTER_BITS)

    def __call__(self, ids: Tensor) -> Tensor:
        return self._ops.embedding(ids, self.matrix, self._dtype, self._scale)


class OutputHead:
    """Hidden states to logits, in float32: rounded to bfloat16, likely tokens would tie. `tied` shares the embedding's matrix.

    divisor: of logits. softcap: they are brought within it by its tanh.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: Embedding | None,
        divisor: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._ops = ops
        self._divisor, self._softcap = divisor, softcap
        self.matrix = tied.matrix if tied else weights.matrix([f"{name}.weight"], vocab_size, hidden_size, OUTER_BITS)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._ops.linear(x, self.matrix, dtype=torch.float32)
        if self._divisor != 1.0:
            logits.div_(self._divisor)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
