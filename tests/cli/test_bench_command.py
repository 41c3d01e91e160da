"""`octavo bench`: what is typed reaches the benchmark, and what it refuses is one line."""

import inspect

import pytest

from octavo.bench import latency, memory, throughput
from octavo.config import EngineConfig

SIGNATURES = {module: inspect.signature(module.run) for module in (latency, memory, throughput)}


def noted(monkeypatch, module):
    """What a benchmark is called with, instead of running."""
    calls = []
    monkeypatch.setattr(module, "run", lambda *values, **named: calls.append(SIGNATURES[module].bind(*values, **named).arguments))
    return calls


def defaults(module):
    """What it is called with where nothing is said."""
    return {name: parameter.default for name, parameter in SIGNATURES[module].parameters.items()}


@pytest.fixture
def asked(monkeypatch):
    return noted(monkeypatch, memory)


def test_defaults_are_the_benchmarks(octavo, asked):
    assert octavo("bench", "memory").exit_code == 0
    assert asked == [defaults(memory)]


def test_every_value_arrives(octavo, asked):
    words = (
        "--dataset azure-code --data here --requests all --kv-memory 1GiB --kv-bytes-per-token 1024 --context 4096 "
        "--max-batch-size 8 --prefill-chunk-size 64 --block-size 4 --block-size 32 --no-kernels --out picture.png --json"
    )
    result = octavo("bench", "memory", *words.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert asked == [
        {
            "dataset": "azure-code",
            "data": "here",
            "requests": "all",
            "kv_memory": "1GiB",
            "kv_bytes_per_token": 1024,
            "context": 4096,
            "max_batch_size": 8,
            "prefill_chunk_size": 64,
            "block_sizes": [4, 32],
            "kernels": False,
            "out": "picture.png",
            "json": True,
        }
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dataset", "nonsense"), "dataset: 'nonsense'; allowed: azure-conv, "),
        (("--data", "nowhere"), "data: nowhere"),
    ],
)
def test_what_it_refuses_is_one_line(octavo, words, sentence):
    result = octavo("bench", "memory", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"octavo: error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_block_holds_a_token_at_least(octavo):
    result = octavo("bench", "memory", "--block-size", "0")
    assert result.exit_code == 2
    assert "--block-size" in result.stderr


def test_throughput_takes_engine_settings_and_its_own(octavo, monkeypatch):
    calls = noted(monkeypatch, throughput)
    assert octavo("bench", "throughput").exit_code == 0
    assert calls.pop() == defaults(throughput) | {"model": "smollm2-135m", "config": EngineConfig()}
    words = (
        "a-model --dataset vidur --data here --requests 9 --scale 2.5 --repeats 7 --no-warm-up --batching both --memory reserve "
        "--contexts 2 --contexts 8 --sweep --json figures.json --out picture.png --max-batch-size 64 --block-size 4 --dtype float32"
    )
    result = octavo("bench", "throughput", *words.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert calls == [
        {
            "model": "a-model",
            "config": EngineConfig.create(max_batch_size=64, block_size=4, dtype="float32"),
            "dataset": "vidur",
            "data": "here",
            "requests": 9,
            "scale": 2.5,
            "repeats": 7,
            "warm_up": False,
            "batching": "both",
            "memory": "reserve",
            "contexts": [2, 8],
            "sweep": True,
            "json": "figures.json",
            "out": "picture.png",
        }
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--batching", "none"), "batching: 'none'; allowed: static, continuous, both"),
        (("--dataset", "nonsense"), "dataset: 'nonsense'; allowed: shared, azure-conv, "),
        (("--block-size", "3"), "--block-size: 3; allowed: a power of two"),
    ],
)
def test_throughput_refuses_in_one_line(octavo, words, sentence):
    result = octavo("bench", "throughput", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"octavo: error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_latency_takes_engine_settings_and_its_own(octavo, monkeypatch):
    calls = noted(monkeypatch, latency)
    assert octavo("bench", "latency").exit_code == 0
    assert calls.pop() == defaults(latency) | {"model": "smollm2-135m", "config": EngineConfig()}
    words = (
        "a-model --prompt-lengths 1,2 --context-lengths 3 --output-tokens 4 --repeats 5 --no-warm-up --profile --sequences 6 "
        "--json - --out picture.png --prefill-chunk-size null"
    )
    result = octavo("bench", "latency", *words.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert calls == [
        {
            "model": "a-model",
            "config": EngineConfig.create(prefill_chunk_size=None),
            "prompt_lengths": "1,2",
            "context_lengths": "3",
            "output_tokens": 4,
            "repeats": 5,
            "warm_up": False,
            "profile": True,
            "sequences": 6,
            "json": "-",
            "out": "picture.png",
        }
    ]


def test_latency_refuses_in_one_line(octavo):
    result = octavo("bench", "latency", "--prompt-lengths", "few")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "octavo: error: prompt_lengths: 'few'; allowed: whole numbers from 1 with commas between them\n"


def test_help_names_the_commands(octavo):
    assert all(f" {name} " in octavo("bench", "--help").stdout for name in ("memory", "throughput", "latency"))
    lines = octavo("--help").stdout
    assert all(f" {name} " in lines for name in ("pull", "list", "rm", "generate", "chat", "advise", "config", "bench"))
