"""The names a user may rely on, and what importing them costs."""

import subprocess
import sys

import pytest

import octavo


def test_exported_names_stand():
    assert octavo.__all__ == [
        "LLM",
        "EngineConfig",
        "RequestOutput",
        "SamplingParams",
        "StructuredOutputsParams",
        "register_logits_processor",
    ]


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(octavo, name).__name__ == name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = octavo.Nonsense


def modules_after(code):
    script = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())


HEAVY = {"torch", "numpy", "transformers", "tokenizers", "typer", "rich"}


@pytest.mark.parametrize(
    "code",
    [
        "import octavo",
        "from octavo import SamplingParams, EngineConfig, RequestOutput",
        "import octavo.core.scheduler, octavo.plan",
        "import octavo.executor.simulated",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code):
    assert not modules_after(code) & HEAVY


def test_core_knows_neither_executor_nor_worker():
    loaded = modules_after("import octavo.core.scheduler")
    assert "octavo.core.scheduler" in loaded
    assert not {name for name in loaded if name.startswith(("octavo.executor", "octavo.worker", "octavo.engine", "octavo.text"))}
