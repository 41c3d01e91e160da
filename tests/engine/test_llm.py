"""`LLM` with the real model: what a user of it sees."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.stats import Record
from octavo.errors import CheckpointError, ConfigError, EngineError, InvalidValueError, ModelNotFoundError, PromptTooLongError
from octavo.outputs import RequestOutput
from octavo.plan import StepPlan, StepResult, Tier
from octavo.worker.kv_store import KVStore
from octavo.worker.runner import Runner


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, max_model_len=512, max_batch_size=8, prealloc_blocks=8, check_invariants=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    stats = llm.stats()
    assert (stats.blocks.used, stats.running, stats.waiting) == (0, 0, 0)
    assert llm.generate("The capital of France is", greedy(1))[0].outputs[0].text == " Paris"


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def longer(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_the_forms_of_a_prompt_agree(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    forms = ["The capital of France is", ids, {"prompt_token_ids": ids}]
    outputs = [llm.generate(form, greedy(8))[0] for form in forms] + llm.generate(forms, greedy(8))
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate(["One", "Two"], [greedy(2), greedy(5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(InvalidValueError, match="3 for 2 prompts"):
        llm.generate(["One", "Two"], [greedy(2)] * 3)


def test_a_stream_joins_to_the_whole(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", greedy(20))[0].outputs[0]
    seen = [(output.delta, output.finished) for output in llm.stream("Once upon a time", greedy(20))]
    assert "".join(delta for delta, _ in seen) == whole.text
    assert [finished for _, finished in seen].count(True) == 1
    assert len(seen) == 20


def test_a_closed_stream_frees_its_blocks_and_one_never_started_takes_none(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", greedy(400))
    next(stream)
    assert llm.stats().blocks.used > 0
    stream.close()
    assert llm.stats().blocks.used == 0
    llm.stream("Once upon a time", greedy(400)).close()


def test_aborting_from_within(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", greedy(400))
    output = next(stream)
    assert llm.abort(output.request_id)
    last = list(stream)[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert not llm.abort(output.request_id)


def test_a_deadline_ends_with_timeout_and_keeps_what_was_said(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True, timeout_ms=1500)
    output = llm.generate("Once upon a time", params)[0]
    assert output.outputs[0].finish_reason == "timeout"
    assert 0 < len(output.outputs[0].token_ids) < 480


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    texts = [output.outputs[0].text for output in llm.generate(["Once upon a time"] * 3, params)]
    assert texts[0] == texts[1] != texts[2]


def test_progress_is_told_once_a_request(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    outputs = llm.generate(["One", "Two", "Three"], greedy(4), on_progress=seen.append)
    assert sorted(output.request_id for output in seen) == sorted(output.request_id for output in outputs)


def test_stop_ids_end_the_answer_and_are_not_spoken(llm: LLM) -> None:
    paris = llm.tokenizer.encode(" Paris")
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, stop_token_ids=paris))[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("", paris, "stop", paris[0])


def test_the_longest_sequence_ends_with_length(llm: LLM) -> None:
    output = llm.generate([5] * 500, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "it is empty"),
        ([], "prompts|empty"),
        ({"prompt_token_ids": []}, "it is empty"),
        ([1, 49152], "token id 49152; allowed: 0 to 49151"),
        ([[1, -1]], "token id -1; allowed: 0 to 49151"),
        ([[True]], "token id True"),
        (3.5, "allowed: a text, a list of token ids"),
        ([None], "allowed: a text, a list of token ids"),
        ({"prompt": "x"}, "allowed: a text, a list of token ids"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_one_clear_sentence(llm: LLM, prompt: object, said: str) -> None:
    if prompt == []:
        assert llm.generate([]) == []
        return
    with pytest.raises(InvalidValueError, match=said):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_one_bad_prompt_among_good_ones_runs_nothing(llm: LLM) -> None:
    before = llm.stats().steps
    with pytest.raises(InvalidValueError):
        llm.generate(["good", ""])
    assert llm.stats().steps == before


def test_a_prompt_too_long_names_both_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"512 tokens; allowed: 511 at most, .* may have 512 \(max_model_len\)"):
        llm.generate([[5] * 512])


def test_a_pool_that_never_fits_the_prompt_names_both_numbers_and_one_that_does_ends_with_length(smollm2_gguf: Path) -> None:
    with LLM(smollm2_gguf, max_blocks=4, prealloc_blocks=0, check_invariants=True) as small:
        with pytest.raises(PromptTooLongError, match=r"64 tokens; allowed: 63 at most, .* may have 64 \(the KV pool\)"):
            small.generate([[5] * 64])
        output = small.generate([[5] * 60], SamplingParams(max_tokens=100, ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_a_row_of_nan_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Once upon a time", "The capital of France is", "In the beginning"]
    expected = [output.outputs[0].text for output in llm.generate(prompts, greedy(12))]
    forward = Runner.forward
    calls = 0

    def poisoned(self: Runner, rows: list) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = forward(self, rows)
        if calls == 4:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(Runner, "forward", poisoned)
    outputs = [output.outputs[0] for output in llm.generate(prompts, greedy(12))]
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error == "the model gave no finite logits for this request"
    assert [outputs[0].text, outputs[2].text] == [expected[0], expected[2]]
    monkeypatch.undo()
    assert [output.outputs[0].text for output in llm.generate(prompts, greedy(12))] == expected


def test_an_exception_in_a_step_ends_its_requests_and_no_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Runner, rows: list) -> torch.Tensor:
        monkeypatch.undo()
        raise RuntimeError("the device caught fire")

    prompts = ["Once upon a time"] * 12  # more than a batch: four wait
    monkeypatch.setattr(Runner, "forward", broken)
    outputs = [output.outputs[0] for output in llm.generate(prompts, greedy(4))]
    assert [output.finish_reason for output in outputs] == ["error"] * 8 + ["length"] * 4
    assert outputs[0].error == "RuntimeError: the device caught fire"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 9000}, r"max_model_len: 9000; allowed: up to the model's context of 8192 tokens"),
        ({"max_blocks": 1}, r"max_blocks: 1; a pool needs at least 2 blocks of \d+ bytes"),
        ({"max_blocks": 100_000_000}, r"max_blocks: 100000000; .* bytes and \d+ are available"),
        ({"max_blocks": 64, "swap_space": 1000}, r"swap_space: 1000; allowed: 0, or at least a block of \d+ bytes"),
        ({"max_blocks": 64, "swap_space": "1000TiB"}, r"swap_space: \d+; allowed: up to \d+ bytes, what the KV pool at its ceiling leaves"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_met_are_refused_with_numbers(smollm2_gguf: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(smollm2_gguf, **settings)


def test_a_device_that_is_not_there_is_refused(smollm2_gguf: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: 'cuda'; no CUDA device"):
            LLM(smollm2_gguf, device="cuda")


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("no-such-model")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        LLM(tmp_path / "model.gguf")


def test_a_closed_engine_says_so(smollm2_gguf: Path) -> None:
    llm = LLM(smollm2_gguf, max_blocks=8)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize(("quantization", "megabytes"), [("auto", 93), ("none", 257)])
def test_loading_takes_little_more_than_the_model(quantization: str, megabytes: int, smollm2_gguf: Path) -> None:
    """Anonymous memory above what `import torch` takes, at its peak: the weights, and a quarter of what they are in bfloat16."""
    program = f"""
