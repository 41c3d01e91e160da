"""KV memory: one block-major region, so that a block, all layers of the group it serves, is one stretch of bytes.

region  [block 0 | block 1 | ...  ]
block   [layer 0 | layer 1 | ...  ] of one group; any block may serve any group
layer   [keys | values], each a stretch for every head; what lies where in it is the backend's

On the CPU the region is address space for the ceiling, and its first `committed` blocks alone have memory; elsewhere all have.
The host tier is a second region of the same shape.
"""

from __future__ import annotations

import threading
import time

import torch

from octavo.errors import EngineError
from octavo.ops.interface import BlockShape, LayerKV
from octavo.plan import BlockCopy, Tier
from octavo.worker import memory
from octavo.worker.pages import Pages

FIRST_BYTES = 8 << 20
"""Committed before there is any work."""

STEP_BYTES = 2 << 20
"""Committed between two looks at what is available, and at whether there is work."""

EASE = 9
"""While there is work that does not wait for it, growth rests so many times as long as it runs: pages that a host backs for the first
time may come at a few hundred megabytes a second, and keep a processor busy all the while."""

EASE_SECONDS = 0.2
"""How long after a plan there is held to be work."""

MIN_RESERVE = 64 << 20
"""Memory that growth leaves to others, or 2% of what is available at start where that is more."""


class KVStore:
    """`num_blocks` at most, and a host tier of `swap_blocks`. Of `prealloc_blocks` the first FIRST_BYTES are committed here and now,
    so that work can begin; the others follow beside it.

    groups: which of the model's layers each KV group holds; all are one group where it is None.
    growth_refused: why growth stopped short, until the pool is no longer to be larger than it is.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_blocks: int,
        prealloc_blocks: int,
        device: torch.device,
        swap_blocks: int = 0,
        groups: list[list[int]] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.shape = shape
        self.block_bytes = shape.num_bytes
        self.committed = 0
        self.growth_refused: str | None = None
        self._reserve = max(MIN_RESERVE, memory.available_memory() // 50)
        self._target = 0
        self._grower: threading.Thread | None = None
        self._eased_until = 0.0
        self._hurry = threading.Event()
        sizes = (num_blocks, shape.num_bytes)
        self._pages = Pages(num_blocks * self.block_bytes) if device.type == "cpu" else None
        if self._pages:
            self.region = self._pages.tensor(sizes, torch.uint8)
        else:
            self.region = torch.empty(sizes, dtype=torch.uint8, device=device)
            self.committed = num_blocks
        groups = groups or [list(range(shape.num_layers))]
        places = {layer: (place, group) for group, layers in enumerate(groups) for place, layer in enumerate(layers)}
        self.layers = [LayerKV(self.region, shape, *places[layer]) for layer in range(len(places))]

        sizes = (swap_blocks, shape.num_bytes)
        if self._pages and swap_blocks:
            host = Pages(swap_blocks * self.block_bytes).tensor(sizes, torch.uint8)
        else:
            host = torch.empty(sizes, dtype=torch.uint8, pin_memory=device.type == "cuda" and swap_blocks > 0)
        self._tiers = {Tier.DEVICE: self.region, Tier.HOST: host}
        self.prealloc_blocks = min(prealloc_blocks, num_blocks)
        self.grow(min(self.prealloc_blocks, max(1, FIRST_BYTES // self.block_bytes)))
        self.wait()
        self.grow(self.prealloc_blocks)

    def resize(self, blocks: int, hurry: bool = True) -> None:
        """Bring the pool to `blocks`: growth begins beside the caller, shrinking is done on return.

        hurry: whether somebody waits for it; else it leaves the processors to the work that follows.
        """
        if hurry:
            self._hurry.set()
        else:
            self._hurry.clear()
            self._eased_until = time.monotonic() + EASE_SECONDS
        if blocks > self.num_blocks:
            raise EngineError(f"a pool of {blocks} blocks is asked for and its ceiling is {self.num_blocks}")
        if blocks > self.committed:
            self.grow(blocks)
        else:
            self.growth_refused = None
            self.shrink(blocks)

    def grow(self, blocks: int) -> None:
        """Begin to commit up to `blocks`, in steps, on a thread of its own; `committed` counts the steps done."""
        self._target = blocks
        if blocks > self.committed and not self.growth_refused and not (self._grower and self._grower.is_alive()):
            self._grower = threading.Thread(target=self._commit, name="octavo-kv-growth", daemon=True)
            self._grower.start()

    def wait(self) -> None:
        """Until growth has reached its target, or was refused."""
        self._hurry.set()
        while self._grower:
            self._grower.join()
            self._grower = None
            # The target may have risen just as the thread ended.
            self.grow(self._target)

    def shrink(self, blocks: int) -> None:
        """Stop growing, and give the memory of the blocks from `blocks` on back. Nothing on devices where all is committed."""
        self._target = blocks
        if self._grower:
            self._hurry.set()
            self._grower.join()
            self._grower = None
        if self._pages and blocks < self.committed:
            self._pages.release(blocks * self.block_bytes, self.committed * self.block_bytes)
            self.committed = blocks

    def copy(self, copies: list[BlockCopy]) -> None:
        """Run copies in order."""
        for copy in copies:
            self.check(copy.source_tier, copy.source)
            self.check(copy.target_tier, copy.target)
            # Merged runs would gain nothing: a block alone is copied at the memory's speed.
            self._tiers[copy.target_tier][copy.target].copy_(self._tiers[copy.source_tier][copy.source])

    def check(self, tier: Tier, block_id: int) -> None:
        """Raises EngineError where the block has no memory."""
        limit = self.committed if tier is Tier.DEVICE else len(self._tiers[tier])
        if not 0 <= block_id < limit:
            raise EngineError(f"a plan names {tier.name.lower()} block {block_id} of {limit}")

    def close(self) -> None:
        """Give the pool's memory back, whoever still holds a view of it, and let go of the rest."""
        self.shrink(0)
        self.layers.clear()
        self._tiers.clear()
        self.region = torch.empty(0)

    def _commit(self) -> None:
        """The growth thread: nothing of torch here, whose compute belongs to the thread of the steps."""
        assert self._pages is not None
        step = max(1, STEP_BYTES // self.block_bytes)
        while self.committed < (target := self._target):
            began = time.monotonic()
            end = min(self.committed + step, target)
            size = (end - self.committed) * self.block_bytes
            # An overcommitting system grants every page and ends a process later, so it is not left to refuse.
            available = memory.available_memory()
            try:
                if available - size < self._reserve:
                    raise MemoryError(f"{_mebibytes(available)} are available, of which {_mebibytes(self._reserve)} are left to other uses")
                self._pages.commit(self.committed * self.block_bytes, end * self.block_bytes)
            except (OSError, MemoryError) as error:
                held = f"{self.committed} blocks ({_mebibytes(self.committed * self.block_bytes)})"
                self.growth_refused = f"the KV pool stays at {held} of the {target} asked for: {error}"
                return
            self.committed = end
            if (now := time.monotonic()) < self._eased_until:
                self._hurry.wait(EASE * (now - began))


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
