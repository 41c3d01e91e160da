"""`octavo advise`: what the recorded figures say about the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.advice import Advice, advise
from octavo.config import SECTIONS, EngineConfig, settings
from octavo.core.stats import Record
from octavo.errors import ConfigError, InvalidValueError, shown

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"change": "bold red", "consider": "yellow", "fine": "green"}
LARGEST = 2**62


def run(file: str | None, as_json: bool, url: str | None = None, api_key: str | None = None) -> None:
    """Advise from a record in `file`, None and `-` being stdin, or from a server's. Raises InvalidValueError where there is none."""
    if url is not None and file is not None:
        raise InvalidValueError("--url: give a file or a server, not both")
    show(load(file) if url is None else fetch(url, api_key), as_json)


def fetch(url: str, api_key: str | None) -> Record:
    """Ask a server that runs. Raises InvalidValueError where it does not answer with a record."""
    import urllib.error
    import urllib.request

    place = url.rstrip("/").removesuffix("/v1") + "/record"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(place, headers=headers), timeout=30) as answer:
            return decode(place, answer.read())
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(f"--url: {place} does not answer with a record ({error})") from None


def load(file: str | None) -> Record:
    """Read a record as `save` wrote it. Raises InvalidValueError naming the file and what is wrong with it."""
    if file is None and sys.stdin.isatty():
        raise InvalidValueError("no record: name the file it was saved to, or give it on stdin")
    name = "stdin" if file in (None, "-") else str(file)
    try:
        content = sys.stdin.buffer.read() if file in (None, "-") else Path(name).read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{name}: the record cannot be read ({error.strerror})") from None
    return decode(name, content)


def decode(name: str, content: bytes) -> Record:
    """A record as JSON. Raises InvalidValueError naming where it comes from, and what is wrong with it."""
    import msgspec

    try:
        record = msgspec.json.decode(content, type=Record)
        EngineConfig.create(block_size=record.block_size, prealloc_blocks=record.prealloc_blocks, max_batch_size=record.max_batch_size)
    except msgspec.ValidationError as error:
        raise InvalidValueError(f"{name}: not a record of this version ({error})") from None
    except ConfigError as error:
        raise InvalidValueError(f"{name}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValueError(f"{name}: not JSON ({error})") from None
    for place, value in _numbers("$", msgspec.to_builtins(record)):
        least = 1 if place == "$.block_bytes" else -LARGEST if place.endswith(".time") else 0
        if not least <= value <= LARGEST:
            raise InvalidValueError(f"{name}: {place}: {shown(value)}; allowed: a number from {least} to {LARGEST}")
    return record


def check_target(path: str) -> None:
    """Tell before the work what `save` would tell after. Raises InvalidValueError where there is no such folder, or it is one."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        wrong = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise InvalidValueError(f"{path}: the record cannot be written ({wrong})")


def save(record: Record, path: str) -> None:
    """Write a record so that the file, under its name, is never half a record. Raises InvalidValueError where it cannot be written."""
    import msgspec

    content, target = msgspec.json.encode(record), Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}") if target.name else target
    try:
        if target.exists() and not target.is_file():  # a pipe or a device is written, not replaced
            target.write_bytes(content)
            return
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise InvalidValueError(f"{path}: the record cannot be written ({error.strerror})") from None


def show(record: Record, as_json: bool) -> None:
    """Print the advice: a table on a terminal, plain lines elsewhere, and the YAML that follows it; or JSON alone."""
    lines = advise(record)
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        _print_table(console, lines)
    else:
        for line in lines:
            print(f"{line.figure:<44} {line.severity:<8} {_to_set(line)}".rstrip(), f"    {line.reason}", sep="\n")
    if snippet := yaml_snippet(lines):
        print(f"\n{snippet}", end="")


def yaml_snippet(lines: list[Advice]) -> str:
    """The sections to paste into a configuration file, what is merely to be considered as a comment; empty where all is fine."""
    wanted: dict[str, Advice] = {}
    for line in lines:
        if line.setting is not None and (line.setting not in wanted or line.severity == "change"):
            wanted[line.setting] = line
    text = ""
    for section in SECTIONS:
        chosen = [wanted[f.name] for name, f in settings() if name == section and f.name in wanted]
        text += f"{section}:\n" * bool(chosen) + "".join(map(_yaml_line, chosen))
    return text


def _yaml_line(line: Advice) -> str:
    if line.severity == "consider":
        return f"  # {_to_set(line)}  (to consider)\n"
    return f"  {_to_set(line)}{'  # in place of max_blocks' * (line.setting == 'kv_cache_memory')}\n"


def _print_table(console: Console, lines: list[Advice]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("figure", "state", "set", "reason", show_lines=True)
    for line in lines:
        table.add_row(line.figure, Text(line.severity, STYLES[line.severity]), _to_set(line), line.reason)
    console.print(table)


def _to_set(line: Advice) -> str:
    return f"{line.setting}: {line.value}" if line.setting else ""


def _numbers(place: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in nested builtins, with the place it stands at."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{place}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(f"{place}[{index}]", inner)
    elif isinstance(value, (int, float)):
        yield place, value
