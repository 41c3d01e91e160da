"""What every checkpoint format offers the models: HF's names for configuration and tensors, whatever the file says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.quantization import Grouped


class Checkpoint(ABC):
    """Weights and metadata of one model, opened and not yet read.

    Opening reads headers only, and raises CheckpointError for what is damaged, incomplete or unknown.
    """

    path: Path
    config: Mapping[str, Any]
    """The model's configuration in the form of an HF `config.json`."""
    generation_config: Mapping[str, Any]
    """In the form of an HF `generation_config.json`; empty where the checkpoint has none."""

    metadata: Mapping[str, Any] | None = None
    """What a GGUF file says by its own keys, its vocabulary among it; None for a folder, where files beside the weights say it."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Tensor names, as HF's state dict spells them."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first. Raises CheckpointError for a name the checkpoint lacks."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype | None:
        """How a tensor is stored; None where it is quantized."""

    @abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor into `out`, of the same shape and any float dtype, converting a range of rows at a time.

        Raises CheckpointError where the name is missing or the shapes differ (both are named).
        """

    @abstractmethod
    def read_rows(self, name: str, start: int, out: torch.Tensor) -> None:
        """Write the rows of a tensor from `start` on into `out` [n, K], as many as it has."""

    def grouped(self, name: str) -> Grouped | None:
        """A quantized tensor [N, K] as integers; None where it is stored as floats, or its scales exceed float16."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Drop the mappings. Tensors read before stay valid."""
