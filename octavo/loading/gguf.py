"""GGUF files as HF checkpoints: names, configuration, and weights dequantized a range of rows at a time straight into place."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf_architectures import ARCHITECTURES, LAYER_NAMES, OUTER_NAMES, Architecture
from octavo.loading.gguf_blocks import PLAIN_DTYPES, RANGE_LENGTH, UNPACKED_LENGTH, dequantize, empty_groups, unpack
from octavo.loading.gguf_header import Header, TensorInfo, read_header
from octavo.quantization import Grouped
from octavo.text.gguf_vocabulary import end_token_ids


class GGUFCheckpoint(Checkpoint):
    """One `.gguf` file, seen as an HF checkpoint.

    `metadata` is what the header says, by GGUF's own keys; the tokenizer is made from it.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError where the file is damaged, or its architecture or one of its tensors is unknown."""
        self.path = Path(path)
        header = read_header(path)
        self.metadata = header.metadata
        name = header.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise CheckpointError(f"{path} holds a model of architecture {name!r}; supported: {', '.join(ARCHITECTURES)}")
        self._architecture = ARCHITECTURES[name]
        try:
            self._tensors: dict[str, TensorInfo] = {}
            for tensor in header.tensors.values():
                self._tensors |= _apart(hf_name(tensor.name, self._architecture.layer_names), tensor)
            self.config = _Configuration(header, name).as_hf()
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        ids = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": end_token_ids(header.metadata) or None}
        self.generation_config = {name: value for name, value in ids.items() if value is not None}
        self._bytes: np.ndarray | None = np.memmap(path, np.uint8, "r")

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        return PLAIN_DTYPES.get(self._tensor(name).type.name)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensor(name)
        if tuple(out.shape) != tensor.shape:
            raise CheckpointError(f"{self.path}: {name!r} has shape {list(tensor.shape)}, and {list(out.shape)} was expected")
        self.read_rows(name, 0, out)

    def read_rows(self, name: str, start: int, out: torch.Tensor) -> None:
        stored = self._stored(name)
        rows = out.view(-1, stored.columns)
        step = max(1, RANGE_LENGTH // stored.columns)
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            values = dequantize(stored.rows(start + at, start + at + len(part)), stored.kind)
            part.copy_(values - self._architecture.norm_offset if name.endswith("norm.weight") else values)

    def grouped(self, name: str) -> Grouped | None:
        tensor = self._tensor(name)
        if tensor.type.name in PLAIN_DTYPES or len(tensor.shape) != 2:
            return None
        stored = self._stored(name)
        rows, columns = tensor.shape
        out = empty_groups(rows, columns, stored.kind)
        step = max(1, UNPACKED_LENGTH // columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            unpack(stored.rows(start, stop), stored.kind, out.rows(start, stop))
        return out if out.finite() else None

    def close(self) -> None:
        self._bytes = None

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def _stored(self, name: str) -> _Stored:
        tensor = self._tensor(name)
        if self._bytes is None:
            raise CheckpointError(f"{self.path} was closed, so {name!r} cannot be read")
        order = self._row_order(name, tensor.shape[0])
        columns = 1 if order is not None and len(tensor.shape) == 1 else tensor.shape[-1]
        packed = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(math.prod(tensor.shape) // columns, -1)
        return _Stored(packed.view(np.ndarray), tensor.type.name, columns, order)

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Which stored row is each row of the result; None where they are stored in order.

        For some architectures llama.cpp's converter interleaves the two halves of every query and key head, because its rotary
        embedding turns adjacent pairs where HF's turns halves.
        """
        if not self._architecture.interleaved or not (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
            return None
        heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: {name!r} has {rows} rows, which {heads} heads cannot share")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file: rows of `columns` numbers, [rows, bytes], and which stored row is each of HF's (None: the same)."""

    packed: np.ndarray
    kind: str
    columns: int
    order: np.ndarray | None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """A copy of rows in HF's order."""
        return np.array(self.packed[slice(start, stop) if self.order is None else self.order[start:stop]])


def hf_name(name: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """HF's name for a GGUF tensor; `rope_freqs.weight`, divisors of the rotary frequencies, keeps its own. Raises ValueError if unknown."""
    if name == "rope_freqs.weight":
        return name
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, part, kind = match.groups()
        if layer is None and part in OUTER_NAMES:
            return f"{OUTER_NAMES[part]}.{kind}"
        if layer is not None and part in layer_names:
            return f"model.layers.{int(layer)}.{layer_names[part]}.{kind}"
    raise ValueError(f"tensor {name!r} has no place in this architecture")


def _apart(name: str, tensor: TensorInfo) -> dict[str, TensorInfo]:
    """A tensor by its name; one of all experts as theirs, numbered in place of the name's braces."""
    if "{}" not in name:
        return {name: tensor}
    if len(tensor.shape) != 3:
        raise ValueError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, and one of all experts has three dimensions")
    count, nbytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    parts = (replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * nbytes, nbytes=nbytes) for i in range(count))
    return {name.format(number): part for number, part in enumerate(parts)}


class _Configuration:
    """An HF `config.json` from GGUF metadata. Raises ValueError for a key that is missing or makes no sense."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header = header
        self._name = architecture
        self._architecture: Architecture = ARCHITECTURES[architecture]

    def as_hf(self) -> dict[str, Any]:
        tensors = self._header.tensors
        keys = self._architecture.keys
        if self._get("expert_count", int, 0) and "num_local_experts" not in keys:
            raise ValueError("the model is a mixture of experts, which is not supported of this architecture")
        if (gating := self._get("expert_gating_func", int, 1)) != 1:
            raise ValueError(f"its experts are chosen by gating function {gating}; supported: 1, softmax")
        hidden_size, heads = self._get("embedding_length", int), self._get("attention.head_count", int)
        head_dim = self._get("attention.key_length", int, hidden_size // max(heads, 1))
        config = {
            "model_type": self._architecture.model_type,
            "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
            "hidden_size": hidden_size,
            "intermediate_size": self._get("feed_forward_length", int),
            "num_hidden_layers": self._get("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._get("context_length", int),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self._get("rope.freq_base", float, 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
        config |= {name: value for name, (key, kind) in keys.items() if (value := self._get(key, kind, None)) is not None}
        self._check_against_tensors(config)
        config |= self._architecture.implied(config)
        if (rotary := self._get("rope.dimension_count", int, head_dim)) < head_dim:
            config["partial_rotary_factor"] = rotary / head_dim
        for name in ("bos_token_id", "eos_token_id"):
            token_id = self._header.metadata.get(f"tokenizer.ggml.{name}")
            config[name] = token_id if isinstance(token_id, int) else None
        return config

    def _check_against_tensors(self, config: Mapping[str, Any]) -> None:
        """Damaged metadata is found here, before anyone allocates what it asks for."""
        hidden_size, head_dim = config["hidden_size"], config["head_dim"]
        if config["max_position_embeddings"] < 1:
            raise ValueError(f"its context length is {config['max_position_embeddings']}")
        layers = {int(name.split(".")[1]) for name in self._header.tensors if name.startswith("blk.")}
        if layers != set(range(len(layers))) or len(layers) != config["num_hidden_layers"]:
            raise ValueError(f"its metadata announces {config['num_hidden_layers']} layers, and {len(layers)} are there")
        inner, experts = config["intermediate_size"], config.get("num_local_experts")
        expected: dict[str, tuple[int, ...]] = {
            "token_embd": (config["vocab_size"],),
            "blk.0.attn_q": (config["num_attention_heads"] * head_dim,),
            "blk.0.attn_k": (config["num_key_value_heads"] * head_dim,),
        }
        if experts:
            expected["blk.0.ffn_up_exps"] = (experts, config.get("moe_intermediate_size", inner))
        else:
            expected["blk.0.ffn_up"] = (inner,)
        for name, rows in expected.items():
            tensor = self._header.tensors.get(f"{name}.weight")
            if tensor is None:
                raise ValueError(f"tensor '{name}.weight' is missing")
            if tensor.shape != (*rows, hidden_size):
                raise ValueError(f"tensor '{name}.weight' has shape {list(tensor.shape)}, and its metadata implies {[*rows, hidden_size]}")

    def _rope_scaling(self) -> dict[str, Any] | None:
        linear = self._get("rope.scale_linear", float, 0.0)
        kind = self._get("rope.scaling.type", str, "linear" if linear else "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"its rope scaling is {kind!r}; supported: none, linear, yarn")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._get("rope.scaling.factor", float, linear or 1.0)}
        optional = {
            "original_max_position_embeddings": ("original_context_length", int),
            "attention_factor": ("attn_factor", float),
            "beta_fast": ("yarn_beta_fast", float),
            "beta_slow": ("yarn_beta_slow", float),
        }
        for hf_key, (key, kind_of_value) in optional.items():
            if (value := self._get(f"rope.scaling.{key}", kind_of_value, None)) is not None:
                scaling[hf_key] = value
        return scaling

    def _get(self, key: str, kind: type, *default: Any) -> Any:
        """The architecture's value for `key`; a list (one value a layer) counts as its value where all are the same."""
        key = f"{self._name}.{key}"
        value = self._header.metadata.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            if default:
                return default[0]
            raise ValueError(f"its metadata lacks {key!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its metadata gives {key!r} as {str(value)[:40]}, which is no {kind.__name__}")
        return value
