"""Corners on the simulated executor, where a step takes a second; and the command's run from a checkpoint to tables, JSON and picture."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.bench import machine, throughput, workload
from octavo.bench.corners import Corner, Run, serve, slots
from octavo.bench.throughput import TRADITIONAL, USUAL, Load, Measured, Report, run
from octavo.bench.workload import Work
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import EngineError, InvalidValueError
from octavo.executor.simulated import SimulatedClock
from tests.engine.engine_driver import check_idle, make_engine

CORNERS = [Corner(batching, memory) for batching in ("static", "continuous") for memory in ("reserve", "paged")]
CONTEXT = 32


def some(count: int = 24, seed: int = 0) -> list[Work]:
    source = random.Random(seed)
    return [Work([source.randint(0, 255) for _ in range(source.randint(1, 12))], source.randint(1, 16)) for _ in range(count)]


def engine_of(contexts: int = 3, **settings: Any) -> Engine:
    values = {"num_blocks": contexts * CONTEXT // 4, "longest": CONTEXT, "max_batch_size": 16, "seconds_per_step": 1.0}
    return make_engine(clock=SimulatedClock(), **(values | settings))


def served(engine: Engine, corner: Corner, work: list[Work]) -> tuple[Run, list[list[int]]]:
    result = serve(engine, corner, work, CONTEXT, clock=engine._clock)
    check_idle(engine)
    return result


def report_of(runs: dict[Corner, list[Run]]) -> Report:
    load = Load(
        dataset="shared",
        requests=1,
        left_out=0,
        prompt_tokens=1,
        output_tokens=1,
        scale=1.0,
        context=CONTEXT,
        kv_memory=1000,
        kv_bytes_per_token=10.0,
        block_size=4,
        max_batch_size=16,
        prefill_chunk_size=None,
    )
    size = machine.ModelSize(weight_bytes=100, body_parameters=50, head_parameters=5)
    corners = [Measured(corner=corner, runs=some_runs) for corner, some_runs in runs.items()]
    return Report(model="m", dtype="float32", load=load, machine=machine.describe(), size=size, corners=corners)


def test_every_corner_gives_each_request_the_same_tokens() -> None:
    work, engine = some(), engine_of()
    answers = [served(engine, corner, work)[1] for corner in CORNERS]
    assert [len(answer) for answer in answers[0]] == [one.tokens for one in work]
    assert all(other == answers[0] for other in answers[1:])


def test_reserving_limits_what_runs_at_once_to_the_whole_contexts_of_the_pool() -> None:
    work = some()
    for contexts in (1, 3, 5):
        for corner in (Corner("static", "reserve"), Corner("continuous", "reserve")):
            result, _ = served(engine_of(contexts), corner, work)
            assert (result.slots, result.most_rows) == (contexts, contexts)
    assert served(engine_of(3), USUAL, work)[0].most_rows > 3
    assert slots(TRADITIONAL, engine_of(3, max_batch_size=2), CONTEXT) == 2
    assert slots(TRADITIONAL, engine_of(3), CONTEXT + 1) == 2
    with pytest.raises(InvalidValueError, match="memory: 'reserve'; the pool has 24 blocks and a whole context of 97 tokens takes 25"):
        slots(TRADITIONAL, engine_of(3), 97)


def test_a_static_group_ends_with_its_longest_and_then_the_next_begins() -> None:
    """Prompts are computed in one step each, so a group takes as many steps as its longest has tokens."""
    work, engine = some(10), engine_of(3, prefill_chunk_size=None)
    result, _ = served(engine, TRADITIONAL, work)
    longest = [max(one.tokens for one in work[start : start + 3]) for start in range(0, 10, 3)]
    assert result.steps == result.seconds == sum(longest)
    assert result.rows == sum(3 * steps for steps in longest[:-1]) + longest[-1]
    assert result.useful_rows == sum(one.tokens for one in work) == result.output_tokens
    assert result.slot_busy == pytest.approx(result.useful_rows / (3 * result.steps))
    assert served(engine, Corner("continuous", "reserve"), work)[0].steps < result.steps


def test_shares_by_hand() -> None:
    """Prompts of 4 and 2 tokens, outputs of 1 and 3, two slots, 64 tokens of memory: the first row is padded for two steps."""
    result, _ = served(engine_of(2, prefill_chunk_size=None), TRADITIONAL, [Work([1] * 4, 1), Work([2] * 2, 3)])
    assert (result.steps, result.rows, result.useful_rows, result.sampled_rows) == (3, 6, 4, 6)
    assert (result.computed_tokens, result.kv_tokens_read) == (6 + 4, (4 + 5 + 6) + (2 + 3 + 4))
    assert (result.device_busy, result.slot_busy) == (1.0, pytest.approx(4 / 6))
    assert result.kv_busy == pytest.approx((4 + 2 + 3 + 4) / (3 * 64))
    report = report_of({TRADITIONAL: [result]})
    assert report.read_rate(result) == pytest.approx((3 * 100 + 24 * 10) / 3)
    assert report.product_rate(result) == pytest.approx(2 * (10 * 50 + 6 * 5) / 3)


def test_a_static_group_over_paged_memory_is_as_large_as_its_padded_rows_fit() -> None:
    work = [Work([1] * 5, 8), Work([2] * 5, 8), Work([3] * 5, 16), Work([4] * 5, 1)]
    corner = Corner("static", "paged")
    # 12 tokens are stored of each of the first two, 3 blocks; beside the third all would store 20, 5 blocks.
    sizes = {blocks: served(engine_of(num_blocks=blocks), corner, work)[0].most_rows for blocks in (8, 14, 15, 20)}
    assert sizes == {8: 2, 14: 2, 15: 3, 20: 4}
    assert served(engine_of(num_blocks=20, max_batch_size=3), corner, work)[0].most_rows == 3


def test_computing_anew_is_no_use() -> None:
    work = [Work([number] * 8, 20) for number in range(6)]
    result, answers = served(engine_of(2, prefix_caching=False, prefill_chunk_size=8), USUAL, work)
    assert result.preemptions > 0
    assert result.output_tokens <= result.useful_rows < result.rows
    assert answers == served(engine_of(8), USUAL, work)[1]


def test_nothing_is_shared_where_memory_is_reserved_nor_between_runs() -> None:
    work, engine = [Work([7] * 24, 2)] * 6, engine_of(2)
    first = served(engine, USUAL, work)[0]
    assert first.computed_tokens < 6 * 25
    assert served(engine, Corner("continuous", "reserve"), work)[0].computed_tokens == 6 * 25
    assert served(engine, USUAL, work)[0].computed_tokens == first.computed_tokens


def test_a_request_that_fails_stops_the_run_and_leaves_the_engine_idle() -> None:
    engine = engine_of(row_error=lambda row, assignment: "a NaN" if assignment.seed == 5 else None)
    executor = engine.executor
    with pytest.raises(EngineError, match="request 5 ended early: error a NaN"):
        serve(engine, USUAL, some(), CONTEXT)
    assert engine.executor is executor
    while engine.has_work:
        engine.step()
    check_idle(engine)


def test_ratios_are_of_medians_to_the_first_corner() -> None:
    def made(seconds: float, **values: Any) -> Run:
        return Run(seconds=seconds, output_tokens=120, prompt_tokens=60, forward_seconds=seconds / 2, budget_tokens=100, **values)

    slow = [made(seconds, slots=2, most_rows=2, useful_row_seconds=2 * seconds) for seconds in (12, 10, 60)]
    fast = [made(seconds, slots=8, most_rows=8, useful_row_seconds=6 * seconds) for seconds in (1, 2, 3)]
    report = report_of({TRADITIONAL: slow, USUAL: fast})
    content = report.to_dict()["corners"]
    assert [corner["throughput"] for corner in content] == [1.0, pytest.approx(6.0)]
    assert content[1]["summary"]["output_tokens_per_s"] == {"median": 60.0, "min": 40.0, "max": 120.0}
    assert content[1]["summary"]["total_tokens_per_s"]["median"] == 90.0
    assert content[0]["busy"] == {
        "device": {"median": 0.5, "min": 0.5, "max": 0.5},
        "slots": {"median": 1.0, "min": 1.0, "max": 1.0},
        "batch": {"median": 0.25, "min": 0.25, "max": 0.25},
        "KV memory": {"median": 0.0, "min": 0.0, "max": 0.0},
    }
    assert content[1]["busy"]["batch"]["median"] == content[1]["busy"]["slots"]["median"] == 0.75


def test_the_shared_workload_is_the_one_that_other_engines_run() -> None:
    work = workload.load()
    assert (len(work), sum(len(one.prompt) for one in work), sum(one.tokens for one in work)) == (64, 18_641, 19_344)
    assert workload.load(count=5, scale=2)[3] == Work(work[3].prompt[: round(len(work[3].prompt) / 2)], round(work[3].tokens / 2))
    fitting = workload.fitting(work, 600, 131)
    assert 0 < len(fitting) < 64
    assert all(one.length <= 600 and max(one.prompt) < 131 for one in fitting)


def test_spreads_have_the_mean_asked_for_and_fit() -> None:
    for kind in workload.SPREADS:
        work = workload.spread(kind, 400, 50, 1000)
        assert sum(one.tokens for one in work) / 400 == pytest.approx(50, rel=0.15)
        assert max(one.length for one in work) <= 1000
        assert (max(one.tokens for one in work) > 300) == (kind == "heavy-tailed")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings take a moment and say nothing."""
    monkeypatch.setattr(machine, "measure", partial(machine.measure, read_bytes=1 << 16, rows=8, width=64))


