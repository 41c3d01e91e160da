"""Sampling parameters from request to output: what ends an answer, what a stream shows of it, and what a request may not break."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from engine_driver import TEXT, answer, check_idle, make_engine, run, speak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams, register_logits_processor
from octavo.engine.llm import Score
from octavo.errors import CheckpointError, InvalidValueError, OctavoError, UnsupportedError
from tests.oracle import logits, make_runner

FRANCE = "The capital of France is"
STORY = "Once upon a time"

# Stop texts, over what is said whatever was asked


def expected_end(text: str, stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None]:
    """Of an answer that is one token a byte: its text, and the stop text that ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and len(text[:end].encode()) > min_tokens:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_a_stop_text_over_several_tokens_is_never_streamed() -> None:
    for include, shown in ((False, "ABC"), (True, "ABCDEFGHIJ")):
        engine = make_engine(speak("ABCDEFGHIJKLM"))
        request_id = engine.add("Hi", SamplingParams(max_tokens=100, stop=["DEFGHIJ"], include_stop_str_in_output=include))
        last, deltas = run(engine)
        (one,) = last[request_id].outputs
        assert (one.text, "".join(deltas[request_id])) == (shown, shown)
        assert (one.finish_reason, one.stop_reason) == ("stop", "DEFGHIJ")
        assert one.token_ids == list(b"ABCDEFGHIJ"), "tokens are not cut"


@pytest.mark.parametrize("seed", range(6))
def test_stop_texts_end_an_answer_where_reading_it_whole_would(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(25):
        text = "".join(source.choice("abcé🙂") for _ in range(source.randint(1, 30)))
        stops = ["".join(source.choice("abcé🙂") for _ in range(source.randint(1, 5))) for _ in range(source.randint(1, 4))]
        least, include = source.choice([0, 0, source.randint(1, 20)]), source.random() < 0.5
        engine = make_engine(speak(text))
        params = SamplingParams(max_tokens=200, stop=stops, min_tokens=least, include_stop_str_in_output=include)
        request_id = engine.add("Hi", params)
        last, deltas = run(engine)
        (one,) = last[request_id].outputs
        expected, stop = expected_end(text, stops, least, include)
        assert (one.text, one.stop_reason, one.finish_reason) == (expected, stop, "stop")
        assert "".join(deltas[request_id]) == expected


def test_the_streamed_text_never_goes_back() -> None:
    engine, seen = make_engine(speak("one two three\n\nUseless\n\nUser: four")), ""
    engine.add("Hi", SamplingParams(max_tokens=100, stop=["\n\nUser:"]))
    while engine.has_work:
        for output in engine.step():
            text = output.outputs[0].text
            assert text.startswith(seen)
            seen = text
    assert seen == "one two three\n\nUseless"


def test_what_is_held_back_comes_with_the_end() -> None:
    engine = make_engine(speak("abcab"))
    assert answer(engine, stop=["abd"]).text == "abcab"
    assert answer(engine, stop=["abd"], max_tokens=2).text == "ab"
    engine.add("Hi", SamplingParams(stop=["abd"], max_tokens=50), "mine")
    engine.step()
    engine.abort("mine")
    output = run(engine)[0]["mine"].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "abort", None)


def test_a_stop_text_at_the_last_token_counts_as_one() -> None:
    engine = make_engine(speak("abcdef"))
    one = answer(engine, stop=["def"], max_tokens=6)
    assert (one.text, one.finish_reason, one.stop_reason) == ("abc", "stop", "def")
    one = answer(engine, stop=["deg"], max_tokens=6)
    assert (one.text, one.finish_reason, one.stop_reason) == ("abcdef", "length", None)
    assert engine.stats().finished == {"stop": 1, "length": 1}


def test_blocks_are_free_as_soon_as_a_stop_text_is_found() -> None:
    engine = make_engine(speak("abcdefghijklmnop"), num_blocks=8, prefix_caching=False)
    for _ in range(5):
        engine.add([1] * 9, SamplingParams(stop=["cd"], max_tokens=15))
    last, _ = run(engine)
    assert {output.outputs[0].text for output in last.values()} == {"ab"}
    check_idle(engine)


