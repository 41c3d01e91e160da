"""Which block already holds which tokens: an exact tree of prefixes, one node a full block.

A node is found by its parent's number and its own tokens, compared in full, so that no collision of hashes can pass for a hit.
Numbers are never used again, so that no stale parent can be mistaken for a new one. The block is only the node's value: it may
move without any node being renamed.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections import OrderedDict

import msgspec

from octavo.errors import InvariantError

Scope = tuple[str | None, str | None]
"""Adapter and cache salt: prefixes are shared within one scope only."""

Key = bytes | tuple[Scope, bytes]


class Node(msgspec.Struct, eq=False):
    """A block's worth of tokens after those of its ancestors. `chain` stands for all of them, also once nodes are forgotten."""

    number: int
    key: Key
    parent: Node | None
    chain: int
    block_id: int
    num_children: int = 0


class PrefixIndex:
    """Finds, adds, moves and forgets nodes, each in O(1) for one block.

    num_remembered: how many forgotten nodes are remembered by their chain, latest first, to tell what more memory would have held.
    """

    def __init__(self, block_size: int, num_remembered: int = 0) -> None:
        self._pack = struct.Struct(f"q{block_size}i").pack
        self._nodes: dict[Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._numbers = itertools.count(1)
        self._num_remembered = num_remembered
        self._remembered: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def node(self, block_id: int) -> Node | None:
        return self._by_block.get(block_id)

    def find(self, parent: Node | None, scope: Scope | None, tokens: list[int]) -> Node | None:
        """The node of these tokens after the parent's, where there is one. `scope` counts where there is no parent."""
        return self._nodes.get(self._key(parent, scope, tokens))

    def find_or_add(self, parent: Node | None, scope: Scope | None, tokens: list[int], block_id: int) -> Node:
        """The node of these tokens; made for `block_id` where there was none."""
        key = self._key(parent, scope, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = Node(next(self._numbers), key, parent, _chain(parent.chain if parent else None, key), block_id)
            self._nodes[key] = self._by_block[block_id] = node
            if parent is not None:
                parent.num_children += 1
        return node

    def remembers(self, chain: int | None, scope: Scope | None, tokens: list[int]) -> int | None:
        """The chain of these tokens after `chain` (None at the start), where a forgotten node had it."""
        if not self._remembered:
            return None
        following = _chain(chain, self._key(None, scope if chain is None else None, tokens))
        return following if following in self._remembered else None

    def forget(self, block_id: int, remember: bool = True) -> None:
        """Drop a block's node; its children must have gone before."""
        node = self._by_block.pop(block_id)
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

    def move(self, source: int, target: int) -> None:
        """A block's content lies elsewhere now."""
        node = self._by_block.pop(source, None)
        if node is not None:
            node.block_id = target
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
        node = next(iter(self._by_block.values()), None)
        if node is None:
            return held
        # Header of the garbage collector, the node, its number and chain, its key.
        each = 16 + sys.getsizeof(node) + sys.getsizeof(node.number) + CHAIN_BYTES + sys.getsizeof(node.key)
        return held + len(self) * each

    def check(self) -> None:
        """Audit the tree. Raises InvariantError."""
        if len(self._nodes) != len(self._by_block):
            raise InvariantError(f"{len(self._nodes)} nodes name {len(self._by_block)} blocks")
        children = dict.fromkeys(self._by_block.values(), 0)
        for block_id, node in self._by_block.items():
            if node.block_id != block_id or self._nodes.get(node.key) is not node:
                raise InvariantError(f"block {block_id}'s node names block {node.block_id}, or cannot be found")
            if node.parent is not None:
                if node.parent not in children:
                    raise InvariantError(f"block {block_id}'s node outlived its parent")
                children[node.parent] += 1
        if any(node.num_children != count for node, count in children.items()):
            raise InvariantError("a node miscounts its children")

    def _key(self, parent: Node | None, scope: Scope | None, tokens: list[int]) -> Key:
        if parent is not None:
            return self._pack(parent.number, *tokens)
        key = self._pack(0, *tokens)
        return key if scope is None else (scope, key)


def _chain(parent: int | None, key: Key) -> int:
    """The chain of a key's tokens after the parent's chain; the parent's number, which a key begins with, is left out."""
    return hash((parent, key if isinstance(key, tuple) else key[8:]))


CHAIN_BYTES = sys.getsizeof(2**60)
