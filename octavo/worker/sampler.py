"""From logits to tokens. Every choice depends on a row's own logits, parameters, history, seed and output position, and on nothing else.

A draw inverts the cumulative distribution at one uniform number, itself a hash of (seed, choice, output position). Rows pay for what
they ask: a greedy one takes the largest logit and sees no softmax, and only those are adjusted that have adjustments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import Draws, Ops
from octavo.plan import Assignment, Logprob
from octavo.worker import adjustments, logprobs
from octavo.worker.adjustments import Adjustments

NOT_FINITE = "the model gave no finite logits for this request"


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's part in sampling: whose it is, the tokens known, and what changes its logits, None where nothing does."""

    assignment: Assignment
    history: list[int]
    adjustments: Adjustments | None = None

    @property
    def position(self) -> int:
        """Tokens generated before."""
        return len(self.history) - self.assignment.prompt_length


@dataclass(slots=True)
class Drawn:
    """A token and, where asked, the raw log-probabilities at its position; or why there is none."""

    token_id: int | None
    logprobs: list[Logprob] | None = None
    error: str | None = None


def sample(ops: Ops, logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    """float32 [N, vocab_size] logits, which may be changed -> what was drawn for each row."""
    scored = [row for row, draw in enumerate(draws) if draw.assignment.params.logprobs is not None]
    # Scored is what the model said, before any of it is adjusted.
    is_kept = any(draws[row].adjustments is not None for row in scored)
    raw = logits[scored] if is_kept else logits
    adjusted = [(row, draw.adjustments, draw.history) for row, draw in enumerate(draws) if draw.adjustments is not None]
    errors = adjustments.apply(ops, logits, adjusted) if adjusted else {}
    peaks, best = ops.argmax(logits)
    drawn = [Drawn(token_id) for token_id in best.tolist()]
    for row, peak in enumerate(peaks.tolist()):
        if row in errors:
            drawn[row] = Drawn(None, error=errors[row])
        elif not math.isfinite(peak):
            drawn[row] = Drawn(None, error=_empty(draws[row], peak))
    random = [row for row, draw in enumerate(draws) if drawn[row].error is None and not draw.assignment.params.greedy]
    if random:
        chosen = logits if len(random) == len(draws) else logits[random]
        found = ops.sample(chosen, peaks[random], _columns([draws[row] for row in random], logits.device))
        for row, token_id in zip(random, found.tolist(), strict=True):
            drawn[row].token_id = token_id
    by_count: dict[int, list[tuple[int, Drawn]]] = {}
    for place, row in enumerate(scored):
        if drawn[row].error is None:
            by_count.setdefault(draws[row].assignment.params.logprobs or 0, []).append((place if is_kept else row, drawn[row]))
    for count, rows in by_count.items():
        _score(ops, raw, rows, count)
    return drawn


def _columns(draws: list[Draw], device: torch.device) -> Draws:
    params = [draw.assignment.params for draw in draws]
    return Draws(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        uniform=torch.from_numpy(uniforms(draws)).to(device),
    )


def _score(ops: Ops, raw: Tensor, rows: list[tuple[int, Drawn]], count: int) -> None:
    """Log-probabilities as the model gave them."""
    token_ids = [one.token_id for _, one in rows if one.token_id is not None]
    chosen = raw if len(rows) == len(raw) else raw[[place for place, _ in rows]]
    for (_, one), line in zip(rows, logprobs.score(ops, chosen, token_ids, count), strict=True):
        one.logprobs = line
        if line is None:  # a NaN that adjustments had overwritten
            one.token_id, one.error = None, NOT_FINITE


def _empty(draw: Draw, peak: float) -> str:
    if draw.adjustments is not None and peak == -math.inf:
        return "no token is left to draw from: what the request allows excludes what else it asks for"
    return NOT_FINITE


def uniforms(draws: list[Draw]) -> np.ndarray:
    """One number in [0, 1) a row: (seed, choice, output position) through the finalizer of splitmix64, once for each."""
    state = np.zeros(len(draws), dtype=np.uint64)
    for part in ([d.assignment.seed for d in draws], [d.assignment.choice for d in draws], [d.position for d in draws]):
        state = _mix(state ^ np.array([value & 0xFFFFFFFFFFFFFFFF for value in part], dtype=np.uint64))
    return (state >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))
