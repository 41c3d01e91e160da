"""Local and global layers, as HF's configurations tell them apart: which see a window only, and how each kind rotates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import CheckpointError, shown
from octavo.layers.rotary import RotaryConfig
from octavo.loading.fields import Fields
from octavo.models.llama import DecoderConfig

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


def rotated_by_kind(
    hf: Mapping[str, Any], theta: float, local_theta: float, configure: Callable[[Mapping[str, Any]], DecoderConfig]
) -> DecoderConfig:
    """What `configure` makes with the rotation of global layers, local ones having their own.

    Both stand in `rope_parameters`, by kind; in older configurations `rope_scaling` is the global ones'. The bases are those that hold
    where there is none in them.
    """
    read = Fields(hf)
    given = read.section("rope_parameters")
    full = {"rope_theta": theta, **read.section("rope_scaling").values, **given.section("full_attention").values}
    local = {"rope_theta": local_theta, **given.section("sliding_attention").values}
    if (factor := Fields(full).number("factor", None)) and full.get("original_max_position_embeddings") is None:
        # The context that the configuration names is the stretched one.
        full["original_max_position_embeddings"] = int(read.whole("max_position_embeddings") / factor)
    config = configure({**hf, "rope_parameters": full})
    local_rotary = RotaryConfig.from_hf({**hf, "rope_parameters": local}, config.head_dim)
    return replace(config, rotaries=tuple(local_rotary if window else config.rotary for window in config.windows))
