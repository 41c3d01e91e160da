"""What a request changes about its logits before a token is drawn, in this order: the grammar's mask, allowed_token_ids, bad_words and
min_tokens, logit_bias, processors of its own, penalties.

An `Adjustments` belongs to one slot and is made where the parameters ask for any; what it remembers follows from the slot's
history alone, so that a resumed sequence, or a forked one, is where it was. All rows of a step are changed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.errors import InvalidValueError, described
from octavo.ops.interface import Ops
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams
from octavo.text.grammar import Grammars, Matcher
from octavo.worker.logits_processors import find

NEVER = -float("inf")


class Adjustments:
    """One sequence's. Raises InvalidValueError for a processor that cannot be found, or a grammar that is none."""

    def __init__(self, assignment: Assignment, grammars: Grammars | None) -> None:
        params = assignment.params
        self.params = params
        self.prompt_length = assignment.prompt_length
        self.num_seen = 0
        self.processors = [find(one) for one in params.logits_processors]
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, dtype=np.int64)
        self.biased = params.logit_bias or {}
        self.ends = assignment.ends
        self.matcher: Matcher | None = None
        if params.structured_outputs is not None:
            if grammars is None:
                raise InvalidValueError("structured_outputs: this worker has no vocabulary")
            self.matcher = grammars.matcher(params.structured_outputs, assignment.ends)
        self.penalized = _Counts() if _penalizes(params) else None
        self._bad_words: dict[int, list[list[int]]] = {}
        for words in assignment.bad_words:
            self._bad_words.setdefault(words[-1], []).append(words[:-1])

    @staticmethod
    def are_asked(params: SamplingParams) -> bool:
        """Whether a request changes its logits at all."""
        return bool(
            params.min_tokens
            or params.bad_words
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.structured_outputs is not None
            or params.logits_processors
            or _penalizes(params)
        )

    def follow(self, history: list[int]) -> None:
        """Take in what the sequence has gained."""
        if self.num_seen == len(history):
            return
        if self.penalized is not None:
            if not self.num_seen and self.params.repetition_penalty != 1.0:
                self.penalized.meet(history[: self.prompt_length])
            self.penalized.count(history[max(self.num_seen, self.prompt_length) :])
        if self.matcher is not None:
            self.matcher.follow(history[self.prompt_length :])
        self.num_seen = len(history)

    def banned(self, history: list[int]) -> list[int]:
        """Ids that bad_words and min_tokens keep out at the next position."""
        banned = []
        for last, beginnings in self._bad_words.items():
            # The words stand in the output; what of them the prompt ends with does not count.
            if any(not head or history[max(self.prompt_length, len(history) - len(head)) :] == head for head in beginnings):
                banned.append(last)
        # A text that is complete ends, whether long enough or not.
        if len(history) - self.prompt_length < self.params.min_tokens and (self.matcher is None or not self.matcher.is_complete):
            banned += self.ends
        return banned


