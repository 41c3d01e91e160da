"""What became of a KV budget while requests waited for it, whichever way it was given out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Shares of the budget that add up to 1, and what was reached with it.

    Shares and `resident_mean` are averages over those `steps_averaged` steps after which a request is still to be admitted; over
    all steps where every request was admitted in the first.

    held: by tokens of running sequences, a shared one counted once. cached: by tokens of ended ones that may be shared yet.
    reserved: empty, and filled later by the sequence that has them. internal: given to a sequence that never fills them.
    external: given to nobody, while the request next in line does not fit in any hole of them. free: given to nobody otherwise.
    refused: requests that do not fit at all. cut: answers that end early, at the context.
    """

    held: float
    cached: float
    reserved: float
    internal: float
    external: float
    free: float
    resident_mean: float
    resident_max: int
    steps: int
    steps_averaged: int
    refused: int
    cut: int
    generated_tokens: int

    @property
    def tokens_per_step(self) -> float:
        return self.generated_tokens / max(1, self.steps)
