"""One region, block-major: a block is one stretch of bytes, nothing spills from one into another, and memory comes and goes by blocks."""

import ctypes
import errno
import gc
import mmap
import threading
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError, EngineError
from octavo.ops.interface import BlockShape
from octavo.plan import BlockCopy, Tier
from octavo.worker import kv_store, memory, pages
from octavo.worker.kv_store import KVStore
from octavo.worker.pages import Pages

SHAPE = BlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16)
LARGE = BlockShape(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype=torch.bfloat16)
CPU = torch.device("cpu")
MIB = 1 << 20


def make_store(num_blocks=6, prealloc_blocks=6, swap_blocks=0):
    store = KVStore(SHAPE, num_blocks, prealloc_blocks, CPU, swap_blocks)
    for block in range(store.committed):
        store.region[block] = (block + 1) % 256
    return store


def device_copy(source, target):
    return BlockCopy(Tier.DEVICE, source, Tier.DEVICE, target)


def out(source, target):
    return BlockCopy(Tier.DEVICE, source, Tier.HOST, target)


def back(source, target):
    return BlockCopy(Tier.HOST, source, Tier.DEVICE, target)


def first_values(store):
    return [store.region[block].unique().tolist() for block in range(len(store.region))]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Gate:
    """Lets the growth thread commit one step at a time."""

    def __init__(self, monkeypatch):
        self.asked, self.granted = threading.Semaphore(0), threading.Semaphore(0)
        self.steps = []
        commit = Pages.commit

        def gated(pages, start, end):
            self.asked.release()
            assert self.granted.acquire(timeout=10)
            self.steps.append((start, end))
            commit(pages, start, end)

        monkeypatch.setattr(Pages, "commit", gated)
        monkeypatch.setattr(kv_store, "STEP_BYTES", 4 * SHAPE.num_bytes)

    def wait_until_asked(self):
        assert self.asked.acquire(timeout=10)

    def grant(self, steps=1):
        self.granted.release(steps)


def test_block_is_one_stretch_of_the_promised_bytes():
    store = make_store()
    assert store.region[2].is_contiguous()
    assert SHAPE.num_bytes == 2 * 3 * 2 * 4 * 8 * 2 == store.region[0].nbytes == store.block_bytes
    assert store.region.data_ptr() + 2 * SHAPE.num_bytes == store.region[2].data_ptr()


def test_layers_look_at_the_region():
    store = make_store()
    assert [layer.layer for layer in store.layers] == [0, 1, 2]
    assert all(layer.region is store.region and layer.shape is SHAPE for layer in store.layers)


def test_a_block_of_int8_has_a_scale_a_token_and_head():
    shape = BlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.int8)
    assert shape.num_bytes == 3 * 2 * 2 * 4 * (8 + 4)


@pytest.mark.parametrize(("prealloc_blocks", "committed"), [(0, 0), (2, 2), (6, 6), (100, 6)])
def test_blocks_allocated_at_start_are_zero_and_clipped_to_the_ceiling(prealloc_blocks, committed):
    store = KVStore(SHAPE, 6, prealloc_blocks, CPU)
    assert store.committed == committed
    assert not store.region[:committed].any()
    assert store.region.shape == (6, SHAPE.num_bytes)


# Copies


def test_copies_run_in_order():
    store = make_store()
    store.copy([device_copy(0, 1), device_copy(1, 2), device_copy(5, 0)])
    assert first_values(store) == [[6], [1], [1], [4], [5], [6]]
    store.copy([])


def test_copies_between_all_tiers_run_in_order():
    store = make_store(swap_blocks=3)
    # 0 and 5 change places by way of the host; a host block is copied within its tier, and read after it was overwritten.
    store.copy([out(0, 0), device_copy(5, 0), back(0, 5), BlockCopy(Tier.HOST, 0, Tier.HOST, 2), out(3, 0), back(0, 1), back(2, 2)])
    assert first_values(store) == [[6], [4], [1], [4], [5], [1]]


@pytest.mark.parametrize("copy", [device_copy(0, 3), device_copy(3, 0), device_copy(-1, 0), out(0, 2), back(2, 0), back(0, -1)], ids=str)
def test_copy_of_a_block_that_is_not_there_is_refused(copy):
    store = make_store(prealloc_blocks=3, swap_blocks=2)
    with pytest.raises(EngineError, match=r"block (-1 of [23]|3 of 3|2 of 2)$"):
        store.copy([copy])
    store.copy([out(2, 1), back(1, 0)])
    with pytest.raises(EngineError, match="host block 0 of 0"):
        make_store().copy([out(0, 0)])


