"""What every backend draws: the token that float64 draws by the definition, the same alone and among others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops.interface import Draws, Ops
from tests.ops.comparing import quickly

INF = float("inf")
LAST = 1 - 2.0**-53
MARGIN = 1e-5


@dataclass(frozen=True)
class Asked:
    """One row of `Draws`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5


def columns(asked: list[Asked]) -> Draws:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(one, name) for one in asked], dtype=dtype)

    return Draws(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float32),
        uniform=column("uniform", torch.float64),
    )


def sample(ops: Ops, logits: Tensor, asked: list[Asked]) -> list[int]:
    found = ops.sample(logits, ops.argmax(logits)[0], columns(asked))
    assert found.dtype == torch.int64
    assert found.shape == (len(asked),)
    return found.tolist()


def may_be_drawn(logits: np.ndarray, asked: Asked, token_id: int, margin: float) -> bool:
    """Whether the definition, in float64, draws this token, or one of float32's would whose every decision is within `margin` of it.

    The decisions: whether a weight reaches min_p (by the difference of their logarithms), whether a share reaches top_p, and whether
    the shares up to a token exceed `uniform`. Weights in float32 are off by 2^-23 of the exponent, which outweighs the sums' own errors.
    """
    temperature, min_p = float(np.float32(asked.temperature)), float(np.float32(asked.min_p))
    values = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(values)), -values))
    exponents = (values[order] - values.max()) / temperature
    weights = np.exp(exponents)
    (rank,) = np.flatnonzero(order == token_id)
    if weights[rank] < 1e-45:  # 0 in float32
        return False
    longest = asked.top_k if 0 < asked.top_k < len(values) else len(values)
    # How many min_p may keep; equal logits fare alike.
    counts = {longest}
    if min_p > 0:
        least = math.log(min_p)
        sure, possible = (np.searchsorted(-exponents, -(least + shift), side="right") for shift in (margin, -margin))
        ends = np.flatnonzero(np.append(exponents[1:] != exponents[:-1], True)) + 1
        between = ends[(ends >= sure) & (ends <= possible)]
        counts = {int(min(count, longest)) for count in (sure, *between, possible) if count > 0}
    sums = np.cumsum(weights)
    before = np.cumsum(np.where(order < token_id, weights, 0.0))
    until = np.cumsum(np.where(order <= token_id, weights, 0.0))
    for count in counts:
        few = many = count
        if asked.top_p < 1:
            shares = sums[:count] / sums[count - 1]
            few, many = (min(int(np.searchsorted(shares, asked.top_p + shift)) + 1, count) for shift in (-margin, margin))
        kept = np.arange(few, many + 1) - 1
        low, high = before[kept] / sums[kept], until[kept] / sums[kept]
        if ((rank <= kept) & (low - margin <= asked.uniform) & (asked.uniform < high + margin)).any():
            return True
    return False


def assert_drawn(logits: Tensor, asked: list[Asked], found: list[int]) -> None:
    for row, one, token_id in zip(logits.numpy(), asked, found, strict=True):
        assert 0 <= token_id < len(row)
        assert may_be_drawn(row, one, token_id, MARGIN), f"{token_id} for {one} of {len(row)} logits"


def make(kind: str, rows: int, size: int, seed: int) -> Tensor:
    """Logits of several shapes; of each row one at least is finite."""
    random = np.random.default_rng(seed)
    values = random.normal(0, 3, (rows, size))
    if kind == "ties":
        values = values.round()
    elif kind == "equal":
        values = np.broadcast_to(values[:, :1], values.shape)
    elif kind == "few possible":
        values = np.where(random.random(values.shape) < min(0.95, 1 - 2 / size), -np.inf, values)
    elif kind == "peaked":
        values = np.where(random.random(values.shape) < 0.01, values + 20, values)
    elif kind == "rising":
        values = np.sort(values)
    elif kind == "falling":
        values = -np.sort(values)
    elif kind == "huge":
        values = values * 1e30
    values = values.astype(np.float32)
    values[~np.isfinite(values).any(-1), size // 2] = 0.0
    return torch.from_numpy(values)


KINDS = ["plain", "ties", "equal", "few possible", "peaked", "rising", "falling", "huge"]
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 128, 129, 300, 1000, 4095, 4096, 4097, 5000]
uniforms = st.sampled_from([0.0, LAST, 0.5]) | st.floats(0, LAST)


@st.composite
def rows_of(draw: st.DrawFn, size: int) -> list[Asked]:
    edges = st.sampled_from([0, 0, 1, 2, max(size - 1, 0), size, size + 1, 2**31 - 1])
    one = st.builds(
        Asked,
        temperature=st.sampled_from([1.0, 1.0, 1e-4, 0.3, 2.5, 100.0]) | st.floats(1e-4, 100),
        top_k=edges | st.integers(1, size),
        top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.9, 0.999999]) | st.floats(1e-6, 1),
        min_p=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1e-30]) | st.floats(0, 1),
        uniform=uniforms,
    )
    return draw(st.lists(one, min_size=1, max_size=5))


