"""Kernels behind one interface; `backend(device)` is the only door."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.ops.interface import Ops

OPS_VARIABLE = "OCTAVO_OPS"


def backend(device: torch.device) -> Ops:
    """The operators for a device. OCTAVO_OPS=reference asks for plain torch where there is a faster backend."""
    from octavo.ops.reference import ReferenceOps

    wanted = os.environ.get(OPS_VARIABLE) or "auto"
    if wanted not in ("auto", "reference"):
        raise ConfigError(f"{OPS_VARIABLE}: {wanted!r}; allowed: auto, reference")
    if device.type != "cpu" or wanted == "reference":
        return ReferenceOps(device)
    try:
        from octavo.ops.cpu import CpuOps
    except ImportError as error:
        _warn_once(str(error))
        return ReferenceOps(device)
    return CpuOps(device)


@cache
def _warn_once(reason: str) -> None:
    logging.getLogger("octavo").warning(
        "the native CPU kernels are missing, so plain torch does their work, slowly; `pip install .` with a C++ compiler builds them (%s)",
        reason,
    )
