"""The backends under test, and sequences that any of them can attend to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from octavo.ops.reference import ReferenceOps

CPU = torch.device("cpu")


def _native(isa: str) -> ReferenceOps:
    cpu = pytest.importorskip("octavo.ops.cpu", reason="the native kernels are not built", exc_type=ImportError)
    from octavo import _native

    if isa not in _native.instruction_sets():
        pytest.skip(f"this processor lacks {isa}")
    return cpu.CpuOps(CPU, isa)


BACKENDS: dict[str, Callable[[], ReferenceOps]] = {
    "reference": lambda: ReferenceOps(CPU),
    "avx512_bf16": lambda: _native("avx512_bf16"),
    "avx512": lambda: _native("avx512"),
    "avx2": lambda: _native("avx2"),
    "portable": lambda: _native("portable"),
}


@pytest.fixture(scope="session", params=list(BACKENDS))
def ops(request: pytest.FixtureRequest) -> ReferenceOps:
    return BACKENDS[request.param]()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
