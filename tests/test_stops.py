"""Stop strings: held back across pieces, cut out, the same however the text is divided."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.stops import StopStrings, stop_strings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    found = StopStrings(stops)
    passed = [found.push(piece) for piece in pieces]
    return [*passed, found.finish()], found.hit


def test_report_35_a_stop_string_over_two_tokens_leaks_nothing() -> None:
    passed, hit = run(["</answer>"], ["4", "2</", "ans", "wer>", "tail"])
    assert passed == ["4", "2", "", "", "", ""] and hit == "</answer>"


def test_report_33_the_stop_string_is_trimmed_and_named() -> None:
    assert run(["END", "X"], ["one ", "END two"]) == (["one ", "", ""], "END")


def test_what_only_begins_like_one_comes_when_that_is_known() -> None:
    assert run(["</answer>"], ["a <", "/ans", "ers>"]) == (["a ", "", "</ansers>", ""], None)
    assert run(["</answer>"], ["a </ans"]) == (["a ", "</ans"], None)
    assert run(["aab"], ["aaa", "ab"]) == (["a", "a", ""], "aab")


def test_the_first_to_be_complete_counts_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")
    assert run(["c", "abc"], ["xabc"]) == (["x", ""], "abc")


def test_without_stop_strings_all_passes_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


TEXT = st.text("ab<", max_size=20)


@given(st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4), st.lists(TEXT, max_size=8))
def test_any_division_gives_the_same(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    passed, hit = run(stops, pieces)
    at_once, first = run(stops, [text])
    assert ("".join(passed), hit) == ("".join(at_once), first)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert "".join(passed) == (text[: min(ends)[1]] if ends else text)
    assert (hit is None) == (not ends)


@given(st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4), st.lists(TEXT, max_size=8))
def test_only_what_may_begin_one_is_held(stops: list[str], pieces: list[str]) -> None:
    found, given_in, passed = StopStrings(stops), "", ""
    for piece in pieces:
        given_in += piece
        passed += found.push(piece)
        held = given_in[len(passed) :]
        assert given_in.startswith(passed)
        assert found.hit is not None or not held or any(s.startswith(held) for s in stops)


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ([""], ValueError, "stop[0] has 0 characters, allowed are 1 to 256"),
        ("x" * 257, ValueError, "stop[0] has 257 characters"),
        (["a"] * 17, ValueError, "stop has 17 strings, allowed are 16"),
        (["a", 5], TypeError, "stop[1] is a int, a string is needed"),
    ],
)
def test_bad_stop_strings_are_refused(stop: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        stop_strings(stop)


def test_the_forms_of_the_option() -> None:
    assert stop_strings(None) == () and stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")
