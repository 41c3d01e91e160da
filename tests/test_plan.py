"""Plans are plain data: everything in them survives encoding, whatever a later feature will fill in."""

import msgspec
import pytest

from octavo.plan import (
    HOLE,
    MAX_IN_FLIGHT,
    Assignment,
    BlockCopy,
    Capacity,
    Logprob,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TableUpdate,
    Tier,
)
from octavo.sampling_params import SamplingParams

PLAN = StepPlan(
    step=7,
    pool_blocks=100,
    released=[3, 1],
    copies=[BlockCopy(Tier.DEVICE, 4, Tier.HOST, 0), BlockCopy(Tier.HOST, 1, Tier.DEVICE, 5)],
    rows=[
        Row(
            slot=3,
            start=16,
            count=4,
            num_logits=3,
            tables=[TableUpdate(1, [HOLE, 5, 6]), TableUpdate(1, [7])],
            token_ids=[9, 8],
            pending=1,
            draft_ids=[1, 2],
            assign=Assignment(
                params=SamplingParams(temperature=0.5, top_k=3, seed=-(2**63), stop_token_ids=[1, 2], timeout_ms=2.5, max_tokens=None),
                seed=2**63 - 1,
                history=[1, 2, 3],
                prompt_length=2,
                choice=1,
                adapter="law",
                fork_source=0,
            ),
        ),
        Row(slot=0, start=0, count=1, num_logits=0, tables=[]),
    ],
)
RESULT = StepResult(
    step=7,
    rows=[
        RowResult(slot=3, token_ids=[1, 2], logprobs=[[Logprob(1, -0.5, 1)], []], prompt_logprobs=[[Logprob(2, -1.5, 3)]]),
        RowResult(slot=0, error="broken"),
    ],
    committed_blocks=99,
    growth_refused="100 are wanted and memory is there for 99",
    forward_seconds=0.25,
    copy_seconds=0.5,
    copied_bytes=1024,
)
CAPACITY = Capacity(
    num_blocks=64,
    committed_blocks=4,
    prealloc_blocks=16,
    block_size=16,
    block_bytes=1 << 19,
    longest=1024,
    bound_by="the KV pool",
    vocab_size=5,
    dtype="bfloat16",
    device="cpu",
    ceiling_by="max_blocks",
    swap_blocks=8,
)


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
@pytest.mark.parametrize("value", [PLAN, RESULT, CAPACITY], ids=["plan", "result", "capacity"])
def test_encoding_keeps_everything(form, value):
    assert form.decode(form.encode(value), type=type(value)) == value


FROZEN = [PLAN, PLAN.copies[0], PLAN.rows[0].tables[0], PLAN.rows[0].assign, RESULT, RESULT.rows[0].logprobs[0][0], CAPACITY]


@pytest.mark.parametrize("value", FROZEN, ids=lambda value: type(value).__name__)
def test_plans_are_frozen(value):
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], 0)


def test_rows_and_their_results_are_made_without_that_cost():
    """A row that no more than decodes is made in well under a microsecond; freezing it would cost a quarter of the core's time."""
    assert not Row.__struct_config__.frozen
    assert not RowResult.__struct_config__.frozen


def test_rows_do_not_share_their_defaults():
    first, second = (Row(slot=slot, start=0, count=1, num_logits=0, tables=[]) for slot in (0, 1))
    first.token_ids.append(1)
    assert second.token_ids == []


def test_two_plans_are_in_flight_at_most():
    assert MAX_IN_FLIGHT == 2


def test_capacity_tells_what_there_is_and_what_bounds_it():
    assert str(CAPACITY) == (
        "bfloat16 on cpu, 64 KV blocks of 16 tokens (32 MiB at most: max_blocks; 8 MiB from the start), 4 MiB of swap; "
        "a sequence may have 1024 tokens (the KV pool)"
    )
    plain = msgspec.structs.replace(CAPACITY, ceiling_by="", swap_blocks=0)
    assert str(plain) == (
        "bfloat16 on cpu, 64 KV blocks of 16 tokens (32 MiB at most; 8 MiB from the start); a sequence may have 1024 tokens (the KV pool)"
    )
