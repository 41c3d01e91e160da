"""`octavo generate`: one prompt streamed, or many as a batch."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.terminal import progress_bar, show_error, write
from octavo.errors import InvalidValueError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.outputs import RequestOutput
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


def run(llm: LLM, prompts: list[Prompt], params: SamplingParams, chat: bool, system: str | None, as_json: bool) -> None:
    """Answer the prompts on stdout and sum up on stderr. Exits with 1 where the model failed on some of them."""
    wrapped = [_wrap(llm, prompt, chat, system) for prompt in prompts]
    start = time.perf_counter()
    if len(prompts) == 1 and not as_json:
        outputs = [_stream(llm, wrapped[0], params)]
    else:
        ended = itertools.count(1)
        with progress_bar("Generating") as show:
            outputs = llm.generate(wrapped, params, on_progress=lambda _: show(next(ended), len(prompts)))
        for prompt, output in zip(prompts, outputs, strict=True):
            print(_as_json(prompt, output) if as_json else f"> {_shown(prompt)}\n{output.outputs[0].text}\n")
    sys.stdout.flush()
    typer.echo(_summary(llm, outputs, time.perf_counter() - start), err=True)
    failed = [(number, output.outputs[0]) for number, output in enumerate(outputs, 1) if output.outputs[0].finish_reason == "error"]
    for number, answer in failed:
        show_error(f"prompt {number}: {answer.error}")
    if failed:
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


def _as_json(prompt: Prompt, output: RequestOutput) -> str:
    answer = output.outputs[0]
    record = {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
    }
    return json.dumps(record | ({"error": answer.error} if answer.error else {}))


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))


def _summary(llm: LLM, outputs: list[RequestOutput], seconds: float) -> str:
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    waits = [output.metrics.first_token - output.metrics.arrival for output in outputs if output.metrics.first_token is not None]
    blocks = llm.stats().blocks
    ends = Counter(output.outputs[0].finish_reason for output in outputs)
    return ", ".join(
        [
            *([f"{len(outputs)} prompts"] if len(outputs) > 1 else []),
            f"{tokens} tokens",
            f"{tokens / seconds:.1f} tokens/s",
            *([f"first token after {statistics.median(waits):.2f} s"] if waits else []),
            f"at most {blocks.peak_used} of {blocks.total} KV blocks used",
            *(f"{count} cut by {CUTS[reason]}" for reason, count in sorted(ends.items()) if reason in CUTS),
        ]
    )
