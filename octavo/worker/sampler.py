"""From logits to tokens. Every choice depends on a row's own logits, parameters, seed and output position, and on nothing else.

A draw inverts the cumulative distribution at one uniform number, itself a hash of (seed, choice, output position). The
filters keep the largest probabilities, and of equal ones those of the lower ids, whatever order a library sorts them in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import Ops
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True)
class Draw:
    """One row's part in sampling: what was asked, and the coordinates of its random number."""

    params: SamplingParams
    seed: int
    choice: int
    position: int


def sample(ops: Ops, logits: Tensor, draws: list[Draw]) -> list[int | None]:
    """float32 [N, vocab_size] logits -> a token id a row, None where the row holds NaN or nothing finite."""
    peaks, best = ops.argmax(logits)
    ids: list[int | None] = best.tolist()
    finite = [math.isfinite(peak) for peak in peaks.tolist()]
    random = [row for row, draw in enumerate(draws) if finite[row] and not draw.params.greedy]
    if random:
        drawn = _draw(logits[random], [draws[row] for row in random])
        for row, token_id in zip(random, drawn, strict=True):
            ids[row] = token_id
    return [token_id if finite[row] else None for row, token_id in enumerate(ids)]


def _draw(logits: Tensor, draws: list[Draw]) -> list[int]:
    params = [draw.params for draw in draws]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]

    # Subtracting first keeps the division from overflowing at tiny temperatures.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    weights = logits.exp_()  # the likeliest token weighs 1, so that min_p is a threshold as it stands
    weights.masked_fill_(weights < column([p.min_p for p in params]), 0.0)
    _keep_top_k(weights, [p.top_k for p in params])
    _keep_top_p(weights, [p.top_p for p in params])

    cumulative = weights.double().cumsum(-1)
    uniform = torch.from_numpy(uniforms(draws)).to(logits.device)[:, None]
    # The first token whose cumulative weight exceeds the target; a token of weight 0 never is.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)[:, 0].tolist()


def _keep_top_k(weights: Tensor, limits: list[int]) -> None:
    rows = [row for row, limit in enumerate(limits) if 0 < limit < weights.shape[-1]]
    if rows:
        counts = torch.tensor([limits[row] for row in rows], device=weights.device)[:, None]
        chosen = weights[rows]
        weights[rows] = _keep_largest(chosen, chosen.topk(int(counts.max()), -1).values, counts)


def _keep_top_p(weights: Tensor, shares: list[float]) -> None:
    rows = [row for row, share in enumerate(shares) if share < 1.0]
    if rows:
        chosen = weights[rows]
        ordered = chosen.sort(-1, descending=True).values
        cumulative = ordered.double().cumsum(-1)
        wanted = torch.tensor([shares[row] for row in rows], dtype=torch.float64, device=weights.device)[:, None]
        # The token that crosses the share is the last one kept.
        counts = torch.searchsorted(cumulative, wanted * cumulative[:, -1:]).clamp_(max=weights.shape[-1] - 1) + 1
        weights[rows] = _keep_largest(chosen, ordered, counts)


def _keep_largest(weights: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Zero all but the `counts` [N, 1] largest of each row; of equal ones the lower ids stay. ordered: the largest, descending."""
    last = ordered.gather(-1, counts - 1)
    tied = (weights >= last).sum(-1, keepdim=True) > counts
    weights = weights.masked_fill(weights < last, 0.0)
    for row in tied[:, 0].nonzero()[:, 0].tolist():
        equal = (weights[row] == last[row]).nonzero()[:, 0]
        larger = int((weights[row] > last[row]).sum())
        weights[row, equal[int(counts[row]) - larger :]] = 0.0
    return weights


def uniforms(draws: list[Draw]) -> np.ndarray:
    """One number in [0, 1) a row: (seed, choice, output position) through the finalizer of splitmix64, once for each."""
    state = np.zeros(len(draws), dtype=np.uint64)
    for part in ([d.seed for d in draws], [d.choice for d in draws], [d.position for d in draws]):
        state = _mix(state ^ np.array([value & 0xFFFFFFFFFFFFFFFF for value in part], dtype=np.uint64))
    return (state >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))
