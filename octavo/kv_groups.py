"""KV groups: layers that share their block tables, and how windows bound the blocks that a sequence holds. Mind and hands reckon alike.

All blocks have one size, that of `block_size` tokens in the layers of one group. A sequence has one table a group. Of a group whose
layers see a window only, it needs the blocks that the window reaches, and gives the others back.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from octavo.plan import MAX_IN_FLIGHT

MOST_PADDING = Fraction(1, 8)
"""Layers that groups may be filled up with, for each that there is: each group costs a table, and a plan of attention a step."""


def first_seen(window: int | None, position: int, block_size: int) -> int:
    """The first block of which the token at `position` sees something, and so do those after it at most."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class KVGroups:
    """What windows make of blocks. windows[g]: positions that a token sees in group g, its own included; None for all.

    chunk: tokens of one sequence that a plan computes at most, None for any number.
    The block of the last token stays whatever the window: it is known by it what has been computed.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, chunk: int | None) -> None:
        self.block_size = block_size
        self.windows = [None if window is None else max(window, block_size + 1) for window in windows]
        self.slides = any(window is not None for window in windows)
        ahead = None if chunk is None else MAX_IN_FLIGHT * chunk
        # So many blocks can be touched by the tokens of a window and of the plans that may be in flight.
        self._caps = [
            None if window is None or ahead is None else (window + ahead + block_size - 3) // block_size + 1 for window in self.windows
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of each table that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def first(self, group: int, num_tokens: int) -> int:
        """The first block that a sequence with so many computed tokens still needs."""
        return first_seen(self.windows[group], num_tokens, self.block_size)

    def most(self, start: int, end: int) -> int:
        """Blocks of all groups that a sequence holds at most while its computed tokens go from `start` to `end`."""
        blocks = self.blocks_for(end)
        if not self.slides:
            return blocks * len(self.windows)
        held = 0
        for group, cap in enumerate(self._caps):
            needed = blocks - self.first(group, start)
            held += needed if cap is None else min(needed, cap)
        return held

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence, up to `limit`, that so many blocks hold."""
        low, high = 0, self.blocks_for(limit)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most(0, middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def cut_layers(windows: Sequence[int | None], longest: int) -> tuple[tuple[int | None, ...], list[list[int]]]:
    """Cut layers, windows[i] that of layer i, into groups -> each group's window and layers, those that see everything first.

    The fewest groups of equally many layers whose padding is at most MOST_PADDING of the layers of each window: one group where all
    layers have one window. A window that a sequence of `longest` tokens never leaves is none.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window is not None and window < longest else None, []).append(layer)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, -(kind[0] or 0)))
    counts = [len(layers) for layers in kinds.values()]
    size = max(
        size for size in range(1, max(counts) + 1) if all(-(-count // size) * size <= (1 + MOST_PADDING) * count for count in counts)
    )
    groups = [(window, layers[start : start + size]) for window, layers in ordered for start in range(0, len(layers), size)]
    return tuple(window for window, _ in groups), [layers for _, layers in groups]
