"""GGUF files: the header by a parser of our own, weights dequantized a range of rows at a time straight into place.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only little-endian files of versions 2 and 3 exist in the field.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint
from octavo.text.gguf_vocabulary import end_token_ids

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class TensorType(NamedTuple):
    """How GGML packs one kind of tensor: `block_bytes` bytes hold `block_length` numbers of a row."""

    name: str
    block_length: int
    block_bytes: int


# Stated here because importing gguf for this one table would double the time it takes to open a file.
TENSOR_TYPES = {
    number: TensorType(name, length, size)
    for number, name, length, size in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    ]
}
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file. `shape` is outermost first, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Everything a GGUF file says before its weights."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int


def read_header(path: str | Path) -> Header:
    """Read the metadata and the tensor table. Raises CheckpointError where the file cannot be opened, is damaged or is cut short."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderParser(data).parse()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # mmap's own, for an empty file, and the parser's
        raise CheckpointError(f"{path} is not a GGUF file Octavo can read: {error}") from error


class _HeaderParser:
    """Walks the header from front to back. Every method raises ValueError, in words, rather than read past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._position = 0

    def parse(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        self._position = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; little-endian versions 2 and 3 are supported")
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            if key in metadata:
                raise ValueError(f"its metadata names {key!r} twice")
            metadata[key] = self._value(self._scalar("<I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}, which is no power of two")
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            tensor = self._tensor_info()
            if tensor.name in tensors:
                raise ValueError(f"it names tensor {tensor.name!r} twice")
            tensors[tensor.name] = tensor
        return Header(metadata, self._placed(tensors, alignment), alignment)

    def _tensor_info(self) -> TensorInfo:
        """One entry of the tensor table, its offset still relative to the start of the weights."""
        name = self._string()
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dimensions)]))
        number, offset = self._scalar("<I"), self._scalar("<Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise ValueError(f"tensor {name!r} is of type {number}, which is none of {', '.join(t.name for t in TENSOR_TYPES.values())}")
        if 0 in shape or shape[-1] % kind.block_length:
            raise ValueError(f"tensor {name!r} of shape {list(shape)} cannot be stored as {kind.name}")
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // kind.block_length * kind.block_bytes)

    def _placed(self, tensors: Mapping[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        start = -(-self._position // alignment) * alignment
        placed = {}
        for name, tensor in tensors.items():
            offset = start + tensor.offset
            if tensor.offset % alignment:
                raise ValueError(f"tensor {name!r} is not aligned to {alignment} bytes")
            if offset + tensor.nbytes > self._size:
                end = offset + tensor.nbytes
                raise ValueError(f"tensor {name!r} would end at byte {end} of a file of {self._size}; is the download complete?")
            placed[name] = TensorInfo(name, tensor.shape, tensor.type, offset, tensor.nbytes)
        return placed

    def _advance(self, nbytes: int) -> int:
        """Step over `nbytes` and return where they began."""
        start = self._position
        if nbytes > self._size - start:
            raise ValueError(f"it ends within its header, at byte {self._size}; is the download complete?")
        self._position = start + nbytes
        return start

    def _scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self._data, self._advance(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is a hundred thousand strings: this loop is most of the time that opening a file takes.
        if count > (self._size - self._position) // 8:
            raise ValueError(f"it announces {count} strings, more than the file can hold")
        data, size, position = self._data, self._size, self._position
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > size:
                raise ValueError(f"it ends within a string, at byte {size}; is the download complete?")
            strings.append(data[start:position].decode("utf-8", "replace"))
        self._position = position
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("<I"), self._scalar("<Q"))
        return self._scalar(self._layout(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        element = np.dtype(self._layout(kind))
        start = self._advance(count * element.itemsize)
        values: list[Any] = np.frombuffer(self._data[start : self._position], element).tolist()
        return values

    def _layout(self, kind: int) -> str:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"its metadata holds a value of unknown type {kind}")
        return layout


class GGUFCheckpoint(Checkpoint):
    """One `.gguf` file, seen as an HF checkpoint.

    `metadata` is what the header says, by GGUF's own keys; the tokenizer is made from it.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError where the file is damaged, or its architecture or one of its tensors is unknown."""
        self.path = Path(path)
        header = read_header(path)
        self.metadata: Mapping[str, Any] = header.metadata
        architecture = header.metadata.get("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise CheckpointError(f"{path} holds a model of architecture {architecture!r}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
        try:
            self._tensors = {hf_name(tensor.name): tensor for tensor in header.tensors.values()}
            self.config = _Configuration(header, architecture).as_hf()
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        ends = end_token_ids(header.metadata)
        self.generation_config = {"eos_token_id": ends} if ends else {}
        if (begin := header.metadata.get("tokenizer.ggml.bos_token_id")) is not None:
            self.generation_config["bos_token_id"] = begin
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
        if self._bytes is None:
            raise CheckpointError(f"{self.path} was closed, so {name!r} cannot be read")
        order = self._row_order(name, tensor.shape[0])
        columns = 1 if order is not None and len(tensor.shape) == 1 else tensor.shape[-1]
        packed = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(math.prod(tensor.shape) // columns, -1)
        rows = out.view(len(packed), columns)
        step = max(1, _RANGE_LENGTH // columns)
        for start in range(0, len(packed), step):
            wanted = slice(start, start + step) if order is None else order[start : start + step]
            rows[start : start + step].copy_(dequantize(np.array(packed[wanted]), tensor.type.name))

    def close(self) -> None:
        self._bytes = None

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Which stored row is each row of the result; None where they are stored in order.

        For `llama` alone, llama.cpp's converter interleaves the two halves of every query and key head, because its rotary
        embedding turns adjacent pairs where HF's turns halves.
        """
        if self.config["model_type"] != "llama" or not (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
            return None
        heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """HF's name for a GGUF tensor; `rope_freqs.weight`, divisors of the rotary frequencies, keeps its own. Raises ValueError if unknown."""
    if name == "rope_freqs.weight":
        return name
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, part, kind = match.groups()
        if layer is None and part in _OUTER_NAMES:
            return f"{_OUTER_NAMES[part]}.{kind}"
        if layer is not None and part in _LAYER_NAMES:
            return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}"
    raise ValueError(f"tensor {name!r} has no place in the architectures supported ({', '.join(SUPPORTED_ARCHITECTURES)})")


class _Configuration:
    """An HF `config.json` from GGUF metadata. Raises ValueError for a key that is missing or makes no sense."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header = header
        self._architecture = architecture

    def as_hf(self) -> dict[str, Any]:
        tensors = self._header.tensors
        if "token_embd.weight" not in tensors:
            raise ValueError("tensor 'token_embd.weight' is missing")
        if self._get("expert_count", int, 0):
            raise ValueError("the model is a mixture of experts, which is not supported")
        hidden_size, heads = self._get("embedding_length", int), self._get("attention.head_count", int)
        head_dim = self._get("attention.key_length", int, hidden_size // max(heads, 1))
        config = {
            "model_type": self._architecture,
            "vocab_size": tensors["token_embd.weight"].shape[0],
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
        for key, value in config.items():
            if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"its {key} is {value}")
        if (rotary := self._get("rope.dimension_count", int, head_dim)) < head_dim:
            config["partial_rotary_factor"] = rotary / head_dim
        if window := self._get("attention.sliding_window", int, 0):
            config["sliding_window"] = window
        for name in ("bos", "eos"):
            config[f"{name}_token_id"] = self._header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return config

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
        key = f"{self._architecture}.{key}"
        value = self._header.metadata.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            if default:
                return default[0]
            raise ValueError(f"its metadata lacks {key!r}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its metadata gives {key!r} as {str(value)[:40]}, which is no {kind.__name__}")
        return value


_RANGE_LENGTH = 1 << 17
"""Numbers dequantized at a time: half a megabyte of float32, so that every pass over it stays in the second-level cache."""


def dequantize(packed: np.ndarray, kind: str) -> torch.Tensor:
    """Rows of GGML blocks, [rows, bytes], to numbers, [rows, columns]: of their own dtype if plain, else float32.

    Q4_0, Q4_1 and Q8_0 are written out here, where they take a fraction of the time that gguf's take, with the same result
    to the last bit; every other type is gguf's.
    """
    if kind in PLAIN_DTYPES:
        return torch.from_numpy(packed).view(PLAIN_DTYPES[kind])
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize

        return torch.from_numpy(gguf_dequantize(packed, GGMLQuantizationType[kind]))
    scale_bytes = 4 if kind == "Q4_1" else 2
    blocks = torch.from_numpy(packed).view(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])
    scales = blocks[:, :scale_bytes].contiguous().view(torch.float16).float()
    codes = blocks[:, scale_bytes:]
    if kind == "Q8_0":
        return (codes.view(torch.int8) * scales).view(len(packed), -1)
    values = torch.stack([codes & 15, codes >> 4], dim=1).view(-1, 32).float()
    if kind == "Q4_0":
        return values.sub_(8).mul_(scales).view(len(packed), -1)
    return values.mul_(scales[:, :1]).add_(scales[:, 1:]).view(len(packed), -1)
