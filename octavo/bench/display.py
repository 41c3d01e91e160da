"""What the benchmarks share at the terminal and on paper: tables, a bar, pictures, the medians they print."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidValueError, OctavoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 150


def write_json(content: Any, file: str) -> None:
    """To a file, or printed where that is `-`."""
    text = json.dumps(content, indent=2)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")


def console() -> Console:
    """As wide as the tables need."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    return console


def table(title: str, *columns: str) -> Table:
    """Names to the left, figures in the columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


@contextmanager
def progress(about: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; the function yielded moves it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(about, total=total)
        yield lambda: progress.advance(task)


def figure_class() -> Any:
    """Raises OctavoError where matplotlib is absent."""
    from importlib import import_module

    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise OctavoError("a picture takes matplotlib, which is not installed; pip install octavo[bench] brings it") from None


def check_picture(out: str | None) -> None:
    """Before minutes are spent on what it would show."""
    if out is not None:
        figure_class()
        check_file("out", out)


def check_file(name: str, file: str | None) -> None:
    """Raises InvalidValueError under the option's name where the file's folder is absent; None and - need none."""
    if file is not None and file != "-" and not Path(file).absolute().parent.is_dir():
        raise InvalidValueError(f"{name}: there is no folder {Path(file).absolute().parent}")


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median and spread."""
    known = list(values)
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def spread(values: Iterable[float], form: str = ".1f", factor: float = 1) -> str:
    """The same as a cell of a table: the median, and beneath it least and most where they differ."""
    median, low, high = (format(value * factor, form) for value in summary(values).values())
    return median if low == high else f"{median}\n{low}..{high}"