import torch, threading
torch.ones(64, 64) @ torch.ones(64, 64)
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
before, peak = anonymous(), 0.0
def watch(taken, total):
    global peak
    peak = max(peak, anonymous())
from octavo import LLM
llm = LLM({str(smollm2_gguf)!r}, max_blocks=16, prealloc_blocks=0, on_tensor=watch, quantization={quantization!r})
print(max(peak, anonymous()) - before, llm.capacity.weight_bytes)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    taken, weights = float(ran.stdout.split()[0]), int(ran.stdout.split()[1]) / 2**20
    print(f"anonymous memory: {taken:.0f} MiB for {weights:.0f} MiB of weights, {taken / weights:.2f}")
    assert abs(weights - megabytes) < 1
    assert taken < weights + 64


def test_the_bad_prompt_among_several_is_named(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"^prompts\[1\], prompt: 600 tokens"):
        llm.generate(["good", [5] * 600])


def test_more_threads_than_processors_are_refused(smollm2_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"threads: 4096; allowed: auto, or 1 to \d+, the processors"):
        LLM(smollm2_gguf, threads=4096)


def test_streams_share_the_engine_and_each_reads_its_own(llm: LLM) -> None:
    prompts = ["Once upon a time", "The capital of France is"]
    alone = [llm.generate(prompt, greedy(count))[0].outputs[0].text for prompt, count in zip(prompts, (9, 5), strict=True)]
    first, second = (llm.stream(prompt, greedy(count)) for prompt, count in zip(prompts, (9, 5), strict=True))
    texts = [next(first).delta, next(second).delta]
    texts[0] += "".join(output.delta for output in first)
    texts[1] += "".join(output.delta for output in second)
    assert texts == alone


