"""Structures: what they let through at each token, what they refuse and why, and what they cost."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidValueError
from octavo.sampling_params import StructuredOutputsParams
from octavo.text import grammar
from octavo.text.grammar import Grammars, Matcher
from octavo.text.tokenizer import Tokenizer

END = 2  # of all three vocabularies
SECONDS = 5.0


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    from octavo.loading import open_checkpoint

    checkpoint = open_checkpoint(smollm2_gguf)
    try:
        assert checkpoint.metadata is not None
        return Tokenizer.from_gguf(checkpoint.metadata)
    finally:
        checkpoint.close()


@pytest.fixture(scope="module", params=["byte level", "SentencePiece", "SmolLM2"])
def grammars(request: pytest.FixtureRequest, spm_metadata: Callable[..., Any]) -> Grammars:
    if request.param == "SentencePiece":
        return Grammars(Tokenizer.from_gguf(spm_metadata()))
    return Grammars(request.getfixturevalue("smollm2" if request.param == "SmolLM2" else "bpe_tokenizer"))


@pytest.fixture(scope="module")
def small(bpe_tokenizer: Tokenizer) -> Grammars:
    return Grammars(bpe_tokenizer)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of this thread's own work, which may be interrupted."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def start(grammars: Grammars, **asked: Any) -> Matcher:
    return grammars.matcher(StructuredOutputsParams(**asked), [END])


def tokenizer_of(grammars: Grammars) -> Tokenizer:
    return grammars._tokenizer


def allowed(matcher: Matcher, grammars: Grammars, words: int | None = None) -> list[int]:
    bits = np.zeros(words or -(-tokenizer_of(grammars).vocab_size // 32), dtype=np.int32)
    matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def fits(grammars: Grammars, text: str, seed: int = 0, **asked: Any) -> bool:
    """Whether tokens that are let through can spell a text, and may end there."""
    source, tokenizer, matcher = random.Random(seed), tokenizer_of(grammars), start(grammars, **asked)
    rest, token_ids = text.encode(), []
    while rest:
        open_to = [one for one in allowed(matcher, grammars) if one != END and rest.startswith(tokenizer.token_bytes(one))]
        if not open_to:
            return False
        token_ids.append(source.choice(open_to))
        rest = rest[len(tokenizer.token_bytes(token_ids[-1])) :]
        matcher.follow(list(token_ids))
    return END in allowed(matcher, grammars)


def wander(grammars: Grammars, seed: int, most: int = 200, **asked: Any) -> tuple[list[int], bool]:
    """Tokens drawn evenly among those let through, and whether an end came; the end is not among them."""
    source, matcher, token_ids = random.Random(seed), start(grammars, **asked), []
    for _ in range(most):
        matcher.follow(list(token_ids))
        open_to = allowed(matcher, grammars)
        assert open_to, "there is always something to draw"
        if END in open_to and (len(open_to) == 1 or source.random() < 0.3):
            return token_ids, True
        token_ids.append(source.choice([one for one in open_to if one != END]))
    return token_ids, False


def refusal(matcher: Matcher, token_ids: list[int]) -> str:
    """Why these tokens are refused, if they are."""
    try:
        matcher.follow(list(token_ids))
    except ValueError as error:
        return str(error)
    return ""


def spelled(grammars: Grammars, token_ids: list[int]) -> str:
    return b"".join(map(tokenizer_of(grammars).token_bytes, token_ids)).decode()


# What is let through

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

FITTING: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": PERSON},
        ['{"name":"Zoé","age":7}', '{"name":"","age":150}', '{"name":"\\n\\"","age":0}'],
        [
            '{"name":"a"}',
            '{"name":"a","age":151}',
            '{"name":"a","age":7,"x":1}',
            '{"name": "a","age":7}',
            '{"name":"123456789","age":7}',
            "",
        ],
    ),
    ({"json": json.dumps({"type": "boolean"})}, ["true", "false"], ["True", "", "tru", "true "]),
    ({"json": {"enum": ["é", 1, None, {"a": [1]}]}}, ['"é"', "1", "null", '{"a":[1]}'], ["é", "2", '"e"', "{}"]),
    ({"json": "true"}, ["1", '"x"', "[]", "{}", "null"], ["", "x"]),
    ({"json_object": True}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", '"{}"', "{} ", ""]),
    ({"regex": r"[0-9]{3}-[a-f]+"}, ["123-abc", "000-f"], ["12-abc", "123-", "123-abg", "x123-a"]),
    ({"regex": r"^\d{2}$"}, ["42"], ["4", "421"]),
    ({"regex": "東京|🙂+"}, ["東京", "🙂", "🙂🙂"], ["東", "京", ""]),
    ({"regex": "a{0}"}, [""], ["a"]),
    ({"choice": ["yes", "no", "yes, sir"]}, ["yes", "no", "yes, sir"], ["", "y", "yes,", "maybe"]),
    (
        {"choice": ['"', "\\", "\n", "🙂\t", "/a/i", '"x"i', "\x00", "\u2028"]},
        ['"', "\\", "\n", "🙂\t", "/a/i", '"x"i', "\x00", "\u2028"],
        ["n", "x"],
    ),
    ({"choice": ["one"]}, ["one"], ["on", "ones"]),
    ({"grammar": 'start: "(" start ")" | WORD\nWORD: /[a-z]+/'}, ["a", "((ab))"], ["", "(a", "()", "A"]),
    ({"json": PERSON, "disable_any_whitespace": False}, ['{"name":"a","age":7}', '{ "name": "a",\n "age": 7}'], ['{"na me":"a","age":7}']),
    (
        {"json": PERSON, "disable_any_whitespace": False, "whitespace_pattern": "_?"},
        ['{"name":_"a",_"age":7}', '{"name":"a","age":7}'],
        ['{"name": "a","age":7}', '{"name":__"a","age":7}'],
    ),
]


@pytest.mark.parametrize("case", range(len(FITTING)))
def test_texts_that_fit_are_let_through_to_their_end_and_others_are_not(grammars: Grammars, case: int) -> None:
    asked, good, bad = FITTING[case]
    for seed in range(3):
        assert [text for text in good if not fits(grammars, text, seed, **asked)] == []
        assert [text for text in bad if fits(grammars, text, seed, **asked)] == []


CHOICES = st.lists(
    st.text("ab é🙂", min_size=1, max_size=6) | st.sampled_from(["hello", "help", " hello world", "he"]), min_size=1, max_size=4
)


@given(CHOICES, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_token_is_let_through_only_where_a_choice_goes_on_with_it_and_an_end_only_after_a_choice(
    grammars: Grammars, choices: list[str], seed: int
) -> None:
    source, tokenizer, matcher, said = random.Random(seed), tokenizer_of(grammars), start(grammars, choice=choices), b""
    token_ids: list[int] = []
    wholes = [choice.encode() for choice in choices]
    while True:
        matcher.follow(list(token_ids))
        open_to = allowed(matcher, grammars)
        assert (END in open_to) == (said in wholes)
        for one in open_to:
            assert one == END or (tokenizer.token_bytes(one) and any(w.startswith(said + tokenizer.token_bytes(one)) for w in wholes))
        assert bool(set(open_to) - {END}) == any(w.startswith(said) and w != said for w in wholes)
        if open_to == [END]:
            break
        token_ids.append(source.choice([one for one in open_to if one != END]))
        said += tokenizer.token_bytes(token_ids[-1])
    assert matcher.is_complete
    assert said.decode() in choices


@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_at_random_fits(grammars: Grammars, seed: int) -> None:
    for asked, ends in (
        ({"json": PERSON}, True),
        ({"regex": r"[a-z]{2,5}( [A-Z]é?){1,3}"}, True),
        ({"choice": ["red", "green", "blue", "greenish 🙂"]}, True),
        ({"json_object": True}, False),
    ):
        token_ids, ended = wander(grammars, seed, **asked)
        assert ended or not ends
        if not ended:
            continue
        text = spelled(grammars, token_ids)
        if "regex" in asked:
            assert re.fullmatch(str(asked["regex"]), text)
        elif "choice" in asked:
            assert text in asked["choice"]
        else:
            value = json.loads(text)
            assert isinstance(value, dict)
            if "json" in asked:
                assert set(value) == {"name", "age"}
                assert len(value["name"]) <= 8


@pytest.mark.parametrize(
    "asked",
    [{"json": {}}, {"json": {"type": "string"}}, {"json_object": True}, {"regex": r"(.|\n)*"}, {"choice": ["<|im_start|>", "<s>"]}],
    ids=str,
)
def test_no_special_token_stands_within_a_text(grammars: Grammars, asked: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(grammars)
    for seed in range(5):
        token_ids, _ = wander(grammars, seed, most=30, **asked)
        matcher = start(grammars, **asked)
        for place in range(len(token_ids) + 1):
            matcher.follow(token_ids[:place])
            open_to = set(allowed(matcher, grammars)) - {END}
            assert not open_to & tokenizer.special_ids
            assert all(tokenizer.token_bytes(one) for one in open_to), "a token without text would change nothing, for ever"
            assert max(open_to, default=0) < tokenizer.vocab_size


def test_every_end_is_let_through_where_the_text_is_whole_and_nowhere_else(small: Grammars) -> None:
    stop = tokenizer_of(small).encode("x", add_special_tokens=False)[-1]
    matcher = small.matcher(StructuredOutputsParams(regex="[ab]{1,2}"), [END, stop])
    tokens = [one for one in allowed(matcher, small) if tokenizer_of(small).token_bytes(one) == b"a"][:1]
    assert not {END, stop} & set(allowed(matcher, small))
    for place in (1, 2):
        matcher.follow(tokens * place)
        assert {END, stop} <= set(allowed(matcher, small))
        assert matcher.is_complete == (place == 2)
        matcher.follow([*tokens * place, stop])  # which ends it, and is no part of the text
        assert {END, stop} <= set(allowed(matcher, small))


# Back and forth


@pytest.mark.parametrize("asked", [{"json": PERSON}, {"regex": "([a-z]+ )*[0-9]"}, {"choice": ["hello", "help me", "he"]}], ids=str)
def test_a_matcher_that_went_back_and_one_that_starts_anew_let_the_same_through(grammars: Grammars, asked: dict[str, Any]) -> None:
    source = random.Random(1)
    roads = [wander(grammars, seed, most=40, **asked)[0] for seed in range(3)]
    matcher = start(grammars, **asked)
    for _ in range(30):
        road = source.choice(roads)
        token_ids = road[: source.randint(0, len(road))]
        matcher.follow(list(token_ids))
        anew = start(grammars, **asked)
        anew.follow(list(token_ids))
        assert allowed(matcher, grammars) == allowed(anew, grammars)
        assert matcher.is_complete == anew.is_complete


def test_matchers_of_one_structure_do_not_meet(small: Grammars) -> None:
    first, second = (start(small, choice=["ab", "cd"]) for _ in range(2))
    before = allowed(second, small)
    first.follow([one for one in allowed(first, small) if tokenizer_of(small).token_bytes(one) == b"a"][:1])
    assert allowed(second, small) == before


def test_a_token_that_does_not_fit_is_an_error_that_names_it(small: Grammars) -> None:
    matcher = start(small, regex="[0-9]+")
    (letter,) = tokenizer_of(small).encode("z", add_special_tokens=False)[-1:]
    with pytest.raises(ValueError, match=rf"^structured_outputs: token {letter} does not fit"):
        matcher.follow([letter])


# Widths


@pytest.mark.parametrize("more", [-5, -1, 0, 1, 40])
def test_logits_may_be_for_more_ids_or_fewer_than_the_vocabulary_has(small: Grammars, more: int) -> None:
    words = -(-tokenizer_of(small).vocab_size // 32) + more
    matcher = start(small, regex="[a-z ]+")
    for place in range(3):
        expected = [one for one in allowed(matcher, small) if one < 32 * words]
        assert allowed(matcher, small, words) == expected
        matcher.follow([one for one in expected if tokenizer_of(small).token_bytes(one) == b"a"][:1] * (place + 1))


def test_an_end_beyond_the_logits_is_not_let_through_and_nothing_breaks(small: Grammars) -> None:
    matcher = small.matcher(StructuredOutputsParams(regex="a*"), [END, 32 * 1000])
    assert END in allowed(matcher, small)


# Refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
    ({"json": "{"}, "json: .*line 1 column 2"),
    ({"json": "[1]"}, "json: a schema is an object"),
    ({"json": "3"}, "json: a schema is an object"),
    ({"json": {"type": "array", "uniqueItems": True}}, "json: .*uniqueItems"),
    ({"json": {"not": {"type": "string"}}}, "json: .*not"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, r"json: .*minimum \(5\) is greater than maximum \(4\)"),
    ({"json": {"$ref": "#/$defs/missing"}}, "json: .*/\\$defs/missing"),
    ({"json": {"$ref": "http://example.com/schema"}}, "json: .*http://example.com/schema"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "json: .*oneOf"),
    ({"json": {"type": "string", "pattern": "("}}, "json: .*unclosed group"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "json: .*look-around"),
    ({"json": {"type": "number", "maximum": float("inf")}}, "json: .*maximum"),
    ({"json": {"enum": {1, 2}}}, "json: .*allowed: a JSON schema, as a mapping or as JSON text"),
    ({"json": {"const": 10**30}}, "json: "),
    ({"json": {"const": object()}}, "json: "),
    ({"json": {"a": {"b": [object()]}}}, "json: "),
    ({"json": {"const": "\ud800"}}, "json: "),
    ({"json": "false"}, "json: "),
    ({"regex": "("}, "regex: .*unclosed group"),
    ({"regex": "(?=a)b"}, "regex: .*look-around"),
    ({"regex": r"(a)\1"}, "regex: .*backreferences"),
    ({"regex": "\ud800"}, "regex: "),
    ({"choice": ["\ud800"]}, "choice: "),
    ({"grammar": "start: foo"}, "grammar: .*foo"),
    ({"grammar": 'begin: "a"'}, "grammar: .*Expected ::="),
    ({"grammar": "this is no grammar"}, "grammar: "),
    ({"grammar": "\ud800"}, "grammar: "),
    ({"json": {}, "disable_any_whitespace": False, "whitespace_pattern": "["}, "json: .*unclosed"),
    ({"regex": "a" * (grammar.MAX_SOURCE + 1)}, rf": \d+ characters; allowed: {grammar.MAX_SOURCE}"),
    ({"choice": ["a" * 1000] * 1000}, rf": \d+ characters; allowed: {grammar.MAX_SOURCE}"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_is_refused_with_the_reason(small: Grammars, case: int) -> None:
    asked, said = REFUSED[case]
    for call in (small.check, lambda structure: small.matcher(structure, [END])):
        with pytest.raises(InvalidValueError, match=rf"^structured_outputs\.?{said}") as caught:
            call(StructuredOutputsParams(**asked))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert fits(small, "a", regex="a")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def circular() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    "schema", [nested(500), nested(20000), circular(), '{"items":' * 20000 + "{}" + "}" * 20000], ids=["500", "20000", "circular", "text"]
)
def test_a_schema_nested_too_deep_is_refused(small: Grammars, schema: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^structured_outputs"):
        small.check(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "asked", [{"regex": r"[^\s\S]"}, {"regex": r"a[^\s\S]"}, {"grammar": "start: start"}, {"grammar": 'start: "a" start'}], ids=str
)
def test_a_structure_that_no_text_fits_never_ends_as_if_one_did(small: Grammars, asked: dict[str, Any]) -> None:
    try:
        matcher = start(small, **asked)
    except InvalidValueError:
        return
    token_ids: list[int] = []
    for _ in range(5):
        open_to = allowed(matcher, small)
        assert END not in open_to
        if not open_to:
            break
        token_ids.append(open_to[0])
        if refusal(matcher, token_ids):
            break


HUGE: dict[str, dict[str, Any]] = {
    "repetitions of repetitions": {"regex": "(a{1000}){1000}"},
    "repetitions of alternatives": {"regex": "((a|b){1000}c){1000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){300}"},
    "stars of stars": {"regex": "((((a*)*b*)*c*)*d*)*e"},
    "wide classes": {"regex": r"(\w{1,200}\s{1,200}){1,200}"},
    "least length": {"json": {"type": "string", "minLength": 10**6}},
    "lengths": {"json": {"type": "string", "minLength": 1000, "maxLength": 2000}},
    "items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9}},
    "arrays of arrays": {
        "json": {"type": "array", "minItems": 999, "items": {"type": "array", "minItems": 999, "items": {"type": "null"}}}
    },
    "enum": {"json": {"enum": [f"value {place} of many" for place in range(8000)]}},
    "choices": {"choice": [f"value {place} of many" for place in range(8000)]},
    "one long choice": {"choice": ["a" * 200_000]},
    "properties": {"json": {"properties": {f"p{place}": {"type": "string"} for place in range(5000)}}},
    "alternatives": {"json": {"anyOf": [{"properties": {f"p{place}": {"type": "integer"}}} for place in range(2000)]}},
    "references": {
        "json": {
            "$defs": {f"d{k}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{k + 1}"}] * 4} for k in range(40)} | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "all of all": {"json": {"allOf": [{"anyOf": [{"minimum": k}, {"maximum": k}]} for k in range(30)]}},
    "patterns": {"json": {"type": "string", "pattern": "^(.*a.{200}|.*b.{199}c)*$"}},
    "ambiguous grammar": {"grammar": 'start: s\ns: s s | s s s | "a" | "b"'},
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_structures_are_refused_or_served_within_seconds(small: Grammars, name: str) -> None:
    source = random.Random(0)
    with at_most(SECONDS):
        try:
            matcher = start(small, **HUGE[name])
        except InvalidValueError as error:
            print(error)
            return
    token_ids: list[int] = []
    for _ in range(40):
        with at_most(SECONDS), contextlib.suppress(ValueError):
            open_to, reason = [], "too costly"
            open_to, reason = allowed(matcher, small), ""
        if reason:
            assert re.search("limit|items|fuel|too", matcher._matcher.get_error())
            break
        if END in open_to:
            assert matcher._matcher.is_accepting(), "what became too costly has not become whole"
        if not open_to or open_to == [END]:
            break
        token_ids.append(source.choice([one for one in open_to if one != END]))
        with at_most(SECONDS):
            reason = refusal(matcher, token_ids)
        if reason:
            assert re.search("limit|items|fuel|too", reason)
            break


# What is kept


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputsParams]:
    """Structures that were compiled, in order."""
    made: list[StructuredOutputsParams] = []
    compile_one = grammar._grammar
    monkeypatch.setattr(grammar, "_grammar", lambda asked: (made.append(asked), compile_one(asked))[1])
    return made


def test_a_structure_is_compiled_once(small: Grammars, compiled: list[StructuredOutputsParams]) -> None:
    grammars = Grammars(tokenizer_of(small))
    for _ in range(3):
        grammars.check(StructuredOutputsParams(regex="ab*"))
        start(grammars, regex="ab*")
    assert len(compiled) == 1


def test_structures_that_differ_in_anything_are_not_taken_for_each_other(small: Grammars) -> None:
    grammars = Grammars(tokenizer_of(small))
    assert fits(grammars, "ab", regex="ab")
    assert fits(grammars, "abc", regex="abc")
    assert fits(grammars, '"ab"', json={"const": "ab"})
    assert not fits(grammars, '{ "a":1}', json={"const": {"a": 1}})
    assert fits(grammars, '{"a": 1}', json={"properties": {"a": {}}}, disable_any_whitespace=False)
    assert not fits(grammars, '{"a": 1}', json={"properties": {"a": {}}})
    assert fits(grammars, '{"a":_1}', json={"properties": {"a": {}}}, disable_any_whitespace=False, whitespace_pattern="_?")


def test_only_so_many_are_kept_and_the_one_used_longest_ago_goes_first(
    small: Grammars, compiled: list[StructuredOutputsParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_KEPT", 3)
    grammars = Grammars(tokenizer_of(small))
    one, two, three, four = (StructuredOutputsParams(regex=letter) for letter in "abcd")
    for asked in (one, two, three, one, four, one, three, two):
        grammars.check(asked)
    assert compiled == [one, two, three, four, two]
    assert len(grammars._compiled) == 3


def test_their_sources_are_bounded_together(
    small: Grammars, compiled: list[StructuredOutputsParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_KEPT_BYTES", 3000)
    grammars = Grammars(tokenizer_of(small))
    for place in range(20):
        grammars.check(StructuredOutputsParams(choice=[f"{place:03}" + "a" * 600]))
        assert sum(size for _, size in grammars._compiled.values()) <= 3000
    assert len(grammars._compiled) >= 3
    grammars.check(StructuredOutputsParams(choice=["b" * 3000]))  # larger than all that may be kept
    assert fits(grammars, "ab", regex="ab")


def test_what_was_refused_is_not_kept(small: Grammars) -> None:
    grammars = Grammars(tokenizer_of(small))
    for _ in range(2):
        with pytest.raises(InvalidValueError):
            grammars.check(StructuredOutputsParams(regex="("))
    assert not grammars._compiled
