"""What a request may ask: every field's range, and one clear sentence for what lies outside."""

import contextlib
import re

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.request import Request
from octavo.errors import InvalidValueError, OctavoError
from octavo.sampling_params import (
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PROCESSORS,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    OUTPUT_KINDS,
    STRUCTURES,
    SamplingParams,
    StructuredOutputsParams,
)

NAN, INF = float("nan"), float("inf")
HUGE = 2**31 - 1
MAX_FLOAT32 = 3.4e38


def processor(prompt_token_ids, output_token_ids, logits):
    return logits


GOOD = {
    "n": [1, 2, MAX_ANSWERS],
    "presence_penalty": [0, 0.5, -1, 2, -2.0],
    "frequency_penalty": [0, 0.5, -1, 2.0, -2],
    "repetition_penalty": [1, 1.1, 0.01, 1e6],
    "temperature": [0, 0.0, 1e-6, 1, 2.5, 1e6],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, HUGE],
    "min_p": [0, 0.5, 1],
    "seed": [None, 0, -1, MAX_SEED, -MAX_SEED - 1],
    "stop": [(), ("a",), ("\n", "東京"), ("x" * MAX_STOP_LENGTH,), ("a",) * MAX_STOPS],
    "stop_token_ids": [(), (0,), (1, HUGE)],
    "bad_words": [(), ("a",), (" ", "東京"), ("a",) * MAX_BAD_WORDS],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "max_tokens": [None, 1, HUGE],
    "min_tokens": [0, 1, 16],
    "logprobs": [None, 0, 1, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, 1, MAX_LOGPROBS],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "logit_bias": [None, {}, {1: 100.0}, {0: -100, HUGE: 0.5}, dict.fromkeys(range(MAX_BIASES), 1.0)],
    "allowed_token_ids": [None, (0,), (5, 5, HUGE)],
    "structured_outputs": [None, *[StructuredOutputsParams(**{name: "a"}) for name in ("json", "regex", "grammar")]],
    "output_kind": list(OUTPUT_KINDS),
    "logits_processors": [(), ("name",), ("module:function", processor), (processor,) * MAX_PROCESSORS],
    "timeout_ms": [None, 0.1, 1, 1e12],
    "priority": [0, -1, -HUGE - 1, HUGE],
    "cache_salt": [None, "x", "東京", "x" * 1000],
}
BAD = {
    "n": [0, -1, MAX_ANSWERS + 1, 1.0, 1.5, "1", None, True, [], {}],
    "presence_penalty": [-2.1, 2.1, NAN, INF, -INF, "1", None, True, [1], 10**400, 1j],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, -INF, "1", None, False, {}, -(10**400), b"1"],
    "repetition_penalty": [0, 0.0, -0.0, -1, 1.1e6, NAN, INF, "1", None, True, 10**400],
    "temperature": [-0.1, 1e7, NAN, INF, -INF, "1", None, True, [1], 10**400, 1j],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, INF, "1", None, True, 10**400],
    "top_k": [-2, HUGE + 1, 1.0, "5", None, True, NAN],
    "min_p": [-0.1, 1.01, NAN, INF, "0", None, False, -(10**400)],
    "seed": [MAX_SEED + 1, -MAX_SEED - 2, 1.0, "1", True, 10**5000],
    "stop": [
        *["", 5, 0, True, False, b"a", {"a": 1}, {"a"}, [""], ["a", ""], [5], [None], [["a"]]],
        *[["x" * (MAX_STOP_LENGTH + 1)], ["a"] * (MAX_STOPS + 1)],
    ],
    "stop_token_ids": [5, "5", (-1,), (HUGE + 1,), (1.0,), (True,), ("a",), (None,), {1}, 0, False, "", {}, 0.0],
    "bad_words": [
        *["", "a", 5, 0, False, b"a", {"a": 1}, {"a"}, [""], ["a", ""], [5], [None], [["a"]]],
        *[["x" * (MAX_STOP_LENGTH + 1)], ["a"] * (MAX_BAD_WORDS + 1)],
    ],
    "include_stop_str_in_output": [None, 0, 1, "true", []],
    "ignore_eos": [None, 0, 1, "true"],
    "max_tokens": [0, -1, HUGE + 1, 1.5, "16", True],
    "min_tokens": [-1, 17, 1.0, "1", None, True, NAN, 10**400],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True, [1], NAN],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True, [1], NAN],
    "detokenize": [None, 0, 1, "no"],
    "skip_special_tokens": [None, 0, "no"],
    "spaces_between_special_tokens": [None, 0, "no"],
    "logit_bias": [
        *[5, 0, False, "", [], [1], [(1, 2)], {-1: 1}, {HUGE + 1: 1}, {1.0: 1}, {True: 1}, {None: 1}, {b"1": 1}],
        *[{"a": 1}, {"": 1}, {"-1": 1}, {"1.0": 1}, {"9" * 11: 1}, {"\uff11": 1}, {" 1": 1}, dict.fromkeys(range(MAX_BIASES + 1), 1)],
    ],
    "allowed_token_ids": [(), [], 5, 0, False, "", "5", {}, (-1,), (HUGE + 1,), (1.0,), (True,), ("a",), (None,), {1}],
    "structured_outputs": [5, 0, False, "", "json", [], {}, {"nonsense": 1}, {1: 2}, {"json": None}, {"regex": "a", "choice": ["a"]}],
    "output_kind": [None, "", "Delta", "CUMULATIVE", 0, 1, True, ["delta"], {}, b"delta", NAN],
    "logits_processors": [5, 0, False, "", "name", [5], [None], {"a": 1}, {processor}, processor, ["a"] * (MAX_PROCESSORS + 1)],
    "timeout_ms": [0, -1, 1e13, NAN, INF, "5", True, 10**400],
    "priority": [-HUGE - 2, HUGE + 1, 0.5, 1.0, "1", None, False],
    "cache_salt": ["", 5, b"x", True, ["x"]],
}
BAD_BIASES = [101, -100.5, NAN, INF, -INF, "1", None, True, 10**400, 1j, [1]]
GOOD_STRUCTURES = [
    {"json": {}},
    {"json": {"type": "object", "properties": {"a": {"enum": [1, "x", None, 0.5, True]}}}},
    {"json": "{}"},
    {"json_object": True},
    {"regex": "[a-z]+"},
    {"choice": ["a", "b", "東京"]},
    {"choice": ("a",)},
    {"grammar": 'start: "a"'},
    {"regex": "a", "json_object": False},
    {"regex": "a", "json": None, "choice": None},
    {"json": {}, "disable_any_whitespace": False, "whitespace_pattern": " ?"},
    {"json": {}, "disable_any_whitespace": False},
]
BAD_STRUCTURES = [
    *[{"json": value} for value in (5, 0, False, True, [], 1.5, b"{}", None, 1j)],
    *[{"json": value} for value in ({"a": 1j}, {"a": b"x"}, {"a": {1, 2}}, {(1, 2): 3})],
    *[{"json_object": value} for value in (False, 0, 1, "", "yes", [], {}, 0.0, b"")],
    *[{"regex": value} for value in ("", 5, 0, False, True, [], ["a"], b"a", None)],
    *[{"grammar": value} for value in ("", 5, 0, False, True, {}, b"a", None)],
    *[{"choice": value} for value in ("", "ab", [], [""], ["a", ""], [5], [None], {"a": 1}, {"a"}, 5, 0, False, True, None)],
    *[{"regex": "a", name: value} for name in ("json", "choice", "grammar") for value in (False, 0)],
    *[{"regex": "a", "json_object": value} for value in (0, "", [], 0.0)],
    *[{"json": {}, "disable_any_whitespace": value} for value in (None, 0, 1, "", "no", [])],
    *[{"json": {}, "disable_any_whitespace": False, "whitespace_pattern": value} for value in ("", 5, False, [], b" ")],
    {"json": {}, "whitespace_pattern": " ?"},
    {"regex": "a", "grammar": "b"},
    {"json_object": True, "json": {}},
    {"regex": "a", "jsno": {}},
    {"regex": "a", 5: {}},
]


