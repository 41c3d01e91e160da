"""The simulated executor lets no breach of the plan's contract pass; on that the scheduler's tests rest."""

import msgspec
import pytest

from octavo.executor.simulated import ContractError, SimulatedClock, SimulatedExecutor, hashed_token, simulated_capacity
from octavo.plan import HOLE, Assignment, BlockCopy, Row, StepPlan, TableUpdate, Tier
from octavo.sampling_params import SamplingParams


def assignment(history=(1, 2, 3, 4, 5), prompt_length=None, **values):
    history = list(history)
    length = len(history) if prompt_length is None else prompt_length
    return Assignment(params=SamplingParams(), seed=1, history=history, prompt_length=length, **values)


def scored(history=(1, 2, 3, 4, 5), **values):
    return msgspec.structs.replace(assignment(history, **values), params=SamplingParams(prompt_logprobs=0))


def row(slot=0, start=5, count=1, blocks=None, at=0, num_logits=1, **values):
    tables = [] if blocks is None else [TableUpdate(at, list(blocks))]
    return Row(slot=slot, start=start, count=count, num_logits=num_logits, tables=tables, **values)


def first_row(slot=0, blocks=(0, 1), **values):
    return row(**{"slot": slot, "start": 0, "count": 5, "blocks": blocks, "assign": assignment()} | values)


def plan(step, *rows, released=(), copies=(), pool_blocks=8):
    return StepPlan(step=step, pool_blocks=pool_blocks, released=list(released), copies=list(copies), rows=list(rows))


def make_executor(**values):
    capacity = {name: values.pop(name) for name in ("committed_blocks",) if name in values}
    return SimulatedExecutor(simulated_capacity(8, 4, vocab_size=100, swap_blocks=2, **capacity), **values)


def test_good_plans_pass_and_are_answered():
    executor = make_executor()
    first = executor.execute(plan(1, first_row(), first_row(1, (2, 3))))
    second = executor.execute(plan(2, row(), row(1)))
    assert [answer.token_ids for answer in first.rows] == [[hashed_token(1, 0, 0, 100)]] * 2
    assert [answer.token_ids for answer in second.rows] == [[hashed_token(1, 0, 1, 100)]] * 2
    assert executor.history(0) == [1, 2, 3, 4, 5, *first.rows[0].token_ids, *second.rows[0].token_ids]
    assert executor.table(1) == [2, 3]
    executor.execute(plan(3, first_row(0, (0, 1)), released=[0]))
    assert executor.assigned_slots == {0, 1}
    assert executor.execute(plan(4)).rows == []
    assert not executor.breaches


def copy(source, target, source_tier=Tier.DEVICE, target_tier=Tier.DEVICE):
    return BlockCopy(source_tier, source, target_tier, target)


