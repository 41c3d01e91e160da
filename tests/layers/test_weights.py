"""What layers get of a checkpoint: dense or quantized matrices by the rules of `quantization`, and all else dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.linear import Embedding, Linear, OutputHead
from octavo.layers.weights import Weights
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf_blocks import empty_groups, unpack
from octavo.quantization import Grouped

BITS = {"BF16": 16, "Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q8_0": 8}


class FakeCheckpoint(Checkpoint):
    """Tensors in memory: [rows, columns] packed as a GGUF kind, or in bfloat16."""

    path = Path("fake")

    def __init__(self, kinds: dict[str, str], rows: int = 6, columns: int = 64) -> None:
        random = np.random.default_rng(0)
        self.plain: dict[str, Tensor] = {}
        self._grouped: dict[str, Grouped | None] = {}
        for name, kind in kinds.items():
            numbers = random.standard_normal((rows, columns) if name.endswith("weight") else rows).astype(np.float32)
            self.plain[name], self._grouped[name] = torch.from_numpy(numbers).bfloat16().float(), None
            if kind != "BF16":
                out = empty_groups(rows, columns, kind)
                unpack(gguf.quants.quantize(numbers, Kind[kind]), kind, out)
                self.plain[name], self._grouped[name] = out.dense(), out

    def names(self) -> frozenset[str]:
        return frozenset(self.plain)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.plain[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        return torch.bfloat16 if self._grouped[name] is None else None

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.plain[name])

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        out.copy_(self.plain[name][start : start + len(out)])

    def grouped(self, name: str) -> Grouped | None:
        return self._grouped[name]

    def close(self) -> None:
        pass


class HeldGrouped(Grouped):
    """As a backend holds it: it knows what it takes."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


class FakeOps:
    """Keeps matrices as they come, and multiplies without rounding."""

    device = torch.device("cpu")

    def matrix(self, weight: Tensor | Grouped) -> Tensor | Grouped:
        return HeldGrouped(**vars(weight)) if isinstance(weight, Grouped) else weight

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        out = x.float() @ dense(weight).t()
        return (out if bias is None else out + bias).to(dtype or x.dtype)

    def embedding(self, ids: Tensor, weight: Any, dtype: torch.dtype, scale: float) -> Tensor:
        return (dense(weight)[ids] * scale).to(dtype)


def dense(matrix: Any) -> Tensor:
    return matrix.dense() if isinstance(matrix, Grouped) else matrix.float()


def weights(kinds: dict[str, str], quantization: str, **options: Any) -> Weights:
    ops: Any = FakeOps()
    return Weights(FakeCheckpoint(kinds), torch.bfloat16, ops, quantization, **options)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("quantization", ["none", "auto", "int8", "int4"])
def test_the_form_a_matrix_takes(quantization: str, kind: str) -> None:
    checkpoint = FakeCheckpoint({"a.weight": kind})
    ops: Any = FakeOps()
    matrix: Any = Weights(checkpoint, torch.bfloat16, ops, quantization).matrix(["a.weight"], 6, 64)
    if quantization == "none" or (quantization, kind) == ("auto", "BF16"):
        assert matrix.dtype == torch.bfloat16
        assert torch.equal(matrix, checkpoint.plain["a.weight"].bfloat16())
        return
    asked = 16 if quantization == "auto" else int(quantization[3:])
    assert matrix.bits == min(asked, BITS[kind])
    error = (matrix.dense() - checkpoint.plain["a.weight"]).norm() / checkpoint.plain["a.weight"].norm()
    assert error == 0 if BITS[kind] <= asked else error < (0.01 if asked == 8 else 0.1)


@pytest.mark.parametrize(
    ("kinds", "quantization", "bits"),
    [
        (["Q4_1", "Q4_1", "Q4_1"], "auto", 4),
        (["Q4_0", "Q4_1", "Q8_0"], "auto", 8),
        (["Q4_1", "BF16", "Q4_1"], "auto", None),
        (["Q4_1", "BF16", "Q8_0"], "int8", 8),
        (["Q4_1", "BF16", "Q8_0"], "int4", 4),
        (["Q4_1", "Q4_0", "Q8_0"], "none", None),
    ],
)
def test_parts_are_joined(kinds: list[str], quantization: str, bits: int | None) -> None:
    named = {f"{name}.weight": kind for name, kind in zip("qkv", kinds, strict=True)}
    seen = []
    source = weights(named, quantization, on_tensor=lambda taken, total: seen.append((taken, total)))
    matrix: Any = source.matrix([*named], 18, 64)
    assert getattr(matrix, "bits", None) == bits
    expected = torch.cat([*FakeCheckpoint(named).plain.values()])
    assert (dense(matrix) - expected).norm() / expected.norm() < 0.1
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert source.untaken() == []


def test_layers() -> None:
    named = {"up.weight": "Q8_0", "gate.weight": "Q4_1", "up.bias": "BF16", "gate.bias": "BF16", "embed.weight": "BF16"}
    named["head.weight"] = "BF16"
    for quantization in ("none", "auto", "int8", "int4"):
        ops: Any = FakeOps()
        source = weights(named, quantization)
        linear: Any = Linear(ops, source, ["gate", "up"], 64, [6, 6], bias=True)
        assert linear.bias.dtype == torch.float32
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        assert linear(x).dtype == torch.bfloat16
        embedding = Embedding(ops, source, "embed", 6, 64)
        ids = torch.tensor([4, 0])
        assert embedding(ids).dtype == torch.bfloat16
        matrix: Any = embedding.matrix
        assert getattr(matrix, "bits", None) == (8 if quantization.startswith("int") else None)
        tied, own = OutputHead(ops, source, "head", 6, 64, embedding), OutputHead(ops, source, "head", 6, 64, None)
        assert tied.matrix is embedding.matrix
        assert getattr(own.matrix, "bits", None) == getattr(matrix, "bits", None)
        assert tied(x).dtype == own(x).dtype == torch.float32
        assert torch.allclose(tied(x), x.float() @ dense(matrix).t())


def test_a_weight_that_float16_cannot_scale_stays_dense() -> None:
    checkpoint = FakeCheckpoint({"a.weight": "BF16"})
    checkpoint.plain["a.weight"][2, 3] = 1e9
    ops: Any = FakeOps()
    matrix: Any = Weights(checkpoint, torch.float32, ops, "int8").matrix(["a.weight"], 6, 64)
    assert torch.equal(matrix, checkpoint.plain["a.weight"])


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_missing_and_misshapen_tensors_are_named(quantization: str) -> None:
    source = weights({"a.weight": "Q4_1"}, quantization)
    with pytest.raises(CheckpointError, match=r"needs the tensor b\.weight"):
        source.matrix(["a.weight", "b.weight"], 12, 64)
    with pytest.raises(CheckpointError, match=r"a\.weight \[6, 64\]; the configuration says \[6, 65\]"):
        source.matrix(["a.weight"], 6, 65)
