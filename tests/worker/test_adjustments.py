"""What requests change about their logits: by the definitions, from the history alone, and in their own row alone."""

from __future__ import annotations

import functools
import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo import ops
from octavo.errors import InvalidValueError
from octavo.plan import Assignment
from octavo.sampling_params import SamplingParams
from octavo.worker import logits_processors, sampler
from octavo.worker.adjustments import Adjustments, apply
from octavo.worker.logits_processors import find, register_logits_processor
from octavo.worker.sampler import Draw, Drawn
from tests.ops.comparing import quickly, same_bits

CPU = torch.device("cpu")
BACKEND = ops.backend(CPU)
NAN, INF = float("nan"), float("inf")
SIZE = 23
NOTHING_LEFT = "no token is left to draw from: what the request allows excludes what else it asks for"
NOT_FINITE = "the model gave no finite logits for this request"


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def draw(prompt, output, ends=(), words=(), **params):
    """The draw that follows an output; its adjustments have seen nothing yet. words: tokens of `bad_words`, whose texts play no part."""
    asked = SamplingParams(**{"max_tokens": None, "bad_words": ["x"] * len(words), **params})
    history = [*prompt, *output]
    assignment = Assignment(
        params=asked, seed=1, history=list(history), prompt_length=len(prompt), ends=list(ends), bad_words=[list(each) for each in words]
    )
    return Draw(assignment, history, Adjustments(assignment, None) if Adjustments.are_asked(asked) else None)


def adjust(logits: Tensor, draws: list[Draw]) -> tuple[Tensor, dict[int, str]]:
    logits = logits.clone()
    return logits, apply(
        BACKEND, logits, [(row, one.adjustments, one.history) for row, one in enumerate(draws) if one.adjustments is not None]
    )


def adjusted(logits: Tensor, one: Draw) -> Tensor:
    """One row."""
    found, errors = adjust(logits[None], [one])
    assert not errors
    return found[0]


