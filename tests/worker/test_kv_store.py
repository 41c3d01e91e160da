"""One region, block-major: a block is one stretch of bytes, and nothing spills from one into another."""

import pytest
import torch

from octavo.plan import BlockCopy, Tier
from octavo.worker.kv_store import BlockShape, KVStore

SHAPE = BlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16)


def make_store(num_blocks=6, prealloc_blocks=6):
    store = KVStore(SHAPE, num_blocks, prealloc_blocks, torch.device("cpu"))
    if prealloc_blocks == num_blocks:
        for block in range(num_blocks):
            store.region[block] = block + 1
    return store


def device_copy(source, target):
    return BlockCopy(Tier.DEVICE, source, Tier.DEVICE, target)


def first_values(store):
    return [store.region[block].unique().tolist() for block in range(len(store.region))]


def test_block_is_one_stretch_of_the_promised_bytes():
    store = make_store()
    assert store.region[2].is_contiguous()
    assert SHAPE.num_bytes == 2 * 3 * 2 * 4 * 8 * 2 == store.region[0].nbytes
    assert store.num_bytes == 6 * SHAPE.num_bytes
    assert store.region.data_ptr() + 2 * SHAPE.num_bytes == store.region[2].data_ptr()


def test_layers_are_views_of_the_region():
    store = make_store()
    assert len(store.layers) == 3
    store.layers[1].keys[2] = 50
    store.layers[2].values[2] = 60
    assert store.region[2].unique().tolist() == [3.0, 50.0, 60.0]
    assert (store.region[2, 1, 0] == 50).all()
    assert (store.region[2, 2, 1] == 60).all()


@pytest.mark.parametrize("prealloc_blocks", [0, 2, 6])
def test_blocks_allocated_at_start_are_zero(prealloc_blocks):
    store = KVStore(SHAPE, 6, prealloc_blocks, torch.device("cpu"))
    assert not store.region[:prealloc_blocks].any()
    assert store.region.shape == (6, 3, 2, 2, 4, 8)


def test_copies_run_in_order_and_count_their_bytes():
    store = make_store()
    moved = store.copy([device_copy(0, 1), device_copy(1, 2), device_copy(5, 0)])
    assert first_values(store) == [[6.0], [1.0], [1.0], [4.0], [5.0], [6.0]]
    assert moved == 3 * SHAPE.num_bytes
    assert store.copy([]) == 0


def test_copy_between_tiers_that_are_not_there_is_refused():
    with pytest.raises(ValueError, match="host tier"):
        make_store().copy([BlockCopy(Tier.DEVICE, 0, Tier.HOST, 1)])


def test_scrubbed_blocks_are_zero_and_the_others_untouched():
    store = make_store()
    store.region[4] = float("nan")
    store.scrub([4, 1])
    assert first_values(store) == [[1.0], [0.0], [3.0], [4.0], [0.0], [6.0]]
    store.scrub([])
    assert first_values(store)[0] == [1.0]
