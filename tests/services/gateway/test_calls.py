"""Outputs are put together right whatever order, overlap or loss their pieces come with."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.calls import Call, Output
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import Finished, SubmitText

TEXT = "héllo wörld, 世界 🙂 and more"  # token i covers character i, its id is 100 + i


@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.booleans())))
def test_pieces_in_any_order_give_the_text_once(pieces: list[tuple[int, int, bool]]) -> None:
    """Piece (begin, end): what a sender that was asked to resume anywhere may send. Takes happen at random times."""
    output, text = Output(), ""
    ids: list[int] = []
    for begin, end, take in [*((a, max(a, b), take) for a, b, take in pieces), (0, len(TEXT), True)]:
        known = output.chars
        assert output.feed(begin, TEXT[begin:end], end, int32(range(100 + begin, 100 + end))) == (begin <= known)
        assert output.chars == (known if begin > known else max(known, end))
        if take and (delta := output.take()):
            text, ids = text + delta.text, ids + delta.ids
            assert TEXT.startswith(text)
    assert text == TEXT and ids == list(range(100, 100 + len(TEXT)))


def test_a_follower_hears_at_once_and_what_it_raises_reaches_who_waits() -> None:
    async def scenario() -> None:
        call, heard = Call([SubmitText(1, "req", "completions", SamplingParams())]), 0

        def follow() -> bool:
            nonlocal heard
            heard += 1
            if heard == 3:
                raise ValueError("cannot be written")
            return heard == 1

        call.follow = follow
        call.tell()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.changed(), 0.01)  # taken care of
        call.tell()
        await asyncio.wait_for(call.changed(), 1)  # not taken: who waits is woken
        call.tell()
        with pytest.raises(ValueError, match="cannot be written"):
            await asyncio.wait_for(call.changed(), 1)
        assert heard == 3

    asyncio.run(scenario())


def test_the_end_is_given_once_and_nothing_follows_it() -> None:
    output = Output()
    assert output.take() is None
    output.feed(0, "ab", 1, int32([]))
    output.finish(Finished(1, 0, 1, "stop"))
    output.finish(Finished(1, 0, 1, "length"))
    delta = output.take()
    assert delta is not None and delta.text == "ab" and delta.finished is not None and delta.finished.reason == "stop"
    assert output.feed(2, "late", 2, int32([])) and output.take() is None