def pairs(table):
    return [pytest.param(name, value, id=f"{name}-{place}") for name, values in table.items() for place, value in enumerate(values)]


def test_tables_cover_every_field():
    assert list(GOOD) == list(BAD) == list(SamplingParams.__struct_fields__)


def test_defaults_are_vllms():
    assert {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__} == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "bad_words": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
        "output_kind": "cumulative",
        "logits_processors": (),
        "timeout_ms": None,
        "priority": 0,
        "cache_salt": None,
    }


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
    assert "allowed: " in sentence or "no field" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize("bias", BAD_BIASES, ids=repr)
@pytest.mark.parametrize("key", [7, "7", "007"])
def test_bad_bias_is_refused_with_the_token_it_is_for(key, bias):
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(logit_bias={1: 0.5, key: bias})
    assert str(caught.value).startswith("logit_bias[7]: ")
    assert str(caught.value).endswith("; allowed: a number from -100 to 100")


@pytest.mark.parametrize("fields", GOOD_STRUCTURES, ids=str)
def test_good_structure_is_taken_as_a_mapping_and_as_it_is(fields):
    params = SamplingParams(structured_outputs=fields)
    assert params.structured_outputs == StructuredOutputsParams(**fields) == StructuredOutputsParams.create(fields)
    assert SamplingParams(structured_outputs=params.structured_outputs) == params
    for form in (msgspec.json, msgspec.msgpack):
        assert form.decode(form.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("fields", BAD_STRUCTURES, ids=str)
def test_bad_structure_is_refused_in_one_sentence(fields):
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(structured_outputs=fields)
    sentence = str(caught.value)
    assert sentence.startswith(("structured_outputs: ", "structured_outputs."))
    assert "\n" not in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "a\ud800"},
        {"bad_words": ["\ud800"]},
        {"cache_salt": "\udfff"},
        *[{"structured_outputs": {name: "\ud800"}} for name in ("json", "regex", "grammar")],
        {"structured_outputs": {"choice": ["a", "\ud800"]}},
    ],
    ids=ascii,
)
def test_text_that_is_no_unicode_is_refused_by_the_name_of_its_field(fields):
    # No worker in another process could be told of it, and no tokenizer knows it.
    (name,) = fields
    with pytest.raises(InvalidValueError, match=f"^{name}[:.]"):
        SamplingParams(**fields)


