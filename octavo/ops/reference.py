"""Every operator in plain torch, on any device: the oracle for other backends, and the backend where there is no other.

A row's result is the same whatever shares the batch with it. Libraries choose their kernel, and with it the order of
summation, by the shape of the whole product; so products run at fixed shapes here, and sums over a row's context run over
fixed tiles of it, added in order.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from octavo.ops.interface import Activation, AttentionBatch, BlockShape, Draws, Forward, LayerKV, Matrix
from octavo.quantization import GROUP, Grouped

PRODUCT_ROWS = 32
"""Rows of one matrix product, where the library's result for a row depends on how many there are."""

TILE = 64
"""Context positions summed in one product; every block size divides it or is a multiple of it."""

MIN_QUERY_ROWS = 8
"""Fewer rows than this select matrix-vector kernels, which sum in another order."""

GROUP_TILES = 1024
"""Tiles of context gathered at once: bounds the temporaries of one call."""

QUERY_TOKENS = 256
"""Tokens of one row that attend at once: bounds the score matrix of a long chunk."""


class ReferenceOps:
    """See `octavo.ops.interface.Ops`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch = _Scratch(device)
        # oneDNN's AVX-512 bf16 products give a row the same bits at every row count above one; its AMX ones do not.
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)()
        self._invariant = {torch.bfloat16} if device.type == "cpu" and not amx else set()

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, forward: Forward, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        return forward(token_ids, positions, kv, batch)

    def matrix(self, weight: Tensor | Grouped) -> Matrix:
        if isinstance(weight, Grouped):
            return DenseMatrix(weight.dense().to(self.device), grouped=True)
        return DenseMatrix(weight.to(self.device), grouped=False)

    def embedding(self, ids: Tensor, weight: Matrix, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (F.embedding(ids, weight.values) * scale).to(dtype)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if weight.grouped:
            out = self._product(rounded_to_int8(x), weight.values)
        else:
            out = self._product(x.to(weight.values.dtype), weight.values)
        if bias is not None:
            out = out.float() + bias
        return out.to(dtype or x.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[0]
        if x.dtype in self._invariant:
            return F.linear(F.pad(x, (0, 0, 0, 1)) if rows == 1 else x, weight)[:rows]
        out = x.new_empty(-(-rows // PRODUCT_ROWS) * PRODUCT_ROWS, weight.shape[0])
        for start in range(0, rows, PRODUCT_ROWS):
            part = x[start : start + PRODUCT_ROWS]
            if part.shape[0] < PRODUCT_ROWS:
                part = F.pad(part, (0, 0, 0, PRODUCT_ROWS - part.shape[0]))
            torch.mm(part, weight.t(), out=out[start : start + PRODUCT_ROWS])
        return out[:rows]

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, multiplier: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else ReferenceOps.add(self, x, residual, multiplier)
        wide = total.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return ((wide * scale).to(weight.dtype) * weight).to(x.dtype), total

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
        return x * multiplier + residual

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else gelu_tanh(gate)) * up

    def route(self, logits: Tensor, count: int, over_chosen: bool) -> tuple[Tensor, Tensor]:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        shares = (ordered[:, :count] if over_chosen else ordered).softmax(-1)
        return order[:, :count].contiguous(), shares[:, :count].contiguous()

    def experts(
        self, x: Tensor, choices: Tensor, weights: Tensor, gate_up: list[Matrix], down: list[Matrix], activation: Activation
    ) -> Tensor:
        parts = x.new_empty(*choices.shape, x.shape[1], dtype=torch.float32)
        for expert in choices.unique().tolist():
            tokens, places = torch.where(choices == expert)
            inner = self.activate_and_mul(self.linear(x[tokens], gate_up[expert]), activation)
            parts[tokens, places] = self.linear(inner, down[expert], dtype=torch.float32)
        out = torch.zeros_like(x, dtype=torch.float32)
        for place in range(choices.shape[1]):
            out += weights[:, place, None] * parts[:, place]
        return out.to(x.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        size = logits.shape[-1]
        allowed = (bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits.device) & 1).bool().flatten(1)[:, :size]
        allowed = F.pad(allowed, (0, size - allowed.shape[1]))
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        peaks = logits.amax(-1)
        return peaks, (logits == peaks[:, None]).int().argmax(-1)  # torch's argmax of logits takes any of equal ones

    def sample(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        weights = ((ordered - peaks[:, None]) / draws.temperature[:, None]).exp()
        weights.masked_fill_(weights < draws.min_p[:, None], 0.0)
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        weights.masked_fill_((draws.top_k[:, None] > 0) & (ranks >= draws.top_k[:, None]), 0.0)
        cumulative = weights.double().cumsum(-1)
        # The token that crosses the share is the last one kept.
        last = torch.searchsorted(cumulative, draws.top_p[:, None] * cumulative[:, -1:])
        weights.masked_fill_((draws.top_p[:, None] < 1) & (ranks > last), 0.0)
        cumulative = torch.zeros_like(weights).scatter_(-1, ids, weights).double().cumsum(-1)
        # The first token whose cumulative weight exceeds the target; a token of weight 0 never is.
        drawn = torch.searchsorted(cumulative, draws.uniform[:, None] * cumulative[:, -1:], right=True)
        return drawn.clamp_(max=logits.shape[-1] - 1)[:, 0]

    def score(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ids = torch.cat((token_ids[:, None], order[:, :count]), -1)
        values = logits.gather(-1, ids)
        ranks = torch.searchsorted(-ordered, -values) + 1
        total = logits.double().logsumexp(-1, keepdim=True)
        return (values.double() - total.masked_fill(~total.isfinite(), torch.nan)).float(), ids, ranks

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        for which, rows in enumerate((key, value)):
            _store(kv, which, rows, batch)
        key_name = ("reference", kv.group, window)
        if key_name not in batch.prepared:
            batch.prepared[key_name] = _plan(
                batch, batch.tables[kv.group], window, -(-MIN_QUERY_ROWS * key.shape[1] // query.shape[1]), self.device
            )
        out = torch.empty_like(query)
        for group in batch.prepared[key_name]:
            out[group.tokens] = group.attend(query[group.tokens], kv, scale, softcap, self._scratch).to(out.dtype)
        return out


@dataclass(frozen=True)
class DenseMatrix:
    """values: [N, K]. grouped: its products take activations rounded to int8, so `values` are those of the codes, in float32."""

    values: Tensor
    grouped: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def gelu_tanh(x: Tensor) -> Tensor:
    """torch's own loses the digits of small results, as it adds 1 to a tangent near -1, and ends a call in scalars of other bits."""
    wide = x.float()
    turned = (-2 * math.sqrt(2 / math.pi)) * (wide + 0.044715 * (wide * wide * wide))
    return (wide / (1 + turned.exp())).to(x.dtype)


