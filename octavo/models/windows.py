"""Which layers see a window of the context only, as HF's configurations say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import CheckpointError, shown
from octavo.loading.fields import Fields

KINDS = ("full_attention", "sliding_attention")


def windows(hf: Mapping[str, Any], window: int | None, is_local: Callable[[int], bool]) -> tuple[int | None, ...]:
    """`window` for the layers that `layer_types` calls local or, where it is absent, those whose number `is_local` accepts.

    Raises CheckpointError naming a kind of layer that is not known.
    """
    layers = Fields(hf).whole("num_hidden_layers", high=10_000)
    types = hf.get("layer_types") or [KINDS[is_local(layer)] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"layer_types: {shown(types)}; allowed: a list of {layers} names")
    if strange := [kind for kind in types if kind not in KINDS]:
        raise CheckpointError(f"layer_types: {shown(strange[0])} is not supported; supported: {', '.join(KINDS)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
