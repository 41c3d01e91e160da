"""Folders whose matrices GPTQ or AWQ left in 4 bits, eight codes to a word of 32.

A matrix [N, K] in G groups of inputs is `qweight`, `qzeros`, `scales` [G, N] and perhaps `g_idx` [K], each input's group. An element is
(code - zero) * scale.

            qweight           qzeros
    GPTQ    int32 [K / 8, N]  int32 [G, N / 8], of which 1 is missing in every code but in format gptq_v2
    AWQ     int32 [K, N / 8]  int32 [G, N / 8], codes in the order 0, 2, 4, 6, 1, 3, 5, 7 of their places

Codes go from the lowest bits of a word up. Formats: AutoGPTQ's and GPTQModel's QuantLinear, AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.fields import Fields
from octavo.loading.safetensors import DTYPES, SafetensorsCheckpoint
from octavo.quantization import GROUP, Grouped, as_float16

CODES = 8
"""To a word."""
ONES = 0x11111111
"""1 in every code of a word. Added to whole words, as a code of 0 less 1 borrows from the next."""
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where a word holds the first code, the second, ..."""
GROUP_SIZES = (32, 64, 128)
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
RANGE_LENGTH = 1 << 20
"""Numbers dequantized at a time."""


def unpacked(folder: SafetensorsCheckpoint) -> Checkpoint:
    """The folder itself where nothing says it is quantized. Raises CheckpointError naming what is not supported."""
    if not folder.config.get("quantization_config"):
        return folder
    try:
        return PackedCheckpoint(folder)
    except BaseException:
        folder.close()
        raise


