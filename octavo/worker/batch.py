"""From a plan to what the model takes: flat arrays of tokens, positions and slots, one row after another."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.interface import AttentionBatch
from octavo.plan import Assignment, Row
from octavo.worker.adjustments import Adjustments


class Slot:
    """What the worker holds of a running sequence. `history` grows by its own samples; `table` is the block table.

    adjustments: what changes its logits, made when it first samples; None where nothing does.
    """

    __slots__ = ("_entries", "adjustments", "assignment", "history", "table")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.history = list(assignment.history)
        self.adjustments: Adjustments | None = None
        self._entries = np.empty(0, dtype=np.int64)
        self.table = self._entries

    def take(self, row: Row) -> None:
        """Bring the slot up to date with a row that is about to run."""
        self.history += row.token_ids
        for update in row.tables:
            if update is not None:
                length = update.start + len(update.block_ids)
                if length > len(self._entries):
                    # Half as much again, so that a long table is not copied for each block it gains.
                    self._entries = np.concatenate((self._entries, np.empty(length + length // 2 - len(self._entries), dtype=np.int64)))
                self._entries[update.start : length] = update.block_ids
                self.table = self._entries[:length]

    def mapping_bytes(self) -> int:
        return sys.getsizeof(self._entries) + sys.getsizeof(self.table)


@dataclass
class InputBatch:
    """T tokens of all rows in plan order."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch


def build(rows: list[Row], slots: dict[int, Slot], block_size: int, device: torch.device) -> InputBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for row in rows:
        slot, start, end = slots[row.slot], row.start, row.start + row.count
        known = slot.history + row.draft_ids if row.draft_ids else slot.history
        if row.count == 1:
            token_ids.append(known[start])
            positions.append(start)
            targets.append(int(slot.table[start // block_size]) * block_size + start % block_size)
        else:
            at = np.arange(start, end)
            token_ids += known[start:end]
            positions += range(start, end)
            targets += (slot.table[at // block_size] * block_size + at % block_size).tolist()
    attention = AttentionBatch(
        counts=[row.count for row in rows],
        starts=[row.start for row in rows],
        tables=[slots[row.slot].table for row in rows],
        slots=torch.tensor(targets, device=device),
        block_size=block_size,
        prepared={},
    )
    return InputBatch(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), attention)
