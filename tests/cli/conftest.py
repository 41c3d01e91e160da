"""The commands run in this process against `FakeLLM`; `octavo(...)` types one."""

import re

import pytest
from fake_llm import FakeLLM
from typer.testing import CliRunner

import octavo as package
from octavo.cli import app


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return str(folder)


@pytest.fixture
def octavo(monkeypatch, tmp_path):
    monkeypatch.setattr(package, "LLM", FakeLLM, raising=False)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    FakeLLM.made.clear()

    def run(*words, stdin=None, opening=False):
        result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
        if not opening:  # the line that says what was loaded; one test looks at it
            result.stderr_bytes = re.sub(rb"^[^\n]*: no memory at all\r?\n", b"", result.stderr_bytes)
        return result

    return run


@pytest.fixture
def generate(octavo, model):
    return lambda *words, stdin=None: octavo("generate", "--model", model, *words, stdin=stdin)


@pytest.fixture
def chat(octavo, model):
    def run(*lines, flags=()):
        return octavo("chat", "--model", model, *flags, stdin="".join(f"{line}\n" for line in lines))

    return run


@pytest.fixture
def llm():
    """The engine that the command made."""
    return lambda: FakeLLM.made[-1]