@dataclass(frozen=True)
class _Codes:
    """codes: uint8 [N, K]. scales: float32, zeros: uint8, [N, groups of 32], a larger group's repeated."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def dense(self, start: int, stop: int) -> Tensor:
        """Rows in float32, exact where scales are float16."""
        columns = self.codes.shape[1]
        scales, zeros = (part[start:stop].repeat_interleave(GROUP, 1)[:, :columns] for part in (self.scales, self.zeros))
        return (self.codes[start:stop].float() - zeros) * scales


@dataclass(frozen=True)
class _Settings:
    """lacks_ones: zeros are stored less 1. sorted: inputs were sorted before they were grouped. symmetric: zeros are 8."""

    method: str
    group_size: int
    lacks_ones: bool
    sorted: bool
    symmetric: bool

    @classmethod
    def of(cls, folder: SafetensorsCheckpoint) -> _Settings:
        read = Fields(folder.config).section("quantization_config")
        method = read.word("quant_method", "a method that is not named")
        if method not in FORMATS:
            allowed = f"{', '.join(FORMATS)}, {', '.join(DTYPES)}, or a GGUF file"
            raise CheckpointError(f"{folder.path}: weights quantized by {method} cannot be read; allowed: {allowed}")
        key = "version" if method == "awq" and read.word("version", None) else "checkpoint_format"
        given = {
            "bits": (read.whole("bits"), (4,)),
            "group_size": (read.whole("group_size", low=-1), GROUP_SIZES),
            key: (read.word(key, FORMATS[method][0]).lower(), FORMATS[method]),
            "pack_dtype": (read.word("pack_dtype", "int32"), ("int32",)),
            "is_marlin_format": (read.flag("is_marlin_format", False), (False,)),
            "zero_point": (read.flag("zero_point", True), (True,)),
        }
        for name, (value, supported) in given.items():
            if value not in supported:
                named = ", ".join(str(each) for each in supported)
                raise CheckpointError(f"{folder.path}: {method} with {name}: {value} is not supported; supported: {named}")
        return cls(
            method,
            given["group_size"][0],
            lacks_ones=given[key][0] == "gptq",
            sorted=read.flag("desc_act", False),
            symmetric=read.flag("sym", False),
        )


class PackedCheckpoint(Checkpoint):
    """An HF folder by GPTQ or AWQ, its matrices under the names they have unquantized; all else is read as it is."""

    def __init__(self, folder: SafetensorsCheckpoint) -> None:
        self._folder = folder
        self.path = folder.path
        self.config, self.generation_config = folder.config, folder.generation_config
        self._settings = _Settings.of(folder)
        self._packed = {f"{name.removesuffix('.qweight')}.weight" for name in folder.names() if name.endswith(".qweight")}
        parts = {part for name in self._packed for part in self._parts(name)}
        self._names = frozenset(folder.names() - parts | self._packed)
        self._shapes = {name: self._checked_shape(name) for name in self._packed}
        if self._settings.sorted:
            for name in self._packed:
                self._groups(name)
        self._last: tuple[str, _Codes] | None = None

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or self._folder.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return None if name in self._packed else self._folder.dtype(name)

    def read(self, name: str, out: Tensor) -> None:
        if name not in self._packed:
            self._folder.read(name, out)
            return
        if self._shapes[name] != tuple(out.shape):
            raise CheckpointError(f"{self.path}: {name} has shape {list(self._shapes[name])}, and the model's is {list(out.shape)}")
        self.read_rows(name, 0, out)

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        if name not in self._packed:
            self._folder.read_rows(name, start, out)
            return
        codes, step = self._codes(name), max(1, RANGE_LENGTH // out.shape[1])
        for at in range(0, len(out), step):
            part = out[at : at + step]
            part.copy_(codes.dense(start + at, start + at + len(part)))

    def grouped(self, name: str) -> Grouped | None:
        """Exact where all zeros are 8, as symmetric quantization has them.

        Else a minimum is -zero * scale, rounded to float16 by 2^-11 of it at most: half a percent of what rounding to 4 bits costs.
        """
        if name not in self._packed:
            return None
        codes = self._codes(name)
        scales = as_float16(codes.scales)
        if bool((codes.zeros == 8).all()):
            out = Grouped(4, codes.codes, scales, zero=8)
        else:
            out = Grouped(4, codes.codes, scales, as_float16(-codes.scales * codes.zeros))
        return out if out.finite() else None

    def close(self) -> None:
        self._last = None
        self._folder.close()

    def _parts(self, name: str) -> Iterator[str]:
        stem = name.removesuffix("weight")
        return (stem + part for part in ("qweight", "qzeros", "scales", "g_idx"))

    def _checked_shape(self, name: str) -> tuple[int, int]:
        """[N, K], by headers alone."""
        qweight, qzeros, scales, g_idx = self._parts(name)
        words = self._folder.shape(qweight)
        if len(words) != 2:
            raise CheckpointError(f"{self.path}: {qweight} has shape {list(words)}, and a matrix has two dimensions")
        columns, rows = (words[0] * CODES, words[1]) if self._settings.method == "gptq" else (words[0], words[1] * CODES)
        groups = -(-columns // self._settings.group_size)
        wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            qweight: (words, ("I32",)),
            qzeros: ((groups, -(-rows // CODES)), ("I32",)),
            scales: ((groups, rows), tuple(DTYPES)),
        }
        if g_idx in self._folder.names() or self._settings.sorted:
            wanted[g_idx] = ((columns,), ("I32", "I64"))
        for part, (shape, kinds) in wanted.items():
            if self._folder.shape(part) != shape:
                found = f"{part} has shape {list(self._folder.shape(part))}"
                said = f"{qweight} {list(words)}, in groups of {self._settings.group_size} inputs, needs {list(shape)}"
                raise CheckpointError(f"{self.path}: {found}, and {said}")
            if (kind := self._folder.stored_as(part)) not in kinds:
                raise CheckpointError(f"{self.path}: {part} is stored as {kind}; allowed: {', '.join(kinds)}")
        return rows, columns

    def _groups(self, name: str) -> Tensor:
        """The group of each run of 32 inputs."""
        columns, (*_, g_idx) = self._shapes[name][1], self._parts(name)
        if g_idx not in self._folder.names():
            return torch.arange(0, columns, GROUP) // self._settings.group_size
        groups = self._folder.stored(g_idx).long()
        runs = groups[::GROUP]
        if not torch.equal(groups, runs.repeat_interleave(GROUP)[:columns]):
            raise CheckpointError(
                f"{self.path}: {g_idx}: inputs in the order of their activations (desc_act) are not supported; "
                f"supported: groups of which every run of {GROUP} inputs has one"
            )
        if int(runs.min()) < 0 or int(runs.max()) >= self._folder.shape([*self._parts(name)][2])[0]:
            raise CheckpointError(f"{self.path}: {g_idx} names a group that has no scale")
        return runs

    def _codes(self, name: str) -> _Codes:
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory is wanted
            self._last = name, self._unpack(name)
        return self._last[1]

    def _unpack(self, name: str) -> _Codes:
        qweight, qzeros, scales, _ = self._parts(name)
        (rows, columns), groups, words = self._shapes[name], self._groups(name), self._folder.stored(qweight)
        if self._settings.method == "gptq":
            codes = _codes_of(words).permute(1, 0, 2).reshape(rows, columns)
        else:
            codes = _codes_of(words)[..., AWQ_PLACES].flatten(1).t().contiguous()
        by_group = self._folder.stored(scales).float(), self._zeros(qzeros, rows)
        return _Codes(codes, *(part[groups].t().contiguous() for part in by_group))

    def _zeros(self, qzeros: str, rows: int) -> Tensor:
        """uint8 [G, N]."""
        words = self._folder.stored(qzeros)
        if self._settings.method == "awq":
            return _codes_of(words)[..., AWQ_PLACES].flatten(1)[:, :rows]
        zeros = _codes_of(words).flatten(1)[:, :rows]
        # Some writers name the format gptq and leave zeros whole; where weights are symmetric these are 8.
        whole = not self._settings.lacks_ones or (self._settings.symmetric and bool((zeros == 8).all()))
        return zeros if whole else _codes_of(words + ONES).flatten(1)[:, :rows]


def _codes_of(words: Tensor) -> Tensor:
    """int32 [A, B] -> uint8 [A, B, 8], lowest bits first."""
    octets = words.contiguous().view(torch.uint8).unflatten(1, (-1, CODES // 2))
    return torch.stack([octets & 15, octets >> 4], -1).flatten(2)
