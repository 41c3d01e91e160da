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
from octavo.kv_groups import KVGroups
from octavo.plan import HOLE, BlockCopy, TableUpdate, Tier

UNNAMED = 1 << 60
"""`BlockTable.num_named` where no block shall be named any more."""

REMEMBERED_BYTES = 2**30
"""Evicted content is remembered by name up to this size, to tell what so much more memory would have held."""

MOST_REMEMBERED = 1 << 20
"""Names remembered at most, however small the blocks."""


class BlockTable:
    """groups[g][i] is the block of KV group g that holds tokens [i * block_size, (i + 1) * block_size), HOLE behind the group's window.

    num_blocks: entries of each group. limit: tokens that can be written without asking. num_sent: entries the worker knows.
    num_named: leading entries whose blocks the index names, the last of them by `node`, of which one is held. next_name: computed
    tokens at which there is another one to name. seen_from: computed tokens at which blocks behind the windows were last given back.
    """

    __slots__ = ("groups", "limit", "next_name", "node", "num_blocks", "num_named", "num_sent", "seen_from")

    def __init__(self, groups: list[list[int]], limit: int, node: Node | None, num_named: int, next_name: int, seen_from: int) -> None:
        self.groups = groups
        self.num_blocks = len(groups[0])
        self.limit = limit
        self.node = node
        self.num_named = num_named
        self.next_name = next_name
        self.seen_from = seen_from
        self.num_sent = 0

    def held(self) -> list[int]:
        """Its blocks, place by place, so that what is given back is so from the deepest on; of a place, windows go first."""
        ids = self.groups[0] if len(self.groups) == 1 else [block_id for place in zip(*self.groups, strict=True) for block_id in place]
        return [block_id for block_id in ids if block_id != HOLE] if HOLE in ids[: len(self.groups)] else ids