BREACHES = {
    "row for an unassigned slot": plan(2, row(3, blocks=[4, 5])),
    "row for a released slot": plan(2, row(), released=[0]),
    "release of an unassigned slot": plan(2, row(), released=[4]),
    "slot assigned without release": plan(2, first_row(0, (4, 5))),
    "slot with two rows": plan(2, row(), row()),
    "start before what is computed": plan(2, row(start=4, count=2)),
    "start past what is computed": plan(2, row(start=6)),
    "tokens that nobody knows": plan(2, row(count=2)),
    "no tokens": plan(2, row(count=0)),
    "positions outside the block table": plan(2, row(count=4, token_ids=[1, 1, 1])),
    "block beyond the committed pool": plan(2, row(blocks=[6], at=2), pool_blocks=6),
    "negative block": plan(2, row(blocks=[-2], at=2)),
    "more blocks than there are": plan(2, row(), pool_blocks=9),
    "table change past the table's end": plan(2, row(blocks=[4], at=3)),
    "block that another live slot holds": plan(2, row(blocks=[3], at=1), row(1)),
    "write into a hole": plan(2, row(blocks=[HOLE], at=1)),
    "new slot takes a live slot's block": plan(2, first_row(2, (4, 0)), row()),
    "pending where all is reported": plan(2, row(pending=1)),
    "no logits where a sample is due": plan(2, row(num_logits=0)),
    "more logits than the row needs": plan(2, row(num_logits=2)),
    "logits in the middle of a prompt": plan(2, first_row(2, (4, 5), count=3)),
    "drafts without logits for them": plan(2, row(count=3, draft_ids=[1, 2])),
    "empty history": plan(2, first_row(2, (4, 5), assign=assignment([], 0))),
    "prompt longer than the history": plan(2, first_row(2, (4, 5), assign=assignment(prompt_length=6))),
    "token outside the vocabulary": plan(2, first_row(2, (4, 5), assign=assignment([1, 2, 3, 4, 100]))),
    "cached tokens that the block does not hold": plan(2, first_row(2, (4, 5), start=4, count=1)),
    "table without blocks": plan(2, first_row(2, None)),
    "step that repeats": plan(1, row()),
    "copy of a block that holds nothing": plan(2, row(), copies=[copy(7, 6)]),
    "copy out of a block that holds nothing": plan(2, row(), copies=[copy(0, 0, source_tier=Tier.HOST)]),
    "copy into a block that is not there": plan(2, row(), copies=[copy(0, 8)]),
    "copy into a block past the pool": plan(2, row(), copies=[copy(0, 6)], pool_blocks=6),
    "copy out of a block past the pool": plan(2, row(), copies=[copy(3, 1)], pool_blocks=3),
    "copy into a host block that is not there": plan(2, row(), copies=[copy(0, 2, target_tier=Tier.HOST)]),
    "copy of a negative block": plan(2, row(), copies=[copy(-1, 4)]),
    "copies in an order that reads before it writes": plan(2, row(), copies=[copy(1, 4, Tier.HOST), copy(0, 1, target_tier=Tier.HOST)]),
    "prompt logprobs that nobody asked": plan(2, first_row(2, (4, 5), num_logits=5)),
    "prompt logprobs of more tokens than the row has": plan(2, first_row(2, (4, 5), num_logits=6, assign=scored())),
    "prompt logprobs without the sample": plan(2, first_row(2, (4, 5), num_logits=0, assign=scored())),
    "prompt logprobs of a second answer": plan(2, first_row(2, (4, 5), num_logits=5, assign=scored(choice=1))),
    "sequence longer than the capacity": plan(2, first_row(2, (4, 5, 6), count=33, assign=assignment([1] * 33))),
}


@pytest.mark.parametrize("bad", BREACHES.values(), ids=list(BREACHES))
def test_breach_is_refused(bad):
    executor = make_executor()
    executor.execute(plan(1, first_row(), first_row(1, (2, 3))))
    with pytest.raises(ContractError):
        executor.execute(bad)
    assert len(executor.breaches) == 1


def test_stale_block_is_not_read():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (0, 1))))
    executor.execute(plan(2, first_row(1, (1, 0), assign=assignment([9] * 5)), released=[0]))
    with pytest.raises(ContractError, match="another sequence's tokens"):
        executor.execute(plan(3, row(1, blocks=[3, 0])))


def test_cached_and_copied_blocks_are_read_where_they_hold_the_same_tokens():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (0, 1))))
    copies = [copy(1, 0, target_tier=Tier.HOST), copy(0, 5, Tier.HOST)]
    executor.execute(plan(2, row(), first_row(1, (0, 2), start=4, count=1), copies=copies))
    executor.execute(plan(3, row(1, 5, 1, (5,), at=1)))
    assert not executor.breaches


def test_block_may_be_in_the_table_of_a_slot_without_a_row():
    """Its next row will change that table, as where a shared tail was copied, or blocks were moved."""
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (0, 1)), first_row(1, (2, 3))))
    executor.execute(plan(2, first_row(2, (4, 1), assign=assignment([9] * 5))))
    executor.execute(plan(3, row(2)))
    with pytest.raises(ContractError, match="another sequence's tokens"):
        executor.execute(plan(4, row(0)))


