"""Random JSON schemas whose values are short, of the parts that structured output offers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ["name", "age", "city", "tags", "id", "é", "first name", "a/b", 'q"', "x_1"]
PATTERNS = ["^[a-z]{1,4}$", "^[A-Z][0-9]{2}$", "^(ab|cd){1,3}$", "^#[0-9a-f]{6}$", r"^\d{3}-\d{2}$", "^(yes|no|maybe)$", "^[é🙂]{1,2}$"]
CONSTANTS: list[Any] = [
    None,
    True,
    False,
    0,
    -7,
    3.5,
    "",
    "red",
    'say "hi"',
    "back\\slash",
    "東京 🙂",
    [],
    [1, "two"],
    {},
    {"a": 1, "b": [None]},
]


def make(seed: int) -> Schema:
    """The schema of that number."""
    source = random.Random(seed)
    if seed % 5 == 4:
        return _recursive(source)
    schema = _any(source, depth=2) if source.random() < 0.3 else _object(source, depth=2)
    if source.random() < 0.25:
        schema = {
            "$defs": {"part": _any(source, depth=0)},
            "type": "array",
            "items": {"$ref": "#/$defs/part"},
            "minItems": 1,
            "maxItems": 2,
        }
    return schema


def _any(source: random.Random, depth: int) -> Schema:
    flat: list[Callable[..., Schema]] = [_string, _integer, _number, _enum, _constant, _simple]
    deep: list[Callable[..., Schema]] = [_object, _array, _alternatives]
    return source.choice(flat + deep * 2 if depth else flat)(source, depth - 1)


def _object(source: random.Random, depth: int = 0) -> Schema:
    names = source.sample(NAMES, source.randint(0, 3))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(source, depth) for name in names},
        "required": [name for name in names if source.random() < 0.6],
        "additionalProperties": False,
    }
    if source.random() < 0.1:
        schema["additionalProperties"] = _simple(source)
    return schema


def _array(source: random.Random, depth: int = 0) -> Schema:
    least = source.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(source, depth), "maxItems": least + source.randint(0, 2)}
    if least:
        schema["minItems"] = least
    return schema


def _alternatives(source: random.Random, depth: int = 0) -> Schema:
    return {"anyOf": [_any(source, depth) for _ in range(source.randint(2, 3))]}


def _string(source: random.Random, depth: int = 0) -> Schema:
    if source.random() < 0.4:
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    least = source.randint(0, 4)
    schema: Schema = {"type": "string", "maxLength": least + source.randint(0, 8)}
    if least:
        schema["minLength"] = least
    return schema


def _integer(source: random.Random, depth: int = 0) -> Schema:
    low = source.randint(-1000, 1000)
    bounds = [
        {"minimum": low},
        {"maximum": low},
        {"exclusiveMinimum": low},
        {"minimum": low, "exclusiveMaximum": low + source.randint(1, 500)},
    ]
    return {"type": "integer", **source.choice(bounds)} if source.random() < 0.8 else {"type": "integer", "minimum": 0, "multipleOf": 5}


def _number(source: random.Random, depth: int = 0) -> Schema:
    low = source.randint(-40, 40) / 4
    bounds = [
        {"minimum": low, "maximum": low + 2.5},
        {"exclusiveMinimum": low},
        {"maximum": low},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 1},
    ]
    return {"type": "number", **source.choice(bounds)}


def _enum(source: random.Random, depth: int = 0) -> Schema:
    return {"enum": source.sample(CONSTANTS, source.randint(1, 5))}


def _constant(source: random.Random, depth: int = 0) -> Schema:
    return {"const": source.choice(CONSTANTS)}


def _simple(source: random.Random, depth: int = 0) -> Schema:
    return source.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"type": "integer", "minimum": 0, "maximum": 9}]
    )


def _recursive(source: random.Random) -> Schema:
    """A list whose rest is a list, a tree whose branches are trees, or two kinds that hold each other."""
    value = _any(source, depth=0)
    chain = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    if source.random() < 0.4:
        node = _closed({"value": value, "next": chain}, ["value", "next"])
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    if source.random() < 0.5:
        node = _closed({"value": value, "branches": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, ["value"])
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    node = _closed({"value": value, "other": {"$ref": "#/$defs/other"}}, ["value"])
    other = {"anyOf": [_simple(source), {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}]}
    return {"$defs": {"node": node, "other": other}, "anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/other"}]}


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
