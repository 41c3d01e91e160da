"""Weights as small integers: rows cut into groups of 32, each with a scale and a minimum or a zero of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

GROUP = 32
"""Weights that share a scale. It is also the number of activations that do: a group's products are summed as integers."""

_RANGE_LENGTH = 1 << 14
"""Numbers quantized at a time: they stay in the cache, and torch works on them without waking its other threads, which for so
little costs more than it saves, and on a busy machine a hundred times more. (It would wake them for any `round_`.)"""

LEAST_SCALE = 2.0**-24
"""The least positive float16. A group of zeros has it too, so that nothing is divided by zero."""


@dataclass(frozen=True)
class Grouped:
    """A weight [N, K] whose element is `(code - zero) * scale`, or `code * scale + minimum` where there are minimums.

    codes: uint8 [N, K], each below 2 ** bits. scales, minimums: float32 [N, ceil(K / 32)], each exactly a float16; the last
    group of a row may be short. bits: 4 or 8. Minimums and a zero exclude each other.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    zero: int = 0

    @classmethod
    def empty(cls, rows: int, columns: int, bits: int, *, zero: int = 0, minimums: bool = False) -> Grouped:
        """A weight to be filled in."""
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        scales = torch.empty(rows, -(-columns // GROUP))
        return cls(bits, codes, scales, torch.empty_like(scales) if minimums else None, zero)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def rows(self, start: int, stop: int) -> Grouped:
        """Some of the rows, as views."""
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop], minimums=minimums)

    def finite(self) -> bool:
        """Whether no scale and no minimum went beyond what float16 holds."""
        return all(bool(np.isfinite(part.numpy()).all()) for part in (self.scales, self.minimums) if part is not None)

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        columns = self.codes.shape[1]
        codes = F.pad(self.codes, (0, -columns % GROUP)).float().unflatten(1, (-1, GROUP))
        scales = self.scales[..., None]
        if self.minimums is None:
            return ((codes - self.zero) * scales).flatten(1)[:, :columns]
        return (codes * scales + self.minimums[..., None]).flatten(1)[:, :columns]


def as_float16(values: Tensor) -> Tensor:
    """Round to float16, in float32; what lies beyond becomes infinite."""
    return values.half().float()


def quantize(weight: Tensor, bits: int) -> Grouped | None:
    """Round a weight [N, K] of any float dtype to 8 or 4 bits; None where it is not finite, or a scale would overflow float16.

    8 bits: symmetric about a zero of 128, with the largest of a group at 127. 4 bits: with minimums, searched for.
    """
    rows, columns = weight.shape
    out = allocate(rows, columns, bits)
    quantize_into(weight, out)
    return out if out.finite() else None


def allocate(rows: int, columns: int, bits: int) -> Grouped:
    """What `quantize_into` fills: 8 bits with a zero of 128, or 4 bits with minimums."""
    return Grouped.empty(rows, columns, bits, zero=128) if bits == 8 else Grouped.empty(rows, columns, bits, minimums=True)


def quantize_into(weight: Tensor, out: Grouped) -> None:
    """Round [N, K] of any float dtype, as `quantize` does, a range of rows at a time."""
    rows, columns = weight.shape
    padding = -columns % GROUP
    step = max(1, _RANGE_LENGTH // (columns + padding))
    for start in range(0, rows, step):
        part = out.rows(start, min(start + step, rows))
        groups = F.pad(weight[start : start + step].float(), (0, padding)).view(-1, GROUP)
        codes = _round_to_8_bits(groups, part) if out.bits == 8 else _round_to_4_bits(groups, part)
        part.codes.copy_(codes.reshape(part.codes.shape[0], -1)[:, :columns])


def _round_to_8_bits(groups: Tensor, out: Grouped) -> Tensor:
    """[n, 32] -> codes [n, 32], yet to be cut to whole numbers.

    The scale is rounded up, so that no code exceeds 127 even where float16 is coarse, below 2^-14.
    """
    exact = (groups.abs().amax(1, keepdim=True) / 127).clamp_(min=LEAST_SCALE)
    scales = float16_above(exact)
    out.scales.copy_(scales.view_as(out.scales))
    return (groups / scales).add_(out.zero + 0.5)


def float16_above(values: Tensor) -> Tensor:
    """The least float16 that is not below each value, which is positive; in float32."""
    near = values.half()
    return (near.view(torch.int16) + (near.float() < values)).view(torch.float16).float()


_ROUNDER = 1.5 * 2.0**23
"""Added to a small float32 it leaves no bits for a fraction."""

_SPANS = (1.0, 0.9)
"""Shares of a group's range that the 4-bit search tries to begin with: a clipped outlier may cost less than a coarser step."""

