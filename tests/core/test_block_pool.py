"""The pool's books: every block free, cached or used, never two of these, whatever is asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.core.prefix_index import PrefixIndex
from octavo.errors import InvariantError


def make_pool(total, ceiling=None, num_remembered=0):
    index = PrefixIndex(1, num_remembered)
    return BlockPool(total, index, ceiling), index


def name_chain(index, block_ids, first_token=0):
    """Name blocks, each after the one before."""
    node = None
    for place, block_id in enumerate(block_ids):
        node = index.find_or_add(node, None, [first_token + place], [block_id])


def books(pool):
    return pool.num_free, pool.num_cached, [pool.count(block_id) for block_id in range(pool.total)]


def check(pool):
    pool.check()
    assert pool.num_free + pool.num_cached + pool.num_used == pool.total
    assert pool.num_available == pool.num_free + pool.num_cached * (pool.total == pool.ceiling)


# Free and used


def test_free_and_used_add_up():
    pool, _ = make_pool(8)
    taken = pool.take(5)
    assert len(set(taken)) == 5
    assert (pool.num_free, pool.num_used, pool.total) == (3, 5, 8)
    pool.give_back(taken[:2])
    assert (pool.num_free, pool.num_used, pool.peak_used) == (5, 3, 5)
    check(pool)


def test_lowest_blocks_are_taken_first():
    assert make_pool(4)[0].take(3) == [0, 1, 2]


def test_block_given_back_last_is_taken_first():
    pool, _ = make_pool(8)
    first, second = pool.take(3), pool.take(2)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(5) == [*first, *second]


def test_taking_nothing_gives_nothing():
    pool, _ = make_pool(2)
    assert pool.take(0) == []
    assert pool.num_free == 2


def test_taking_too_many_changes_nothing():
    pool, index = make_pool(5)
    pool.take(2)
    (kept,) = pool.take(1)
    name_chain(index, [kept])
    pool.give_back([kept])
    before = books(pool)
    with pytest.raises(InvariantError, match="more blocks were taken than are free"):
        pool.take(4)
    assert books(pool) == before
    assert kept in index
    assert pool.num_evicted == 0
    check(pool)


@pytest.mark.parametrize("extra", [[0, 0], [0, 1, 0], [2], [1, 2], [2, 1], [-1], [0, 99]])
def test_giving_back_too_often_changes_nothing(extra):
    pool, _ = make_pool(4)
    pool.take(2)
    before = books(pool)
    with pytest.raises(InvariantError, match="given back more often"):
        pool.give_back(extra)
    assert books(pool) == before
    check(pool)
    pool.give_back([0, 1])
    assert pool.num_free == 4


@pytest.mark.parametrize("named", [False, True])
def test_shared_block_twice_in_one_call_is_given_back_once(named):
    pool, index = make_pool(4)
    block = pool.take(1)
    if named:
        name_chain(index, block)
    pool.share(block)
    pool.give_back(block * 2)
    assert (pool.num_free, pool.num_cached) == (4 - named, named)
    check(pool)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("named", [False, True])
def test_cached_block_given_back_again_changes_nothing(named):
    pool, index = make_pool(4)
    block = pool.take(1)
    if named:
        name_chain(index, block)
    pool.give_back(block)
    before = books(pool)
    with pytest.raises(InvariantError, match="given back more often"):
        pool.give_back(block)
    assert books(pool) == before
    check(pool)


def test_shared_block_is_free_when_its_last_name_goes():
    pool, _ = make_pool(4)
    blocks = pool.take(2)
    pool.share(blocks)
    assert [pool.count(block) for block in blocks] == [2, 2]
    pool.give_back(blocks)
    assert pool.num_free == 2
    pool.give_back(blocks)
    assert pool.num_free == 4


@pytest.mark.parametrize("block_id", [3, -1, 4, 99])
def test_sharing_a_block_that_is_free_or_does_not_exist_changes_nothing(block_id):
    pool, _ = make_pool(4)
    taken = pool.take(2)
    before = books(pool)
    with pytest.raises(InvariantError, match="block that is free, or does not exist, was shared"):
        pool.share([*taken, block_id])
    assert books(pool) == before
    check(pool)


# Cached


def test_named_blocks_are_cached_when_nobody_uses_them():
    pool, index = make_pool(8)
    taken = pool.take(4)
    name_chain(index, taken[:3])
    pool.give_back(taken)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (5, 3, 0, 8)
    assert [pool.count(block_id) for block_id in taken] == [0] * 4
    check(pool)


def test_sharing_revives_cached_blocks():
    pool, index = make_pool(8)
    taken = pool.take(3)
    name_chain(index, taken)
    pool.give_back(taken)
    pool.share(taken)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.peak_used) == (5, 0, 3, 3)
    assert [pool.count(block_id) for block_id in taken] == [1] * 3
    pool.share([taken[0], taken[0]])
    assert pool.count(taken[0]) == 3
    check(pool)
    with pytest.raises(InvariantError):
        pool.take(6)


def test_free_blocks_are_taken_before_cached_ones():
    pool, index = make_pool(4)
    taken = pool.take(2)
    name_chain(index, taken)
    pool.give_back(taken)
    assert sorted(pool.take(2)) == [2, 3]
    assert pool.num_evicted == 0
    assert len(index) == 2


def test_least_recently_used_go_first_and_children_before_their_parents():
    pool, index = make_pool(6)
    first, second = pool.take(3), pool.take(3)
    name_chain(index, first, 10)
    name_chain(index, second, 20)
    pool.give_back(second)
    pool.give_back(first)
    pool.share(second[:1])  # used once more, after all others
    pool.give_back(second[:1])
    gone = []
    for _ in range(6):
        before = {block_id for block_id in range(6) if block_id in index}
        pool.take(1)
        gone += before - {block_id for block_id in range(6) if block_id in index}
        check(pool)
    assert gone == [second[2], second[1], first[2], first[1], first[0], second[0]]
    assert (pool.num_evicted, len(index), pool.num_used) == (6, 0, 6)


def test_no_more_is_evicted_than_is_missing():
    pool, index = make_pool(6)
    taken = pool.take(4)
    name_chain(index, taken)
    pool.give_back(taken)
    pool.take(3)
    assert (pool.num_evicted, pool.num_cached, pool.num_free) == (1, 3, 0)
    assert taken[3] not in index
    assert all(block_id in index for block_id in taken[:3])


def test_used_child_keeps_its_parents():
    """A leaf in use protects the whole way to it; what branches off the way does not stay."""
    pool, index = make_pool(5)
    trunk, leaf, other = pool.take(2), pool.take(1), pool.take(1)
    name_chain(index, trunk + leaf)
    index.find_or_add(index.node(trunk[1]), None, [99], [other[0]])
    pool.share(trunk)
    pool.give_back(trunk + other)
    pool.take(2)
    assert other[0] not in index
    assert all(block_id in index for block_id in trunk + leaf)
    with pytest.raises(InvariantError):
        pool.take(1)
    check(pool)
    pool.give_back(trunk + leaf)
    assert pool.num_cached == 3
    check(pool)


def test_evicted_blocks_are_remembered_and_forgotten_ones_are_not():
    pool, index = make_pool(2, num_remembered=10)
    taken = pool.take(2)
    name_chain(index, taken)
    pool.give_back(taken)
    pool.forget(index.node(taken[1]))
    pool.take(2)
    first = index.remembers(None, None, [0])
    assert first is not None
    assert index.remembers(first, None, [1]) is None


def test_forgotten_block_is_free_where_nobody_uses_it():
    pool, index = make_pool(4)
    taken = pool.take(2)
    name_chain(index, taken)
    pool.forget(index.node(taken[1]))
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 2)
    pool.give_back(taken)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.forget(index.node(taken[0]))
    assert (pool.num_free, pool.num_cached, len(index)) == (4, 0, 0)
    check(pool)


def test_forgetting_all_frees_what_was_cached_and_leaves_what_is_used():
    pool, index = make_pool(6)
    kept, used = pool.take(3), pool.take(2)
    name_chain(index, kept, 10)
    name_chain(index, used, 20)
    pool.give_back(kept)
    assert pool.forget_all() == 3
    assert (pool.num_free, pool.num_cached, pool.num_used, len(index)) == (4, 0, 2, 0)
    pool.give_back(used)
    assert pool.num_free == 6
    assert pool.forget_all() == 0
    check(pool)


# Growing and shrinking


def test_new_blocks_are_taken_after_those_there_are():
    pool, _ = make_pool(3, ceiling=6)
    pool.grow(5)
    assert (pool.total, pool.num_free) == (5, 5)
    assert pool.take(5) == [0, 1, 2, 3, 4]
    check(pool)


def test_pool_grows_to_its_ceiling_and_never_shrinks_by_growing():
    pool, _ = make_pool(3, ceiling=6)
    pool.grow(99)
    assert (pool.total, pool.ceiling, pool.num_free) == (6, 6, 6)
    pool.grow(2)
    assert pool.total == 6
    check(pool)


def test_ceiling_is_never_below_what_is_there():
    assert make_pool(5, ceiling=3)[0].ceiling == 5
    assert make_pool(5)[0].ceiling == 5


def test_compaction_maps_the_upper_live_blocks_to_the_lower_free_ones():
    pool, index = make_pool(8)
    taken = pool.take(8)
    name_chain(index, [taken[7], taken[5]])
    pool.share([6])
    pool.give_back([0, 2, 3, 7, 5])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 2, 3)
    names = index.node(7), index.node(5)
    moves = pool.compact(5)
    assert moves == {5: 0, 6: 2, 7: 3}
    assert (pool.total, pool.num_free, pool.num_cached, pool.num_used) == (5, 0, 2, 3)
    assert pool.count(2) == 2
    assert (index.node(3), index.node(0)) == names
    check(pool)
    assert pool.take(1) == [0]  # the child of the two, as before
    with pytest.raises(InvariantError):
        pool.share([5])


def test_compaction_changes_no_order_of_eviction():
    orders = []
    for compacted in (False, True):
        pool, index = make_pool(9)
        empty, *used = pool.take(4), pool.take(1), pool.take(3), pool.take(1)
        for number, block_ids in enumerate(used):
            name_chain(index, block_ids, number * 10)
        for block_ids in (used[2], used[0], used[1], empty):
            pool.give_back(block_ids)
        if compacted:
            pool.compact(5)
        pool.take(pool.num_free)
        order = []
        while pool.num_cached:
            before = {index.node(block_id) for block_id in range(9)}
            pool.take(1)
            order += [node.number for node in before - {index.node(block_id) for block_id in range(9)}]
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 5


def test_compaction_that_moves_nothing_drops_the_tail():
    pool, _ = make_pool(8)
    pool.take(3)
    assert pool.num_live_above(3) == 0
    assert pool.compact(3) == {}
    assert (pool.total, pool.num_free) == (3, 0)
    assert pool.compact(3) == {}
    check(pool)


@pytest.mark.parametrize("total", [0, 2, 9])
def test_compaction_that_cannot_be_changes_nothing(total):
    pool, index = make_pool(8, ceiling=12)
    taken = pool.take(4)
    name_chain(index, taken[:2])
    pool.give_back(taken[:2] + taken[3:])
    before = books(pool)
    with pytest.raises(InvariantError, match="3 of 8 blocks are live"):
        pool.compact(total)
    assert (books(pool), pool.total) == (before, 8)
    check(pool)


def test_live_blocks_above_a_size_are_those_that_move():
    pool, index = make_pool(8)
    taken = pool.take(8)
    name_chain(index, taken[6:7])
    pool.give_back([1, 2, 3, 5, 6])
    assert [pool.num_live_above(total) for total in (8, 7, 6, 5, 4)] == [0, 1, 2, 2, 3]
    assert len(pool.compact(4)) == 3


def test_pool_grows_again_after_compaction():
    pool, _ = make_pool(8)
    taken = pool.take(8)
    pool.give_back(taken[:6])
    assert pool.compact(3) == {6: 0, 7: 1}
    pool.grow(8)
    assert (pool.total, pool.num_free) == (8, 6)
    assert pool.take(6) == [2, 3, 4, 5, 6, 7]
    check(pool)


# Audit


def two_used_and_two_cached():
    pool, index = make_pool(6)
    taken = pool.take(4)
    name_chain(index, taken[:2])
    pool.give_back(taken[:2])
    return pool, index


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, index: pool._free.append(pool._free[0]),
        lambda pool, index: pool._free.append(99),
        lambda pool, index: pool._free.append(-1),
        lambda pool, index: pool._free.append(2),
        lambda pool, index: pool._free.append(0),
        lambda pool, index: pool._free.pop(),
        lambda pool, index: pool._counts.__setitem__(2, -1),
        lambda pool, index: pool._counts.__setitem__(2, 0),
        lambda pool, index: pool._counts.__setitem__(0, 1),
        lambda pool, index: pool._counts.append(0),
        lambda pool, index: pool._cached.__setitem__(99, None),
        lambda pool, index: pool._cached.__setitem__(3, None),
        lambda pool, index: pool._cached.pop(0),
        lambda pool, index: index.forget(1),
        lambda pool, index: index.find_or_add(None, None, [9], [pool._free[0]]),
        lambda pool, index: pool._cached.move_to_end(1),
        lambda pool, index: setattr(pool, "ceiling", 5),
        lambda pool, index: setattr(pool, "total", 7),
    ],
    ids=[
        "free twice",
        "free beyond the pool",
        "free below the pool",
        "free and used",
        "free and cached",
        "lost",
        "counted below zero",
        "no name and not free",
        "cached and used",
        "more counts than blocks",
        "cached beyond the pool",
        "cached without a name, and used",
        "named and neither cached nor used",
        "cached without a name",
        "free with a name",
        "parent evicted before its child",
        "above the ceiling",
        "fewer counts than blocks",
    ],
)
def test_check_finds_books_in_disorder(damage):
    pool, index = two_used_and_two_cached()
    check(pool)
    damage(pool, index)
    with pytest.raises(InvariantError):
        pool.check()


def test_memory_of_the_books_grows_with_the_pool():
    assert make_pool(10)[0].num_bytes() < make_pool(1000)[0].num_bytes() < 1000 * 100


# Whatever is asked


class NaivePool:
    """The same books, kept the simplest way: the cached ones in order, a count for each block, a set of named ones."""

    def __init__(self, total, ceiling):
        self.total, self.ceiling = total, ceiling
        self.counts, self.cached, self.named = dict.fromkeys(range(total), 0), [], set()

    @property
    def free(self):
        return {block_id for block_id, count in self.counts.items() if not count and block_id not in self.cached}

    def settle(self, block_id):
        if self.counts[block_id] == 0 and block_id in self.named:
            self.cached.append(block_id)

    def take(self, number):
        """Returns the blocks that may be taken, or None."""
        missing = max(0, number - len(self.free))
        if missing > len(self.cached):
            return None
        evicted, self.cached = self.cached[:missing], self.cached[missing:]
        self.named -= set(evicted)
        return self.free

    def share(self, blocks):
        if any(block_id not in self.counts or block_id in self.free for block_id in blocks):
            return False
        for block_id in blocks:
            self.cached = [other for other in self.cached if other != block_id]
            self.counts[block_id] += 1
        return True

    def give_back(self, blocks):
        if any(blocks.count(block_id) > self.counts.get(block_id, 0) for block_id in blocks):
            return False
        for block_id in reversed(blocks):
            self.counts[block_id] -= 1
            self.settle(block_id)
        return True

    def forget(self, block_id):
        self.named.discard(block_id)
        self.cached = [other for other in self.cached if other != block_id]

    def grow(self, total):
        for block_id in range(self.total, min(total, self.ceiling)):
            self.counts[block_id] = 0
        self.total = len(self.counts)

    def compact(self, total):
        """Returns the moves, or None."""
        live = sorted(set(self.counts) - self.free)
        if not len(live) <= total <= self.total:
            return None
        above = [block_id for block_id in live if block_id >= total]
        moves = dict(zip(above, sorted(self.free), strict=False))
        self.named = {moves.get(block_id, block_id) for block_id in self.named}
        self.cached = [moves.get(block_id, block_id) for block_id in self.cached]
        counts = {moves.get(block_id, block_id): self.counts[block_id] for block_id in live}
        self.counts = {block_id: counts.get(block_id, 0) for block_id in range(total)}
        self.total = total
        return moves


CALLS = st.sampled_from(["take", "take", "share", "give_back", "give_back", "name", "name", "forget", "forget_all", "grow", "compact"])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10), st.integers(0, 4), st.lists(st.tuples(CALLS, st.lists(st.integers(-1, 12), max_size=5)), max_size=40))
def test_any_calls_leave_the_books_in_order(total, more, calls):
    pool, index = make_pool(total, total + more)
    naive = NaivePool(total, total + more)
    token = 0
    for name, blocks in calls:
        number = len(blocks)
        there = [block_id for block_id in blocks if 0 <= block_id < pool.total]
        if name == "take":
            allowed = naive.take(number)
            if allowed is None:
                with pytest.raises(InvariantError):
                    pool.take(number)
            else:
                taken = pool.take(number)
                assert len(set(taken)) == number
                assert set(taken) <= allowed
                naive.counts.update(dict.fromkeys(taken, 1))
        elif name in ("share", "give_back"):
            if number % 2:
                blocks = there
            if getattr(naive, name)(blocks):
                getattr(pool, name)(blocks)
            else:
                with pytest.raises(InvariantError):
                    getattr(pool, name)(blocks)
        elif name == "name":
            for block_id in there:
                if naive.counts[block_id] and block_id not in naive.named:
                    token += 1
                    index.find_or_add(None, None, [token], [block_id])
                    naive.named.add(block_id)
        elif name == "forget":
            for block_id in set(there) & naive.named:
                pool.forget(index.node(block_id))
                naive.forget(block_id)
        elif name == "forget_all":
            assert pool.forget_all() == len(naive.cached)
            naive.named, naive.cached = set(), []
        elif name == "grow":
            pool.grow(pool.total + number - 2)
            naive.grow(naive.total + number - 2)
        else:
            wanted = max(0, pool.total + 1 - number)
            moves = naive.compact(wanted)
            if moves is None:
                with pytest.raises(InvariantError):
                    pool.compact(wanted)
            else:
                assert pool.num_live_above(wanted) == len(moves)
                assert pool.compact(wanted) == moves
        check(pool)
        assert books(pool) == (len(naive.free), len(naive.cached), [naive.counts[block_id] for block_id in range(naive.total)])
        assert {block_id for block_id in range(pool.total) if block_id in index} == naive.named
