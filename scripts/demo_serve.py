#!/usr/bin/env python3
"""Start a server, ask it with the official client, whole and streamed, and stop it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import openai

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


def main() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--drain-seconds", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                print(line, end="")
                if found := re.search(r" at (http://\S+/v1)", line):
                    break
            else:
                raise SystemExit("the server ended before it was ready")
            client = openai.OpenAI(base_url=found[1], api_key="none")
            print("models:", [model.id for model in client.models.list()])
            asked = {"model": "smollm2-135m", "messages": QUESTION, "temperature": 0, "max_tokens": 32}
            answer = client.chat.completions.create(**asked)
            print("answer:", answer.choices[0].message.content, answer.usage)
            print("streamed: ", end="")
            for chunk in client.chat.completions.create(**asked, stream=True):
                print(chunk.choices[0].delta.content or "", end="|", flush=True)
            print()
        finally:
            server.send_signal(signal.SIGTERM)
            print("stopped:", server.wait(20))


if __name__ == "__main__":
    main()
