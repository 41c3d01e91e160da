"""What the commands share at the terminal: an opened engine, a bar, an interrupt that waits for its moment."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo import LLM


@contextmanager
def open_llm(model: str, revision: str | None, config: EngineConfig) -> Iterator[LLM]:
    """Find the model first, so that a wrong name is told at once, then load it behind a bar."""
    from octavo.loading import hub

    path = hub.resolve(model, revision)
    with progress_bar("Loading model") as show:
        from octavo import LLM

        llm = LLM(path, config=config, on_tensor=show)
    with llm:
        typer.echo(f"{model}: {llm.capacity}", err=True)
        yield llm


@contextmanager
def progress_bar(about: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to be called with (done, total); the bar is on stderr, and nowhere where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(about, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


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
