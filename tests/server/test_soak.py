"""Clients that come and go: nothing is left behind. OCTAVO_SOAK_SECONDS says for how long."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, served

SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "40"))
CLIENTS = 64


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def visit(client: httpx.AsyncClient, source: random.Random, counts: dict[str, int]) -> None:
    """One request; a third of them are left at a random moment."""
    body: dict[str, Any] = {
        "prompt": "Once upon a time " * source.randrange(1, 60),
        "max_tokens": source.randrange(1, 120),
        "temperature": source.choice([0, 1]),
        "stream": source.random() < 0.7,
        "n": source.choice([1, 1, 1, 2]),
        "stop": source.choice([None, [" the"]]),
    }
    if source.random() < 0.1:
        body["structured_outputs"] = {"regex": "[a-z ]{1,40}"}
    if source.random() < 0.05:
        body["timeout_ms"] = source.choice([1, 500, 5000])
    leaves = source.uniform(0, 3) if source.random() < 1 / 3 else None
    try:
        async with asyncio.timeout(leaves):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                text = (await answer.aread()).decode()
                assert answer.status_code in (200, 408, 429), text
                counts[str(answer.status_code)] = counts.get(str(answer.status_code), 0) + 1
                if answer.status_code == 200 and body["stream"]:
                    assert text.rstrip().endswith("[DONE]")
    except TimeoutError:
        counts["left"] = counts.get("left", 0) + 1


async def crowd(server: Server, seconds: float, seed: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    end = time.monotonic() + seconds

    async def client(number: int, http: httpx.AsyncClient) -> None:
        source = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            await visit(http, source, counts)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(client(number, http) for number in range(CLIENTS)))
    return counts


def settled(server: Server) -> dict[str, int]:
    server.wait_idle(60)
    pid = server.process.pid
    deadline = time.monotonic() + 10
    while descriptors(pid) > 60 and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"resident": resident(pid), "descriptors": descriptors(pid), "threads": threads(pid)}


def soak(tmp_path: Path, seconds: float) -> None:
    with served(tmp_path, "--max-batch-size", "16", "--max-blocks", "512", "--prealloc-blocks", "512", "--check-invariants") as server:
        while server.stats()["blocks"]["total"] < 512:  # the pool's memory comes by and by
            server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
            time.sleep(0.2)
        asyncio.run(crowd(server, min(20.0, seconds / 3), seed=1))
        before = settled(server)
        counts = asyncio.run(crowd(server, seconds, seed=2))
        after = settled(server)
        print(counts, before, after)
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["threads"] <= before["threads"] + 1
        assert after["resident"] < before["resident"] + (64 << 20)
        assert counts["left"] > 5
        assert counts["200"] > 20
        assert "Traceback" not in server.log.read_text()


def test_a_crowd_leaves_nothing_behind(tmp_path: Path):
    soak(tmp_path, SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_crowd_for_half_an_hour(tmp_path: Path):
    soak(tmp_path, 1800)


def test_a_client_that_is_killed_frees_its_blocks(server: Server):
    body = {"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    code = (
        "import httpx\n"
        f"with httpx.stream('POST', '{server.url}/v1/completions', json={body}) as answer:\n"
        "    for line in answer.iter_lines(): print(line, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        client.kill()
    server.wait_idle(10)
