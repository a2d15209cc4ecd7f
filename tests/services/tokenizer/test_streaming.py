"""What is streamed, joined, against what the whole output says: every way to end, cut at every place."""

from __future__ import annotations

import codecs
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from services.tokenizer.detokenizer import REPLACEMENT, Pieces, bytes_of
from services.tokenizer.request import OutputSequence
from services.tokenizer.stop import StopStrings
from services.tokenizer.tokenizer import Tokenizer
from shared.wire import Finished

ENDS = ("stop", "length", "abort", "error")  # an EOS or stop id, the limit, a cancel, a failure


@dataclass
class Streamed:
    """text: all of it joined. ids: of the tokens it covers. stopped: the stop string found, and the tokens kept."""

    text: str
    ids: list[int]
    stopped: tuple[str, int] | None


def stream(sequence: OutputSequence, ids: list[int], cuts: list[int], end: str) -> Streamed:
    """Pushes ``ids`` cut at ``cuts``, as steps bring them, and checks each piece against those before."""
    text, told, covered = "", list[int](), 0
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    groups = [ids[a:b] for a, b in itertools.pairwise(edges)] + [[]]
    for place, group in enumerate(groups):
        sequence.push(group)
        if place == len(groups) - 1 or sequence.over:
            reason = "stop" if sequence.stop_string is not None else end
            sequence.end(Finished(1, 0, len(sequence.ids), reason))
        for chunk in sequence.take():
            assert chunk.offset == len(text), "text that was sent goes back"  # sglang 31598
            assert chunk.token_count == covered + len(chunk.ids)
            text, told, covered = text + chunk.text, told + chunk.ids, chunk.token_count
        if sequence.finished is not None:
            break
    found = None if sequence.stop_string is None else (sequence.stop_string, len(sequence.ids))
    for offset in {0, len(text) // 2, len(text)}:
        assert "".join(chunk.text for chunk in sequence.since(offset)) == text[offset:]
    return Streamed(text, told, found)


def oracle(raw: list[bytes], stops: list[str], include: bool) -> tuple[str, tuple[str, int] | None]:
    """The text of tokens that are ``raw``, and the stop string with the tokens that are kept, looked for in it all."""
    text = b"".join(raw).decode(errors="replace")
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    complete = [codecs.utf_8_decode(b"".join(raw[:count]), "replace", False)[0] for count in range(1, len(raw) + 1)]
    # What only the end completes comes after the last token.
    kept = next((count for count, so_far in enumerate(complete, 1) if len(so_far) >= end), len(raw))
    return text[: end if include else end - len(stop)], (stop, kept)


texts = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from(["The capital", " Seoul", "안녕", "😀🚀", "世界", "é", "\n\n", "abab"])
    ),
    min_size=1,
    max_size=6,
).map("".join)


def raw_pieces(pieces: Pieces, ids: list[int]) -> list[bytes]:
    return [bytes_of(pieces.get(id, True)) for id in ids]


@st.composite
def cases(draw: st.DrawFn, encode: Any) -> tuple[str, list[int], list[str], bool, list[int], str]:
    text = draw(texts)
    ids = encode(text)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        if text and draw(st.booleans()):  # of the text, so that it is found
            start = draw(st.integers(0, len(text) - 1))
            stops.append(text[start : start + draw(st.integers(1, 6))])
        else:
            stops.append(draw(st.text(min_size=1, max_size=4)))
    cuts = draw(st.lists(st.integers(1, max(1, len(ids))), max_size=len(ids)))
    return text, ids, stops, draw(st.booleans()), cuts, draw(st.sampled_from(ENDS))


def check(pieces: Pieces, case: tuple[str, list[int], list[str], bool, list[int], str], expected: str) -> None:
    _, ids, stops, include, cuts, end = case
    options = {"stops": StopStrings(stops) if stops else None, "include_stop": include}
    streamed = stream(OutputSequence(pieces, **options), ids, cuts, end)
    at_once = stream(OutputSequence(pieces, **options), ids, [], end)
    wanted, stopped = oracle(raw_pieces(pieces, ids), stops, include)
    assert streamed == at_once == Streamed(wanted, ids[: stopped[1]] if stopped else ids, stopped)
    if stopped is None:
        assert wanted == expected
    if REPLACEMENT in streamed.text:  # then it is the model's own, or its bytes are wrong
        raw = b"".join(raw_pieces(pieces, ids))
        assert REPLACEMENT.encode() in raw or raw.decode(errors="ignore").encode() != raw


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_streamed_is_whole_on_a_byte_level_toy(byte_level: Library, data: st.DataObject) -> None:
    case = data.draw(cases(lambda text: byte_level.encode(text, add_special_tokens=False).ids))
    check(Pieces(byte_level), case, case[0])


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_streamed_is_whole_on_the_built_in_tokenizer(builtin: Tokenizer, data: st.DataObject) -> None:
    """Random Unicode, however its characters are cut into tokens; some rare bytes have no token in this vocabulary."""
    case = data.draw(cases(lambda text: builtin.encode(text, False).ids))
    check(builtin.pieces, case, builtin.decode(case[1]))


@settings(max_examples=250, deadline=None)
@given(ids=st.lists(st.integers(2, 400), max_size=20), cuts=st.lists(st.integers(1, 20)), end=st.sampled_from(ENDS))
def test_random_ids_with_broken_characters(byte_level: Library, ids: list[int], cuts: list[int], end: str) -> None:
    """U+FFFD comes only where the bytes are really wrong, and then once, as in the library's own decoding."""
    pieces = Pieces(byte_level)
    streamed = stream(OutputSequence(pieces), ids, cuts, end)
    assert streamed == Streamed(byte_level.decode(ids), ids, None)


def test_a_stop_string_over_four_tokens_is_never_seen(byte_level: Library) -> None:
    """vLLM 3574 and 2577: stop "DEFGHIJ", and the model says DEF, G, HI, J."""
    pieces = Pieces(byte_level)
    ids = [id for part in ("abc", "DEF", "G", "HI", "J", "k") for id in byte_level.encode(part).ids]
    for cuts in ([], list(range(len(ids)))):
        sequence = OutputSequence(pieces, stops=StopStrings(["DEFGHIJ"]))
        streamed = stream(sequence, ids, cuts, "length")
        assert streamed.text == "abc" and streamed.stopped is not None and streamed.stopped[0] == "DEFGHIJ"
    # Nearly a stop string: all of it comes after all, once that is sure.
    sequence = OutputSequence(pieces, stops=StopStrings(["DEFGHIJ"]))
    sequence.push(byte_level.encode("abcDEFGHI").ids)
    assert [chunk.text for chunk in sequence.take()] == ["abc"]
    sequence.push(byte_level.encode("X").ids)
    assert [chunk.text for chunk in sequence.take()] == ["DEFGHIX"]


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5, 6, 7]])
def test_a_character_is_sent_once(byte_level: Library, cuts: list[int]) -> None:
    """sglang 31598: an offset went back over a broken character, and what followed was sent twice."""
    raw = b"A " + "世".encode()[:2] + b"ab"
    ids = [byte_level.token_to_id(character) for character in map(_letter, raw)]
    assert stream(OutputSequence(Pieces(byte_level)), ids, cuts, "length").text == raw.decode(errors="replace")


def _letter(byte: int) -> str:
    """GPT-2's letter for a byte: printable ones are themselves, the others follow from U+0100 in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(0x100 + others.index(byte))
