"""The worker at the level of plans: pool, tables, copies, scores and faults, on a tiny model whose rows can be told apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, EngineError
from octavo.plan import Assignment, BlockCopy, Row, RowResult, StepPlan, StepResult, TableUpdate, Tier
from octavo.sampling_params import SamplingParams
from octavo.worker import memory, runner
from octavo.worker.runner import Runner
from tests.models.test_tiny_checkpoints import ids, make
from tests.oracle import logits, make_runner

BLOCK = 8
GREEDY = SamplingParams(temperature=0)
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, "llama", {})
    return folder


class Hand:
    """Writes plans by hand for one runner, whose pool it keeps at `pool` blocks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.runner = make_runner(
            folder, **({"block_size": BLOCK, "max_blocks": 32, "prealloc_blocks": 32, "swap_space": 1 << 20} | settings)
        )
        self.pool = self.runner.capacity.committed_blocks
        self.number = 0

    def step(self, *rows: Row, copies: list[BlockCopy] | None = None, released: list[int] | None = None) -> StepResult:
        self.number += 1
        return self.runner.execute(
            StepPlan(step=self.number, pool_blocks=self.pool, released=released or [], copies=copies or [], rows=list(rows))
        )

    def prefill(self, slot: int, tokens: list[int], table: list[int], **row: Any) -> RowResult:
        return self.step(prefill(slot, tokens, table, **row)).rows[0]

    def decode(self, slot: int, start: int, count: int, table: list[int] | None = None) -> list[int]:
        """Up to `count` tokens of one slot, whose table changes once, at the first row."""
        found = []
        for place in range(start, start + count):
            found += self.step(one(slot, place, table)).rows[0].token_ids
            table = None
        return found

    @property
    def region(self) -> torch.Tensor:
        return self.runner._kv.region

    def answer(self, tokens: list[int], count: int = 6, table: list[int] | None = None) -> list[int]:
        """What the tokens alone give, greedily."""
        found = self.prefill(99, tokens, table or list(range(20, 26))).token_ids + self.decode(99, len(tokens), count - 1)
        self.step(released=[99])
        return found


def assign(tokens: list[int], params: SamplingParams = GREEDY, prompt_length: int | None = None, choice: int = 0) -> Assignment:
    return Assignment(params=params, seed=0, history=tokens, prompt_length=prompt_length or len(tokens), choice=choice)


def prefill(slot: int, tokens: list[int], table: list[int], **fields: Any) -> Row:
    row: dict[str, Any] = {"start": 0, "count": len(tokens), "num_logits": 1, "assign": assign(tokens)}
    return Row(slot=slot, tables=[TableUpdate(0, table)], **(row | fields))


def one(slot: int, place: int, table: list[int] | None = None, start: int = 0) -> Row:
    return Row(slot=slot, start=place, count=1, num_logits=1, tables=[] if table is None else [TableUpdate(start, table)])


def device(source: int, target: int) -> BlockCopy:
    return BlockCopy(Tier.DEVICE, source, Tier.DEVICE, target)


def out(source: int, target: int) -> BlockCopy:
    return BlockCopy(Tier.DEVICE, source, Tier.HOST, target)


def back(source: int, target: int) -> BlockCopy:
    return BlockCopy(Tier.HOST, source, Tier.DEVICE, target)


# The pool


def test_plans_without_rows_release_copy_grow_and_shrink(folder: Path) -> None:
    hand = Hand(folder, prealloc_blocks=4)
    assert (hand.runner.capacity.committed_blocks, hand.runner.capacity.num_blocks) == (4, 32)
    hand.prefill(0, ids(20), [0, 1, 2])
    assert hand.runner.mapping_bytes() > 0
    result = hand.step(released=[0])
    assert (result.rows, result.committed_blocks, result.copied_bytes, result.copy_seconds) == ([], 4, 0, 0.0)
    assert hand.runner.mapping_bytes() == 0
    hand.pool = 20
    result = hand.step(copies=[device(1, 19)])
    assert (result.committed_blocks, result.growth_refused) == (20, None)
    assert result.copied_bytes == hand.runner.capacity.block_bytes
    assert result.copy_seconds > 0
    assert torch.equal(hand.region[19], hand.region[1])
    hand.pool = 2
    assert hand.step().committed_blocks == 2
    assert not hand.region[2:].any()


