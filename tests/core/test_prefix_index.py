"""The tree of prefixes is exact: no collision, no stale parent and no other tenant's tokens can pass for a hit."""

import gc
import random
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.core.prefix_index import PrefixIndex
from octavo.errors import InvariantError

SIZE = 4
A, B, C = [1] * SIZE, [2] * SIZE, [1, 1, 1, 2]


def make_index(num_remembered=0, block_size=SIZE):
    return PrefixIndex(block_size, num_remembered)


def add_chain(index, *blocks, scope=None, first_block=0):
    """Nodes for blocks of tokens one after the other."""
    nodes, node = [], None
    for block_id, tokens in enumerate(blocks, first_block):
        node = index.find_or_add(node, scope, tokens, [block_id])
        nodes.append(node)
    return nodes


# Finding


def test_what_was_added_is_found_and_nothing_else():
    index = make_index()
    first, second = add_chain(index, A, B)
    assert index.find(None, None, A) is first
    assert index.find(first, None, B) is second
    assert index.find(None, None, B) is None
    assert index.find(None, None, C) is None
    assert index.find(first, None, A) is None
    assert index.find(second, None, B) is None
    assert (len(index), 0 in index, 1 in index, 2 in index) == (2, True, True, False)
    assert (index.node(0), index.node(1), index.node(2)) == (first, second, None)
    index.check()


def test_first_block_of_the_same_tokens_stays():
    index = make_index()
    node = index.find_or_add(None, None, A, [5])
    assert index.find_or_add(None, None, A, [6]) is node
    assert node.block_ids[0] == 5
    assert 6 not in index
    index.check()


def test_same_tokens_after_different_parents_are_different():
    index = make_index()
    first, second = index.find_or_add(None, None, A, [0]), index.find_or_add(None, None, B, [1])
    children = index.find_or_add(first, None, C, [2]), index.find_or_add(second, None, C, [3])
    assert children[0] is not children[1]
    assert [index.find(parent, None, C).block_ids[0] for parent in (first, second)] == [2, 3]
    assert index.find(None, None, C) is None
    assert len({first.chain, second.chain, *(child.chain for child in children)}) == 4
    index.check()


@pytest.mark.parametrize("place", range(SIZE))
def test_every_token_counts(place):
    index = make_index()
    parent = index.find_or_add(None, None, A, [0])
    index.find_or_add(parent, None, A, [1])
    other = list(A)
    other[place] += 1
    assert index.find(None, None, other) is None
    assert index.find(parent, None, other) is None


def test_largest_tokens_and_long_chains_are_told_apart():
    index = make_index(block_size=1)
    node = None
    for place in range(300):  # numbers beyond one byte
        node = index.find_or_add(node, None, [2**31 - 1 - place % 2], [place])
    index.check()
    node = None
    for place in range(300):
        assert index.find(node, None, [2**31 - 2 + place % 2]) is None
        node = index.find(node, None, [2**31 - 1 - place % 2])
        assert node.block_ids[0] == place


SCOPES = [
    None,
    ("adapter", None),
    (None, "salt"),
    ("adapter", "salt"),
    ("salt", "adapter"),
    (None, "adapter"),
    ("salt", None),
    ("other", "salt"),
]


def test_scopes_never_meet():
    index = make_index()
    for block_id, scope in enumerate(SCOPES):
        assert index.find(None, scope, A) is None
        index.find_or_add(None, scope, A, [block_id])
    roots = [index.find(None, scope, A) for scope in SCOPES]
    assert [root.block_ids[0] for root in roots] == list(range(len(SCOPES)))
    children = [index.find_or_add(root, scope, B, [100 + root.block_ids[0]]) for root, scope in zip(roots, SCOPES, strict=True)]
    assert [child.block_ids[0] for child in children] == list(range(100, 100 + len(SCOPES)))
    assert len({node.chain for node in roots + children}) == 2 * len(SCOPES)
    index.check()


