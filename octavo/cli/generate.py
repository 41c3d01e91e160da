"""`octavo generate`: one prompt streamed, or many as a batch."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.terminal import progress_bar, show_error, write
from octavo.errors import InvalidValueError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.core.stats import Stats
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams

CUTS = {"length": "--max-tokens or the end of the context", "timeout": "--timeout-ms"}

Message = dict[str, Any]
Prompt = str | list[Message]
"""A text, or the messages of a chat."""


def read_prompts(words: list[str], file: str | None) -> list[Prompt]:
    """The prompts given as arguments, else those of `file` (one a line, `-` for stdin), else stdin as one.

    Raises InvalidValueError where there is none, one is empty, or the file cannot be read.
    """
    if words and file is not None:
        raise InvalidValueError("--file: give prompts as arguments or in a file, not both")
    if file is not None:
        prompts = _read_file(file)
    elif not words and not sys.stdin.isatty():
        prompts = [_read_text("-").removesuffix("\n")]
    else:
        prompts = list(words)
    if not prompts:
        raise InvalidValueError(f"no prompt in {file}" if file else "no prompt: give one as an argument, with --file, or on stdin")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InvalidValueError(f"prompt {number} is empty")
    return prompts


def run(
    llm: LLM, prompts: list[Prompt], params: SamplingParams, chat: bool, system: str | None, as_json: bool, save_stats: str | None = None
) -> None:
    """Answer the prompts on stdout and sum up on stderr; write the engine's record to `save_stats`.

    Exits with 1 where the model failed on some of them.
    """
    wrapped = [_wrap(llm, prompt, chat, system) for prompt in prompts]
    start = time.perf_counter()
    if len(prompts) == params.n == 1 and not as_json:
        outputs = [_stream(llm, wrapped[0], params)]
    else:
        ended = itertools.count(1)
        with progress_bar("Generating") as show:
            outputs = llm.generate(wrapped, params, on_progress=lambda _: show(next(ended), len(prompts)))
        for prompt, output in zip(prompts, outputs, strict=True):
            print(_as_json(prompt, output) if as_json else _as_text(prompt if len(prompts) > 1 else None, output))
    sys.stdout.flush()
    typer.echo(_summary(llm, outputs, time.perf_counter() - start), err=True)
    failures = list(_failures(outputs))
    for failure in failures:
        show_error(failure)
    if save_stats is not None:
        from octavo.cli.advise import save

        save(llm.record(), save_stats)
    if failures:
        raise typer.Exit(1)


def _read_file(file: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if line.strip():
            prompts.append(_parse_line(f"{file}, line {number}", line) if file.endswith(".jsonl") else line)
    return prompts


def _parse_line(place: str, line: str) -> Prompt:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{place}: not JSON ({error})") from None
    match content:
        case {"prompt": str(text)} if len(content) == 1:
            return text
        case {"messages": [*messages]} if len(content) == 1 and all(isinstance(message, dict) for message in messages):
            return messages
    raise InvalidValueError(f'{place}: allowed: {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}]}}')


def _read_text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidValueError(f"{'stdin' if file == '-' else file}: not a text in UTF-8") from None
    except OSError as error:
        raise InvalidValueError(f"{file}: cannot be read ({error.strerror})") from None


def _wrap(llm: LLM, prompt: Prompt, chat: bool, system: str | None) -> Any:
    """What the engine takes: a text as it is, a chat as the token ids of its template."""
    if isinstance(prompt, str) and not chat and system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return {"prompt_token_ids": llm.tokenizer.encode_chat(messages)}


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    last: RequestOutput
    with closing(llm.stream(prompt, params)) as outputs:
        try:
            for last in outputs:
                write(last.delta)
        except KeyboardInterrupt:
            write("\n")
            raise
    write("\n")
    return last


def _as_text(prompt: Prompt | None, output: RequestOutput) -> str:
    """The prompt, where it is one of many, and its answers, numbered where there are several."""
    said = [one.text for one in output.outputs]
    if len(said) > 1:
        said = [f"[{number}] {text}" for number, text in enumerate(said, 1)]
    answers = "\n\n".join(said)
    return answers if prompt is None else f"> {_shown(prompt)}\n{answers}\n"


def _as_json(prompt: Prompt, output: RequestOutput) -> str:
    """One answer's fields stand beside the prompt's; several are a list, `answers`, and `completion_tokens` is their sum."""
    answers = [_answer(one) for one in output.outputs]
    record: dict[str, Any] = {"prompt": prompt}
    record |= answers[0] if len(answers) == 1 else {"answers": answers}
    record |= {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        "cached_tokens": output.num_cached_tokens or 0,
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [scores and {key: asdict(one) for key, one in scores.items()} for scores in output.prompt_logprobs]
    return json.dumps(record)


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    if answer.stop_reason is not None:
        record["stop_reason"] = answer.stop_reason
    if answer.logprobs is not None:
        record["logprobs"] = [{key: asdict(one) for key, one in scores.items()} for scores in answer.logprobs]
    return record | ({"error": answer.error} if answer.error else {})


def _failures(outputs: list[RequestOutput]) -> Iterator[str]:
    for number, output in enumerate(outputs, 1):
        for answer in output.outputs:
            if answer.finish_reason == "error":
                which = f", answer {answer.index + 1}" if len(output.outputs) > 1 else ""
                yield f"prompt {number}{which}: {answer.error}"


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))


def _summary(llm: LLM, outputs: list[RequestOutput], seconds: float) -> str:
    answers = [answer for output in outputs for answer in output.outputs]
    tokens = sum(len(answer.token_ids) for answer in answers)
    waits = [output.metrics.first_token - output.metrics.arrival for output in outputs if output.metrics.first_token is not None]
    shared = sum(output.num_cached_tokens or 0 for output in outputs)
    stats = llm.stats()
    blocks = stats.blocks
    ends = Counter(answer.finish_reason for answer in answers)
    return ", ".join(
        [
            *([f"{len(outputs)} prompts"] if len(outputs) > 1 else []),
            *([f"{len(answers)} answers"] if len(answers) > len(outputs) else []),
            f"{tokens} tokens",
            f"{tokens / seconds:.1f} tokens/s",
            *([f"first token after {statistics.median(waits):.2f} s"] if waits else []),
            f"at most {blocks.peak_used} of {blocks.ceiling} KV blocks used"
            + (f" ({blocks.total} committed)" if blocks.total < blocks.ceiling else ""),
            *([f"{shared} prompt tokens shared"] if shared else []),
            *([_audits(stats)] if llm.config.memory.check_invariants and stats.steps else []),
            *(f"{count} cut by {CUTS[reason]}" for reason, count in sorted(ends.items()) if reason in CUTS),
        ]
    )


def _audits(stats: Stats) -> str:
    """What --check-invariants cost."""
    checked, stepped = stats.seconds["check"], stats.seconds["step"]
    return f"{stats.steps} audits of {checked / stats.steps * 1000:.2f} ms each ({checked / stepped:.0%} of the step time)"
