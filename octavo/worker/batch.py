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
    """What the worker holds of a running sequence. `history` grows by its own samples; `tables` are the block tables, one a KV group.

    adjustments: what changes its logits, made when it first samples; None where nothing does.
    """

    __slots__ = ("_entries", "adjustments", "assignment", "history", "tables")

    def __init__(self, assignment: Assignment, num_groups: int) -> None:
        self.assignment = assignment
        self.history = list(assignment.history)
        self.adjustments: Adjustments | None = None
        self._entries = [np.empty(0, dtype=np.int64)] * num_groups
        self.tables = list(self._entries)

    def take(self, row: Row) -> None:
        """Bring the slot up to date with a row that is about to run."""
        self.history += row.token_ids
        for group, update in enumerate(row.tables):
            entries, length = self._entries[group], update.start + len(update.block_ids)
            if length > len(entries):
                # Half as much again, so that a long table is not copied for each block it gains.
                entries = np.concatenate((entries, np.empty(length + length // 2 - len(entries), dtype=np.int64)))
                self._entries[group] = entries
            entries[update.start : length] = update.block_ids
            self.tables[group] = entries[:length]

    def mapping_bytes(self) -> int:
        return sum(map(sys.getsizeof, (self._entries, self.tables, *self._entries, *self.tables)))


@dataclass
class InputBatch:
    """T tokens of all rows in plan order."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch


def build(rows: list[Row], slots: dict[int, Slot], block_size: int, device: torch.device) -> InputBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    for row in rows:
        slot, start, end = slots[row.slot], row.start, row.start + row.count
        known = slot.history + row.draft_ids if row.draft_ids else slot.history
        token_ids += known[start:end]
        positions += range(start, end)
    tables = [list(of_group) for of_group in zip(*(slots[row.slot].tables for row in rows), strict=True)]
    attention = AttentionBatch(
        counts=[row.count for row in rows],
        starts=[row.start for row in rows],
        tables=tables,
        slots=torch.tensor([_targets(rows, of_group, block_size) for of_group in tables], device=device),
        block_size=block_size,
        prepared={},
    )
    return InputBatch(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), attention)


def _targets(rows: list[Row], tables: list[np.ndarray], block_size: int) -> list[int]:
    """Where each token's keys and values go in one group."""
    targets: list[int] = []
    for row, table in zip(rows, tables, strict=True):
        if row.count == 1:
            targets.append(int(table[row.start // block_size]) * block_size + row.start % block_size)
        else:
            at = np.arange(row.start, row.start + row.count)
            targets += (table[at // block_size] * block_size + at % block_size).tolist()
    return targets