@st.composite
def calls(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[Tensor, list[Asked]]:
    size = draw(sizes)
    asked = draw(rows_of(size))
    return make(draw(st.sampled_from(KINDS)), len(asked), size, draw(st.integers(0, 2**32 - 1))), asked


@quickly
@given(calls(st.sampled_from(SIZES) | st.integers(1, 5000)))
def test_token_is_the_one_that_the_definition_draws(ops: Ops, call: tuple[Tensor, list[Asked]]) -> None:
    logits, asked = call
    assert_drawn(logits, asked, sample(ops, logits, asked))


@quickly
@given(calls(st.integers(1, 40)))
def test_token_of_a_small_vocabulary_is_the_one_that_the_definition_draws(ops: Ops, call: tuple[Tensor, list[Asked]]) -> None:
    logits, asked = call
    assert_drawn(logits, asked, sample(ops, logits, asked))


FILTERS = [
    Asked(),
    Asked(temperature=0.7, top_k=50),
    Asked(top_p=0.95),
    Asked(top_p=0.999999),
    Asked(min_p=0.05, temperature=1.5),
    Asked(temperature=100.0, top_p=0.5),
    Asked(temperature=0.8, top_k=1000, top_p=0.9, min_p=0.001),
    Asked(temperature=1e-4, top_p=0.5),
    Asked(top_k=3000, top_p=0.99),
]


@pytest.mark.parametrize("size", [49152, 151936])
@pytest.mark.parametrize("kind", ["plain", "ties", "equal"])
def test_token_of_a_large_vocabulary_is_the_one_that_the_definition_draws(ops: Ops, size: int, kind: str) -> None:
    random = np.random.default_rng(size)
    asked = [replace(one, uniform=float(random.random())) for one in FILTERS]
    asked += [replace(asked[3], uniform=0.0), replace(asked[0], top_k=size - 1, uniform=LAST)]
    logits = make(kind, len(asked), size, 5)
    assert_drawn(logits, asked, sample(ops, logits, asked))


def test_margin_is_seldom_called_on(ops: Ops) -> None:
    random = np.random.default_rng(3)
    asked = [replace(FILTERS[place % len(FILTERS)], uniform=float(random.random())) for place in range(1000)]
    logits = make("plain", len(asked), 333, 8)
    found = sample(ops, logits, asked)
    exact = [may_be_drawn(row, one, token_id, 0.0) for row, one, token_id in zip(logits.numpy(), asked, found, strict=True)]
    assert sum(exact) >= 995


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 63, 64, 65, 130, 1000, 4999])
def test_equal_logits_are_drawn_exactly(ops: Ops, size: int) -> None:
    # All weights are 1, so that nothing is rounded: the draw is uniform among the first ids.
    asked, wanted = [], []
    for top_k in sorted({0, 1, 2, size // 2, size - 1, size, size + 1}):
        for top_p in (1e-9, 0.25, 0.5, 0.75, 0.999999, 1.0):
            count = top_k if 0 < top_k < size else size
            kept = math.ceil(top_p * count)
            for uniform in (0.0, 0.25, 0.7310585786, LAST):
                asked.append(Asked(temperature=3.0, top_k=top_k, top_p=top_p, min_p=1.0, uniform=uniform))
                wanted.append(math.floor(uniform * kept))
    assert sample(ops, torch.full((len(asked), size), -7.25), asked) == wanted


@quickly
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.floats(1e-9, 1), st.integers(0, 2**32 - 1))
def test_of_equal_logits_at_the_border_the_lower_ids_are_kept(ops: Ops, size: int, tied: int, top_k: int, top_p: float, seed: int) -> None:
    # The tied ones stand anywhere, among others that weigh nothing.
    places = np.sort(np.random.default_rng(seed).permutation(size)[:tied])
    logits = torch.full((1, size), -1000.0)
    logits[0, places] = 2.0
    count = min(top_k or size, len(places))
    kept = math.ceil(top_p * count)
    for uniform, wanted in ((0.0, places[0]), (LAST, places[kept - 1])):
        assert sample(ops, logits, [Asked(top_k=top_k, top_p=top_p, uniform=uniform)]) == [wanted]


@pytest.mark.parametrize("size", [5, 64, 200, 4097])
@pytest.mark.parametrize("one", [*FILTERS[:3], Asked(top_k=5, top_p=0.8), Asked(temperature=100.0)], ids=str)
def test_outermost_numbers_give_the_outermost_tokens_kept(ops: Ops, size: int, one: Asked) -> None:
    # None of them weighs so little that it could be lost in the sums.
    logits = make("ties", 30, size, 1).clamp(-2, 1)
    logits[:, [0, -1]] = -INF
    kept = logits.clone()
    if one.top_k and one.top_k < size:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        kept.scatter_(-1, order[:, one.top_k :], -INF)
    first, last = (sample(ops, logits, [replace(one, uniform=number)] * 30) for number in (0.0, LAST))
    if one.top_p == 1:
        possible = [np.flatnonzero(np.isfinite(row)) for row in kept.numpy()]
        assert first == [ids[0] for ids in possible]
        assert last == [ids[-1] for ids in possible]
    assert_drawn(logits, [replace(one, uniform=0.0)] * 30, first)
    assert_drawn(logits, [replace(one, uniform=LAST)] * 30, last)


@pytest.mark.parametrize("size", [3, 20, 64, 65, 1000])
@pytest.mark.parametrize("narrow", [Asked(top_k=1), Asked(top_p=1e-12), Asked(min_p=1.0), Asked(temperature=1e-4)], ids=str)
def test_the_narrowest_filters_leave_the_likeliest(ops: Ops, size: int, narrow: Asked) -> None:
    logits = make("plain", 20, size, 2)
    best = size // 2
    logits[:, best] = logits.amax(-1) + 0.5
    for uniform in (0.0, 0.5, LAST):
        assert sample(ops, logits, [replace(narrow, uniform=uniform)] * 20) == [best] * 20


@quickly
@given(calls(st.sampled_from([1, 3, 16, 64, 65, 300, 1111])), st.integers(0, 2**32 - 1))
def test_row_is_drawn_alike_alone_and_among_others_in_any_order(ops: Ops, call: tuple[Tensor, list[Asked]], seed: int) -> None:
    logits, asked = call
    alone = [sample(ops, logits[row : row + 1], [one])[0] for row, one in enumerate(asked)]
    assert sample(ops, logits, asked) == alone
    order = np.random.default_rng(seed).permutation(len(asked)).tolist() * 2
    assert sample(ops, logits[order], [asked[row] for row in order]) == [alone[row] for row in order]
    # Other neighbours, the more different the better.
    others = make("huge", len(asked), logits.shape[1], seed)
    mixed = torch.stack((others, logits), 1).flatten(0, 1)
    strange = [Asked(temperature=1e-4, top_p=0.1, uniform=0.0)] * len(asked)
    assert sample(ops, mixed, [one for pair in zip(strange, asked, strict=True) for one in pair])[1::2] == alone


@quickly
@given(calls(st.sampled_from([1, 5, 16, 63, 64, 65, 130, 1000])), st.integers(1, 70), st.sampled_from([math.nan, INF, 1e38]))
def test_what_lies_beyond_a_row_is_not_looked_at(ops: Ops, call: tuple[Tensor, list[Asked]], more: int, value: float) -> None:
    logits, asked = call
    size = logits.shape[1]
    wide = torch.full((len(asked) + 1, size + more), value)
    wide[:-1, :size] = logits
    assert sample(ops, wide[:-1, :size], asked) == sample(ops, logits, asked)


def test_nothing_that_is_given_is_changed(ops: Ops) -> None:
    logits, asked = make("plain", len(FILTERS), 1000, 3), FILTERS
    peaks, draws = ops.argmax(logits)[0], columns(asked)
    before = [each.clone() for each in (logits, peaks, *vars(draws).values())]
    ops.sample(logits, peaks, draws)
    assert all(torch.equal(now, then) for now, then in zip((logits, peaks, *vars(draws).values()), before, strict=True))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 5000])