def test_each_of_several_answers_ends_by_itself() -> None:
    texts = ["ab stop cd", "abcdef", "x stop", "stop"]

    def say(assignment: Any, tokens: list[int]) -> int:
        ids = [*texts[assignment.choice].encode(), 256]
        return ids[len(tokens) - assignment.prompt_length]

    engine = make_engine(say)
    request_id = engine.add("Hi", SamplingParams(n=4, max_tokens=40, stop=["stop"]))
    found = run(engine)[0][request_id].outputs
    assert [(one.text, one.stop_reason) for one in found] == [("ab ", "stop"), ("abcdef", None), ("x ", "stop"), ("", "stop")]
    assert all(one.finish_reason == "stop" for one in found)


def test_a_stop_text_that_only_the_cut_makes_is_found() -> None:
    one = answer(make_engine(speak("a🙂")), max_tokens=3, stop=["\ufffd"])
    assert (one.text, one.finish_reason, one.stop_reason) == ("a", "stop", "\ufffd")


def test_an_error_stays_one_whatever_the_text_held_back_looks_like() -> None:
    engine = make_engine(speak("a🙂"), row_error=lambda row, assignment: "broken" if row.start >= 4 else None)
    one = answer(engine, stop=["\ufffd"])
    assert (one.finish_reason, one.error) == ("error", "broken")


def test_a_stop_id_and_the_end_are_in_the_text_only_where_asked() -> None:
    for include, shown in ((False, "abc"), (True, "abcd")):
        one = answer(make_engine(speak("abcdef")), stop_token_ids=[ord("d")], include_stop_str_in_output=include)
        assert (one.text, one.stop_reason, one.token_ids) == (shown, ord("d"), list(b"abcd"))
    assert answer(make_engine(speak("ab")), include_stop_str_in_output=True, skip_special_tokens=False).text == "ab<end>"
    assert answer(make_engine(speak("ab")), skip_special_tokens=False).text == "ab"


def test_a_stop_text_spelled_by_a_stop_id_counts_only_where_it_is_in_the_text() -> None:
    one = answer(make_engine(speak("abcdef")), stop_token_ids=[ord("d")], stop=["cd"])
    assert (one.text, one.stop_reason) == ("abc", ord("d"))
    one = answer(make_engine(speak("abcdef")), stop_token_ids=[ord("d")], stop=["cd"], include_stop_str_in_output=True)
    assert (one.text, one.stop_reason) == ("abcd", "cd")


# Output kinds


@pytest.fixture
def speaks() -> Any:
    """Three answers of different lengths, one with a stop text, one cut by max_tokens."""

    def say(assignment: Any, tokens: list[int]) -> int:
        ids = [*[TEXT, "ok", "abc abc abc abc stop abc"][assignment.choice].encode(), 256]
        return ids[(len(tokens) - assignment.prompt_length) % len(ids)]

    return say


PARAMS = SamplingParams(n=3, max_tokens=30, stop=["stop"])


def test_deltas_of_each_answer_joined_are_the_whole(speaks: Any) -> None:
    engine = make_engine(speaks)
    whole_id = engine.add("Hi", PARAMS)
    whole = run(engine)[0][whole_id].outputs
    engine.add("Hi", msgspec.structs.replace(PARAMS, output_kind="delta"))
    texts, token_ids, deltas = [""] * 3, [[], [], []], [""] * 3
    while engine.has_work:
        for output in engine.step():
            for place, one in enumerate(output.read().outputs):
                texts[place] += one.text
                deltas[place] += one.delta
                token_ids[place] += one.token_ids
    assert [one.text for one in whole] == deltas
    assert [one.token_ids for one in whole] == token_ids
    assert [one.text for one in whole] == texts


def test_deltas_that_nobody_read_add_up(speaks: Any) -> None:
    engine = make_engine(speaks)
    engine.add("Hi", msgspec.structs.replace(PARAMS, output_kind="delta", n=1))
    for _ in range(4):
        (output,) = engine.step()
    assert output.read().outputs[0].text == TEXT[:2] + ("" if len(TEXT[:3].encode()) > 4 else TEXT[2])
    assert output.outputs[0].token_ids == list(TEXT.encode()[:4])
    (output,) = engine.step()
    assert output.outputs[0].token_ids == list(TEXT.encode()[4:5])