def test_tables_cover_every_structure():
    assert {*STRUCTURES, "disable_any_whitespace", "whitespace_pattern"} == set(StructuredOutputsParams.__struct_fields__)
    for name in StructuredOutputsParams.__struct_fields__:
        assert any(name in fields for fields in GOOD_STRUCTURES)
        assert any(name in fields for fields in BAD_STRUCTURES)


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
        ({"repetition_penalty": 0}, "repetition_penalty: 0; allowed: a number from 1e-06 to 1e+06"),
        ({"presence_penalty": 3}, "presence_penalty: 3; allowed: a number from -2 to 2"),
        ({"min_tokens": 17}, "min_tokens: 17; allowed: a whole number from 0 to 16"),
        ({"logprobs": 21}, "logprobs: 21; allowed: a whole number from 0 to 20"),
        ({"stop": ["a", 1]}, "stop: ['a', 1]; allowed: a list of texts of 1 to 4096 characters"),
        ({"stop": ["a"] * 65}, "stop: 65 texts; allowed: 64 at most"),
        ({"bad_words": "a"}, "bad_words: 'a'; allowed: a list of texts of 1 to 4096 characters"),
        ({"logit_bias": [1]}, "logit_bias: [1]; allowed: {token id: a number from -100 to 100}"),
        ({"logit_bias": {"x": 1}}, "logit_bias: 'x'; allowed: a whole number from 0 to 2147483647"),
        ({"logit_bias": {"3": 101}}, "logit_bias[3]: 101; allowed: a number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias: 1025 entries; allowed: 1024 at most"),
        ({"allowed_token_ids": []}, "allowed_token_ids: it is empty; allowed: None, or a list of at least one token id"),
        ({"output_kind": "all"}, "output_kind: 'all'; allowed: cumulative, delta, final"),
        ({"logits_processors": "x"}, "logits_processors: 'x'; allowed: a list of names, import paths and callables"),
        ({"logits_processors": ["x"] * 17}, "logits_processors: 17 of them; allowed: 16 at most"),
        ({"structured_outputs": {}}, "structured_outputs: nothing is given; allowed: one of json, json_object, regex, choice, grammar"),
        ({"structured_outputs": {"choice": ()}}, "structured_outputs.choice: (); allowed: a list of texts, none of them empty"),
        ({"stop": "a", "detokenize": False}, "stop: it is looked for in the text; allowed: with detokenize: true"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos: true; allowed: false where structured_outputs are asked for, which end with the text",
        ),
    ):
        with pytest.raises(InvalidValueError) as caught:
            SamplingParams(**values)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_has_as_many_sequences_as_answers_are_asked(count):
    request = Request("a", [1], SamplingParams(n=count), arrival=0.0, max_length=2)
    assert [sequence.choice for sequence in request.sequences] == list(range(count))


@pytest.mark.parametrize(
    ("name", "value", "more", "taken"),
    [
        ("stop_token_ids", [3, 4], 5, (3, 4)),
        ("stop", ["a", "b"], "c", ("a", "b")),
        ("bad_words", ["a"], "c", ("a",)),
        ("allowed_token_ids", [3], 4, (3,)),
        ("logits_processors", ["a", processor], "b", ("a", processor)),
    ],
)
def test_list_becomes_a_tuple_that_its_giver_cannot_change(name, value, more, taken):
    params = SamplingParams(**{name: value})
    value.append(more)
    assert getattr(params, name) == taken


