"""What the prefix index shares of recorded agent runs, against a cache that never forgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.paged import replay
from octavo.bench.traces import TracedRequest, ideal_share, load

BLOCK_SIZE = 16


def distinct_blocks(requests: list[TracedRequest]) -> int:
    seen: set[int] = set()
    for request in requests:
        tokens, prefix = request.prompt + request.answer[:-1], 0
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            prefix = hash((prefix, *tokens[start : start + BLOCK_SIZE]))
            seen.add(prefix)
    return len(seen)


@pytest.mark.parametrize(("max_batch_size", "wanted"), [(32, 0.90), pytest.param(8, 0.90, marks=pytest.mark.slow), (1, 0.85)])
def test_half_the_memory_shares_nine_tenths(max_batch_size: int, wanted: float, data: Path) -> None:
    """All first turns of fifty runs, then all second turns: the order in which least-recently-used eviction fares worst."""
    requests = load("tau-bench", data)
    blocks = distinct_blocks(requests) // 2
    ideal = ideal_share(requests, BLOCK_SIZE)
    _, figures = replay(
        requests,
        kv_bytes=blocks * BLOCK_SIZE,
        bytes_per_token=1,
        block_size=BLOCK_SIZE,
        max_batch_size=max_batch_size,
        prefill_chunk_size=2048,
    )
    print(
        f"{len(requests)} requests, {blocks} blocks, {max_batch_size} at once: {figures.hit_rate:.1%} of the prompt tokens shared, "
        f"{ideal:.1%} by an endless cache: {figures.hit_rate / ideal:.1%} of it"
    )
    assert figures.hit_rate / ideal >= wanted