def asked(tiny: Path, **options: Any) -> None:
    settings = options.pop("settings", {})
    run(str(tiny), EngineConfig.create(**settings), **({"requests": 6, "scale": 16.0, "repeats": 2} | options))


@pytest.mark.usefixtures("quick")
def test_from_a_checkpoint_to_tables_json_and_a_picture(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "corners.png"
    asked(tiny, batching="both", memory="both", contexts=[2], json=str(file), out=str(picture))
    content = json.loads(file.read_text())
    report = msgspec.convert(content, Report)
    assert report.to_dict() == content
    assert [one.corner for one in report.corners] == CORNERS
    assert [one.runs[0].slots for one in report.corners][::2] == [2, 2]
    assert report.load.kv_memory == 2 * 128 * report.load.kv_bytes_per_token
    assert report.size == machine.ModelSize(
        weight_bytes=report.size.weight_bytes, body_parameters=2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), head_parameters=259 * 32
    )
    parameters = report.size.body_parameters + report.size.head_parameters
    assert 4 * parameters < report.size.weight_bytes < 6 * parameters
    assert report.peak_rss > 1 << 24
    printed = capsys.readouterr().out
    assert all(str(corner) in printed for corner in CORNERS)
    assert "2 whole contexts of 128" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick")
def test_one_way_alone_and_json_on_stdout(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(tiny, json="-", warm_up=False, repeats=1, requests=2)
    (corner,) = json.loads(capsys.readouterr().out)["corners"]
    assert (corner["corner"], corner["throughput"]) == ({"batching": "continuous", "memory": "paged"}, 1.0)


@pytest.mark.usefixtures("quick")
def test_a_sweep_compares_the_opposite_corners(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    asked(tiny, sweep=True, scale=1.0, contexts=[1, 2], requests=3, repeats=1, json=str(tmp_path / "sweep.json"), out=str(picture))
    points = json.loads((tmp_path / "sweep.json").read_text())
    loads = len(throughput.SWEEP_SHORTER) * len(workload.SPREADS)
    assert [point["contexts"] for point in points] == [1] * loads + [2] * loads
    assert [one["corner"]["memory"] for one in points[0]["report"]["corners"]] == ["reserve", "paged"]
    assert all(point["report"]["corners"][0]["runs"][0]["slots"] == point["contexts"] for point in points)
    assert "The claim is 10 to 23 times" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dataset": "nonsense"}, "dataset: 'nonsense'; allowed: shared, azure-conv, "),
        ({"requests": 0}, "requests: 0; allowed: a whole number from 1"),
        ({"repeats": 0}, "repeats: 0; allowed"),
        ({"scale": 0.5}, r"scale: 0\.5; allowed: a number from 1"),
        ({"scale": float("nan")}, "scale: nan; allowed"),
        ({"batching": "none"}, "batching: 'none'; allowed: static, continuous, both"),
        ({"memory": "heap"}, "memory: 'heap'; allowed: reserve, paged, both"),
        ({"contexts": [2, 0]}, "contexts: 0; allowed"),
        ({"contexts": [1, 2]}, r"contexts: \[1, 2\]; allowed: one, or several with sweep"),
        ({"contexts": [1], "settings": {"kv_cache_memory": "1MiB"}}, "kv_cache_memory: it sets the KV memory that contexts sets"),
        ({"sweep": True, "scale": 1.0, "settings": {"max_blocks": 9}}, "max_blocks: it sets the KV memory that the sweep varies"),
        ({"sweep": True}, "sweep: it makes up its own requests; dataset, data and scale are not for it"),
        ({"json": "nowhere/x.json"}, "json: there is no folder"),
        ({"out": "nowhere/x.png"}, "out: there is no folder"),
        (
            {"memory": "reserve", "settings": {"max_blocks": 7}},
            "memory: 'reserve'; the pool has 7 blocks and a whole context of 128 tokens takes 8",
        ),
        ({"scale": 1.0, "requests": 1}, "requests: none of 1 fits in 128 tokens"),
    ],
)
def test_wrong_values_are_refused_by_name(tiny: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValueError, match=complaint):
        asked(tiny, **options)
