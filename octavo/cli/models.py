"""`octavo models`: what can run, and by whose code."""

from __future__ import annotations

import importlib.metadata
from json import dumps
from textwrap import fill
from typing import Any

from octavo.loading.gguf_architectures import ARCHITECTURES
from octavo.loading.hub import ALIASES
from octavo.models import FALLBACK, MODELS


def run(as_json: bool) -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = None
    found: dict[str, Any] = {
        "native": list(MODELS),
        "gguf": list(ARCHITECTURES),
        "aliases": {name: alias.about for name, alias in ALIASES.items()},
        "transformers": {"version": version, "checked": [name for name in FALLBACK if name not in MODELS]},
    }
    if as_json:
        print(dumps(found, indent=2))
        return
    said = f"version {version}" if version else "not installed; pip install 'octavo[transformers]'"
    _section("Native model types (--model-impl octavo)", found["native"])
    _section("Native architectures of GGUF files", found["gguf"])
    _section("Known by name", [f"{name} ({about})" for name, about in found["aliases"].items()])
    _section(f"Seen to run through transformers (--model-impl transformers; {said})", found["transformers"]["checked"])
    print(
        "A folder runs natively where its type does, or else through transformers, more slowly (--model-impl auto). Causal language models"
    )
    print("of other types are looked through when they are loaded: they run, or are refused with the reason. docs/models.md says more.")


def _section(title: str, names: list[str]) -> None:
    print(title)
    print(fill(", ".join(names), width=120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False), end="\n\n")
