"""KV memory: one block-major region, so that a block, all layers of it, is one stretch of bytes.

region  [block 0 | block 1 | ...  ]
block   [layer 0 | layer 1 | ...  ]
layer   [keys | values], each [num_kv_heads, block_size, head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.ops.interface import LayerKV
from octavo.plan import BlockCopy, Tier


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What one block holds."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class KVStore:
    """`prealloc_blocks` are touched here and now; the system provides the rest at first use."""

    def __init__(self, shape: BlockShape, num_blocks: int, prealloc_blocks: int, device: torch.device) -> None:
        sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.region = torch.empty(sizes, dtype=shape.dtype, device=device)
        self.region[:prealloc_blocks].zero_()
        self.layers = [LayerKV(self.region, layer) for layer in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        return self.region.nbytes

    def copy(self, copies: list[BlockCopy]) -> int:
        """Run copies in order; returns bytes moved."""
        for copy in copies:
            if copy.source_tier is not Tier.DEVICE or copy.target_tier is not Tier.DEVICE:
                raise ValueError(f"there is no host tier to copy between: {copy}")
            self.region[copy.target].copy_(self.region[copy.source])
        return len(copies) * self.region[0].nbytes

    def scrub(self, block_ids: list[int]) -> None:
        """Zero blocks that hold what must not be seen again, not even as a masked value."""
        self.region[block_ids] = 0
