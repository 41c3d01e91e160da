"""Draws: right in distribution, repeatable, and blind to the neighbours."""

import json
import math

import msgspec
import numpy as np
import pytest
import torch

from octavo import ops
from octavo.ops.reference import ReferenceOps
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams
from octavo.worker import sampler
from octavo.worker.adjustments import Adjustments
from octavo.worker.sampler import Draw, uniforms

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
NOT_FINITE = "the model gave no finite logits for this request"


def drawn(logits, draws, backend=None):
    """What `sample` gives; it may change the logits it is given, and here they are kept."""
    return sampler.sample(backend or ops.backend(CPU), logits.float().clone(), draws)


def sample(logits, draws, backend=None):
    found = drawn(logits, draws, backend)
    assert all((one.token_id is None) == (one.error is not None) for one in found)
    return [one.token_id for one in found]


def draw(position=0, seed=0, choice=0, history=None, ends=(), bad_words=(), **params):
    """A draw for the token at an output position; of a history that is not given only the length matters."""
    asked = SamplingParams(**{"max_tokens": None, **params})
    prompt_length = 1 if history is None else len(history) - position
    assignment = Assignment(
        params=asked, seed=seed, history=[], prompt_length=prompt_length, choice=choice, ends=list(ends), bad_words=list(bad_words)
    )
    adjustments = Adjustments(assignment, None) if Adjustments.are_asked(asked) else None
    return Draw(assignment, range(1 + position) if history is None else history, adjustments)


def logits_of(probabilities, dtype=torch.float32):
    return torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)


def draws_of(logits, count, start=0, seed=0, backend=None, **params):
    """Token ids at `count` output positions of one request."""
    assignment = Assignment(params=SamplingParams(**params), seed=seed, history=[], prompt_length=1)
    return sample(logits.expand(count, -1), [Draw(assignment, range(1 + start + place)) for place in range(count)], backend)


def spread(rows, vocab_size, seed=1, scale=3.0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# Greedy and nearly so


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 17, 1000, 49152])
def test_greedy_takes_the_lowest_of_the_likeliest(dtype, vocab_size):
    logits = torch.zeros(5, vocab_size, dtype=dtype)
    for row in range(5):
        logits[row, vocab_size // 2 :] = 1.0
    assert sample(logits, [draw(temperature=0)] * 5) == [vocab_size // 2] * 5
    assert sample(torch.zeros(1, vocab_size, dtype=dtype), [draw(temperature=0)]) == [0]


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-4, 1e-300])
def test_tiny_temperatures_take_the_likeliest(temperature):
    logits = spread(50, 1000)
    draws = [draw(place, temperature=temperature) for place in range(50)]
    assert sample(logits, draws) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_no_temperature_gives_nan_or_a_token_that_cannot_be(scale):
    logits = spread(20, 50) * scale
    logits[:, ::2] = -INF
    for temperature in (1e-5, 1e-4, 0.1, 1.0, 100.0, 1e6):
        ids = sample(logits, [draw(place, temperature=temperature, top_p=0.9, min_p=0.01) for place in range(20)])
        assert all(token_id is not None and token_id % 2 == 1 for token_id in ids)


def test_nearly_even_tokens_are_told_apart_at_a_tiny_temperature():
    logits = torch.tensor([[1.0, 1.001, 1.0]])
    assert {sample(logits, [draw(place, temperature=1e-4)])[0] for place in range(100)} == {1}


# Filters


@pytest.mark.parametrize("top_p", [1e-4, 1e-9, 0.1])
def test_top_p_always_keeps_one_token(top_p):
    logits = logits_of([0.2, 0.25, 0.35, 0.2])
    assert set(draws_of(logits, 500, top_p=top_p)) == {2}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.6, {2, 3}), (0.39, {3}), (0.41, {2, 3}), (0.8, {1, 2, 3}), (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_token_that_crosses_top_p_is_kept(top_p, kept):
    assert set(draws_of(logits_of([0.1, 0.2, 0.3, 0.4]), 1000, top_p=top_p)) == kept


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {3}), (2, {2, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (-1, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_likeliest(top_k, kept):
    assert set(draws_of(logits_of([0.1, 0.2, 0.3, 0.4]), 1000, top_k=top_k)) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, {3}), (0.7, {2, 3}), (0.49, {1, 2, 3}), (0.3, {1, 2, 3}), (0.2, {0, 1, 2, 3}), (0.0, {0, 1, 2, 3})]
)
def test_min_p_drops_what_is_too_far_below_the_likeliest(min_p, kept):
    assert set(draws_of(logits_of([0.1, 0.2, 0.3, 0.4]), 1000, min_p=min_p)) == kept


