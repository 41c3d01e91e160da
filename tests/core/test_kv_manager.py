"""Block tables: matched, allocated on demand, forked, named, told to the worker once, swapped, moved, freed as a whole."""

import gc
import tracemalloc

import pytest
from core_driver import Driver, expected

from octavo.core.kv_manager import UNNAMED, KVManager
from octavo.core.request import Request
from octavo.errors import InvariantError
from octavo.plan import BlockCopy, TableUpdate, Tier
from octavo.sampling_params import SamplingParams

SIZE = 4


def make_sequence(tokens=(1, 2, 3, 4), name="a", **params):
    params.setdefault("max_tokens", 1000)
    return Request(name, list(tokens), SamplingParams(**params), arrival=0.0, max_length=10_000).sequences[0]


def make_manager(num_blocks=16, block_size=SIZE, clock=lambda: 0.0, **options):
    return KVManager(num_blocks, block_size, clock, **options)


def begin(manager, tokens=(1, 2, 3, 4), name="a", **params):
    """A sequence that runs, beginning with what the index has of it."""
    sequence = make_sequence(tokens, name, **params)
    manager.begin(sequence, manager.match(sequence))
    return sequence


def schedule(manager, sequence, end):
    assert manager.allocate(sequence, end)
    sequence.num_scheduled = end


def confirm(manager, sequence):
    sequence.num_computed = sequence.num_scheduled
    manager.name(sequence)


def compute(manager, sequence, end=None):
    schedule(manager, sequence, len(sequence.tokens) if end is None else end)
    confirm(manager, sequence)


def started(manager, tokens, name="a", **params):
    sequence = begin(manager, tokens, name, **params)
    compute(manager, sequence)
    return sequence


def device_copy(source, target):
    return BlockCopy(Tier.DEVICE, source, Tier.DEVICE, target)


def books(manager):
    pool = manager.pool
    return pool.num_free, pool.num_cached, manager.swap_free, [pool.count(block_id) for block_id in range(pool.total)], list(manager.copies)


# Tables


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_are_counted_up(tokens, blocks):
    assert make_manager().blocks_for(tokens) == blocks


def test_table_grows_on_demand_and_keeps_what_it_has():
    manager = make_manager()
    sequence = begin(manager, range(20))
    ids = sequence.table.groups[0]
    assert ids == []
    for end, blocks in [(3, 1), (4, 1), (9, 3)]:
        before = list(ids)
        schedule(manager, sequence, end)
        assert ids[: len(before)] == before
        assert len(ids) == manager.pool.num_used == blocks
    manager.check([sequence], [])


def test_allocation_beyond_the_pool_changes_nothing():
    manager = make_manager(num_blocks=3)
    sequence, other = begin(manager, range(8)), begin(manager, range(20, 40), "b")
    schedule(manager, sequence, 8)
    before = books(manager), list(sequence.table.groups[0]), sequence.table.limit
    assert not manager.allocate(sequence, 17)
    assert not manager.allocate(other, 5)
    assert (books(manager), sequence.table.groups[0], sequence.table.limit) == before
    assert other.table.groups[0] == []
    manager.check([sequence, other], [])


def test_allocation_evicts_what_is_cached():
    manager = make_manager(num_blocks=3)
    manager.free(started(manager, range(12)))
    assert manager.pool.num_cached == 3
    sequence = started(manager, range(20, 32), "b")
    assert (manager.pool.num_evicted, manager.pool.num_used) == (3, 3)
    manager.check([sequence], [])


def test_free_gives_everything_back():
    manager = make_manager(prefix_caching=False)
    sequence = started(manager, range(20))
    manager.free(sequence)
    assert sequence.table is None
    assert manager.pool.num_free == 16
    manager.check([], [])


def test_sequences_of_their_own_tokens_share_no_block():
    manager = make_manager()
    first, second = started(manager, range(10)), started(manager, range(20, 30), "b")
    assert not set(first.table.groups[0]) & set(second.table.groups[0])
    manager.check([first, second], [])


def test_worker_is_told_each_change_once():
    manager = make_manager()
    sequence = begin(manager, range(20))
    schedule(manager, sequence, 5)
    ids = sequence.table.groups[0]
    (update,) = manager.table_updates(sequence)
    assert update == TableUpdate(0, ids)
    assert update.block_ids is not ids
    assert manager.table_updates(sequence) == []
    schedule(manager, sequence, 9)
    assert manager.table_updates(sequence) == [TableUpdate(2, ids[2:])]
    assert manager.table_updates(sequence) == []


