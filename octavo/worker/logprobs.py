"""What a position's logits say of given tokens and of the likeliest ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ops.interface import Ops
from octavo.plan import Logprob

LEAST = -9999.0
"""In the place of minus infinity, which JSON cannot say."""


def score(ops: Ops, logits: Tensor, token_ids: list[int], count: int) -> list[list[Logprob] | None]:
    """[N, vocab_size] raw logits -> for each row its token, then the `count` likeliest by rank, of equal ones the lower id first.

    None for a row that holds NaN, or whose largest logit is not finite.
    """
    asked = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    columns = [column.tolist() for column in ops.score(logits, asked, min(count, logits.shape[-1]))]
    return [None if math.isnan(row[0][0]) else _line(*row) for row in zip(*columns, strict=True)]


def _line(logprobs: list[float], ids: list[int], ranks: list[int]) -> list[Logprob]:
    return [Logprob(token_id, max(logprob, LEAST), rank) for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True)]