def test_single_possible_token_is_drawn_wherever_it_stands(ops: Ops, size: int) -> None:
    asked = [replace(one, uniform=uniform) for one in FILTERS for uniform in (0.0, LAST)]
    for place in {0, size // 2, size - 1}:
        logits = torch.full((len(asked), size), -INF)
        logits[:, place] = -1e30
        assert sample(ops, logits, asked) == [place] * len(asked)


@pytest.mark.parametrize("one", FILTERS, ids=str)
def test_every_token_has_its_share_of_the_numbers(ops: Ops, one: Asked) -> None:
    count = 4000
    logits = make("plain", 1, 300, 6)
    asked = [replace(one, uniform=(place + 0.5) / count) for place in range(count)]
    found = sample(ops, logits.expand(count, -1), asked)
    assert found == sorted(found)
    shares = np.bincount(found, minlength=300) / count
    x = logits[0].numpy().astype(np.float64)
    order = np.lexsort((np.arange(300), -x))
    weights = np.exp((x[order] - x.max()) / one.temperature)
    weights[weights < one.min_p] = 0
    if one.top_k:
        weights[one.top_k :] = 0
    reached = np.cumsum(weights) / weights.sum()
    weights[np.flatnonzero(reached >= one.top_p)[:1].item() + 1 if (reached >= one.top_p).any() else 300 :] = 0
    wanted = np.zeros(300)
    wanted[order] = weights / weights.sum()
    assert np.abs(shares - wanted).max() <= 1.01 / count
