"""Structured output with the real model: random schemas, drawn at random, and every answer that ends by itself fits its own."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidValueError
from octavo.outputs import CompletionOutput
from tests import schemas

PROMPT = "An answer in JSON, as short as can be:\n"
TOKENS = 100


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, max_model_len=512, max_batch_size=32, prealloc_blocks=64, check_invariants=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    stats = llm.stats()
    assert (stats.blocks.used, stats.running, stats.waiting) == (0, 0, 0)


def asks(schema: Any, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": {"json": schema}, "seed": seed, "max_tokens": TOKENS, **more})


def check(schema: Any, answer: CompletionOutput) -> None:
    """Fits, where it ended by itself."""
    assert answer.finish_reason in ("stop", "length"), answer.error
    if answer.finish_reason == "stop":
        validator = jsonschema.Draft202012Validator(schema)
        try:
            validator.validate(json.loads(answer.text))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{answer.text!r} does not fit {json.dumps(schema)}: {error}") from error


def answers(llm: LLM, numbers: range, **more: Any) -> list[CompletionOutput]:
    params = [asks(schemas.make(number), number, **more) for number in numbers]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]


def share_that_ends(llm: LLM, numbers: range) -> float:
    found = answers(llm, numbers)
    for number, answer in zip(numbers, found, strict=True):
        jsonschema.Draft202012Validator.check_schema(schemas.make(number))
        check(schemas.make(number), answer)
    share = sum(answer.finish_reason == "stop" for answer in found) / len(found)
    tokens = sum(len(answer.token_ids) for answer in found)
    print(f"{len(found)} schemas: {share:.0%} of the answers ended within {TOKENS} tokens, {tokens} tokens in all")
    return share


def test_answers_to_fifty_random_schemas_fit_them(llm: LLM) -> None:
    assert share_that_ends(llm, range(50)) > 0.5


@pytest.mark.slow
def test_answers_to_five_hundred_random_schemas_fit_them(llm: LLM) -> None:
    assert share_that_ends(llm, range(1000, 1500)) > 0.5


# The same in any company


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in answers(llm, range(200, 210), max_tokens=40)]


def test_answers_are_the_same_alone_and_again(llm: LLM, expected: list[list[int]]) -> None:
    for place in (0, 4, 9):
        assert answers(llm, range(200 + place, 201 + place), max_tokens=40)[0].token_ids == expected[place]


def test_answers_are_the_same_beside_others_and_leave_them_as_they_are(llm: LLM, expected: list[list[int]]) -> None:
    others = [SamplingParams(seed=seed, max_tokens=20) for seed in range(4)]
    alone = [output.outputs[0].token_ids for output in llm.generate(["Once upon a time"] * 4, others)]
    asked = [asks(schemas.make(number), number, max_tokens=40) for number in range(200, 210)]
    mixed = [*others[:2], *asked[:5], *others[2:], *asked[5:]]
    prompts = ["Once upon a time" if one in others else PROMPT for one in mixed]
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, mixed)]
    assert [found[place] for place in (0, 1, 7, 8)] == alone
    assert [*found[2:7], *found[9:]] == expected


def test_each_of_several_answers_fits_and_the_first_is_what_one_would_be(llm: LLM, expected: list[list[int]]) -> None:
    numbers = range(200, 204)
    params = [asks(schemas.make(number), number, max_tokens=40, n=4) for number in numbers]
    for number, output, alone in zip(numbers, llm.generate([PROMPT] * 4, params), expected[:4], strict=True):
        assert output.outputs[0].token_ids == alone
        for answer in output.outputs:
            check(schemas.make(number), answer)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4, "max_blocks": 24, "prealloc_blocks": 2},
        {"block_size": 4, "max_blocks": 24, "prealloc_blocks": 2, "swap_space": "2MiB", "prefix_caching": False},
        {"prefill_chunk_size": 3, "max_batch_size": 3},
        {"threads": 1},
    ],
    ids=["preempted", "preempted, swapped, no prefixes", "chunks of three", "masks beside the model"],
)
def test_answers_are_the_same_under_pressure(smollm2_gguf: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    with LLM(smollm2_gguf, max_model_len=96, check_invariants=True, **settings) as other:
        assert [answer.token_ids for answer in answers(other, range(200, 210), max_tokens=40)] == expected
        other.check_integrity()
        if "max_blocks" in settings:
            assert other.stats().preemptions > 0


# Every kind


@pytest.mark.parametrize("stream", [False, True], ids=["generate", "stream"])
def test_every_kind_of_structure_holds(llm: LLM, stream: bool) -> None:
    kinds: dict[str, Any] = {
        "regex": r"[A-Z][a-z]{2,8}, [0-9]{1,3}",
        "choice": ["Paris", "Parisian nights", "東京 🙂"],
        "grammar": 'start: "(" start ")" | "x"',
        "json_object": True,
    }
    for kind, given in kinds.items():
        params = SamplingParams(structured_outputs={kind: given}, seed=4, max_tokens=30)
        if stream:
            text = "".join(output.delta for output in llm.stream(PROMPT, params))
            reason = "stop"
            if kind == "json_object":
                continue
        else:
            answer = llm.generate(PROMPT, params)[0].outputs[0]
            text, reason = answer.text, answer.finish_reason
        if kind == "json_object":
            assert text.startswith("{")
            assert reason == "length" or isinstance(json.loads(text), dict)
        else:
            assert reason == "stop"
            assert (
                re.fullmatch(given, text) if kind == "regex" else text in given if kind == "choice" else re.fullmatch(r"(\(*)x(\)*)", text)
            )


def test_the_end_is_no_part_of_the_text_and_is_among_the_tokens(llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(structured_outputs={"choice": ["yes"]}, temperature=0))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("yes", "stop", None)
    assert answer.token_ids[-1] in llm.tokenizer.eos_token_ids


def test_greedy_and_narrow_draws_hold_to_the_structure_too(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for more in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 100.0}, {"repetition_penalty": 1.5}):
        answer = llm.generate(PROMPT, asks(schema, **more))[0].outputs[0]
        assert answer.finish_reason == "stop"
        check(schema, answer)


# Beside other wishes


def test_stop_texts_and_stop_ids_end_a_structure_early(llm: LLM) -> None:
    asked = {"structured_outputs": {"regex": "ab{30}c"}, "temperature": 0}
    answer = llm.generate(PROMPT, SamplingParams(**asked, stop="bbb", max_tokens=40))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "bbb")


def test_a_whole_text_ends_before_min_tokens_are_there(llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(structured_outputs={"choice": ["yes"]}, min_tokens=10))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_min_tokens_keep_a_text_that_may_go_on_from_ending(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "a*"}, min_tokens=6, max_tokens=12, seed=1, logit_bias={2: 100.0})
    answer = llm.generate(PROMPT, params)[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (7, "stop")
    assert set(answer.text) == {"a"}


def test_logprobs_are_the_models_own_whatever_the_structure_forbids(llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(structured_outputs={"choice": ["東京 🙂"]}, temperature=0, logprobs=3))[0].outputs[0]
    assert answer.logprobs is not None
    for token_id, scores in zip(answer.token_ids, answer.logprobs, strict=True):
        assert math.isfinite(scores[token_id].logprob)
        assert {one.rank for one in scores.values()} >= {1, 2, 3}
    assert any(scores[token_id].rank > 1000 for token_id, scores in zip(answer.token_ids, answer.logprobs, strict=True))


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": [5]},
        {"bad_words": ["yes", "y", "ye"]},
        {"logits_processors": [lambda prompt, output, logits: logits * math.nan]},
    ],
    ids=str,
)
def test_wishes_that_exclude_each_other_end_that_request_alone_and_say_so(llm: LLM, more: dict[str, Any]) -> None:
    asked = SamplingParams(structured_outputs={"choice": ["yes"]}, **more)
    plain = SamplingParams(temperature=0, max_tokens=4)
    first, second = (output.outputs[0] for output in llm.generate([PROMPT, "The capital of France is"], [asked, plain]))
    assert first.finish_reason == "error"
    assert first.error
    assert second.text.startswith(" Paris")


def test_a_processor_that_lets_through_what_the_structure_forbids_ends_that_request_alone(llm: LLM) -> None:
    (wrong,) = llm.tokenizer.encode("zebra")[:1]

    def always(prompt: list[int], output: list[int], logits: Any) -> Any:
        logits[:] = -10.0
        logits[wrong] = 10.0
        return logits

    asked = SamplingParams(structured_outputs={"choice": ["yes"]}, logits_processors=[always], temperature=0)
    plain = SamplingParams(temperature=0, max_tokens=4)
    first, second = (output.outputs[0] for output in llm.generate([PROMPT, "The capital of France is"], [asked, plain]))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert first.error is not None
    assert f"token {wrong} does not fit" in first.error


@pytest.mark.parametrize("asked", [{"regex": r"[^\s\S]"}, {"grammar": "start: start"}, {"regex": r"ab[^\s\S]"}], ids=str)
def test_a_structure_that_no_text_fits_is_refused_or_an_error_and_never_an_answer(llm: LLM, asked: dict[str, Any]) -> None:
    try:
        outputs = llm.generate(
            [PROMPT, "The capital of France is"], [SamplingParams(structured_outputs=asked), SamplingParams(temperature=0, max_tokens=1)]
        )
    except InvalidValueError:
        return
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].text == " Paris"


def test_a_refused_structure_among_good_requests_runs_nothing(llm: LLM) -> None:
    before = llm.stats().steps
    for bad in ({"regex": "("}, {"json": {"const": object()}}, {"choice": ["\ud800"]}):
        with pytest.raises(InvalidValueError, match="structured_outputs"):
            llm.generate(["good", "bad"], [SamplingParams(), SamplingParams(structured_outputs=bad)])
        with pytest.raises(InvalidValueError, match="structured_outputs"):
            llm.stream("bad", SamplingParams(structured_outputs=bad))
    assert llm.stats().steps == before


def test_params_and_a_mapping_of_them_ask_the_same(llm: LLM) -> None:
    fields = {"choice": ["Paris", "London"]}
    both = [SamplingParams(structured_outputs=StructuredOutputsParams(**fields), seed=1), SamplingParams(structured_outputs=fields, seed=1)]
    texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 2, both)]
    assert texts[0] == texts[1]
    assert texts[0] in fields["choice"]


# What it costs


@pytest.mark.slow
def test_throughput_with_and_without_a_schema(llm: LLM) -> None:
    """32 sequences; a schema that goes on for as long as the answer may, so that both draw as many tokens."""
    schema = {
        "type": "array",
        "minItems": 200,
        "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
    }
    plain = SamplingParams(max_tokens=64, ignore_eos=True, seed=1)
    with_schema = msgspec.structs.replace(plain, ignore_eos=False, structured_outputs=StructuredOutputsParams(json=schema))
    llm.generate([PROMPT] * 32, with_schema)
    rates: dict[str, list[float]] = {"plain": [], "schema": []}
    for _ in range(3):
        for name, params in (("plain", plain), ("schema", with_schema)):
            began = time.process_time()
            outputs = llm.generate([PROMPT] * 32, params)
            taken = time.process_time() - began
            rates[name].append(sum(len(output.outputs[0].token_ids) for output in outputs) / taken)
    best = {name: max(values) for name, values in rates.items()}
    print(f"32 sequences: {best['plain']:.0f} tokens a second of processor time without a schema, {best['schema']:.0f} with one")
    print(f"share of the time that the schema takes: {1 - best['schema'] / best['plain']:.1%}")
