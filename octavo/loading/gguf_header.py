"""The header of a GGUF file: metadata and where each tensor lies, by a parser of our own.

gguf's reader makes an array of every string of the vocabulary and takes seconds. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; little-endian files of versions 2 and 3 are what is found in the field.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import CheckpointError


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
            placed[name] = replace(tensor, offset=offset)
        return placed

    def _advance(self, nbytes: int) -> int:
        """Step over `nbytes` and return where they began."""
        start = self._position
        if nbytes > self._size - start:
            raise self._cut_short()
        self._position = start + nbytes
        return start

    def _cut_short(self) -> ValueError:
        return ValueError(f"it ends within its header, at byte {self._size}; is the download complete?")

    def _scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self._data, self._advance(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is a hundred thousand strings: this loop is most of the time that opening a file takes.
        if count > (self._size - self._position) // 8:
            raise self._cut_short()
        data, size, position = self._data, self._size, self._position
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > size:
                raise self._cut_short()
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