def test_scope_that_looks_like_tokens_is_a_scope():
    index = make_index(num_remembered=10)
    first, _ = add_chain(index, A, B)
    packed = [struct.pack(f"q{SIZE}i", number, *A) for number in (0, first.number)]
    for block_id, scope in enumerate([(None, text.decode("latin-1")) for text in packed] + [(repr(packed[0]), None), ("None", "None")], 10):
        assert index.find(None, scope, A) is None
        assert index.find(None, scope, B) is None
        assert index.find_or_add(None, scope, A, [block_id]).block_ids[0] == block_id
    assert index.find(None, None, A) is first
    index.check()


def hash_everything_alike(monkeypatch):
    class Packed(bytes):
        __slots__ = ()

        def __hash__(self):
            return 1

    class Scoped(tuple):
        __slots__ = ()

        def __hash__(self):
            return 1

    key = PrefixIndex._key
    monkeypatch.setattr(PrefixIndex, "_key", lambda *asked: Scoped(made) if isinstance(made := key(*asked), tuple) else Packed(made))


def test_equal_hashes_are_no_hit_and_forgetting_one_leaves_the_others(monkeypatch):
    hash_everything_alike(monkeypatch)
    index = make_index()
    one, other = index.find_or_add(None, None, A, [0]), index.find_or_add(None, None, B, [1])
    salted = index.find_or_add(None, (None, "salt"), A, [2])
    child = index.find_or_add(one, None, A, [3])
    assert {hash(key) for key in index._nodes} == {1}
    assert len({one, other, salted, child}) == 4
    assert index.find(None, None, C) is None
    assert index.find(other, None, A) is None
    index.check()
    index.forget(child.block_ids[0])
    index.forget(one.block_ids[0])
    assert index.find(None, None, A) is None
    assert index.find(None, None, B) is other
    assert index.find(None, (None, "salt"), A) is salted
    index.forget(1)
    assert index.find(None, (None, "salt"), A) is salted
    index.check()


# Forgetting


def test_numbers_are_never_used_again():
    index, seen = make_index(), set()
    for turn in range(50):
        nodes = add_chain(index, A, B, C) if turn % 3 else add_chain(index, B, scope=(None, "salt"))
        assert not seen & {node.number for node in nodes}
        seen |= {node.number for node in nodes}
        if turn % 5 == 0:
            index.clear()
        for node in reversed(nodes):
            if node.block_ids[0] in index:
                index.forget(node.block_ids[0])
    assert len(index) == 0


def test_stale_parent_never_matches_after_its_block_was_used_again():
    """Held over an eviction: same block, same tokens even, and yet another node."""
    index = make_index()
    pool = BlockPool(2, index)
    taken = pool.take(2)
    stale, child = add_chain(index, A, B, first_block=taken[0])
    pool.give_back(taken)
    taken = pool.take(2)
    again = index.find_or_add(None, None, A, [stale.block_ids[0]])
    assert again.number != stale.number
    assert index.find(stale, None, B) is None
    assert index.find(child, None, B) is None
    fresh = index.find_or_add(again, None, B, [child.block_ids[0]])
    assert index.find(stale, None, B) is None
    assert index.find(again, None, B) is fresh
    index.check()


def test_children_are_counted():
    index = make_index()
    (root,) = add_chain(index, A)
    children = [index.find_or_add(root, None, [token] * SIZE, [10 + token]) for token in range(3)]
    index.find_or_add(root, None, [0] * SIZE, [99])
    assert root.num_children == 3
    for child in children:
        index.forget(child.block_ids[0])
    assert root.num_children == 0
    index.forget(root.block_ids[0])
    assert len(index) == 0
    index.check()