def test_only_the_end_is_told_where_final_is_asked(speaks: Any) -> None:
    engine = make_engine(speaks)
    request_id = engine.add("Hi", msgspec.structs.replace(PARAMS, output_kind="final"))
    told = []
    while engine.has_work:
        told += [output.finished for output in engine.step()]
    assert told == [True]
    for kind in ("cumulative", "delta"):
        other = make_engine(speaks)
        other.add("Hi", msgspec.structs.replace(PARAMS, output_kind=kind), request_id)
        assert len(run(other)[1][request_id]) > 10


def test_without_detokenizing_there_are_tokens_and_no_text(speaks: Any) -> None:
    engine = make_engine(speaks)
    request_id = engine.add("Hi", SamplingParams(n=3, max_tokens=30, detokenize=False))
    last, deltas = run(engine)
    assert [one.text for one in last[request_id].outputs] == [""] * 3
    assert set(deltas[request_id]) == {""}
    assert last[request_id].outputs[1].token_ids == [*b"ok", 256]
    with pytest.raises(InvalidValueError, match=r"^stop: "):
        SamplingParams(stop="x", detokenize=False)


# The real model


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, max_model_len=256, max_batch_size=8, prealloc_blocks=8, check_invariants=True) as llm:
        yield llm


def sound(llm: LLM) -> None:
    llm.check_integrity()
    stats = llm.stats()
    assert (stats.blocks.used, stats.running, stats.waiting) == (0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llm", "tiny"):
        if name in request.fixturenames:
            sound(request.getfixturevalue(name))


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **more)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    return llm.generate(prompt, params)[0].outputs[0]


def test_stop_texts_of_the_model_cut_what_it_says(llm: LLM) -> None:
    whole = one(llm, STORY, greedy(24)).text
    for start, end in ((6, 7), (5, 12), (0, 3), (11, 30)):
        stop = whole[start:end]
        at = whole.find(stop)
        for include in (False, True):
            params = greedy(24, stop=[stop, "not said"], include_stop_str_in_output=include)
            found = one(llm, STORY, params)
            assert (found.text, found.stop_reason) == (whole[: at + len(stop) * include], stop)
            assert "".join(output.delta for output in llm.stream(STORY, params)) == found.text


def test_min_tokens_hold_off_every_end_by_exactly_so_many(llm: LLM) -> None:
    ends = sorted(llm.engine._eos_token_ids)
    assert len(ends) > 1
    for end in ends:
        eager = {"logit_bias": {end: 100.0}, "temperature": 0, "max_tokens": 20}
        assert one(llm, STORY, SamplingParams(**eager)).token_ids == [end]
        for least in (1, 4):
            for prompt in (STORY, [5] * 40):
                found = one(llm, prompt, SamplingParams(**eager, min_tokens=least))
                assert (len(found.token_ids), found.token_ids[-1], found.finish_reason) == (least + 1, end, "stop")
                assert not set(found.token_ids[:-1]) & set(ends)
    everything = SamplingParams(logit_bias={**dict.fromkeys(ends, 100.0), 1000: 100.0}, stop_token_ids=[1000], min_tokens=3, temperature=0)
    found = one(llm, STORY, everything)
    assert len(found.token_ids) == 4
    assert not set(found.token_ids[:3]) & {*ends, 1000}


def test_min_tokens_hold_off_stop_texts(llm: LLM) -> None:
    whole = one(llm, STORY, greedy(24)).text
    found = one(llm, STORY, greedy(24, stop=[" ", ","], min_tokens=10))
    assert len(found.token_ids) > 10
    assert whole.startswith(found.text)
    assert found.stop_reason in (" ", ",")