def test_growth_goes_on_beside_the_rows(folder: Path) -> None:
    hand = Hand(folder, prealloc_blocks=4)
    first = hand.answer(ids(20), table=[0, 1, 2, 3])
    hand.pool = 32
    result = hand.step(prefill(0, ids(20), [0, 1, 2]))
    assert result.rows[0].token_ids == first[:1]
    while result.committed_blocks < 32:
        result = hand.step(one(0, 20))
        hand.step(prefill(0, ids(20), [0, 1, 2]), released=[0])
    assert hand.answer(ids(20), table=[31, 30, 29, 28]) == first


def test_a_refusal_is_reported_until_no_more_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(folder, prealloc_blocks=4)
    monkeypatch.setattr(memory, "available_memory", lambda: 10)
    hand.pool = 9
    for _ in range(2):
        result = hand.step()
        assert result.committed_blocks == 4
        assert str(result.growth_refused).startswith("the KV pool stays at 4 blocks")
    hand.pool = 4
    assert hand.step().growth_refused is None


def test_blocks_without_memory_are_refused_and_the_worker_goes_on(folder: Path) -> None:
    hand = Hand(folder, prealloc_blocks=4)
    with pytest.raises(EngineError, match="device block 4 of 4"):
        hand.prefill(0, ids(20), [0, 4, 1])
    with pytest.raises(EngineError, match="device block 5 of 4"):
        hand.step(prefill(0, ids(20), [0, 1, 2]), copies=[device(0, 5)])
    with pytest.raises(EngineError, match="host block 1000000 of"):
        hand.step(prefill(0, ids(20), [0, 1, 2]), copies=[out(0, 1000000)])
    hand.pool = 33
    with pytest.raises(EngineError, match="33 blocks is asked for and its ceiling is 32"):
        hand.step()
    hand.pool = 4
    assert len(hand.answer(ids(20), table=[3, 1, 0, 2])) == 6


def test_closing_gives_the_pool_back(folder: Path) -> None:
    hand = Hand(folder)
    view = hand.region[3]
    hand.prefill(0, ids(20), [3, 1, 2])
    assert view.any()
    hand.runner.close()
    assert not view.any()
    assert hand.runner.mapping_bytes() == 0


# Tables and copies


def test_a_shared_tail_is_copied_before_it_is_written(folder: Path) -> None:
    hand = Hand(folder)
    tokens = ids(20)
    first, second = [*tokens, 5], [*tokens, 9, 7]
    alone = [hand.answer(first), hand.answer(second)]
    assert alone[0] != alone[1]
    hand.prefill(0, tokens, [4, 7, 2])
    assert hand.step(released=[0]).rows == []
    # Both hold blocks 4 and 7; the tail goes to the second by copy, in the step in which both write theirs.
    results = hand.step(
        prefill(1, first, [4, 7, 2, 13], start=20, count=1),
        prefill(2, second, [4, 7, 11], start=20, count=2),
        copies=[device(2, 11)],
    ).rows
    found = [list(result.token_ids) for result in results]
    for place in range(5):
        rows = hand.step(one(1, 21 + place), one(2, 22 + place, [15] if place == 2 else None, 3)).rows
        for answer, result in zip(found, rows, strict=True):
            answer += result.token_ids
    assert found == alone


def test_tables_are_replaced_from_an_entry_on_after_blocks_moved(folder: Path) -> None:
    hand = Hand(folder)
    tokens = ids(40)
    alone = hand.answer(tokens, table=[20, 21, 22, 23, 24, 25])
    found = hand.prefill(0, tokens, [9, 30, 31, 12, 29, 28]).token_ids
    result = hand.step(one(0, 40, [3, 2, 12, 1, 0], 1), copies=[device(30, 3), device(31, 2), device(29, 1), device(28, 0)])
    with torch.inference_mode():
        hand.region[25:] = 0xFF  # NaN
    assert found + result.rows[0].token_ids + hand.decode(0, 41, 4) == alone


