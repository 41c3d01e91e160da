"""What a request may ask: every field's range, and one clear sentence for what lies outside."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.request import Request
from octavo.errors import InvalidValueError, OctavoError, UnsupportedError
from octavo.sampling_params import MAX_ANSWERS, MAX_LOGPROBS, MAX_SEED, NOT_YET, SamplingParams

NAN, INF = float("nan"), float("inf")
HUGE = 2**31 - 1

GOOD = {
    "temperature": [0, 0.0, 1e-6, 1, 2.5, 1e6],
    "top_k": [-1, 0, 1, HUGE],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, -1, MAX_SEED, -MAX_SEED - 1],
    "max_tokens": [None, 1, HUGE],
    "stop_token_ids": [(), (0,), (1, HUGE)],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "timeout_ms": [None, 0.1, 1, 1e12],
    "n": [1, 2, MAX_ANSWERS],
    "prompt_logprobs": [None, 0, 1, MAX_LOGPROBS],
    "priority": [0, -1, -HUGE - 1, HUGE],
    "cache_salt": [None, "x", "東京", "x" * 1000],
}
BAD = {
    "temperature": [-0.1, 1e7, NAN, INF, -INF, "1", None, True, [1], 10**400, 1j],
    "top_k": [-2, HUGE + 1, 1.0, "5", None, True, NAN],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, INF, "1", None, True, 10**400],
    "min_p": [-0.1, 1.01, NAN, INF, "0", None, False, -(10**400)],
    "seed": [MAX_SEED + 1, -MAX_SEED - 2, 1.0, "1", True, 10**5000],
    "max_tokens": [0, -1, HUGE + 1, 1.5, "16", True],
    "stop_token_ids": [None, 5, "5", (-1,), (HUGE + 1,), (1.0,), (True,), ("a",), (None,), {1}],
    "ignore_eos": [None, 0, 1, "true"],
    "skip_special_tokens": [None, 0, "no"],
    "timeout_ms": [0, -1, 1e13, NAN, INF, "5", True, 10**400],
    "n": [0, -1, MAX_ANSWERS + 1, 1.0, 1.5, "1", None, True, [], {}],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True, [1], NAN],
    "priority": [-HUGE - 2, HUGE + 1, 0.5, 1.0, "1", None, False],
    "cache_salt": ["", 5, b"x", True, ["x"]],
}
ASKED = {
    "presence_penalty": [0.5, -1],
    "frequency_penalty": [0.5],
    "repetition_penalty": [1.1],
    "stop": ["\n", ["a"]],
    "bad_words": [["x"]],
    "include_stop_str_in_output": [True],
    "min_tokens": [4],
    "logprobs": [0, 5],
    "detokenize": [False],
    "spaces_between_special_tokens": [False],
    "logit_bias": [{1: 100.0}],
    "allowed_token_ids": [[1]],
    "structured_outputs": [{"regex": "a"}],
    "output_kind": [1],
}


def pairs(table):
    return [pytest.param(name, value, id=f"{name}-{place}") for name, values in table.items() for place, value in enumerate(values)]


def test_tables_cover_every_field():
    assert list(GOOD) == list(BAD)
    assert list(ASKED) == list(NOT_YET)
    assert {*GOOD, *ASKED} == set(SamplingParams.__struct_fields__)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.max_tokens) == (1.0, 0, 1.0, 0.0, None, 16)
    assert (params.stop_token_ids, params.ignore_eos, params.skip_special_tokens, params.repetition_penalty) == ((), False, True, 1.0)
    assert (params.n, params.prompt_logprobs, params.priority, params.cache_salt) == (1, None, 0, None)


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_value_is_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value
    assert SamplingParams.create(**{name: value}) == SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_value_is_refused_with_name_value_and_range(name, value):
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{name: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{name}: ")
    assert "; allowed: " in sentence
    assert "\n" not in sentence


def test_sentence_names_field_value_and_range():
    for values, sentence in (
        ({"temperature": -0.5}, "temperature: -0.5; allowed: a number from 0 to 1e+06"),
        ({"top_p": 0}, "top_p: 0; allowed: a number above 0 to 1"),
        ({"max_tokens": 0}, "max_tokens: 0; allowed: a whole number from 1 to 2147483647"),
        ({"stop_token_ids": [3, -4]}, "stop_token_ids: -4; allowed: a whole number from 0 to 2147483647"),
        ({"stop_token_ids": "ab"}, "stop_token_ids: 'ab'; allowed: a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos: 1; allowed: true or false"),
        ({"n": 0}, "n: 0; allowed: a whole number from 1 to 1024"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21; allowed: a whole number from 0 to 20"),
        ({"priority": 0.5}, "priority: 0.5; allowed: a whole number from -2147483648 to 2147483647"),
        ({"cache_salt": ""}, "cache_salt: ''; allowed: a text that is not empty"),
    ):
        with pytest.raises(InvalidValueError) as caught:
            SamplingParams(**values)
        assert str(caught.value) == sentence


@pytest.mark.parametrize(("name", "value"), pairs(ASKED))
def test_what_is_not_offered_yet_is_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=rf"^{name}: .*not available in this version"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NOT_YET)
def test_default_of_what_is_not_offered_yet_may_be_given(name):
    default = getattr(SamplingParams(), name)
    assert SamplingParams(**{name: default}) == SamplingParams()


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_has_as_many_sequences_as_answers_are_asked(count):
    request = Request("a", [1], SamplingParams(n=count), arrival=0.0, max_length=2)
    assert [sequence.choice for sequence in request.sequences] == list(range(count))


def test_list_of_stop_ids_becomes_a_tuple():
    ids = [3, 4]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(5)
    assert params.stop_token_ids == (3, 4)


def test_unknown_field_is_refused_by_name():
    with pytest.raises(InvalidValueError, match="temprature: no such sampling parameter; allowed: temperature, top_k"):
        SamplingParams.create(temprature=1)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (9e-6, True), (1e-5, False), (1e-4, False), (1.0, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
def test_encoding_keeps_everything(form):
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-5, max_tokens=None, stop_token_ids=[1], timeout_ms=3.0)
    assert form.decode(form.encode(params), type=SamplingParams) == params
    params = SamplingParams(n=3, prompt_logprobs=0, priority=-7, cache_salt="a user's")
    assert form.decode(form.encode(params), type=SamplingParams) == params


def test_decoding_checks_as_construction_does():
    with pytest.raises(msgspec.ValidationError, match="top_p: 2"):
        msgspec.json.decode(b'{"top_p": 2}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"tpo_p": 1}', type=SamplingParams)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.sampled_from([*SamplingParams.__struct_fields__, "nonsense"]), VALUES, max_size=4))
def test_any_values_give_parameters_or_one_clear_sentence(values):
    try:
        params = SamplingParams.create(**values)
    except OctavoError as error:
        refusal = error
    else:
        assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
        return
    assert isinstance(refusal, ValueError)
    assert str(refusal).split(":")[0] in values


@pytest.mark.parametrize("fields", [{"presence_penalty": 0}, {"repetition_penalty": 1}, {"stop": []}, {"logit_bias": {}}], ids=str)
def test_what_asks_for_nothing_is_accepted_however_it_is_spelled(fields):
    SamplingParams(**fields)
