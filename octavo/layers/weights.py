"""Takes tensors out of a checkpoint, in the dtype the model runs in, and keeps account of which were taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint


class Weights:
    """Every tensor is read once, straight into its final memory.

    on_tensor: called after each tensor with (tensors taken, tensors in the checkpoint).
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_tensor: Callable[[int, int], None] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self._taken: set[str] = set()
        self._on_tensor = on_tensor or (lambda taken, total: None)
        self.dtype = dtype
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor. Raises CheckpointError naming it where it is missing or shaped otherwise."""
        return self.stack([name], *shape)

    def stack(self, names: list[str], *shape: int) -> Tensor:
        """Join tensors along their first axis into one of the given shape."""
        sizes = []
        for name in names:
            if name not in self._names:
                raise CheckpointError(f"{self._checkpoint.path}: the model needs the tensor {name}, which is not there")
            sizes.append(self._checkpoint.shape(name))
        if any(size[1:] != shape[1:] or len(size) != len(shape) for size in sizes) or sum(size[0] for size in sizes) != shape[0]:
            found = ", ".join(f"{name} {list(size)}" for name, size in zip(names, sizes, strict=True))
            raise CheckpointError(f"{self._checkpoint.path}: {found}; the configuration says {list(shape)}")
        out = torch.empty(shape, dtype=self.dtype)
        at = 0
        for name, size in zip(names, sizes, strict=True):
            self._checkpoint.read(name, out[at : at + size[0]])
            at += size[0]
            self._taken.add(name)
            self._on_tensor(len(self._taken), len(self._names))
        return out.to(self.device)

    def untaken(self) -> list[str]:
        """Names that no layer asked for."""
        return sorted(self._names - self._taken)