def test_worker_is_told_all_again_after_a_new_start():
    manager = make_manager()
    sequence = begin(manager, range(20))
    compute(manager, sequence, 9)
    manager.table_updates(sequence)
    manager.free(sequence)
    manager.begin(sequence, manager.match(sequence))
    assert manager.table_updates(sequence) == [TableUpdate(0, sequence.table.groups[0])]
    assert len(sequence.table.groups[0]) == 2


def test_allocation_is_timed_only_where_blocks_are_taken():
    ticks = iter(range(100))
    manager = make_manager(clock=lambda: float(next(ticks)))
    sequence = begin(manager)
    manager.allocate(sequence, 4)
    manager.allocate(sequence, 4)
    assert manager.allocation_seconds.count == 1
    assert manager.allocation_seconds.total == 1.0


# Match


@pytest.mark.parametrize(
    ("known", "asked", "hit"),
    [(32, 32, 1), (32, 33, 2), (32, 31, 1), (48, 40, 2), (40, 40, 2), (40, 48, 2), (31, 40, 1), (15, 40, 0), (32, 16, 0), (32, 17, 1)],
)
def test_hit_is_whole_blocks_and_never_reaches_the_last_token(known, asked, hit):
    """A prompt of exactly two blocks that is there in full is a hit of one: 16 of 32 tokens."""
    manager = make_manager(block_size=16)
    first = started(manager, range(known))
    manager.free(first)
    second = make_sequence(range(asked), "b")
    nodes = manager.match(second)
    assert len(nodes) == hit
    manager.begin(second, nodes)
    assert (second.num_computed, second.num_scheduled) == (16 * hit, 16 * hit)
    assert second.num_computed < len(second.tokens)
    assert (second.table.num_named, len(second.table.groups[0])) == (hit, hit)
    compute(manager, second)
    manager.check([second], [])


