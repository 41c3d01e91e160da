"""Sequences in paged memory, and what attention to them should give: dense, in float64, and sharing no code with any backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import AttentionBatch, LayerKV, Ops

HOLE = -1
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window: int | None = None

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

    def expected(self, shape: Shape, positions: range) -> Tensor:
        """[positions, num_heads, dim] in float64."""
        query, key, value = self.qkv.split(self.heads, 1)
        group = shape.num_heads // shape.num_kv_heads
        key, value = (x.to(shape.kv_dtype).double().repeat_interleave(group, 1) for x in (key, value))
        out = []
        for position in positions:
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            scores = torch.einsum("hd,thd->ht", query[position].double(), key[first : position + 1]) * shape.scale
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value[first : position + 1]))
        return torch.stack(out)


@dataclass
class Memory:
    """A region in which whatever no token was stored to is NaN. Blocks are handed out in a random order."""

    shape: Shape
    num_blocks: int
    seed: int = 0
    region: Tensor = field(init=False)
    tables: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        size = (self.num_blocks, LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.dim)
        self.region = torch.full(size, torch.nan, dtype=shape.kv_dtype)
        self._free = np.random.default_rng(self.seed).permutation(self.num_blocks).tolist()

    def attend(self, ops: Ops, rows: list[tuple[int, Sequence, range]]) -> list[Tensor]:
        """Run one step over rows of (number, sequence, positions) -> each row's results."""
        size = self.shape.block_size
        slots = []
        for number, _, positions in rows:
            table = self.tables.setdefault(number, [])
            while len(table) * size < positions.stop:
                table.append(self._free.pop())
            slots += [table[position // size] * size + position % size for position in positions]
        batch = AttentionBatch(
            counts=[len(positions) for _, _, positions in rows],
            starts=[positions.start for _, _, positions in rows],
            tables=[np.array(self.tables[number]) for number, _, _ in rows],
            slots=torch.tensor(slots),
            block_size=size,
            prepared={},
        )
        qkv = torch.cat([sequence.qkv[positions.start : positions.stop] for _, sequence, positions in rows])
        query, key, value = qkv.split(rows[0][1].heads, 1)
        out = ops.paged_attention(query, key, value, LayerKV(self.region, LAYER), batch, self.shape.scale, self.shape.window)
        assert out.dtype == query.dtype
        assert out.shape == query.shape
        return list(out.split(batch.counts))

    def fill(self, number: int, sequence: Sequence, positions: range) -> None:
        """Put keys and values in place without computing anything; blocks behind the window become holes."""
        size, table = self.shape.block_size, self.tables.setdefault(number, [])
        reach = positions.stop if self.shape.window is None else self.shape.window - 1
        _, key, value = sequence.qkv.split(sequence.heads, 1)
        for position in positions:
            if position % size == 0:
                seen = (position // size + 1) * size > positions.stop - reach
                table.append(self._free.pop() if seen else HOLE)
            if positions.stop - position <= reach:
                self.region[table[-1], LAYER, 0, :, position % size] = key[position].to(self.shape.kv_dtype)
                self.region[table[-1], LAYER, 1, :, position % size] = value[position].to(self.shape.kv_dtype)


def blocks_for(shape: Shape, lengths: list[int]) -> int:
    return sum(-(-length // shape.block_size) for length in lengths) + 2