_REFINEMENTS = 2


def _round_to_4_bits(groups: Tensor, out: Grouped) -> Tensor:
    """[n, 32] -> codes [n, 32], yet to be cut to whole numbers.

    As in llama.cpp's make_qkx2_quants: codes for a tried scale and minimum, then by least squares the scale and minimum best for
    these codes; the best of the tries goes round again. On normally distributed weights this takes the squared error 15% below
    that of the plain range; eight times the tries would take it 4% further.
    """
    x = groups.t().contiguous()  # [32, n]: sums over a group run along whole vectors
    fit = _LeastSquares(x)
    low, high = x.amin(0), x.amax(0)
    middle, half = (low + high) / 2, (high - low) / 2
    (error, scales, minimums), *others = [fit((half * (span / 7.5)).clamp_(min=LEAST_SCALE), middle - half * span) for span in _SPANS]
    for other_error, other_scales, other_minimums in others:
        better = other_error < error
        scales, minimums = torch.where(better, other_scales, scales), torch.where(better, other_minimums, minimums)
        error = torch.where(better, other_error, error)
    for _ in range(_REFINEMENTS):
        error, scales, minimums = fit(scales, minimums)
    scales, minimums = as_float16(scales).clamp_(min=LEAST_SCALE), as_float16(minimums)
    assert out.minimums is not None
    out.scales.copy_(scales.view_as(out.scales))
    out.minimums.copy_(minimums.view_as(out.minimums))
    return ((x - minimums) / scales).add_(0.5).clamp_(0, 15).t()


class _LeastSquares:
    """Improves scales and minimums of the groups x [32, n]."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._sum = x.sum(0)
        self._codes, self._products = torch.empty_like(x), torch.empty_like(x)

    def __call__(self, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the squared error, less the sum of squares of x, and the best scales and minimums for the codes of those given."""
        codes = torch.sub(self._x, minimums, out=self._codes).div_(scales).clamp_(0, 15).add_(_ROUNDER).sub_(_ROUNDER)
        sums = codes.sum(0)
        with_x = torch.mul(codes, self._x, out=self._products).sum(0)
        spread = codes.square_().sum(0).mul_(GROUP).sub_(sums.square()).clamp_(min=1)
        scales = ((with_x * GROUP - sums * self._sum) / spread).clamp_(min=LEAST_SCALE)
        minimums = (self._sum - scales * sums) / GROUP
        return -(minimums * self._sum + scales * with_x), scales, minimums


def stack(parts: list[Grouped]) -> Grouped | None:
    """Join weights of equally many columns along their rows, without changing one number of `dense()`.

    Parts of different kinds take on a common form: 8 bits where any part has them; minimums where any has them, each then
    -zero * scale; else a zero of 128, to which codes are shifted. None where such a minimum is no float16, or a shifted code
    needs more than 8 bits.
    """
    if len(parts) == 1:
        return parts[0]
    bits = max(part.bits for part in parts)
    if any(part.minimums is not None for part in parts):
        joined = [_with_minimums(part) for part in parts]
    elif len({part.zero for part in parts}) > 1:
        joined, bits = [_with_zero(part, 128) for part in parts], 8
    else:
        joined = [*parts]
    known = [part for part in joined if part is not None]
    if len(known) < len(parts):
        return None
    minimums = [part.minimums for part in known if part.minimums is not None]
    return Grouped(
        bits,
        torch.cat([part.codes for part in known]),
        torch.cat([part.scales for part in known]),
        torch.cat(minimums) if minimums else None,
        known[0].zero,
    )


def _with_minimums(part: Grouped) -> Grouped | None:
    if part.minimums is not None:
        return part
    minimums = part.scales * -part.zero
    return replace(part, minimums=minimums, zero=0) if torch.equal(as_float16(minimums), minimums) else None


def _with_zero(part: Grouped, zero: int) -> Grouped | None:
    shift = zero - part.zero
    if int(part.codes.min()) + shift < 0 or int(part.codes.max()) + shift > 255:
        return None
    return replace(part, codes=part.codes + shift, zero=zero)
