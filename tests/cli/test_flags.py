"""Flags are made of the declarations; `octavo config` shows what came of them."""

import json

import pytest
import yaml

from octavo.cli.flags import SAMPLING
from octavo.config import EngineConfig, settings
from octavo.sampling_params import SamplingParams


def shown(result):
    assert result.exit_code == 0, result.stderr
    return yaml.safe_load(result.stdout)


def test_every_setting_is_a_flag(octavo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("generate", "chat", "config"):
        text = octavo(command, "--help").stdout
        for _, f in settings():
            assert f"--{f.name.replace('_', '-')} " in text
            assert f.metadata["help"][:30] in text


def test_every_sampling_flag_is_a_field():
    assert set(SAMPLING) <= set(SamplingParams.__struct_fields__)


def test_defaults(octavo):
    assert shown(octavo("config")) == EngineConfig().to_dict()
    assert json.loads(octavo("config", "--json").stdout) == EngineConfig().to_dict()


FLAGS = "--block-size 32 --kv-cache-memory 2GiB --prefill-chunk-size null --timeout-ms 1500.5 --no-prefix-caching --threads 2"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_config_prints_config_accepts(octavo, tmp_path, form):
    first = octavo("config", *FLAGS.split(), *form)
    file = tmp_path / "octavo.yaml"
    file.write_text(first.stdout)
    assert octavo("config", "--config", file, *form).stdout == first.stdout
    values = shown(first)
    assert values["memory"]["block_size"] == 32
    assert values["memory"]["kv_cache_memory"] == 2 * 2**30
    assert values["scheduler"]["prefill_chunk_size"] is None
    assert values["model"]["threads"] == 2


def test_flags_win_over_the_file(octavo, tmp_path):
    (tmp_path / "octavo.yaml").write_text("memory: {block_size: 32, max_blocks: 5}")
    memory = shown(octavo("config", "--config", tmp_path / "octavo.yaml", "--block-size", 8))["memory"]
    assert (memory["block_size"], memory["max_blocks"]) == (8, 5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--block-size", "large"), "--block-size: 'large'; allowed: a power of two"),
        (("--device", "tpu"), "--device: 'tpu'; allowed: auto or cpu or cuda"),
        (("--quantization", "int3"), "--quantization: 'int3'; allowed: auto or none or int8 or int4"),
        (("--swap-space", "much"), "--swap-space: 'much'; allowed: bytes up to 2^60, or a size"),
        (("--policy", "lifo"), "--policy: 'lifo'; allowed: fcfs or priority"),
        (("--max-blocks", "5", "--kv-cache-memory", "1GB"), "both set the pool's ceiling"),
    ],
)
def test_wrong_values_are_refused_by_name(octavo, flags, sentence):
    result = octavo("config", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_what_reaches_the_engine(generate, llm):
    generate("Hi", "--block-size", 8, "--seed", 3, "--timeout-ms", 500, "--stop-token-id", 4, "--stop-token-id", 0, "--top-k", 0)
    config = EngineConfig.create(block_size=8, seed=3, timeout_ms=500)
    assert llm().config == config
    assert llm().params == [SamplingParams(max_tokens=128, seed=3, timeout_ms=500, stop_token_ids=(4, 0))]


def test_what_the_memory_manager_takes_is_a_flag(generate, llm):
    words = "--no-prefix-caching --swap-space 1GiB --policy priority --check-invariants"
    generate("Hi", *words.split())
    expected = EngineConfig.create(prefix_caching=False, swap_space=2**30, policy="priority", check_invariants=True)
    assert llm().config == expected
    words = "--n 3 --prompt-logprobs 0 --priority -4 --cache-salt ours --json"
    assert generate("Hi", *words.split()).exit_code == 0
    assert llm().params == [SamplingParams(max_tokens=128, n=3, prompt_logprobs=0, priority=-4, cache_salt="ours")]


def test_a_conversation_has_one_answer_and_one_user(chat):
    for flag in ("--n", "--prompt-logprobs", "--priority", "--cache-salt"):
        result = chat("Hi", flags=(flag, "2"))
        assert result.exit_code == 2
        assert "No such option" in result.stderr


def test_sampling_defaults_are_the_engines_but_for_max_tokens(generate, chat, llm):
    generate("Hi")
    assert llm().params == [SamplingParams(max_tokens=128)]
    chat("Hi")
    assert llm().params == [SamplingParams(max_tokens=256)]


def test_ignore_eos(generate, llm):
    generate("Hi", "--ignore-eos", "--temperature", "0.5", "--top-p", "0.9", "--min-p", "0.1", "--max-tokens", 2)
    assert llm().params == [SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.5, top_p=0.9, min_p=0.1)]