def test_long_tables_grow_in_place_and_are_measured(folder: Path) -> None:
    hand = Hand(folder, block_size=1, max_blocks=128, prealloc_blocks=128)
    tokens = ids(40)
    alone = hand.answer(tokens, 30, table=list(range(70)))
    found = hand.prefill(0, tokens, list(range(40, 80))).token_ids
    for place in range(40, 69):
        found += hand.step(one(0, place, [place + 40], place)).rows[0].token_ids
    assert found == alone
    (table,) = hand.runner._slots[0].tables
    assert table.tolist() == list(range(40, 109))
    header = sys.getsizeof(np.empty(0, dtype=np.int64))
    lists = 2 * sys.getsizeof([table])
    assert 69 * 8 + 2 * header + lists <= hand.runner.mapping_bytes() <= 2 * 69 * 8 + 2 * header + lists


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_out_and_in_again_a_sequence_goes_on_as_if_nothing_had_been(dtype: str, folder: Path) -> None:
    hand = Hand(folder, dtype=dtype)
    tokens, others = ids(30), ids(31)
    alone, other = hand.answer(tokens), hand.answer(others)
    found = hand.prefill(0, tokens, [4, 7, 2, 5]).token_ids
    # Its blocks go out and are another's in the same step.
    result = hand.step(
        prefill(1, others, [5, 2, 7, 4, 6]), copies=[out(block, place + 3) for place, block in enumerate([4, 7, 2, 5])], released=[0]
    )
    assert result.copied_bytes == 4 * hand.runner.capacity.block_bytes
    assert result.rows[0].token_ids + hand.decode(1, 31, 5) == other
    resumed = Row(
        slot=3, start=30, count=1, num_logits=1, tables=[TableUpdate(0, [17, 11, 2, 9, 8])], assign=assign(tokens + found, prompt_length=30)
    )
    result = hand.step(resumed, copies=[back(3, 17), back(4, 11), back(5, 2), back(6, 9)], released=[1])
    assert found + result.rows[0].token_ids + hand.decode(3, 31, 4) == alone


# Prompt logprobs


def expected_scores(table: torch.Tensor, tokens: list[int], count: int) -> list[list[tuple[int, Any, int]]]:
    scores = []
    for row, token_id in zip(table, tokens[1:], strict=False):
        values, exact = row.tolist(), row.double().log_softmax(-1).tolist()
        order = sorted(range(len(values)), key=lambda each: (-values[each], each))[:count]
        scores.append([(each, pytest.approx(exact[each], abs=2e-6), 1 + int((row > row[each]).sum())) for each in (token_id, *order)])
    return scores


def scores_in_chunks(hand: Hand, tokens: list[int], prompt_length: int, chunk: int, params: SamplingParams) -> tuple[Any, list[int]]:
    scores: list[Any] = []
    table = list(range(1, 15))
    sampled: list[int] = []
    for start in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - start)
        row = Row(slot=0, start=start, count=count, num_logits=count, tables=[])
        if start == 0:
            row = prefill(0, tokens, table, count=count, num_logits=count, assign=assign(tokens, params, prompt_length))
        # A neighbour in every step, and one that wants no logits at all.
        result = hand.step(row, prefill(1, ids(9), [20, 21]), prefill(2, ids(12), [22, 23], num_logits=0))
        scores += result.rows[0].prompt_logprobs or []
        sampled += result.rows[0].token_ids
        assert len(result.rows[1].token_ids) == 1
        assert (result.rows[2].token_ids, result.rows[2].prompt_logprobs) == ([], None)
    hand.step(released=[0, 1, 2])
    return [[(each.token_id, each.logprob, each.rank) for each in line] for line in scores], sampled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("known", [100, 107], ids=["fresh", "resumed"])
def test_prompt_logprobs_are_those_of_the_logits_in_any_chunking(known: int, dtype: str, folder: Path) -> None:
    tokens = ids(known)
    hand = Hand(folder, dtype=dtype)
    table = logits(make_runner(folder, block_size=BLOCK, dtype=dtype), tokens)
    expected = expected_scores(table[:99], tokens, 5)
    whole, _ = scores_in_chunks(hand, tokens, 100, known, SamplingParams(temperature=0, prompt_logprobs=5))
    assert whole == expected
    for chunk in (known, 1, 7, 16):
        scores, sampled = scores_in_chunks(hand, tokens, 100, chunk, SamplingParams(temperature=0, prompt_logprobs=5))
        assert scores == whole
        assert sampled == [int(table[-1].argmax())]
    scores, _ = scores_in_chunks(hand, tokens, 100, known, SamplingParams(prompt_logprobs=0))
    assert scores == [line[:1] for line in expected]


def test_only_the_first_answer_and_only_the_positions_asked_for_are_scored(folder: Path) -> None:
    hand = Hand(folder)
    tokens, params = ids(30), SamplingParams(temperature=0, prompt_logprobs=2)
    token_id = hand.answer(tokens)[:1]
    table = [0, 1, 2, 3]
    assert hand.prefill(0, tokens, table, num_logits=30, assign=assign(tokens, params, choice=1)) == RowResult(slot=0, token_ids=token_id)
    assert hand.prefill(0, tokens, table, num_logits=1, assign=assign(tokens, params)) == RowResult(slot=0, token_ids=token_id)
    cut = hand.prefill(0, tokens, table, num_logits=4, assign=assign(tokens, params))
    whole = hand.prefill(0, tokens, table, num_logits=30, assign=assign(tokens, params))
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 29
    assert cut == RowResult(slot=0, token_ids=token_id, prompt_logprobs=whole.prompt_logprobs[-3:])


