"""Which backend a device gets, and what the environment may ask for."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError
from octavo.ops.reference import ReferenceOps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_OPS", raising=False)
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)


def test_the_cpu_gets_the_native_kernels_and_their_fastest_instruction_set() -> None:
    cpu = pytest.importorskip("octavo.ops.cpu", exc_type=ImportError)
    from octavo import _native

    found = ops.backend(CPU)
    assert type(found) is cpu.CpuOps
    assert found.isa == _native.instruction_sets()[0]


def test_the_environment_chooses_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("octavo.ops.cpu", exc_type=ImportError)
    monkeypatch.setenv("OCTAVO_CPU_ISA", "portable")
    assert ops.backend(CPU).isa == "portable"  # type: ignore[attr-defined]


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("octavo.ops.cpu", exc_type=ImportError)
    monkeypatch.setenv("OCTAVO_CPU_ISA", "z80")
    with pytest.raises(ConfigError, match=r"OCTAVO_CPU_ISA: 'z80'; this processor runs .*portable"):
        ops.backend(CPU)


def test_the_environment_can_ask_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_OPS", "reference")
    assert type(ops.backend(CPU)) is ReferenceOps


def test_an_unknown_choice_of_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_OPS", "fastest")
    with pytest.raises(ConfigError, match="OCTAVO_OPS: 'fastest'; allowed: auto, reference"):
        ops.backend(CPU)


def test_other_devices_get_the_reference() -> None:
    assert type(ops.backend(torch.device("meta"))) is ReferenceOps


def test_without_native_kernels_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "octavo.ops.cpu", None)
    ops._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert type(ops.backend(CPU)) is ReferenceOps
        assert type(ops.backend(CPU)) is ReferenceOps
    assert len(caplog.records) == 1
    assert "native CPU kernels are missing" in caplog.text