# The pool


def test_table_or_copy_names_committed_blocks_only():
    for bad in (
        plan(2, row(blocks=[4], at=2)),
        plan(2, row(), copies=[copy(0, 4)]),
        plan(2, first_row(2, (3, 7))),
    ):
        executor = make_executor(committed_blocks=4, commit_limit=4)
        executor.execute(plan(1, first_row(0, (0, 1))))
        with pytest.raises(ContractError, match="of 4"):
            executor.execute(bad)


def test_pool_grows_beside_the_work_and_at_once_where_there_is_none():
    executor = make_executor(committed_blocks=2, commits_per_step=2)
    assert executor.execute(plan(1, first_row(0, (0, 1)))).committed_blocks == 4
    assert executor.execute(plan(2, row())).committed_blocks == 6
    assert executor.execute(plan(3)).committed_blocks == 8
    assert executor.execute(plan(4)).committed_blocks == 8


def test_growth_stops_at_its_limit_and_says_so():
    executor = make_executor(committed_blocks=2, commit_limit=5)
    granted = executor.execute(plan(1, first_row(0, (0, 1)), pool_blocks=5))
    assert (granted.committed_blocks, granted.growth_refused) == (5, None)
    refused = executor.execute(plan(2, row(), pool_blocks=7))
    assert (refused.committed_blocks, refused.growth_refused) == (5, "7 blocks are wanted and memory is there for 5")
    assert executor.execute(plan(3, row(start=6), pool_blocks=5)).growth_refused is None


def test_pool_that_shrinks_drops_what_the_tail_held():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (0, 5))))
    assert executor.execute(plan(2, pool_blocks=4)).committed_blocks == 4
    assert executor.execute(plan(3)).committed_blocks == 8
    with pytest.raises(ContractError, match="another sequence's tokens"):
        executor.execute(plan(4, row()))


def test_block_given_back_is_not_written():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (0, 5), count=4, num_logits=0)))
    executor.execute(plan(2, pool_blocks=4))
    with pytest.raises(ContractError):
        executor.execute(plan(3, row(start=4), pool_blocks=4))


def test_blocks_that_moved_before_the_pool_shrank_are_read_where_they_are():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (6, 7)), first_row(1, (2, 3))))
    executor.execute(plan(2, copies=[copy(6, 0), copy(7, 1)]))
    executor.execute(plan(3, row(0, blocks=(0, 1)), pool_blocks=4))
    executor.execute(plan(4, row(0, start=6), row(1), pool_blocks=4))
    assert executor.table(0) == [0, 1]
    assert not executor.breaches


def test_host_blocks_keep_what_they_hold_while_the_pool_shrinks():
    executor = make_executor()
    executor.execute(plan(1, first_row(0, (6, 7))))
    executor.execute(plan(2, copies=[copy(6, 0, target_tier=Tier.HOST), copy(7, 1, target_tier=Tier.HOST)]))
    executor.execute(plan(3, released=[0], pool_blocks=2))
    back = [copy(0, 1, Tier.HOST), copy(1, 0, Tier.HOST)]
    history = assignment([*range(1, 6), hashed_token(1, 0, 0, 100)], 5)
    executor.execute(plan(4, row(0, 5, 1, (1, 0), assign=history), copies=back, pool_blocks=2))
    assert not executor.breaches


# Prompt logprobs


def places(result):
    """The prompt places scored: a simulated token's logprob is its place, negative."""
    return [[(one.token_id, -one.logprob) for one in scores] for scores in result.rows[0].prompt_logprobs or []]