def test_a_logprob_is_what_scoring_the_whole_text_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=3, max_tokens=16, logprobs=5, ignore_eos=True, repetition_penalty=1.4)
    (output,) = llm.generate(STORY, params)
    (found,) = output.outputs
    (scored,) = llm.generate([[*output.prompt_token_ids, *found.token_ids]], greedy(1, prompt_logprobs=5))
    assert found.logprobs is not None
    assert scored.prompt_logprobs is not None
    assert found.logprobs == scored.prompt_logprobs[len(output.prompt_token_ids) :]
    assert found.cumulative_logprob == pytest.approx(sum(s[t].logprob for t, s in zip(found.token_ids, found.logprobs, strict=True)))
    for token_id, scores in zip(found.token_ids, found.logprobs, strict=True):
        assert len(scores) in (5, 6)
        by_rank = sorted(scores.values(), key=lambda each: each.rank)
        assert [each.logprob for each in by_rank] == sorted((each.logprob for each in by_rank), reverse=True)
        assert all(each.rank <= 5 for other, each in scores.items() if other != token_id)
        assert all(each.decoded_token == llm.tokenizer.decode([other], False, True) for other, each in scores.items())


def test_greedy_tokens_rank_first_and_none_but_the_chosen_are_told_where_zero_are_asked(llm: LLM) -> None:
    found = one(llm, STORY, greedy(8, logprobs=0))
    assert [list(scores) for scores in found.logprobs] == [[token_id] for token_id in found.token_ids]
    assert {next(iter(scores.values())).rank for scores in found.logprobs} == {1}
    assert one(llm, STORY, greedy(2)).logprobs is None
    assert one(llm, STORY, greedy(2)).cumulative_logprob is None


def test_logprobs_are_told_for_each_token_of_each_answer_in_every_kind(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=1, stop=["zzz"])
    (whole,) = llm.generate(STORY, params)
    for kind in ("cumulative", "delta", "final"):
        told: list[list[Any]] = [[], []]
        for output in llm.stream(STORY, msgspec.structs.replace(params, output_kind=kind)):
            for place, each in enumerate(output.outputs):
                assert each.logprobs is not None
                assert len(each.logprobs) == len(each.token_ids)
                told[place] = [*(told[place] if kind == "delta" else []), *each.logprobs]
        assert told == [each.logprobs for each in whole.outputs]


def test_what_a_stream_of_deltas_says_of_answers_that_end_apart_joins_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=24, stop=[" a", " in", "."])
    whole = llm.generate("My name is", params)[0].outputs
    assert len({len(each.token_ids) for each in whole}) > 1
    texts, ids = [""] * 4, [[], [], [], []]
    for output in llm.stream("My name is", msgspec.structs.replace(params, output_kind="delta")):
        for place, each in enumerate(output.outputs):
            texts[place] += each.text
            ids[place] += each.token_ids
    assert ids == [each.token_ids for each in whole]
    assert texts == [each.text for each in whole]


def test_generate_gives_the_whole_whatever_kind_is_asked(llm: LLM) -> None:
    found = [one(llm, STORY, greedy(8, output_kind=kind)) for kind in ("cumulative", "delta", "final")]
    assert len({each.text for each in found}) == 1
    assert {each.delta for each in found} == {found[0].text}
    assert [len(list(llm.stream(STORY, greedy(8, output_kind=kind)))) for kind in ("cumulative", "delta", "final")] == [8, 8, 1]


def test_bad_words_never_come_and_their_parts_may(llm: LLM) -> None:
    assert one(llm, FRANCE, greedy(1)).text == " Paris"
    for bad in (["Paris"], [" Paris"], ["Paris", "the"]):
        found = one(llm, FRANCE, greedy(20, bad_words=bad))
        assert "Paris" not in found.text
        assert found.finish_reason in ("stop", "length")
    two = one(llm, STORY, greedy(12)).text
    words = two.split()
    pair = f"{words[0]} {words[1]}"
    found = one(llm, STORY, greedy(12, bad_words=[pair]))
    assert pair not in found.text
    assert words[0] in found.text


def test_only_allowed_tokens_are_drawn(llm: LLM) -> None:
    allowed = [5, 700, 48000, *llm.tokenizer.encode(" Paris")]
    for temperature in (0, 1.0, 1e5):
        found = one(llm, FRANCE, SamplingParams(temperature=temperature, allowed_token_ids=allowed, max_tokens=12, seed=1))
        assert set(found.token_ids) <= set(allowed)
        assert found.finish_reason == "length"
    assert set(one(llm, FRANCE, SamplingParams(temperature=1e5, allowed_token_ids=[9, 9], max_tokens=4)).token_ids) == {9}


