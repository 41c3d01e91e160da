"""GGML's blocks of packed numbers, as floats or as groups of small integers. Formats: ggml-common.h and ggml-quants.c of ggml."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo import quantization
from octavo.quantization import LEAST_SCALE, Grouped, as_float16, float16_above

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

RANGE_LENGTH = 1 << 15
"""Numbers dequantized at a time: the most that torch works on without waking its other threads, which for so little costs more than
it saves, and on a busy machine a hundred times more."""


def dequantize(packed: np.ndarray, kind: str) -> Tensor:
    """Rows of GGML blocks, [rows, bytes], to numbers, [rows, columns]: of their own dtype if plain, else float32.

    Q4_0, Q4_1 and Q8_0 are written out here, where they take less than half the time that gguf's take, with the same result to the
    last bit; every other type is gguf's.
    """
    if kind in PLAIN_DTYPES:
        return torch.from_numpy(packed).view(PLAIN_DTYPES[kind])
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize

        return torch.from_numpy(gguf_dequantize(packed, GGMLQuantizationType[kind]))
    scale_bytes = 4 if kind == "Q4_1" else 2
    blocks = torch.from_numpy(packed).view(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])
    scales = blocks[:, :scale_bytes].contiguous().view(torch.float16).float()
    codes = blocks[:, scale_bytes:]
    if kind == "Q8_0":
        return (codes.view(torch.int8) * scales).view(len(packed), -1)
    values = torch.stack([codes & 15, codes >> 4], dim=1).view(-1, 32).float()
    if kind == "Q4_0":
        return values.sub_(8).mul_(scales).view(len(packed), -1)
    return values.mul_(scales[:, :1]).add_(scales[:, 1:]).view(len(packed), -1)


UNPACKED_LENGTH = 1 << 16
"""Numbers unpacked at a time: eight of them are one element to torch, which so stays on one thread."""

_NIBBLES = 0x0F0F0F0F0F0F0F0F
_PAIRS = 0x0303030303030303
_BITS = 0x0101010101010101
_FIFTH_BITS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view(np.int64)[:, 0]
"""For a byte of eight codes' fifth bits, these codes."""


def empty_groups(rows: int, columns: int, kind: str) -> Grouped:
    """What `unpack` fills for a kind that is not plain."""
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        return Grouped.empty(rows, columns, 4, zero=8 if kind == "Q4_0" else 0, minimums=kind != "Q4_0")
    if kind in ("Q5_0", "Q5_1", "Q5_K"):
        return Grouped.empty(rows, columns, 8, zero=16 if kind == "Q5_0" else 0, minimums=kind != "Q5_0")
    return Grouped.empty(rows, columns, 8, zero=128)


def unpack(packed: np.ndarray, kind: str, out: Grouped) -> None:
    """Rows of GGML blocks, [rows, bytes], to groups of integers.

    Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are exact. The five bits of Q5 are codes of 8.

    Q4_K and Q5_K keep their codes. A scale is d * sc and a minimum -dmin * m there, with d and dmin float16 and sc and m of 6
    bits; these products are rounded to float16, by 2^-11 of them at most. That holds for subnormal ones too: where d is normal,
    so is the product, and where d is subnormal, the product is a multiple of the same 2^-24.

    Q6_K, with groups of 16, is rounded anew to one scale for two of them: see `_unpack_q6_k`. All else is rounded anew too, from
    its numbers as gguf gives them, as `quantization.quantize` does: by half of 1/127 of a group's largest at most.
    """
    if kind in _UNPACK:
        _UNPACK[kind](torch.from_numpy(packed).view(torch.int16), out)
    else:
        quantization.quantize_into(dequantize(packed, kind), out)


def _unpack_q4(packed: Tensor, out: Grouped) -> None:
    """A block of 32: a scale, in Q4_1 a minimum, then 16 bytes with codes i and i + 16."""
    blocks = packed.view(-1, 9 if out.minimums is None else 10)
    codes = _unpack_scales(blocks, out)
    _unpack_nibbles(_words(blocks[:, -8:]), codes.view(-1, 2, 2))


def _unpack_q5(packed: Tensor, out: Grouped) -> None:
    """A block of 32: a scale, in Q5_1 a minimum, 4 bytes with the fifth bits, then as Q4."""
    blocks = packed.view(-1, 11 if out.minimums is None else 12)
    codes = _unpack_scales(blocks, out)
    _unpack_nibbles(_words(blocks[:, -8:]), codes.view(-1, 2, 2))
    codes |= torch.from_numpy(_FIFTH_BITS[blocks[:, -10:-8].contiguous().view(torch.uint8).numpy()])


def _unpack_q8_0(packed: Tensor, out: Grouped) -> None:
    """A block of 32: a scale, then signed bytes."""
    blocks = packed.view(-1, 17)
    codes = _unpack_scales(blocks, out)
    torch.bitwise_xor(_words(blocks[:, 1:]), -0x7F7F7F7F7F7F7F80, out=codes)