def test_mappings_are_taken_as_they_were_when_given():
    biases, choice = {1: 1}, ["a"]
    params = SamplingParams(logit_bias=biases, structured_outputs={"choice": choice})
    biases[2] = 2
    choice.append("b")
    assert params.logit_bias == {1: 1.0}
    assert params.structured_outputs.choice == ("a",)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("stop", "end", ("end",)),
        ("stop", None, ()),
        ("stop", [], ()),
        ("stop_token_ids", None, ()),
        ("bad_words", None, ()),
        ("logits_processors", None, ()),
        ("logit_bias", {"17": 3, "0": -1.5, 4: 2}, {17: 3.0, 0: -1.5, 4: 2.0}),
    ],
)
def test_what_may_be_given_in_several_forms_takes_one(name, value, taken):
    assert getattr(SamplingParams(**{name: value}), name) == taken


def test_min_tokens_goes_up_to_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=HUGE, max_tokens=None).min_tokens == HUGE
    with pytest.raises(InvalidValueError, match=r"^min_tokens: 6; allowed: a whole number from 0 to 5$"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize("penalty", [1e-30, 1e-36, 1e-45, 1e-300])
def test_penalty_that_is_taken_makes_no_logit_infinite(penalty):
    with contextlib.suppress(InvalidValueError):
        assert 1e4 / SamplingParams(repetition_penalty=penalty).repetition_penalty < MAX_FLOAT32


def test_unknown_field_is_refused_by_name():
    with pytest.raises(InvalidValueError, match="temprature: no such sampling parameter; allowed: n, presence_penalty"):
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
    for name, values in GOOD.items():
        for value in values:
            if name != "logits_processors" or not any(map(callable, value)):
                params = SamplingParams(**{name: value})
                assert form.decode(form.encode(params), type=SamplingParams) == params


def test_decoding_checks_as_construction_does():
    with pytest.raises(msgspec.ValidationError, match="top_p: 2"):
        msgspec.json.decode(b'{"top_p": 2}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"tpo_p": 1}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="min_tokens: 17"):
        msgspec.json.decode(b'{"min_tokens": 17}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="structured_outputs: regex, grammar is given"):
        msgspec.json.decode(b'{"structured_outputs": {"regex": "a", "grammar": "b"}}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"structured_outputs": {"rgex": "a"}}', type=SamplingParams)


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


FIELDS = st.sampled_from([*SamplingParams.__struct_fields__, "nonsense"])
LIKELY = st.sampled_from([(name, value) for table in (GOOD, BAD) for name, values in table.items() for value in values])
STRUCTURED = st.dictionaries(
    st.sampled_from([*StructuredOutputsParams.__struct_fields__, "nonsense"]),
    VALUES | st.sampled_from([value for fields in GOOD_STRUCTURES + BAD_STRUCTURES for value in fields.values()]),
    max_size=3,
)


def assert_parameters_or_one_clear_sentence(values):
    try:
        params = SamplingParams.create(**values)
    except OctavoError as error:
        refusal = error
    else:
        if not any(map(callable, params.logits_processors)):
            for form in (msgspec.json, msgspec.msgpack):
                decoded = form.decode(form.encode(params), type=SamplingParams)
                if params.structured_outputs is None:
                    assert decoded == params
                else:  # a schema may hold a NaN, or tuples, which decode to lists
                    assert form.encode(form.decode(form.encode(decoded), type=SamplingParams)) == form.encode(decoded)
        return
    assert isinstance(refusal, ValueError)
    assert "\n" not in str(refusal)
    assert len(str(refusal)) < 1000
    assert re.split(r"[:.\[]", str(refusal))[0] in values


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_values_give_parameters_or_one_clear_sentence(values):
    assert_parameters_or_one_clear_sentence(values)


@settings(max_examples=300, deadline=None)
@given(st.lists(LIKELY, max_size=6))
def test_any_values_together_give_parameters_or_one_clear_sentence(values):
    assert_parameters_or_one_clear_sentence(dict(values))


@settings(max_examples=600, deadline=None)
@given(STRUCTURED)
@example({"json_object": ""})
@example({"json": {"a": 1j}})
@example({"regex": "a", "choice": False})
def test_any_structure_gives_parameters_or_one_clear_sentence(fields):
    assert_parameters_or_one_clear_sentence({"structured_outputs": fields})


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 0}, {"repetition_penalty": 1}, {"stop": []}, {"logit_bias": {}}, {"bad_words": None}, {"logits_processors": []}],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted_however_it_is_spelled(fields):
    SamplingParams(**fields)
