"""Octavo: an LLM inference engine built on PagedAttention. Nothing heavy is imported before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams, StructuredOutputsParams
    from octavo.worker.logits_processors import register_logits_processor

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "register_logits_processor"]

_HOMES = {
    "LLM": "octavo.engine.llm",
    "EngineConfig": "octavo.config",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.sampling_params",
    "register_logits_processor": "octavo.worker.logits_processors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
