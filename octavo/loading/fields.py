"""Typed reading of what a file says, each fault named: field, value, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, shown

REQUIRED: Any = object()


class Fields:
    """A JSON object from a checkpoint. Absent and null are the same: the default, or CheckpointError where there is none."""

    def __init__(self, values: Any, place: str = "the model's configuration") -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{place}: {shown(values)}; allowed: an object of named values")
        self.values = values
        self._place = place

    def whole(self, name: str, default: Any = REQUIRED, low: int = 1, high: int = 2**31 - 1) -> Any:
        """A whole number from `low` to `high`."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._fault(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: Any = REQUIRED, above: float = 0.0) -> Any:
        """A finite number above `above`."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < 1e30 or not math.isfinite(value):
            raise self._fault(name, value, f"a number above {above:g}")
        return float(value)

    def numbers(self, name: str, default: Any = REQUIRED) -> Any:
        """A list of finite numbers above 0."""
        value = self._get(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(x) in (int, float) and 0 < x < 1e30 for x in value):
            raise self._fault(name, value, "a list of numbers above 0")
        return [float(x) for x in value]

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._fault(name, value, "true or false")
        return value

    def word(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self._fault(name, value, "a word")
        return value

    def section(self, name: str) -> Fields:
        """An object within; empty where it is absent."""
        return Fields(self._get(name, {}), f"{self._place}, {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is REQUIRED:
            raise CheckpointError(f"{self._place} lacks {name}")
        return default if value is None else value

    def _fault(self, name: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self._place}: {name}: {shown(value)}; allowed: {allowed}")