def test_a_bias_of_a_hundred_decides_and_of_minus_a_hundred_forbids(llm: LLM) -> None:
    (paris,) = llm.tokenizer.encode(" Paris")
    assert one(llm, FRANCE, greedy(3, logit_bias={1000: 100})).token_ids == [1000] * 3
    assert paris not in one(llm, FRANCE, SamplingParams(max_tokens=8, seed=2, logit_bias={str(paris): -100.0})).token_ids
    assert one(llm, FRANCE, greedy(4, logit_bias={1000: 100}, allowed_token_ids=[paris])).token_ids == [paris] * 4


def test_what_cannot_be_in_the_vocabulary_is_refused_at_once(llm: LLM) -> None:
    for more in ({"logit_bias": {49152: 1.0}}, {"allowed_token_ids": [49152]}, {"stop_token_ids": [49152]}, {"bad_words": ["\ud800"]}):
        with pytest.raises(InvalidValueError, match=next(iter(more))):
            llm.generate(STORY, SamplingParams(**more))
        with pytest.raises(InvalidValueError, match=next(iter(more))):
            llm.stream(STORY, SamplingParams(**more))


# Processors of the user's own


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def raising(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 2:
        raise LookupError("no such thing")
    return logits


def unspeakable(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise UnspeakableError


PROCESSORS: dict[str, Any] = {
    "raises in its third call": raising,
    "raises what cannot be said": unspeakable,
    "returns nothing": lambda prompt, output, logits: None,
    "returns another shape": lambda prompt, output, logits: logits[:-1],
    "returns a list": lambda prompt, output, logits: logits.tolist(),
    "returns NaN": lambda prompt, output, logits: logits * math.nan,
    "returns infinity": lambda prompt, output, logits: torch.full_like(logits, math.inf),
    "forbids everything": lambda prompt, output, logits: torch.full_like(logits, -math.inf),
    "takes too few arguments": lambda logits: logits,
    "recurses": lambda prompt, output, logits: PROCESSORS["recurses"](prompt, output, logits),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_fails_ends_its_request_alone(llm: LLM, name: str) -> None:
    expected = one(llm, FRANCE, greedy(5)).text
    params = [greedy(5), greedy(5, logits_processors=[PROCESSORS[name]]), greedy(5)]
    first, second, third = (output.outputs[0] for output in llm.generate([FRANCE, STORY, FRANCE], params))
    assert second.finish_reason == "error"
    assert second.error
    assert (first.text, third.text) == (expected, expected)


def test_processors_see_what_is_known_act_in_turn_and_cannot_harm_the_request(llm: LLM) -> None:
    seen = []

    def watch(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt), list(output), tuple(logits.shape)))
        prompt.clear()
        output.append(1)
        logits[:] = 0
        logits[1000 + len(output)] = 1
        return logits

    def then(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.sum() == 1
        return logits.roll(1)

    register_logits_processor("one further", then)
    found = one(llm, STORY, greedy(3, logits_processors=[watch, "one further"]))
    assert found.token_ids == [1002, 1003, 1004]
    ids = llm.tokenizer.encode(STORY)
    assert seen == [(ids, found.token_ids[:place], (49152,)) for place in range(3)]
    assert one(llm, FRANCE, greedy(1)).text == " Paris"
    for wrong in ("not registered", "no.such.module:f", "math:pi", "math:"):
        with pytest.raises(InvalidValueError, match="logits_processors"):
            llm.generate(STORY, SamplingParams(logits_processors=[wrong]))


# Scores


def test_scores_are_those_of_the_logits_in_double_precision(llm: LLM, smollm2_gguf: Path) -> None:
    runner = make_runner(smollm2_gguf, dtype="auto")
    texts = ["The capital of France is Paris, and that of Italy is Rome.", "a b", "zzz qqq 東京 🙂"]
    for text, found in zip(texts, llm.score(texts), strict=True):
        ids = llm.tokenizer.encode(text)
        each = logits(runner, ids, shuffled=False).double().log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        assert found.logprobs == pytest.approx(each.tolist(), abs=1e-4)
        assert found.perplexity == pytest.approx(math.exp(-each.mean().item()), rel=1e-4)
        assert found.logprob == pytest.approx(each.sum().item(), rel=1e-5)
    assert math.isnan(llm.score([[5]])[0].perplexity)
    assert llm.score([]) == []


def test_the_perplexity_of_what_cannot_be_is_infinite() -> None:
    assert Score([-9999.0]).perplexity == math.inf


# A tiny model from a folder

LETTERS = pre_tokenizers.ByteLevel.alphabet()


def make_folder(folder: Path, generation: dict[str, Any], **config: Any) -> Any:
    """A random Llama over bytes: 0 and 1 are special, 2 to 257 the bytes."""
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: place + 2 for place, letter in enumerate(sorted(LETTERS))}}
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    torch.manual_seed(0)
    shape = {
        "vocab_size": 270,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    more = {"num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **more, **config)).float().eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **generation}))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7, "do_sample": True}
    return path, make_folder(path, generation)


@pytest.fixture(scope="module")
def tiny(folder: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(folder[0], max_batch_size=4, block_size=4, max_blocks=48, prealloc_blocks=4, check_invariants=True) as llm:
        yield llm


def test_perplexity_is_what_transformers_gives(folder: tuple[Path, Any], tiny: LLM) -> None:
    for text in ("hello world", "Grüße aus 東京"):
        ids = tiny.tokenizer.encode(text)
        with torch.inference_mode():
            loss = folder[1](torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
        assert tiny.score(text)[0].perplexity == pytest.approx(math.exp(loss), rel=1e-3)


def test_the_models_own_defaults_are_used_where_none_are_given(tiny: LLM) -> None:
    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=7)
    assert tiny.get_default_sampling_params() == expected
    assert len(tiny.generate("hello")[0].outputs[0].token_ids) <= 7
    assert sum(1 for _ in tiny.stream("hello")) <= 7
    assert SamplingParams() != expected


def test_no_parameters_for_some_prompts_are_refused(tiny: LLM) -> None:
    with pytest.raises(InvalidValueError, match="0 for 2 prompts"):
        tiny.generate(["a", "b"], [])


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 7}, {"top_k": "x"}, {"max_new_tokens": 0}, {"repetition_penalty": 0}], ids=str
)
def test_defaults_that_cannot_be_are_the_checkpoints_fault(tmp_path: Path, wrong: dict[str, Any]) -> None:
    make_folder(tmp_path, wrong)
    with pytest.raises(CheckpointError, match="generation_config"):
        LLM(tmp_path, max_blocks=8)