def test_generate_within_a_stream_and_within_a_progress_callback(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", greedy(6))[0].outputs[0].text
    inner: list[str] = []

    def ask(output: RequestOutput | None = None) -> None:
        inner.append(llm.generate("The capital of France is", greedy(1))[0].outputs[0].text)

    text = ""
    for output in llm.stream("Once upon a time", greedy(6)):
        text += output.delta
        ask()
    assert text == expected
    outputs = llm.generate(["Once upon a time"] * 3, [greedy(2), greedy(4), greedy(6)], on_progress=ask)
    assert outputs[2].outputs[0].text == expected
    assert set(inner) == {" Paris"}


@pytest.mark.parametrize("params", [5, {"max_tokens": 2}, [5], (value for value in ())], ids=str)
def test_parameters_of_another_kind_are_refused_at_once(llm: LLM, params: object) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidValueError, match="allowed: a SamplingParams, or a list of them"):
            call("a", params)  # type: ignore[operator]
    with pytest.raises(InvalidValueError, match="stop_token_ids: 99999; allowed: 0 to 49151"):
        llm.stream("a", SamplingParams(stop_token_ids=(99999,)))


def test_an_empty_conversation_is_refused(llm: LLM) -> None:
    for messages in ([], [[]], [[{"role": "user", "content": "Hi"}], []], "Hi"):
        with pytest.raises(InvalidValueError, match="messages"):
            llm.chat(messages)  # type: ignore[arg-type]


# Several answers


def test_answers_differ_and_each_is_what_its_choice_draws(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3)
    (output,) = llm.generate("Once upon a time", params)
    texts = [one.text for one in output.outputs]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    fewer, alone = (llm.generate("Once upon a time", msgspec.structs.replace(params, n=count))[0].outputs for count in (2, 1))
    assert [one.text for one in fewer] == texts[:2]
    assert alone[0].text == texts[0]


