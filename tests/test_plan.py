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
    copies=[BlockCopy(Tier.DEVICE, 4, Tier.HOST, 0), BlockCopy(Tier.HOST, 1, Tier.DEVICE, 5, 1)],
    rows=[
        Row(
            slot=3,
            start=16,
            count=4,
            num_logits=3,
            tables=[TableUpdate(1, [HOLE, 5, 6]), None],
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
        Row(slot=0, start=0, count=1, num_logits=0, tables=[None]),
    ],
)
RESULT = StepResult(
    step=7,
    rows=[
        RowResult(slot=3, token_ids=[1, 2], logprobs=[[Logprob(1, -0.5, 1)], []], prompt_logprobs=[[Logprob(2, -1.5, 3)]]),
        RowResult(slot=0, error="broken"),
    ],
    committed_blocks=99,
    forward_seconds=0.25,
    copy_seconds=0.5,
    copied_bytes=1024,
)
CAPACITY = Capacity(num_blocks=1, block_size=2, kv_bytes=3, longest=4, bound_by="the KV pool", vocab_size=5, dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
@pytest.mark.parametrize("value", [PLAN, RESULT, CAPACITY], ids=["plan", "result", "capacity"])
def test_encoding_keeps_everything(form, value):
    assert form.decode(form.encode(value), type=type(value)) == value


@pytest.mark.parametrize("value", [PLAN, PLAN.rows[0], PLAN.copies[0], RESULT, CAPACITY])
def test_plans_are_frozen(value):
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], 0)


def test_rows_do_not_share_their_defaults():
    first, second = (Row(slot=slot, start=0, count=1, num_logits=0, tables=[]) for slot in (0, 1))
    first.token_ids.append(1)
    assert second.token_ids == []


def test_two_plans_are_in_flight_at_most():
    assert MAX_IN_FLIGHT == 2