def drawn(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    return sampler.sample(ops.backend(CPU), logits.clone(), draws)


def spread(rows: int, size: int = SIZE, seed: int = 1) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for rounding, and infinite at the same places."""
    excluded = wanted == -INF
    return torch.equal(found == -INF, excluded) and torch.allclose(found[~excluded], wanted[~excluded].float(), rtol=1e-5, atol=1e-5)


def transformed(processor, logits: Tensor, history: list[int]) -> Tensor:
    return processor(torch.tensor([history]), logits[None].clone())[0]


tokens = st.integers(0, SIZE - 1)
prompts = st.lists(tokens, min_size=1, max_size=12)
outputs = st.lists(tokens, max_size=20)
few_outputs = st.lists(st.integers(0, 3), max_size=12)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def rows_of_logits(draw: st.DrawFn, size: int = SIZE) -> Tensor:
    logits = spread(1, size, draw(seeds))[0]
    for place in draw(st.lists(st.integers(0, size - 2), max_size=4)):
        logits[place] = draw(st.sampled_from([0.0, -0.0, -INF, 1e30, -1e30, 7.0]))
    return logits


# Penalties


def penalized(logits, prompt, output, repetition=1.0, presence=0.0, frequency=0.0):
    """In float64, by the definitions."""
    values = logits.double().tolist()
    for token_id in {*prompt, *output}:
        values[token_id] = values[token_id] / repetition if values[token_id] > 0 else values[token_id] * repetition
        values[token_id] -= frequency * output.count(token_id) + (presence if token_id in output else 0)
    return torch.tensor(values, dtype=torch.float64)


@quickly
@given(rows_of_logits(), prompts, outputs, st.sampled_from([0.01, 0.5, 0.999, 1.1, 2.0, 100.0]))
def test_repetition_penalty_is_that_of_transformers(logits, prompt, output, penalty):
    wanted = transformed(RepetitionPenaltyLogitsProcessor(penalty), logits, prompt + output)
    assert same(adjusted(logits, draw(prompt, output, repetition_penalty=penalty)), wanted)


@quickly
@given(
    rows_of_logits(),
    prompts,
    outputs,
    st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    st.sampled_from([0.0, -2.0, 2.0, 0.3]),
    st.sampled_from([0.0, -2.0, 2.0, 0.7]),
)
def test_penalties_are_those_of_the_definitions(logits, prompt, output, repetition, presence, frequency):
    one = draw(prompt, output, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    if one.adjustments is not None:
        assert same(adjusted(logits, one), penalized(logits, prompt, output, repetition, presence, frequency))
    else:
        assert (repetition, presence, frequency) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("params", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_presence_and_frequency_do_not_count_the_prompt(params):
    logits = spread(1)[0]
    assert same_bits(adjusted(logits, draw([1, 2, 3, 1], [], **params)), logits)
    changed = adjusted(logits, draw([1, 2, 3, 1], [3], **params)) != logits
    assert changed.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(("prompt_length", "output_length"), [(0, 64), (0, 65), (60, 10), (64, 1), (65, 300), (2000, 5000)])
@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_penalties_of_long_histories_count_every_token(prompt_length, output_length, repetition):
    random = np.random.default_rng(1)
    prompt = [1, *random.integers(0, 3000, prompt_length).tolist()]
    output = [*random.permutation(3000)[:output_length].tolist(), *random.integers(0, 3000, output_length // 2).tolist()]
    logits = spread(1, 3000)[0]
    one = draw(prompt, output, repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=0.25)
    assert same(adjusted(logits, one), penalized(logits, prompt, output, repetition, 0.5, 0.25))


@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 1e-45, 1e-300])
def test_penalty_of_next_to_nothing_is_refused_or_gives_a_token(penalty):
    try:
        one = draw([0, 1], [2], repetition_penalty=penalty, allowed_token_ids=[2, 3, 4], temperature=0)
    except InvalidValueError:
        return
    logits = torch.arange(SIZE).float() + 1
    assert drawn(logits[None], [one]) == [Drawn(2)]


# Biases and exclusions


@quickly
@given(rows_of_logits(), st.dictionaries(tokens, st.sampled_from([-100.0, 100.0, 0.0, 0.1, -7.25]), min_size=1))
def test_biases_are_added(logits, biases):
    wanted = logits.double()
    for token_id, bias in biases.items():
        wanted[token_id] += bias
    assert same(adjusted(logits, draw([0], [], logit_bias=biases)), wanted)


@quickly
@given(rows_of_logits(), st.lists(tokens, min_size=1))
def test_no_token_is_left_but_those_allowed(logits, allowed):
    excluded = sorted({*range(SIZE)} - {*allowed})
    wanted = transformed(SuppressTokensLogitsProcessor(excluded, device="cpu"), logits, [0]) if excluded else logits
    assert same_bits(adjusted(logits, draw([0], [], allowed_token_ids=allowed)), wanted)


@quickly
@given(
    rows_of_logits(),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    few_outputs,
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_bad_words_are_those_of_transformers_in_the_output(logits, prompt, output, words):
    # Transformers wants more tokens than a word has, and does not know of prompts: other tokens go before.
    wanted = transformed(NoBadWordsLogitsProcessor(words), logits, [SIZE - 1] * 4 + output)
    assert same(adjusted(logits, draw(prompt, output, words=words)), wanted)


def test_bad_words_do_not_begin_in_the_prompt():
    logits = spread(1)[0]
    assert same_bits(adjusted(logits, draw([1, 2], [], words=[[1, 2, 3], [2, 3]])), logits)
    assert adjusted(logits, draw([1], [2], words=[[1, 2, 3], [2, 4]])).isneginf().nonzero().flatten().tolist() == [4]


@quickly
@given(
    rows_of_logits(),
    st.lists(tokens, min_size=1, max_size=30),
    outputs,
    st.integers(1, 25),
    st.lists(tokens, min_size=1, max_size=4, unique=True),
)
def test_min_tokens_are_those_of_transformers(logits, prompt, output, least, ends):
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, ends, device="cpu")
    wanted = transformed(processor, logits, prompt + output)
    assert same_bits(adjusted(logits, draw(prompt, output, ends=ends, min_tokens=least)), wanted)


@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 1}, {"logit_bias": {7: 100.0, 9: 100.0}}])
def test_none_of_several_ends_comes_before_min_tokens_and_one_right_after(prompt_length, params):
    logits = spread(1)
    logits[0, [7, 9]] += 100
    history = list(range(prompt_length))
    output = []
    for _ in range(6):
        one = draw(history, output, ends=[7, 9], min_tokens=4, **params)
        (found,) = drawn(logits, [one])
        output.append(found.token_id)
    assert all(token_id not in (7, 9) for token_id in output[:4])
    assert output[4] in (7, 9)
    assert output[5] in (7, 9)


def test_model_without_ends_takes_min_tokens():
    logits = spread(1)[0]
    assert same_bits(adjusted(logits, draw([0], [], ends=[], min_tokens=4)), logits)


# Together


def everything(logits, prompt, output, params, ends, words):
    """All of it in float64, in the order of the definitions: exclusions, biases, penalties."""
    values = logits.double().clone()
    if "allowed_token_ids" in params:
        excluded = torch.ones(len(values), dtype=torch.bool)
        excluded[list(params["allowed_token_ids"])] = False
        values[excluded] = -INF
    for *head, last in words:
        if not head or output[-len(head) :] == head:
            values[last] = -INF
    if len(output) < params.get("min_tokens", 0):
        values[list(ends)] = -INF
    for token_id, bias in params.get("logit_bias", {}).items():
        values[token_id] += bias
    return penalized(
        values,
        prompt,
        output,
        params.get("repetition_penalty", 1.0),
        params.get("presence_penalty", 0.0),
        params.get("frequency_penalty", 0.0),
    )


params_of = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.75]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, 1.5, 100.0]), max_size=5),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=20),
        "min_tokens": st.integers(0, 8),
    },
)
words_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)
asks = st.tuples(params_of, prompts, st.one_of(outputs, few_outputs), st.lists(tokens, min_size=1, max_size=3), words_of)


def asking(params, prompt, output, ends, words):
    return draw(prompt, output, ends, words, **params)


@quickly
@given(st.lists(asks, min_size=1, max_size=6), seeds)
def test_rows_of_a_batch_are_adjusted_each_by_its_own_request(requests, seed):
    logits = spread(len(requests), seed=seed)
    draws = [asking(*request) for request in requests]
    found, errors = adjust(logits, draws)
    assert not errors
    for row, (params, prompt, output, ends, words) in enumerate(requests):
        assert same(found[row], everything(logits[row], prompt, output, params, ends, words))
        if draws[row].adjustments is None:
            assert same_bits(found[row], logits[row])
        else:
            # The same bits alone, and once more.
            assert same_bits(adjusted(logits[row], asking(*requests[row])), found[row])
            assert same_bits(adjusted(logits[row], draws[row]), found[row])


@quickly
@given(st.lists(asks, min_size=1, max_size=4), st.sampled_from([NAN, INF, -INF, -0.0, 1e-45]), seeds)
def test_rows_that_ask_for_nothing_keep_their_bits(requests, value, seed):
    logits = spread(2 * len(requests) + 1, seed=seed)
    logits[::2, ::3] = value
    draws = [draw([1, 2], [3]) for _ in logits]
    draws[1::2] = [asking(*request) for request in requests]
    found, errors = adjust(logits, draws)
    assert not errors
    assert same_bits(found[::2], logits[::2])


@quickly
@given(asks, st.lists(st.integers(1, 5), max_size=8), seeds)
def test_what_is_remembered_follows_from_the_history(ask, gains, seed):
    params, prompt, output, ends, words = ask
    params = {**params, "logits_processors": [shift_by_history]}
    lasting = draw(prompt, output, ends, words, **params)
    logits = spread(1, seed=seed)[0]
    random = np.random.default_rng(seed)
    for gain in (0, *gains):
        # A slot's history grows in place.
        lasting.history.extend(random.integers(0, SIZE if gain > 2 else 4, gain).tolist())
        now = lasting.history[len(prompt) :]
        wanted = adjusted(logits, lasting)
        resumed = draw(prompt, now, ends, words, **params)
        assert same_bits(adjusted(logits, resumed), wanted)
        # A fork begins where the other is, and goes its own way.
        forked, other = draw(prompt, now, ends, words, **params), [*now, 1, 2]
        adjusted(logits, forked)
        forked.history.extend([1, 2])
        assert same_bits(adjusted(logits, forked), adjusted(logits, draw(prompt, other, ends, words, **params)))
        assert same_bits(adjusted(logits, lasting), wanted)


def test_which_adjustments_are_asked_is_told_from_the_parameters():
    for params in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 0.5}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logits_processors": ["x"]},
        {"structured_outputs": {"regex": "a"}},
    ):
        assert Adjustments.are_asked(SamplingParams(**params))
    nothing = {"logit_bias": {}, "bad_words": [], "logits_processors": [], "stop": ["x"], "top_k": 5, "top_p": 0.5, "logprobs": 5, "n": 3}
    assert not Adjustments.are_asked(SamplingParams(**nothing))


@pytest.mark.parametrize("end", [SIZE, SIZE + 1, 10**6])
@pytest.mark.parametrize("params", [{"min_tokens": 4}, {"words": [[SIZE], [2, 10**6], [1]]}], ids=["ends", "bad words"])
def test_ids_beyond_the_logits_are_never_drawn_anyway(params, end):
    # A tokenizer may know more tokens than the model has logits for.
    logits = spread(3)
    draws = [draw([0], [2]), draw([0], [2], ends=[3, end], **params), draw([0], [2], logit_bias={4: 1.0})]
    found = drawn(logits, draws)
    assert all(one.error is None for one in found)
    assert found[::2] == drawn(logits[::2], draws[::2])


# What is left


EXCLUDING = [
    ({"allowed_token_ids": [3]}, [[3]], []),
    ({"allowed_token_ids": [3, 4], "min_tokens": 2}, [[3]], [4]),
    ({"min_tokens": 1}, [], list(range(SIZE))),
    ({}, [[token_id] for token_id in range(SIZE)], []),
    ({"allowed_token_ids": [3], "logit_bias": {3: 100.0}, "presence_penalty": -2.0}, [[3]], []),
]


@pytest.mark.parametrize(("params", "words", "ends"), EXCLUDING)
@pytest.mark.parametrize("filters", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.5}, {"logprobs": 2}])
def test_request_that_excludes_every_token_ends_with_that_error(params, words, ends, filters):
    logits = spread(3)
    draws = [draw([0], [], ends, words, **params, **filters) if place == 1 else draw([0], [], **filters) for place in range(3)]
    found = drawn(logits, draws)
    assert found[1] == Drawn(None, error=NOTHING_LEFT)
    assert found[::2] == drawn(logits[::2], draws[::2])


ADJUSTED = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {1: 100.0}},
    {"allowed_token_ids": [1, 2, 3]},
    {"words": [[1], [2, 3]]},
    {"min_tokens": 4, "ends": [1, 2]},
    {"allowed_token_ids": [1, 2], "logit_bias": {1: 5.0}, "repetition_penalty": 0.5, "min_tokens": 4, "ends": [2]},
]


@pytest.mark.parametrize("params", ADJUSTED, ids=str)
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"logprobs": 3}, {"top_k": 2}], ids=str)
def test_nothing_that_is_asked_makes_a_token_of_a_row_of_nan(params, more):
    logits = spread(4)
    draws = [draw([5, 6], [2], **params, **more) for _ in range(4)]
    good = drawn(logits, draws)
    assert all(one.error is None for one in good)
    logits[1] = NAN
    assert drawn(logits, draws) == [good[0], Drawn(None, error=NOT_FINITE), *good[2:]]


@pytest.mark.parametrize("params", ADJUSTED, ids=str)
def test_token_that_the_model_excludes_is_never_drawn(params):
    logits = spread(1)
    logits[0, ::2] = -INF
    logits = logits.expand(300, -1)
    found = drawn(logits, [draw([5, 6], [2] * place, **params) for place in range(300)])
    assert all(one.error is None and one.token_id % 2 == 1 for one in found)


# Filters


FILTERS = [
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": 199},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.3},
    {"min_p": 0.01},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.8, "top_k": 50, "min_p": 0.05},
    {"temperature": 1.5, "min_p": 0.1, "repetition_penalty": 1.4},
    {"temperature": 2.0, "top_p": 0.8, "repetition_penalty": 0.5},
]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_shares_of_the_tokens_are_those_of_transformers(monkeypatch, params, seed):
    count, size = 4000, 200
    logits = spread(1, size, seed)[0]
    prompt, output = [1, 2, *logits.topk(3).indices.tolist()], [7, 8]
    made = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    theirs = LogitsProcessorList([make(params[name]) for name, make in made.items() if name in params])
    wanted = transformed(theirs, logits, prompt + output).double().softmax(-1).numpy()
    monkeypatch.setattr(sampler, "uniforms", lambda draws: (np.arange(len(draws)) + 0.5) / len(draws))
    found = [one.token_id for one in drawn(logits.expand(count, -1), [draw(prompt, output, **params)] * count)]
    assert found == sorted(found)
    assert np.abs(np.bincount(found, minlength=size) / count - wanted).max() < 1.1 / count


# Processors of the user's own


def add_to_3(prompt_token_ids, output_token_ids, logits):
    logits[3] += 1.0
    return logits


def double_it(prompt_token_ids, output_token_ids, logits):
    return logits * 2


def shift_by_history(prompt_token_ids, output_token_ids, logits):
    return logits + 0.25 * len(prompt_token_ids) + torch.arange(len(logits)) * 0.125 * sum(output_token_ids)


class Holder:
    @staticmethod
    def triple_it(prompt_token_ids, output_token_ids, logits):
        return logits * 3


@pytest.fixture
def registered(monkeypatch):
    """Names that are known, in place of those of this process."""
    names = {}
    monkeypatch.setattr(logits_processors, "_registered", names)
    return names


@pytest.fixture
def module(monkeypatch):
    """A module that can be imported under the name `of_a_user`."""
    made = types.ModuleType("of_a_user")
    made.double_it, made.Holder, made.number = double_it, Holder, 5
    monkeypatch.setitem(sys.modules, "of_a_user", made)
    return made


def test_processor_is_found_by_name_by_path_and_as_it_is(registered, module):
    register_logits_processor("doubling", double_it)
    logits = spread(1)[0]
    for way in ("doubling", "of_a_user:double_it", double_it, functools.partial(double_it)):
        assert same_bits(adjusted(logits, draw([1], [2], logits_processors=[way])), logits * 2)
    assert same_bits(adjusted(logits, draw([1], [2], logits_processors=["of_a_user:Holder.triple_it"])), logits * 3)


def test_later_registration_takes_the_place_of_the_earlier(registered):
    register_logits_processor("mine", double_it)
    register_logits_processor("mine", add_to_3)
    assert find("mine") is add_to_3


@pytest.mark.parametrize(
    ("name", "processor"), [("", double_it), ("a:b", double_it), (5, double_it), (None, double_it), ("a", 5), ("a", "b")]
)
def test_registration_of_nonsense_is_refused(registered, name, processor):
    with pytest.raises(InvalidValueError, match=r"^(name|processor): .*; allowed: "):
        register_logits_processor(name, processor)
    assert not registered


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("unknown", r"'unknown' is not registered \(mine\); allowed also: module:function"),
        ("no_such_module:f", "cannot be imported .*no_such_module"),
        ("of_a_user:missing", "cannot be imported .*missing"),
        ("of_a_user:Holder.missing", "cannot be imported .*missing"),
        ("of_a_user:number", "is no callable"),
        ("of_a_user:", "cannot be imported"),
        (":double_it", "cannot be imported"),
        (":", "cannot be imported"),
        ("..:x", "cannot be imported"),
    ],
)
def test_processor_that_cannot_be_found_is_refused_by_name(registered, module, way, reason):
    register_logits_processor("mine", double_it)
    with pytest.raises(InvalidValueError, match=rf"^logits_processors: .*{reason}"):
        draw([1], [], logits_processors=[way])


def test_module_that_fails_when_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_at_import.py").write_text("1 / 0")
    with pytest.raises(InvalidValueError, match=r"^logits_processors: 'fails_at_import:f' cannot be imported \(ZeroDivisionError: "):
        find("fails_at_import:f")


def test_processors_are_called_in_order_after_biases_and_before_penalties():
    logits = spread(1)[0].abs() + 1
    params = {"logit_bias": {3: 5.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0, "logits_processors": [add_to_3, double_it]}
    wanted = logits.clone()
    wanted[3] += 5.0
    wanted[3] += 1.0
    wanted *= 2
    wanted[3] = wanted[3] / 2.0 - 1.0
    assert same(adjusted(logits, draw([1], [3], **params))[3:4], wanted[3:4])
    other = adjusted(logits, draw([1], [3], **{**params, "logits_processors": [double_it, add_to_3]}))
    assert other[3].item() == pytest.approx((((logits[3].item() + 5) * 2) + 1) / 2 - 1, rel=1e-6)


def test_processor_sees_prompt_output_and_float32_logits_and_cannot_change_the_history():
    seen = []

    def watch(prompt_token_ids, output_token_ids, logits):
        seen.append((list(prompt_token_ids), list(output_token_ids), logits.dtype, tuple(logits.shape)))
        prompt_token_ids.append(5)
        output_token_ids.clear()
        kept = logits.clone()
        logits.fill_(NAN)
        return kept

    logits = spread(2)
    draws = [draw([1, 2], [3, 4], logits_processors=[watch, watch]), draw([1, 2], [])]
    found, errors = adjust(logits, draws)
    assert not errors
    assert same_bits(found, logits)
    assert seen == [([1, 2], [3, 4], torch.float32, (SIZE,))] * 2
    assert draws[0].history == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_processor_may_answer_in_any_dtype(dtype):
    logits = torch.arange(SIZE).float()
    assert same_bits(adjusted(logits, draw([1], [], logits_processors=[lambda prompt, output, x: x.to(dtype)])), logits)


def raise_it(error):
    raise error


FAILURES = {
    "raises": lambda logits: raise_it(ValueError("it is broken")),
    "raises what says nothing": lambda logits: raise_it(KeyError()),
    "has a bug": lambda logits: logits.nonsense,
    "asserts": lambda logits: raise_it(AssertionError()),
    "recurses": lambda logits: FAILURES["recurses"](logits),
    "returns nothing": lambda logits: None,
    "returns a list": lambda logits: logits.tolist(),
    "returns an array": lambda logits: logits.numpy(),
    "returns too few": lambda logits: logits[1:],
    "returns too many": lambda logits: torch.cat((logits, logits)),
    "returns a batch": lambda logits: logits[None],
    "returns one": lambda logits: logits.sum(),
    "returns nan": lambda logits: logits * NAN,
    "returns one nan": lambda logits: torch.where(torch.arange(SIZE) == 4, NAN, logits),
    "returns infinity": lambda logits: torch.where(torch.arange(SIZE) == 4, INF, logits),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=list(FAILURES))
def test_processor_that_fails_ends_its_row_alone_and_is_named(failure):
    def broken(prompt_token_ids, output_token_ids, logits):
        return failure(logits)

    logits = spread(3)
    others = [draw([1], [2], repetition_penalty=1.5, logprobs=3), draw([1], [], temperature=0)]
    draws = [others[0], draw([1], [2], logits_processors=[add_to_3, broken, add_to_3], presence_penalty=1.0, logprobs=3), others[1]]
    found = drawn(logits, draws)
    assert found[1].token_id is None
    assert found[1].logprobs is None
    assert found[::2] == drawn(logits[::2], others)
    assert "broken" in found[1].error


def test_processor_that_fails_is_named_as_the_request_named_it(registered, module):
    register_logits_processor("mine", lambda *given: raise_it(ValueError("it is broken")))
    module.theirs = functools.partial(lambda *given: None)
    for name in ("mine", "of_a_user:theirs"):
        (found,) = drawn(spread(1), [draw([1], [2], logits_processors=[name])])
        assert name in found.error


def test_processor_that_excludes_every_token_ends_its_row_alone():
    logits = spread(2)
    draws = [draw([1], [], logits_processors=[lambda prompt, output, x: x.fill_(-INF)]), draw([1], [])]
    found = drawn(logits, draws)
    assert found[0].token_id is None
    assert found[0].error == NOTHING_LEFT
    assert found[1:] == drawn(logits[1:], draws[1:])


def test_scores_do_not_see_what_processors_make():
    logits = spread(1)
    (found,) = drawn(logits, [draw([1], [], logits_processors=[lambda prompt, output, x: -x], temperature=0, logprobs=2)])
    raw = logits[0].double().log_softmax(-1)
    assert found.token_id == raw.argmin()
    assert found.logprobs[0].rank == SIZE
    assert math.isclose(found.logprobs[0].logprob, raw.min().item(), rel_tol=1e-5)
