"""Paged replays of small traces through the real core, and the command's run from a file to its tables, JSON and picture."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import attention, memory, paged, traces
from octavo.bench.traces import TracedRequest, ideal_share
from octavo.errors import InvalidValueError, OctavoError

BYTES_PER_TOKEN = 100


def replay(requests: list[TracedRequest], tokens: int, block_size: int, **options: Any) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"max_batch_size": 64, "prefill_chunk_size": 512} | options
    return paged.replay(requests, kv_bytes=tokens * BYTES_PER_TOKEN, bytes_per_token=BYTES_PER_TOKEN, block_size=block_size, **arguments)


def unrelated(count: int, seed: int = 0) -> list[TracedRequest]:
    source = random.Random(seed)
    return [TracedRequest([number] * source.randint(1, 200), [number] * source.randint(1, 120)) for number in range(count)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_all_parts_of_the_budget_add_up(block_size: int) -> None:
    requests = unrelated(120)
    usage, core = replay(requests, 4099, block_size)
    parts = (usage.held, usage.cached, usage.internal, usage.free)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0
    assert usage.reserved == usage.external == usage.refused == 0
    assert usage.generated_tokens == sum(len(request.answer) for request in requests)
    assert 0 < usage.steps_averaged < usage.steps
    assert usage.resident_mean <= usage.resident_max <= 64
    assert usage.internal <= usage.resident_max * (block_size - 1) / 4099
    assert core.hit_rate == 0
    assert core.mapping_bytes > 0
    assert core.core_seconds > 0


def test_one_sequence_by_hand() -> None:
    """Two requests, one at a time, of 5 and then 8 tokens at last, on 3 blocks of 4."""
    usage, _ = replay([TracedRequest([1] * 3, [1] * 3), TracedRequest([2] * 7, [2] * 2)], 12, 4, max_batch_size=1)
    assert (usage.steps, usage.steps_averaged, usage.resident_max) == (5, 3, 1)
    assert usage.held == pytest.approx((3 + 4 + 5) / 36)
    assert usage.internal == pytest.approx((1 + 0 + 3) / 36)
    assert usage.free == pytest.approx((8 + 8 + 4) / 36)


def test_looking_every_few_steps_gives_the_same_averages() -> None:
    requests = unrelated(600)
    every, _ = replay(requests, 4096, 16)
    some, _ = replay(requests, 4096, 16, steps_per_sample=paged.STEPS_PER_SAMPLE)
    assert some.steps == every.steps
    assert some.steps_averaged == pytest.approx(every.steps_averaged, abs=paged.STEPS_PER_SAMPLE)
    for part in ("held", "cached", "internal", "free"):
        assert getattr(some, part) == pytest.approx(getattr(every, part), abs=0.01)
    assert some.resident_mean == pytest.approx(every.resident_mean, rel=0.01)


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_one_after_another_the_core_shares_what_an_endless_cache_would(block_size: int) -> None:
    source = random.Random(block_size)
    known: list[list[int]] = [[]]
    requests = []
    for number in range(60):
        begun = source.choice(known)
        prompt = begun[: source.randint(0, len(begun))] + [number] * source.randint(1, 20)
        requests.append(TracedRequest(prompt, [number + 1000] * source.randint(1, 9)))
        known.append(prompt + requests[-1].answer)
    _, core = replay(requests, 20_000, block_size, max_batch_size=1)
    ideal = ideal_share(requests, block_size)
    assert ideal > 0.1
    assert core.hit_rate == pytest.approx(ideal)


def test_what_can_never_fit_is_refused_and_counted() -> None:
    usage, _ = replay([TracedRequest([0] * 60, [0] * 10), *unrelated(3)], 64, 16, max_batch_size=2)
    assert usage.refused >= 1
    with pytest.raises(InvalidValueError, match="do not hold one block of 16 tokens"):
        replay(unrelated(1), 15, 16)


def test_a_long_sequence_holds_a_block_for_every_few_tokens() -> None:
    figures = paged.long_sequence(2048, bytes_per_token=23_040, decoded=8)
    assert figures.blocks == 128
    assert 0 < figures.decode_step_us_best <= figures.decode_step_us
    assert 0 < figures.mapping_share < 0.01


def test_attention_is_timed_at_each_block_size() -> None:
    figures = attention.measure([70, 33, 1], [4, 16], repeats=1)
    assert [figure.block_size for figure in figures] == [4, 16]
    assert all(figure.sequences == 3 and figure.tokens == 104 and figure.layer_us >= figure.layer_us_best > 0 for figure in figures)
    assert sum(attention.lengths(64)) == pytest.approx(64 * 1024, rel=0.02)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small trace in place of the real one."""
    path = tmp_path / traces.find("azure-conv").file
    path.parent.mkdir()
    rows = [f"now,{len(request.prompt)},{len(request.answer)}" for request in unrelated(60)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    return tmp_path


def run(**options: Any) -> None:
    given = {"kv_memory": 2048 * BYTES_PER_TOKEN, "kv_bytes_per_token": BYTES_PER_TOKEN, "block_sizes": (4, 16), "kernels": False}
    memory.run(**given | options)


def test_the_run_tells_all_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["load"]["requests"] == 60
    assert report["load"]["context"] == 512
    assert report["whole"] is None
    assert [way["block_size"] for way in report["ways"]] == [None, None, None, 4, 16]
    for way in report["ways"]:
        usage = way["usage"]
        assert sum(usage[part] for part in memory.COLOURS) == pytest.approx(1)
        assert usage["generated_tokens"] == report["load"]["generated_tokens"]
    throughput = [way["throughput"] for way in report["ways"]]
    assert throughput[0] == 1
    assert throughput[3] > throughput[2] > throughput[1] > 1


def test_the_run_prints_tables_and_the_rule_of_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(requests="all")
    printed = capsys.readouterr().out
    assert "The whole context is 512 tokens: the least power of two that holds the trace's longest request" in printed
    for text in ("exact length (an oracle)", "blocks of 16", "What paging costs", "is 8,192 blocks of 16"):
        assert text in printed
    run(requests=20, context=64, block_sizes=(16,))
    printed = capsys.readouterr().out
    assert "20 of 60 requests" in printed
    assert "The whole context is 64 tokens: as asked for" in printed
    assert "are refused" in printed


def test_the_whole_trace_is_replayed_once_where_the_sweep_takes_its_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_count", lambda requests, usual: 10)
    run()
    printed = capsys.readouterr().out
    assert "blocks of 16, whole trace" in printed
    assert "The whole trace, 60 requests" in printed


def test_kernels_are_timed_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "LONG", 256)
    monkeypatch.setattr(memory, "SEQUENCES", 1)
    run(kernels=True, block_sizes=(16,))
    assert "Decode attention" in capsys.readouterr().out