@pytest.mark.parametrize("end", [100_000, [1, 100_000], [1, 269], -1, True], ids=str)
def test_an_end_that_no_token_is_breaks_nothing(tmp_path: Path, end: Any) -> None:
    """Refused at load, or harmless."""
    make_folder(tmp_path, {"eos_token_id": end})
    try:
        llm = LLM(tmp_path, max_blocks=48, block_size=4, prealloc_blocks=0, check_invariants=True)
    except CheckpointError:
        return
    with llm:
        params = [greedy(6), greedy(6, min_tokens=3), SamplingParams(structured_outputs={"regex": "[ab]{3}"}, min_tokens=1)]
        found = [output.outputs[0] for output in llm.generate(["hello"] * 3, params)]
        assert [each.error for each in found] == [None] * 3
        assert len(found[2].text) == 3
        sound(llm)


def test_a_structure_is_refused_where_no_token_could_end_it(tmp_path: Path) -> None:
    make_folder(tmp_path, {"eos_token_id": None}, pad_token_id=0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**content, "eos_token_id": None, "bos_token_id": None}))
    with LLM(tmp_path, max_blocks=48, block_size=4, prealloc_blocks=0, check_invariants=True) as llm:
        with pytest.raises(UnsupportedError, match=r"structured_outputs: .*no end-of-sequence token"):
            one(llm, "hello", SamplingParams(structured_outputs={"choice": ["yes"]}))
        found = one(llm, "hello", SamplingParams(structured_outputs={"choice": ["yes"]}, stop_token_ids=[5]))
        assert (found.text, found.finish_reason) == ("yes", "stop")