def test_top_p_counts_what_top_k_left():
    # 0.4 and 0.3 make 1 together after top_k, so 0.55 of it is reached by the first alone.
    assert set(draws_of(logits_of([0.1, 0.2, 0.3, 0.4]), 1000, top_k=2, top_p=0.55)) == {3}


def test_filters_are_measured_at_the_rows_temperature():
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    assert set(draws_of(logits, 1000, min_p=0.7, temperature=10.0)) == {0, 1, 2, 3}
    assert set(draws_of(logits, 1000, top_p=0.6, temperature=0.1)) == {3}


@pytest.mark.parametrize("top_k", [1, 7, 100])
def test_of_equal_tokens_at_the_border_the_lower_ids_are_kept(top_k):
    logits = torch.zeros(1, 10)
    assert set(draws_of(logits, 1000, top_k=top_k)) == set(range(min(top_k, 10)))


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_narrowest_filters_are_greedy_among_ties(params):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]])
    assert set(draws_of(logits, 200, **params)) == {1}


# Independence


MIXED = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.3},
    {"min_p": 0.2, "temperature": 1.7},
    {"top_k": 1},
    {"top_k": 900, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1e-4},
]


@pytest.mark.parametrize("vocab_size", [7, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_is_the_same_alone_or_among_others_in_any_order(vocab_size, dtype):
    rows = 40
    logits = spread(rows, vocab_size).to(dtype)
    draws = [draw(place * 3, seed=place % 5, **MIXED[place % len(MIXED)]) for place in range(rows)]
    alone = [sample(logits[place : place + 1], [draws[place]])[0] for place in range(rows)]
    assert sample(logits, draws) == alone
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2)).tolist()
    assert sample(logits[order], [draws[place] for place in order]) == [alone[place] for place in order]
    assert sample(logits[:3], draws[:3]) == alone[:3]


def test_logits_are_left_as_they_are_where_nothing_adjusts_them():
    logits = spread(4, 100)
    before = logits.clone()
    sampler.sample(ops.backend(CPU), logits, [draw(top_k=3, top_p=0.5, min_p=0.1, logprobs=2), *[draw(logit_bias={3: 5.0})] * 3])
    assert torch.equal(logits[0], before[0])


def test_draw_depends_on_seed_choice_and_position_and_on_nothing_else():
    logits = spread(1, 4000, scale=0.1)
    state = torch.random.get_rng_state()

    def token(**values):
        return sample(logits, [draw(**values)])[0]

    first = token(position=3, seed=5, choice=1)
    torch.manual_seed(99)
    assert token(position=3, seed=5, choice=1) == first
    others = [token(position=4, seed=5, choice=1), token(position=3, seed=6, choice=1), token(position=3, seed=5, choice=2)]
    assert first not in others
    assert len(set(others)) == 3
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**64 - 1, 2**100 + 1])
def test_every_seed_is_good(seed):
    ids = draws_of(torch.zeros(1, 1000), 200, seed=seed)
    assert ids == draws_of(torch.zeros(1, 1000), 200, seed=seed)
    assert len(set(ids)) > 150


def test_neighbouring_seeds_and_positions_do_not_repeat_each_other():
    # (seed, position) and (seed + 1, position - 1) must not meet, nor seeds that differ in sign alone.
    streams = [uniforms([draw(place, seed=seed) for place in range(200)]) for seed in (-2, -1, 0, 1, 2, 3)]
    assert len(np.unique(np.concatenate(streams))) == 6 * 200


# What holds no number


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize(
    "bad",
    [[NAN] * 6, [1.0, NAN, 2.0, 3.0, 4.0, 5.0], [-INF] * 6, [1.0, INF, 2.0, 3.0, 4.0, 5.0], [NAN, INF, -INF, 0.0, 0.0, 0.0]],
    ids=["all nan", "one nan", "nothing possible", "one infinite", "all kinds"],
)
def test_row_without_finite_logits_gives_none_and_the_others_their_token(params, bad):
    logits = spread(5, 6)
    draws = [draw(place, **(params if place == 2 else MIXED[place])) for place in range(5)]
    good = sample(logits, draws)
    logits[2] = torch.tensor(bad)
    assert sample(logits, draws) == [*good[:2], None, *good[3:]]
    assert [one.error for one in drawn(logits, draws)] == [None, None, NOT_FINITE, None, None]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}])