def test_a_row_that_ends_before_the_last_known_token_samples_nothing(folder: Path) -> None:
    hand = Hand(folder)
    tokens, params = ids(30), SamplingParams(temperature=0, prompt_logprobs=2)
    row = hand.prefill(0, tokens, [0, 1, 2, 3], count=10, assign=assign(tokens, params))
    assert row.token_ids == []
    assert [line[0].token_id for line in row.prompt_logprobs or []] == [tokens[10]]
    row = hand.step(Row(slot=0, start=10, count=20, num_logits=1, tables=[])).rows[0]
    assert (row.token_ids, row.prompt_logprobs) == (hand.answer(tokens)[:1], None)


def test_logits_of_a_long_chunk_are_never_held_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(folder)
    sizes = []
    plain = hand.runner.model.logits
    monkeypatch.setattr(hand.runner.model, "logits", lambda hidden: sizes.append(len(hidden)) or plain(hidden))
    hand.prefill(0, ids(100), list(range(13)), num_logits=100, assign=assign(ids(100), SamplingParams(prompt_logprobs=2)))
    assert sizes == [1, 32, 32, 32, 3]


# Faults


class Poison:
    """Spoils what the model gives for one token: its hidden state, or the logits that come of it."""

    def __init__(self, hand: Hand, monkeypatch: pytest.MonkeyPatch, token_id: int, value: float, in_logits: bool) -> None:
        model = hand.runner.model
        forward, head = model.forward, model.logits
        marks: list[torch.Tensor] = []

        def spoiled_forward(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            hidden = forward(token_ids, *rest)
            marks[:] = [hidden[token_ids == token_id].clone()]
            if not in_logits:
                hidden[token_ids == token_id, 7] = value
            return hidden

        def spoiled_logits(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            if in_logits:
                for mark in marks[0]:
                    logits[(hidden == mark).all(-1)] = value
            return logits

        monkeypatch.setattr(model, "forward", spoiled_forward)
        monkeypatch.setattr(model, "logits", spoiled_logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("victim", "in_logits"),
    [("samples", False), ("samples", True), ("catches up", False), ("is scored", False), ("is scored", True)],
)
def test_a_row_that_fails_ends_alone_and_what_it_wrote_alone_is_cleared(
    victim: str, in_logits: bool, value: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(folder)
    shared = [token for token in ids(16) if token != 77][:8] + [3] * 8
    tails = [[11, 12, 13], [14, 77, 15] if victim != "samples" else [14, 15, 77], [16, 17, 18, 19, 20, 21]]
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    hand.prefill(9, shared, [4, 5], num_logits=0)

    def work() -> list[Row]:
        bad = prefill(1, shared + tails[1] + [8] * (5 * (victim == "catches up")), [4, 5, 7, 8], start=16, count=3)
        if victim == "catches up":
            bad = prefill(1, shared + tails[1] + [8] * 5, [4, 5, 7, 8], start=16, count=3, num_logits=0)
        elif victim == "is scored":
            bad = prefill(1, shared + tails[1], [4, 5, 7, 8], start=16, count=3, num_logits=3, assign=assign(shared + tails[1], params))
        good = prefill(2, shared + tails[2], [4, 5, 9], start=16, count=6, num_logits=6, assign=assign(shared + tails[2], params))
        return [prefill(0, shared + tails[0], [4, 5, 6], start=16, count=3), bad, good]

    sound = hand.step(*work(), released=[9]).rows
    assert [row.error for row in sound] == [None] * 3
    before = hand.region.clone()
    assert before[7].any()
    with monkeypatch.context() as patch:
        Poison(hand, patch, 77, value, in_logits)
        rows = hand.step(*work(), released=[0, 1, 2]).rows
    assert rows[1] == RowResult(slot=1, error="the model gave no finite logits for this request")
    assert [rows[0], rows[2]] == [sound[0], sound[2]]
    assert not hand.region[7].any()
    untouched = [block for block in range(32) if block != 7]
    assert torch.equal(hand.region[untouched], before[untouched])
    # The others go on, and the slot is as good as new.
    assert hand.step(one(0, 19), one(2, 22), released=[1]).rows[0].error is None
    assert hand.step(work()[1]).rows[0].token_ids == sound[1].token_ids


def test_of_a_row_across_blocks_all_it_wrote_is_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(folder)
    tokens = ids(40)
    tokens[30] = 77
    hand.prefill(0, tokens, [3, 4, 5, 6, 7], count=12, num_logits=0)
    before = hand.region.clone()
    Poison(hand, monkeypatch, 77, torch.nan, False)
    row = hand.step(Row(slot=0, start=12, count=20, num_logits=0, tables=[])).rows[0]
    assert row.error is not None
    assert not hand.region[5:7].any()
    assert torch.equal(hand.region[3], before[3])


def test_what_a_row_found_in_its_first_block_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in flight may copy it for another answer to the same prompt."""
    hand = Hand(folder)
    tokens = ids(40)
    tokens[30] = 77
    hand.prefill(0, tokens, [3, 4, 5, 6, 7], count=11, num_logits=0)
    with monkeypatch.context() as patch:
        Poison(hand, patch, 77, torch.nan, False)
        row = hand.step(Row(slot=0, start=11, count=21, num_logits=0, tables=[])).rows[0]
    assert row.error is not None
    size = hand.runner.capacity.block_size
    block, other = 3 + 11 // size, [*tokens[:11], 5]
    assert 11 % size
    table = [*range(3, block), 13, 14]
    found = hand.step(prefill(1, other, table, start=11, count=1), copies=[device(block, 13)]).rows[0].token_ids
    assert found + hand.decode(1, 12, 5) == hand.answer(other)


def test_drafts_are_refused(folder: Path) -> None:
    hand = Hand(folder)
    hand.prefill(0, ids(10), [0, 1])
    with pytest.raises(EngineError, match="verifies no drafts"):
        hand.step(Row(slot=0, start=10, count=2, num_logits=2, tables=[], draft_ids=[4]))


# Capacity


def runner_with(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, **settings: Any) -> Runner:
    monkeypatch.setattr(runner, "available_memory", lambda device="cpu": free)
    base: dict[str, Any] = {"max_blocks": None, "prealloc_blocks": 3, "block_size": BLOCK}
    return make_runner(folder, **(base | settings))


BYTES = 2 * 3 * 2 * BLOCK * 16 * 4


@pytest.mark.parametrize(
    ("settings", "blocks", "ceiling_by"),
    [
        ({"max_blocks": 50}, 50, "max_blocks"),
        ({"kv_cache_memory": 40 * BYTES + 1}, 40, "kv_cache_memory"),
        ({"max_batch_size": 2}, 2 * 16, "2 full contexts"),
        ({"max_batch_size": 2, "max_model_len": 20}, 2 * 3, "2 full contexts"),
        ({"max_batch_size": 65536}, GIB // BYTES, "half of the 2.0 GiB available"),
    ],
)
def test_the_ceiling_is_told_with_what_decides_it(
    settings: dict[str, Any], blocks: int, ceiling_by: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = runner_with(folder, monkeypatch, 2 * GIB, swap_space=5 * BYTES + 9, **settings).capacity
    assert (capacity.num_blocks, capacity.ceiling_by, capacity.committed_blocks) == (blocks, ceiling_by, 3)
    assert (capacity.block_bytes, capacity.block_size, capacity.swap_blocks) == (BYTES, BLOCK, 5)
    assert ceiling_by in str(capacity)


@pytest.mark.parametrize(
    ("free", "settings", "said"),
    [
        (GIB, {"max_blocks": 1}, f"max_blocks: 1; a pool needs at least 2 blocks of {BYTES} bytes"),
        (GIB, {"kv_cache_memory": BYTES}, f"kv_cache_memory: {BYTES}; a pool needs at least 2 blocks"),
        (3 * BYTES, {}, f"kv_cache_memory: auto, of {3 * BYTES} bytes available; a pool needs"),
        (49 * BYTES, {"max_blocks": 50}, f"max_blocks: 50; 50 blocks take {50 * BYTES} bytes and {49 * BYTES} are available"),
        (GIB, {"swap_space": BYTES - 1}, f"swap_space: {BYTES - 1}; allowed: 0, or at least a block of {BYTES} bytes"),
        (60 * BYTES, {"max_blocks": 50, "swap_space": 11 * BYTES}, f"swap_space: {11 * BYTES}; allowed: up to {10 * BYTES} bytes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    free: int, settings: dict[str, Any], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        runner_with(folder, monkeypatch, free, **settings)


def test_int8_kv_of_heads_that_fill_no_words_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama", {"head_dim": 6})
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'int8'; heads of 6 features need another, as they are no multiple of 4"):
        make_runner(tmp_path, kv_cache_dtype="int8")
    assert make_runner(tmp_path).capacity.weight_bytes > 0
