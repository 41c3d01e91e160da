"""Which block already holds which tokens: an exact tree of prefixes, one node a full block.

A node is found by its parent's number and its own tokens, compared in full, so that no collision of hashes can pass for a hit.
Numbers are never used again, so that no stale parent can be mistaken for a new one. The blocks, one a KV group, are only the
node's value: they may move without any node being renamed.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from octavo.errors import InvariantError
from octavo.plan import HOLE

Scope = tuple[str | None, str | None]
"""Adapter and cache salt: prefixes are shared within one scope only."""

Key = bytes | tuple[Scope, bytes]


class Node(msgspec.Struct, eq=False):
    """A block's worth of tokens after those of its ancestors. `chain` stands for all of them, also once nodes are forgotten.

    block_ids: the block of each KV group that holds them, HOLE where none does.
    """

    number: int
    key: Key
    parent: Node | None
    chain: int
    block_ids: list[int]
    num_children: int = 0


class PrefixIndex:
    """Finds, adds, moves and forgets nodes, each in O(1) for one block.

    windows: of each KV group, None where it sees everything. Without a block of such a group, a node, and all below it, are of no
    use, and it goes; without one of a window it stays, as long as it names any block or has children.
    num_remembered: how many forgotten nodes are remembered by their chain, latest first, to tell what more memory would have held.
    """

    def __init__(self, block_size: int, num_remembered: int = 0, windows: Sequence[int | None] = (None,)) -> None:
        self._pack = struct.Struct(f"q{block_size}i").pack
        self._nodes: dict[Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._numbers = itertools.count(1)
        self._sees_all = [window is None for window in windows]
        self._num_remembered = num_remembered
        self._remembered: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are named."""
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def node(self, block_id: int) -> Node | None:
        return self._by_block.get(block_id)

    def needs(self, block_id: int) -> int | None:
        """The block before a named one, in a group that sees everything: without it this one is of no use. None where there is none."""
        node = self._by_block[block_id]
        group = node.block_ids.index(block_id)
        return node.parent.block_ids[group] if node.parent is not None and self._sees_all[group] else None

    def find(self, parent: Node | None, scope: Scope | None, tokens: list[int]) -> Node | None:
        """The node of these tokens after the parent's, where there is one. `scope` counts where there is no parent."""
        return self._nodes.get(self._key(parent, scope, tokens))

    def find_or_add(self, parent: Node | None, scope: Scope | None, tokens: list[int], block_ids: list[int]) -> Node:
        """The node of these tokens, made where there was none. Of groups of which it had no block, these are its now."""
        key = self._key(parent, scope, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = Node(next(self._numbers), key, parent, _chain(parent.chain if parent else None, key), block_ids)
            self._nodes[key] = node
            for block_id in block_ids:
                if block_id != HOLE:
                    self._by_block[block_id] = node
            if parent is not None:
                parent.num_children += 1
        elif HOLE in node.block_ids:
            for group, block_id in enumerate(block_ids):
                if node.block_ids[group] == HOLE != block_id:
                    node.block_ids[group] = block_id
                    self._by_block[block_id] = node
        return node

    def remembers(self, chain: int | None, scope: Scope | None, tokens: list[int]) -> int | None:
        """The chain of these tokens after `chain` (None at the start), where a forgotten node had it."""
        if not self._remembered:
            return None
        following = _chain(chain, self._key(None, scope if chain is None else None, tokens))
        return following if following in self._remembered else None

    def forget(self, block_id: int, remember: bool = True) -> list[int]:
        """Drop a block's name, and its node where that is of no use without it; returns the blocks that have no name any more.

        Children of a node that goes must have gone before.
        """
        node: Node | None = self._by_block[block_id]
        assert node is not None
        group = node.block_ids.index(block_id)
        if self._sees_all[group]:
            return self.drop(node, remember)
        del self._by_block[block_id]
        node.block_ids[group] = HOLE
        while node is not None and not node.num_children and node.block_ids.count(HOLE) == len(node.block_ids):
            self.drop(node, remember)
            node = node.parent
        return [block_id]

    def drop(self, node: Node, remember: bool = True) -> list[int]:
        """Drop a node; returns the blocks that it named. Its children must have gone before."""
        named = node.block_ids
        if HOLE in named:
            named = [block_id for block_id in named if block_id != HOLE]
        for block_id in named:
            del self._by_block[block_id]
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
        if remember and self._num_remembered:
            remembered = self._remembered
            if node.chain in remembered:
                remembered.move_to_end(node.chain)
            else:
                remembered[node.chain] = None
                if len(remembered) > self._num_remembered:
                    remembered.popitem(last=False)
        return named

    def move(self, source: int, target: int) -> None:
        """A block's content lies elsewhere now."""
        node = self._by_block.pop(source, None)
        if node is not None:
            node.block_ids[node.block_ids.index(source)] = target
            self._by_block[target] = node

    def clear(self) -> None:
        """Forget everything. Nodes in the hands of running sequences must not be used as parents any more."""
        self._nodes.clear()
        self._by_block.clear()
        self._remembered.clear()

    def num_bytes(self) -> int:
        """Memory of nodes, keys and tables."""
        containers = sys.getsizeof(self._nodes) + sys.getsizeof(self._by_block) + sys.getsizeof(self._remembered)
        held = containers + len(self._remembered) * CHAIN_BYTES
        node = next(iter(self._nodes.values()), None)
        if node is None:
            return held
        # Headers of the garbage collector, the node, its number and chain, its key, its blocks.
        each = 32 + sys.getsizeof(node) + sys.getsizeof(node.number) + CHAIN_BYTES + sys.getsizeof(node.key) + sys.getsizeof(node.block_ids)
        return held + len(self._nodes) * each

    def check(self) -> None:
        """Audit the tree. Raises InvariantError."""
        children = dict.fromkeys(self._nodes.values(), 0)
        named = 0
        for key, node in self._nodes.items():
            if node.key != key:
                raise InvariantError(f"the node of blocks {node.block_ids} cannot be found")
            if node.parent is not None:
                if node.parent not in children:
                    raise InvariantError(f"the node of blocks {node.block_ids} outlived its parent")
                children[node.parent] += 1
            for block_id, sees_all in zip(node.block_ids, self._sees_all, strict=True):
                named += block_id != HOLE
                if (sees_all or block_id != HOLE) and self._by_block.get(block_id) is not node:
                    raise InvariantError(f"a node names block {block_id}, which knows nothing of it, or is a hole where it must not be")
        if named != len(self._by_block):
            raise InvariantError(f"{len(self._nodes)} nodes name {named} blocks, and {len(self._by_block)} blocks have a name")
        for node, count in children.items():
            if node.num_children != count:
                raise InvariantError("a node miscounts its children")
            if not count and node.block_ids.count(HOLE) == len(node.block_ids):
                raise InvariantError("a node names no block and has no children")

    def _key(self, parent: Node | None, scope: Scope | None, tokens: list[int]) -> Key:
        if parent is not None:
            return self._pack(parent.number, *tokens)
        key = self._pack(0, *tokens)
        return key if scope is None else (scope, key)


def _chain(parent: int | None, key: Key) -> int:
    """The chain of a key's tokens after the parent's chain; the parent's number, which a key begins with, is left out."""
    return hash((parent, key if isinstance(key, tuple) else key[8:]))


CHAIN_BYTES = sys.getsizeof(2**60)
