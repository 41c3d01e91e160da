"""Kernels behind one interface; `backend(device)` is the only door."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from octavo.ops.interface import Ops


def backend(device: torch.device) -> Ops:
    """The operators for a device."""
    from octavo.ops.reference import ReferenceOps

    return ReferenceOps(device)
