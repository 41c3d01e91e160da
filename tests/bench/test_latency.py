"""Latencies on the simulated executor, where a step takes a second; and the command's run from a checkpoint to tables, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.bench import latency
from octavo.bench.latency import REST, STAGES, Decode, Report, decode, first_token, profiled, run, timers
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import EngineError, InvalidValueError
from octavo.executor.simulated import SimulatedClock
from octavo.worker import batch, sampler
from tests.engine.engine_driver import check_idle, make_engine


def engine_of(**settings: Any) -> Engine:
    return make_engine(clock=SimulatedClock(), **({"seconds_per_step": 1.0, "longest": 128} | settings))


def test_a_first_token_takes_the_chunks_of_its_prompt() -> None:
    engine = engine_of(prefill_chunk_size=8)
    assert first_token(engine, 8, 2, engine._clock).seconds == [1.0, 1.0]
    assert first_token(engine, 25, 3, engine._clock).seconds == [4.0] * 3
    check_idle(engine)


def test_the_same_prompt_again_is_computed_again() -> None:
    engine = engine_of(prefill_chunk_size=8)
    assert all(first_token(engine, 33, 1, engine._clock).seconds == [5.0] for _ in range(2))


def test_decoding_begins_after_the_first_token() -> None:
    engine = engine_of(prefill_chunk_size=4, seconds_per_token=0.5)
    found = decode(engine, 21, 10, 2, engine._clock)
    assert found.intervals == [1.5] * 18
    assert found.tokens_per_s == pytest.approx([1 / 1.5] * 2)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (50, 50), (100, 99), (101, 100), (200, 198)])
def test_p99_is_exceeded_by_one_in_a_hundred(count: int, expected: int) -> None:
    intervals = [float(number) for number in range(count, 0, -1)]
    assert Decode(context_length=1, intervals=intervals, tokens_per_s=[1.0]).p99 == expected


def test_a_request_that_fails_stops_the_run() -> None:
    engine = engine_of(row_error=lambda row, assignment: "a NaN")
    with pytest.raises(EngineError, match="ended early: error a NaN"):
        first_token(engine, 8, 1)


def test_timers_count_what_is_inside_once_and_leave_nothing_behind() -> None:
    engine = engine_of(num_blocks=256, max_batch_size=8, prefill_chunk_size=16)
    names = set(vars(engine)), set(vars(engine.scheduler)), set(vars(batch)), set(vars(sampler))
    functions = batch.build, sampler.sample
    profile = profiled(engine, 8, context=16, steps=10)
    check_idle(engine)
    assert (profile.sequences, profile.steps) == (8, 10)
    assert set(profile.stages) == {"schedule", "update", "detokenize", REST}
    assert min(profile.stages.values()) >= 0
    assert sum(profile.stages.values()) == pytest.approx(profile.seconds)
    assert profile.overhead == pytest.approx(profile.seconds / 10)
    assert names == (set(vars(engine)), set(vars(engine.scheduler)), set(vars(batch)), set(vars(sampler)))
    assert functions == (batch.build, sampler.sample)


def test_an_inner_timer_is_taken_off_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(latency.time, "perf_counter", lambda: next(ticks))
    engine = engine_of()
    monkeypatch.setattr(engine.scheduler, "update", lambda: None)
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: engine.scheduler.update())
    with timers(engine) as seconds:
        engine.scheduler.schedule()
    assert seconds == {"schedule": 7.0, "update": 3.0}


def test_a_profile_of_more_than_memory_holds_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"sequences: 9; they take \d+ KV blocks of \d+ tokens each and there are 64"):
        profiled(engine_of(max_batch_size=9), 9)


def asked(tiny: Path, **options: Any) -> None:
    settings = options.pop("settings", {})
    usual: dict[str, Any] = {"prompt_lengths": "5,40", "context_lengths": "9", "output_tokens": 6, "repeats": 2}
    run(str(tiny), EngineConfig.create(**settings), **(usual | options))


def test_from_a_checkpoint_to_tables_json_and_a_picture(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "latency.png"
    asked(tiny, profile=True, sequences=4, json=str(file), out=str(picture))
    content = json.loads(file.read_text())
    report = msgspec.convert(content, Report)
    assert report.to_dict() == content
    assert [(one.prompt_length, len(one.seconds)) for one in report.first_tokens] == [(5, 2), (40, 2)]
    assert [(one.context_length, len(one.intervals)) for one in report.decodes] == [(9, 10)]
    assert [one.sequences for one in report.profiles] == [1, 4]
    assert all(set(one.stages) == {*STAGES, REST} for one in report.profiles)
    printed = capsys.readouterr().out
    assert all(title in printed for title in ("Time to first token", "Decode, 6 tokens", "Where the time of a decode step goes"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_part_may_be_left_out_and_json_go_to_stdout(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(tiny, context_lengths="", json="-", repeats=1, warm_up=False)
    content = json.loads(capsys.readouterr().out)
    assert (len(content["first_tokens"]), content["decodes"], content["profiles"]) == (2, [], [])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prompt_lengths": "5;6"}, "prompt_lengths: '5;6'; allowed: whole numbers from 1"),
        ({"context_lengths": "9,0"}, "context_lengths: '9,0'; allowed"),
        (
            {"prompt_lengths": "5,128"},
            r"prompt_lengths: 128; allowed: 127 at most, as a sequence may have 128 tokens \(the model's context\)",
        ),
        ({"context_lengths": "123"}, "context_lengths: 123; allowed: 122 at most"),
        ({"output_tokens": 1}, "output_tokens: 1; allowed: a whole number from 2"),
        ({"repeats": 0}, "repeats: 0; allowed"),
        ({"sequences": 0}, "sequences: 0; allowed"),
        ({"json": "nowhere/x.json"}, "json: there is no folder"),
        ({"out": "nowhere/x.png"}, "out: there is no folder"),
        ({"out": "x.png", "prompt_lengths": "", "context_lengths": ""}, "out: a picture shows prompt_lengths and context_lengths"),
    ],
)
def test_wrong_values_are_refused_by_name(tiny: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValueError, match=complaint):
        asked(tiny, **options)
