"""A record from a file to the terminal: what is printed, what can be pasted, what is refused."""

import io
import json
import os
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from rich.console import Console

from octavo.advice import Advice, advise
from octavo.cli import advise as command
from octavo.cli.advise import load, run, save, show, yaml_snippet
from octavo.config import EngineConfig
from octavo.core.stats import BlockStats, Record, Sample, Stats
from octavo.errors import InvalidValueError


def make_record(used=750, empty=0.1, running=10, waiting=0, **figures):
    blocks = BlockStats(1000, 1000 - used, 0, used, 1000, used)
    stats = Stats(**{f.name: 0 for f in fields(Stats)} | {"blocks": blocks, "finished": {"stop": 1}, "seconds": {"step": 1.5}} | figures)
    samples = [Sample(float(time), 1000, 0, used, round(empty * used * 16), running, waiting, 0) for time in range(3)]
    return Record(16, 2**20, 512, 32, 2048, stats, samples, [(20, 20), (40, 3)])


HEALTHY = make_record()
WRONG = make_record(used=960, empty=0.3, preemptions=4, recomputed_tokens=16000, prefill_rate=100.0)
CROWDED = make_record(used=320, running=32, waiting=500)


@pytest.fixture
def record_file(tmp_path):
    def write(content):
        path = tmp_path / "record.json"
        path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
        return str(path)

    return write


@pytest.fixture
def as_stdin(monkeypatch):
    def give(content, terminal=False):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: terminal))

    return give


class TestOutput:
    def test_plain_lines_where_there_is_no_terminal(self, record_file, capsys):
        run(record_file(WRONG), as_json=False)
        out = capsys.readouterr().out
        lines = out.splitlines()
        assert lines[2].split() == ["internal", "fragmentation", "30%", "change", "block_size:", "4"]
        assert lines[3].startswith("    The lengths of 2 answers predict ")
        assert "\x1b" not in out

    def test_a_table_on_a_terminal(self, monkeypatch, capsys):
        monkeypatch.setattr("rich.console.Console", lambda **options: Console(**options, force_terminal=True, width=150))
        show(WRONG, as_json=False)
        out = capsys.readouterr().out
        assert "internal fragmentation 30%" in out
        assert "\x1b[1;31mchange" in out
        assert "\nmemory:\n  block_size: 4\n" in out

    def test_json_is_the_list(self, record_file, capsys):
        run(record_file(WRONG), as_json=True)
        printed = json.loads(capsys.readouterr().out)
        assert [Advice(**each) for each in printed] == advise(WRONG)

    def test_nothing_to_judge(self, capsys):
        show(replace(make_record(used=0, running=0), lengths=[]), as_json=False)
        assert capsys.readouterr().out.startswith("no load yet ")


class TestSnippet:
    @pytest.mark.parametrize("record", [WRONG, CROWDED])
    def test_is_a_configuration(self, record, tmp_path, capsys):
        show(record, as_json=False)
        snippet = capsys.readouterr().out.rpartition("\n\n")[2]
        (tmp_path / "octavo.yaml").write_text(snippet)
        config = EngineConfig.create(tmp_path / "octavo.yaml").to_dict()
        for line in advise(record):
            if line.severity == "change":
                section = next(section for section, values in config.items() if line.setting in values)
                assert yaml.safe_load(snippet)[section][line.setting] == line.value
                assert config[section][line.setting] == EngineConfig.create(**{line.setting: line.value}).to_dict()[section][line.setting]

    def test_is_in_the_order_of_the_settings(self):
        lines = [
            Advice("max_batch_size", 64, "a", "b", "change"),
            Advice("kv_cache_memory", "2GiB", "a", "b", "consider"),
            Advice("block_size", 8, "a", "b", "change"),
            Advice("kv_cache_memory", "2GiB", "a", "b", "change"),
            Advice("swap_space", "1GiB", "a", "b", "consider"),
            Advice(None, None, "a", "b", "fine"),
        ]
        assert yaml_snippet(lines) == (
            "memory:\n"
            "  block_size: 8\n"
            "  kv_cache_memory: 2GiB  # in place of max_blocks\n"
            "  # swap_space: 1GiB  (to consider)\n"
            "scheduler:\n"
            "  max_batch_size: 64\n"
        )

    def test_of_what_is_merely_to_consider(self):
        snippet = yaml_snippet([Advice("swap_space", "1GiB", "a", "b", "consider")])
        assert EngineConfig.create(yaml.safe_load(snippet)) == EngineConfig()

    def test_is_absent_where_all_is_well(self, capsys):
        show(HEALTHY, as_json=False)
        assert "memory:\n" not in capsys.readouterr().out
        assert yaml_snippet(advise(HEALTHY)) == ""


