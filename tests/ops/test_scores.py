"""What every backend says of a token and of the likeliest: float64's log-probabilities, ids and ranks by a plain sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops.interface import Ops
from tests.ops.comparing import quickly
from tests.ops.test_sampling import KINDS, SIZES, make


def score(ops: Ops, logits: Tensor, token_ids: list[int], count: int) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
    logprobs, ids, ranks = ops.score(logits, torch.tensor(token_ids), count)
    assert (logprobs.dtype, ids.dtype, ranks.dtype) == (torch.float32, torch.int64, torch.int64)
    return logprobs.tolist(), ids.tolist(), ranks.tolist()


def assert_scored(ops: Ops, logits: Tensor, token_ids: list[int], count: int) -> None:
    logprobs, ids, ranks = score(ops, logits, token_ids, count)
    for place, (row, token_id) in enumerate(zip(logits.numpy(), token_ids, strict=True)):
        wide = row.astype(np.float64)
        exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        wanted = [token_id, *np.lexsort((np.arange(len(row)), -wide))[:count].tolist()]
        assert ids[place] == wanted
        assert ranks[place] == [1 + int((row > row[each]).sum()) for each in wanted]
        np.testing.assert_allclose(logprobs[place], exact[wanted], rtol=3e-7, atol=2e-6)


@quickly
@given(st.sampled_from(SIZES) | st.integers(1, 3000), st.sampled_from(KINDS), st.integers(1, 4), st.data())
def test_scores_are_those_of_a_plain_sort(ops: Ops, size: int, kind: str, rows: int, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([0, 1, 5, 20, size]).filter(lambda each: each <= size))
    token_ids = data.draw(st.lists(st.integers(0, size - 1), min_size=rows, max_size=rows))
    assert_scored(ops, make(kind, rows, size, data.draw(st.integers(0, 2**32 - 1))), token_ids, count)


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "few possible"])
@pytest.mark.parametrize("count", [0, 20, 49152])
def test_scores_of_a_large_vocabulary(ops: Ops, kind: str, count: int) -> None:
    assert_scored(ops, make(kind, 2, 49152, 9), [49151, 5], count)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 16, 70, 1000])
def test_rows_that_are_not_finite_are_told(ops: Ops, bad: float, size: int) -> None:
    logits = make("plain", 3, size, 4)
    alone = score(ops, logits[::2], [0, 0], 1)
    logits[1, size // 2 if bad > 0 or math.isnan(bad) else slice(None)] = bad
    logprobs, ids, ranks = score(ops, logits, [0, 0, 0], 1)
    assert all(math.isnan(each) for each in logprobs[1])
    assert ([logprobs[0], logprobs[2]], [ids[0], ids[2]], [ranks[0], ranks[2]]) == alone


@pytest.mark.parametrize("size", [5, 64, 4099])
def test_a_row_is_scored_alike_alone_and_among_others(ops: Ops, size: int) -> None:
    logits = make("plain", 33, size, 2)
    token_ids = [row % size for row in range(33)]
    together = score(ops, logits, token_ids, 4)
    for row in range(33):
        assert [[each[row]] for each in together] == list(score(ops, logits[row : row + 1], [token_ids[row]], 4))


def test_what_lies_beyond_a_row_is_not_looked_at(ops: Ops) -> None:
    for more in (1, 15, 64, 70):
        wide = torch.full((4, 130 + more), math.nan)
        wide[:, :130] = logits = make("ties", 4, 130, 3)
        assert score(ops, wide[:, :130], [1, 2, 3, 129], 20) == score(ops, logits, [1, 2, 3, 129], 20)
