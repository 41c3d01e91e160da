"""A model folder in Hugging Face's layout: config.json and safetensors files, one or sharded by an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint

CHUNK_BYTES = 4 * 2**20
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    """Weights of an HF folder, mapped. Where there is an index, only what it assigns exists; other files change nothing.

    Raises CheckpointError naming what is missing or damaged: config.json, a shard, a tensor its shard lacks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = _read_config(folder / "config.json")
        generation_config = folder / "generation_config.json"
        self.generation_config = _read_json(generation_config) if generation_config.is_file() else {}
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            self._file_of = self._open_indexed() if (folder / INDEX).is_file() else self._open_single()
        except BaseException:
            self.close()
            raise

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """How a tensor is stored. Raises CheckpointError for a type that is no float of 16, 32 or 64 bits."""
        kind = self.stored_as(name)
        if kind not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is stored as {kind}; allowed: {', '.join(DTYPES)}")
        return DTYPES[kind]

    def stored_as(self, name: str) -> str:
        """The file's name for a tensor's type."""
        return str(self._slice(name).get_dtype())

    def stored(self, name: str) -> torch.Tensor:
        """A tensor of any type, as it is."""
        return self._slice(name)[:]

    @torch.no_grad()
    def read(self, name: str, out: torch.Tensor) -> None:
        shape = self.shape(name)
        if shape != tuple(out.shape):
            raise CheckpointError(f"{self.path}: {name} has shape {list(shape)}, and the model's is {list(out.shape)}")
        if not shape:
            out.copy_(self._file_of[name].get_tensor(name).to(self.dtype(name)))
            return
        self.read_rows(name, 0, out)

    @torch.no_grad()
    def read_rows(self, name: str, start: int, out: torch.Tensor) -> None:
        source, row_bytes = self._slice(name), self.dtype(name).itemsize * math.prod(out.shape[1:])
        rows = max(1, CHUNK_BYTES // max(1, row_bytes))
        for at in range(0, len(out), rows):
            part = out[at : at + rows]
            part.copy_(source[start + at : start + at + len(part)])

    def close(self) -> None:
        self._files.close()
        self._file_of = {}

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: no tensor {name} in this checkpoint")
        return self._file_of[name].get_slice(name)

    def _open_indexed(self) -> dict[str, Any]:
        weight_map = _read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_plain_name(file) for file in weight_map.values()):
            raise CheckpointError(f"{self.path / INDEX}: no weight_map of tensor names to file names in the same folder")
        missing = sorted(file for file in set(weight_map.values()) if not (self.path / file).is_file())
        if missing:
            raise CheckpointError(f"{self.path}: the index names files that are missing: {', '.join(missing)}")
        shards = {file: self._open(self.path / file) for file in sorted(set(weight_map.values()))}
        held = {file: set(shard.keys()) for file, shard in shards.items()}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise CheckpointError(f"{self.path / file}: lacks the tensor {name}, which the index places there")
        return {name: shards[file] for name, file in weight_map.items()}

    def _open_single(self) -> dict[str, Any]:
        found = sorted(self.path.glob("*.safetensors"))
        usual = self.path / "model.safetensors"
        if usual not in found and len(found) != 1:
            several = f"several safetensors files ({', '.join(file.name for file in found)})" if found else "no safetensors file"
            raise CheckpointError(f"{self.path}: {several}; allowed: model.safetensors, {INDEX} with its shards, or a single file")
        file = self._open(usual if usual in found else found[0])
        return dict.fromkeys(file.keys(), file)

    def _open(self, path: Path) -> Any:
        try:
            return self._files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no config.json in this folder")
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: model_type is missing, so the architecture is unknown")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON file ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return content


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and file != "" and Path(file).name == file