class KVManager:
    """Owns pool, index and host tier, and the tables of running sequences, one per KV group.

    A sequence's tables are `sequence.table` while it runs; a swapped one has `sequence.swapped`: of each group in turn the host blocks
    of what it still needs, in order.

    windows: of each group, positions that a token sees, None for all; these come first. chunk: tokens of a sequence that a plan
    computes at most, None for any number.
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
        windows: tuple[int | None, ...] = (None,),
        chunk: int | None = None,
    ) -> None:
        self.groups = KVGroups(windows, block_size, chunk)
        remembered = min(REMEMBERED_BYTES // (block_bytes * len(windows)), MOST_REMEMBERED) if prefix_caching else 0
        self.index = PrefixIndex(block_size, remembered, windows)
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
        """Entries of each table that so many tokens take."""
        return self.groups.blocks_for(num_tokens)

    @property
    def swap_free(self) -> int:
        return len(self._swap_free)

    def take_copies(self) -> list[BlockCopy]:
        copies, self.copies = self.copies, []
        self.num_copied += len(copies)
        return copies

    def match(self, sequence: Sequence) -> list[Node]:
        """The indexed nodes that a waiting sequence begins with: whole blocks, never up to its last token.

        Where it begins after them, they have every block that it needs; where it has swapped out more than that, those it can share.
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
        if self.groups.slides:
            usable = self._num_usable(nodes)
            swapped = sequence.num_swapped if sequence.swapped else 0
            del nodes[usable if usable * size >= swapped else swapped // size :]
        return nodes

    def _num_usable(self, nodes: list[Node]) -> int:
        """After how many of these nodes a sequence can begin: of each group they must have what the next token sees."""
        windowed = [group for group, window in enumerate(self.groups.windows) if window is not None]
        last_holes, usable = dict.fromkeys(windowed, -1), 0
        for place, node in enumerate(nodes):
            for group in windowed:
                if node.block_ids[group] == HOLE:
                    last_holes[group] = place
            if all(last_holes[group] < self.groups.first(group, (place + 1) * self.block_size) for group in windowed):
                usable = place + 1
        return usable

    def _beginning(self, sequence: Sequence, nodes: list[Node]) -> tuple[int, list[list[int]]]:
        """Where a waiting sequence begins, and its tables there: HOLE behind a window, and where host blocks are to be copied back."""
        if not nodes and not sequence.swapped:
            return 0, [[] for _ in self.groups.windows]
        start = len(nodes) * self.block_size
        if sequence.swapped:
            start = max(start, sequence.num_swapped)
        end, tables = self.blocks_for(start), []
        for group in range(len(self.groups)):
            first = self.groups.first(group, start)
            shared = [node.block_ids[group] for node in nodes[first:]]
            tables.append([HOLE] * first + shared + [HOLE] * (end - first - len(shared)))
        return start, tables

    def missed(self, sequence: Sequence, nodes: list[Node]) -> int:
        """Tokens of the prompt, after those matched, that an earlier request had computed and that were evicted since, in part at least."""
        tokens, size, scope, missed = sequence.tokens, self.block_size, sequence.request.scope, 0
        node = nodes[-1] if nodes else None
        chain, stands = node.chain if node else None, self.groups.slides
        for start in range(len(nodes) * size, _shareable(sequence, sequence.num_prompt) - size + 1, size):
            # A node may stand without the blocks of windows.
            node = self.index.find(node, scope, tokens[start : start + size]) if stands else None
            stands = node is not None
            chain = node.chain if node else self.index.remembers(chain, scope, tokens[start : start + size])
            if chain is None:
                break
            missed += size
        return missed

    def num_missing(self, sequence: Sequence, num_tokens: int, nodes: list[Node]) -> int:
        """Blocks that must be available for a sequence to begin with these nodes and go on to so many tokens."""
        if not nodes and not sequence.swapped:
            return self.groups.most(0, num_tokens)
        start, tables = self._beginning(sequence, nodes)
        shared = [block_id for ids in tables for block_id in ids if block_id != HOLE]
        # Where cached blocks count as available, those that are kept must not be counted on.
        kept = sum(self.pool.count(block_id) == 0 for block_id in shared) if self.pool.evicts else 0
        return self.groups.most(start, num_tokens) - len(shared) + kept

    def begin(self, sequence: Sequence, nodes: list[Node]) -> int:
        """Give a sequence its tables, beginning with shared blocks; of what it had swapped out, it gets back those that it lacks.

        Returns how many are copied back.
        """
        size = self.block_size
        start, tables = self._beginning(sequence, nodes)
        if nodes:
            self.pool.share([block_id for ids in tables for block_id in ids if block_id != HOLE])
        host, sequence.swapped = sequence.swapped, []
        named, lacking = len(nodes), []
        if host and start == sequence.num_swapped:
            needed = [(ids, place) for group, ids in enumerate(tables) for place in range(self.groups.first(group, start), len(ids))]
            lacking = [(ids, place, source) for (ids, place), source in zip(needed, host, strict=True) if ids[place] == HOLE]
            for (ids, place, source), target in zip(lacking, self.pool.take(len(lacking)), strict=True):
                self.copies.append(BlockCopy(Tier.HOST, source, Tier.DEVICE, target))
                ids[place] = target
                named = min(named, place)
        self._swap_free += host
        if named and all(ids[named - 1] == HOLE for ids in tables):
            named = 0  # a node of which no block is held may go
        node = nodes[named - 1] if named else None
        if not self._prefix_caching:
            named = UNNAMED
        sequence.table = BlockTable(tables, len(tables[0]) * size, node, named, (named + 1) * size, start)
        sequence.num_computed = sequence.num_scheduled = start
        return len(lacking)

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether a running sequence still has all that the token after its first `num_tokens` sees."""
        assert parent.table is not None
        groups, gone = self.groups, parent.table.seen_from
        return not groups.slides or all(groups.first(group, gone) <= groups.first(group, num_tokens) for group in range(len(groups)))

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share every block of its parent's first `num_tokens` tokens; a shared tail is copied at its first write."""
        ours = parent.table
        assert ours is not None
        size, full = self.block_size, num_tokens // self.block_size
        node, named = ours.node, ours.num_named
        if named != UNNAMED:
            for _ in range(named - full):
                assert node is not None
                node = node.parent
            named = min(named, full)
        tables = [ids[: self.blocks_for(num_tokens)] for ids in ours.groups]
        child.table = BlockTable(tables, full * size, node, named, (named + 1) * size, ours.seen_from)
        self.pool.share(child.table.held())
        if full < child.table.num_blocks:
            ours.limit = min(ours.limit, full * size)
        child.num_computed = child.num_scheduled = num_tokens

    def num_to_fork(self, num_tokens: int, reach: int) -> int:
        """Blocks that a fork after `num_tokens` needs up to a length: new ones, and the copies of shared tails."""
        return (self.blocks_for(reach) - num_tokens // self.block_size) * len(self.groups)

    def num_ahead(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence will ask for until it has so many tokens."""
        table, groups = sequence.table, self.groups
        assert table is not None
        if not groups.slides:
            return max(0, self.blocks_for(num_tokens) - table.num_blocks) * len(groups)
        if self.blocks_for(num_tokens) <= table.num_blocks:
            return 0
        held = sum(table.num_blocks - groups.first(group, table.seen_from) for group in range(len(groups)))
        return max(0, groups.most(sequence.num_computed, num_tokens) - held)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make [num_scheduled, num_tokens) writable: cover it with blocks, and copy the first if it is shared.

        False, changing nothing, where the pool has too few blocks, what windows have left behind included: that is given back.
        """
        table = sequence.table
        assert table is not None
        if num_tokens <= table.limit:
            return True
        if self.groups.slides:
            self._leave_behind(table, sequence.num_computed)
        groups, place = table.groups, sequence.num_scheduled // self.block_size
        # A block may be named although one table alone holds it: its parent went further, and left.
        shared: list[list[int]] = []
        if place < table.num_blocks:
            shared = [ids for ids in groups if self.pool.count(ids[place]) > 1 or ids[place] in self.index]
        missing = max(0, -(-num_tokens // self.block_size) - table.num_blocks)
        wanted = len(shared) + missing * len(groups)
        if wanted > self.pool.num_available:
            return False
        began = self._clock()
        fresh = self.pool.take(wanted)
        if shared:
            tails = [ids[place] for ids in shared]
            for ids, tail, copy in zip(shared, tails, fresh, strict=False):
                self.copies.append(BlockCopy(Tier.DEVICE, tail, Tier.DEVICE, copy))
                ids[place] = copy
            self.pool.give_back(tails)
            table.num_sent = min(table.num_sent, place)
            del fresh[: len(shared)]
        if len(groups) == 1:
            groups[0] += fresh
        else:
            for group, ids in enumerate(groups):
                ids += fresh[group :: len(groups)]
        table.num_blocks += missing
        table.limit = table.num_blocks * self.block_size
        self.allocation_seconds.add(self._clock() - began)
        return True

    def _leave_behind(self, table: BlockTable, num_computed: int) -> None:
        """Give back the blocks that no token sees whose result is still to come, be it computed once more after a preemption."""
        left = []
        for group, ids in enumerate(table.groups):
            for place in range(self.groups.first(group, table.seen_from), self.groups.first(group, num_computed)):
                left.append(ids[place])
                ids[place] = HOLE
        table.seen_from = num_computed
        self.pool.give_back(left)

    def name(self, sequence: Sequence) -> None:
        """Name the blocks that a result has confirmed in full; a block that the index has already gives way to that one."""
        table, tokens, size = sequence.table, sequence.tokens, self.block_size
        assert table is not None
        groups = table.groups
        for place in range(table.num_named, sequence.num_computed // size):
            # Spelt out for the one group that most models have: for each block of each sequence, this is walked.
            ours = [groups[0][place]] if len(groups) == 1 else [ids[place] for ids in groups]
            start = place * size
            node = self.index.find_or_add(table.node, sequence.request.scope, tokens[start : start + size], ours)
            if node.block_ids != ours:
                self._share_instead(table, place, node.block_ids)
            table.node = node
            table.num_named = place + 1
        table.next_name = (table.num_named + 1) * size

    def _share_instead(self, table: BlockTable, place: int, block_ids: list[int]) -> None:
        """Let these blocks take the place of those that hold the same."""
        for ids, block_id in zip(table.groups, block_ids, strict=True):
            if ids[place] not in (HOLE, block_id):
                self.pool.share([block_id])
                self.pool.give_back([ids[place]])
                ids[place] = block_id
                table.num_sent = min(table.num_sent, place)

    def free(self, sequence: Sequence, keep: bool = True) -> None:
        """Give back a running sequence's tables. Named blocks stay cached, unless their content is not to be trusted (`keep` False)."""
        table, sequence.table = sequence.table, None
        assert table is not None
        node, place = table.node, table.num_named - 1
        while not keep and node is not None and not node.num_children:
            ours = [ids[place] for ids in table.groups]
            if any(block_id != HOLE and self.pool.count(block_id) > (block_id in ours) for block_id in node.block_ids):
                break  # others build on it
            self.pool.forget(node)
            node, place = node.parent, place - 1
        self.pool.give_back(table.held())

    def num_shared(self, sequence: Sequence) -> int:
        """Leading entries whose blocks stay when this sequence goes, since others hold them."""
        table, shared = sequence.table, 0
        assert table is not None
        for place in zip(*table.groups, strict=True):
            if place[0] == HOLE or any(block_id != HOLE and self.pool.count(block_id) < 2 for block_id in place):
                break
            shared += 1
        return shared

    def num_to_swap(self, sequence: Sequence, start: int = 0) -> int:
        """Blocks that hold what is confirmed of a running sequence and needed still, from entry `start` of its tables on."""
        computed = _resumable(sequence)
        end, firsts = self.blocks_for(computed), (self.groups.first(group, computed) for group in range(len(self.groups)))
        return sum(max(0, end - max(first, start)) for first in firsts)

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy what is confirmed of a running sequence, and needed still, to the host tier. False, changing nothing, where that is
        too full."""
        table, computed = sequence.table, _resumable(sequence)
        assert table is not None
        wanted = self.num_to_swap(sequence)
        if not 0 < wanted <= len(self._swap_free):
            return False
        sequence.swapped = self._swap_free[: -wanted - 1 : -1]
        del self._swap_free[-wanted:]
        sequence.num_swapped = computed
        end = self.blocks_for(computed)
        sources = [block_id for group, ids in enumerate(table.groups) for block_id in ids[self.groups.first(group, computed) : end]]
        self.copies += [BlockCopy(Tier.DEVICE, d, Tier.HOST, h) for d, h in zip(sources, sequence.swapped, strict=True)]
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
                for ids in table.groups:
                    moved = [place for place, block_id in enumerate(ids) if block_id in moves]
                    for place in moved:
                        ids[place] = moves[ids[place]]
                    if moved:
                        table.num_sent = min(table.num_sent, moved[0])
        return len(moves)

    def reset(self, tables: Iterable[BlockTable]) -> int:
        """Forget all prefixes, and name no block of the running sequences; returns the cached blocks that are free now."""
        for table in tables:
            table.num_named, table.next_name, table.node = UNNAMED, UNNAMED, None
        return self.pool.forget_all()

    def table_updates(self, sequence: Sequence) -> list[TableUpdate]:
        """The tables' change since the sequence's last row, of each KV group; empty where there is none."""
        table = sequence.table
        assert table is not None
        groups, start, table.num_sent = table.groups, table.num_sent, table.num_blocks
        if start == table.num_sent:
            return NO_UPDATES
        return [TableUpdate(start, groups[0][start:])] if len(groups) == 1 else [TableUpdate(start, ids[start:]) for ids in groups]

    def unused_slots(self, running: Iterable[Sequence]) -> int:
        """Token slots inside used blocks that hold no token: internal fragmentation, in tokens, shared blocks counted once."""
        size, unused = self.block_size, 0
        shared: dict[int, int] = {}
        for sequence in running:
            filled = sequence.num_scheduled
            for ids in sequence.table.groups if sequence.table is not None else ():
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
        held = sum(32 + sys.getsizeof(table) + sys.getsizeof(table.groups) + sum(map(sys.getsizeof, table.groups)) for table in tables)
        return held + self.pool.num_bytes() + self.index.num_bytes() + INT_BYTES * self.swap_total

    def check(self, running: list[Sequence], swapped: list[Sequence]) -> None:
        """Audit tables against pool, index and sequences. Raises InvariantError."""
        self.pool.check()
        self.index.check()
        named: Counter[int] = Counter()
        for sequence in running:
            table = sequence.table
            if table is None:
                raise InvariantError(f"{sequence!r} runs without a table")
            held = table.held()
            named.update(held)
            if len(set(held)) != len(held):
                raise InvariantError(f"{sequence!r} holds a block twice")
            self._check_table(sequence, table)
        for block_id in range(self.pool.total):
            if named[block_id] != self.pool.count(block_id):
                raise InvariantError(
                    f"block {block_id} is counted {self.pool.count(block_id)} times and stands in {named[block_id]} tables"
                )
        host = [block_id for sequence in swapped for block_id in sequence.swapped]
        if sorted(host + self._swap_free) != list(range(self.swap_total)):
            raise InvariantError(f"{len(host)} host blocks are held and {len(self._swap_free)} are free, of {self.swap_total}")

    def _check_table(self, sequence: Sequence, table: BlockTable) -> None:
        size, groups = self.block_size, table.groups
        if len(groups) != len(self.groups) or any(len(ids) != table.num_blocks for ids in groups):
            raise InvariantError(f"{sequence!r} has tables of {[len(ids) for ids in groups]} blocks for {table.num_blocks}")
        if table.num_blocks < self.blocks_for(sequence.num_scheduled):
            raise InvariantError(f"{sequence!r} is scheduled past its block table")
        if not 0 <= table.num_sent <= table.num_blocks or table.limit > table.num_blocks * size:
            raise InvariantError(f"{sequence!r}: the worker knows more blocks than there are, or may write past them")
        for group, ids in enumerate(groups):
            behind = self.groups.first(group, table.seen_from)
            if behind > self.groups.first(group, sequence.num_computed) or any(
                (block_id == HOLE) != (place < behind) for place, block_id in enumerate(ids)
            ):
                raise InvariantError(f"{sequence!r} has {ids} of group {group}, of which {behind} lie behind the window")
            for place in range(behind, len(ids)):
                node = self.index.node(ids[place])
                shared = node is not None or self.pool.count(ids[place]) > 1
                if place >= sequence.num_scheduled // size and shared and table.limit > place * size:
                    raise InvariantError(f"{sequence!r} may write block {ids[place]}, which is named or shared")
                if node is None and place < table.num_named != UNNAMED:
                    raise InvariantError(f"{sequence!r} has {table.num_named} named entries; block {ids[place]} at {place} has no name")
        if table.num_named == UNNAMED:
            return
        if table.next_name != (table.num_named + 1) * size:
            raise InvariantError(f"{sequence!r} has {table.num_named} named entries and names the next at {table.next_name}")
        if table.num_named and not any(
            ids[table.num_named - 1] != HOLE and table.node is self.index.node(ids[table.num_named - 1]) for ids in groups
        ):
            raise InvariantError(f"{sequence!r} does not know the node of its last named blocks, or holds none of them")


def _shareable(sequence: Sequence, num_tokens: int) -> int:
    """How many of so many tokens may be shared: the last is computed, to be sampled from, and what is to be scored."""
    return min(num_tokens - 1, sequence.num_scored) if sequence.scores_prompt else num_tokens - 1


def _resumable(sequence: Sequence) -> int:
    """Tokens that are confirmed and need not be computed again: the last is, to be sampled from."""
    return min(sequence.num_computed, len(sequence.tokens) - 1)


NO_UPDATES: list[TableUpdate] = []
