"""Block tables: allocated on demand, told to the worker once, freed as a whole."""

import pytest
from core_driver import Driver

from octavo.core.kv_manager import KVManager
from octavo.core.request import Request
from octavo.errors import InvariantError
from octavo.plan import TableUpdate
from octavo.sampling_params import SamplingParams


def make_sequence(name="a", prompt_length=4):
    return Request(name, [1] * prompt_length, SamplingParams(), arrival=0.0, max_length=100).sequences[0]


def make_manager(num_blocks=8, block_size=4, clock=lambda: 0.0):
    return KVManager(num_blocks, block_size, clock)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_are_counted_up(tokens, blocks):
    assert make_manager().blocks_for(tokens) == blocks


def test_table_grows_on_demand_and_keeps_what_it_has():
    manager, sequence = make_manager(), make_sequence()
    assert manager.allocate(sequence, 3)
    first = manager.block_ids(sequence)
    assert len(first) == 1
    assert manager.allocate(sequence, 4)
    assert manager.block_ids(sequence) == first
    assert manager.allocate(sequence, 9)
    assert manager.block_ids(sequence)[:1] == first
    assert manager.num_held(sequence) == 3
    assert manager.pool.num_used == 3


def test_allocation_beyond_the_pool_changes_nothing():
    manager, sequence, other = make_manager(num_blocks=3), make_sequence(), make_sequence("b")
    manager.allocate(sequence, 8)
    before = manager.block_ids(sequence)
    assert not manager.allocate(sequence, 17)
    assert not manager.allocate(other, 5)
    assert manager.block_ids(sequence) == before
    assert manager.num_held(other) == 0
    assert manager.pool.num_free == 1
    manager.check([sequence])


def test_free_gives_everything_back_and_a_second_time_nothing():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 20)
    manager.free(sequence)
    assert manager.pool.num_free == 8
    assert manager.block_ids(sequence) == []
    manager.free(sequence)
    manager.free(make_sequence("never seen"))
    assert manager.pool.num_free == 8
    manager.check([])


def test_two_sequences_never_share_a_block():
    manager, first, second = make_manager(), make_sequence(), make_sequence("b")
    manager.allocate(first, 10)
    manager.allocate(second, 10)
    assert not set(manager.block_ids(first)) & set(manager.block_ids(second))
    manager.check([first, second])


def test_worker_is_told_each_change_once():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 5)
    assert manager.table_updates(sequence) == [TableUpdate(0, manager.block_ids(sequence))]
    assert manager.table_updates(sequence) == [None]
    manager.allocate(sequence, 9)
    assert manager.table_updates(sequence) == [TableUpdate(2, manager.block_ids(sequence)[2:])]


def test_worker_is_told_all_again_after_a_new_start():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 5)
    manager.table_updates(sequence)
    manager.free(sequence)
    manager.allocate(sequence, 5)
    assert manager.table_updates(sequence) == [TableUpdate(0, manager.block_ids(sequence))]


def test_block_ids_are_a_copy():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 5)
    manager.block_ids(sequence).append(99)
    assert 99 not in manager.block_ids(sequence)


def test_allocation_is_timed_only_where_blocks_are_taken():
    ticks = iter(range(100))
    manager, sequence = make_manager(clock=lambda: float(next(ticks))), make_sequence()
    manager.allocate(sequence, 4)
    manager.allocate(sequence, 4)
    assert manager.allocation_seconds.count == 1
    assert manager.allocation_seconds.total == 1.0


def test_unused_slots_are_those_of_the_last_block():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 5)
    sequence.num_scheduled = 5
    assert manager.unused_slots() == 3


def test_mapping_memory_grows_with_the_tables():
    manager, sequence = make_manager(num_blocks=100), make_sequence()
    before = manager.mapping_bytes() - manager.pool.bytes()
    manager.allocate(sequence, 400)
    assert manager.mapping_bytes() - manager.pool.bytes() >= before + 100 * 8


def leak(manager, sequence):
    manager.pool.take(1)


def name_twice(manager, sequence):
    manager._tables[sequence].block_ids.append(manager.block_ids(sequence)[0])


def schedule_past_the_table(manager, sequence):
    sequence.num_scheduled = 6


def promise_too_much(manager, sequence):
    manager._tables[sequence].num_sent = 2


@pytest.mark.parametrize("damage", [leak, name_twice, schedule_past_the_table, promise_too_much])
def test_check_finds_books_in_disorder(damage):
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 4)
    manager.check([sequence])
    damage(manager, sequence)
    with pytest.raises(InvariantError):
        manager.check([sequence])


def test_check_finds_blocks_of_a_sequence_that_does_not_run():
    manager, sequence = make_manager(), make_sequence()
    manager.allocate(sequence, 4)
    with pytest.raises(InvariantError, match="does not run"):
        manager.check([])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_at_most_one_block_a_sequence_is_not_full(block_size):
    driver = Driver(block_size=block_size, num_blocks=400 // block_size)
    for number in range(4):
        driver.add(f"{number}", [1] * (5 + number), 20)
    while driver.scheduler.has_work:
        driver.step()
        stats = driver.scheduler.stats()
        assert stats.internal_fragmentation * stats.blocks.used * block_size <= 4 * (block_size - 1) + 1e-9
