"""OLMo 3: OLMo 2 with windows on three layers of four; only the fourth stretches its rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.loading.fields import Fields
from octavo.models import olmo2
from octavo.models.layer_kinds import rotated_by_kind, windows
from octavo.models.llama import DecoderConfig


def configure(hf: Mapping[str, Any]) -> DecoderConfig:
    read = Fields(hf)
    theta = read.number("rope_theta", 500_000.0)
    seen = windows(hf, read.whole("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0)
    return rotated_by_kind(hf, theta, theta, lambda full: olmo2.from_hf(full, windows=seen))
