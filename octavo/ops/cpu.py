"""The native kernels of `octavo._native` for the CPU; what they do not offer is the reference's.

They work in place on the memory of tensors: a call hands over addresses, so that a layer costs microseconds of Python.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from octavo import _native
from octavo.errors import ConfigError
from octavo.ops.interface import AttentionBatch, LayerKV
from octavo.ops.reference import ReferenceOps

ISA_VARIABLE = "OCTAVO_CPU_ISA"

# The native dtypes.
_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


class CpuOps(ReferenceOps):
    """See `octavo.ops.interface.Ops`. float32 and bfloat16 are native, other dtypes the reference's.

    isa: one of `_native.instruction_sets()`; the environment's OCTAVO_CPU_ISA, or else the fastest here, where it is None.
    Results depend on the instruction set in their last bits, and on nothing else about the machine. Raises ConfigError for one
    that is unknown, or that this processor lacks.
    """

    def __init__(self, device: torch.device, isa: str | None = None) -> None:
        super().__init__(device)
        known = _native.instruction_sets()
        isa = isa or os.environ.get(ISA_VARIABLE) or known[0]
        if isa not in known:
            raise ConfigError(f"{ISA_VARIABLE}: {isa!r}; this processor runs {', '.join(known)}")
        self._native = _native.Backend(isa)

    @property
    def isa(self) -> str:
        return self._native.name

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        is_bfloat16 = _IS_BFLOAT16.get(x.dtype)
        if is_bfloat16 is None or weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
            return super().rms_norm(x, weight, eps, residual)
        x = _by_token(x)
        tokens, size = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype)
        total, residual_address = x, 0
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(out)
            residual_address = residual.data_ptr()
        weight = weight.contiguous()
        self._native.rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual_address,
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            is_bfloat16,
            tokens,
            heads,
            size,
            eps,
        )
        return out, total

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        is_bfloat16 = _IS_BFLOAT16.get(x.dtype)
        if is_bfloat16 is None:
            return super().rotary(x, cos, sin)
        x, cos, sin = _by_token(x), cos.contiguous(), sin.contiguous()
        tokens, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self._native.rotary(
            x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), is_bfloat16, tokens, heads, dim, cos.shape[1]
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        is_bfloat16 = _IS_BFLOAT16.get(gate_up.dtype)
        if is_bfloat16 is None:
            return super().silu_and_mul(gate_up)
        gate_up = _by_token(gate_up)
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, size, dtype=gate_up.dtype)
        self._native.silu_and_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), is_bfloat16, tokens, size)
        return out

    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        region = kv.region
        is_bfloat16, region_is_bfloat16 = _IS_BFLOAT16.get(query.dtype), _IS_BFLOAT16.get(region.dtype)
        if is_bfloat16 is None or region_is_bfloat16 is None:
            return super().paged_attention(query, key, value, kv, batch, scale, window)
        name = ("native", window, query.shape[1])
        plan = batch.prepared.get(name)
        if plan is None:
            plan = batch.prepared[name] = _plan(batch, region, query.shape[1], window)
        query, key, value = _by_token(query), _by_token(key.to(query.dtype)), _by_token(value.to(query.dtype))
        out = torch.empty(query.shape, dtype=query.dtype)
        self._native.paged_attention(
            plan,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            out.data_ptr(),
            is_bfloat16,
            region.data_ptr(),
            region_is_bfloat16,
            kv.layer,
            scale,
        )
        return out


def _by_token(x: Tensor) -> Tensor:
    """[T, ...] whose tokens may lie apart and are contiguous each."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _plan(batch: AttentionBatch, region: Tensor, num_heads: int, window: int | None) -> _native.AttentionPlan:
    num_blocks, num_layers, _, num_kv_heads, block_size, dim = region.shape
    tables = [np.asarray(table, dtype=np.int64) for table in batch.tables]
    return _native.AttentionPlan(
        np.array(batch.counts, dtype=np.int64),
        np.array(batch.starts, dtype=np.int64),
        np.array([len(table) for table in tables], dtype=np.int64),
        np.concatenate(tables),
        batch.slots.contiguous().numpy(),
        window=window or 0,
        num_blocks=num_blocks,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        dim=dim,
        group=num_heads // num_kv_heads,
    )
