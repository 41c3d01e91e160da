"""Stop texts found in an answer while it grows, however its text is split."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Passes text on, save for what may be the beginning of a stop text, and ends with the first one that is complete.

    Of two complete at the same character the longer counts. What has been passed on is never taken back. Each character moves
    every stop text's state once (Knuth, Morris and Pratt), so that a long one costs no more than a short one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """(what may be passed on, the stop text that was found). may_end: False where one that is complete within `text` does not count."""
        states = self._states
        for place, character in enumerate(text, 1):
            found = ""
            for number, (stop, borders) in enumerate(self._stops):
                state = states[number]
                while state and stop[state] != character:
                    state = borders[state]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    found = max(found, stop, key=len)
                    state = borders[state]
                states[number] = state
            if found and may_end:
                whole, self._held = self._held + text[:place], ""
                return whole if self._include else whole[: -len(found)], found
        whole = self._held + text
        kept = len(whole) - max(states, default=0)
        self._held = whole[kept:]
        return whole[:kept], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each length, how much of the beginning stands at the end of so many first characters, short of all."""
    borders, state = [0, 0], 0
    for character in stop[1:]:
        while state and stop[state] != character:
            state = borders[state]
        if stop[state] == character:
            state += 1
        borders.append(state)
    return borders
