"""Decode attention over paged memory, timed with the kernels of `octavo.ops` at several block sizes.

The blocks of a sequence lie anywhere in the region, as after hours of traffic. The layers of a region are worked on in turn, as a
model does, so that no call finds its keys and values in the cache of the processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.interface import AttentionBatch, BlockShape, Ops

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS = 4
LENGTH, SPREAD = 1024, 64
REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """One decode step's attention, in microseconds a layer: the median and the best. The batch is prepared before.

    layer_bytes: keys and values that a layer reads.
    """

    block_size: int
    sequences: int
    tokens: int
    layer_bytes: int
    layer_us: float
    layer_us_best: float
    backend: str
    threads: int


def lengths(count: int) -> list[int]:
    """About LENGTH tokens each, none like its neighbour."""
    return [LENGTH - SPREAD + number * 37 % (2 * SPREAD + 1) for number in range(count)]


def measure(
    sequence_lengths: list[int],
    block_sizes: Sequence[int],
    repeats: int = REPEATS,
    layers: int = LAYERS,
    kv_cache_dtype: str = "bfloat16",
) -> list[AttentionFigures]:
    """Time a decode step of these sequences at each block size; the repeats of all sizes take turns, after one that prepares."""
    import torch

    from octavo import ops
    from octavo.worker.pages import Pages

    backend = ops.backend(torch.device("cpu"))
    taken: dict[int, list[float]] = {size: [] for size in block_sizes}
    with torch.inference_mode():
        shapes = {size: _shape(size, layers, getattr(torch, kv_cache_dtype)) for size in block_sizes}
        blocks = {size: sum(-(-length // size) for length in sequence_lengths) for size in block_sizes}
        # Numbers, for memory that nobody wrote to is one page, many times.
        noise = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
        most = max(blocks[size] * shapes[size].num_bytes for size in block_sizes)
        memory = Pages(most).tensor((most,), torch.uint8)  # of the kind that the engine has
        for start in range(0, most, len(noise)):
            memory[start : start + len(noise)] = noise[: most - start]
        steps = {size: _step(memory, sequence_lengths, shapes[size]) for size in block_sizes}
        for repeat in range(repeats + 1):
            for size, (region, batch) in steps.items():
                seconds = _run(backend, region, shapes[size], batch)
                if repeat:
                    taken[size].append(seconds)
    return [
        AttentionFigures(
            block_size=size,
            sequences=len(sequence_lengths),
            tokens=sum(sequence_lengths),
            layer_bytes=sum(sequence_lengths) * shapes[size].num_bytes // (layers * size),
            layer_us=statistics.median(seconds) * 1e6,
            layer_us_best=min(seconds) * 1e6,
            backend=getattr(backend, "isa", "reference"),
            threads=torch.get_num_threads(),
        )
        for size, seconds in taken.items()
    ]


def _shape(block_size: int, layers: int, dtype: torch.dtype) -> BlockShape:
    from octavo.ops.interface import BlockShape

    return BlockShape(num_layers=layers, num_kv_heads=KV_HEADS, block_size=block_size, head_dim=HEAD_DIM, dtype=dtype)


def _step(memory: Tensor, sequence_lengths: list[int], shape: BlockShape) -> tuple[Tensor, AttentionBatch]:
    """A region in that memory, and a batch in which every sequence's last token is new."""
    import numpy as np
    import torch

    from octavo.ops.interface import AttentionBatch

    block_size = shape.block_size
    counts = [-(-length // block_size) for length in sequence_lengths]
    num_blocks, num_bytes = sum(counts), shape.num_bytes
    scattered = np.random.default_rng(0).permutation(num_blocks)
    tables = np.split(scattered, np.cumsum(counts)[:-1])
    last = [length - 1 for length in sequence_lengths]
    slots = [int(table[-1]) * block_size + place % block_size for table, place in zip(tables, last, strict=True)]
    batch = AttentionBatch([1] * len(counts), last, [tables], torch.tensor([slots]), block_size, {})
    return memory[: num_blocks * num_bytes].view(num_blocks, num_bytes), batch


def _run(backend: Ops, region: Tensor, shape: BlockShape, batch: AttentionBatch) -> float:
    """Seconds of a layer."""
    import torch

    from octavo.ops.interface import LayerKV

    count = len(batch.counts)
    query, key, value = (torch.randn(count, heads, HEAD_DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    rotation = torch.ones(count, HEAD_DIM // 2), torch.zeros(count, HEAD_DIM // 2)
    began = time.perf_counter()
    for layer in range(shape.num_layers):
        backend.paged_attention(query, key, value, rotation, LayerKV(region, shape, layer), batch, HEAD_DIM**-0.5, None)
    return (time.perf_counter() - began) / shape.num_layers
