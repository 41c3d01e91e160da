"""Settings: the same declaration for file, flags and keywords, and one clear sentence for each wrong value."""

import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from octavo.config import EngineConfig, parse_flag, settings
from octavo.errors import ConfigError, OctavoError, shown

NAMES = [f.name for _, f in settings()]
SECTION = {f.name: name for name, f in settings()}

GOOD = {
    "block_size": [1, 2, 16, 256],
    "prealloc_blocks": [0, 1, 1024],
    "max_blocks_per_seq": ["auto", 1, 512],
    "kv_cache_memory": ["auto", 0, 123456],
    "max_blocks": [None, 1, 100000],
    "kv_cache_dtype": ["auto", "float32", "bfloat16", "int8"],
    "prefix_caching": [True, False],
    "swap_space": [0, 1, 1 << 30, 2**60],
    "check_invariants": [True, False],
    "max_batch_size": [1, 32, 65536],
    "prefill_chunk_size": [None, 1, 256],
    "timeout_ms": [None, 0.5, 5000],
    "policy": ["fcfs", "priority"],
    "model_impl": ["auto", "octavo", "transformers"],
    "dtype": ["auto", "float32", "bfloat16"],
    "quantization": ["auto", "none", "int8", "int4"],
    "max_model_len": [None, 1, 8192],
    "device": ["auto", "cpu", "cuda"],
    "threads": ["auto", 1, 64],
    "seed": [0, 1, 2**63 - 1],
}
BAD = {
    "block_size": [0, -16, 3, 24, 512, 16.0, "16", True, None, [16]],
    "prealloc_blocks": [-1, 1.5, "many", None, False],
    "max_blocks_per_seq": [0, -1, 1.5, None, "all", True],
    "kv_cache_memory": [-1, 1.5, "much", "1.2.3GB", "-1GB", None, True, "GB", ".", "5iB", "9" * 400 + "GB"],
    "max_blocks": [0, -1, 2.0, "auto", True],
    "kv_cache_dtype": ["float16", "fp8", 32, None, ["float32"]],
    "prefix_caching": ["yes", 1, None],
    "swap_space": [-1, None, "some", True, 2**60 + 1, 1.5],
    "check_invariants": ["yes", 0, None],
    "max_batch_size": [0, -1, 65537, 1.0, "32", None, True],
    "prefill_chunk_size": [0, -1, 2.5, "auto", True],
    "timeout_ms": [0, -5, float("nan"), float("inf"), "5s", True, [5]],
    "policy": ["lifo", 1, None],
    "model_impl": ["vllm", True, None],
    "dtype": ["float16", "bf16", 1, None],
    "quantization": ["int3", True, 4, None],
    "max_model_len": [0, -1, 1.5, "auto", True],
    "device": ["tpu", "cuda:0", 0, None],
    "threads": [0, -1, 4097, 1.5, None, True],
    "seed": [-1, 2**63, 0.5, None, True],
}


def pairs(table):
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, values in table.items() for value in values]


def get(config, name):
    return getattr(getattr(config, SECTION[name]), name)


def test_tables_cover_every_setting():
    assert list(GOOD) == list(BAD) == NAMES


BRIEF = """
memory:
  block_size: 16
  prealloc_blocks: 1024
  max_blocks_per_seq: 512
scheduler:
  max_batch_size: 32
  prefill_chunk_size: 256
  timeout_ms: 5000
"""


def test_file_of_the_brief_works_as_written(tmp_path):
    (tmp_path / "octavo.yaml").write_text(BRIEF)
    config = EngineConfig.create(tmp_path / "octavo.yaml")
    assert (config.memory.block_size, config.memory.prealloc_blocks, config.memory.max_blocks_per_seq) == (16, 1024, 512)
    assert (config.scheduler.max_batch_size, config.scheduler.prefill_chunk_size, config.scheduler.timeout_ms) == (32, 256, 5000)
    assert config.model == EngineConfig().model


