"""The native kernels of `octavo._native` for the CPU; what they do not offer is the reference's.

They work in place on the memory of tensors: a call hands over addresses, so that a layer costs microseconds of Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo import _native
from octavo.errors import ConfigError
from octavo.ops.interface import Activation, AttentionBatch, Draws, Forward, LayerKV, Matrix
from octavo.ops.reference import ReferenceOps
from octavo.quantization import Grouped

ISA_VARIABLE = "OCTAVO_CPU_ISA"

# The native dtypes.
_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}

# The kernels' numbers.
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}

# What keys and values are kept as, by the kernels' numbers.
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

MAX_HEAD_DIM = 256

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

RECORDED_TOKENS = 4
"""Steps of more tokens are not recorded: each count of tokens keeps memory of its own, for every layer."""


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
        _keep_freed_memory()

        self._recordings: dict[int, _Recording | None] = {}
        self._made: list[Tensor] | None = None

    @property
    def isa(self) -> str:
        return self._native.name

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        _return_freed_memory()
        try:
            yield
        finally:
            _keep_freed_memory()

    def run(self, forward: Forward, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        """See `Ops.run`. With few tokens Python takes longer over a layer's calls than the kernels do, so it makes them once."""
        count = len(token_ids)
        if count > RECORDED_TOKENS:
            return forward(token_ids, positions, kv, batch)
        if count not in self._recordings:
            return self._record(forward, token_ids.clone(), positions.clone(), kv, batch)
        recording = self._recordings[count]
        if recording is None:
            return forward(token_ids, positions, kv, batch)
        recording.token_ids.copy_(token_ids)
        recording.positions.copy_(positions)
        recording.native.run([_plan(batch, kv[0], *name) for _, *name in recording.plans])
        return recording.hidden

    def _record(self, forward: Forward, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        native, self._made = _native.Recording(), []
        self._native.record(native)
        try:
            with _OnlyViews() as foreign:
                hidden = forward(token_ids, positions, kv, batch)
        finally:
            self._native.record(None)
            made, self._made = self._made, None
        whole = not foreign.functions
        plans = [name for name in batch.prepared if name[0] == "native"]
        self._recordings[len(token_ids)] = _Recording(native, token_ids, positions, hidden, made, plans) if whole else None
        return hidden

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Room for a result; what is recorded stays where it is."""
        out = torch.empty(shape, dtype=dtype)
        if self._made is not None:
            self._made.append(out)
        return out

    def matrix(self, weight: Tensor | Grouped) -> Matrix:
        if isinstance(weight, Grouped):
            codes, scales = weight.codes.contiguous(), weight.scales.half().contiguous()
            minimums = None if weight.minimums is None else weight.minimums.half().contiguous()
            return _native.Matrix.grouped(weight.bits, codes.data_ptr(), scales.data_ptr(), _address(minimums), weight.zero, *codes.shape)
        weight = weight if weight.dtype in _IS_BFLOAT16 else weight.float()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        outputs, inputs = weight.shape
        return _native.Matrix.dense(weight.data_ptr(), outputs, inputs, weight.stride(0), _IS_BFLOAT16[weight.dtype])

    def embedding(self, ids: Tensor, weight: Matrix, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        ids = ids.contiguous()
        out = self._empty(len(ids), weight.shape[1], dtype=dtype)
        self._native.embedding(weight, ids.data_ptr(), len(ids), out.data_ptr(), _IS_BFLOAT16[dtype], scale)
        return out

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        x = _by_token(x)
        out = self._empty(x.shape[0], weight.shape[0], dtype=dtype)
        self._native.linear(
            weight, x.data_ptr(), x.stride(0), _IS_BFLOAT16[x.dtype], x.shape[0], _address(bias), out.data_ptr(), _IS_BFLOAT16[dtype]
        )
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, multiplier: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        foreign = residual is not None and residual.dtype != x.dtype
        if x.dtype not in _IS_BFLOAT16 or weight.dtype not in (x.dtype, torch.float32) or foreign:
            return super().rms_norm(x, weight, eps, residual, multiplier)
        x = _by_token(x)
        out, total = self._empty(*x.shape, dtype=x.dtype), x if residual is None else self._empty(*x.shape, dtype=x.dtype)
        self._norm(x, residual, weight.contiguous(), out, total, eps, multiplier)
        return out, total

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
        if x.dtype not in _IS_BFLOAT16 or residual.dtype != x.dtype:
            return super().add(x, residual, multiplier)
        x, total = _by_token(x), self._empty(*x.shape, dtype=x.dtype)
        self._norm(x, residual, None, None, total, 0.0, multiplier)
        return total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor | None, total: Tensor, eps: float, multiplier: float
    ) -> None:
        residual = None if residual is None else residual.contiguous()
        self._native.rms_norm(
            x.data_ptr(),
            x.stride(0),
            _address(residual),
            _address(weight),
            _address(out),
            total.data_ptr(),
            _IS_BFLOAT16[x.dtype],
            weight is not None and _IS_BFLOAT16[weight.dtype],
            x.shape[0],
            x.shape[1] if x.dim() == 3 else 1,
            x.shape[-1],
            eps,
            multiplier,
        )

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        is_bfloat16 = _IS_BFLOAT16.get(gate_up.dtype)
        if is_bfloat16 is None:
            return super().activate_and_mul(gate_up, activation)
        gate_up = _by_token(gate_up)
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(tokens, size, dtype=gate_up.dtype)
        number = _ACTIVATIONS[activation]
        self._native.activate_and_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), is_bfloat16, number, tokens, size)
        return out

    def route(self, logits: Tensor, count: int, over_chosen: bool) -> tuple[Tensor, Tensor]:
        logits = _by_token(logits)
        tokens, size = logits.shape
        choices, weights = self._empty(tokens, count, dtype=torch.int64), self._empty(tokens, count, dtype=torch.float32)
        self._native.route(logits.data_ptr(), logits.stride(0), tokens, size, count, over_chosen, choices.data_ptr(), weights.data_ptr())
        return choices, weights

    def experts(
        self, x: Tensor, choices: Tensor, weights: Tensor, gate_up: list[Matrix], down: list[Matrix], activation: Activation
    ) -> Tensor:
        x, choices, weights = _by_token(x), choices.contiguous(), weights.contiguous()
        out = self._empty(*x.shape, dtype=x.dtype)
        self._native.experts(
            gate_up,
            down,
            x.data_ptr(),
            x.stride(0),
            _IS_BFLOAT16[x.dtype],
            x.shape[0],
            choices.data_ptr(),
            weights.data_ptr(),
            choices.shape[1],
            _ACTIVATIONS[activation],
            out.data_ptr(),
        )
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype != torch.float32 or x.stride(1) != 1:
            return super().softcap(x, cap)
        self._native.softcap(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], cap)
        return x

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            super().mask(logits, rows, bits)
            return
        rows, bits = rows.contiguous(), bits.contiguous()
        size, (count, words) = logits.shape[1], bits.shape
        self._native.mask(logits.data_ptr(), logits.stride(0), size, rows.data_ptr(), bits.data_ptr(), words, count)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = _by_token(logits)
        rows, size = logits.shape
        peaks, places = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._native.argmax(logits.data_ptr(), logits.stride(0), rows, size, peaks.data_ptr(), places.data_ptr())
        return peaks, places

    def sample(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        if logits.dtype != torch.float32:
            return super().sample(logits, peaks, draws)
        logits, peaks = _by_token(logits), peaks.contiguous()
        rows, size = logits.shape
        places = torch.empty(rows, dtype=torch.int64)
        self._native.sample(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            size,
            peaks.data_ptr(),
            draws.temperature.data_ptr(),
            draws.min_p.data_ptr(),
            draws.top_k.data_ptr(),
            draws.top_p.data_ptr(),
            draws.uniform.data_ptr(),
            places.data_ptr(),
        )
        return places

    def score(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return super().score(logits, token_ids, count)
        logits, token_ids = _by_token(logits), token_ids.contiguous()
        rows, size = logits.shape
        logprobs = torch.empty(rows, 1 + count)
        ids, ranks = torch.empty(2, rows, 1 + count, dtype=torch.int64)
        self._native.score(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            size,
            token_ids.data_ptr(),
            count,
            logprobs.data_ptr(),
            ids.data_ptr(),
            ranks.data_ptr(),
        )
        return logprobs, ids, ranks

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
        softcap: float | None = None,
    ) -> Tensor:
        is_bfloat16, shape = _IS_BFLOAT16.get(query.dtype), kv.shape
        if is_bfloat16 is None or shape.dtype not in _ELEMENTS or shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 4:
            return super().paged_attention(query, key, value, rotation, kv, batch, scale, window, softcap)
        name = (kv.group, query.shape[1], window)
        plan = batch.prepared.get(("native", *name))
        if plan is None:
            plan = batch.prepared["native", *name] = _plan(batch, kv, *name)
        query, key, value = _by_token(query), _by_token(key.to(query.dtype)), _by_token(value.to(query.dtype))
        cos, sin = rotation[0].contiguous(), rotation[1].contiguous()
        out = self._empty(*query.shape, dtype=query.dtype)
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
            softcap or 0.0,
        )
        return out


def _return_freed_memory() -> None:
    """Have glibc give back what is freed: the weights come to lie elsewhere, and nothing else would fill it."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 20)


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step: pages that are given back come again empty, one fault each."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 256 << 20)


@dataclass
class _Recording:
    """A forward pass of so many tokens. made: the memory between its calls. plans: what its attention plans are for."""

    native: _native.Recording
    token_ids: Tensor
    positions: Tensor
    hidden: Tensor
    made: list[Tensor]
    plans: list[Any]


_TELLS_SHAPE = {"__get__", "__len__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"}


class _OnlyViews(TorchFunctionMode):
    """Notes functions of torch that compute or read numbers: a recording would leave them out.

    A dispatch mode, which would see more, takes two seconds to import.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.__name__
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        made = [x for x in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(x, Tensor)]
        in_place = name.endswith("_") and not name.endswith("__")
        # Names do not tell: `contiguous` and `reshape` copy where they must.
        is_view = made and not in_place and all(x.untyped_storage().data_ptr() in given for x in made)
        if not (is_view or name.startswith("empty") or (not made and name in _TELLS_SHAPE)):
            self.functions.add(name)
        return results


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _by_token(x: Tensor) -> Tensor:
    """[T, ...] whose tokens may lie apart and are contiguous each."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _plan(batch: AttentionBatch, kv: LayerKV, group: int, num_heads: int, window: int | None) -> _native.AttentionPlan:
    shape, slots = kv.shape, batch.slots[group].contiguous()
    tables = [np.asarray(table, dtype=np.int64) for table in batch.tables[group]]
    return _native.AttentionPlan(
        np.array(batch.counts, dtype=np.int64),
        np.array(batch.starts, dtype=np.int64),
        np.array([len(table) for table in tables], dtype=np.int64),
        np.concatenate(tables),
        slots.data_ptr(),
        len(slots),
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
