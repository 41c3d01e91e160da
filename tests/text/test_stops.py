"""Stop texts, against reading the whole text at once."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stops import StopSearch

TEXTS = st.text("ab", max_size=14) | st.text("abé🙂", max_size=10)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4) | st.text("abé🙂", min_size=1, max_size=3), min_size=1, max_size=5)


def first_stop(text: str, stops: list[str], may_end: list[bool] | None = None) -> tuple[int, str] | None:
    """Where the first complete stop text ends, and the longest that ends there. may_end: of each character, whether one may end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and (may_end is None or may_end[end - 1]):
            return end, max(ending, key=len)
    return None


def may_begin(text: str, stops: list[str]) -> int:
    """Length of the longest end of a text with which a stop text begins, short of the whole of it."""
    return max(length for length in range(len(text) + 1) if not length or any(s[:-1].startswith(text[-length:]) for s in stops))


@st.composite
def splits(draw: st.DrawFn) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


@given(splits(), STOPS, st.booleans())
@settings(max_examples=250)
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    text, search, passed, found, pushed = "".join(pieces), StopSearch(stops, include), "", None, 0
    for piece in pieces:
        before = passed
        delta, found = search.push(piece)
        passed, pushed = passed + delta, pushed + len(piece)
        assert passed.startswith(before)
        if found is not None:
            break
        assert passed == text[: pushed - may_begin(text[:pushed], stops)], "all that cannot begin a stop text, and no more"
    expected = first_stop(text, stops)
    if expected is None:
        assert found is None
        assert passed + search.finish() == text
    else:
        end, stop = expected
        assert found == stop
        assert passed == text[: end if include else end - len(stop)]
        assert pushed >= end
        assert search.finish() == ""


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), max_size=8), STOPS, st.booleans())
@settings(max_examples=250)
def test_a_stop_counts_only_where_it_may_end(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> None:
    text = "".join(piece for piece, _ in pieces)
    search, passed, found = StopSearch(stops, include), "", None
    for piece, may_end in pieces:
        delta, found = search.push(piece, may_end)
        passed += delta
        if found is not None:
            break
    expected = first_stop(text, stops, [may_end for piece, may_end in pieces for _ in piece])
    if expected is None:
        assert found is None
        assert passed + search.finish() == text
    else:
        end, stop = expected
        assert (found, passed) == (stop, text[: end if include else end - len(stop)])


def test_of_two_stops_the_one_complete_first_ends_the_text() -> None:
    assert StopSearch(["bcd", "c"]).push("abcd") == ("ab", "c")
    assert StopSearch(["c", "bcd"], include=True).push("abcd") == ("abc", "c")


def test_of_two_complete_together_the_longer_counts() -> None:
    for stops in (["c", "abc", "bc"], ["bc", "c", "abc"]):
        search = StopSearch(stops)
        assert [search.push(one) for one in "xabc"] == [("x", None), ("", None), ("", None), ("", "abc")]


def test_a_false_beginning_is_passed_on_in_full() -> None:
    search = StopSearch(["\n\nUser:"])
    assert [search.push(one)[0] for one in ("Hi", "\n", "\nUse", "less")] == ["Hi", "", "", "\n\nUseless"]
    assert search.finish() == ""


def test_the_same_stop_twice_is_one() -> None:
    assert StopSearch(["ab", "ab"]).push("xab") == ("x", "ab")


@pytest.mark.parametrize("others", ["c" + "a" * 4094, "a" * 4094 + "c", "ab" * 2048], ids=["late start", "late end", "periodic"])
def test_a_push_costs_little_however_many_and_long_the_stops(others: str) -> None:
    """64 stops of 4096 characters, one of which the text keeps on promising: a few milliseconds a token at most."""
    search, began = StopSearch(["a" * 4095 + "b", *(chr(200 + place) + others[1:] for place in range(63))]), time.process_time()
    search.push("a" * 4095)
    for _ in range(50):
        assert search.push("a") == ("a", None)
    assert time.process_time() - began < 0.5
