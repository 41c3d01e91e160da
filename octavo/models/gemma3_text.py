"""Gemma 3: Gemma 2 with heads normalised; local layers, five to a global one, rotate by a base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models import gemma2
from octavo.models.layer_kinds import rotated_by_kind, windows
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    period = read.whole("sliding_window_pattern", 6)
    seen = windows(hf, read.whole("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
    bases = read.number("rope_theta", 1e6), read.number("rope_local_base_freq", 10_000.0)
    return rotated_by_kind(hf, *bases, lambda full: gemma2.from_hf(full, windows=seen, normed="head"))
