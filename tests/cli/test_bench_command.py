"""`octavo bench`: what is typed reaches the benchmark, and what it refuses is one line."""

import inspect

import pytest

from octavo.bench import memory

SIGNATURE = inspect.signature(memory.run)


@pytest.fixture
def asked(monkeypatch):
    """What the benchmark was called with."""
    calls = []
    monkeypatch.setattr(memory, "run", lambda **values: calls.append(SIGNATURE.bind(**values).arguments))
    return calls


def test_defaults_are_the_benchmarks(octavo, asked):
    assert octavo("bench", "memory").exit_code == 0
    assert asked == [{name: parameter.default for name, parameter in SIGNATURE.parameters.items()}]


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


def test_help_names_the_commands(octavo):
    assert "memory" in octavo("bench", "--help").stdout
    lines = octavo("--help").stdout
    assert all(f" {name} " in lines for name in ("pull", "list", "rm", "generate", "chat", "advise", "config", "bench"))
