"""Takes tensors out of a checkpoint, in the form the model runs on, and keeps account of which were taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo import quantization
from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint
from octavo.ops.interface import Matrix, Ops
from octavo.quantization import Grouped

_RANGE_LENGTH = 1 << 20
"""Numbers read at a time of a tensor that is quantized here."""


class Weights:
    """Every tensor is read once, straight into its final memory.

    dtype: of activations, and of what is not quantized. quantization: of matrices. `none`: all in `dtype`; `auto`: as the file has
    them; `int8`, `int4`: with that many bits, and with fewer where the file has fewer.
    on_tensor: called after each tensor with (tensors taken, tensors in the checkpoint). num_bytes: memory of all that was taken.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        ops: Ops,
        quantization: str = "none",
        on_tensor: Callable[[int, int], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._names = checkpoint.names()
        self._taken: set[str] = set()
        self._on_tensor = on_tensor or (lambda taken, total: None)
        self._ops = ops
        self.quantization = quantization
        self.dtype = dtype
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor. Raises CheckpointError naming it where it is missing or shaped otherwise."""
        return self.stack([name], *shape)

    def stack(self, names: list[str], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Join tensors along their first axis into one of the given shape; `dtype` in place of the activations'."""
        sizes = self._sizes(names, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype)
        at = 0
        for name, size in zip(names, sizes, strict=True):
            self.checkpoint.read(name, out[at : at + size])
            at += size
            self._note(name)
        self.num_bytes += out.nbytes
        return out.to(self._ops.device)

    def matrix(self, names: list[str], rows: int, columns: int, least_bits: int = 4) -> Matrix:
        """Join weights along their rows into one [rows, columns], as the backend holds it. Raises CheckpointError as `take` does.

        least_bits: what a quantization made here may have at least; what the file has is kept whatever it is.
        Where a part is not quantized, or the parts have no common form, all are dense.
        """
        sizes = self._sizes(names, (rows, columns))
        parts: list[Grouped] = []
        for name, size in zip(names, sizes, strict=True):
            part = self._grouped(name, size, columns, least_bits)
            if part is None:
                break
            parts.append(part)
        grouped = quantization.stack(parts) if len(parts) == len(names) else None
        del parts
        if grouped is None:
            return self._ops.matrix(self.stack(names, rows, columns))
        for name in names:
            self._note(name)
        matrix = self._ops.matrix(grouped)
        self.num_bytes += matrix.nbytes
        return matrix

    def take_rest(self, num_bytes: int) -> None:
        """Note that what was not taken has been read otherwise, into so much memory."""
        self.num_bytes += num_bytes
        self._taken.update(self._names)
        self._on_tensor(len(self._taken), len(self._names))

    def untaken(self) -> list[str]:
        """Names that no layer asked for, save what changes nothing."""
        return [name for name in sorted(self._names - self._taken) if not self._changes_nothing(name)]

    def _changes_nothing(self, name: str) -> bool:
        """Of a bias of zeros: GPTQ's writers give one to every matrix."""
        weight = f"{name.removesuffix('bias')}weight"
        if weight not in self._names or self.checkpoint.dtype(weight) is not None:
            return False
        values = torch.empty(self.checkpoint.shape(name))
        self.checkpoint.read(name, values)
        return not bool(values.any())

    def _sizes(self, names: list[str], shape: tuple[int, ...]) -> list[int]:
        """Rows of each tensor."""
        sizes = []
        for name in names:
            if name not in self._names:
                raise CheckpointError(f"{self.checkpoint.path}: the model needs the tensor {name}, which is not there")
            sizes.append(self.checkpoint.shape(name))
        if any(size[1:] != shape[1:] or len(size) != len(shape) for size in sizes) or sum(size[0] for size in sizes) != shape[0]:
            found = ", ".join(f"{name} {list(size)}" for name, size in zip(names, sizes, strict=True))
            raise CheckpointError(f"{self.checkpoint.path}: {found}; the configuration says {list(shape)}")
        return [size[0] for size in sizes]

    def _note(self, name: str) -> None:
        self._taken.add(name)
        self._on_tensor(len(self._taken), len(self._names))

    def _grouped(self, name: str, rows: int, columns: int, least_bits: int) -> Grouped | None:
        """A weight by the rules of `quantization`; None where these want it dense, or it does not fit."""
        if self.quantization == "none":
            return None
        stored = self.checkpoint.grouped(name)
        if self.quantization == "auto":
            return stored
        bits = max(int(self.quantization.removeprefix("int")), least_bits)
        if stored is not None and stored.bits <= bits:
            return stored
        del stored
        out = quantization.allocate(rows, columns, bits)
        step = max(1, _RANGE_LENGTH // columns)
        buffer = torch.empty(min(step, rows), columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            self.checkpoint.read_rows(name, start, buffer[: stop - start])
            quantization.quantize_into(buffer[: stop - start], out.rows(start, stop))
        return out if out.finite() else None