def test_a_token_beyond_the_vocabulary_forced_upon_a_structure_ends_that_request_alone(tiny: LLM) -> None:
    def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[265] = 1000.0
        return logits

    asked = greedy(5, structured_outputs={"regex": "[a-z]+"}, logits_processors=[force])
    first, second = (output.outputs[0] for output in tiny.generate(["hello"] * 2, [asked, greedy(5, ignore_eos=True)]))
    assert first.finish_reason == "error"
    assert (len(second.token_ids), second.finish_reason) == (5, "length")


def test_scoring_within_a_deadline_that_passes_is_an_error_of_the_engine(folder: tuple[Path, Any]) -> None:
    with LLM(folder[0], max_blocks=48, block_size=4, timeout_ms=0.001) as llm, pytest.raises(OctavoError):
        llm.score("hello world")


@pytest.mark.parametrize("penalty", [1e-6, 1e-3, 1e6])
def test_no_penalty_that_is_allowed_makes_an_error(tiny: LLM, penalty: float) -> None:
    for more in ({}, {"min_tokens": 3}, {"allowed_token_ids": [5, 6, 7]}, {"temperature": 0}):
        found = one(tiny, "hello", SamplingParams(repetition_penalty=penalty, max_tokens=8, seed=1, **more))
        assert found.error is None, found.error


# Whatever is asked

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "", "a" * 5000, 10**400, float("nan"), b"x", object(), (), {}, {1}, "delta", "json"]),
    st.lists(st.integers(-1, 300) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.integers(-1, 300) | st.text("0123456789ab", max_size=3), st.floats() | st.integers(-200, 200), max_size=3),
)
TEXTS = st.text("abé \ud800<s>", min_size=1, max_size=4)
IDS = st.lists(st.integers(0, 271), min_size=1, max_size=4)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 6),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "temperature": st.just(0) | st.floats(0, 10),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "seed": st.none() | st.integers(-5, 5),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": IDS,
    "bad_words": st.lists(TEXTS, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 20),
    "logprobs": st.integers(0, 21),
    "prompt_logprobs": st.integers(0, 21),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 269), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": IDS,
    "structured_outputs": st.fixed_dictionaries({"regex": st.text("ab*+[](){}\ud800", min_size=1, max_size=6)})
    | st.fixed_dictionaries({"choice": st.lists(TEXTS, min_size=1, max_size=3)})
    | st.fixed_dictionaries(
        {"json": st.recursive(WILD, lambda inner: st.dictionaries(st.sampled_from(["type", "items", "enum", "const", "a"]), inner))}
    ),
    "output_kind": st.sampled_from(["cumulative", "delta", "final"]),
    "logits_processors": st.lists(st.sampled_from(["nothing", "math:sqrt", len, sorted]), max_size=2),
    "timeout_ms": st.none() | st.floats(0.01, 1e6),
    "priority": st.integers(-5, 5),
    "cache_salt": st.none() | st.sampled_from(["x", "y"]),
}


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(LIKELY)), unique=True, max_size=6))
    wild = draw(st.sampled_from([0, 0, 1]))
    fields = {name: draw(WILD if place < wild else LIKELY[name]) for place, name in enumerate(names)}
    return {"max_tokens": 8, **fields}


def test_likely_wishes_name_every_field() -> None:
    assert set(LIKELY) == set(SamplingParams.__struct_fields__)


@given(st.lists(wishes(), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_asked_gives_a_result_or_an_error_and_the_engine_answers_on(tiny: LLM, asked: list[dict[str, Any]]) -> None:
    try:
        params = [SamplingParams.create(**fields) for fields in asked]
        outputs = tiny.generate(["hello"] * len(params), params)
    except OctavoError:
        pass
    else:
        for output, wanted in zip(outputs, params, strict=True):
            assert output.finished
            assert len(output.outputs) == wanted.n
            for found in output.outputs:
                assert found.finish_reason in ("stop", "length", "timeout", "error")
                assert (found.error is not None) == (found.finish_reason == "error")
                assert len(found.token_ids) <= (wanted.max_tokens or 128)
    sound(tiny)
    assert len(one(tiny, "hello", greedy(2, ignore_eos=True)).token_ids) == 2