@pytest.mark.parametrize("count", [0, 3])
def test_row_without_finite_logits_has_no_scores_and_the_others_have_theirs(params, count):
    logits = spread(5, 6)
    draws = [draw(place, logprobs=count, **params) for place in range(5)]
    good = drawn(logits, draws)
    logits[2] = NAN
    found = drawn(logits, draws)
    assert found[:2] + found[3:] == good[:2] + good[3:]
    assert (found[2].token_id, found[2].logprobs, found[2].error) == (None, None, NOT_FINITE)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("count", [0, 3])
def test_what_is_not_finite_and_not_allowed_ends_at_most_its_own_row(bad, count):
    # Adjustments hide it from the draw; the raw scores show it.
    logits = spread(5, 6)
    draws = [draw(place, logprobs=count, **({"allowed_token_ids": [1, 2]} if place == 2 else {})) for place in range(5)]
    good = drawn(logits, draws)
    logits[2, 5] = bad
    found = drawn(logits, draws)
    assert found[:2] + found[3:] == good[:2] + good[3:]
    assert found[2].error == NOT_FINITE


# Scores


def test_scores_are_those_of_raw_logits_whatever_is_asked():
    logits = spread(len(MIXED), 50)
    everything = {
        "logit_bias": {3: 50.0},
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "allowed_token_ids": [3, 4, 5],
        "min_tokens": 3,
    }
    raw = logits.double().log_softmax(-1)
    for params in ({}, everything):
        draws = [draw(0, history=[4, 5], ends=[5], logprobs=4, **mixed, **params) for mixed in MIXED]
        for row, one in enumerate(drawn(logits, draws)):
            own, *best = one.logprobs
            assert own.token_id == one.token_id
            assert own.rank == 1 + int((raw[row] > raw[row, one.token_id]).sum())
            assert [each.token_id for each in best] == raw[row].topk(4).indices.tolist()
            assert [each.rank for each in best] == [1, 2, 3, 4]
            for each in one.logprobs:
                assert each.logprob == pytest.approx(raw[row, each.token_id].item(), abs=1e-5)
        if params:
            assert {one.token_id for one in drawn(logits, draws)} == {3}


def test_each_row_has_as_many_scores_as_it_asks():
    counts = [None, 0, 5, None, 1, 5, 20, 0]
    logits = spread(len(counts), 50)
    draws = [draw(place, **({} if count is None else {"logprobs": count})) for place, count in enumerate(counts)]
    found = drawn(logits, draws)
    assert [None if one.logprobs is None else len(one.logprobs) - 1 for one in found] == counts
    assert [one.token_id for one in found] == sample(logits, [draw(place) for place in range(len(counts))])
    alone = [drawn(logits[place : place + 1], [one])[0] for place, one in enumerate(draws)]
    assert found == alone


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.1}, {"top_k": 1}, {"logit_bias": {4: 100.0}}])
def test_no_score_is_infinite(params):
    logits = spread(3, 10)
    logits[:, 4:] = -INF
    logits[2, 1:] = -INF
    logits[1, 1] = -1e30
    for one in drawn(logits, [draw(place, logprobs=10, **params) for place in range(3)]):
        assert len(one.logprobs) == 11
        assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in one.logprobs)
        json.dumps([each.logprob for each in one.logprobs], allow_nan=False)


def test_token_of_probability_zero_is_never_drawn():
    logits = torch.zeros(1, 10)
    logits[0, [0, 4, 9]] = -INF
    assert set(draws_of(logits, 2000)) == {1, 2, 3, 5, 6, 7, 8}


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (1 - 2.0**-53, 7)])
def test_outermost_numbers_give_the_outermost_possible_tokens(monkeypatch, number, token):
    monkeypatch.setattr(sampler, "uniforms", lambda draws: np.full(len(draws), number))
    logits = spread(50, 10)
    logits[:, [0, 1, 8, 9]] = -INF
    for params in ({}, {"temperature": 3.0}):
        assert sample(logits, [draw(**params)] * 50) == [token] * 50


def test_single_possible_token_is_always_drawn():
    logits = torch.full((1, 10), -INF)
    logits[0, 9] = -1e30
    assert set(draws_of(logits, 50, temperature=1e6, top_p=0.5, min_p=0.5, top_k=3)) == {9}


