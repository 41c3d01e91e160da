import importlib.metadata
import json
from pathlib import Path

import pytest

from octavo.loading import hub


@pytest.fixture
def cached(octavo, monkeypatch):
    """A stand-in for the default model, already in the cache."""
    monkeypatch.setattr(hub, "_cached_repositories", list)
    monkeypatch.setattr(hub, "_resolve_alias", lambda name, fetch: hub.alias_path(name))
    monkeypatch.setattr(hub, "_sha256", lambda path: hub.ALIASES["smollm2-135m"].sha256)
    path = hub.alias_path("smollm2-135m")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1000))
    return path


def test_pull_prints_the_path(octavo, cached):
    result = octavo("pull", "smollm2-135m")
    assert (result.exit_code, Path(result.stdout.strip())) == (0, cached)
    assert "licence: Apache-2.0" in result.stderr


def test_list(octavo, cached):
    line = octavo("list").stdout
    assert line.startswith("smollm2-135m ")
    assert "1.0 kB" in line
    assert str(cached) in line
    cached.unlink()
    assert "not fetched; octavo pull smollm2-135m" in octavo("list").stdout


def test_rm(octavo, cached):
    asked = octavo("rm", "smollm2-135m")
    assert (asked.exit_code, cached.exists()) == (2, True)
    assert "--yes" in asked.stderr
    assert octavo("rm", "smollm2-135m", "--yes").stdout == "smollm2-135m: 1.0 kB freed\n"
    assert not cached.exists()
    again = octavo("rm", "smollm2-135m", "--yes")
    assert again.exit_code == 2
    assert again.stderr.startswith("octavo: error: smollm2-135m: not in the cache")


def test_rm_asks_at_a_terminal(octavo, cached, monkeypatch):
    monkeypatch.setattr("octavo.cli.commands._is_terminal", lambda: True)
    assert octavo("rm", "smollm2-135m", stdin="n\n").exit_code == 1
    assert cached.exists()
    assert octavo("rm", "smollm2-135m", stdin="y\n").exit_code == 0
    assert not cached.exists()


@pytest.mark.parametrize("command", ["pull", "rm"])
def test_an_unknown_model(octavo, cached, command):
    result = octavo(command, "nope", *(["--yes"] if command == "rm" else []))
    assert result.exit_code == 2
    assert result.stderr.startswith("octavo: error: nope: ")


def test_models(octavo):
    said = octavo("models").stdout
    first = {"Native model types": "llama", "GGUF": "gemma3", "by name": "smollm2-135m", "through transformers": "stablelm"}
    for title, name in first.items():
        assert name in said.partition(title)[2].split("\n\n")[0]
    assert "--model-impl" in said


def test_models_as_json(octavo, monkeypatch):
    found = json.loads(octavo("models", "--json").stdout)
    assert found["transformers"]["version"] == importlib.metadata.version("transformers")
    assert "llama" in found["native"]
    assert not set(found["native"]) & set(found["transformers"]["checked"])

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert json.loads(octavo("models", "--json").stdout)["transformers"]["version"] is None
    assert "pip install 'octavo[transformers]'" in octavo("models").stdout
