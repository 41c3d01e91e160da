"""Blocks as groups of integers: the same numbers as gguf's, or as near as `unpack` says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from octavo.loading.gguf_blocks import empty_groups, unpack
from octavo.loading.gguf_header import TENSOR_TYPES
from octavo.quantization import Grouped

ROWS, COLUMNS = 40, 1024
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
HALVES |= {"Q4_1": (0, 2), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "TQ1_0": (52,)}
"""Where in a block its float16 numbers lie."""


def blocks(kind: str, low: float = 1e-4, high: float = 1e-2) -> np.ndarray:
    """[ROWS, bytes]: any bits, with scales from `low` to `high` of either sign."""
    length, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    random = np.random.default_rng(7)
    packed = random.integers(0, 256, (ROWS * COLUMNS // length, size), np.uint8)
    for at in HALVES[kind]:
        scales = np.exp(random.uniform(np.log(low), np.log(high), len(packed))) * random.choice([-1, 1], len(packed))
        packed[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return packed.reshape(ROWS, -1)


def unpacked(packed: np.ndarray, kind: str) -> Grouped:
    out = empty_groups(ROWS, COLUMNS, kind)
    for start in range(0, ROWS, 16):
        stop = min(start + 16, ROWS)
        unpack(packed[start:stop].copy(), kind, out.rows(start, stop))
    return out


def dequantized(packed: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(packed, Kind[kind]))


def per_group(values: torch.Tensor, length: int = 32) -> torch.Tensor:
    return values.view(-1, length)


@pytest.mark.parametrize("kind", EXACT)
def test_plain_types_are_exact(kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    for packed in (gguf.quants.quantize(numbers, Kind[kind]), blocks(kind), blocks(kind, 6e-8, 1e-5)):
        grouped = unpacked(packed, kind)
        assert torch.equal(grouped.dense(), dequantized(packed, kind))
        assert grouped.bits == (4 if kind.startswith("Q4") else 8)
        assert int(grouped.codes.max()) < {"4": 16, "5": 32, "8": 256}[kind[1]]


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize("low", [6e-8, 1e-6, 1e-4])
def test_k_types_keep_codes_and_round_scales_to_float16(kind: str, low: float) -> None:
    """Scales and minimums are off by 2^-11 of themselves at most, down to the least d there is."""
    packed = blocks(kind, low, 10 * low)
    grouped, expected = unpacked(packed, kind), dequantized(packed, kind)
    assert grouped.minimums is not None
    codes = grouped.codes.float().view(ROWS, -1, 32)
    bound = 2.0**-11 * (codes * grouped.scales[..., None].abs() + grouped.minimums[..., None].abs()) * 1.001
    assert ((grouped.dense() - expected).view_as(bound).abs() <= bound).all()
    relative = (grouped.dense() - expected).norm() / expected.norm()
    print(f"{kind}, d from {low}: relative error {relative:.1e}")
    assert relative < 3e-4
    assert int(grouped.codes.max()) < (16 if kind == "Q4_K" else 32)


@pytest.mark.parametrize("low", [2e-7, 1e-5, 1e-3])
def test_q6_k_is_rounded_to_a_quarter_of_the_larger_step(low: float) -> None:
    packed = blocks("Q6_K", low, 10 * low)
    grouped, expected = unpacked(packed, "Q6_K"), dequantized(packed, "Q6_K")
    raw = packed.reshape(-1, 210)
    d = torch.from_numpy(raw[:, 208:].copy()).view(torch.float16).float()
    steps = (d * torch.from_numpy(raw[:, 192:208].copy()).view(torch.int8)).abs().view(-1, 2).amax(1)
    error = per_group((grouped.dense() - expected).abs()).amax(1)
    # Half a quarter; a whole one where a code would be 128; and what the float16 of a small scale is too large by.
    assert (error <= 0.251 * steps + 2.0**-24).all()
    assert (error <= 0.126 * steps + 2.0**-24).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ2_S", "IQ3_XXS", "TQ1_0"])
def test_other_types_are_rounded_to_8_bits(kind: str) -> None:
    packed = blocks(kind)
    grouped, expected = unpacked(packed, kind), dequantized(packed, kind)
    largest = per_group(expected.abs()).amax(1)
    assert (per_group((grouped.dense() - expected).abs()).amax(1) <= largest / 127 * 0.501 + 2.0**-24).all()


@pytest.mark.parametrize("kind", [info.name for info in TENSOR_TYPES.values() if info.block_length > 1])
def test_any_bits_at_all_do_no_harm(kind: str) -> None:
    length, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    packed = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS // length * size), np.uint8)
    with np.errstate(all="ignore"):
        grouped, expected = unpacked(packed, kind), dequantized(packed, kind)
    if expected.isfinite().all() and grouped.finite():
        assert grouped.dense().isfinite().all()
    elif not expected.isfinite().all():
        assert not grouped.finite()


def test_a_product_beyond_float16_is_not_finite() -> None:
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        assert not unpacked(blocks(kind, 3e4, 6e4), kind).finite()
