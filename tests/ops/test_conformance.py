"""What every backend owes: the right result, and the same bits for a token whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops.interface import Activation, Ops
from octavo.ops.reference import ReferenceOps
from tests.ops.comparing import quickly, same_bits
from tests.ops.sequences import HOLE, HUGE, Memory, Sequence, Shape, blocks_for

DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZES = [1, 4, 16, 64, 128]
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 300, 511, 512, 513, 600]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.sampled_from([32, 64, 80, 96, 128, 20, 256]))
    return Shape(
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3, 4, 8])),
        num_kv_heads=num_kv_heads,
        dim=dim,
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([dtype, dtype, torch.int8])),
        window=draw(st.sampled_from([None, None, 1, 5, 64, 100, 513])),
        half=draw(st.sampled_from([dim // 2, dim // 4, 0])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
    )


rows_of_a_batch = st.lists(st.tuples(st.sampled_from(EDGES), st.sampled_from([1, 1, 1, 2, 7, 33, 70])), min_size=1, max_size=4)


WEIGHT_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.int8: 0.06}
"""What the weights of values may lose, by the dtype of KV memory, which products work in: a bfloat16 half its last place; int8 also
what rounding query and weights to bytes costs, a bound that only the worst of some thousand elements comes near."""


def assert_near(found: Tensor, expected: tuple[Tensor, Tensor], shape: Shape) -> None:
    """float32 sums lose a few units in the last place; a bfloat16 result is rounded once more."""
    wanted, size = expected
    last_place = 2.0**-8 if found.dtype == torch.bfloat16 else 1e-5
    allowed = last_place * wanted.abs() + WEIGHT_ERRORS[shape.kv_dtype] * size + 1e-6
    if shape.dtype == torch.float32 and shape.kv_dtype == torch.bfloat16:
        allowed += 0.02 * size  # queries are rounded to bfloat16 too
    error = (found.double() - wanted).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times what is allowed"
    if shape.kv_dtype == torch.int8:
        assert error.norm() <= 0.02 * size.norm()


@quickly
@given(shape=shapes(), rows=rows_of_a_batch, seed=st.integers(0, 99))
def test_attention_is_that_of_a_dense_context(ops: Ops, shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    check_attention(ops, shape, rows, seed)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.int8)]
)
def test_attention_with_memory_of_another_dtype(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int) -> None:
    shape = Shape(dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, dim=80)
    check_attention(ops, shape, [(100, 1), (0, 40), (511, 2)], 3)


def check_attention(ops: Ops, shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
    lengths = [start + count for start, count in rows]
    memory = Memory(ops, shape, blocks_for(shape, lengths), seed)
    batch = []
    for number, (start, count) in enumerate(rows):
        sequence = Sequence(shape, start + count, 1000 * seed + number)
        memory.fill(number, sequence, range(start))
        batch.append((number, sequence, range(start, start + count)))
    for found, (_, sequence, positions) in zip(memory.attend(batch), batch, strict=True):
        assert_near(found, sequence.expected(shape, positions), shape)
    assert (memory.other_layers() == HUGE).all()


def test_attention_of_large_magnitudes_does_not_overflow(ops: Ops) -> None:
    shape = Shape()
    sequence = Sequence(shape, 150, 1, magnitude=300.0)
    found = Memory(ops, shape, 20).attend([(0, sequence, range(150))])[0]
    assert_near(found, sequence.expected(shape, range(150)), shape)


def test_a_row_that_sees_a_hole_is_refused(ops: Ops) -> None:
    if type(ops) is ReferenceOps:
        pytest.skip("the reference reads block 0 there")
    shape = Shape()
    sequence = Sequence(shape, 60, 1)
    memory = Memory(ops, shape, 20)
    memory.fill(0, sequence, range(59))
    memory.tables[0][1] = HOLE
    with pytest.raises(IndexError, match="row 0 sees positions that its block table does not hold"):
        memory.attend([(0, sequence, range(59, 60))])


PROMISES = [
    Shape(),
    Shape(num_heads=9, num_kv_heads=3, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    Shape(num_heads=8, num_kv_heads=1, dim=80, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, window=100),
    Shape(num_heads=2, num_kv_heads=2, dim=20, window=37),
    Shape(num_heads=4, num_kv_heads=1, dim=128, block_size=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    Shape(num_heads=9, num_kv_heads=3, kv_dtype=torch.int8),
    Shape(num_heads=4, num_kv_heads=2, dim=256, window=90, softcap=2.0),
    Shape(num_heads=8, num_kv_heads=2, dim=96, dtype=torch.bfloat16, kv_dtype=torch.int8, window=70),
]
LENGTH, TAIL = 545, 480


def whole(ops: Ops, shape: Shape, sequence: Sequence) -> Tensor:
    return Memory(ops, shape, blocks_for(shape, [LENGTH])).attend([(0, sequence, range(LENGTH))])[0]


@pytest.mark.parametrize("shape", PROMISES, ids=range(len(PROMISES)))
@pytest.mark.parametrize("step", [1, 2, 7, 16])
def test_attention_has_the_same_bits_however_a_sequence_is_cut(ops: Ops, shape: Shape, step: int) -> None:
    sequence = Sequence(shape, LENGTH, 5)
    wanted = whole(ops, shape, sequence)
    memory = Memory(ops, shape, blocks_for(shape, [LENGTH]), 1)
    memory.fill(0, sequence, range(TAIL))
    for start, end in pairwise([*range(TAIL, LENGTH, step), LENGTH]):
        assert same_bits(memory.attend([(0, sequence, range(start, end))])[0], wanted[start:end]), start


@pytest.mark.parametrize("shape", PROMISES, ids=range(len(PROMISES)))
def test_attention_has_the_same_bits_alone_and_in_a_batch(ops: Ops, shape: Shape) -> None:
    cuts = [range(500, 501), range(470, LENGTH), range(513, 514), range(3), range(511, 513), range(60, 61)]
    sequences = [Sequence(shape, LENGTH, number) for number in range(len(cuts))]
    together = Memory(ops, shape, blocks_for(shape, [LENGTH] * len(cuts)), 2)
    for number, (sequence, positions) in enumerate(zip(sequences, cuts, strict=True)):
        together.fill(number, sequence, range(positions.start))
    found = together.attend([(number, sequences[number], positions) for number, positions in enumerate(cuts)])
    for number, (sequence, positions) in enumerate(zip(sequences, cuts, strict=True)):
        alone = Memory(ops, shape, blocks_for(shape, [LENGTH]), 3)
        alone.fill(0, sequence, range(positions.start))
        assert same_bits(alone.attend([(0, sequence, positions)])[0], found[number]), number


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_attention_has_the_same_bits_at_every_block_size(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    shapes = [Shape(block_size=size, kv_dtype=dtype, window=window) for size in (*BLOCK_SIZES, 256)]
    sequence = Sequence(shapes[0], LENGTH, 7)
    results = [whole(ops, shape, sequence) for shape in shapes]
    assert all(same_bits(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("count", [1, 60])
def test_attention_has_the_same_bits_on_any_number_of_threads(ops: Ops, count: int) -> None:
    shape = Shape(dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    sequence = Sequence(shape, 1200, 8)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            memory = Memory(ops, shape, blocks_for(shape, [1200]))
            memory.fill(0, sequence, range(1200 - count))
            results.append(memory.attend([(0, sequence, range(1200 - count, 1200))])[0])
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_one_rows_poison_stays_in_that_row(ops: Ops, poison: float) -> None:
    shape = Shape()
    sequences = [Sequence(shape, 90, number) for number in range(3)]
    rows = [(0, sequences[0], range(90)), (1, sequences[1], range(90)), (2, sequences[2], range(90))]
    clean = Memory(ops, shape, 20).attend(rows)
    sequences[1].qkv[40] = poison
    found = Memory(ops, shape, 20).attend(rows)
    assert same_bits(found[0], clean[0])
    assert same_bits(found[2], clean[2])
    assert found[1][40:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 64, 576])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(ops: Ops, dtype: torch.dtype, size: int, has_residual: bool) -> None:
    x, residual, weight = _random(dtype, (70, size), (70, size), (size,))
    added = residual if has_residual else None
    found, total = ops.rms_norm(x, weight, 1e-5, added)
    summed = x + residual if has_residual else x
    wide = summed.double()
    assert same_bits(total, summed)
    assert_rounded_twice(found, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    for row in (0, 33, 69):
        alone = ops.rms_norm(x[row : row + 1], weight, 1e-5, None if added is None else added[row : row + 1])
        assert same_bits(alone[0][0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_each_head(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = _random(dtype, (9, 12, 80), (80,))
    heads = x[:, 3:7]
    found = ops.rms_norm(heads, weight, 1e-6)[0]
    wide = heads.double()
    assert_rounded_twice(found, wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_weight_in_float32_rounds_once(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = _random(dtype, (70, 200), (200,))
    weight = weight.float() * 1.001
    found = ops.rms_norm(x, weight, 1e-6)[0]
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 576])
def test_what_is_added_may_be_multiplied_first(ops: Ops, dtype: torch.dtype, size: int) -> None:
    x, residual, weight = _random(dtype, (70, size), (70, size), (size,))
    total = ops.add(x, residual, 0.22)
    assert same_bits(total, x * 0.22 + residual)
    assert same_bits(ops.add(x, residual), x + residual)
    assert same_bits(ops.add(x[7:8], residual[7:8], 0.22)[0], total[7])
    normalised, summed = ops.rms_norm(x, weight, 1e-5, residual, 0.22)
    assert same_bits(summed, total)
    assert same_bits(normalised, ops.rms_norm(total, weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_embedding_with_a_scale(ops: Ops, dtype: torch.dtype, scale: float) -> None:
    weight = _random(dtype, (40, 70))[0]
    ids = torch.tensor([3, 39, 0, 3])
    assert same_bits(ops.embedding(ids, ops.matrix(weight), dtype, scale), (weight * scale)[ids])


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_tanh": lambda x: x / (1 + (-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).exp()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 1536])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_and_mul(ops: Ops, dtype: torch.dtype, size: int, activation: Activation) -> None:
    gate_up = _random(dtype, (70, 2 * size))[0] * 5
    found = ops.activate_and_mul(gate_up, activation)
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded_twice(found, ACTIVATIONS[activation](gate) * up)
    assert same_bits(ops.activate_and_mul(gate_up[5:6], activation)[0], found[5])
    gate_up[3, :4] = torch.tensor([1e4, -1e4, torch.nan, 0.0])
    assert ops.activate_and_mul(gate_up, activation)[3, :4].isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("size", [20, 1003])
def test_softcap(ops: Ops, size: int) -> None:
    x = _random(torch.float32, (70, size))[0] * 40
    x[0, :6] = torch.tensor([0.0, 1e-4, -3e-3, torch.inf, -torch.inf, torch.nan])
    found = ops.softcap(x.clone(), 30.0)
    torch.testing.assert_close(found.double(), 30 * (x.double() / 30).tanh(), rtol=5e-7, atol=0, equal_nan=True)
    for row in (0, 33, 69):
        assert same_bits(ops.softcap(x[row : row + 1].clone(), 30.0)[0], found[row])


@quickly
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 3, 15, 16, 17, 33, 1000, 49152]),
    values=st.sampled_from([[0.0], [-1.0, 2.0, 2.0], [-torch.inf, 1.0], [-torch.inf], [torch.inf, 3.0], [torch.nan, 1.0, torch.inf]]),
    seed=st.integers(0, 99),
)
def test_argmax_takes_the_first_of_the_largest_and_shows_nan(ops: Ops, rows: int, size: int, values: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.tensor(values)[torch.randint(0, len(values), (rows, size + 5), generator=generator)]
    logits = wide[:, :size]
    peaks, places = ops.argmax(logits)
    for row, peak, place in zip(logits.tolist(), peaks.tolist(), places.tolist(), strict=True):
        if any(value != value for value in row):
            assert peak != peak
        else:
            assert (peak, place) == (max(row), row.index(max(row)))


@quickly
@given(
    size=st.sampled_from([1, 3, 8, 17, 60, 128]),
    share=st.floats(0, 1),
    over_chosen=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_route_takes_the_largest_and_of_equal_ones_the_first(
    ops: Ops, size: int, share: float, over_chosen: bool, ties: bool, seed: int
) -> None:
    count = max(1, round(size * share))
    logits = 5 * torch.randn(9, size + 3, generator=torch.Generator().manual_seed(seed))[:, :size]
    logits = logits.round() if ties else logits
    choices, weights = ops.route(logits, count, over_chosen)
    wanted = [sorted(range(size), key=lambda place: (-row[place], place))[:count] for row in logits.tolist()]
    assert choices.tolist() == wanted
    chosen = logits.double().gather(1, choices)
    shares = (chosen - (chosen if over_chosen else logits.double()).logsumexp(1, keepdim=True)).exp()
    # A logit's distance to the largest is rounded before its exponential is taken.
    allowed = 5e-7 + 2.0**-24 * (logits.amax(1, keepdim=True) - logits.gather(1, choices))
    assert bool(((weights.double() - shares).abs() <= allowed * shares).all())
    for row in (0, 8):
        alone = ops.route(logits[row : row + 1], count, over_chosen)
        assert torch.equal(alone[0][0], choices[row])
        assert same_bits(alone[1][0], weights[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "inner", "experts", "count"), [(64, 96, 8, 3), (70, 33, 5, 5), (64, 20, 40, 1)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_experts(ops: Ops, dtype: torch.dtype, size: int, inner: int, experts: int, count: int, activation: Activation) -> None:
    x, gate_up, down, logits = _random(dtype, (600, size), (experts, 2 * inner, size), (experts, size, inner), (600, experts))
    gate_up, down = gate_up / size**0.5, down / inner**0.5
    matrices = [[ops.matrix(each) for each in part] for part in (gate_up, down)]
    choices, weights = ops.route(logits.float(), count, False)
    found = ops.experts(x, choices, weights, *matrices, activation)
    wanted = torch.zeros(600, size, dtype=torch.float64)
    for expert in range(experts):
        gate, up = (x.double() @ gate_up[expert].double().t()).chunk(2, -1)
        share = (weights.double() * (choices == expert)).sum(-1, keepdim=True)
        wanted += share * ((ACTIVATIONS[activation](gate) * up) @ down[expert].double().t())
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() <= (0.03 if dtype == torch.bfloat16 else 2e-6) * wanted.abs().max()
    for start, end in [(0, 1), (5, 7), (10, 31), (3, 70), (100, 600), (599, 600)]:
        part = slice(start, end)
        assert same_bits(ops.experts(x[part], choices[part], weights[part], *matrices, activation), found[part]), (start, end)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_token(ops: Ops, bad: float) -> None:
    """Wherever its router sends it."""
    x, router, gate_up, down = _random(torch.float32, (9, 64), (6, 64), (6, 80, 64), (6, 64, 40))
    matrices = [[ops.matrix(each) for each in part] for part in (gate_up, down)]
    router = ops.matrix(router)

    def result(x: Tensor) -> Tensor:
        return ops.experts(x, *ops.route(ops.linear(x, router), 2, True), *matrices, "silu")

    clean = result(x)
    spoilt = x.clone()
    spoilt[4, 7] = bad
    found, others = result(spoilt), torch.arange(9) != 4
    assert same_bits(found[others], clean[others])
    assert not bool(found[4].isfinite().any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_has_the_same_bits_alone_and_in_a_batch(ops: Ops, dtype: torch.dtype) -> None:
    x, weight, bias = _random(dtype, (70, 576), (200, 576), (200,))
    matrix, bias = ops.matrix(weight), bias.float()
    found = ops.linear(x, matrix, bias)
    wanted = x.double() @ weight.double().t() + bias.double()
    digits = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    assert (found.double() - wanted).abs().max() <= digits * wanted.abs().max()
    for start, end in [(0, 1), (5, 7), (10, 31), (3, 70)]:
        assert same_bits(ops.linear(x[start:end], matrix, bias), found[start:end]), (start, end)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [576, 1536, 3072])
def test_linear_of_long_rows_has_the_same_bits_at_every_row_count(ops: Ops, dtype: torch.dtype, columns: int) -> None:
    """Values of many magnitudes, so that another order of summation shows."""
    x, weight, scale = _random(torch.float32, (512, columns), (576, columns), (512, columns))
    x, weight = (x * (2 * scale).exp()).to(dtype), weight.to(dtype)
    matrix = ops.matrix(weight)
    found = ops.linear(x, matrix)
    for count in (1, 2, 3, 8, 17, 33):
        assert all(same_bits(ops.linear(x[at : at + count], matrix), found[at : at + count]) for at in range(0, 480, count + 3)), count


def assert_rounded_twice(found: Tensor, wanted: Tensor) -> None:
    """A result that is rounded to its dtype once on the way, and once at the end."""
    relative = 2.0**-7 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=1e-6)


def _random(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
