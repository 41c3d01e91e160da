"""A forward pass made again without Python gives what Python's gives, and is made again only where nothing would be left out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.interface import AttentionBatch, BlockShape, LayerKV

cpu = pytest.importorskip("octavo.ops.cpu", reason="the native kernels are not built", exc_type=ImportError)

HEADS, DIM, VOCAB, LENGTH = 2, 16, 50, 40
SHAPE = BlockShape(num_layers=2, num_kv_heads=1, block_size=16, head_dim=DIM, dtype=torch.bfloat16)


class Model:
    """Two layers of attention with different windows over products of every kind."""

    def __init__(self) -> None:
        self.ops = cpu.CpuOps(torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        self.kv = [LayerKV(torch.zeros(8, SHAPE.num_bytes, dtype=torch.uint8), SHAPE, layer) for layer in range(2)]
        self.embed, self.qkv, self.up, self.down = (
            self.ops.matrix(torch.randn(size, generator=generator) / 4)
            for size in [(VOCAB, 32), ((HEADS + 2) * DIM, 32), (64, HEADS * DIM), (32, 32)]
        )
        self.norm = torch.ones(32)
        angles = torch.arange(LENGTH)[:, None] / torch.arange(1, DIM // 2 + 1)
        self.tables = [self.ops.matrix(angles.cos()), self.ops.matrix(angles.sin())]
        self.calls = 0
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        self.calls += 1
        cos, sin = (self.ops.embedding(positions, table, torch.float32) for table in self.tables)
        x, residual = self.ops.embedding(token_ids, self.embed, torch.float32), None
        for layer, window in zip(kv, (None, 5), strict=True):
            x, residual = self.ops.rms_norm(x, self.norm, 1e-5, residual)
            query, key, value = self.ops.linear(x, self.qkv).view(len(x), -1, DIM).split([HEADS, 1, 1], 1)
            x = self.ops.paged_attention(query, key, value, (cos, sin), layer, batch, 0.25, window)
            x = self.ops.linear(self.ops.activate_and_mul(self.ops.linear(x.reshape(len(x), -1), self.up), "silu"), self.down)
            x = self.between(x)
        return self.ops.rms_norm(x, self.norm, 1e-5, residual)[0]

    def steps(self, count: int, steps: int = 6) -> list[Tensor]:
        """`count` sequences, a token of each in every step."""
        found = []
        for step in range(steps):
            tables = [np.array([row, 4 + row]) for row in range(count)]
            slots = [int(table[step // 16]) * 16 + step % 16 for table in tables]
            batch = AttentionBatch([1] * count, [step] * count, [tables], torch.tensor([slots]), 16, {})
            ids = torch.tensor([(7 * step + 3 * row) % VOCAB for row in range(count)])
            found.append(self.ops.run(self.forward, ids, torch.full((count,), step), self.kv, batch).clone())
        return found


@pytest.mark.parametrize("count", [1, 3])
def test_later_passes_are_those_of_python(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, plain = Model(), Model()
    found = recorded.steps(count)
    assert recorded.calls == 1
    monkeypatch.setattr(cpu, "RECORDED_TOKENS", 0)
    wanted = plain.steps(count)
    assert plain.calls == 6
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_many_tokens_are_not_recorded() -> None:
    model = Model()
    model.steps(4)
    assert (model.calls, cpu.RECORDED_TOKENS) == (1, 4)
    model.steps(5)
    assert model.calls == 1 + 6


def overwritten(x: Tensor) -> Tensor:
    x[0] = x[0].clone()
    return x


def read(x: Tensor) -> Tensor:
    return x if x[0, 0].item() < 1e9 else x.neg()


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * 1.0,
        lambda x: x.clone(),
        lambda x: x.add_(0.0),
        lambda x: x.t().contiguous().t(),
        lambda x: x.float() + 0,
        overwritten,
        read,
    ],
)
def test_a_pass_with_an_operator_of_torchs_own_is_left_to_python(between: Callable[[Tensor], Tensor]) -> None:
    model, plain = Model(), Model()
    model.between = between
    found = model.steps(2)
    assert model.calls == 6
    assert all(torch.allclose(*pair) for pair in zip(found, plain.steps(2), strict=True))


def test_a_pass_that_fails_is_recorded_when_it_succeeds() -> None:
    model = Model()

    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("the first time")

    model.between = broken
    with pytest.raises(RuntimeError, match="the first time"):
        model.steps(2)
    model.between = lambda x: x
    found = model.steps(2)
    assert model.calls == 2
    assert all(torch.equal(*pair) for pair in zip(found, Model().steps(2), strict=True))


def test_other_plans_than_were_seen_are_refused() -> None:
    with pytest.raises(ValueError, match="other plans than were recorded"):
        cpu._native.Recording().run([None])