def _unpack_scales(blocks: Tensor, out: Grouped) -> Tensor:
    """The first one or two int16 of every block are its scale and minimum; returns where its codes go, int64 [n, 4]."""
    halves = blocks.view(torch.float16).numpy()
    out.scales.view(-1).numpy()[:] = halves[:, 0]
    if out.minimums is not None:
        out.minimums.view(-1).numpy()[:] = halves[:, 1]
    return out.codes.view(torch.int64).view(-1, 4)


def _unpack_nibbles(words: Tensor, out: Tensor) -> None:
    """[..., n] words of two codes a byte -> [..., 2, n], low halves first."""
    low, high, target = words.numpy() & _NIBBLES, words.numpy() >> 4 & _NIBBLES, out.numpy()
    for column in range(words.shape[-1]):  # long and thin, which numpy writes in half the time of short and wide
        target[..., 0, column], target[..., 1, column] = low[..., column], high[..., column]


def _words(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int64)


def _unpack_q4_k(packed: Tensor, out: Grouped) -> None:
    """A block of 256: d, dmin, 12 bytes of sc and m for 8 groups, then 32 bytes for every two groups."""
    blocks = packed.view(-1, 72)
    _unpack_k_scales(blocks, out)
    _unpack_nibbles(_words(blocks[:, 8:]).view(-1, 4, 4), out.codes.view(torch.int64).view(-1, 4, 2, 4))


def _unpack_q5_k(packed: Tensor, out: Grouped) -> None:
    """As Q4_K, with 32 bytes between, of which bit g is the fifth bit of group g."""
    blocks = packed.view(-1, 88)
    _unpack_k_scales(blocks, out)
    codes = out.codes.view(torch.int64).view(-1, 8, 4)
    _unpack_nibbles(_words(blocks[:, 24:]).view(-1, 4, 4), codes.view(-1, 4, 2, 4))
    fifth = _words(blocks[:, 8:24])
    for group in range(8):
        codes[:, group] |= (fifth >> group).bitwise_and_(_BITS) << 4


def _unpack_k_scales(blocks: Tensor, out: Grouped) -> None:
    super_scales = blocks[:, :2].contiguous().view(torch.float16).float()
    low_scales, low_minimums, mixed = blocks[:, 2:8].contiguous().view(torch.uint8).view(-1, 3, 4).unbind(1)
    scales = torch.cat([low_scales & 63, mixed & 15 | low_scales >> 2 & 48], 1)
    minimums = torch.cat([low_minimums & 63, mixed >> 4 | low_minimums >> 2 & 48], 1)
    assert out.minimums is not None
    out.scales.copy_(as_float16(super_scales[:, :1] * scales).view_as(out.scales))
    out.minimums.copy_(as_float16(super_scales[:, 1:] * -minimums.float()).view_as(out.minimums))


def _unpack_q6_k(packed: Tensor, out: Grouped) -> None:
    """A block of 256: the low 4 bits of its codes, then the high 2, then 16 signed scales of 16 codes each, and d.

    Of two groups that come under one scale, the one of the larger keeps its codes, four times as large and with a quarter of its
    scale; the other is rounded to the same steps. This takes the root mean square of what Q6_K itself rounded off up by 2.5%, on
    weights normally distributed or with long tails; 127 steps to the largest number would take it up by 5%. Where a scale is
    subnormal as a float16 it is rounded up, and all codes are rounded to that.
    """
    for start in range(0, len(blocks := packed.view(-1, 105)), RANGE_LENGTH // 256):
        part = blocks[start : start + RANGE_LENGTH // 256]
        codes = torch.empty(len(part), 2, 4, 4, dtype=torch.int64)
        _unpack_nibbles(_words(part[:, :64]).view(-1, 2, 8), codes.view(-1, 2, 2, 8))
        high = _words(part[:, 64:96]).view(-1, 2, 4)
        for quarter in range(4):
            codes[:, :, quarter] |= (high >> 2 * quarter).bitwise_and_(_PAIRS) << 4
        values = codes.view(torch.uint8).view(-1, 8, 2, 16).float().sub_(32)
        scales = part[:, 104:].view(torch.float16).float() * part[:, 96:104].contiguous().view(torch.int8)
        pairs = scales.view(-1, 8, 2)
        first, second = pairs.unbind(2)
        larger = torch.where(first.abs() >= second.abs(), first, second) / 4
        common = float16_above(larger.abs().clamp_(min=LEAST_SCALE)).copysign_(larger)
        values.mul_((pairs / common[..., None])[..., None]).add_(128.5).clamp_(0, 255)  # and what remains of .5 is cut off
        out.scales.view(-1, 8)[start : start + len(part)] = common
        out.codes.view(-1, 8, 2, 16)[start : start + len(part)] = values


_UNPACK = {
    "Q4_0": _unpack_q4,
    "Q4_1": _unpack_q4,
    "Q5_0": _unpack_q5,
    "Q5_1": _unpack_q5,
    "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
}
