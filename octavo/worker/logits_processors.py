"""Logits processors of the user's own: found by a registered name or an import path, or given as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from octavo.errors import InvalidValueError, described, shown

LogitsProcessor = Callable[..., Any]
"""(prompt_token_ids, output_token_ids, float32 logits [vocab_size]) -> logits to draw from, of the same shape."""

_registered: dict[str, LogitsProcessor] = {}


def register_logits_processor(name: str, processor: LogitsProcessor) -> None:
    """Make a processor known to the workers of this process under a name, in the place of what was known under it before."""
    if not isinstance(name, str) or not name or ":" in name:
        raise InvalidValueError(f"name: {shown(name)}; allowed: a text without a colon")
    if not callable(processor):
        raise InvalidValueError(f"processor: {shown(processor)}; allowed: a callable")
    _registered[name] = processor


def find(processor: str | LogitsProcessor) -> LogitsProcessor:
    """Raises InvalidValueError for a name that is not registered, or a path that leads to nothing callable."""
    if not isinstance(processor, str):
        return processor
    module, colon, path = processor.partition(":")
    if not colon:
        if processor not in _registered:
            known = ", ".join(sorted(_registered)) or "none is"
            raise InvalidValueError(f"logits_processors: {shown(processor)} is not registered ({known}); allowed also: module:function")
        return _registered[processor]
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise InvalidValueError(f"logits_processors: {shown(processor)} cannot be imported ({described(error)})") from None
    if not callable(found):
        raise InvalidValueError(f"logits_processors: {shown(processor)} is no callable")
    return found
