"""What the commands share at the terminal: an opened engine, a spinner, a bar, an interrupt that waits for its moment."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo import LLM


@contextmanager
def open_llm(model: str, revision: str | None, config: EngineConfig) -> Iterator[LLM]:
    """Find the model first, so that a wrong name is told at once, then load it behind a spinner."""
    from octavo.loading import hub

    path = hub.resolve(model, revision)
    with spinner("Loading model"):
        from octavo import LLM

        llm = LLM(str(path), config=config.to_dict())
    with llm:
        yield llm


@contextmanager
def spinner(about: str) -> Iterator[None]:
    """A spinner on stderr while the body runs; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(about):
        yield


@contextmanager
def progress_bar(about: str, total: int) -> Iterator[Callable[[Any], None]]:
    """Yield a function to be called once for each of `total` things done; silent where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(about, total=total)
        yield lambda _: progress.advance(task)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn a first Ctrl-C into an answer to the yielded question, so that it falls between engine steps; a second interrupts."""
    asked = threading.Event()

    def note(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def show_error(text: object) -> None:
    """One line on stderr, in the form of every error of this program."""
    typer.echo(f"octavo: error: {' '.join(str(text).splitlines())}", err=True)


def write(text: str) -> None:
    """Text to stdout at once, as answers are streamed."""
    sys.stdout.write(text)
    sys.stdout.flush()
