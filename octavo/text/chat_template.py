"""Conversations to text by the model's own Jinja template, in a sandbox, with the helpers that HF's templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ChatTemplateError


def render(template: str | None, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Raises ChatTemplateError where there is no template, it is broken, or it refuses the messages; the text is the template's own."""
    if template is None:
        raise ChatTemplateError("the model has no chat template; give one, or send the prompt as plain text")
    try:
        return _compiled(template).render(messages=messages, **{"tools": None, "documents": None, **variables})
    except Exception as error:  # a template raises whatever its expressions raise, and all of it is about its messages
        raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; here it stands for what is between, whose names end with it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
