"""Scores of given tokens and of the likeliest, told apart by rank and by id."""

import math

import pytest
import torch

from octavo.worker.logprobs import LEAST, score


def plain(logits, token_ids, count):
    """The same by sorting whole rows in Python."""
    scores = []
    for row, token_id in zip(logits.float().log_softmax(-1).tolist(), token_ids, strict=True):
        order = sorted(range(len(row)), key=lambda each: (-row[each], each))
        scores.append([(each, row[each], 1 + sum(value > row[each] for value in row)) for each in (token_id, *order[:count])])
    return scores


def as_tuples(scores):
    return [[(each.token_id, each.logprob, each.rank) for each in line] for line in scores]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [3, 40, 10**6])
def test_equals_a_plain_sort_whatever_ties_there_are(values, dtype, count):
    generator = torch.Generator().manual_seed(values + count)
    logits = (torch.randint(0, values, (33, 131), generator=generator) / values * 8).to(dtype)
    token_ids = torch.randint(0, 131, (33,), generator=generator).tolist()
    assert as_tuples(score(logits, token_ids, count)) == plain(logits, token_ids, count)


@pytest.mark.parametrize("rows", [1, 2, 31, 33])
def test_a_position_is_scored_alike_alone_and_among_others(rows):
    logits = torch.randn(rows, 4099, generator=torch.Generator().manual_seed(0)).bfloat16()
    token_ids = list(range(rows))
    alone = [score(logits[row : row + 1], [row], 4)[0] for row in range(rows)]
    assert score(logits, token_ids, 4) == alone


def test_tokens_that_cannot_be_are_scored_so():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    assert as_tuples(score(logits, [2], 3)) == [[(2, LEAST, 2), (1, 0.0, 1), (0, LEAST, 2), (2, LEAST, 2)]]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
def test_rows_without_finite_logits_are_refused(bad):
    with pytest.raises(FloatingPointError):
        score(torch.tensor([[0.0, 1.0], bad]), [0, 0], 1)