# Memory that comes and goes


def test_reserving_commits_nothing():
    before = resident_bytes()
    store = KVStore(LARGE, 8 * 1024 * MIB // LARGE.num_bytes, 0, CPU, 1024 * MIB // LARGE.num_bytes)
    assert store.committed == 0
    assert resident_bytes() - before < 16 * MIB


def test_more_address_space_than_there_is_is_refused():
    with pytest.raises(ConfigError, match="refuses 1152921504606846976 bytes of address space"):
        Pages(1 << 60)


def test_memory_is_taken_by_growth_and_given_back_by_shrinking():
    blocks = 64 * MIB // LARGE.num_bytes
    gc.collect()
    before = resident_bytes()
    store = KVStore(LARGE, 10 * blocks, blocks, CPU)
    assert 0 < store.committed <= blocks
    store.wait()
    assert store.committed == blocks
    assert 60 * MIB < resident_bytes() - before < 80 * MIB
    store.grow(2 * blocks)
    store.wait()
    assert (store.committed, store.growth_refused) == (2 * blocks, None)
    assert 120 * MIB < resident_bytes() - before < 150 * MIB
    store.shrink(1)
    assert store.committed == 1
    assert resident_bytes() - before < 16 * MIB


@pytest.mark.parametrize("left", [0, 1, 2, 5, 7])
def test_what_was_given_back_reads_zero_and_what_was_kept_stays(left):
    """Blocks of 768 bytes: they begin and end within pages."""
    store = make_store(num_blocks=50, prealloc_blocks=50)
    store.shrink(left)
    assert first_values(store) == [[block + 1.0] for block in range(left)] + [[0]] * (50 - left)
    store.grow(50)
    store.wait()
    assert first_values(store) == [[block + 1.0] for block in range(left)] + [[0]] * (50 - left)


def test_growth_goes_on_beside_the_caller_and_reports_whole_steps(monkeypatch):
    gate = Gate(monkeypatch)
    store = make_store(num_blocks=20, prealloc_blocks=0)
    store.resize(10)
    for committed in (0, 4, 8):
        gate.wait_until_asked()
        assert store.committed == committed
        gate.grant()
    store.wait()
    assert store.committed == 10
    assert [(start // SHAPE.num_bytes, end // SHAPE.num_bytes) for start, end in gate.steps] == [(0, 4), (4, 8), (8, 10)]


def test_target_may_rise_while_growth_runs(monkeypatch):
    gate = Gate(monkeypatch)
    store = make_store(num_blocks=20, prealloc_blocks=0)
    store.resize(6)
    gate.wait_until_asked()
    store.resize(9)
    gate.grant(10)
    store.wait()
    assert store.committed == 9


def test_target_that_rises_as_the_growth_ends_is_reached_too():
    store = make_store(num_blocks=20, prealloc_blocks=5)
    ending = threading.Event()
    store._grower = threading.Thread(target=ending.wait)
    store._grower.start()
    store.resize(9)
    ending.set()
    store.wait()
    assert store.committed == 9


def test_shrinking_and_closing_stop_a_growth_that_runs(monkeypatch):
    gate = Gate(monkeypatch)
    for end in (lambda store: store.shrink(2), KVStore.close):
        store = make_store(num_blocks=2000, prealloc_blocks=0)
        store.resize(2000)
        gate.wait_until_asked()
        stopping = threading.Thread(target=end, args=(store,))
        stopping.start()
        while store._target == 2000:
            pass
        gate.grant()
        stopping.join(10)
        assert not stopping.is_alive()
        assert store.committed == (0 if end is KVStore.close else 2)
        assert not any(thread.name == "octavo-kv-growth" for thread in threading.enumerate())


def test_growth_that_would_leave_too_little_is_refused_until_no_more_is_asked_for(monkeypatch):
    monkeypatch.setattr(kv_store, "STEP_BYTES", MIB)
    step = MIB // SHAPE.num_bytes
    monkeypatch.setattr(memory, "available_memory", lambda: 1024 * MIB)
    store = make_store(num_blocks=10 * step, prealloc_blocks=step)
    room = iter([66 * MIB, 65 * MIB, 64 * MIB])
    monkeypatch.setattr(memory, "available_memory", lambda: next(room))
    store.resize(10 * step)
    store.wait()
    assert store.committed == 3 * step
    sentence = (
        f"the KV pool stays at {3 * step} blocks (3 MiB) of the {10 * step} asked for: "
        "64 MiB are available, of which 64 MiB are left to other uses"
    )
    assert store.growth_refused == sentence
    for _ in range(3):
        store.resize(10 * step)
        store.wait()
        assert (store.committed, store.growth_refused) == (3 * step, sentence)
    store.resize(3 * step)
    assert (store.committed, store.growth_refused) == (3 * step, None)
    monkeypatch.setattr(memory, "available_memory", lambda: 1024 * MIB)
    store.resize(4 * step)
    store.wait()
    assert (store.committed, store.growth_refused) == (4 * step, None)


def test_a_fiftieth_of_a_large_memory_is_left_to_others(monkeypatch):
    steps = []
    monkeypatch.setattr(Pages, "commit", lambda pages, start, end: steps.append(end - start))
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * 1024 * MIB - sum(steps))
    monkeypatch.setattr(kv_store, "STEP_BYTES", 1024 * MIB)
    store = KVStore(LARGE, 200 * 1024 * MIB // LARGE.num_bytes, 0, CPU)
    store.resize(store.num_blocks)
    store.wait()
    assert len(steps) == 98
    assert 97.9 * 1024 * MIB < store.committed * LARGE.num_bytes <= 98 * 1024 * MIB
    assert store.growth_refused.endswith("2072 MiB are available, of which 2048 MiB are left to other uses")


def failing(code):
    def madvise(address, length, advice):
        ctypes.set_errno(code)
        return -1

    return madvise


def test_a_system_without_memory_refuses_growth_at_the_step_it_reached(monkeypatch):
    store = make_store(num_blocks=20, prealloc_blocks=3)
    monkeypatch.setattr(pages, "_madvise", failing(errno.ENOMEM))
    store.resize(20)
    store.wait()
    assert store.committed == 3
    assert "at 3 blocks (0 MiB) of the 20 asked for: [Errno 12] Cannot allocate memory" in store.growth_refused
    assert first_values(store)[:3] == [[1], [2], [3]]


def test_a_kernel_that_cannot_populate_zero_fills_and_harms_no_neighbour(monkeypatch):
    store = make_store(num_blocks=20, prealloc_blocks=3)
    store.region[3:] = 9
    monkeypatch.setattr(pages, "_madvise", failing(errno.EINVAL))
    store.resize(20)
    store.wait()
    assert (store.committed, store.growth_refused) == (20, None)
    assert first_values(store) == [[1], [2], [3]] + [[0]] * 17


def test_more_than_the_ceiling_is_refused():
    with pytest.raises(EngineError, match="a pool of 7 blocks is asked for and its ceiling is 6"):
        make_store().resize(7)


def test_elsewhere_than_on_a_cpu_all_is_committed_from_the_start():
    store = KVStore(SHAPE, 6, 2, torch.device("meta"))
    assert store.committed == 6
    for blocks in (6, 3, 6):
        store.resize(blocks)
        store.wait()
        assert (store.committed, store.growth_refused) == (6, None)
    store.close()


# Lifetimes


def test_the_mapping_outlives_the_store_as_long_as_a_tensor_looks_at_it():
    store = make_store(swap_blocks=2)
    view = store.region[4]
    del store
    gc.collect()
    held = [bytearray(SHAPE.num_bytes) for _ in range(100)]
    assert view.unique().tolist() == [5]
    view.fill_(7)
    assert view.unique().tolist() == [7]
    del held


def test_the_mapping_cannot_be_closed_under_a_tensor():
    space = Pages(MIB)
    view = space.tensor((MIB,), torch.uint8)
    with pytest.raises(BufferError):
        space._mapping.close()
    del view
    gc.collect()
    space._mapping.close()


def test_closing_gives_memory_back_whoever_still_looks():
    before = resident_bytes()
    blocks = 64 * MIB // LARGE.num_bytes
    store = KVStore(LARGE, blocks, blocks, CPU, blocks)
    store.wait()
    store.copy([out(block, block) for block in range(blocks)])
    assert resident_bytes() - before > 120 * MIB
    view = store.region[blocks - 1]
    store.close()
    gc.collect()
    assert resident_bytes() - before < 16 * MIB
    assert not view.any()
    store.close()
