"""From a plan to what the model takes: flat arrays of tokens, positions and slots, one row after another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import AttentionBatch
from octavo.plan import Assignment, Row


class Slot:
    """What the worker holds of a running sequence. `history` grows by its own samples; `table` is the block table."""

    __slots__ = ("assignment", "history", "table")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.history = list(assignment.history)
        self.table = np.empty(0, dtype=np.int64)

    def take(self, row: Row) -> None:
        """Bring the slot up to date with a row that is about to run."""
        self.history += row.token_ids
        for update in row.tables:
            if update is not None:
                self.table = np.concatenate((self.table[: update.start], np.asarray(update.block_ids, dtype=np.int64)))


@dataclass
class InputBatch:
    """T tokens of all rows in plan order. logit_rows: the tokens that are given to the output head."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionBatch


def build(rows: list[Row], slots: dict[int, Slot], block_size: int, device: torch.device) -> InputBatch:
    token_ids: list[int] = []
    positions, targets, logit_rows = [], [], []
    for row in rows:
        slot = slots[row.slot]
        known = slot.history + row.draft_ids if row.draft_ids else slot.history
        token_ids += known[row.start : row.start + row.count]
        at = np.arange(row.start, row.start + row.count)
        positions.append(at)
        targets.append(slot.table[at // block_size] * block_size + at % block_size)
        logit_rows.append(np.arange(len(token_ids) - row.num_logits, len(token_ids)))

    def put(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    attention = AttentionBatch(
        counts=[row.count for row in rows],
        starts=[row.start for row in rows],
        tables=[slots[row.slot].table for row in rows],
        slots=put(targets),
        block_size=block_size,
        prepared={},
    )
    return InputBatch(torch.tensor(token_ids, device=device), put(positions), put(logit_rows), attention)
