"""What the native products owe: the right result, and the same bits for a row whatever is computed beside it, on however many threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.quantization import GROUP, Grouped
from tests.ops.comparing import quickly, same_bits

native = pytest.importorskip("octavo._native", reason="the native kernels are not built", exc_type=ImportError)

Weight = Tensor | Grouped

KINDS = ["float32", "bfloat16", "bytes", "bytes with minimums", "nibbles", "nibbles with minimums"]
GROUPED = KINDS[2:]
ROWS = [*range(1, 71), 300]
GUARD = 77.0


@pytest.fixture(scope="session", params=["avx512_bf16", "avx512", "avx2", "portable"])
def products(request: pytest.FixtureRequest) -> Any:
    if request.param not in native.instruction_sets():
        pytest.skip(f"this processor lacks {request.param}")
    from octavo.ops.cpu import CpuOps

    return CpuOps(torch.device("cpu"), request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    random = torch.Generator().manual_seed(seed)
    if kind in ("float32", "bfloat16"):
        return torch.randn(outputs, inputs, generator=random).to(getattr(torch, kind))
    bits = 4 if kind.startswith("nibbles") else 8
    groups = -(-inputs // GROUP)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    scales = (torch.randn(outputs, groups, generator=random) / 2**bits).half().float()
    if "minimums" not in kind:
        return Grouped(bits, codes, scales, zero=2 ** (bits - 1))
    return Grouped(bits, codes, scales, torch.randn(outputs, groups, generator=random).half().float())


def activations(rows: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_groups(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def dense(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    elements = (in_groups(weight.codes.double()) - weight.zero) * weight.scales.double()[..., None]
    if weight.minimums is not None:
        elements += weight.minimums.double()[..., None]
    return elements.flatten(1)[:, : weight.shape[1]]


def as_the_product_reads(x: Tensor, weight: Weight) -> Tensor:
    """x in float64, rounded as a product with this weight rounds it."""
    if isinstance(weight, Tensor):
        return x.to(weight.dtype).double()
    wide = in_groups(x.float())
    scale = wide.abs().amax(-1, keepdim=True) / 127
    codes = (wide * torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale.reciprocal())).round()
    return (codes.double() * scale.double()).flatten(1)[:, : x.shape[1]]


def check(found: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    left, right = as_the_product_reads(x, weight), dense(weight)
    wanted, magnitude = left @ right.t(), left.abs() @ right.abs().t()
    if bias is not None:
        wanted, magnitude = wanted + bias.double(), magnitude + bias.abs().double()
    if isinstance(weight, Grouped):  # codes and minimums may cancel
        magnitude = (
            magnitude + left.abs() @ (in_groups(weight.codes.double()) * weight.scales.abs()[..., None]).flatten(1)[:, : x.shape[1]].t()
        )
    error = (found.double() - wanted).abs()
    allowed = 4e-6 * magnitude + (2.0**-8 * wanted.abs() if found.dtype == torch.bfloat16 else 0.0) + 1e-37
    assert bool((error <= allowed).all()), float((error / allowed).max())


@quickly
@given(
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 300),
    rows=st.integers(1, 40),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_the_product_of_what_is_stored(
    products: Any, kind: str, outputs: int, inputs: int, rows: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, seed: int
) -> None:
    weight, x = weight_of(kind, outputs, inputs, seed), activations(rows, inputs, dtypes[0], seed)
    bias = activations(1, outputs, seed=seed + 1)[0] if biased else None
    check(products.linear(x, products.matrix(weight), bias, dtypes[1]), x, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 576), (72, 1536), (33, 2048)])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_long_rows(products: Any, kind: str, shape: tuple[int, int], rows: int) -> None:
    weight, x = weight_of(kind, *shape), activations(rows, shape[1])
    check(products.linear(x, products.matrix(weight)), x, weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_at_every_row_count_and_on_any_threads(products: Any, threads: None, kind: str, dtype: torch.dtype) -> None:
    outputs, inputs = 88, 167
    matrix, x = products.matrix(weight_of(kind, outputs, inputs)), activations(max(ROWS), inputs, dtype)
    bias = activations(1, outputs)[0]
    alone = torch.cat([products.linear(x[row : row + 1], matrix, bias, dtype) for row in range(max(ROWS))])
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in ROWS:
            start = (max(ROWS) - rows) // 2
            assert same_bits(products.linear(x[start : start + rows], matrix, bias, dtype), alone[start : start + rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_wherever_its_outputs_are_computed(products: Any, kind: str) -> None:
    """An output of a weight of one panel is that of a weight of many."""
    weight, x = weight_of(kind, 80, 96), activations(7, 96)
    whole = products.linear(x, products.matrix(weight))
    for first in range(0, 80, 16):
        rows = slice(first, first + 16)
        if isinstance(weight, Tensor):
            part: Weight = weight[rows]
        else:
            minimums = None if weight.minimums is None else weight.minimums[rows]
            part = Grouped(weight.bits, weight.codes[rows], weight.scales[rows], minimums, weight.zero)
        assert same_bits(products.linear(x, products.matrix(part)), whole[:, rows])


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_nibbles_and_bytes_of_the_same_codes_give_the_same_bits(products: Any, minimums: bool, rows: int) -> None:
    weight, x = weight_of("nibbles with minimums" if minimums else "nibbles", 50, 150), activations(rows, 150)
    wide = Grouped(8, weight.codes, weight.scales, weight.minimums, weight.zero)
    found = [products.linear(x, products.matrix(each)) for each in (weight, wide)]
    assert same_bits(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 5), (3, 40), (30, 17), (65, 48)])
def test_rows_may_lie_apart_and_nothing_is_written_beside_the_result(
    products: Any, kind: str, dtype: torch.dtype, rows: int, outputs: int
) -> None:
    inputs = 70
    matrix = products.matrix(weight_of(kind, outputs, inputs))
    wide = activations(rows, inputs + 9, dtype)
    wide[:, inputs:] = torch.nan
    x, wanted = wide[:, :inputs], products.linear(wide[:, :inputs].contiguous(), matrix)
    assert same_bits(products.linear(x, matrix), wanted)
    memory = torch.full((14 + rows * outputs,), GUARD, dtype=dtype)
    is_bfloat16 = dtype == torch.bfloat16
    out = memory[7:-7]
    products._native.linear(matrix, x.data_ptr(), x.stride(0), is_bfloat16, rows, 0, out.data_ptr(), is_bfloat16)
    assert same_bits(out.view(rows, outputs), wanted)
    out.fill_(GUARD)
    assert bool((memory == GUARD).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_what_is_not_finite_stays_in_its_row(products: Any, kind: str, bad: float, rows: int) -> None:
    matrix, x = products.matrix(weight_of(kind, 40, 100)), activations(rows, 100)
    clean = products.linear(x, matrix)
    x[rows // 2, 99] = bad
    found = products.linear(x, matrix)
    others = torch.arange(rows) != rows // 2
    assert same_bits(found[others], clean[others])
    spoilt = found[rows // 2]
    assert not bool(torch.isfinite(spoilt).any())
    assert kind not in GROUPED or bool(spoilt.isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-38, 1e-30, 1e30, 1e35])
def test_magnitudes(products: Any, kind: str, magnitude: float) -> None:
    weight, x = weight_of(kind, 20, 64), activations(5, 64) * magnitude
    found = products.linear(x, products.matrix(weight))
    assert bool(torch.isfinite(found).all())
    if magnitude >= 1e-30 or magnitude == 0:
        check(found, x, weight)
    else:
        assert bool((found.abs() < 1e-34).all())


@pytest.mark.parametrize("kind", GROUPED)
def test_the_largest_codes_do_not_overflow(products: Any, kind: str) -> None:
    weight = weight_of(kind, 20, 64)
    weight.codes.fill_(2**weight.bits - 1)
    x = torch.ones(3, 64)
    x[1] = -1
    check(products.linear(x, products.matrix(weight)), x, weight)


def test_every_float16_is_widened(products: Any) -> None:
    """Subnormal ones too; a code of 1 makes the element the scale itself."""
    halves = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[torch.isfinite(halves)]
    weight = Grouped(8, torch.ones(len(halves), 32, dtype=torch.uint8), halves.float()[:, None])
    matrix = products.matrix(weight)
    x = torch.zeros(1, 32)
    x[0, 3] = 127
    assert torch.equal(products.linear(x, matrix)[0], halves.float() * 127)
    assert torch.equal(products.embedding(torch.arange(len(halves)), matrix, torch.float32)[:, 0], halves.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 64), (19, 45)])
def test_embedding_is_the_row_itself(products: Any, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = weight_of(kind, *shape)
    ids = torch.tensor([0, shape[0] - 1, 3, 3, 17])
    found = products.embedding(ids, products.matrix(weight), dtype)
    assert same_bits(found, dense(weight).float().to(dtype)[ids])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "inner", "tokens"), [(64, 80, 40), (45, 19, 1), (40, 150, 900)])
def test_an_expert_is_its_products(products: Any, threads: None, kind: str, dtype: torch.dtype, size: int, inner: int, tokens: int) -> None:
    gate_up = [products.matrix(weight_of(kind, 2 * inner, size, seed)) for seed in range(5)]
    down = [products.matrix(weight_of(kind, size, inner, 5 + seed)) for seed in range(5)]
    wide = activations(tokens, size + 7, dtype)
    x, choices = wide[:, :size], torch.arange(tokens)[:, None] * 3 % 5
    choices[choices == 2] = 0  # one is chosen by nobody
    wanted = torch.empty(tokens, size, dtype=dtype)
    for expert in choices.unique().tolist():
        rows = choices[:, 0] == expert
        wanted[rows] = products.linear(products.activate_and_mul(products.linear(x[rows], gate_up[expert]), "silu"), down[expert])
    for count in (1, 2):
        torch.set_num_threads(count)
        assert same_bits(products.experts(x, choices, torch.ones(tokens, 1), gate_up, down, "silu"), wanted)


def test_experts_of_different_kinds(products: Any) -> None:
    weights = [weight_of(kind, 80, 64, seed) for seed, kind in enumerate(KINDS)]
    gate_up, down = [products.matrix(each) for each in weights], [products.matrix(weight_of(kind, 64, 40)) for kind in KINDS[::-1]]
    x, choices = activations(12, 64), torch.arange(12)[:, None] % 6
    found = products.experts(x, choices, torch.ones(12, 1), gate_up, down, "silu")
    for row in range(12):
        inner = products.activate_and_mul(products.linear(x[row : row + 1], gate_up[row % 6]), "silu")
        assert same_bits(products.linear(inner, down[row % 6])[0], found[row])


def test_experts_that_are_not_there_or_shaped_otherwise(products: Any) -> None:
    def call(gate_up: list[tuple[int, int]], down: list[tuple[int, int]], choice: int = 0) -> None:
        matrices = [[products.matrix(torch.randn(shape)) for shape in part] for part in (gate_up, down)]
        products.experts(torch.randn(1, 8), torch.tensor([[choice]]), torch.ones(1, 1), *matrices, "silu")

    for choice in (-1, 2):
        with pytest.raises(IndexError, match=f"expert {choice} of 2"):
            call([(20, 8)] * 2, [(8, 10)] * 2, choice)
    with pytest.raises(ValueError, match="expert 1 are shaped otherwise"):
        call([(20, 8), (22, 8)], [(8, 10)] * 2)
    with pytest.raises(ValueError, match="as many"):
        call([(20, 8)] * 2, [(8, 10)])
    with pytest.raises(ValueError, match="3 of 2 experts"):
        products.route(torch.randn(1, 2), 3, True)


def test_embedding_of_nobody(products: Any) -> None:
    matrix = products.matrix(torch.randn(10, 8))
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="of an embedding of 10"):
            products.embedding(torch.tensor([1, wrong]), matrix, torch.float32)


def test_no_rows(products: Any) -> None:
    matrix = products.matrix(weight_of("nibbles", 10, 40))
    assert products.linear(torch.empty(0, 40), matrix).shape == (0, 10)
    assert products.embedding(torch.empty(0, dtype=torch.int64), matrix, torch.float32).shape == (0, 40)


def test_other_numbers_of_bits_are_refused(products: Any) -> None:
    with pytest.raises(ValueError, match="4 or 8 bits, not 3"):
        products.matrix(Grouped(3, torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)))