def test_prompt_is_scored_in_chunks_up_to_its_last_token():
    executor = make_executor()
    prompt = scored([11, 12, 13, 14, 15])
    first = executor.execute(plan(1, first_row(count=3, num_logits=3, assign=prompt)))
    assert (places(first), first.rows[0].token_ids) == ([[(12, 1)], [(13, 2)], [(14, 3)]], [])
    last = executor.execute(plan(2, row(start=3, count=2, num_logits=2)))
    assert places(last) == [[(15, 4)]]
    assert last.rows[0].token_ids == [hashed_token(1, 0, 0, 100)]
    assert executor.execute(plan(3, row())).rows[0].prompt_logprobs is None


def test_only_the_positions_asked_are_scored():
    executor = make_executor()
    executor.execute(plan(1, first_row(count=2, num_logits=0, assign=scored())))
    assert places(executor.execute(plan(2, row(start=2, count=3, num_logits=2)))) == [[(5, 4)]]


def test_pending_counts_what_is_in_flight():
    executor = make_executor()
    executor.submit(plan(1, first_row()))
    executor.submit(plan(2, row(pending=1)))
    with pytest.raises(ContractError, match="third in flight"):
        executor.submit(plan(3, row(start=6, pending=1)))
    assert [executor.collect().step, executor.collect().step] == [1, 2]
    executor.submit(plan(3, row(start=6)))
    with pytest.raises(ContractError, match="1 unreported samples and its row says 0"):
        executor.submit(plan(4, row(start=7)))


def test_right_drafts_are_accepted_up_to_the_first_wrong_one():
    executor = make_executor()
    executor.execute(plan(1, first_row()))
    right = [hashed_token(1, 0, place, 100) for place in range(1, 4)]
    result = executor.execute(plan(2, row(count=3, num_logits=3, draft_ids=[right[0], 99 - right[1]])))
    assert result.rows[0].token_ids == right[:2]
    executor.execute(plan(3, row(start=7)))


def test_failing_row_is_useless_once_it_was_reported():
    executor = make_executor(row_error=lambda row, assignment: "broken" if row.slot == 0 else None)
    executor.submit(plan(1, first_row(), first_row(1, (2, 3))))
    executor.submit(plan(2, row(pending=1), row(1, pending=1)))
    for _ in range(2):
        answers = executor.collect().rows
        assert [answer.error for answer in answers] == ["broken", None]
    with pytest.raises(ContractError, match="goes on although 'broken' was reported"):
        executor.execute(plan(3, row(start=6)))


def test_failing_step_raises_when_collected_and_the_executor_goes_on():
    executor = make_executor(step_error=lambda plan: OSError("gone") if plan.step == 1 else None)
    executor.submit(plan(1, first_row()))
    executor.submit(plan(2, row(pending=0), first_row(1, (2, 3))))
    with pytest.raises(OSError, match="gone"):
        executor.collect()
    assert [bool(answer.error) for answer in executor.collect().rows] == [True, False]
    executor.execute(plan(3, first_row(0, (0, 1)), row(1), released=[0]))


def test_simulated_time_passes_by_step_and_token():
    clock = SimulatedClock(100.0)
    executor = make_executor(seconds_per_step=0.5, seconds_per_token=0.25, clock=clock)
    result = executor.execute(plan(1, first_row(), first_row(1, (2, 3))))
    assert result.forward_seconds == 0.5 + 10 * 0.25
    assert clock() == 103.0


def test_supplied_tokens_are_given_what_was_asked_and_all_tokens_so_far():
    seen = []
    executor = make_executor(next_token=lambda asked, tokens: seen.append((asked.seed, list(tokens))) or 7)
    executor.execute(plan(1, first_row()))
    executor.execute(plan(2, row()))
    assert seen == [(1, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5, 7])]


def test_without_checks_the_answers_are_the_same():
    plans = [plan(1, first_row(), first_row(1, (2, 3))), plan(2, row(), row(1))]
    strict, loose = make_executor(), make_executor(verify=False)
    assert [strict.execute(one) for one in plans] == [loose.execute(one) for one in plans]
    assert loose.execute(plan(3, row(start=6, num_logits=2))).rows[0].token_ids
