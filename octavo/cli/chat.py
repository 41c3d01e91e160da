"""`octavo chat`: a conversation in the terminal, or line by line over a pipe."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.terminal import deferred_interrupt, show_error, write
from octavo.errors import InvalidValueError, OctavoError, PromptTooLongError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

HELP = """/reset    forget the conversation
/exit     leave (/quit and Ctrl-D too)
/help     these lines
Ctrl-C stops an answer."""

NOTES = {"length": "cut at --max-tokens or the end of the context", "timeout": "cut at --timeout-ms"}


class Conversation:
    """The messages so far. A turn without an answer leaves no trace; a stopped answer stays as far as it came."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = list(self._opening)

    def ask(self, question: str) -> None:
        """Stream the answer to stdout. Raises OctavoError where the engine refuses the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = {"prompt_token_ids": self._llm.tokenizer.encode_chat(asked)}
        last: RequestOutput | None = None
        with deferred_interrupt() as interrupted, closing(self._llm.stream(prompt, self._params)) as outputs:
            for last in outputs:
                write(last.delta)
                if interrupted():
                    break
        if last is None:
            return
        write("\n")
        answer = last.outputs[0]
        if answer.finish_reason == "error":
            show_error(answer.error)
            return
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        note = NOTES.get(answer.finish_reason or "", "" if answer.finish_reason else "stopped")
        if note:
            typer.echo(f"({note})", err=True)


def run(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read lines until /exit or the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() its line editing)
        print("/help lists the commands.")
    conversation = Conversation(llm, params, system)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            print(end="\n" if interactive else "")
            return
        except UnicodeDecodeError:
            raise InvalidValueError("stdin: not a text in UTF-8") from None
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D or /exit leaves)", err=True)
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            print(HELP)
        elif line.startswith("/"):
            show_error(f"{line.split()[0]}: no such command; /help lists them")
        elif line:
            try:
                conversation.ask(line)
            except PromptTooLongError as error:
                show_error(f"{error}; /reset forgets the conversation so far")
            except OctavoError as error:
                show_error(error)
