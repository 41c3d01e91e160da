"""The pool's books: every block free or used, never both, whatever is asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.errors import InvariantError


def books(pool):
    return pool.num_free, [pool.count(block_id) for block_id in range(pool.total)]


def test_free_and_used_add_up():
    pool = BlockPool(8)
    taken = pool.take(5)
    assert len(set(taken)) == 5
    assert (pool.num_free, pool.num_used, pool.total) == (3, 5, 8)
    pool.give_back(taken[:2])
    assert (pool.num_free, pool.num_used, pool.peak_used) == (5, 3, 5)
    pool.check()


def test_lowest_blocks_are_taken_first():
    assert BlockPool(4).take(3) == [0, 1, 2]


def test_block_given_back_last_is_taken_first():
    pool = BlockPool(8)
    first, second = pool.take(3), pool.take(2)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(5) == [*first, *second]


def test_taking_too_many_changes_nothing():
    pool = BlockPool(4)
    pool.take(2)
    before = books(pool)
    with pytest.raises(InvariantError, match="3 blocks were taken of 2"):
        pool.take(3)
    assert books(pool) == before


def test_taking_nothing_gives_nothing():
    pool = BlockPool(2)
    assert pool.take(0) == []
    assert pool.num_free == 2


@pytest.mark.parametrize("extra", [[0, 0], [0, 1, 0], [2], [1, 2]])
def test_giving_back_too_often_changes_nothing(extra):
    pool = BlockPool(4)
    pool.take(2)
    before = books(pool)
    with pytest.raises(InvariantError, match="given back more often"):
        pool.give_back(extra)
    assert books(pool) == before
    pool.check()
    pool.give_back([0, 1])
    assert pool.num_free == 4


def test_shared_block_twice_in_one_call_enters_the_free_list_once():
    pool = BlockPool(4)
    block = pool.take(1)
    pool.share(block)
    pool.give_back(block * 2)
    assert pool.num_free == 4
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_shared_block_is_free_when_its_last_name_goes():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.share(blocks)
    assert [pool.count(block) for block in blocks] == [2, 2]
    pool.give_back(blocks)
    assert pool.num_free == 2
    pool.give_back(blocks)
    assert pool.num_free == 4


def test_sharing_a_free_block_changes_nothing():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    before = books(pool)
    with pytest.raises(InvariantError, match="block that is free, or does not exist, was shared"):
        pool.share([block, 3])
    assert books(pool) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.append(99),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._counts.__setitem__(0, -1),
        lambda pool: pool._counts.__setitem__(0, 0),
    ],
    ids=["twice", "beyond the pool", "used and free", "neither", "negative", "no name and not free"],
)
def test_check_finds_books_in_disorder(damage):
    pool = BlockPool(4)
    pool.take(2)
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check()


def test_memory_of_the_books_grows_with_the_pool():
    assert BlockPool(10).bytes() < BlockPool(1000).bytes() < 1000 * 100


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["take", "share", "give_back"]), st.lists(st.integers(0, 11), max_size=6))))
def test_any_calls_leave_the_books_in_order(total, calls):
    pool, counts = BlockPool(total), [0] * total
    for name, blocks in calls:
        blocks = [block % total for block in blocks]
        if name == "take":
            if len(blocks) > counts.count(0):
                with pytest.raises(InvariantError):
                    pool.take(len(blocks))
            else:
                for block in pool.take(len(blocks)):
                    assert counts[block] == 0
                    counts[block] = 1
        elif name == "share":
            if all(counts[block] for block in blocks):
                pool.share(blocks)
                for block in blocks:
                    counts[block] += 1
            else:
                with pytest.raises(InvariantError):
                    pool.share(blocks)
        elif all(blocks.count(block) <= counts[block] for block in blocks):
            pool.give_back(blocks)
            for block in blocks:
                counts[block] -= 1
        else:
            with pytest.raises(InvariantError):
                pool.give_back(blocks)
        pool.check()
        assert books(pool) == (counts.count(0), counts)


@pytest.mark.parametrize("block_id", [-1, 4, 99])
def test_sharing_a_block_that_does_not_exist_changes_nothing(block_id):
    pool = BlockPool(4)
    taken = pool.take(2)
    with pytest.raises(InvariantError, match="does not exist"):
        pool.share([*taken, block_id])
    assert [pool.count(number) for number in taken] == [1, 1]
    pool.check()
