"""Block tables: from a sequence's logical blocks to physical ones. Match, allocate, fork, name, free, swap, compact.

Every operation costs O(1) a block. What must be moved in memory is noted in `copies`, in order, for the next plan to carry.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable

from octavo.core.block_pool import INT_BYTES, BlockPool
from octavo.core.prefix_index import Node, PrefixIndex
from octavo.core.request import Sequence
from octavo.core.stats import Histogram
from octavo.errors import InvariantError
from octavo.plan import HOLE, BlockCopy, TableUpdate, Tier

UNNAMED = 1 << 60
"""`BlockTable.num_named` where no block shall be named any more."""

REMEMBERED_BYTES = 2**30
"""Evicted content is remembered by name up to this size, to tell what so much more memory would have held."""

MOST_REMEMBERED = 1 << 20
"""Names remembered at most, however small the blocks."""


class BlockTable:
    """block_ids[i] holds tokens [i * block_size, (i + 1) * block_size).

    limit: tokens that can be written without asking. num_sent: entries the worker knows. num_named: leading blocks that the index
    names, the last of them by `node`. next_name: computed tokens at which there is another one to name.
    """

    __slots__ = ("block_ids", "limit", "next_name", "node", "num_named", "num_sent")

    def __init__(self, block_ids: list[int], limit: int, node: Node | None, num_named: int, next_name: int) -> None:
        self.block_ids = block_ids
        self.limit = limit
        self.node = node
        self.num_named = num_named
        self.next_name = next_name
        self.num_sent = 0


class KVManager:
    """Owns pool, index and host tier, and the tables of running sequences, one per KV group (one group today).

    A sequence's table is `sequence.table` while it runs; a swapped one has `sequence.swapped`, host blocks in order.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float],
        *,
        ceiling: int | None = None,
        swap_blocks: int = 0,
        prefix_caching: bool = True,
        block_bytes: int = 1 << 20,
    ) -> None:
        self.index = PrefixIndex(block_size, min(REMEMBERED_BYTES // block_bytes, MOST_REMEMBERED) if prefix_caching else 0)
        self.pool = BlockPool(num_blocks, self.index, ceiling)
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.swap_total = swap_blocks
        self.allocation_seconds = Histogram()
        self.copies: list[BlockCopy] = []
        self.num_copied = 0
        self._prefix_caching = prefix_caching
        self._swap_free = list(range(swap_blocks - 1, -1, -1))
        self._clock = clock

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def swap_free(self) -> int:
        return len(self._swap_free)

    def take_copies(self) -> list[BlockCopy]:
        copies, self.copies = self.copies, []
        self.num_copied += len(copies)
        return copies

    def match(self, sequence: Sequence) -> list[Node]:
        """The indexed blocks that a waiting sequence begins with: whole ones, never up to its last token.

        Where prompt logprobs are asked, positions not scored yet must be computed, whatever is known of them.
        """
        nodes: list[Node] = []
        if not self._prefix_caching:
            return nodes
        tokens, size, scope = sequence.tokens, self.block_size, sequence.request.scope
        node: Node | None = None
        for start in range(0, _shareable(sequence, len(tokens)) - size + 1, size):
            node = self.index.find(node, scope, tokens[start : start + size])
            if node is None:
                break
            nodes.append(node)
        return nodes

    def missed(self, sequence: Sequence, nodes: list[Node]) -> int:
        """Tokens of the prompt, after those matched, that an earlier request had computed and that were evicted since."""
        tokens, size, missed = sequence.tokens, self.block_size, 0
        chain = nodes[-1].chain if nodes else None
        for start in range(len(nodes) * size, _shareable(sequence, sequence.num_prompt) - size + 1, size):
            chain = self.index.remembers(chain, sequence.request.scope, tokens[start : start + size])
            if chain is None:
                break
            missed += size
        return missed

    def num_missing(self, num_tokens: int, nodes: list[Node]) -> int:
        """Blocks that must be available for a sequence of so many tokens to begin with these nodes."""
        # Where cached blocks count as available, those that are kept must not be counted on.
        kept = sum(self.pool.count(node.block_id) == 0 for node in nodes) if self.pool.evicts else 0
        return self.blocks_for(num_tokens) - len(nodes) + kept

    def begin(self, sequence: Sequence, nodes: list[Node]) -> None:
        """Give a sequence its table, beginning with shared blocks; what it had swapped out beyond them is copied back."""
        size = self.block_size
        block_ids = [node.block_id for node in nodes]
        self.pool.share(block_ids)
        host, sequence.swapped = sequence.swapped, []
        num_computed = len(nodes) * size
        missing = len(host) - len(nodes)
        if missing > 0:
            fresh = self.pool.take(missing)
            self.copies += [BlockCopy(Tier.HOST, h, Tier.DEVICE, d) for h, d in zip(host[len(nodes) :], fresh, strict=True)]
            block_ids += fresh
            num_computed = max(num_computed, min(sequence.num_swapped, len(sequence.tokens) - 1))
        self._swap_free += host
        named = len(nodes) if self._prefix_caching else UNNAMED
        sequence.table = BlockTable(block_ids, len(block_ids) * size, nodes[-1] if nodes else None, named, (named + 1) * size)
        sequence.num_computed = sequence.num_scheduled = num_computed

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share every block of its parent's first `num_tokens` tokens; a shared tail is copied at its first write."""
        ours = parent.table
        assert ours is not None
        block_ids = ours.block_ids[: self.blocks_for(num_tokens)]
        self.pool.share(block_ids)
        full = num_tokens // self.block_size
        node, named = ours.node, ours.num_named
        if named != UNNAMED:
            for _ in range(named - full):
                assert node is not None
                node = node.parent
            named = min(named, full)
        child.table = BlockTable(block_ids, full * self.block_size, node, named, (named + 1) * self.block_size)
        if full < len(block_ids):
            ours.limit = min(ours.limit, full * self.block_size)
        child.num_computed = child.num_scheduled = num_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make [num_scheduled, num_tokens) writable: cover it with blocks, and copy the first if it is shared.

        False, changing nothing, where the pool has too few blocks.
        """
        table = sequence.table
        assert table is not None
        if num_tokens <= table.limit:
            return True
        ids, size = table.block_ids, self.block_size
        place = sequence.num_scheduled // size
        # A block may be named although one table alone holds it: its parent went further, and left.
        shared = place < len(ids) and (self.pool.count(ids[place]) > 1 or ids[place] in self.index)
        missing = max(0, self.blocks_for(num_tokens) - len(ids))
        if missing + shared > self.pool.num_available:
            return False
        began = self._clock()
        if shared:
            (copy,) = self.pool.take(1)
            self.copies.append(BlockCopy(Tier.DEVICE, ids[place], Tier.DEVICE, copy))
            self.pool.give_back([ids[place]])
            ids[place] = copy
            table.num_sent = min(table.num_sent, place)
        if missing:
            ids += self.pool.take(missing)
        table.limit = len(ids) * size
        self.allocation_seconds.add(self._clock() - began)
        return True

    def name(self, sequence: Sequence) -> None:
        """Name the blocks that a result has confirmed in full; a block that the index has already gives way to that one."""
        table, tokens, size = sequence.table, sequence.tokens, self.block_size
        assert table is not None
        for place in range(table.num_named, sequence.num_computed // size):
            ours = table.block_ids[place]
            start = place * size
            node = self.index.find_or_add(table.node, sequence.request.scope, tokens[start : start + size], ours)
            if node.block_id != ours:
                self.pool.share([node.block_id])
                table.block_ids[place] = node.block_id
                table.num_sent = min(table.num_sent, place)
                self.pool.give_back([ours])
            table.node = node
            table.num_named = place + 1
        table.next_name = (table.num_named + 1) * size

    def free(self, sequence: Sequence, keep: bool = True) -> None:
        """Give back a running sequence's table. Named blocks stay cached, unless their content is not to be trusted (`keep` False)."""
        table, sequence.table = sequence.table, None
        assert table is not None
        if not keep:
            for block_id in reversed(table.block_ids[: table.num_named]):
                node = self.index.node(block_id)
                if node is None or node.num_children or self.pool.count(block_id) > 1:
                    break  # others build on it
                self.pool.forget(block_id)
        self.pool.give_back([block_id for block_id in table.block_ids if block_id != HOLE])

    def num_shared(self, sequence: Sequence) -> int:
        """Leading blocks that stay when this sequence goes, since others hold them."""
        assert sequence.table is not None
        shared = 0
        for block_id in sequence.table.block_ids:
            if self.pool.count(block_id) < 2:
                break
            shared += 1
        return shared

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy what is confirmed of a running sequence to the host tier. False, changing nothing, where that is too full."""
        assert sequence.table is not None
        wanted = self.blocks_for(sequence.num_computed)
        if not 0 < wanted <= len(self._swap_free):
            return False
        sequence.swapped = self._swap_free[: -wanted - 1 : -1]
        del self._swap_free[-wanted:]
        sequence.num_swapped = sequence.num_computed
        self.copies += [
            BlockCopy(Tier.DEVICE, d, Tier.HOST, h) for d, h in zip(sequence.table.block_ids[:wanted], sequence.swapped, strict=True)
        ]
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give back a swapped sequence's host blocks."""
        self._swap_free += sequence.swapped
        sequence.swapped = []

    def compact(self, total: int, tables: Iterable[BlockTable]) -> int:
        """Shrink the pool to `total` blocks, moving live ones down; returns how many move."""
        moves = self.pool.compact(total)
        if moves:
            self.copies += [BlockCopy(Tier.DEVICE, source, Tier.DEVICE, target) for source, target in moves.items()]
            for table in tables:
                moved = [place for place, block_id in enumerate(table.block_ids) if block_id in moves]
                for place in moved:
                    table.block_ids[place] = moves[table.block_ids[place]]
                if moved:
                    table.num_sent = min(table.num_sent, moved[0])
        return len(moves)

    def reset(self, tables: Iterable[BlockTable]) -> int:
        """Forget all prefixes, and name no block of the running sequences; returns the cached blocks that are free now."""
        for table in tables:
            table.num_named, table.next_name, table.node = UNNAMED, UNNAMED, None
        return self.pool.forget_all()

    def table_updates(self, sequence: Sequence) -> list[TableUpdate | None]:
        """Per KV group, the table's change since the sequence's last row."""
        table = sequence.table
        assert table is not None
        start, table.num_sent = table.num_sent, len(table.block_ids)
        return [TableUpdate(start, table.block_ids[start:])] if start < table.num_sent else NO_UPDATES

    def unused_slots(self, running: Iterable[Sequence]) -> int:
        """Token slots inside used blocks that hold no token: internal fragmentation, in tokens, shared blocks counted once."""
        size, unused = self.block_size, 0
        shared: dict[int, int] = {}
        for sequence in running:
            if sequence.table is not None:
                ids, filled = sequence.table.block_ids, sequence.num_scheduled
                for place in range(filled // size, len(ids)):
                    empty = min(size, (place + 1) * size - filled)
                    if self.pool.count(ids[place]) == 1:
                        unused += empty
                    else:
                        shared[ids[place]] = min(empty, shared.get(ids[place], size))
        return unused + sum(shared.values())

    def mapping_bytes(self, running: Iterable[Sequence]) -> int:
        """Memory of the mapping itself: the pool's books, the index and the tables, object headers included."""
        tables = [sequence.table for sequence in running if sequence.table is not None]
        held = sum(16 + sys.getsizeof(table) + sys.getsizeof(table.block_ids) for table in tables)
        return held + self.pool.num_bytes() + self.index.num_bytes() + INT_BYTES * self.swap_total

    def check(self, running: list[Sequence], swapped: list[Sequence]) -> None:
        """Audit tables against pool, index and sequences. Raises InvariantError."""
        self.pool.check()
        self.index.check()
        size = self.block_size
        named: Counter[int] = Counter()
        for sequence in running:
            table = sequence.table
            if table is None:
                raise InvariantError(f"{sequence!r} runs without a table")
            ids = table.block_ids
            held = [block_id for block_id in ids if block_id != HOLE]
            named.update(held)
            if len(set(held)) != len(held):
                raise InvariantError(f"{sequence!r} holds a block twice")
            if len(ids) < self.blocks_for(sequence.num_scheduled):
                raise InvariantError(f"{sequence!r} is scheduled past its block table")
            if not 0 <= table.num_sent <= len(ids) or table.limit > len(ids) * size:
                raise InvariantError(f"{sequence!r}: the worker knows more blocks than there are, or may write past them")
            first_write = sequence.num_scheduled // size
            for place, block_id in enumerate(ids):
                node = self.index.node(block_id)
                shared = node is not None or self.pool.count(block_id) > 1
                if place >= first_write and shared and table.limit > place * size:
                    raise InvariantError(f"{sequence!r} may write block {block_id}, which is named or shared")
                if node is None and place < table.num_named != UNNAMED:
                    raise InvariantError(f"{sequence!r} has {table.num_named} named blocks; block {block_id} at {place} is none")
            if table.num_named != UNNAMED and table.next_name != (table.num_named + 1) * size:
                raise InvariantError(f"{sequence!r} has {table.num_named} named blocks and names the next at {table.next_name}")
            if 0 < table.num_named != UNNAMED and table.node is not self.index.node(ids[table.num_named - 1]):
                raise InvariantError(f"{sequence!r} does not know the node of its last named block")
        for block_id in range(self.pool.total):
            if named[block_id] != self.pool.count(block_id):
                raise InvariantError(
                    f"block {block_id} is counted {self.pool.count(block_id)} times and stands in {named[block_id]} tables"
                )
        host = [block_id for sequence in swapped for block_id in sequence.swapped]
        if sorted(host + self._swap_free) != list(range(self.swap_total)):
            raise InvariantError(f"{len(host)} host blocks are held and {len(self._swap_free)} are free, of {self.swap_total}")


def _shareable(sequence: Sequence, num_tokens: int) -> int:
    """How many of so many tokens may be shared: the last is computed, to be sampled from, and what is to be scored."""
    return min(num_tokens - 1, sequence.num_scored) if sequence.scores_prompt else num_tokens - 1


NO_UPDATES: list[TableUpdate | None] = [None]
