"""Scores as requests get them; how they are found is tested with the operators."""

import math

import pytest
import torch

from octavo import ops
from octavo.worker.logprobs import LEAST, score

BACKEND = ops.backend(torch.device("cpu"))


def as_tuples(line):
    return [(each.token_id, each.logprob, each.rank) for each in line]


def test_the_token_comes_first_and_then_the_likeliest():
    (line,) = score(BACKEND, torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log(), [2], 2)
    assert [(token_id, pytest.approx(logprob, abs=1e-6), rank) for token_id, logprob, rank in as_tuples(line)] == [
        (2, math.log(0.125), 3),
        (0, math.log(0.5), 1),
        (1, math.log(0.25), 2),
    ]


def test_more_than_there_are_tokens_are_all_of_them():
    (line,) = score(BACKEND, torch.zeros(1, 3), [1], 20)
    assert [each.token_id for each in line] == [1, 0, 1, 2]


def test_tokens_that_cannot_be_are_scored_so():
    (line,) = score(BACKEND, torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]]), [2], 3)
    assert as_tuples(line) == [(2, LEAST, 2), (1, 0.0, 1), (0, LEAST, 2), (2, LEAST, 2)]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
def test_rows_without_finite_logits_have_none(bad):
    sound, unsound = score(BACKEND, torch.tensor([[0.0, 1.0], bad]), [0, 0], 1)
    assert unsound is None
    assert [each.token_id for each in sound] == [0, 1]
