"""The load client against a server that is made up, whose delays and faults are known; its figures by other formulas; its command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench import serve, traces, workload
from octavo.bench.serve import run
from octavo.bench.serve_client import Answer, Client
from octavo.bench.serve_load import CLOSED, WORDS, Load, Objectives, Run, fresh, measure, percentiles, texts
from octavo.bench.workload import Work
from octavo.cli import app
from octavo.errors import InvalidValueError, OctavoError

FIRST, GAP = 0.02, 0.005
"""Seconds until the fake server's first token, and between tokens."""


class FakeServer:
    """Answers on a thread of its own as `behave` says for each request, counted from 0: one of the ways below, else whole.

    bodies, heads, came: of completions, in the order of their coming. most: in flight at once.
    """

    def __init__(self) -> None:
        self.behave: Callable[[int], str] = lambda number: "whole"
        self.first, self.gap = FIRST, GAP
        self.cards: Any = {"data": [{"id": "fake", "max_model_len": 1000}, {"id": "other"}]}
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.came: list[float] = []
        self.answered: list[float] = []
        self.in_flight = self.most = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(5)
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models "):
                self._write(writer, "200 OK", "application/json", json.dumps(self.cards).encode())
            else:
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                await self._complete(head, body, writer)
        writer.close()

    async def _complete(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        way = self.behave(len(self.bodies))
        self.heads.append(head)
        self.bodies.append(body)
        self.came.append(time.perf_counter())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if way == "busy":
                content = json.dumps({"error": {"message": "too much\nwaits", "code": "overloaded"}})
                self._write(writer, "429 Too Many Requests", "application/json", content.encode())
            elif way == "plain":
                self._write(writer, "200 OK", "application/json", b'{"choices": []}')
            elif way == "gibberish":
                writer.write(b"SSH-2.0 hello\r\n\r\n")
            elif way == "hang":
                await asyncio.sleep(60)
            elif way != "slam":
                await self._stream(way, body, writer)
        finally:
            self.in_flight -= 1
            self.answered.append(time.perf_counter())

    async def _stream(self, way: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
        count = body["max_tokens"] - (way == "short")
        for number in range(count):
            await asyncio.sleep(self.gap if number else self.first)
            finish = "length" if number == count - 1 else None
            if way == "aborted" and finish:
                finish = "abort"
            text = "" if way == "held" and not finish else "wörd "
            event = {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}
            end = "\r\n\r\n" if way == "bytewise" else "\n\n"
            await self._send(writer, f": a comment{end}data: {json.dumps(event, ensure_ascii=False)}{end}".encode(), way == "bytewise")
            if way == "broken":
                return
            if way == "faulty":
                await self._send(writer, b'data: {"error": {"message": "the model failed"}}\n\ndata: [DONE]\n\n')
                return
            if way == "mangled":
                await self._send(writer, b"data: {half\n\n")
                return
            if way == "unended":
                writer.write(b"0\r\n\r\n")
                return
        if way != "uncounted":
            usage = {"prompt_tokens": len(body["prompt"]) + 1, "completion_tokens": count, "total_tokens": 0}
            await self._send(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await self._send(writer, b"data: [DONE]\n\n")
        if way != "uncounted":
            writer.write(b"0\r\n\r\n")

    async def _send(self, writer: asyncio.StreamWriter, content: bytes, bytewise: bool = False) -> None:
        whole = b"%x\r\n%b\r\n" % (len(content), content)
        for piece in (whole[place : place + 1] for place in range(len(whole))) if bytewise else (whole,):
            writer.write(piece)
            await writer.drain()
            if bytewise:
                await asyncio.sleep(0)

    def _write(self, writer: asyncio.StreamWriter, status: str, kind: str, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def works(count: int, tokens: int = 4) -> list[Work]:
    return [Work([number] * 3, tokens) for number in range(count)]


def measured(server: FakeServer, load: Load, some: list[Work], timeout: float = 10.0) -> Run:
    async def main() -> Run:
        client = Client(server.url, timeout=timeout)
        calls = [client.call("fake", one.prompt, one) for one in some]
        return await measure(client, load, calls, [] if load.concurrency else load.times(some, 0))

    return asyncio.run(main())


def at_once(server: FakeServer, count: int, tokens: int = 4, timeout: float = 10.0) -> Run:
    return measured(server, Load(arrivals=CLOSED, concurrency=count), works(count, tokens), timeout)


def answer(began: float, first: float, gaps: list[float], tail: float = 0.0, **more: Any) -> Answer:
    """By hand: sent at `began`, first token after `first`, others after gaps, the end `tail` after the last."""
    times = [began + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    usual = {"due": began, "sent": began, "asked_tokens": len(times), "prompt_tokens": 10, "output_tokens": len(times)}
    return Answer(**(usual | {"times": times, "ended": times[-1] + tail} | more))


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 100, 101, 250])
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(count: int) -> None:
    source = random.Random(count)
    values = [source.choice([source.random(), 0.5]) for _ in range(count)]
    for share in (50, 90, 99):
        expected = min(value for value in values if 100 * sum(other <= value for other in values) >= share * count)
        assert percentiles(values)[f"p{share}"] == expected
    assert percentiles([]) is None


def test_figures_by_hand() -> None:
    answers = [
        answer(100.0, 0.5, [0.1, 0.2, 0.3], 0.1),
        answer(101.0, 1.5, [0.05] * 10, 0.0, due=100.9),
        answer(102.0, 0.2, [], 0.0, asked_tokens=2),
        answer(102.5, 0.2, [9.0], 0.0, failure="timeout", detail="after 10 s"),
        answer(103.0, 0.1, [1.0, 1.0], 0.0, output_tokens=21),
    ]
    figures = Run(load=Load(arrivals="poisson", rate=1.0), answers=answers).figures(Objectives(ttft=500.001, tpot=150.0))
    seconds = 102.5 + 9.2 - 100.0
    assert figures["seconds"] == pytest.approx(seconds)
    assert (figures["requests"], figures["completed"], figures["short"]) == (5, 4, 1)
    assert (figures["failures"], figures["failure_details"]) == ({"timeout": 1}, {"timeout": "after 10 s"})
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (40, 4 + 11 + 1 + 21)
    assert figures["output_tokens_per_s"] == pytest.approx(37 / seconds)
    assert figures["total_tokens_per_s"] == pytest.approx(77 / seconds)
    assert figures["requests_per_s"] == pytest.approx(4 / seconds)
    assert figures["sent_per_s"] == pytest.approx(4 / 3)
    assert figures["ttft_s"] == pytest.approx({"p50": 0.2, "p90": 1.5, "p99": 1.5})
    assert figures["tpot_s"] == pytest.approx({"p50": 0.1, "p90": 0.2, "p99": 0.2})  # 0.6 / 3, 0.05, none, 2 / 20
    assert figures["itl_s"] == pytest.approx({"p50": 0.05, "p90": 1.0, "p99": 1.0})
    assert figures["e2e_s"] == pytest.approx({"p50": 1.2, "p90": 2.1, "p99": 2.1})
    assert figures["late_s"] == pytest.approx({"p50": 0.0, "p90": 0.1, "p99": 0.1})
    assert figures["good_share"] == 2 / 5  # the third, which has no second token, and the last
    assert figures["goodput_per_s"] == pytest.approx(2 / seconds)


def test_goodput_by_another_formula() -> None:
    source = random.Random(3)
    drawn = [(source.expovariate(2), source.uniform(0.01, 0.2), source.random() < 0.2) for _ in range(300)]
    answers = [answer(float(n), first, [gap] * 9, failure="timeout" if fails else None) for n, (first, gap, fails) in enumerate(drawn)]
    load = Load(arrivals="constant", rate=1.0)
    for ttft, tpot, e2e in ((0.4, None, None), (None, 0.1, None), (0.7, 0.15, 1.5), (None, None, 1.0)):
        limits = (ttft or math.inf, tpot or math.inf, e2e or math.inf)
        good = sum(not fails and first < limits[0] and gap < limits[1] and first + 9 * gap < limits[2] for first, gap, fails in drawn)
        given = {name: limit and limit * 1e3 for name, limit in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e))}
        figures = Run(load=load, answers=answers).figures(Objectives(**given))
        assert 0 < good < 300
        assert figures["good_share"] * 300 == pytest.approx(good)
        assert figures["goodput_per_s"] == pytest.approx(good / figures["seconds"])
    assert Run(load=load, answers=answers).figures(Objectives())["good_share"] is None


def test_poisson_arrivals_are_the_seeds_and_as_many_as_asked_for() -> None:
    some = works(20_001)
    times = Load(arrivals="poisson", rate=4.0).times(some, 7)
    assert times == Load(arrivals="poisson", rate=4.0).times(some, 7)
    assert times != Load(arrivals="poisson", rate=4.0).times(some, 8)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.05)
    assert Load(arrivals="poisson", rate=8.0).times(some, 7) == pytest.approx([moment / 2 for moment in times])


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert Load(arrivals="constant", rate=8.0).times(works(5), 0) == [0.0, 0.125, 0.25, 0.375, 0.5]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / traces.find(name).file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,3,2
2023-11-17 00:00:00.2500000,4,2
2023-11-17 00:00:01.0000001,5,2
"""


def test_a_trace_tells_when_requests_came(tmp_path: Path) -> None:
    write(tmp_path, "azure-conv", AZURE)
    rows = [{"timestamp": 3000 * n + 500, "input_length": 32, "output_length": 1, "hash_ids": [n]} for n in range(3)]
    write(tmp_path, "mooncake-scaled", "".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, "vidur", "num_prefill_tokens,num_decode_tokens\n3,2\n")
    assert [one.arrival for one in workload.load("mooncake-scaled", str(tmp_path))] == [0.5, 3.5, 6.5]
    assert [one.arrival for one in workload.load("vidur", str(tmp_path))] == [None]
    some = workload.load("azure-conv", str(tmp_path), scale=2)
    assert workload.fitting(some, 100, 50)[0].arrival == some[0].arrival is not None
    for stretch in (1.0, 4.0, 0.5):
        times = Load(arrivals="trace", time_stretch=stretch).times(some, 0)
        assert times == pytest.approx([0.0, 0.75 * stretch, 1.5 * stretch], abs=1e-5)


def test_a_real_trace_has_times_that_do_not_go_back(data: Path) -> None:
    for name in ("azure-conv", "azure-code", "mooncake", "mooncake-synthetic", "mooncake-scaled"):
        times = [request.arrival for request in traces.load(name, data, 500)]
        assert None not in times
        assert times == sorted(times)
        assert 1 < times[-1] - times[0] < 3600


def test_a_closed_loop_keeps_so_many_in_flight(server: FakeServer) -> None:
    result = measured(server, Load(arrivals=CLOSED, concurrency=3), works(14))
    assert server.most == 3
    assert (len(result.whole), len(server.bodies)) == (14, 14)
    assert [one.prompt_tokens for one in result.answers] == [4] * 14
    assert result.seconds >= 5 * (FIRST + 3 * GAP)
    assert result.figures(Objectives())["late_s"] is None


def test_an_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    server.first = 0.8
    result = measured(server, Load(arrivals="constant", rate=40.0), works(9))
    assert server.most == 9
    assert max(server.came) < min(server.answered)
    assert result.seconds >= 8 / 40 + 0.8
    dues = [one.due for one in result.answers]
    assert [due - dues[0] for due in dues] == pytest.approx([number / 40 for number in range(9)])
    assert all(0 <= one.late < 0.5 for one in result.answers)
    assert server.came[-1] - server.came[0] == pytest.approx(8 / 40, abs=0.3)


def test_latencies_are_those_of_the_server(server: FakeServer) -> None:
    server.first, server.gap = 0.15, 0.03
    (one,) = at_once(server, 1, tokens=6).answers
    assert 0.149 <= one.ttft < 1.0
    assert 0.0295 <= one.tpot < 0.3
    assert one.tpot == pytest.approx(sum(one.gaps) / 5)
    assert (len(one.gaps), one.output_tokens) == (5, 6)
    assert one.ttft + sum(one.gaps) <= one.e2e < one.ttft + sum(one.gaps) + 1.0


KINDS = {
    "busy": ("HTTP 429", "too much waits"),
    "broken": ("disconnect", "the connection was closed before the answer's end"),
    "slam": ("disconnect", "the connection was closed before the answer's end"),
    "faulty": ("error event", "the model failed"),
    "mangled": ("malformed", "DecodeError: JSON is malformed"),
    "gibberish": ("malformed", "HttpParser"),
    "plain": ("no stream", '{"choices": []}'),
    "unended": ("incomplete", "the stream has no end"),
    "aborted": ("ended early", "abort"),
    "hang": ("timeout", "after 0.5 s"),
}


def test_failures_are_counted_by_their_kind(server: FakeServer) -> None:
    ways = [way for number, way in enumerate(KINDS) for _ in range(number % 3 + 1)] + ["whole"] * 5
    server.behave = lambda number: ways[number]
    figures = at_once(server, len(ways), timeout=0.5).figures(Objectives(e2e=1e6))
    expected: dict[str, int] = {}
    for way in ways[:-5]:
        expected[KINDS[way][0]] = expected.get(KINDS[way][0], 0) + 1
    assert figures["failures"] == expected
    assert (figures["completed"], figures["good_share"]) == (5, 5 / len(ways))
    assert figures["output_tokens"] == 5 * 4
    assert server.in_flight <= 1 + list(KINDS).index("hang") % 3


@pytest.mark.parametrize("way", KINDS)
def test_a_failure_says_what_is_wrong(server: FakeServer, way: str) -> None:
    server.behave = lambda number: way
    (one,) = at_once(server, 1, timeout=0.5).answers
    kind, detail = KINDS[way]
    assert one.failure == kind
    assert one.detail.startswith(detail)
    assert 0 < one.e2e < 5


def test_a_server_that_is_not_there_is_a_failure(server: FakeServer) -> None:
    server.url = "http://127.0.0.1:1"
    assert [one.failure for one in at_once(server, 2).answers] == ["no connection"] * 2


@pytest.mark.parametrize("way", ["whole", "held", "bytewise", "uncounted", "short"])
def test_tokens_are_counted(server: FakeServer, way: str) -> None:
    """By the server; where it does not say, by chunks, of which those with a text held back are some."""
    server.behave = lambda number: way
    result = at_once(server, 2, tokens=5)
    count, prompt = (4 if way == "short" else 5), (3 if way == "uncounted" else 4)
    for one in result.whole:
        assert (one.output_tokens, len(one.times), one.prompt_tokens) == (count, count, prompt)
    assert len(result.whole) == 2
    assert result.figures(Objectives())["short"] == (2 if way == "short" else 0)


def asked(server: FakeServer, **options: Any) -> None:
    run(**({"url": server.url, "requests": 6, "scale": 100.0, "concurrency": None if "rates" in options else 3} | options))


def test_what_is_sent(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked(server, url=server.url + "/v1/", api_key="secret", json="-")
    warm, *bodies = server.bodies
    expected = workload.load(count=6, scale=100.0)
    assert warm["max_tokens"] <= serve.WARM_UP_TOKENS
    assert sorted(body["max_tokens"] for body in bodies) == sorted(one.tokens for one in expected)
    for body in bodies:
        assert {name: value for name, value in body.items() if name not in ("prompt", "max_tokens")} == {
            "model": "fake",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert body["prompt"][1:] in [one.prompt[1:] for one in expected]
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)
    assert json.loads(capsys.readouterr().out)["runs"][0]["completed"] == 6


def test_prompts_share_within_a_measurement_and_not_with_others() -> None:
    some = [Work([5] * 20, 1), Work([5] * 10 + [6] * 10, 1), Work([4] * 20, 1)]
    (first, second, third), (other, *_) = fresh(some, 50_000), fresh(some, 50_000)
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]
    assert len({first[0], third[0], other[0]}) == 3
    assert first[1:] == other[1:]
    one, two, three = (text.split(" ") for text in texts(some))
    assert one[:10] == two[:10]
    assert one[10:] != two[10:]
    assert one[:10] != three[:10]
    assert [len(text) for text in (one, two, three)] == [20] * 3
    assert set(one + two + three) <= set(WORDS)
    assert texts(some)[0].split(" ") != one


def test_words_are_sent_where_that_is_asked_for(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked(server, text=True, model="other", warmup=0)
    assert sorted(len(body["prompt"].split()) for body in server.bodies) == sorted(
        len(one.prompt) for one in workload.load(count=6, scale=100.0)
    )
    assert {body["model"] for body in server.bodies} == {"other"}
    assert "prompt words" in capsys.readouterr().out


def test_what_the_server_cannot_hold_is_left_out(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sorted(one.length for one in workload.load(count=6, scale=100.0))
    server.cards["data"][0]["max_model_len"] = lengths[3]
    asked(server, vocab_size=7, warmup=0)
    assert len(server.bodies) == sum(length <= lengths[3] for length in lengths) < 6
    assert all(token < 7 for body in server.bodies for token in body["prompt"])
    assert "requests are left out" in capsys.readouterr().out
    server.cards["data"][0]["max_model_len"] = 1
    with pytest.raises(InvalidValueError, match="requests: none of 6 fits in 1 tokens"):
        asked(server)


def test_rates_are_measured_in_turn(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "serve.png"
    asked(server, rates=[50.0, 20.0, 50.0], slo_ttft_ms=5000, json=str(file), out=str(picture))
    report = json.loads(file.read_text())
    assert {name: report[name] for name in ("model", "dataset", "requests", "left_out", "objectives_ms")} == {
        "model": "fake",
        "dataset": "shared",
        "requests": 6,
        "left_out": 0,
        "objectives_ms": {"ttft": 5000},
    }
    for rate, figures in zip((50.0, 20.0, 50.0), report["runs"], strict=True):
        assert (figures["arrivals"], figures["rate"], figures["concurrency"]) == ("poisson", rate, None)
        assert (figures["completed"], figures["failures"], figures["good_share"]) == (6, {}, 1.0)
        for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "late_s"):
            assert 0 <= figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"] < 5
        ttfts = sorted(one["ttft_s"] for one in figures["answers"])
        assert figures["ttft_s"] == {"p50": ttfts[2], "p90": ttfts[5], "p99": ttfts[5]}
        assert figures["output_tokens"] == sum(one["output_tokens"] for one in figures["answers"]) == report["output_tokens"]
        assert 0 < figures["client_busy"] < 1
    dues = [[one["due_s"] for one in figures["answers"]] for figures in report["runs"]]
    assert dues[0] == pytest.approx(dues[2], abs=1e-6)
    assert dues[1] == pytest.approx([2.5 * due for due in dues[0]], abs=1e-6)
    assert len({tuple(body["prompt"]) for body in server.bodies[1:]}) == 18
    printed = capsys.readouterr()
    assert all(text in printed.out for text in ("poisson, 50/s", "poisson, 20/s", "TTFT: P50", "good, %", "within TTFT 5000 ms"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_measurement_is_drawn_as_shares_even_where_all_fails(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, way in enumerate(("whole", "busy")):
        server.behave = lambda number, way=way: way
        asked(server, warmup=0, out=str(tmp_path / f"{number}.png"))
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
    asked(server, warmup=0, rates=[100.0, 200.0], out=str(tmp_path / "rates.png"))


def test_a_trace_is_sent_at_its_times(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, first, second, third = AZURE.splitlines()
    write(tmp_path, "azure-conv", "\n".join((header, second, first, third)))
    asked(server, dataset="azure-conv", data=str(tmp_path), scale=1.0, concurrency=None, arrivals="trace", time_stretch=0.2, json="-")
    (figures,) = json.loads(capsys.readouterr().out)["runs"]
    assert [one["due_s"] for one in figures["answers"]] == pytest.approx([0.0, 0.15, 0.3], abs=1e-3)
    assert [len(body["prompt"]) for body in server.bodies[1:]] == [3, 4, 5]


def test_a_fault_of_all_requests_is_told_before_the_load(server: FakeServer) -> None:
    server.behave = lambda number: "busy"
    with pytest.raises(OctavoError, match=r"url: http://\S+ fails to warm up: HTTP 429: too much waits"):
        asked(server, warmup=2)
    assert len(server.bodies) == 2


def test_a_server_without_a_list_of_models_is_asked_by_name(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.cards = {"nothing": 1}
    with pytest.raises(OctavoError, match="/v1/models does not list models"):
        asked(server)
    asked(server, model="mine")
    assert {body["model"] for body in server.bodies} == {"mine"}
    server.cards = {"data": []}
    with pytest.raises(OctavoError, match="lists no model"):
        asked(server)


def test_the_command_measures(server: FakeServer) -> None:
    words = f"bench serve --url {server.url} --requests 4 --scale 100 --concurrency 2 --slo-tpot-ms 500 --json -"
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stderr) == (0, "2 in flight: 4 requests\n")
    assert json.loads(result.stdout)["runs"][0]["good_share"] == 1.0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "rate: not given; one of rate, arrivals trace and concurrency"),
        ("--arrivals poisson", "rate: not given"),
        ("--rate 1 --concurrency 2", "concurrency: answers decide when requests are sent, not a rate"),
        ("--arrivals trace --concurrency 2", "concurrency: answers decide when requests are sent, not arrivals"),
        ("--arrivals constant --concurrency 2", "concurrency: answers decide"),
        ("--arrivals trace --rate 1", "rate: the trace's times decide"),
        ("--arrivals trace", "arrivals: 'trace'; shared does not say when requests came"),
        ("--arrivals sometimes --rate 1", "arrivals: 'sometimes'; allowed: poisson, constant, trace"),
        ("--rate 1 --time-stretch 2", "time_stretch: it is of the times of arrivals trace"),
        ("--arrivals trace --time-stretch 0", "time_stretch: 0.0; allowed: a number above 0"),
        ("--rate 1 --rate 0", "rate: 0.0; allowed: a number above 0"),
        ("--rate nan", "rate: nan; allowed"),
        ("--concurrency 0", "concurrency: 0; allowed: a whole number from 1"),
        ("--rate 1 --warmup -1", "warmup: -1; allowed: a whole number from 0"),
        ("--rate 1 --timeout 0", "timeout: 0.0; allowed"),
        ("--rate 1 --slo-e2e-ms -5", "slo_e2e_ms: -5.0; allowed"),
        ("--rate 1 --text --vocab-size 9", "vocab_size: with text no ids are sent"),
        ("--rate 1 --requests 0", "requests: 0; allowed"),
        ("--rate 1 --dataset nonsense", "dataset: 'nonsense'; allowed: shared, "),
        ("--rate 1 --url ftp://there", "url: 'ftp://there'; allowed: http://HOST:PORT"),
        ("--rate 1 --url http://there:port", "url: 'http://there:port'; allowed"),
        ("--rate 1 --json nowhere/x.json", "json: there is no folder"),
        ("--rate 1 --out nowhere/x.png", "out: there is no folder"),
        ("--rate 1 --url http://127.0.0.1:1", "url: http://127.0.0.1:1/v1/models does not answer (no connection: "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *words.split()])
    assert (result.exit_code != 0, result.stdout) == (True, "")
    assert result.stderr.startswith(f"octavo: error: {complaint}")
    assert result.stderr.count("\n") == 1
