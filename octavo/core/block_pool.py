"""Physical blocks: which are free, which are kept for their content, and how many tables name each of the others."""

from __future__ import annotations

import sys
from collections import OrderedDict

from octavo.core.prefix_index import Node, PrefixIndex
from octavo.errors import InvariantError


class BlockPool:
    """`total` blocks, each free (count 0, no name), cached (count 0, named by the index) or used (count >= 1).

    Which KV group a block serves, whoever takes it decides. Taking and giving back cost O(1) a block. The block given back last is
    taken first, so that memory already touched is used again; where none is free the cached one that was used longest ago is. Of
    groups that see everything these are children before their parents: a sequence gives back its blocks deepest first, and whoever
    uses a child uses its parents too. Those behind a window come by themselves, and mostly earlier.

    `total` is what is committed; it grows up to `ceiling`, unless `is_closed`, and shrinks to what is live.
    """

    def __init__(self, total: int, index: PrefixIndex, ceiling: int | None = None) -> None:
        self.total = total
        self.ceiling = max(total, ceiling or 0)
        self.is_closed = False
        self.peak_used = 0
        self.num_evicted = 0
        self._index = index
        self._free = list(range(total - 1, -1, -1))
        self._counts = [0] * total
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that may be taken: the free ones, and the cached ones where the pool can grow no more."""
        return len(self._free) + (len(self._cached) if self.evicts else 0)

    @property
    def evicts(self) -> bool:
        """Whether cached blocks are given up: not as long as there may be more."""
        return self.is_closed or self.total >= self.ceiling

    @property
    def num_used(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    def count(self, block_id: int) -> int:
        """How many tables name a block."""
        return self._counts[block_id]

    def take(self, number: int) -> list[int]:
        """Return `number` blocks, now used once each. Raises InvariantError, changing nothing, where fewer are available."""
        missing = number - len(self._free)
        if missing > 0:
            self._evict(missing)
        if number == 1:
            taken = [self._free.pop()]
        elif number:
            taken = self._free[: -number - 1 : -1]
            del self._free[-number:]
        else:
            return []
        for block_id in taken:
            self._counts[block_id] = 1
        used = self.total - len(self._free) - len(self._cached)
        if used > self.peak_used:
            self.peak_used = used
        return taken

    def share(self, block_ids: list[int]) -> None:
        """Name used or cached blocks once more. Raises InvariantError, changing nothing, where one is free."""
        counts = self._counts
        for block_id in block_ids:
            if not 0 <= block_id < self.total or not (counts[block_id] or block_id in self._cached):
                raise InvariantError(f"a block that is free, or does not exist, was shared: {block_ids}")
        for block_id in block_ids:
            if counts[block_id] == 0:
                self._cached.pop(block_id, None)
            counts[block_id] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def give_back(self, block_ids: list[int]) -> None:
        """Drop one name of each block, given in a table's order; at none it is cached or free.

        Raises InvariantError, changing nothing, where names run short.
        """
        counts, freed = self._counts, []
        for place in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids[place]
            left = counts[block_id] - 1 if 0 <= block_id < self.total else -1
            if left < 0:
                for undone in block_ids[place + 1 :]:
                    counts[undone] += 1
                raise InvariantError(f"block {block_id} was given back more often than it was taken")
            counts[block_id] = left
            if left == 0:
                freed.append(block_id)
        for block_id in freed:
            if block_id in self._index:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def forget(self, node: Node) -> None:
        """Drop a node, and to the free ones those of its blocks that were kept for their name only."""
        self._free_unnamed(self._index.drop(node, remember=False))

    def forget_all(self) -> int:
        """Drop every name; returns how many blocks were kept for theirs only."""
        dropped = len(self._cached)
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        return dropped

    def grow(self, total: int) -> None:
        """Add blocks, to be taken after those there are."""
        added = range(self.total, min(total, self.ceiling))
        self._free[:0] = reversed(added)
        self._counts += [0] * len(added)
        self.total += len(added)

    def num_live_above(self, total: int) -> int:
        """Used and cached blocks that would have to move for the pool to have `total`."""
        return self.total - total - sum(block_id >= total for block_id in self._free)

    def compact(self, total: int) -> dict[int, int]:
        """Shrink to `total` blocks; returns {source: target} for the live blocks that must move down.

        Raises InvariantError, changing nothing, where more blocks are live.
        """
        if not self.total - len(self._free) <= total <= self.total:
            raise InvariantError(f"{self.total - len(self._free)} of {self.total} blocks are live, and are to fit in {total}")
        free = sorted(self._free)
        live_above = sorted(set(range(total, self.total)).difference(free))
        moves = dict(zip(live_above, free, strict=False))
        for source, target in moves.items():
            self._counts[target] = self._counts[source]
            self._index.move(source, target)
        self._cached = OrderedDict.fromkeys(moves.get(block_id, block_id) for block_id in self._cached)
        self._free = [block_id for block_id in reversed(free[len(moves) :]) if block_id < total]
        del self._counts[total:]
        self.total = total
        return moves

    def _evict(self, number: int) -> None:
        if number > len(self._cached):
            raise InvariantError(f"{number} more blocks were taken than are free, and {len(self._cached)} are cached")
        free, cached = self._free, self._cached
        before = len(free)
        while len(free) < before + number:
            block_id, _ = cached.popitem(last=False)
            free.append(block_id)
            unnamed = self._index.forget(block_id)
            if len(unnamed) > 1:  # the others are of no use without it
                self._free_unnamed(unnamed)
        self.num_evicted += len(free) - before

    def _free_unnamed(self, block_ids: list[int]) -> None:
        """Free those of some blocks that were kept for the name they have lost."""
        for block_id in block_ids:
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def check(self) -> None:
        """Audit the books. Raises InvariantError."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block stands in the free list twice")
        if not free <= set(range(self.total)) or not self._cached.keys() <= set(range(self.total)):
            raise InvariantError("the free list, or the cache, names a block that does not exist")
        if len(self._counts) != self.total or self.total > self.ceiling:
            raise InvariantError(f"{len(self._counts)} counts for {self.total} blocks of at most {self.ceiling}")
        for block_id, count in enumerate(self._counts):
            states = (block_id in free) + (block_id in self._cached) + (count > 0)
            if count < 0 or states != 1:
                raise InvariantError(
                    f"block {block_id} is named {count} times, is {'' if block_id in free else 'not '}free "
                    f"and {'' if block_id in self._cached else 'not '}cached"
                )
            if (block_id in self._cached) > (block_id in self._index) or (block_id in free and block_id in self._index):
                raise InvariantError(f"block {block_id} is cached without a name, or free with one")
        seen = set()
        for block_id in self._cached:
            if (parent := self._index.needs(block_id)) in seen:
                raise InvariantError(f"block {block_id} would be evicted after its parent {parent}")
            seen.add(block_id)

    def num_bytes(self) -> int:
        """Memory of the books themselves."""
        return sys.getsizeof(self._free) + sys.getsizeof(self._counts) + sys.getsizeof(self._cached) + INT_BYTES * self.total


INT_BYTES = sys.getsizeof(2**20)
"""Every block id is one int object, shared by free list, tables and index."""