def rounded_to_int8(x: Tensor) -> Tensor:
    """[T, K] -> float32 values of int8 codes with a scale per GROUP; all NaN where a group holds something that is not finite."""
    columns = x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    # The inverse of a subnormal scale could be infinite: next to nothing counts as nothing.
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0, scales)
    codes = (groups * torch.where(scales == 0, 0, 1 / scales)).round()
    return (codes * scales).flatten(-2)[..., :columns]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 * cos.shape[-1] features of [T, heads, D]; cos and sin are float32 [T, R / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat(((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest), -1)


def _views(memory: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor | None]:
    """Bytes [..., num_kv_heads, head_bytes] as elements [..., num_kv_heads, block_size, D], and int8's scales [..., block_size]."""
    size = shape.block_size * shape.head_dim * shape.dtype.itemsize
    elements = memory[..., :size].view(shape.dtype).unflatten(-1, (shape.block_size, shape.head_dim))
    return elements, memory[..., size:].view(torch.float32) if shape.dtype == torch.int8 else None


def _store(kv: LayerKV, which: int, rows: Tensor, batch: AttentionBatch) -> None:
    """Put [T, num_kv_heads, D] into the batch's slots, as keys (0) or values (1)."""
    shape = kv.shape
    memory = kv.region.view(-1, shape.num_layers, 2, shape.num_kv_heads, shape.head_bytes)[:, kv.layer, which]
    elements, scales = _views(memory, shape)
    slots = batch.slots[kv.group]
    blocks, offsets = slots // batch.block_size, slots % batch.block_size
    if scales is not None:
        wide = rows.float()
        scale = wide.abs().amax(-1) / 127
        scales[blocks, :, offsets] = scale
        # What is not finite is kept in the scale: integers cannot hold it.
        rows = (wide / scale.where(scale > 0, 1)[..., None]).round().nan_to_num(0, 0, 0)
    elements[blocks, :, offsets] = rows.to(shape.dtype)


class _Scratch:
    """Buffers kept from call to call: fresh pages for each temporary would cost more than the arithmetic in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of this shape, holding anything; it is overwritten by the next of its name."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size].view(shape)


@dataclass
class _Group:
    """Rows with equally many queries, longest context first, and their tiles: tile j of every row that has one, then tile j + 1.

    Each row's queries are padded to `padded`, so that no product is narrower than MIN_QUERY_ROWS.

    tokens: [R * count] where the queries stand in the batch. runs: how many rows have a tile j.
    rows: [tiles] which row a tile belongs to. blocks: [tiles, blocks in a tile]; where a block spans several tiles, [tiles, 1].
    part: [tiles] which tile of its block, where a block spans several.
    edges: the tiles that some query may not see all of. hidden: [edges, 1, padded, 1, TILE] what each may not see.
    unseen: [edges, 1, TILE, 1] what none may see: it is never read, so that it may hold anything.
    """

    count: int
    padded: int
    tokens: Tensor
    runs: list[int]
    rows: Tensor
    blocks: Tensor
    part: Tensor | None
    edges: Tensor
    hidden: Tensor
    unseen: Tensor

    def attend(self, query: Tensor, kv: LayerKV, scale: float, softcap: float | None, scratch: _Scratch) -> Tensor:
        """[R * count, num_heads, D] -> the same shape in float32."""
        kv_heads, dim = kv.shape.num_kv_heads, kv.shape.head_dim
        heads = query.shape[1]
        num_rows, tiles, share = self.runs[0], len(self.rows), heads // kv_heads
        width = self.padded * share
        wide = query.float().mul_(scale).view(num_rows, self.count, kv_heads, share, dim).transpose(1, 2)
        queries = F.pad(wide, (0, 0, 0, 0, 0, self.padded - self.count)).reshape(num_rows, kv_heads, width, dim)

        keys = self._tiles(kv, 0, scratch)
        scores = scratch.take("scores", torch.float32, tiles * kv_heads, width, TILE)
        torch.bmm(queries[self.rows].flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out=scores)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.view(tiles, kv_heads, self.padded, share, TILE)
        scores[self.edges] = scores[self.edges].masked_fill_(self.hidden, -torch.inf)
        peaks = scores.amax(-1)
        peak = peaks[:num_rows].clone()
        for run, part in self._in_order(peaks):
            torch.maximum(peak[:run], part, out=peak[:run])
        weights = scores.sub_(peak[self.rows][..., None]).exp_()

        values = self._tiles(kv, 1, scratch)
        values[self.edges] = values[self.edges].masked_fill_(self.unseen, 0.0)
        products = scratch.take("products", torch.float32, tiles * kv_heads, width, dim)
        torch.bmm(weights.view(tiles * kv_heads, width, TILE), values.flatten(0, 1), out=products)
        total = self._summed(weights.sum(-1))
        out = self._summed(products.view(tiles, kv_heads, self.padded, share, dim))
        out /= total[..., None]
        return out[:, :, : self.count].transpose(1, 2).reshape(num_rows * self.count, heads, dim)

    def _in_order(self, tiles: Tensor) -> list[tuple[int, Tensor]]:
        """The slices of `tiles` that hold tile 1, tile 2, ... of the first `run` rows."""
        ends = np.cumsum(self.runs).tolist()
        return [(end - start, tiles[start:end]) for start, end in pairwise(ends)]

    def _summed(self, tiles: Tensor) -> Tensor:
        """Add a row's tiles one after another: [tiles, ...] -> [R, ...]."""
        total = tiles[: self.runs[0]].clone()
        for run, part in self._in_order(tiles):
            total[:run] += part
        return total

    def _tiles(self, kv: LayerKV, which: int, scratch: _Scratch) -> Tensor:
        """Gather keys (0) or values (1) as float32 [tiles, num_kv_heads, TILE, D]."""
        shape = kv.shape
        kv_heads, block_size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
        flat = kv.region.view(-1, kv_heads * shape.head_bytes)
        rows = (self.blocks * (2 * shape.num_layers) + (2 * kv.layer + which)).flatten()
        found = scratch.take("found", flat.dtype, len(rows), flat.shape[1])
        torch.index_select(flat, 0, rows, out=found)
        elements, scales = _views(found.view(len(rows), kv_heads, -1), shape)
        if scales is not None:
            elements = elements * scales[..., None]
        tiles = len(self.blocks)
        out = scratch.take("tiles", torch.float32, tiles, kv_heads, TILE, dim)
        if self.part is None:
            blocks = elements.view(tiles, -1, kv_heads, block_size, dim)
            out.view(tiles, kv_heads, -1, block_size, dim).copy_(blocks.transpose(1, 2))
        else:
            blocks = elements.view(tiles, kv_heads, block_size // TILE, TILE, dim)
            out.copy_(blocks[torch.arange(tiles, device=found.device), :, self.part])
        return out


def _plan(batch: AttentionBatch, tables: list[Any], window: int | None, padded: int, device: torch.device) -> list[_Group]:
    """Cut the batch into groups of rows with equally many queries, decode rows together and each chunk by itself."""
    firsts = np.concatenate(([0], np.cumsum(batch.counts))).tolist()
    pieces = []  # (queries, first token, first position, row)
    for row, (count, start) in enumerate(zip(batch.counts, batch.starts, strict=True)):
        for at in range(0, count, QUERY_TOKENS):
            pieces.append((min(QUERY_TOKENS, count - at), firsts[row] + at, start + at, row))
    pieces.sort(key=lambda piece: (piece[0], -(piece[0] + piece[2])))
    groups: list[_Group] = []
    held: list[tuple[int, int, int, int]] = []
    tiles = 0
    for piece in pieces:
        count, _, position, _ = piece
        more = -(-(position + count) // TILE)
        if held and (count != held[0][0] or tiles + more > GROUP_TILES):
            groups.append(_group(tables, held, batch.block_size, window, padded, device))
            held, tiles = [], 0
        held.append(piece)
        tiles += more
    groups.append(_group(tables, held, batch.block_size, window, padded, device))
    return groups


def _group(
    tables: list[Any], pieces: list[tuple[int, int, int, int]], size: int, window: int | None, padded: int, device: torch.device
) -> _Group:
    count = pieces[0][0]
    padded = max(padded, count)
    per_tile = max(1, TILE // size)
    spans = []  # first and last tile of each piece
    for _, _, position, _ in pieces:
        first = 0 if window is None else max(0, position - window + 1) // TILE
        spans.append((first, (position + count - 1) // TILE))
    order = sorted(range(len(pieces)), key=lambda i: spans[i][0] - spans[i][1])
    pieces, spans = [pieces[i] for i in order], [spans[i] for i in order]
    lengths = np.array([last - first + 1 for first, last in spans])
    runs = [int((lengths > j).sum()) for j in range(int(lengths.max()))]
    rows = np.concatenate([np.arange(run) for run in runs])
    numbers = np.concatenate([np.full(run, j) for j, run in enumerate(runs)]) + np.array([first for first, _ in spans])[rows]

    blocks = np.zeros((len(rows), per_tile), dtype=np.int64)
    for row, (first, last) in enumerate(spans):
        table = np.asarray(tables[pieces[row][3]])
        wanted = np.arange(first * TILE, (last + 1) * TILE, min(size, TILE)) // size
        known = np.where(wanted < len(table), table[np.minimum(wanted, len(table) - 1)], 0)
        blocks[rows == row] = np.maximum(known, 0).reshape(-1, per_tile)

    positions = numbers[:, None] * TILE + np.arange(TILE)  # [tiles, TILE]
    queries = np.array([position for _, _, position, _ in pieces])[rows][:, None] + np.arange(count)  # [tiles, count]
    hidden = positions[:, None, :] > queries[:, :, None]
    if window is not None:
        hidden |= positions[:, None, :] <= queries[:, :, None] - window
    edges = np.flatnonzero(hidden.any((1, 2)))
    hidden = hidden[edges]
    unseen = hidden.all(1)
    hidden = np.pad(hidden, ((0, 0), (0, padded - count), (0, 0)))

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return _Group(
        count=count,
        padded=padded,
        tokens=put(np.concatenate([np.arange(token, token + count) for _, token, _, _ in pieces])),
        runs=runs,
        rows=put(rows),
        blocks=put(blocks),
        part=put(numbers % (size // TILE)) if size > TILE else None,
        edges=put(edges),
        hidden=put(hidden)[:, None, :, None, :],
        unseen=put(unseen)[:, None, :, None],
    )
