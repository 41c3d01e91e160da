"""Decode attention over paged memory, timed with the kernels of `octavo.ops` at several block sizes.

The blocks of a sequence lie anywhere in the region, as after hours of traffic. The layers of a region are worked on in turn, as a
model does, so that no call finds its keys and values in the cache of the processor.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.interface import AttentionBatch, Ops

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS = 4
LENGTH, SPREAD = 1024, 64
REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """One decode step's attention, in microseconds a layer: the median and the best. The batch is prepared before."""

    block_size: int
    sequences: int
    tokens: int
    layer_us: float
    layer_us_best: float
    backend: str
    threads: int


def lengths(count: int) -> list[int]:
    """About LENGTH tokens each, none like its neighbour."""
    return [LENGTH - SPREAD + number * 37 % (2 * SPREAD + 1) for number in range(count)]


def measure(sequence_lengths: list[int], block_sizes: Sequence[int], repeats: int = REPEATS) -> list[AttentionFigures]:
    """Time a decode step of these sequences at each block size; the repeats of all sizes take turns, after one that prepares."""
    import torch

    from octavo import ops

    backend = ops.backend(torch.device("cpu"))
    taken: dict[int, list[float]] = {size: [] for size in block_sizes}
    with torch.inference_mode():
        token_elements = LAYERS * 2 * KV_HEADS * HEAD_DIM
        slots = max(size * sum(-(-length // size) for length in sequence_lengths) for size in block_sizes)
        noise = torch.randn(token_elements, generator=torch.Generator().manual_seed(0)).bfloat16()
        memory = noise.repeat(slots)
        steps = {size: _step(memory, sequence_lengths, size) for size in block_sizes}
        for repeat in range(repeats + 1):
            for size, (region, batch) in steps.items():
                seconds = _run(backend, region, batch)
                if repeat:
                    taken[size].append(seconds)
    return [
        AttentionFigures(
            block_size=size,
            sequences=len(sequence_lengths),
            tokens=sum(sequence_lengths),
            layer_us=statistics.median(seconds) * 1e6,
            layer_us_best=min(seconds) * 1e6,
            backend=getattr(backend, "isa", "reference"),
            threads=torch.get_num_threads(),
        )
        for size, seconds in taken.items()
    ]


def _step(memory: Tensor, sequence_lengths: list[int], block_size: int) -> tuple[Tensor, AttentionBatch]:
    """A region in that memory, and a batch in which every sequence's last token is new."""
    import numpy as np
    import torch

    from octavo.ops.interface import AttentionBatch

    counts = [-(-length // block_size) for length in sequence_lengths]
    shape = (sum(counts), LAYERS, 2, KV_HEADS, block_size, HEAD_DIM)
    scattered = np.random.default_rng(0).permutation(shape[0])
    tables = np.split(scattered, np.cumsum(counts)[:-1])
    last = [length - 1 for length in sequence_lengths]
    slots = [int(table[-1]) * block_size + place % block_size for table, place in zip(tables, last, strict=True)]
    batch = AttentionBatch([1] * len(counts), last, tables, torch.tensor(slots), block_size, {})
    return memory[: math.prod(shape)].view(shape), batch


def _run(backend: Ops, region: Tensor, batch: AttentionBatch) -> float:
    """Seconds of a layer."""
    import torch

    from octavo.ops.interface import LayerKV

    query, key, value = (torch.randn(len(batch.counts), heads, HEAD_DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    began = time.perf_counter()
    for layer in range(LAYERS):
        backend.paged_attention(query, key, value, LayerKV(region, layer), batch, HEAD_DIM**-0.5, None)
    return (time.perf_counter() - began) / LAYERS