def test_shared_prefixes_are_compared_with_the_ideal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / traces.find("mooncake-scaled").file
    path.parent.mkdir()
    rows = [{"input_length": 100, "output_length": 5, "hash_ids": [0, 1, 2, 3 + number]} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(dataset="mooncake-scaled", data=str(tmp_path), json=True)
    *_, way = json.loads(capsys.readouterr().out)["ways"]
    assert way["ideal_hit_rate"] == pytest.approx(39 * 96 / 4000)
    assert 0.5 < way["core"]["hit_rate"] <= way["ideal_hit_rate"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"requests": "some"}, "requests: 'some'; allowed: a whole number from 1, or all"),
        ({"requests": 0}, "requests: 0; allowed"),
        ({"kv_memory": "much"}, "kv_memory: 'much'; allowed: bytes"),
        ({"context": 0}, "context: 0; allowed"),
        ({"max_batch_size": 0}, "max_batch_size: 0; allowed"),
    ],
)
def test_wrong_values_are_refused_by_name(folder: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValueError, match=complaint):
        run(**options)


def test_a_picture_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(out=str(folder / "memory.png"))
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidValueError, match="out: there is no folder"):
        run(out=str(folder / "nowhere" / "memory.png"))


def test_without_matplotlib_a_picture_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OctavoError, match=r"pip install octavo\[bench\]"):
        run(out="memory.png")