@pytest.mark.parametrize("length", [32, 33])
def test_same_prompt_twice_is_answered_alike(length):
    driver = Driver(block_size=16)
    first = driver.add("a", range(length), 1)
    driver.run()
    second = driver.add("b", range(length), 1)
    (plan,) = driver.run()
    assert [(row.start, row.count) for row in plan.rows] == [(second.num_cached, length - second.num_cached)]
    assert (first.num_cached, second.num_cached) == (0, 16 * ((length - 1) // 16))
    assert first.output_token_ids == second.output_token_ids == expected(second)


def test_hit_ends_where_the_tokens_differ_or_the_chain_was_cut():
    manager = make_manager(num_blocks=4)
    manager.free(started(manager, range(16)))
    assert len(manager.match(make_sequence([*range(16), 99]))) == 4
    assert len(manager.match(make_sequence([*range(7), 99, *range(8, 17)]))) == 1
    assert manager.match(make_sequence([99, *range(1, 17)])) == []
    manager.pool.give_back(manager.pool.take(2))
    assert [node.block_ids[0] for node in manager.match(make_sequence([*range(16), 99]))] == [0, 1]


def test_generated_tokens_are_matched_like_a_prompt():
    manager = make_manager()
    first = started(manager, range(6))
    first.tokens += [50, 51, 52]
    compute(manager, first)
    manager.free(first)
    assert len(manager.match(make_sequence([*range(6), 50, 51, 7]))) == 2


def test_no_hit_where_prefix_caching_is_off():
    manager = make_manager(prefix_caching=False)
    sequence = started(manager, range(16))
    assert (len(manager.index), sequence.table.num_named) == (0, UNNAMED)
    manager.free(sequence)
    assert (manager.pool.num_free, manager.pool.num_cached) == (16, 0)
    assert manager.match(make_sequence(range(17))) == []


@pytest.mark.parametrize("scored", [0, 3, 4, 9, 15])
def test_positions_not_scored_yet_are_computed_whatever_is_known(scored):
    manager = make_manager()
    manager.free(started(manager, range(16)))
    sequence = make_sequence([*range(16), 99], prompt_logprobs=1)
    sequence.num_scored = scored
    assert len(manager.match(sequence)) == scored // SIZE


def test_requests_of_different_salts_share_nothing():
    manager = make_manager()
    sequences = [started(manager, range(9), f"{salt}", cache_salt=salt) for salt in (None, "x", "y", "x", None)]
    shared = [set(one.table.groups[0][:2]) for one in sequences]
    assert shared[0] == shared[4] != shared[1] == shared[3] != shared[2]
    assert len(set.union(*shared)) == 6
    manager.check(sequences, [])


def test_matched_blocks_are_shared_and_not_evicted():
    """Also the last one of a match, which nothing else holds."""
    manager = make_manager(num_blocks=4)
    manager.free(started(manager, range(12)))
    sequence = begin(manager, [*range(8), 99], "b")
    assert len(sequence.table.groups[0]) == 2
    assert manager.pool.num_available == 2
    assert manager.pool.take(2)
    assert not manager.allocate(sequence, 9)
    assert all(block_id in manager.index for block_id in sequence.table.groups[0])


def test_blocks_missing_are_those_not_shared_and_those_kept_from_eviction():
    manager = make_manager()
    running = started(manager, range(12))
    other = make_sequence([*range(12), 99], "b")
    assert manager.num_missing(other, 13, manager.match(other)) == 1
    manager.free(running)
    assert manager.num_missing(other, 13, manager.match(other)) == 4
    assert manager.num_missing(other, 13, []) == 4


def test_evicted_tokens_of_a_prompt_are_told_as_missed():
    manager = make_manager(num_blocks=5)
    manager.free(started(manager, range(16)))
    again = make_sequence([*range(16), 99])
    assert manager.missed(again, manager.match(again)) == 0
    manager.pool.give_back(manager.pool.take(3))  # one was free
    nodes = manager.match(again)
    assert (len(nodes), manager.missed(again, nodes)) == (2, 8)
    manager.pool.give_back(manager.pool.take(5))
    assert manager.missed(again, manager.match(again)) == 16
    assert manager.missed(make_sequence(range(16)), []) == 12  # the last block would be computed in any case
    assert manager.missed(make_sequence([*range(8), 98, 99, 100, 101, 102]), []) == 8
    manager.reset([])
    assert manager.missed(again, []) == 0


def test_positions_that_must_be_scored_are_not_missed():
    """No memory would have spared them."""
    manager = make_manager(num_blocks=4)
    manager.free(started(manager, range(16)))
    manager.pool.give_back(manager.pool.take(4))
    sequence = make_sequence([*range(16), 99], prompt_logprobs=1)
    assert manager.missed(sequence, manager.match(sequence)) == 0
    sequence.num_scored = 10
    assert manager.missed(sequence, manager.match(sequence)) == 8


# Names


def test_only_confirmed_full_blocks_are_named():
    manager = make_manager()
    sequence = begin(manager, range(20))
    schedule(manager, sequence, 10)
    manager.name(sequence)
    assert len(manager.index) == sequence.table.num_named == 0
    confirm(manager, sequence)
    assert [block_id in manager.index for block_id in sequence.table.groups[0]] == [True, True, False]
    assert sequence.table.num_named == 2
    schedule(manager, sequence, 16)
    manager.name(sequence)
    assert len(manager.index) == 2
    confirm(manager, sequence)
    assert len(manager.index) == 4
    assert sequence.table.node.block_ids[0] == sequence.table.groups[0][3]
    manager.check([sequence], [])


def test_duplicate_gives_way_to_the_block_the_index_has():
    """Two compute the same at once: the second is pointed to the first one's blocks, its own are free, and its worker is told."""
    manager = make_manager()
    first, second = begin(manager, range(10)), begin(manager, range(10), "b")
    for sequence in (first, second):
        schedule(manager, sequence, 10)
        manager.table_updates(sequence)
    own = list(second.table.groups[0])
    confirm(manager, first)
    confirm(manager, second)
    assert second.table.groups[0] == first.table.groups[0][:2] + own[2:]
    assert second.table.num_sent == 0
    assert [manager.pool.count(block_id) for block_id in own] == [0, 0, 1]
    assert [manager.pool.count(block_id) for block_id in first.table.groups[0]] == [2, 2, 1]
    assert manager.pool.num_used == 4
    assert manager.table_updates(second) == [TableUpdate(0, second.table.groups[0])]
    assert manager.table_updates(first) == []
    assert manager.copies == []
    manager.check([first, second], [])
    manager.free(first)
    schedule(manager, second, 12)
    manager.check([second], [])


def test_worker_is_told_from_the_first_block_that_was_pointed_elsewhere():
    manager = make_manager()
    first = started(manager, range(8))
    second = begin(manager, [*range(8), *range(50, 56)], "b")
    third = begin(manager, [*range(8), *range(50, 56)], "c")
    for sequence in (second, third):
        schedule(manager, sequence, 14)
        manager.table_updates(sequence)
    third.table.num_named = second.table.num_named = 1
    third.table.node = second.table.node = manager.index.node(first.table.groups[0][0])
    confirm(manager, second)
    confirm(manager, third)
    assert third.table.groups[0][:3] == second.table.groups[0][:3]
    assert third.table.num_sent == 2
    assert manager.table_updates(third) == [TableUpdate(2, third.table.groups[0][2:])]
    manager.check([first, second, third], [])


def test_duplicate_of_a_cached_block_brings_it_back_into_use():
    manager = make_manager()
    second = begin(manager, range(10), "b")
    schedule(manager, second, 10)
    manager.free(started(manager, range(10)))
    assert manager.pool.num_cached == 2
    confirm(manager, second)
    assert (manager.pool.num_cached, manager.pool.num_used) == (0, 3)
    manager.check([second], [])


# Fork


@pytest.mark.parametrize("children", [1, 2, 5])
def test_tail_is_copied_for_every_writer_but_the_last(children):
    manager = make_manager()
    parent = started(manager, range(6))
    tail = parent.table.groups[0][1]
    family = [parent]
    for choice in range(children):
        child = make_sequence([*range(6), 50 + choice], f"{choice}")
        manager.fork(parent, child, 6)
        assert (child.num_computed, child.num_scheduled, child.table.num_sent) == (6, 6, 0)
        assert child.table.groups[0] == parent.table.groups[0]
        family.append(child)
    assert manager.pool.num_used == 2
    assert manager.pool.count(tail) == children + 1
    manager.check(family, [])
    parent.tokens.append(49)
    manager.table_updates(parent)
    for sequence in family:
        schedule(manager, sequence, 7)
        manager.check(family, [])
    assert [copy.source for copy in manager.copies] == [tail] * children
    assert [copy.target for copy in manager.copies] == [sequence.table.groups[0][1] for sequence in family[:-1]]
    assert family[-1].table.groups[0][1] == tail
    assert len({sequence.table.groups[0][1] for sequence in family}) == children + 1
    assert {sequence.table.groups[0][0] for sequence in family} == {parent.table.groups[0][0]}
    assert manager.table_updates(parent) == [TableUpdate(1, parent.table.groups[0][1:])]
    assert manager.table_updates(family[1]) == [TableUpdate(0, family[1].table.groups[0])]
    before = len(manager.copies)
    for sequence in family:
        sequence.tokens += [1, 2]
        schedule(manager, sequence, 9)
    assert len(manager.copies) == before
    manager.check(family, [])


def test_last_writer_writes_in_place_where_the_others_left():
    manager = make_manager()
    parent = started(manager, range(6))
    child = make_sequence([*range(6), 50], "b")
    manager.fork(parent, child, 6)
    tail = parent.table.groups[0][1]
    manager.free(parent)
    schedule(manager, child, 7)
    assert manager.copies == []
    assert child.table.groups[0][1] == tail
    manager.check([child], [])


def test_nothing_is_copied_where_the_length_is_whole_blocks():
    manager = make_manager()
    parent = started(manager, range(8))
    child = make_sequence([*range(8), 50], "b")
    manager.fork(parent, child, 8)
    parent.tokens.append(49)
    schedule(manager, parent, 9)
    schedule(manager, child, 9)
    assert manager.copies == []
    assert parent.table.groups[0][:2] == child.table.groups[0][:2]
    assert parent.table.groups[0][2] != child.table.groups[0][2]
    manager.check([parent, child], [])


def test_child_shares_no_more_than_it_was_given():
    manager = make_manager()
    parent = started(manager, range(14))
    child = make_sequence([*range(5), 50], "b")
    manager.fork(parent, child, 5)
    assert child.table.groups[0] == parent.table.groups[0][:2]
    assert child.table.num_named == 1
    assert child.table.node is manager.index.node(parent.table.groups[0][0])
    schedule(manager, child, 6)
    assert manager.copies == [device_copy(parent.table.groups[0][1], child.table.groups[0][1])]
    assert parent.table.groups[0][1] in manager.index
    manager.check([parent, child], [])
    confirm(manager, child)
    child.tokens += [51, 52]
    compute(manager, child, 8)
    assert manager.index.node(child.table.groups[0][1]).parent is manager.index.node(parent.table.groups[0][0])
    manager.check([parent, child], [])


def test_named_tail_is_not_written_where_its_parent_left():
    """A fork in the middle of a block that the index names: the first write must copy it, whoever else holds it."""
    manager = make_manager()
    parent = started(manager, range(8))
    child = make_sequence([*range(6), 50], "b")
    manager.fork(parent, child, 6)
    manager.free(parent)
    named = manager.index.node(child.table.groups[0][1])
    schedule(manager, child, 7)
    assert manager.index.node(child.table.groups[0][1]) is None
    assert manager.copies == [device_copy(named.block_ids[0], child.table.groups[0][1])]
    manager.check([child], [])


def test_fork_without_room_for_the_copy_changes_nothing():
    manager = make_manager(num_blocks=2)
    parent = started(manager, range(6))
    child = make_sequence([*range(6), 50], "b")
    manager.fork(parent, child, 6)
    before = books(manager)
    assert not manager.allocate(child, 7)
    assert books(manager) == before
    manager.check([parent, child], [])


def test_fork_where_names_are_off():
    manager = make_manager(prefix_caching=False)
    parent = started(manager, range(6))
    child = make_sequence([*range(6), 50], "b")
    manager.fork(parent, child, 6)
    assert (child.table.num_named, child.table.node) == (UNNAMED, None)
    compute(manager, child)
    manager.check([parent, child], [])
    assert len(manager.index) == 0


def test_blocks_that_stay_are_counted_from_the_start():
    manager = make_manager()
    parent = started(manager, range(10))
    assert manager.num_shared(parent) == 0
    child = begin(manager, [*range(8), 50, 51], "b")
    assert (manager.num_shared(parent), manager.num_shared(child)) == (2, 2)


# Freeing what is not to be trusted


def test_names_of_what_is_not_to_be_kept_are_forgotten():
    manager = make_manager()
    sequence = started(manager, range(14))
    manager.free(sequence, keep=False)
    assert (len(manager.index), manager.pool.num_free, manager.pool.num_cached) == (0, 16, 0)
    assert manager.missed(make_sequence(range(14)), []) == 0
    manager.check([], [])


def test_what_others_build_on_is_kept():
    manager = make_manager()
    broken = started(manager, range(16))
    ids = broken.table.groups[0]
    other = started(manager, [*range(8), 50, 51, 52, 53], "b")
    manager.free(broken, keep=False)
    assert [block_id in manager.index for block_id in ids] == [True, True, False, False]
    assert manager.pool.count(ids[0]) == 1
    manager.check([other], [])
    assert len(manager.match(make_sequence([*range(8), 50, 51, 52, 53, 9]))) == 3


def test_what_a_cached_child_builds_on_is_kept():
    manager = make_manager()
    manager.free(started(manager, [*range(8), 50, 51, 52, 53], "b"))
    broken = started(manager, range(16))
    manager.free(broken, keep=False)
    assert (manager.pool.num_cached, len(manager.index)) == (3, 3)
    assert len(manager.match(make_sequence(range(17)))) == 2
    manager.check([], [])


def test_deepest_go_first_to_the_last_of_a_forked_family():
    manager = make_manager()
    parent = started(manager, range(8))
    child = make_sequence([*range(8), 50], "b")
    manager.fork(parent, child, 8)
    compute(manager, child)
    manager.free(child, keep=False)
    assert len(manager.index) == 2
    manager.check([parent], [])
    manager.free(parent, keep=False)
    assert (len(manager.index), manager.pool.num_free) == (0, 16)


def test_blocks_of_a_request_that_failed_are_not_cached():
    """Also those that earlier results confirmed; what others hold stays."""
    driver = Driver(row_error=lambda row, assignment: "not a number" if row.start == 21 and assignment.seed == 1 else None)
    other = driver.add("other", range(9), 9)
    failing = driver.add("failing", [*range(8), *range(30, 41)], 9, seed=1)
    while not failing.finished:
        driver.step()
    assert (failing.finish_reason, len(failing.output_token_ids)) == ("error", 3)
    assert not other.finished
    assert driver.scheduler.kv.pool.num_cached == 0
    again = driver.add("again", [*range(8), *range(30, 41)], 1)
    driver.run()
    assert (again.num_cached, again.output_token_ids) == (8, expected(again))


# Swap


def test_swapped_sequence_holds_host_blocks_and_comes_back_by_copies():
    manager = make_manager(num_blocks=4, swap_blocks=5)
    sequence = begin(manager, range(16))
    compute(manager, sequence, 10)
    ids = list(sequence.table.groups[0])
    schedule(manager, sequence, 14)  # in flight, and not to be trusted
    assert manager.swap_out(sequence)
    host = list(sequence.swapped)
    assert (len(host), manager.swap_free, sequence.num_swapped) == (3, 2, 10)
    assert manager.copies == [BlockCopy(Tier.DEVICE, d, Tier.HOST, h) for d, h in zip(ids, host, strict=True)]
    manager.free(sequence)
    sequence.num_scheduled = sequence.num_computed = 0
    manager.check([], [sequence])
    manager.take_copies()
    manager.pool.give_back(manager.pool.take(4))  # nothing of it is cached any more
    nodes = manager.match(sequence)
    assert nodes == []
    assert manager.num_missing(sequence, 15, nodes) == 4
    manager.begin(sequence, nodes)
    ids = sequence.table.groups[0]
    assert manager.copies == [BlockCopy(Tier.HOST, h, Tier.DEVICE, d) for h, d in zip(host, ids, strict=True)]
    assert (sequence.num_computed, sequence.num_scheduled, sequence.swapped, manager.swap_free) == (10, 10, [], 5)
    assert sequence.table.num_named == len(manager.index) == 0
    manager.check([sequence], [])
    compute(manager, sequence, 11)
    assert sequence.table.num_named == 2
    manager.check([sequence], [])


def test_only_what_the_index_has_not_is_copied_back():
    manager = make_manager(num_blocks=4, swap_blocks=4)
    sequence = started(manager, range(15))
    assert manager.swap_out(sequence)
    host = list(sequence.swapped)
    manager.free(sequence)
    manager.take_copies()
    manager.pool.give_back(manager.pool.take(2))  # one was free, and the deepest named one goes
    nodes = manager.match(sequence)
    assert len(nodes) == 2
    assert manager.num_missing(sequence, 15, nodes) == 4
    manager.begin(sequence, nodes)
    ids = sequence.table.groups[0]
    assert manager.copies == [BlockCopy(Tier.HOST, h, Tier.DEVICE, d) for h, d in zip(host[2:], ids[2:], strict=True)]
    assert ids[:2] == [node.block_ids[0] for node in nodes]
    assert (sequence.num_computed, sequence.table.num_named, manager.swap_free) == (14, 2, 4)
    manager.check([sequence], [])


def test_nothing_is_copied_back_where_the_index_has_it_all():
    manager = make_manager(swap_blocks=4)
    sequence = started(manager, range(8))
    manager.swap_out(sequence)
    manager.free(sequence)
    sequence.tokens.append(50)
    manager.take_copies()
    manager.begin(sequence, manager.match(sequence))
    assert (manager.copies, sequence.num_computed, manager.swap_free) == ([], 8, 4)
    manager.check([sequence], [])


def test_index_may_have_more_than_was_swapped_out():
    manager = make_manager(swap_blocks=4)
    sequence, other = begin(manager, range(13)), begin(manager, range(13), "b")
    compute(manager, sequence, 5)
    manager.swap_out(sequence)
    manager.free(sequence)
    manager.take_copies()
    compute(manager, other, 13)
    manager.begin(sequence, manager.match(sequence))
    assert (manager.copies, sequence.num_computed, manager.swap_free) == ([], 12, 4)
    manager.check([sequence, other], [])


@pytest.mark.parametrize("room", [0, 1, 2])
def test_full_host_tier_refuses_and_changes_nothing(room):
    manager = make_manager(swap_blocks=room)
    sequence = started(manager, range(10))
    before = books(manager), list(sequence.table.groups[0])
    assert not manager.swap_out(sequence)
    assert (books(manager), sequence.table.groups[0], sequence.swapped) == (*before, [])
    manager.check([sequence], [])


def test_what_has_computed_nothing_is_not_swapped_out():
    manager = make_manager(swap_blocks=4)
    sequence = begin(manager, range(10))
    schedule(manager, sequence, 10)
    assert not manager.swap_out(sequence)
    assert (manager.copies, manager.swap_free) == ([], 4)


def test_host_blocks_of_one_that_ended_are_given_back():
    manager = make_manager(swap_blocks=4)
    sequence = started(manager, range(10))
    manager.swap_out(sequence)
    manager.free(sequence)
    manager.drop_swapped(sequence)
    assert (sequence.swapped, manager.swap_free) == ([], 4)
    manager.check([], [])


def test_copies_are_taken_once_and_in_order():
    manager = make_manager(swap_blocks=4)
    parent = started(manager, range(6))
    child = make_sequence([*range(6), 50], "b")
    manager.fork(parent, child, 6)
    schedule(manager, child, 7)
    manager.swap_out(parent)
    copies = manager.take_copies()
    assert [(copy.source_tier, copy.target_tier) for copy in copies] == [(0, 0), (0, 1), (0, 1)]
    assert manager.take_copies() == []
    assert manager.num_copied == 3


# Compaction and reset


def test_compaction_moves_tables_names_and_what_the_worker_knows():
    manager = make_manager(num_blocks=10)
    gone, kept = started(manager, range(12)), started(manager, range(20, 29), "b")
    low = started(manager, range(40, 44), "c")
    cached = started(manager, range(60, 68), "d")
    for sequence in (kept, low):
        manager.table_updates(sequence)
    manager.free(gone, keep=False)
    manager.free(cached)
    assert (kept.table.groups[0], low.table.groups[0]) == ([3, 4, 5], [6])
    tables = [kept.table, low.table]
    with pytest.raises(InvariantError):
        manager.compact(5, tables)
    assert manager.copies == []
    assert manager.compact(6, tables) == 3
    assert manager.copies == [device_copy(6, 0), device_copy(7, 1), device_copy(8, 2)]
    assert (kept.table.groups[0], low.table.groups[0]) == ([3, 4, 5], [0])
    assert (kept.table.num_sent, low.table.num_sent) == (3, 0)
    assert manager.table_updates(low) == [TableUpdate(0, [0])]
    assert manager.table_updates(kept) == []
    assert [node.block_ids[0] for node in manager.match(make_sequence(range(60, 69)))] == [1, 2]
    assert len(manager.match(make_sequence(range(20, 29)))) == 2
    manager.check([kept, low], [])


def test_shared_block_moves_once_and_in_every_table():
    manager = make_manager(num_blocks=8)
    gone = started(manager, range(16))
    parent = started(manager, range(20, 26), "b")
    child = make_sequence([*range(20, 26), 50], "c")
    manager.fork(parent, child, 6)
    for sequence in (parent, child):
        manager.table_updates(sequence)
    manager.free(gone, keep=False)
    assert manager.compact(5, [parent.table, child.table]) == 1
    assert parent.table.groups[0] == child.table.groups[0] == [4, 0]
    assert (parent.table.num_sent, child.table.num_sent) == (1, 1)
    assert len(manager.copies) == 1
    manager.check([parent, child], [])
    schedule(manager, child, 7)
    assert manager.copies[1:] == [device_copy(0, child.table.groups[0][1])]
    manager.check([parent, child], [])


def test_worker_is_told_from_the_first_block_that_moved():
    manager = make_manager(num_blocks=8)
    gone, sequence = started(manager, range(8)), started(manager, range(20, 36), "b")
    manager.table_updates(sequence)
    manager.free(gone, keep=False)
    assert manager.compact(4, [sequence.table]) == 2
    assert sequence.table.groups[0] == [2, 3, 0, 1]
    assert manager.table_updates(sequence) == [TableUpdate(2, [0, 1])]
    manager.check([sequence], [])


def test_compaction_that_moves_nothing_tells_nothing():
    manager = make_manager(num_blocks=8)
    sequence = started(manager, range(12))
    manager.table_updates(sequence)
    assert not manager.compact(3, [sequence.table])
    assert (manager.copies, sequence.table.num_sent, manager.pool.total) == ([], 3, 3)
    manager.check([sequence], [])


def test_reset_forgets_and_names_nothing_of_the_running_ones():
    manager = make_manager()
    manager.free(started(manager, range(20, 28), "b"))
    sequence = begin(manager, range(20))
    compute(manager, sequence, 9)
    assert manager.reset([sequence.table]) == 2
    assert (len(manager.index), manager.pool.num_cached) == (0, 0)
    manager.check([sequence], [])
    compute(manager, sequence, 20)
    assert len(manager.index) == 0
    child = make_sequence([*range(18), 50], "c")
    manager.fork(sequence, child, 18)
    compute(manager, child)
    assert len(manager.index) == 0
    manager.check([sequence, child], [])
    fresh = started(manager, range(20), "d")
    assert len(manager.index) == 5
    assert not set(fresh.table.groups[0]) & set(sequence.table.groups[0])
    for one in (sequence, child, fresh):
        manager.free(one, keep=one is not sequence)
    assert (manager.pool.num_cached, manager.pool.num_free) == (5, 11)
    manager.check([], [])


# Figures


def test_unused_slots_are_those_that_hold_no_token():
    manager = make_manager()
    sequence = begin(manager, range(20))
    schedule(manager, sequence, 5)
    assert manager.unused_slots([sequence]) == 3
    schedule(manager, sequence, 8)
    assert manager.unused_slots([sequence]) == 0
    assert manager.allocate(sequence, 17)  # room ahead
    assert manager.unused_slots([sequence]) == 12
    assert manager.unused_slots([]) == 0


def test_unused_slots_of_a_shared_tail_are_counted_once():
    manager = make_manager()
    parent = started(manager, range(5))
    family = [parent]
    for choice in range(3):
        child = make_sequence([*range(5), 50 + choice], f"{choice}")
        manager.fork(parent, child, 5)
        family.append(child)
    assert manager.unused_slots(family) == 3
    schedule(manager, family[1], 6)
    assert manager.unused_slots(family) == 3 + 2
    manager.free(family.pop(1))
    assert manager.unused_slots(family) == 3


def test_unused_slots_of_a_shared_tail_are_those_that_nobody_fills():
    manager = make_manager()
    parent = started(manager, range(7))
    child = make_sequence([*range(5), 50], "b")
    manager.fork(parent, child, 5)
    assert manager.unused_slots([parent, child]) == manager.unused_slots([child, parent]) == 1


def test_mapping_memory_is_told_as_the_interpreter_counts_it():
    block_size, length, number = 16, 4096, 20
    prompts = [range(start, start + length) for start in range(number)]
    sequences = [make_sequence(prompt, f"{start}") for start, prompt in enumerate(prompts)]
    gc.collect()
    tracemalloc.start()
    try:
        manager = make_manager(num_blocks=number * length // block_size, block_size=block_size, swap_blocks=100, block_bytes=2**20)
        before = manager.mapping_bytes([])
        for sequence in sequences:
            manager.begin(sequence, [])
            for end in range(256, length + 1, 256):
                compute(manager, sequence, end)
        gc.collect()
        counted, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    manager.check(sequences, [])
    assert counted * 0.7 <= manager.mapping_bytes(sequences) <= counted * 1.3
    assert before < manager.mapping_bytes(sequences) / 3
    assert manager.mapping_bytes(sequences) < 0.01 * manager.pool.total * manager.block_bytes


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_at_most_one_block_a_sequence_is_not_full(block_size):
    driver = Driver(block_size=block_size, num_blocks=400 // block_size)
    for number in range(4):
        driver.add(f"{number}", [1] * (5 + number), 20)
    while driver.scheduler.has_work:
        driver.step()
        stats = driver.scheduler.stats()
        assert stats.internal_fragmentation * stats.blocks.used * block_size <= 4 * (block_size - 1) + 1e-9


# Audit


def no_table(manager, sequence, child, swapped):
    sequence.table = None


def leak(manager, sequence, child, swapped):
    manager.pool.take(1)


def name_twice(manager, sequence, child, swapped):
    manager.pool.share(sequence.table.groups[0][:1])
    sequence.table.groups[0].append(sequence.table.groups[0][0])


def name_uncounted(manager, sequence, child, swapped):
    child.table.groups[0][0] = sequence.table.groups[0][2]


def schedule_past_the_table(manager, sequence, child, swapped):
    sequence.num_scheduled = 13


def promise_too_much(manager, sequence, child, swapped):
    sequence.table.num_sent = 4


def promise_less_than_nothing(manager, sequence, child, swapped):
    sequence.table.num_sent = -1


def allow_writes_past_the_table(manager, sequence, child, swapped):
    sequence.table.limit = 13


def allow_writes_to_a_shared_block(manager, sequence, child, swapped):
    child.table.limit = 12


def go_back_to_a_named_block(manager, sequence, child, swapped):
    sequence.num_scheduled = 7


def believe_in_more_names(manager, sequence, child, swapped):
    sequence.table.num_named = 3


def forget_behind_its_back(manager, sequence, child, swapped):
    manager.index.forget(sequence.table.groups[0][1])


def know_another_node(manager, sequence, child, swapped):
    sequence.table.node = sequence.table.node.parent


def damage_the_pool(manager, sequence, child, swapped):
    manager.pool._free.append(manager.pool._free[0])


def damage_the_index(manager, sequence, child, swapped):
    manager.index.node(sequence.table.groups[0][0]).num_children += 1


def lose_a_host_block(manager, sequence, child, swapped):
    swapped.swapped.pop()


def hold_a_host_block_twice(manager, sequence, child, swapped):
    swapped.swapped[0] = swapped.swapped[1]


def free_a_host_block_in_use(manager, sequence, child, swapped):
    manager._swap_free.append(swapped.swapped[0])


@pytest.mark.parametrize(
    "damage",
    [
        no_table,
        leak,
        name_twice,
        name_uncounted,
        schedule_past_the_table,
        promise_too_much,
        promise_less_than_nothing,
        allow_writes_past_the_table,
        allow_writes_to_a_shared_block,
        go_back_to_a_named_block,
        believe_in_more_names,
        forget_behind_its_back,
        know_another_node,
        damage_the_pool,
        damage_the_index,
        lose_a_host_block,
        hold_a_host_block_twice,
        free_a_host_block_in_use,
    ],
)
def test_check_finds_books_in_disorder(damage):
    manager = make_manager(swap_blocks=4)
    swapped = started(manager, range(20, 30), "c")
    manager.swap_out(swapped)
    manager.free(swapped)
    sequence, child = started(manager, range(10)), make_sequence([*range(10), 50], "b")
    manager.fork(sequence, child, 10)
    manager.check([sequence, child], [swapped])
    damage(manager, sequence, child, swapped)
    with pytest.raises(InvariantError):
        manager.check([sequence, child], [swapped])


@pytest.mark.parametrize("missing", ["running", "swapped"])
def test_check_finds_blocks_of_a_sequence_that_does_not_run(missing):
    manager = make_manager(swap_blocks=4)
    swapped = started(manager, range(20, 30), "b")
    manager.swap_out(swapped)
    manager.free(swapped)
    sequence = started(manager, range(10))
    with pytest.raises(InvariantError):
        manager.check([] if missing == "running" else [sequence], [] if missing == "swapped" else [swapped])
