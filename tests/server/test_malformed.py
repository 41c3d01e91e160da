"""Requests that nobody should send: each is refused with a 4xx, memory stays where it was, and the server answers after."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import Server, served

KINDS = ["completions", "chat/completions"]
ODD: list[Any] = [None, True, -1, 0, 1.5, 1e308, 10**30, "", "x", "\ud800", "\x00", [], [[]], {}, {"a": 1}, [None], "a" * 3000, -0.0]
FIELDS = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "stream",
    "stream_options",
    "allowed_token_ids",
    "structured_outputs",
    "logits_processors",
    "timeout_ms",
    "priority",
    "cache_salt",
    "request_id",
    "model",
    "echo",
    "suffix",
    "best_of",
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "response_format",
    "top_logprobs",
    "user",
    "metadata",
    "functions",
    "audio",
    "nonsense",
]


def nested(depth: int, source: random.Random) -> str:
    opening, closing = source.choice([("[", "]"), ('{"a":', "}")])
    return opening * depth + "1" + closing * depth


def bad_body(source: random.Random) -> bytes:
    """A body that no request has."""
    good: dict[str, Any] = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    match source.randrange(7):
        case 0:  # broken JSON
            text = json.dumps(good)
            return text[: source.randrange(len(text))].encode() + source.randbytes(source.randrange(4))
        case 1:
            return nested(source.choice([100, 10_000, 200_000]), source).encode()
        case 2:
            return source.randbytes(source.randrange(1, 2000))
        case 3:  # a number of thousands of digits, or beyond a float
            digits = source.choice(["9" * 5000, "1e99999", "-1e99999", "NaN", "Infinity", "0" * 50])
            return json.dumps(good)[:-1].encode() + f', "{source.choice(FIELDS)}": {digits}}}'.encode()
        case 4:
            return json.dumps(source.choice(ODD)).encode()
        case 5:  # wrong types at random places, of which some may be right by chance: an unknown field makes sure
            wrong = {source.choice(FIELDS): source.choice(ODD) for _ in range(source.randrange(1, 5))}
            return json.dumps(good | wrong | {"nonsense": 1}).encode()
        case _:
            message = {source.choice(["role", "content", "tool_calls", "name"]): source.choice(ODD) for _ in range(3)}
            return json.dumps({"messages": [message], "prompt": source.choice([{}, 1, [None], [[]], [[-1]]])}).encode()


RAW = [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nBad Header: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\nContent-Type: application/json\r\n\r\n{",
    b"FOO /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
]


async def exchange(server: Server, content: bytes, *, half_close: bool = False, timeout: float = 20) -> bytes:
    """What the server says to raw bytes, until it closes or has answered; nothing where it just closes."""
    place = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(content)
        await writer.drain()
        if half_close:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(4096), timeout)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(kind: str, body: bytes) -> bytes:
    head = (
        f"POST /v1/{kind} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def send_many(server: Server, count: int, seed: int) -> dict[str, int]:
    source, seen = random.Random(seed), {}
    turn = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with turn:
            if number % 10 == 0:
                content = source.choice(RAW)
            else:
                content = post(source.choice(KINDS), bad_body(source))
            half_close = number % 37 == 1
            answer = await exchange(server, content, half_close=half_close)
            status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"
            seen[status] = seen.get(status, 0) + 1
            closes = number % 10 == 0 or half_close
            assert status.startswith("4") or (status == "closed" and closes), (content[:300], answer[:300])

    await asyncio.gather(*(one(number) for number in range(count)))
    return seen


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that does not wait long for the rest of a request."""
    with served(tmp_path_factory.mktemp("strict"), "--request-seconds", "1") as server:
        yield server


def run(server: Server, count: int) -> None:
    asyncio.run(send_many(server, min(count, 500), seed=0))  # what is allocated once
    before = resident(server.process.pid)
    print(asyncio.run(send_many(server, count, seed=1)), "resident", before, "->", resident(server.process.pid))
    assert resident(server.process.pid) - before < 48 << 20
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
    server.wait_idle()
    assert "Traceback" not in server.log.read_text()


def test_a_thousand_malformed_requests(strict: Server):
    run(strict, 1000)


@pytest.mark.slow
def test_ten_thousand_malformed_requests(strict: Server):
    run(strict, 10_000)


def test_slow_senders_are_not_waited_for(tmp_path: Path):
    async def all_at_once(server: Server) -> list[bytes]:
        contents = [
            b"",
            b"POST /v1/comp",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{",
        ]
        return await asyncio.gather(*(exchange(server, content) for content in contents))

    with served(tmp_path, "--request-seconds", "1") as server:
        began = time.monotonic()
        answers = asyncio.run(all_at_once(server))
        assert time.monotonic() - began < 15
        assert [answer[9:12] for answer in answers] == [b"408"] * 4
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
