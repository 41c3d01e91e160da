"""A server in a process of its own, as `octavo serve` starts it, and what tests ask it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx


class Server:
    """url without /v1. The log is in `log`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = httpx.Client(base_url=url, timeout=120)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, content: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=content, **more)

    def stats(self) -> dict[str, Any]:
        return self.get("/stats").json()

    def wait_idle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Until nothing runs or waits, and no block is used; returns the figures."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == stats["swapped"] == stats["blocks"]["used"] == 0:
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)

    def wait_running(self, count: int = 1, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.stats()["running"] < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextlib.contextmanager
def served(folder: Path, *flags: str, model: str = "smollm2-135m", wait: bool = True) -> Iterator[Server]:
    """Start, wait until it is ready, and end it with SIGTERM."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--drain-seconds", "0"]
    command += ["--max-model-len", "2048", "--prealloc-blocks", "64", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        server = Server(process, _url(process, log), log)
        with server.client:
            if wait:
                assert server.get("/ready").status_code == 200
            yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while True:
        text = log.read_text(errors="replace")
        if found := re.search(r" at (http://\S+?)/v1", text):
            return found[1]
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
