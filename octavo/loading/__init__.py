"""Where weights come from: names to files (`hub`), files to tensors (`safetensors`, `gguf`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.loading.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, a folder in Hugging Face's layout, or a folder that holds a single .gguf; headers only.

    Raises CheckpointError for what is missing, damaged, ambiguous or of an unknown kind.
    """
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file():
            from octavo.loading.composite import text_model
            from octavo.loading.packed import unpacked
            from octavo.loading.safetensors import SafetensorsCheckpoint

            return text_model(unpacked(SafetensorsCheckpoint(path)))
        if len(ggufs) > 1:
            raise CheckpointError(f"{path}: holds several models, name one: {', '.join(file.name for file in ggufs)}")
        if not ggufs:
            raise CheckpointError(f"{path}: neither a config.json nor a .gguf file in this folder")
        path = ggufs[0]
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path}: allowed: a .gguf file, or a folder with config.json and *.safetensors")
    from octavo.loading.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)
