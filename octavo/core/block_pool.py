"""Physical blocks: which are free, and how many tables name each of the others."""

from __future__ import annotations

import sys
from collections import Counter

from octavo.errors import InvariantError


class BlockPool:
    """`total` blocks, each free (count 0) or used (count >= 1). Taking and giving back cost O(1) a block.

    The block given back last is taken first, so that memory already touched is used again.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._counts = [0] * total
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.total - len(self._free)

    def count(self, block_id: int) -> int:
        """How many tables name a block."""
        return self._counts[block_id]

    def take(self, number: int) -> list[int]:
        """Return `number` blocks, now used once each. Raises InvariantError, changing nothing, where fewer are free."""
        if number > len(self._free):
            raise InvariantError(f"{number} blocks were taken of {len(self._free)} free ones")
        if number == 0:
            return []
        taken = self._free[-number:]
        del self._free[-number:]
        taken.reverse()
        for block_id in taken:
            self._counts[block_id] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return taken

    def share(self, block_ids: list[int]) -> None:
        """Name used blocks once more. Raises InvariantError, changing nothing, where one is free."""
        if not all(0 <= block_id < self.total and self._counts[block_id] for block_id in block_ids):
            raise InvariantError(f"a block that is free, or does not exist, was shared: {block_ids}")
        for block_id in block_ids:
            self._counts[block_id] += 1

    def give_back(self, block_ids: list[int]) -> None:
        """Drop one name of each block; at none it is free. Raises InvariantError, changing nothing, where names run short."""
        counts = self._counts
        for block_id, names in Counter(block_ids).items():
            if not 0 <= block_id < self.total or counts[block_id] < names:
                raise InvariantError(f"block {block_id} was given back more often than it was taken")
        for block_id in block_ids:
            counts[block_id] -= 1
        # Deepest first, so that a sequence's first blocks come out on top. A block may stand here twice and reach none once.
        freed = [block_id for block_id in reversed(block_ids) if counts[block_id] == 0]
        self._free.extend(freed if len(set(freed)) == len(freed) else dict.fromkeys(freed))

    def check(self) -> None:
        """Audit the books. Raises InvariantError."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block stands in the free list twice")
        if not free <= set(range(self.total)):
            raise InvariantError("the free list names a block that does not exist")
        for block_id, count in enumerate(self._counts):
            if count < 0 or (count == 0) != (block_id in free):
                raise InvariantError(f"block {block_id} is named {count} times and is {'' if block_id in free else 'not '}free")

    def bytes(self) -> int:
        """Memory of the books themselves."""
        return sys.getsizeof(self._free) + sys.getsizeof(self._counts) + INT_BYTES * self.total


INT_BYTES = sys.getsizeof(2**20)
"""Every block id is one int object, shared by free list and tables."""
