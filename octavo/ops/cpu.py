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
from octavo.ops.interface import AttentionBatch, LayerKV, Matrix
from octavo.ops.reference import ReferenceOps
from octavo.quantization import Grouped

ISA_VARIABLE = "OCTAVO_CPU_ISA"

# The native dtypes.
_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}

# What keys and values are kept as, by the kernels' numbers.
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

MAX_HEAD_DIM = 256


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

    def matrix(self, weight: Tensor | Grouped) -> Matrix:
        if isinstance(weight, Grouped):
            codes, scales = weight.codes.contiguous(), weight.scales.half().contiguous()
            minimums = None if weight.minimums is None else weight.minimums.half().contiguous()
            return _native.Matrix.grouped(weight.bits, codes.data_ptr(), scales.data_ptr(), _address(minimums), weight.zero, *codes.shape)
        weight = weight if weight.dtype in _IS_BFLOAT16 else weight.float()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        outputs, inputs = weight.shape
        return _native.Matrix.dense(weight.data_ptr(), outputs, inputs, weight.stride(0), _IS_BFLOAT16[weight.dtype])

    def embedding(self, ids: Tensor, weight: Matrix, dtype: torch.dtype) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), weight.shape[1], dtype=dtype)
        self._native.embedding(weight, ids.data_ptr(), len(ids), out.data_ptr(), _IS_BFLOAT16[dtype])
        return out

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        x = _by_token(x)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
        self._native.linear(
            weight, x.data_ptr(), x.stride(0), _IS_BFLOAT16[x.dtype], x.shape[0], _address(bias), out.data_ptr(), _IS_BFLOAT16[dtype]
        )
        return out

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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        is_bfloat16, shape = _IS_BFLOAT16.get(query.dtype), kv.shape
        if is_bfloat16 is None or shape.dtype not in _ELEMENTS or shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 4:
            return super().paged_attention(query, key, value, rotation, kv, batch, scale, window)
        name = ("native", window, query.shape[1])
        plan = batch.prepared.get(name)
        if plan is None:
            plan = batch.prepared[name] = _plan(batch, kv, query.shape[1], window)
        query, key, value = _by_token(query), _by_token(key.to(query.dtype)), _by_token(value.to(query.dtype))
        cos, sin = rotation[0].contiguous(), rotation[1].contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        self._native.paged_attention(
            plan,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            out.data_ptr(),
            is_bfloat16,
            kv.region.data_ptr(),
            kv.layer,
            scale,
        )
        return out


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _by_token(x: Tensor) -> Tensor:
    """[T, ...] whose tokens may lie apart and are contiguous each."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _plan(batch: AttentionBatch, kv: LayerKV, num_heads: int, window: int | None) -> _native.AttentionPlan:
    shape = kv.shape
    tables = [np.asarray(table, dtype=np.int64) for table in batch.tables]
    return _native.AttentionPlan(
        np.array(batch.counts, dtype=np.int64),
        np.array(batch.starts, dtype=np.int64),
        np.array([len(table) for table in tables], dtype=np.int64),
        np.concatenate(tables),
        batch.slots.contiguous().numpy(),
        window=window or 0,
        num_blocks=len(kv.region),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        dim=shape.head_dim,
        group=num_heads // shape.num_kv_heads,
        element=_ELEMENTS[shape.dtype],
        head_bytes=shape.head_bytes,
    )
