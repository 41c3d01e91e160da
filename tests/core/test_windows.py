"""KV groups with windows: what a long sequence holds, what it gives back on the way, and what a hit needs."""

import pytest
from core_driver import Driver, expected
from test_kv_manager import begin, compute, make_manager, make_sequence, started

from octavo.errors import InvalidValueError
from octavo.kv_groups import cut_layers
from octavo.plan import HOLE, MAX_IN_FLIGHT

GEMMA3_270M = tuple(None if (layer + 1) % 6 == 0 else 512 for layer in range(18))
LAYER_BYTES = 2 * 1 * 256 * 2
"""Of one token: keys and values, one KV head of 256 features, in bfloat16."""


def memory_of_32k(windows, layers, context=32768, chunk=256, answer=256):
    """(at the peak, while it decodes): bytes of the blocks of one sequence, whose prompt is computed in chunks, two plans in flight."""
    manager = make_manager(40_000, 16, windows=windows, chunk=chunk)
    tokens = [place % 1000 for place in range(context)]
    sequence, prompt = begin(manager, tokens), context - answer
    ends = [*range(chunk, prompt + 1, chunk), *range(prompt + 1, context + 1)]
    for place, end in enumerate(ends):
        assert manager.allocate(sequence, end)
        sequence.num_scheduled = end
        if place:
            sequence.num_computed = ends[place - 1]  # the plan before has landed
            manager.name(sequence)
    manager.check([sequence], [])
    most, block_bytes = manager.groups.most(0, context), 16 * max(map(len, layers)) * LAYER_BYTES
    assert manager.pool.peak_used <= most <= manager.pool.peak_used + answer // 16 + len(windows)
    return manager.pool.peak_used * block_bytes, manager.pool.num_used * block_bytes


def test_memory_of_a_32k_sequence_of_gemma3_270m_with_and_without_groups():
    without = memory_of_32k((None,), [list(range(18))])
    groups = memory_of_32k(*cut_layers(GEMMA3_270M, 32768))
    for name, (peak, decoding) in {"one group": without, "six groups": groups}.items():
        print(f"{name}: {peak / 2**20:.1f} MiB at the peak, {decoding / 2**20:.1f} MiB while it decodes")
    assert without == (576 << 20, 576 << 20)
    # Three layers see all 32768 tokens; fifteen 512, and what chunks in flight add.
    assert 96 << 20 < groups[1] < 105 << 20
    assert groups[1] < groups[0] < 112 << 20


def test_blocks_behind_the_window_are_given_back_as_the_sequence_goes_on():
    manager = make_manager(64, 4, windows=(None, 8), chunk=4, prefix_caching=False)
    sequence = make_sequence([1] * 100)
    manager.begin(sequence, [])
    for end in range(4, 101, 4):
        compute(manager, sequence, end)
        everything, window = sequence.table.groups
        assert len(everything) == len(window) == end // 4
        assert HOLE not in everything
        # What was computed before the last blocks were taken tells what is behind.
        behind = max(0, end - 4 - 7) // 4
        assert [block_id == HOLE for block_id in window] == [place < behind for place in range(end // 4)]
        assert manager.pool.num_used == end // 4 + (end // 4 - behind)
    manager.free(sequence)
    assert manager.pool.num_free == 64


def test_a_window_on_every_layer_bounds_what_a_sequence_holds():
    manager = make_manager(8, 4, windows=(8,), chunk=4)
    sequence = begin(manager, range(200))
    for end in range(4, 201, 4):
        compute(manager, sequence, end)
    assert manager.pool.peak_used <= manager.groups.most(0, 200) <= 5


def long_one(manager, tokens):
    """A sequence that computes its tokens in chunks of 4 and ends."""
    sequence = begin(manager, tokens)
    for end in range(4, len(tokens) + 1, 4):
        compute(manager, sequence, end)
    manager.free(sequence)


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 8, 8)])
def test_a_hit_needs_of_windows_their_last_blocks_only(windows):
    manager = make_manager(12 * len(windows), 4, windows=windows, chunk=4)
    long_one(manager, range(41))
    sliding = sum(window is not None for window in windows)
    # The blocks behind the windows came to the cache first.
    manager.pool.give_back(manager.pool.take(manager.pool.num_free + 7 * sliding))
    sequence = begin(manager, range(60))
    assert sequence.num_computed == 40
    for window, ids in zip(windows, sequence.table.groups, strict=True):
        assert [block_id == HOLE for block_id in ids] == [window is not None and place < 8 for place in range(10)]
    assert manager.pool.num_used == 2 * sliding + 10 * (None in windows)
    manager.check([sequence], [])


