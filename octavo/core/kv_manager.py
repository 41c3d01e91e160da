"""Block tables: from a sequence's logical blocks to physical ones, allocated when the last is full and freed at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from octavo.core.block_pool import BlockPool
from octavo.core.request import Sequence
from octavo.core.stats import Histogram
from octavo.errors import InvariantError
from octavo.plan import HOLE, TableUpdate


class BlockTable:
    """block_ids[i] holds tokens [i * block_size, (i + 1) * block_size). The worker knows the first `num_sent` entries."""

    __slots__ = ("block_ids", "num_sent")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_sent = 0

    def update(self) -> TableUpdate | None:
        """What the worker has not been told yet, and is now."""
        start, self.num_sent = self.num_sent, len(self.block_ids)
        return TableUpdate(start, self.block_ids[start:]) if start < self.num_sent else None


class KVManager:
    """Owns the pool and every running sequence's tables, one per KV group (one group today)."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.allocation_seconds = Histogram()
        self._clock = clock
        self._tables: dict[Sequence, BlockTable] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held(self, sequence: Sequence) -> int:
        table = self._tables.get(sequence)
        return len(table.block_ids) if table else 0

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the table to cover `num_tokens`. False, changing nothing, where the pool has too few free blocks."""
        table = self._tables.get(sequence)
        missing = self.blocks_for(num_tokens) - (len(table.block_ids) if table else 0)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        began = self._clock()
        if table is None:
            table = self._tables[sequence] = BlockTable()
        table.block_ids += self.pool.take(missing)
        self.allocation_seconds.add(self._clock() - began)
        return True

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks a sequence holds, if any."""
        table = self._tables.pop(sequence, None)
        if table:
            self.pool.give_back([block_id for block_id in table.block_ids if block_id != HOLE])

    def table_updates(self, sequence: Sequence) -> list[TableUpdate | None]:
        """Per KV group, the table's change since the sequence's last row."""
        return [self._tables[sequence].update()]

    def block_ids(self, sequence: Sequence) -> list[int]:
        """The sequence's table, a copy; empty where it holds nothing."""
        table = self._tables.get(sequence)
        return list(table.block_ids) if table else []

    def unused_slots(self) -> int:
        """Token slots inside used blocks that hold no token: internal fragmentation, in tokens."""
        return sum(len(table.block_ids) * self.block_size - sequence.num_scheduled for sequence, table in self._tables.items())

    def mapping_bytes(self) -> int:
        """Memory of the mapping itself: free list, counts and tables, object headers included."""
        tables = sum(sys.getsizeof(table) + sys.getsizeof(table.block_ids) for table in self._tables.values())
        return sys.getsizeof(self._tables) + tables + self.pool.bytes()

    def check(self, running: list[Sequence]) -> None:
        """Audit tables against pool and sequences. Raises InvariantError."""
        self.pool.check()
        if not set(self._tables) <= set(running):
            raise InvariantError("a sequence that does not run holds blocks")
        named: Counter[int] = Counter()
        for sequence, table in self._tables.items():
            named.update(block_id for block_id in table.block_ids if block_id != HOLE)
            if len(table.block_ids) < self.blocks_for(sequence.num_scheduled):
                raise InvariantError(f"{sequence!r} is scheduled past its block table")
            if not 0 <= table.num_sent <= len(table.block_ids):
                raise InvariantError(f"{sequence!r}: the worker knows more blocks than there are")
        for block_id in range(self.pool.total):
            if named[block_id] != self.pool.count(block_id):
                raise InvariantError(
                    f"block {block_id} is counted {self.pool.count(block_id)} times and stands in {named[block_id]} tables"
                )
