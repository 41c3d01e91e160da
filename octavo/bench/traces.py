"""Public request traces as prompts and recorded answers in token ids, and what an endless cache would share of them.

Where a trace has lengths only, a request's tokens are its own and nothing is shared. Mooncake's `hash_ids` name blocks of content: the
same id stands for the same tokens, and its answers are unknown, hence unique. The agent's runs are text, four bytes of it a token.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from octavo.errors import InvalidValueError

DATA_VARIABLE = "OCTAVO_DATA"
DEFAULT_FOLDER = Path("../shared/data")

BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A prompt and the answer it got. arrival: when it came, in seconds from a moment that all of a file share, where that is known."""

    prompt: list[int]
    answer: list[int]
    arrival: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Dataset:
    """A file of a trace. sweep: how many of its requests are replayed at every block size where nothing else is asked for."""

    file: str
    origin: str
    sweep: int
    read: Callable[[Path], Iterator[TracedRequest]]
    has_prefixes: bool = False


def load(name: str, folder: str | Path | None = None, count: int | None = None) -> list[TracedRequest]:
    """The first `count` requests of a data set, all of them where it is None.

    Raises InvalidValueError where the data set is unknown, is not in the folder, or cannot be read.
    """
    dataset = find(name)
    path = Path(folder or os.environ.get(DATA_VARIABLE) or DEFAULT_FOLDER) / dataset.file
    if not path.is_file():
        raise InvalidValueError(
            f"data: {path} is not there; {name} comes from {dataset.origin}, and --data or {DATA_VARIABLE} names the folder that it lies in"
        )
    try:
        return list(islice(dataset.read(path), count))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"data: {path} is not in the form of {name}: {error!r}") from error


def find(name: str) -> Dataset:
    """Raises InvalidValueError where there is none of that name."""
    if name not in DATASETS:
        raise InvalidValueError(f"dataset: {name!r}; allowed: {', '.join(DATASETS)}")
    return DATASETS[name]


def ideal_share(requests: list[TracedRequest], block_size: int) -> float:
    """Share of the prompts' tokens that lie in blocks known from earlier requests, if nothing is ever forgotten.

    A set of all block-aligned prefixes, each by its chained hash. The last token of a prompt is always computed, and that of an
    answer never.
    """
    seen: set[int] = set()
    shared = 0
    for request in requests:
        tokens = request.prompt + request.answer[:-1]
        shareable = (len(request.prompt) - 1) // block_size
        prefix, known = 0, True
        for place in range(len(tokens) // block_size):
            prefix = hash((prefix, *tokens[place * block_size : (place + 1) * block_size]))
            known = known and place < shareable and prefix in seen
            shared += block_size * known
            seen.add(prefix)
    return shared / max(1, sum(len(request.prompt) for request in requests))


def _lengths(prompt_column: str, answer_column: str, path: Path) -> Iterator[TracedRequest]:
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            prompt, answer = [number] * int(row[prompt_column]), [number] * int(row[answer_column])
            yield TracedRequest(prompt, answer, _seconds(row.get("TIMESTAMP")))


def _seconds(moment: str | None) -> float | None:
    """Since 1970; None where it is no date and time."""
    try:
        return datetime.fromisoformat(moment or "").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _prefix_identities(block: int, path: Path) -> Iterator[TracedRequest]:
    rows = _json_lines(path)
    unused = 1 + max((max(row["hash_ids"], default=0) for row in rows), default=0)
    for number, row in enumerate(rows):
        prompt: list[int] = []
        for identity in row["hash_ids"]:
            prompt += [identity] * block
        length = row["input_length"]
        if not len(prompt) - block < length <= len(prompt):
            raise ValueError(f"{len(row['hash_ids'])} blocks of {block} tokens do not make {length}")
        del prompt[length:]
        arrival = row["timestamp"] / 1000 if "timestamp" in row else None
        yield TracedRequest(prompt, [unused + number] * row["output_length"], arrival)


def _agent_runs(path: Path) -> Iterator[TracedRequest]:
    """Each answer of the assistant is a request whose prompt is the run so far: the first ones of all runs, then the second ones."""
    vocabulary: dict[bytes, int] = {}
    runs = [list(_turns(run["messages"], vocabulary)) for run in _json_lines(path)]
    for turns in zip_longest(*runs):
        yield from (turn for turn in turns if turn)


def _turns(messages: list[dict[str, Any]], vocabulary: dict[bytes, int]) -> Iterator[TracedRequest]:
    tokens: list[int] = []
    for message in messages:
        calls = message.get("tool_calls")
        text = (message["content"] or "") + (json.dumps(calls) if calls else "")
        header = _tokens(f"<|im_start|>{message['role']}\n", vocabulary)
        body = _tokens(f"{text}<|im_end|>\n", vocabulary)
        if message["role"] == "assistant":
            yield TracedRequest(tokens + header, body)
        tokens += header + body


def _tokens(text: str, vocabulary: dict[bytes, int]) -> list[int]:
    """A token for every four bytes, numbered as they are first seen."""
    data = text.encode()
    pieces = (data[start : start + BYTES_PER_TOKEN] for start in range(0, len(data), BYTES_PER_TOKEN))
    return [vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


_AZURE = "https://github.com/Azure/AzurePublicDataset (data/{}; CC-BY-4.0)"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces/{}; Apache-2.0)"
_azure_lengths = partial(_lengths, "ContextTokens", "GeneratedTokens")

DATASETS = {
    "azure-conv": Dataset(
        "azure-llm-2023/AzureLLMInferenceTrace_conv.csv", _AZURE.format("AzureLLMInferenceTrace_conv.csv"), 1500, _azure_lengths
    ),
    "azure-code": Dataset(
        "azure-llm-2023/AzureLLMInferenceTrace_code.csv", _AZURE.format("AzureLLMInferenceTrace_code.csv"), 1500, _azure_lengths
    ),
    "vidur": Dataset(
        "vidur-arxiv-summarization/arxiv_summarization_lengths.csv",
        "https://github.com/microsoft/vidur (data/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv, "
        "every 14th row, first 2,000; MIT)",
        1000,
        partial(_lengths, "num_prefill_tokens", "num_decode_tokens"),
    ),
    "mooncake": Dataset(
        "mooncake-fast25/conversation_trace_first2000.jsonl",
        _MOONCAKE.format("conversation_trace.jsonl, first 2,000 lines"),
        200,
        partial(_prefix_identities, 512),
        True,
    ),
    "mooncake-synthetic": Dataset(
        "mooncake-fast25/synthetic_trace_first2000.jsonl",
        _MOONCAKE.format("synthetic_trace.jsonl, first 2,000 lines"),
        250,
        partial(_prefix_identities, 512),
        True,
    ),
    "mooncake-scaled": Dataset(
        "mooncake-fast25/conversation_scaled16_500.jsonl",
        _MOONCAKE.format("conversation_trace.jsonl, first 500 of at most 32,015 prompt tokens, prompts / 16, answers / 8"),
        500,
        partial(_prefix_identities, 32),
        True,
    ),
    "tau-bench": Dataset(
        "tau-bench-agent/gpt-4o-airline_trial0.jsonl",
        "https://github.com/sierra-research/tau-bench (historical_trajectories/gpt-4o-airline.json, trial 0, as JSON lines; MIT)",
        642,
        _agent_runs,
        True,
    ),
}