def test_a_hit_ends_where_the_blocks_of_a_window_are_gone():
    manager = make_manager(24, 4, windows=(None, 8), chunk=4)
    long_one(manager, range(41))
    nodes = manager.match(make_sequence(range(41)))
    assert len(nodes) == 10
    manager.index.forget(nodes[9].block_ids[1])
    # After 10 blocks a token sees blocks 8 and 9, after 9 blocks 7 and 8.
    assert len(manager.match(make_sequence(range(41)))) == 9
    manager.index.forget(nodes[5].block_ids[1])
    assert [len(manager.match(make_sequence(range(length)))) for length in (22, 26, 30, 34)] == [5, 5, 5, 8]


def test_a_block_of_a_window_that_was_evicted_is_named_again_by_whoever_computes_it():
    manager = make_manager(40, 4, windows=(None, 8), chunk=4)
    long_one(manager, range(41))
    (node,) = [node for node in manager.match(make_sequence(range(41))) if node.number == 4]
    manager.pool.share([node.block_ids[1]])
    manager.index.forget(node.block_ids[1])
    manager.pool.give_back([manager.pool.take(1)[0]])
    assert node.block_ids[1] == HOLE
    assert len(manager.match(make_sequence(range(21)))) == 3
    other = started(manager, range(21))
    assert node.block_ids[1] == other.table.groups[1][3]
    assert other.table.groups[0][3] == node.block_ids[0]
    assert len(manager.match(make_sequence(range(21)))) == 5


def test_an_answer_whose_prompt_the_window_has_left_behind_is_no_one_to_fork_from():
    manager = make_manager(64, 4, windows=(None, 8), chunk=4)
    leader = begin(manager, range(60))
    for end in range(4, 41, 4):
        compute(manager, leader, end)
    assert manager.can_fork(leader, 39)
    assert manager.can_fork(leader, 36)
    assert not manager.can_fork(leader, 20)


@pytest.mark.parametrize("in_flight", [1, MAX_IN_FLIGHT])
@pytest.mark.parametrize(("windows", "fits"), [((8,), True), ((None, 8), True), ((None,), False)])
def test_a_request_fits_by_what_its_windows_let_it_hold(windows, fits, in_flight):
    driver = Driver(num_blocks=40, windows=windows, prefill_chunk_size=8, in_flight=in_flight)
    if not fits:
        with pytest.raises(InvalidValueError, match="may reach 180 tokens; the pool holds 160"):
            driver.add(prompt=[1] * 100, max_tokens=80)
        return
    tokens = 180 if None not in windows else 120
    sequence = driver.add(prompt=[1] * (tokens - 80), max_tokens=80)
    driver.run()
    assert sequence.output_token_ids == expected(sequence)
    assert driver.scheduler.stats().preemptions == 0


@pytest.mark.parametrize(("windows", "num_blocks"), [((40,), 30), ((None, 8), 44), ((None, 20, 4), 66)])
@pytest.mark.parametrize("swap_blocks", [0, 60])
def test_answers_of_one_request_and_others_in_a_small_pool(windows, num_blocks, swap_blocks):
    """Forked, preempted, swapped and shared, chunk by chunk."""
    driver = Driver(num_blocks=num_blocks, swap_blocks=swap_blocks, windows=windows, prefill_chunk_size=8, in_flight=2)
    sequences = [driver.add("answers", range(30), 20, n=3).request.sequences]
    sequences += [driver.add(f"{number}", [*range(30), number, *range(9)], 20).request.sequences for number in range(5)]
    driver.run()
    for sequence in (sequence for answers in sequences for sequence in answers):
        assert sequence.output_token_ids == expected(sequence)
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
