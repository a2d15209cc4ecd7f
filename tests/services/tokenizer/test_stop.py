"""Stop strings against a search of the whole text after every character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.stop import StopMatcher, StopStrings

strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def brute_force(text: str, stops: list[str]) -> tuple[str, int] | None:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return stop, end
    return None


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=4), max_size=8), stops=strings)
def test_first_match_to_end_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher, text = StopMatcher(StopStrings(stops)), ""
    for piece in pieces:
        text += piece
        match = matcher.feed(piece)
        expected = brute_force(text, stops)
        assert (match and (match.string, match.end)) == expected
        if match is not None:
            assert text[match.start : match.end] == match.string
            return
        longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert matcher.held == longest


def test_a_match_over_many_pieces() -> None:
    matcher = StopMatcher(StopStrings(["DEFGHIJ"]))
    fed = [matcher.feed(piece) for piece in ("ABC", "DEF", "G", "HI")]
    assert fed == [None] * 4 and matcher.held == 6
    match = matcher.feed("JK")
    assert match is not None and (match.start, match.end) == (3, 10)


def test_only_a_real_prefix_is_held() -> None:
    matcher = StopMatcher(StopStrings(["\n\nUser:"]))
    matcher.feed("Hello\n")
    assert matcher.held == 1
    matcher.feed("there")
    assert matcher.held == 0
