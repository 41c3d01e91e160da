import io
import sys

from octavo.cli.terminal import progress_bar
from octavo.loading import hub


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("Loading") as show:
        show(1, 2)
        show(2, 2)
    assert "Loading" in sys.stderr.getvalue()
    assert "2/2" in sys.stderr.getvalue()


def test_a_pull_draws_one_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with hub._progress() as progress:
        progress.advance(progress.add_task("Fetching", total=1), 1)
    assert "Fetching" in sys.stderr.getvalue()


def test_silence_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar("Loading") as show, hub._progress() as progress:
        show(1, 2)
    assert progress is None
    assert sys.stderr.getvalue() == ""