class TestReading:
    @pytest.mark.parametrize("file", [None, "-"])
    def test_stdin(self, file, as_stdin):
        as_stdin(msgspec.json.encode(WRONG))
        assert load(file) == WRONG

    def test_nobody_to_read_from(self, as_stdin):
        as_stdin(b"", terminal=True)
        with pytest.raises(InvalidValueError, match="no record: name the file"):
            load(None)

    @pytest.mark.parametrize(("name", "sentence"), [("nowhere.json", "No such file or directory"), ("", "Is a directory")])
    def test_a_file_that_cannot_be_read(self, tmp_path, name, sentence):
        with pytest.raises(InvalidValueError) as caught:
            load(str(tmp_path / name))
        assert str(caught.value) == f"{tmp_path / name}: the record cannot be read ({sentence})"

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"block_size": \xff}', b"[" * 100000, b"record"])
    def test_what_is_not_json(self, record_file, content):
        path = record_file(content)
        with pytest.raises(InvalidValueError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: not")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"block_size": "16"}, "Expected `int`, got `str` - at `$.block_size`"),
            ({"stats": {}}, "Object missing required field `blocks` - at `$.stats`"),
            ({"lengths": [[1]]}, "at `$.lengths[0]`"),
            ({"samples": None}, "Expected `array`, got `null` - at `$.samples`"),
            ({"block_size": 17}, "block_size: 17; allowed: a power of two from 1 to 256"),
            ({"block_size": 0}, "block_size: 0; allowed"),
            ({"max_batch_size": 0}, "max_batch_size: 0; allowed"),
            ({"block_bytes": 0}, "$.block_bytes: 0; allowed: a number from 1"),
            ({"lengths": [[3, -1]]}, "$.lengths[0][1]: -1; allowed: a number from 0"),
            ({"longest": 2**63}, "$.longest: 9223372036854775808; allowed"),
            ({"longest": 10**400}, ""),
        ],
    )
    def test_what_is_not_a_record(self, record_file, change, sentence):
        path = record_file(json.dumps(msgspec.to_builtins(HEALTHY) | change).encode())
        with pytest.raises(InvalidValueError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert sentence in str(caught.value)
        assert len(str(caught.value)) < 500

    def test_json_of_another_kind(self, record_file):
        with pytest.raises(InvalidValueError, match="not a record of this version"):
            load(record_file(b"[]"))

    def test_times_may_be_of_any_clock(self, record_file):
        record = msgspec.to_builtins(HEALTHY)
        record["samples"][0]["time"] = -5.0
        assert load(record_file(json.dumps(record).encode())).samples[0].time == -5.0


class TestSaving:
    def test_is_read_back(self, tmp_path):
        save(HEALTHY, str(tmp_path / "record.json"))
        save(WRONG, str(tmp_path / "record.json"))
        assert load(str(tmp_path / "record.json")) == WRONG
        assert [path.name for path in tmp_path.iterdir()] == ["record.json"]

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [("nowhere/record.json", "No such file or directory"), (".", "Is a directory"), ("file/record", "Not a directory")],
    )
    def test_where_it_cannot_be_written(self, tmp_path, name, sentence):
        (tmp_path / "file").touch()
        path = os.path.join(tmp_path, name)
        with pytest.raises(InvalidValueError) as caught:
            save(WRONG, path)
        assert str(caught.value) == f"{path}: the record cannot be written ({sentence})"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_failure_leaves_the_old_record_and_nothing_else(self, tmp_path, monkeypatch):
        save(HEALTHY, str(tmp_path / "record.json"))

        def fail(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(command.os, "replace", fail)
        with pytest.raises(InvalidValueError, match="No space left on device"):
            save(WRONG, str(tmp_path / "record.json"))
        assert load(str(tmp_path / "record.json")) == HEALTHY
        assert [path.name for path in tmp_path.iterdir()] == ["record.json"]

    def test_in_the_present_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        save(WRONG, "record.json")
        assert load("record.json") == WRONG

    def test_a_device_is_not_replaced(self):
        save(WRONG, os.devnull)
        assert not os.path.isfile(os.devnull)
