"""One output sequence: what is given out only grows, and text and ids stay in step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.request import Chunk, OutputSequence
from services.tokenizer.stop import StopStrings
from shared.wire import Finished


def finish(sequence: OutputSequence) -> None:
    sequence.end(Finished(1, 0, len(sequence.ids), "length"))


def run(sequence: OutputSequence, ids: list[int], cuts: list[int]) -> list[Chunk]:
    """Feeds ``ids`` cut at ``cuts`` and takes after each part."""
    chunks: list[Chunk] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        sequence.push(ids[start:end])
        chunks += sequence.take()
    finish(sequence)
    return [*chunks, *sequence.take()]


def expected_text(library: Library, ids: list[int], stops: list[str], include: bool) -> tuple[str, int]:
    """Decodes ever longer prefixes as a whole until one holds a stop string: text and tokens kept."""
    for count in range(1, len(ids) + 1):
        text = library.decode(ids[:count]).rstrip("�")
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, _, stop = min(ends)
            return text[: end if include else end - len(stop)], count
    return library.decode(ids), len(ids)


@st.composite
def cut_ids(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    ids = draw(st.lists(st.integers(0, 420), min_size=1, max_size=20))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)))))
    return ids, cuts


@settings(max_examples=400, deadline=None)
@given(
    cut=cut_ids(), stops=st.lists(st.sampled_from(["e", "th", "an", "he ca", "é", "zz"]), max_size=2), inc=st.booleans()
)
def test_chunks_joined_are_the_whole_text(
    byte_level: Library, cut: tuple[list[int], list[int]], stops: list[str], inc: bool
) -> None:
    ids, cuts = cut
    sequence = OutputSequence(
        Pieces(byte_level), stops=StopStrings(stops) if stops else None, include_stop=inc, skip_special=True
    )
    chunks = run(sequence, ids, cuts)
    text, count = expected_text(byte_level, ids, stops, inc)
    assert "".join(chunk.text for chunk in chunks) == text
    assert [id for chunk in chunks for id in chunk.ids] == ids[:count]
    offset = tokens = 0
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.text)
        assert chunk.token_count == tokens + len(chunk.ids)
        tokens = chunk.token_count
    assert tokens == count


@settings(max_examples=200, deadline=None)
@given(cut=cut_ids(), data=st.data())
def test_any_offset_can_be_told_again(
    byte_level: Library, cut: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    """A receiver that has the first ``seen`` chunks, asking for the rest, gets all text and ids it lacks."""
    ids, cuts = cut
    sequence = OutputSequence(Pieces(byte_level))
    chunks = run(sequence, ids, cuts)
    seen = data.draw(st.integers(0, len(chunks)))
    text = "".join(chunk.text for chunk in chunks[:seen])
    tokens = chunks[seen - 1].token_count if seen else 0
    (again,) = sequence.since(len(text))
    assert text + again.text == byte_level.decode(ids)
    assert again.token_count == len(ids)
    first = again.token_count - len(again.ids)
    assert first <= tokens and ids[first:] == again.ids


def test_ids_wait_for_their_text(byte_level: Library) -> None:
    """The three bytes of 한 in three tokens: the first two are covered only with the third."""
    alphabet = {3: "í", 1: "ķ", 2: "ľ"}
    ids = [byte_level.token_to_id(alphabet[place]) for place in (3, 1, 2)]
    assert byte_level.decode(ids) == "한"
    sequence = OutputSequence(Pieces(byte_level))
    sequence.push(ids[:2])
    assert sequence.take() == []
    sequence.push(ids[2:])
    assert sequence.take() == [Chunk(0, "한", 3, ids)]


def test_an_incomplete_tail_is_given_out_at_the_end(byte_level: Library) -> None:
    ids = [byte_level.token_to_id("a"), byte_level.token_to_id("í")]
    sequence = OutputSequence(Pieces(byte_level))
    sequence.push(ids)
    assert sequence.take() == [Chunk(0, "a", 1, ids[:1])]
    finish(sequence)
    assert sequence.take() == [Chunk(1, "�", 2, ids[1:])]
    assert byte_level.decode(ids) == "a�"


def test_eos_has_no_text_even_when_special_tokens_are_shown(byte_level: Library) -> None:
    a, end = byte_level.token_to_id("a"), byte_level.token_to_id("<|im_end|>")
    sequence = OutputSequence(Pieces(byte_level), silent=frozenset({end}), skip_special=False)
    sequence.push([a, end])
    assert sequence.take() == [Chunk(0, "a", 2, [a, end])]
    shown = OutputSequence(Pieces(byte_level), skip_special=False)
    shown.push([a, end])
    assert shown.take() == [Chunk(0, "a<|im_end|>", 2, [a, end])]


@pytest.mark.parametrize(("include", "text"), [(False, "ABC"), (True, "ABCDEFGHIJ")])
def test_no_part_of_a_stop_string_is_given_out(byte_level: Library, include: bool, text: str) -> None:
    ids = [id for part in ("ABC", "DEF", "G", "HI", "JK", "more") for id in byte_level.encode(part).ids]
    sequence = OutputSequence(Pieces(byte_level), stops=StopStrings(["DEFGHIJ"]), include_stop=include)
    given_out = ""
    for id in ids:
        sequence.push([id])
        given_out += "".join(chunk.text for chunk in sequence.take())
        assert text.startswith(given_out)
    assert given_out == text and sequence.stop_string == "DEFGHIJ"
    assert len(sequence.ids) == next(n for n in range(len(ids)) if "DEFGHIJ" in byte_level.decode(ids[:n]))


def test_a_partial_stop_string_is_given_out_at_the_end(byte_level: Library) -> None:
    ids = byte_level.encode("ABCDEF").ids
    sequence = OutputSequence(Pieces(byte_level), stops=StopStrings(["DEFGHIJ"]))
    chunks = run(sequence, ids, list(range(1, len(ids))))
    assert "".join(chunk.text for chunk in chunks) == "ABCDEF"
    assert chunks[-1].text == "DEF"


def test_a_long_output_costs_the_same_per_token(byte_level: Library) -> None:
    """Counted, not timed: the pieces asked for are one per token, so no window grows with the text."""
    asked = 0

    class Counting(Pieces):
        def get(self, id: int, skip_special: bool) -> bytes | int | None:
            nonlocal asked
            asked += 1
            return super().get(id, skip_special)

    rng = random.Random(1)
    ids = [rng.randrange(2, 400) for _ in range(5000)]
    sequence = OutputSequence(Counting(byte_level))
    text = "".join(chunk.text for chunk in run(sequence, ids, list(range(1, 5000))))
    assert text == byte_level.decode(ids)
    assert asked == 5000