def test_defaults_stand():
    assert EngineConfig.create() == EngineConfig.create({}) == EngineConfig()
    config = EngineConfig()
    assert (config.memory.block_size, config.memory.prealloc_blocks, config.memory.max_blocks_per_seq) == (16, 1024, "auto")
    assert (config.memory.kv_cache_memory, config.memory.max_blocks, config.memory.kv_cache_dtype) == ("auto", None, "auto")
    assert (config.memory.prefix_caching, config.memory.swap_space, config.memory.check_invariants) == (True, 0, False)
    assert config.scheduler.policy == "fcfs"
    assert (config.scheduler.max_batch_size, config.scheduler.prefill_chunk_size, config.scheduler.timeout_ms) == (32, 256, None)
    assert (config.model.dtype, config.model.device, config.model.threads, config.model.seed) == ("auto", "auto", "auto", 0)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "octavo.yaml").write_text("memory: {block_size: 32, max_blocks: 50}\nmodel:\n")
    config = EngineConfig.create(str(tmp_path / "octavo.yaml"), block_size=8, seed=3)
    assert (config.memory.block_size, config.memory.max_blocks, config.memory.prealloc_blocks, config.model.seed) == (8, 50, 1024, 3)


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_value_is_taken_from_file_and_keyword_alike(name, value):
    config = EngineConfig.create(**{name: value})
    assert get(config, name) == value
    assert EngineConfig.create({SECTION[name]: {name: value}}) == config


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_value_is_refused_with_name_value_and_range(name, value):
    for refused, place in (
        (lambda: EngineConfig.create(**{name: value}), name),
        (lambda: EngineConfig.create({SECTION[name]: {name: value}}), f"{SECTION[name]}.{name}"),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert str(caught.value).startswith(f"{place}: {shown(value)}; allowed: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        ("1GB", 10**9),
        ("1g", 10**9),
        ("1.5gi", 3 << 29),
        ("10k", 10_000),
        ("4KiB", 4096),
        ("77", 77),
        ("77B", 77),
        (" 1MB ", 10**6),
        ("0.5TB", 5 * 10**11),
        ("1TiB", 1 << 40),
        ("1_000", None),
    ],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(ConfigError):
            EngineConfig.create(kv_cache_memory=text)
    else:
        config = EngineConfig.create(kv_cache_memory=text, swap_space=text)
        assert config.memory.kv_cache_memory == config.memory.swap_space == size


def test_memory_beyond_a_tebibyte_is_a_size_like_any_other():
    assert EngineConfig.create(kv_cache_memory="2TiB").memory.kv_cache_memory == 2 << 40


def test_timeout_is_one_that_a_deadline_can_be_made_of():
    with pytest.raises(ConfigError, match="timeout_ms"):
        EngineConfig.create(timeout_ms=10**400)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"memroy": {}}, "memroy: no such section; allowed: memory, scheduler, model"),
        ({"memory": {"block_sise": 1}}, r"memory.block_sise: no such setting; allowed: block_size, "),
        ({"memory": {"seed": 1}}, "memory.seed: no such setting"),
        ({"memory": {1: 1}}, "memory.1: no such setting"),
        ({1: {}}, "1: no such section"),
        ({"memory": 16}, "memory: 16; allowed: a section"),
        ({"memory": [16]}, r"memory: \[16\]; allowed: a section"),
        ({"block_size": 16}, "block_size: no such section"),
    ],
)
def test_unknown_key_is_refused_by_name(file, sentence):
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.create(file)


def test_unknown_keyword_is_refused_by_name():
    with pytest.raises(ConfigError, match="block_sise: no such setting; allowed: block_size"):
        EngineConfig.create(block_sise=16)


