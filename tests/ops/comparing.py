"""What the suites of operators have in common: how often hypothesis tries, and what equal means."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

quickly = settings(
    max_examples=int(os.environ.get("OCTAVO_EXAMPLES", "100")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    return found.dtype == wanted.dtype and torch.equal(found.contiguous().view(kind), wanted.contiguous().view(kind))