# Distribution


DISTRIBUTIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "all": {"temperature": 1.3, "top_k": 15, "top_p": 0.85, "min_p": 0.05},
}


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities in float64, by the definitions: min_p and top_k first, then the smallest set that reaches top_p."""
    values = np.asarray(logits, dtype=np.float64) / temperature
    weights = np.exp(values - values.max())
    weights[weights < min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    reached = 0.0
    for place, token_id in enumerate(order):
        if reached >= top_p:
            weights[order[place:]] = 0
            break
        reached += weights[token_id]
    return weights / weights.sum()


def adjusted(logits, history, position, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None):
    """Logits in float64, biased first and then penalized, by the definitions."""
    values = np.asarray(logits, dtype=np.float64).copy()
    for token_id, bias in (logit_bias or {}).items():
        values[token_id] += bias
    for token_id in set(history):
        times = history[len(history) - position :].count(token_id)
        values[token_id] *= 1 / repetition_penalty if values[token_id] > 0 else repetition_penalty
        values[token_id] -= frequency_penalty * times + presence_penalty * (times > 0)
    return values


def chi_square(counts, probabilities, total):
    """(statistic, its 99.99% quantile by Wilson and Hilferty)."""
    expected = probabilities[probabilities > 0] * total
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


BACKENDS = {"reference": lambda: ReferenceOps(CPU), "native": lambda: ops.backend(CPU)}


def assert_follows(found, probabilities):
    """A chi-square test in which tokens that are too rare for it count as one."""
    counts = np.bincount(found, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * len(found) >= 10
    counts, probabilities = (np.append(each[common], each[~common].sum()) for each in (counts, probabilities))
    statistic, limit = chi_square(counts, probabilities, len(found))
    assert statistic < limit


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("vocab_size", [24, 300])
@pytest.mark.parametrize("params", DISTRIBUTIONS.values(), ids=list(DISTRIBUTIONS))
def test_draws_follow_the_distribution(params, vocab_size, backend):
    logits = spread(1, vocab_size, seed=4, scale=1.0)
    found = draws_of(logits, 20_000, seed=11, backend=BACKENDS[backend](), **params)
    assert_follows(found, oracle(logits[0].numpy(), **params))
    # The test would notice: the plain distribution does not pass for a filtered one.
    if params:
        with pytest.raises(AssertionError):
            assert_follows(found, oracle(logits[0].numpy()))


PENALTIES = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {0: 2.0, 7: -3.0, 11: 1.5, 299: 4.0}},
    "all": {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.5, "logit_bias": {0: 2.0, 7: -3.0, 299: 4.0}},
}


@pytest.mark.parametrize("filters", ["plain", "all"])
@pytest.mark.parametrize("params", PENALTIES.values(), ids=list(PENALTIES))
def test_draws_follow_the_adjusted_distribution(params, filters):
    total, position, filters = 20_000, 9, DISTRIBUTIONS[filters]
    logits = spread(1, 300, seed=4, scale=1.0)
    best = logits[0].topk(6).indices.tolist()
    history = [*best[:3], 7, 1, 2, *best[2:], best[4], best[4], 7, 11, 3]
    one = draw(position, history=history, **params, **filters)
    # One request's adjustments, which keep to its history, serve the draws of many choices.
    draws = [Draw(msgspec.structs.replace(one.assignment, choice=place), history, one.adjustments) for place in range(total)]
    found = sample(logits.expand(total, -1), draws)
    assert_follows(found, oracle(adjusted(logits[0].numpy(), history, position, **params), **filters))
    with pytest.raises(AssertionError):
        assert_follows(found, oracle(logits[0].numpy(), **filters))


def test_draws_over_seeds_and_choices_follow_the_distribution_too():
    total, logits = 20_000, spread(1, 24, seed=4, scale=1.0)
    probabilities = oracle(logits[0].numpy())
    for draws in ([draw(seed=place) for place in range(total)], [draw(choice=place, seed=7) for place in range(total)]):
        assert_follows(sample(logits.expand(total, -1), draws), probabilities)


def test_uniform_numbers_are_uniform():
    total = 50_000
    numbers = uniforms([draw(place, seed=5) for place in range(total)])
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert len(np.unique(numbers)) == total
    assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * total)
    assert abs(numbers.var() - 1 / 12) < 5 / math.sqrt(180 * total)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(total)


def test_no_draws_are_no_numbers():
    assert uniforms([]).shape == (0,)
