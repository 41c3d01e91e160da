"""The effective configuration: defaults, then a YAML file, then flags or keywords; frozen and validated.

Each setting is declared once, below, with what it allows; the file, the command line and `LLM(...)` all read this declaration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError, shown

Auto = Literal["auto"]

BYTES_PER_UNIT = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4, "t": 1000**4}


@dataclass(frozen=True)
class Kind:
    """What a setting allows. `parse` returns the value in its own type, or raises ValueError."""

    allowed: str
    parse: Callable[[Any], Any]


def whole(low: int, high: int = 2**31 - 1) -> Kind:
    def parse(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
            raise ValueError
        return raw

    return Kind(f"a whole number from {low} to {high}", parse)


def power_of_two(high: int) -> Kind:
    def parse(raw: Any) -> int:
        value: int = whole(1, high).parse(raw)
        if value & (value - 1):
            raise ValueError
        return value

    return Kind(f"a power of two from 1 to {high}", parse)


def number(above: float, high: float) -> Kind:
    def parse(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not above < raw <= high:
            raise ValueError
        return raw

    return Kind(f"a number above {above:g} to {high:g}", parse)


def choice(*values: str) -> Kind:
    def parse(raw: Any) -> str:
        if raw not in values:
            raise ValueError
        return str(raw)

    return Kind(" or ".join(values), parse)


def boolean() -> Kind:
    def parse(raw: Any) -> bool:
        if not isinstance(raw, bool):
            raise ValueError
        return raw

    return Kind("true or false", parse)


def size() -> Kind:
    """Bytes, or a text such as 512MB or 2GiB."""

    def parse(raw: Any) -> int:
        if isinstance(raw, str) and (match := re.fullmatch(r"([0-9.]+)\s*((?:[kmgt]i?)?)b?", raw.strip().lower())):
            raw = int(float(match[1]) * BYTES_PER_UNIT[match[2]])
        value: int = whole(0, 2**60).parse(raw)
        return value

    return Kind("bytes up to 2^60, or a size such as 512MiB or 2GiB", parse)


def or_word(word: str | None, kind: Kind) -> Kind:
    """`kind`, or one word (None is YAML's null) that stands for a default."""

    def parse(raw: Any) -> Any:
        if raw == word or (word is None and raw == "null"):
            return word
        return kind.parse(raw)

    return Kind(f"{'null' if word is None else word}, or {kind.allowed}", parse)


def setting(default: Any, kind: Kind, about: str) -> Any:
    """Declare a setting."""
    return field(default=default, metadata={"kind": kind, "help": about})


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """KV memory."""

    block_size: int = setting(16, power_of_two(256), "tokens a block holds")
    prealloc_blocks: int = setting(1024, whole(0), "blocks committed at start, clipped to the ceiling; the pool grows from there")
    max_blocks_per_seq: int | Auto = setting("auto", or_word("auto", whole(1)), "longest block table; auto is the model's context")
    kv_cache_memory: int | Auto = setting("auto", or_word("auto", size()), "KV memory at most; auto is half of what is free after loading")
    max_blocks: int | None = setting(None, or_word(None, whole(1)), "the same ceiling in blocks")
    kv_cache_dtype: str = setting(
        "auto",
        choice("auto", "float32", "bfloat16", "int8"),
        "precision of cached keys and values; auto is dtype's, bfloat16 for quantized weights",
    )
    prefix_caching: bool = setting(True, boolean(), "share the blocks of equal prefixes")
    swap_space: int = setting(0, size(), "memory for the blocks of preempted sequences; 0 recomputes them all")
    check_invariants: bool = setting(False, boolean(), "audit the books of KV memory after every step")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs, and how much of it in one step."""

    max_batch_size: int = setting(32, whole(1, 65536), "sequences in one step at most")
    prefill_chunk_size: int | None = setting(256, or_word(None, whole(1)), "prefill tokens in one step at most; null is no limit")
    timeout_ms: float | None = setting(None, or_word(None, number(0, 1e12)), "deadline of a whole request in milliseconds")
    policy: str = setting("fcfs", choice("fcfs", "priority"), "who is admitted first: first come, first served; or by priority, and age")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the model is loaded and run."""

    model_impl: str = setting(
        "auto",
        choice("auto", "octavo", "transformers"),
        "whose code the model is: octavo's own, or that of transformers with octavo's attention; auto is octavo's where there is one",
    )
    dtype: str = setting(
        "auto",
        choice("auto", "float32", "bfloat16"),
        "arithmetic; auto is bfloat16, float32 for a float32 checkpoint and for quantized weights",
    )
    quantization: str = setting(
        "auto",
        choice("auto", "none", "int8", "int4"),
        "weights in memory; auto as in the file, none as plain numbers, int8 and int4 with that many bits at most",
    )
    max_model_len: int | None = setting(None, or_word(None, whole(1)), "longest sequence in tokens; null is the model's context")
    device: str = setting("auto", choice("auto", "cpu", "cuda"), "where the model runs; auto is the CPU")
    threads: int | Auto = setting("auto", or_word("auto", whole(1, 4096)), "compute threads; auto respects CPU quotas")
    seed: int = setting(0, whole(0, 2**63 - 1), "seeds the requests that bring no seed of their own, so that a run repeats")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Build it with `create`; equal inputs give equal configurations."""

    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    model: ModelConfig = ModelConfig()

    @classmethod
    def create(cls, file: str | Path | Mapping[str, Any] | None = None, **overrides: Any) -> EngineConfig:
        """Read a YAML file (or its parsed sections), then apply overrides by setting name.

        Raises ConfigError naming the key, its value and what is allowed.
        """
        sections = _read(file) if isinstance(file, (str, Path)) else file or {}
        if not isinstance(sections, Mapping):
            raise ConfigError(f"config: {shown(file)}; allowed: a YAML file, or its sections {', '.join(SECTIONS)}")
        origin = f"{file}: " if isinstance(file, (str, Path)) else ""
        values: dict[str, dict[str, Any]] = {}
        for name, content in sections.items():
            if name not in SECTIONS:
                raise ConfigError(f"{origin}{name}: no such section; allowed: {', '.join(SECTIONS)}")
            if content is not None and not isinstance(content, Mapping):
                raise ConfigError(f"{origin}{name}: {shown(content)}; allowed: a section of `key: value` lines")
            for key, raw in (content or {}).items():
                if SECTION_OF.get(key) != name:
                    raise ConfigError(
                        f"{origin}{name}.{key}: no such setting; allowed: {', '.join(f.name for f in fields(SECTIONS[name]))}"
                    )
                values.setdefault(name, {})[key] = _parse(f"{origin}{name}.{key}", key, raw)
        for key, raw in overrides.items():
            if key not in SECTION_OF:
                raise ConfigError(f"{key}: no such setting; allowed: {', '.join(SECTION_OF)}")
            values.setdefault(SECTION_OF[key], {})[key] = _parse(key, key, raw)
        config = cls(**{name: section(**values.get(name, {})) for name, section in SECTIONS.items()})
        memory = config.memory
        if memory.max_blocks is not None and memory.kv_cache_memory != "auto":
            raise ConfigError(
                f"max_blocks: {memory.max_blocks} and kv_cache_memory: {memory.kv_cache_memory} both set the pool's ceiling; give one"
            )
        return config

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The sections as the YAML file would spell them."""
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = {"memory": MemoryConfig, "scheduler": SchedulerConfig, "model": ModelConfig}
SECTION_OF = {f.name: name for name, section in SECTIONS.items() for f in fields(section)}


def settings() -> list[tuple[str, dataclasses.Field[Any]]]:
    """Every setting with its section's name, in the order of declaration; the command line makes its flags of these."""
    return [(name, f) for name, section in SECTIONS.items() for f in fields(section)]


def parse_flag(key: str, text: str) -> Any:
    """Parse a flag's text as the same setting in the file would be."""
    import yaml

    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raw = text
    return _parse(f"--{key.replace('_', '-')}", key, raw)


def _parse(place: str, key: str, raw: Any) -> Any:
    metadata = SECTIONS[SECTION_OF[key]].__dataclass_fields__[key].metadata  # type: ignore[attr-defined]
    try:
        return metadata["kind"].parse(raw)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{place}: {shown(raw)}; allowed: {metadata['kind'].allowed}") from None


def _read(path: str | Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the configuration file cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path}: allowed: the sections {', '.join(SECTIONS)}")
    return content or {}