def test_move_changes_the_block_and_no_key():
    index = make_index()
    first, second, third = add_chain(index, A, B, C, first_block=10)
    keys = [node.key for node in (first, second, third)]
    index.move(11, 3)
    index.move(10, 11)
    index.move(99, 4)  # a block without a name moves too
    assert [node.block_ids[0] for node in (first, second, third)] == [11, 3, 12]
    assert [node.key for node in (first, second, third)] == keys
    assert index.find(index.find(None, None, A), None, B) is second
    assert (index.node(3), index.node(11), index.node(10), index.node(4)) == (second, first, None, None)
    index.check()
    for block_id in (12, 3, 11):
        index.forget(block_id)
    assert len(index) == 0


def test_clear_forgets_everything_and_all_can_be_added_anew():
    index = make_index(num_remembered=10)
    old = add_chain(index, A, B, C)
    index.forget(2)
    index.clear()
    assert len(index) == 0
    assert index.find(None, None, A) is None
    assert index.remembers(old[1].chain, None, C) is None
    index.check()
    new = add_chain(index, A, B, C)
    assert not {node.number for node in new} & {node.number for node in old}
    assert index.find(old[0], None, B) is None
    index.check()


# What was forgotten


def test_forgotten_chain_is_remembered_block_by_block():
    index = make_index(num_remembered=10)
    nodes = add_chain(index, A, B, C, scope=(None, "salt"))
    assert index.remembers(None, (None, "salt"), A) is None
    for node in reversed(nodes):
        index.forget(node.block_ids[0])
    chain = None
    for node, tokens in zip(nodes, (A, B, C), strict=True):
        chain = index.remembers(chain, (None, "salt"), tokens)
        assert chain == node.chain
    assert index.remembers(chain, (None, "salt"), A) is None
    assert index.remembers(None, (None, "other"), A) is None
    assert index.remembers(None, None, A) is None
    assert index.remembers(None, (None, "salt"), B) is None


def test_chain_of_a_node_stands_for_its_tokens_whatever_its_number():
    index = make_index(num_remembered=10)
    chains = []
    for _ in range(2):
        nodes = add_chain(index, A, B)
        chains.append([node.chain for node in nodes])
        for node in reversed(nodes):
            index.forget(node.block_ids[0])
    assert chains[0] == chains[1]
    assert len(set(chains[0])) == 2


def test_blocks_found_again_after_a_match_are_remembered_from_there():
    """Only the end of a chain is gone, as after an eviction."""
    index = make_index(num_remembered=10)
    first, second, third = add_chain(index, A, B, C)
    index.forget(third.block_ids[0])
    index.forget(second.block_ids[0])
    chain = index.remembers(first.chain, None, B)
    assert chain == second.chain
    assert index.remembers(chain, None, C) == third.chain
    assert index.remembers(None, None, A) is None


def roots(index, tokens):
    return [token for token in tokens if index.remembers(None, None, [token] * SIZE) is not None]


def test_latest_are_remembered_up_to_the_bound():
    index = make_index(num_remembered=3)
    for token in range(5):
        index.find_or_add(None, None, [token] * SIZE, [token])
        index.forget(token)
    assert roots(index, range(5)) == [2, 3, 4]
    index.find_or_add(None, None, [2] * SIZE, [2])
    index.forget(2)  # once more, and so the latest
    index.find_or_add(None, None, [9] * SIZE, [9])
    index.forget(9)
    assert roots(index, range(10)) == [2, 4, 9]


@pytest.mark.parametrize("num_remembered", [0, 5])
def test_what_is_not_to_be_remembered_is_not(num_remembered):
    index = make_index(num_remembered)
    for token in range(3):
        index.find_or_add(None, None, [token] * SIZE, [token])
        index.forget(token, remember=bool(num_remembered) and token == 1)
    assert roots(index, range(3)) == ([1] if num_remembered else [])


# Memory and audit


def trees(num_nodes):
    """Chains of up to fifty blocks of sixteen tokens, which share their beginnings, as conversations do."""
    source, made = random.Random(1), 0
    while made < num_nodes:
        length = min(source.randint(1, 50), num_nodes - made)
        yield [[source.randrange(50_000) for _ in range(16)] for _ in range(length)]
        made += length


