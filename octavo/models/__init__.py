"""One file per HF `model_type`, found through the registry below.

A model's file offers `configure(hf) -> DecoderConfig`. Where it is more than a Llama with other data, it offers its own
`Decoder` too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.models.llama import DecoderConfig

MODELS = {
    "gemma": "octavo.models.gemma",
    "gemma2": "octavo.models.gemma2",
    "gemma3_text": "octavo.models.gemma3_text",
    "granite": "octavo.models.granite",
    "llama": "octavo.models.llama",
    "mistral": "octavo.models.mistral",
    "mixtral": "octavo.models.mixtral",
    "olmo2": "octavo.models.olmo2",
    "olmo3": "octavo.models.olmo3",
    "phi3": "octavo.models.phi3",
    "qwen2": "octavo.models.qwen2",
    "qwen3": "octavo.models.qwen3",
    "qwen3_moe": "octavo.models.qwen3_moe",
    "smollm3": "octavo.models.smollm3",
}


def find(hf: Mapping[str, Any]) -> tuple[DecoderConfig, type]:
    """The model's configuration and decoder class. Raises CheckpointError naming an unsupported type and what is supported."""
    model_type = hf.get("model_type")
    if model_type not in MODELS:
        raise CheckpointError(f"model_type: {model_type!r} is not supported; supported: {', '.join(MODELS)}")
    module = importlib.import_module(MODELS[model_type])
    from octavo.models.llama import Decoder

    return module.configure(hf), getattr(module, "Decoder", Decoder)
