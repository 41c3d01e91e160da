"""Fixtures shared by all tests: the real model in its two forms, and the loading of each at most once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's GGUF, fetched where it is not in the cache."""
    from octavo.loading.hub import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M's GGUF, fetched where it is not in the cache."""
    from octavo.loading.hub import resolve

    return resolve("gemma3-270m")


@pytest.fixture(scope="session")
def data() -> Path:
    """Real workloads, which lie beside the project and are not part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the workloads are not here: {folder}")
    return folder