class _Counts:
    """How often tokens were generated, those of the prompt counted as none: arrays that grow, in the order in which tokens were met."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._times = np.empty(64, dtype=np.float32)

    def meet(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._place(token_id)

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._place(token_id)  # first, as the arrays may grow
            self._times[place] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._places)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self._places)]

    def _place(self, token_id: int) -> int:
        if (place := self._places.get(token_id)) is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._times = np.concatenate((self._times, np.empty_like(self._times)))
            self._ids[place], self._times[place] = token_id, 0
        return place


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply(ops: Ops, logits: Tensor, rows: list[tuple[int, Adjustments, list[int]]]) -> dict[int, str]:
    """Change rows of float32 [N, vocab_size] logits in place; returns {row: what went wrong}, for rows that must end.

    rows: (row, its adjustments, its history).
    """
    errors: dict[int, str] = {}
    for row, own, history in rows:
        try:
            own.follow(history)
        except ValueError as error:
            errors[row] = str(error)
    rows = [each for each in rows if each[0] not in errors]
    errors |= _mask(ops, logits, [(row, own.matcher) for row, own, _ in rows if own.matcher is not None])
    rows = [each for each in rows if each[0] not in errors]
    for row, own, _ in rows:
        if own.allowed is not None:
            kept = torch.from_numpy(own.allowed).to(logits.device)
            values = logits[row, kept]
            logits[row] = NEVER
            logits[row, kept] = values
    _put(logits, [(row, banned) for row, own, history in rows if (banned := own.banned(history))])
    _add(logits, [(row, own.biased) for row, own, _ in rows if own.biased])
    for row, own, history in rows:
        for asked, processor in zip(own.params.logits_processors, own.processors, strict=True):
            try:
                logits[row] = _processed(processor, own, history, logits[row])
            except Exception as error:  # whatever it is, it is this request's alone
                name = asked if isinstance(asked, str) else getattr(asked, "__name__", type(asked).__name__)
                errors[row] = f"logits processor {name}: {described(error)}"
                break
    _penalize(logits, [(row, own.params, own.penalized) for row, own, _ in rows if own.penalized is not None])
    return errors


def _mask(ops: Ops, logits: Tensor, rows: list[tuple[int, Matcher]]) -> dict[int, str]:
    errors: dict[int, str] = {}
    if not rows:
        return errors
    bits = np.zeros((len(rows), -(-logits.shape[1] // 32)), dtype=np.int32)
    for place, (row, matcher) in enumerate(rows):
        try:
            matcher.fill(bits[place])
        except ValueError as error:
            errors[row] = str(error)
    ops.mask(logits, torch.tensor([row for row, _ in rows], device=logits.device), torch.from_numpy(bits).to(logits.device))
    return errors


def _put(logits: Tensor, rows: list[tuple[int, list[int]]]) -> None:
    # An id beyond the logits is never drawn anyway.
    rows = [(row, kept) for row, banned in rows if (kept := [token_id for token_id in banned if token_id < logits.shape[1]])]
    if rows:
        at, ids = _flat(rows, logits.device)
        logits[at, ids] = NEVER


def _add(logits: Tensor, rows: list[tuple[int, dict[int, float]]]) -> None:
    if rows:
        at, ids = _flat([(row, list(biases)) for row, biases in rows], logits.device)
        logits[at, ids] += torch.tensor([bias for _, biases in rows for bias in biases.values()], device=logits.device)


def _penalize(logits: Tensor, rows: list[tuple[int, SamplingParams, _Counts]]) -> None:
    rows = [each for each in rows if len(each[2].ids)]
    if not rows:
        return
    lengths = [len(counts.ids) for _, _, counts in rows]
    at, ids = _flat([(row, counts.ids) for row, _, counts in rows], logits.device)
    times = torch.from_numpy(np.concatenate([counts.times for _, _, counts in rows])).to(logits.device)

    def each(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(logits.device)

    values = logits[at, ids]
    repetition = each([params.repetition_penalty for _, params, _ in rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= each([params.frequency_penalty for _, params, _ in rows]) * times
    values -= each([params.presence_penalty for _, params, _ in rows]) * (times > 0)
    logits[at, ids] = values


def _flat(rows: Sequence[tuple[int, Any]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and id of each entry."""
    at = np.repeat(np.array([row for row, _ in rows]), [len(ids) for _, ids in rows])
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in rows])
    return torch.from_numpy(at).to(device), torch.from_numpy(ids).to(device)


def _processed(processor: Callable[..., Any], own: Adjustments, history: list[int], logits: Tensor) -> Tensor:
    found = processor(history[: own.prompt_length], history[own.prompt_length :], logits.clone())
    if not isinstance(found, Tensor) or found.shape != logits.shape:
        raise ValueError(f"it returned {type(found).__name__}; allowed: logits of the same shape, {tuple(logits.shape)}")
    if not found.amax() < math.inf:
        raise ValueError("it returned NaN or infinity")
    return found.to(logits.dtype)
