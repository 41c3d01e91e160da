"""The text model inside a model of several kinds of input, as a checkpoint of its own; what reads images is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from octavo.loading.checkpoint import Checkpoint
from octavo.loading.fields import Fields
from octavo.quantization import Grouped

GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
TEXT_MODELS: dict[str, Mapping[str, Any]] = {"gemma3": GEMMA3}
"""By the whole's model_type: what holds for its text model where its configuration does not say."""

PREFIXES = ("language_model.model.", "model.language_model.")


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where it is of text alone, or of a type not known."""
    usual = TEXT_MODELS.get(checkpoint.config.get("model_type", ""))
    return checkpoint if usual is None else _TextModel(checkpoint, usual)


class _TextModel(Checkpoint):
    def __init__(self, whole: Checkpoint, usual: Mapping[str, Any]) -> None:
        self._whole = whole
        self.path = whole.path
        self.config = {**usual, **Fields(whole.config).section("text_config").values}
        self.generation_config = whole.generation_config
        self._stored = {text_name: name for name in whole.names() if (text_name := _text_name(name)) is not None}

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self._name(name))

    def dtype(self, name: str) -> torch.dtype | None:
        return self._whole.dtype(self._name(name))

    def read(self, name: str, out: torch.Tensor) -> None:
        self._whole.read(self._name(name), out)

    def read_rows(self, name: str, start: int, out: torch.Tensor) -> None:
        self._whole.read_rows(self._name(name), start, out)

    def grouped(self, name: str) -> Grouped | None:
        return self._whole.grouped(self._name(name))

    def close(self) -> None:
        self._whole.close()

    def _name(self, name: str) -> str:
        return self._stored.get(name, name)


def _text_name(name: str) -> str | None:
    """As a model of text alone calls the tensor; None for one of another part."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return None if prefix is None else f"model.{name.removeprefix(prefix)}"