@pytest.mark.parametrize("scope", [None, (None, "salt")])
@pytest.mark.parametrize("remembered", [0, 10_000])
def test_memory_is_told_as_the_interpreter_counts_it(scope, remembered):
    chains = list(trees(10_000))
    index = make_index(remembered, block_size=16)
    block_ids = list(range(2**20, 2**20 + 20_000))  # held by pool and tables anyway
    gc.collect()
    tracemalloc.start()
    try:
        place = 0
        if remembered:
            for blocks in chains:
                for block_id in reversed([node.block_ids[0] for node in add_blocks(index, blocks, scope, block_ids, place)]):
                    index.forget(block_id)
        for blocks in chains:
            place += len(add_blocks(index, blocks, scope, block_ids, place))
        gc.collect()
        counted, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 10_000
    assert counted * 0.7 <= index.num_bytes() <= counted * 1.3


def add_blocks(index, blocks, scope, block_ids, place):
    nodes, node = [], None
    for number, tokens in enumerate(blocks, place):
        node = index.find_or_add(node, scope, tokens, [block_ids[number]])
        nodes.append(node)
    return nodes


def test_memory_of_an_empty_index_is_small():
    assert 0 < make_index().num_bytes() < 1000


@pytest.mark.parametrize(
    "damage",
    [
        lambda index, first, second: setattr(second, "block_ids", [7]),
        lambda index, first, second: setattr(first, "num_children", 2),
        lambda index, first, second: setattr(first, "num_children", 0),
        lambda index, first, second: index.forget(first.block_ids[0]),
        lambda index, first, second: index._by_block.pop(second.block_ids[0]),
        lambda index, first, second: index._nodes.pop(second.key),
        lambda index, first, second: index._by_block.__setitem__(7, second),
        lambda index, first, second: setattr(second, "key", first.key),
        lambda index, first, second: index._nodes.__setitem__(second.key, first),
    ],
    ids=[
        "another block",
        "too many children",
        "too few children",
        "parent gone",
        "block without a name",
        "name without a node",
        "two blocks of one node",
        "another's key",
        "found under another's key",
    ],
)
def test_check_finds_a_tree_in_disorder(damage):
    index = make_index()
    first, second = add_chain(index, A, B)
    index.check()
    damage(index, first, second)
    with pytest.raises(InvariantError):
        index.check()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "find", "forget", "move", "clear"]),
            st.sampled_from([None, (None, "x"), ("x", None)]),
            st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=4),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_any_calls_keep_the_index_what_a_plain_table_of_prefixes_is(calls):
    """Against a dict from everything that stands before, and scope, to the block."""
    index, naive, free, handed_out = make_index(block_size=2), {}, list(range(300)), set()
    for name, scope, blocks, number in calls:
        path = tuple(blocks)
        if name in ("add", "find"):
            node = None
            for end in range(1, len(path) + 1):
                known = naive.get((scope, path[:end]))
                found = index.find(node, scope, list(path[end - 1]))
                assert (found.block_ids[0] if found else None) == known
                if known is None:
                    if name == "find":
                        break
                    block_id = free.pop(0)
                    found = index.find_or_add(node, scope, list(path[end - 1]), [block_id])
                    naive[scope, path[:end]] = block_id
                    assert found.number not in handed_out
                    handed_out.add(found.number)
                node = found
        elif name == "forget" and naive:
            leaves = [key for key in naive if not any(key[0] == other[0] and other[1][:-1] == key[1] for other in naive)]
            index.forget(naive.pop(leaves[number % len(leaves)]))
        elif name == "move" and naive:
            key = list(naive)[number % len(naive)]
            target = free.pop(0)
            index.move(naive[key], target)
            naive[key] = target
        elif name == "clear" and number > 20:
            index.clear()
            naive.clear()
        index.check()
        assert sorted(naive.values()) == [block_id for block_id in range(300) if block_id in index]
        assert len(index) == len(naive)
