"""What a position's logits say of given tokens and of the likeliest ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.plan import Logprob

LEAST = -9999.0
"""In the place of minus infinity, which JSON cannot say."""


def score(logits: Tensor, token_ids: list[int], count: int) -> list[list[Logprob]]:
    """[N, vocab_size] raw logits -> for each row its token, then the `count` likeliest by rank, of equal ones the lower id first.

    Raises FloatingPointError where a row holds NaN or nothing finite.
    """
    if not torch.isfinite(logits.amax(-1)).all():
        raise FloatingPointError("no finite logits")
    logprobs = logits.float().log_softmax(-1).clamp_(min=LEAST)
    asked = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > asked).sum(-1) + 1
    scores = [[Logprob(*each)] for each in zip(token_ids, asked[:, 0].tolist(), ranks.tolist(), strict=True)]
    if not count:
        return scores
    # topk breaks ties as it likes, so it tells no more than how likely the last of them is.
    likely = (logprobs >= logprobs.topk(count).values[:, -1:]).nonzero(as_tuple=True)
    values = logprobs[likely].cpu().numpy()
    rows, ids = (axis.cpu().numpy() for axis in likely)
    order = np.lexsort((ids, -values, rows))
    firsts = np.searchsorted(rows, np.arange(len(scores)))
    for line, first in zip(scores, firsts.tolist(), strict=True):
        chosen = order[first : first + count]
        ordered = values[chosen]
        higher = np.searchsorted(-ordered, -ordered)
        line += [Logprob(*each) for each in zip(ids[chosen].tolist(), ordered.tolist(), (higher + 1).tolist(), strict=True)]
    return scores
