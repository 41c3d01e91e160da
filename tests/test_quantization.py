from __future__ import annotations

import pytest
import torch

from octavo.quantization import GROUP, Grouped, quantize, stack


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected.float()).norm() / expected.float().norm())


def checked(grouped: Grouped | None) -> Grouped:
    """What every Grouped must be."""
    assert grouped is not None
    rows, columns = grouped.shape
    assert grouped.codes.dtype == torch.uint8
    assert int(grouped.codes.max()) < 2**grouped.bits
    for part in (grouped.scales, grouped.minimums):
        if part is not None:
            assert part.shape == (rows, -(-columns // GROUP))
            assert part.dtype == torch.float32
            assert torch.equal(part.half().float(), part)
    return grouped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [32, 576, 100, 7])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_quantization_rounds_off(bits: int, columns: int, dtype: torch.dtype) -> None:
    weight = normal(1200, columns).to(dtype)
    grouped = checked(quantize(weight, bits))
    assert grouped.bits == bits
    assert grouped.shape == weight.shape
    assert relative(grouped.dense(), weight) < {4: 0.074, 8: 0.006}[bits]


def test_8_bits_are_within_half_a_step() -> None:
    weight = normal(500, 320) * 10.0 ** torch.linspace(-6, 6, 500)[:, None]
    grouped = checked(quantize(weight, 8))
    assert ((grouped.dense() - weight).view(500, -1, 32).abs() <= grouped.scales[..., None] * 0.501).all()
    assert int(grouped.codes.min()) >= 1


def test_4_bits_are_better_than_the_plain_range() -> None:
    weight = torch.distributions.StudentT(4.0).sample((1000, 256))
    groups = weight.view(1000, -1, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low).view_as(weight)
    found, before = relative(checked(quantize(weight, 4)).dense(), weight), relative(plain, weight)
    print(f"relative error {found:.4f}, of the plain range {before:.4f}")
    assert found < 0.95 * before


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_whatever_the_rows_beside(bits: int) -> None:
    weight = normal(300, 576)
    whole, alone = quantize(weight, bits), quantize(weight[211:212], bits)
    assert whole is not None
    assert alone is not None
    assert torch.equal(whole.dense()[211], alone.dense()[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1e-9, -3e-6, 0.37, -1000.0])
def test_groups_of_one_value(bits: int, value: float) -> None:
    weight = torch.full((3, 64), value)
    found = checked(quantize(weight, bits)).dense()
    assert (found - weight).abs().max() <= max(abs(value) / 127 * 0.51, 2.0**-25)
    if value == 0:
        assert not found.any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_float16_cannot_scale_is_not_quantized(bits: int, value: float) -> None:
    weight = normal(40, 64)
    weight[7, 5] = value
    assert quantize(weight, bits) is None


def kinds(columns: int = 96) -> dict[str, Grouped]:
    """One of each kind a file or `quantize` gives."""
    random = torch.Generator().manual_seed(0)

    def make(bits: int, limit: int, zero: int = 0, minimums: bool = False) -> Grouped:
        out = Grouped.empty(20, columns, bits, zero=zero, minimums=minimums)
        out.codes.random_(0, limit, generator=random)
        for part in (out.scales, out.minimums):
            if part is not None:
                part.normal_(generator=random).copy_(part.half())
        return out

    return {
        "Q4_0": make(4, 16, zero=8),
        "Q4_1": make(4, 16, minimums=True),
        "Q5_0": make(8, 32, zero=16),
        "Q5_1": make(8, 32, minimums=True),
        "Q8_0": make(8, 256, zero=128),
    }


@pytest.mark.parametrize("first", kinds())
@pytest.mark.parametrize("second", kinds())
def test_joining_changes_no_number(first: str, second: str) -> None:
    for columns in (96, 70):
        parts = [kinds(columns)[name] for name in (first, second, first)]
        joined = checked(stack(parts))
        assert torch.equal(joined.dense(), torch.cat([part.dense() for part in parts]))
        if first == second:
            assert (joined.bits, joined.zero) == (parts[0].bits, parts[0].zero)


def test_one_part_is_itself() -> None:
    part = kinds()["Q4_1"]
    assert stack([part]) is part


def test_parts_without_a_common_form_stay_apart() -> None:
    large = Grouped.empty(1, 32, 8, zero=128)
    large.codes.fill_(200)
    large.scales.fill_(600)
    with_minimums = Grouped.empty(1, 32, 4, minimums=True)
    assert stack([large, with_minimums]) is None
    far = Grouped.empty(1, 32, 8, zero=3)
    far.codes.fill_(200)
    assert stack([large, far]) is None
