"""Rotary position embedding, https://arxiv.org/abs/2104.09864, and the ways to stretch it over longer contexts.

Every way comes down to one table: the angle of each frequency at each position. A token's rotation thus depends on its
position alone, never on how its sequence was cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.loading.fields import Fields
from octavo.ops.interface import Ops

NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
LISTS = ("short_factor", "long_factor")
OLDER_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class RotaryConfig:
    """dim: rotated features of a head, even. scaling: the parameters of `rope_type`, under HF's names."""

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    max_position_embeddings: int = 2048
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int) -> RotaryConfig:
        """Read HF's `rope_parameters`, or the older `rope_scaling`, with `rope_type` or `type`. Raises CheckpointError, naming the type."""
        read = Fields(config)
        given = read.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
        rope_type = given.word("rope_type", None) or given.word("type", "default")
        rope_type = OLDER_NAMES.get(rope_type, rope_type)
        if rope_type not in SCALINGS:
            raise CheckpointError(f"rope_scaling: type {rope_type!r} is not supported; supported: {', '.join(SCALINGS)}")
        trained = read.whole("max_position_embeddings", low=2, high=2**24)
        original = given.whole("original_max_position_embeddings", None, low=2) or read.whole(
            "original_max_position_embeddings", None, low=2
        )
        scaling: dict[str, Any] = {"original_max_position_embeddings": original}
        for name in NUMBERS:
            scaling[name] = given.number(name, None)
        for name in LISTS:
            scaling[name] = given.numbers(name, None)
        scaling["truncate"] = given.flag("truncate", True)
        missing = [name for name in SCALINGS[rope_type].needs if scaling[name] is None]
        if missing:
            raise CheckpointError(f"rope_scaling: type {rope_type!r} needs {', '.join(missing)}")
        if scaling["original_max_position_embeddings"] is None and rope_type in ("llama3", "yarn", "longrope"):
            scaling["original_max_position_embeddings"] = trained
        factor = given.number("partial_rotary_factor", None) or read.number("partial_rotary_factor", 1.0)
        dim = int(head_dim * factor)
        if dim % 2 or not 0 < dim <= head_dim:
            raise CheckpointError(f"rotary embedding: {dim} rotated features of {head_dim}; an even number is needed")
        if wrong := [name for name in LISTS if scaling[name] is not None and len(scaling[name]) != dim // 2]:
            raise CheckpointError(f"rope_scaling: {wrong[0]} has {len(scaling[wrong[0]])} numbers; {dim // 2} are needed")
        theta = given.number("rope_theta", None) or read.number("rope_theta", 10000.0)
        return cls(dim, theta, rope_type, trained, scaling)

    @property
    def context(self) -> int:
        """Tokens the model is meant for, the stretch included."""
        if self.rope_type in ("linear", "dynamic", "yarn"):
            original = self.scaling.get("original_max_position_embeddings") or self.max_position_embeddings
            return max(self.max_position_embeddings, int(original * self.scaling["factor"]))
        return self.max_position_embeddings


class RotaryEmbedding:
    """Cosines and sines by position, float32 [length, dim / 2]; divisors are a checkpoint's own stretch of each frequency."""

    def __init__(self, ops: Ops, config: RotaryConfig, length: int, divisors: Tensor | None = None) -> None:
        self._ops = ops
        scaling = SCALINGS[config.rope_type]
        frequencies = scaling.frequencies(config, length)
        if divisors is not None:
            frequencies = frequencies / divisors
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
        magnitude = scaling.magnitude(config)
        self._tables = [ops.matrix(angles.cos() * magnitude), ops.matrix(angles.sin() * magnitude)]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (self._ops.embedding(positions, table, torch.float32) for table in self._tables)
        return cos, sin


class NoRotation:
    """Rotates nothing, for layers in which positions do not enter."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.empty(len(positions), 0, device=positions.device)
        return angles, angles


def _default(config: RotaryConfig, length: int) -> Tensor:
    return _inverse_frequencies(config.theta, config.dim)


def _linear(config: RotaryConfig, length: int) -> Tensor:
    return _default(config, length) / config.scaling["factor"]


def _dynamic(config: RotaryConfig, length: int) -> Tensor:
    """Past the trained context the base grows with the position: frequencies by position, [length, dim / 2]."""
    factor, trained = config.scaling["factor"], config.max_position_embeddings
    reach = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=trained)
    stretch = (factor * reach / trained - (factor - 1)) ** (config.dim / (config.dim - 2))
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim
    return (1.0 / (config.theta * stretch)[:, None] ** exponents).float()


def _llama3(config: RotaryConfig, length: int) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    scaling = config.scaling
    plain = _default(config, length)
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / scaling["factor"] + keep * plain


def _yarn(config: RotaryConfig, length: int) -> Tensor:
    """https://arxiv.org/abs/2309.00071: frequencies that turn often within the trained context are kept, rare ones stretched."""
    scaling, dim = config.scaling, config.dim

    def feature(turns: float) -> float:
        trained = scaling["original_max_position_embeddings"]
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = feature(scaling.get("beta_fast") or 32), feature(scaling.get("beta_slow") or 1)
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = _default(config, length)
    return plain / scaling["factor"] * stretched + plain * (1 - stretched)


def _yarn_magnitude(config: RotaryConfig) -> float:
    scaling = config.scaling
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def grow(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grow(scaling["mscale"]) / grow(scaling["mscale_all_dim"])
    return grow(1.0)


def _longrope(config: RotaryConfig, length: int) -> Tensor:
    """https://arxiv.org/abs/2402.13753: a stretch for each frequency, one list of them up to the original context and one beyond it.

    Which list holds is settled once, by the longest that a sequence may become: else a token's rotation would change as its text grows.
    """
    is_long = length > config.scaling["original_max_position_embeddings"]
    return _default(config, length) / torch.tensor(config.scaling["long_factor" if is_long else "short_factor"])


def _longrope_magnitude(config: RotaryConfig) -> float:
    scaling = config.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling["factor"] or config.max_position_embeddings / original
    if scaling["attention_factor"] is not None:
        return float(scaling["attention_factor"])
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _inverse_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


@dataclass(frozen=True)
class _Scaling:
    """frequencies: (config, length) -> [dim / 2], or [length, dim / 2]. needs: parameters without which the type means nothing."""

    frequencies: Callable[[RotaryConfig, int], Tensor]
    needs: tuple[str, ...] = ()
    magnitude: Callable[[RotaryConfig], float] = lambda config: 1.0


SCALINGS = {
    "default": _Scaling(_default),
    "linear": _Scaling(_linear, ("factor",)),
    "dynamic": _Scaling(_dynamic, ("factor",)),
    "llama3": _Scaling(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": _Scaling(_yarn, ("factor",), _yarn_magnitude),
    "longrope": _Scaling(_longrope, LISTS, _longrope_magnitude),
}
