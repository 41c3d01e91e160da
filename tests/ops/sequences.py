"""Sequences in paged memory, and what attention to them should give: dense, in float64, and sharing no code with any backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import AttentionBatch, BlockShape, LayerKV, Ops

HOLE = -1
LAYERS, LAYER = 2, 1
LONGEST = 2048
HUGE = 0x7F
"""A byte that makes a large finite number of every dtype: what memory that no token sees may hold."""
NOT_A_NUMBER = 0xFF
"""A byte that makes NaN, of int8's scales too: what a block wholly behind a window may hold, as it is another sequence's by now."""


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window: int | None = None
    half: int = 8
    """Pairs of features that are rotated."""
    softcap: float | None = None

    def rotation(self) -> tuple[Tensor, Tensor]:
        angles = torch.arange(LONGEST)[:, None] / 100.0 ** (torch.arange(self.half) / max(1, self.half))
        return angles.cos(), angles.sin()

    @property
    def scale(self) -> float:
        return self.dim**-0.5


class Sequence:
    """query, key and value of each position: strided views of one tensor, as a model's projection gives them."""

    def __init__(self, shape: Shape, length: int, seed: int, magnitude: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        qkv = torch.randn(length, sum(heads), shape.dim, generator=generator) * magnitude
        self.qkv = qkv.to(shape.dtype)
        self.heads = heads

    def expected(self, shape: Shape, positions: range) -> tuple[Tensor, Tensor]:
        """[positions, num_heads, dim] in float64, and the same with every value's magnitude in its place."""
        query, key, value = self.qkv.split(self.heads, 1)
        query, key = (self._rotated(x, shape) for x in (query, key))
        group = shape.num_heads // shape.num_kv_heads
        key, value = (_kept(x, shape.kv_dtype).repeat_interleave(group, 1) for x in (key, value))
        out, sizes = [], []
        for position in positions:
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            scores = torch.einsum("hd,thd->ht", query[position].double(), key[first : position + 1]) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * (scores / shape.softcap).tanh()
            weights, seen = scores.softmax(-1), value[first : position + 1]
            out.append(torch.einsum("ht,thd->hd", weights, seen))
            sizes.append(torch.einsum("ht,thd->hd", weights, seen.abs()))
        return torch.stack(out), torch.stack(sizes)

    def _rotated(self, x: Tensor, shape: Shape) -> Tensor:
        half, length = shape.half, len(x)
        cos, sin = (angle[:length, None] for angle in shape.rotation())
        wide = x.float()
        first, second = wide[..., :half], wide[..., half : 2 * half]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]), -1)
        return turned.to(x.dtype)


def _kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values as KV memory holds them."""
    if dtype != torch.int8:
        return x.to(dtype).double()
    scales = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scales).round() * scales


@dataclass
class Memory:
    """A region in which whatever no token was stored to is huge. Blocks are handed out in a random order."""

    ops: Ops
    shape: Shape
    num_blocks: int
    seed: int = 0
    region: Tensor = field(init=False)
    tables: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self._blocks = BlockShape(
            num_layers=LAYERS,
            num_kv_heads=shape.num_kv_heads,
            block_size=shape.block_size,
            head_dim=shape.dim,
            dtype=shape.kv_dtype,
        )
        self.region = torch.full((self.num_blocks, self._blocks.num_bytes), HUGE, dtype=torch.uint8)
        self._free = np.random.default_rng(self.seed).permutation(self.num_blocks).tolist()
        self._behind = [HOLE, self._free.pop()]
        self.region.view(self.num_blocks, LAYERS, -1)[self._behind[1], LAYER] = NOT_A_NUMBER

    def attend(self, rows: list[tuple[int, Sequence, range]]) -> list[Tensor]:
        """Run one step over rows of (number, sequence, positions) -> each row's results."""
        for number, _, positions in rows:
            table = self.tables.setdefault(number, [])
            while len(table) * self.shape.block_size < positions.stop:
                table.append(self._free.pop())
        return self._run(rows, self.shape.window)

    def fill(self, number: int, sequence: Sequence, positions: range) -> None:
        """Store keys and values, every token seeing itself alone; blocks behind the window become holes, or another's."""
        size, table = self.shape.block_size, self.tables.setdefault(number, [])
        reach = positions.stop if self.shape.window is None else self.shape.window - 1
        for position in positions:
            if position % size == 0:
                seen = (position // size + 1) * size > positions.stop - reach
                table.append(self._free.pop() if seen else self._behind[len(table) % 2])
        if rows := [(number, sequence, range(position, position + 1)) for position in positions if positions.stop - position <= reach]:
            self._run(rows, 1)

    def other_layers(self) -> Tensor:
        """What layers other than LAYER hold, as bytes."""
        layers = self.region.view(self.num_blocks, LAYERS, -1)
        return layers[:, [layer for layer in range(LAYERS) if layer != LAYER]]

    def _run(self, rows: list[tuple[int, Sequence, range]], window: int | None) -> list[Tensor]:
        size = self.shape.block_size
        batch = AttentionBatch(
            counts=[len(positions) for _, _, positions in rows],
            starts=[positions.start for _, _, positions in rows],
            tables=[[np.array(self.tables[number]) for number, _, _ in rows]],
            slots=torch.tensor([[self.tables[number][at // size] * size + at % size for number, _, positions in rows for at in positions]]),
            block_size=size,
            prepared={},
        )
        parts = [(sequence, positions) for _, sequence, positions in rows]
        qkv = torch.cat([sequence.qkv[positions.start : positions.stop] for sequence, positions in parts])
        rotation = tuple(torch.cat([angle[positions.start : positions.stop] for _, positions in parts]) for angle in self.shape.rotation())
        query, key, value = qkv.split(rows[0][1].heads, 1)
        kv = LayerKV(self.region, self._blocks, LAYER)
        out = self.ops.paged_attention(query, key, value, rotation, kv, batch, self.shape.scale, window, self.shape.softcap)  # type: ignore[arg-type]
        assert out.dtype == query.dtype
        assert out.shape == query.shape
        return list(out.split(batch.counts))


def blocks_for(shape: Shape, lengths: list[int]) -> int:
    return sum(-(-length // shape.block_size) for length in lengths) + 2