def test_two_ceilings_contradict_each_other():
    with pytest.raises(ConfigError, match="max_blocks: 5 and kv_cache_memory: 1000000000 both"):
        EngineConfig.create(max_blocks=5, kv_cache_memory="1GB")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"memory: [1", "not a YAML file"),
        (b"a: b: c", "not a YAML file"),
        (b"\xff\xfe\xff", "not a YAML file"),
        (b"? [1]\n: 2", "no such section|not a YAML file"),
        (b"- memory", "allowed: the sections memory, scheduler, model"),
        (b"16", "allowed: the sections"),
        (b"memory: {block_size: !!python/object:os.system 1}", "not a YAML file"),
        (b"scheduler: {timeout_ms: 2001-13-01}", "octavo.yaml"),
    ],
)
def test_file_that_is_no_configuration_is_refused_in_one_sentence(tmp_path, content, sentence):
    (tmp_path / "octavo.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        EngineConfig.create(tmp_path / "octavo.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "# nothing\n", "memory:\n", "{}"])
def test_empty_file_is_the_defaults(tmp_path, content):
    (tmp_path / "octavo.yaml").write_text(content)
    assert EngineConfig.create(tmp_path / "octavo.yaml") == EngineConfig()


def test_missing_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"{path.name}: the configuration file cannot be read"):
            EngineConfig.create(path)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"block_size": 4, "max_blocks": 9, "timeout_ms": 2.5},
        {"kv_cache_memory": "1GiB", "prefill_chunk_size": None, "threads": 2, "seed": 2**63 - 1},
    ],
)
def test_what_is_written_is_read_back(tmp_path, values):
    config = EngineConfig.create(**values)
    assert EngineConfig.create(config.to_dict()) == config
    (tmp_path / "octavo.yaml").write_text(yaml.safe_dump(config.to_dict()))
    assert EngineConfig.create(tmp_path / "octavo.yaml") == config
    assert hash(EngineConfig.create(**values)) == hash(config)


def test_configuration_is_frozen():
    config = EngineConfig()
    for section, name in ((config, "memory"), (config.memory, "block_size"), (config.scheduler, "policy"), (config.model, "seed")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, name, None)


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_flag_is_parsed_as_the_file_would_be(name, value):
    text = yaml.safe_dump(value).removesuffix("...\n").strip()
    assert parse_flag(name, text) == get(EngineConfig.create(**{name: value}), name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("block_size", "large"),
        ("block_size", "1.5"),
        ("block_size", "[1"),
        ("timeout_ms", "true"),
        ("timeout_ms", "2001-13-01"),
        ("device", ""),
        ("seed", "9" * 5000),
        ("seed", "a: b: c"),
    ],
)
def test_bad_flag_is_refused_under_the_name_it_was_typed(name, text):
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: .*; allowed: "):
        parse_flag(name, text)


def test_every_setting_says_what_it_is_and_what_it_allows():
    for _, f in settings():
        assert len(f.metadata["help"]) > 10
        assert f.metadata["kind"].allowed
        assert f.metadata["kind"].parse(f.default) == f.default


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=3)
    | st.just(10**400)
    | st.sampled_from(["auto", "1GB", "5i", "null"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@fuzz(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*NAMES, "nonsense"]), VALUES, max_size=3))
def test_any_values_give_a_configuration_or_one_clear_sentence(values):
    try:
        config = EngineConfig.create(**values)
    except OctavoError:
        return
    assert EngineConfig.create(config.to_dict()) == config


@fuzz(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.text() | st.from_regex(r"[0-9.]{1,4}[kmgt]?i?b?", fullmatch=True))
def test_any_flag_gives_a_value_or_one_clear_sentence(name, text):
    try:
        value = parse_flag(name, text)
    except OctavoError as error:
        sentence = str(error)
    else:
        sentence = "--"
        assert get(EngineConfig.create(**{name: value}), name) == value
    assert sentence.startswith("--")


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "octavo.yaml"
    path.write_text("memory: {blok_size: 3}\n")
    with pytest.raises(ConfigError, match=rf"^{path}: memory\.blok_size: no such setting"):
        EngineConfig.create(path)