def test_greedy_answers_are_one_and_the_same(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", greedy(8))[0].outputs[0].text
    (output,) = llm.generate("Once upon a time", msgspec.structs.replace(greedy(8), n=3))
    assert [one.text for one in output.outputs] == [expected] * 3


def test_a_stream_of_several_answers_has_each_ones_deltas(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3)
    whole = [one.text for one in llm.generate("Once upon a time", params)[0].outputs]
    texts = ["", "", ""]
    for output in llm.stream("Once upon a time", params):
        texts = [text + one.delta for text, one in zip(texts, output.outputs, strict=True)]
        assert output.delta == output.outputs[0].delta
    assert texts == whole


# Shared prefixes


def test_cached_tokens_are_counted_and_change_no_text(llm: LLM) -> None:
    for length, cached in ((33, 32), (32, 16)):
        prompt = [(5 * place + length) % 1000 + 10 for place in range(length)]
        first, second = (llm.generate(prompt, greedy(4))[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_salt_isolates_and_prefixes_can_be_forgotten(llm: LLM) -> None:
    prompt = [7 * place % 1000 + 10 for place in range(40)]

    def cached(salt: str | None = None) -> int | None:
        return llm.generate(prompt, msgspec.structs.replace(greedy(1), cache_salt=salt))[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached(), cached("a")] == [0, 0, 0, 32]
    assert llm.reset_prefix_cache() >= 6
    assert llm.stats().blocks.cached == 0
    assert [cached("a"), cached("a")] == [0, 32]


# Prompt logprobs


def test_prompt_logprobs_are_the_same_from_a_cached_prefix(llm: LLM) -> None:
    prompt = [3 * place % 1000 + 10 for place in range(17)]
    params = msgspec.structs.replace(greedy(2), prompt_logprobs=2)
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    for output in (first, second):
        scores = output.prompt_logprobs
        assert scores is not None
        assert len(scores) == 17
        assert scores[0] is None
        for token_id, each in zip(prompt[1:], scores[1:], strict=True):
            assert each is not None
            assert len(each) in (2, 3)
            assert all(one.rank <= 2 for other, one in each.items() if other != token_id)  # equals share a rank
            for other, one in each.items():
                assert one.decoded_token == llm.tokenizer.decode([other], skip_special_tokens=False)
                assert one.logprob < 0
            ranked = sorted(each.values(), key=lambda one: one.rank)
            assert [one.logprob for one in ranked] == sorted((one.logprob for one in ranked), reverse=True)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 16


def test_prompt_logprobs_of_none_but_the_prompts_own_tokens(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France is Paris", SamplingParams(prompt_logprobs=0, max_tokens=1))
    assert output.prompt_logprobs is not None
    assert [list(each or []) for each in output.prompt_logprobs] == [[], *([token_id] for token_id in output.prompt_token_ids[1:])]
    assert next(iter(output.prompt_logprobs[-1].values())).rank == 1  # type: ignore[union-attr]


# The pool


def test_compaction_amid_a_stream_changes_nothing_it_says(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", longer(14))[0].outputs[0].text
    llm.reset_prefix_cache()
    llm.compact()
    start = llm.stats().blocks.total
    first, second = llm.stream(list(range(100, 300)), longer(20)), llm.stream("Once upon a time", longer(14))
    next(first)
    text, reports = next(second).delta, []
    first.close()
    llm.reset_prefix_cache()
    for output in second:
        text += output.delta
        if (report := llm.compact()) is not None:
            reports.append(report)
    assert text == expected
    assert reports[0].blocks_moved > 0
    assert reports[0].blocks_before > reports[0].blocks_after >= start
    assert reports[0].bytes_returned == (reports[0].blocks_before - reports[0].blocks_after) * llm.capacity.block_bytes


def test_a_compaction_that_fails_gives_no_wrong_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: KVStore, copies: list) -> None:
        if copies:
            monkeypatch.undo()
            raise RuntimeError("no copies today")

    expected = llm.generate("Once upon a time", longer(14))[0].outputs[0].text
    llm.reset_prefix_cache()
    first, second = llm.stream(list(range(100, 300)), longer(20)), llm.stream("Once upon a time", longer(14))
    next(first)
    text = next(second).delta
    first.close()
    llm.reset_prefix_cache()
    monkeypatch.setattr(KVStore, "copy", broken)
    with contextlib.suppress(EngineError, RuntimeError):
        llm.compact()
    for output in second:
        text += output.delta
    assert output.outputs[0].finish_reason == "error" or text == expected


@pytest.fixture(scope="module")
def small(smollm2_gguf: Path) -> Iterator[LLM]:
    """Eight blocks of four tokens, and some swap."""
    with LLM(smollm2_gguf, block_size=4, max_blocks=8, prealloc_blocks=2, swap_space="2MiB", check_invariants=True) as llm:
        yield llm


PROMPTS = ["Once upon a time", "The capital of France is", "In the beginning", "My name is"]


def test_a_pool_too_small_swaps_and_nobody_can_tell(llm: LLM, small: LLM) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, longer(10))]
    outputs = small.generate(PROMPTS, longer(10))
    assert [output.outputs[0].text for output in outputs] == expected
    stats = small.stats()
    assert stats.swap_outs > 0
    assert (stats.blocks.swap_used, stats.blocks.used) == (0, 0)
    reasons = [event.reason for output in outputs for event in output.metrics.events if event.kind == "preempted"]
    assert len(reasons) == stats.preemptions
    assert any("swapped out" in reason for reason in reasons)


def test_a_step_that_fails_while_it_swaps_gives_no_wrong_text(llm: LLM, small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KVStore.copy

    def broken(self: KVStore, copies: list) -> None:
        if any(one.target_tier is Tier.HOST for one in copies):
            monkeypatch.undo()
            raise RuntimeError("no copies today")
        copy(self, copies)

    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, longer(10))]
    small.reset_prefix_cache()
    monkeypatch.setattr(KVStore, "copy", broken)
    outputs = small.generate(PROMPTS, longer(10))
    assert KVStore.copy is copy
    assert {output.outputs[0].error for output in outputs} == {None, "RuntimeError: no copies today"}
    for output, text in zip(outputs, expected, strict=True):
        assert output.outputs[0].finish_reason == "error" or output.outputs[0].text == text
    small.check_integrity()
    assert small.stats().blocks.used == small.stats().blocks.swap_used == 0


# Failures, figures


def test_an_executor_that_raises_once_ends_the_steps_requests_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    execute = llm.engine.executor.execute

    def broken(plan: StepPlan) -> StepResult:
        if next(calls) == 3:
            raise MemoryError("no room")
        return execute(plan)

    monkeypatch.setattr(llm.engine.executor, "execute", broken)
    params = msgspec.structs.replace(greedy(6), n=2)
    prompts = ["Once upon a time", "The capital of France is", "In the beginning", "My name is", "You are"]
    outputs = llm.generate(prompts, params)
    assert llm.stats().blocks.used == 0
    monkeypatch.undo()
    answers = [one for output in outputs for one in output.outputs]
    assert {one.error for one in answers if one.finish_reason == "error"} == {"MemoryError: no room"}
    assert [one.finish_reason for one in answers].count("error") == 8  # the batch
    expected = [output.outputs[0].text for output in llm.generate(prompts, greedy(6))]
    for output, text in zip(outputs, expected, strict=True):
        assert {one.text for one in output.outputs if one.finish_reason != "error"} <= {text}


def test_advice_comes_from_the_record_which_goes_to_json_and_back(llm: LLM) -> None:
    llm.generate(["Once upon a time", "The capital of France is"], greedy(6))
    record = llm.record()
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    assert [line.figure for line in llm.advise()]
    assert record.block_bytes == llm.capacity.block_bytes
    assert record.stats.generated_tokens > 12
    assert record.stats.seconds["forward"] > 0
    assert record.stats.seconds["check"] > 0
