"""Parsed answers: channels, text and ids stay in step, whatever the tokens and whatever has to be told again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Library

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.parsers.hermes import Hermes
from services.tokenizer.parsers.output import OutputFormat, OutputParser
from services.tokenizer.parsers.think import ThinkSplitter
from services.tokenizer.parsers.transducer import Piece, joined
from services.tokenizer.request import Chunk, OutputSequence
from services.tokenizer.stop import StopStrings
from shared.channels import CONTENT, REASONING, arguments_of, name_of
from shared.wire import Finished, ToolUse
from tests.services.tokenizer import toy

ANSWER = '<think>Hm, 世界.</think>\n\nSo é: <tool_call>\n{"name": "f", "arguments": {"a": "😀"}}\n</tool_call>'
PARTS = [(REASONING, "Hm, 世界."), (CONTENT, "So é:"), (name_of(0), "f"), (arguments_of(0), '{"a": "😀"}')]


def parser() -> OutputParser:
    return OutputParser([ThinkSplitter(False), Hermes(["f"], True)])


def by_characters(library: Library, text: str) -> list[int]:
    """The most tokens a text can be: one for each byte."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [library.token_to_id(character) for character in byte_level.pre_tokenize_str(text)[0][0]]


def run(sequence: OutputSequence, ids: list[int], cuts: list[int]) -> list[Chunk]:
    chunks: list[Chunk] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        sequence.push(ids[start:end])
        chunks += sequence.take()
    sequence.end(Finished(1, 0, len(sequence.ids), "length"))
    return [*chunks, *sequence.take()]


def pieces_of(chunks: list[Chunk]) -> list[Piece]:
    return joined((chunk.channel, chunk.text) for chunk in chunks)


def test_one_byte_a_token(byte_level: Library) -> None:
    ids = by_characters(byte_level, ANSWER)
    sequence = OutputSequence(Pieces(byte_level), parser=parser())
    chunks = run(sequence, ids, list(range(1, len(ids))))
    assert pieces_of(chunks) == PARTS
    assert [id for chunk in chunks for id in chunk.ids] == ids


@pytest.mark.parametrize(
    ("text", "inside", "count"),
    [
        (ANSWER, False, 7 + 4 + 3 + 3 + 1 + 8),  # <think>, "Hm, ", two characters of three bytes, ".", </think>
        (f"\n{ANSWER}", False, 27),
        ("ab</think>\n\nc", True, 2 + 8),
        ("</think>c", True, 8),
        ("<think>世界", False, 7 + 6),  # never closed: all of it
        ("<thin", False, 0),
        ("a<think>b</think>", False, 0),
        ("", False, 0),
    ],
)
def test_tokens_of_reasoning_are_counted(byte_level: Library, text: str, inside: bool, count: int) -> None:
    """One token for each byte, and a silent end that is of no kind."""
    ids, end = by_characters(byte_level, text) if text else [], 418
    for cuts in ([], list(range(1, len(ids) + 1))):
        stages = [ThinkSplitter(inside), Hermes(["f"], True)]
        sequence = OutputSequence(Pieces(byte_level), silent=frozenset([end]), parser=OutputParser(stages))
        run(sequence, [*ids, end], cuts)
        ending = sequence.ending()
        assert ending is not None and (ending.tokens, ending.reasoning_tokens) == (len(ids) + 1, count)
    plain = OutputSequence(Pieces(byte_level), parser=OutputParser([Hermes(["f"], True)]))
    run(plain, ids, [])
    assert plain.ending() == Finished(1, 0, len(ids), "length"), "no reasoning is looked for"


def test_a_token_over_the_end_of_reasoning_counts_once_and_one_of_nothing_does_not(byte_level: Library) -> None:
    library = toy.byte_level()
    library.add_tokens([AddedToken("</think>\n\nSo", normalized=False)])
    library.add_special_tokens([AddedToken("<skipped>", special=True, normalized=False)])
    ids = [*by_characters(byte_level, "ab"), *library.encode("</think>\n\nSo<skipped> it").ids]
    sequence = OutputSequence(Pieces(library), parser=OutputParser([ThinkSplitter(True)]))
    assert pieces_of(run(sequence, ids, [])) == [(REASONING, "ab"), (CONTENT, "So it")]
    ending = sequence.ending()
    assert ending is not None and ending.reasoning_tokens == 3


def test_a_marker_in_halves_beside_a_stop_string(byte_level: Library) -> None:
    """While a stop string holds text back ``</think>`` comes over two tokens: nothing leaks, and ids wait with their
    text (vllm #51641, #45636).
    """
    first, second = byte_level.encode("<think>a STO b</th").ids, byte_level.encode("ink>c STOP d").ids
    sequence = OutputSequence(Pieces(byte_level), stops=StopStrings(["STOP"]), parser=parser())
    sequence.push(first)
    before = sequence.take()
    assert pieces_of(before) == [(REASONING, "a STO b")]
    covered = before[-1].token_count
    assert byte_level.decode(first[:covered]) == "<think>a STO b"
    sequence.push(second)
    after = sequence.take()
    assert pieces_of(after) == [(CONTENT, "c ")] and sequence.stop_string == "STOP"
    assert [id for chunk in [*before, *after] for id in chunk.ids] == sequence.ids


def test_markers_that_are_special_tokens_are_seen_and_never_shown() -> None:
    library = toy.byte_level()
    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    library.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    format = OutputFormat.choose("auto", "think", "", True, library.token_to_id)
    make = format.parser(ToolUse([{"type": "function", "function": {"name": "f"}}]), False)
    assert make is not None and format.tools == "hermes" and len(format.markers) == 4
    ids = library.encode(f"{ANSWER}<|im_end|>").ids
    assert set(format.markers) <= set(ids) and library.decode(ids).count("tool_call") == 0
    sequence = OutputSequence(Pieces(library), parser=make(), shown=format.markers)
    assert pieces_of(run(sequence, ids, list(range(1, len(ids))))) == PARTS


CALL = '{"name": "f", "arguments": {"a":'
FRAGMENTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "}}", "\n", "é😀", "the END", "<"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_equals_whole_for_any_tokens_and_any_cuts(byte_level: Library, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=8)))
    ids = by_characters(byte_level, text) if text and data.draw(st.booleans()) else byte_level.encode(text).ids
    ids += data.draw(st.lists(st.integers(0, 418), max_size=3))  # bytes that are no text, too
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    stops = StopStrings(["END"]) if data.draw(st.booleans()) else None

    def sequence() -> OutputSequence:
        return OutputSequence(Pieces(byte_level), stops=stops, parser=parser())

    streamed = sequence()
    chunks = run(streamed, ids, cuts)
    ended = sequence()
    whole = run(ended, ids, [])
    assert pieces_of(chunks) == pieces_of(whole)
    assert streamed.ending() == ended.ending()
    assert [id for chunk in chunks for id in chunk.ids] == streamed.ids
    offset = tokens = 0
    for chunk in chunks:
        assert (chunk.offset, chunk.token_count) == (offset, tokens + len(chunk.ids))
        offset, tokens = offset + len(chunk.text), chunk.token_count

    seen = data.draw(st.integers(0, len(chunks)))
    has = chunks[:seen]
    again = streamed.since(sum(len(chunk.text) for chunk in has))
    assert joined([*pieces_of(has), *pieces_of(again)]) == pieces_of(chunks)
    first = again[-1].token_count - len(again[-1].ids)
    assert first <= (has[-1].token_count if has else 0) and again[-1].ids == streamed.ids[first:]


@pytest.mark.parametrize("count", [0, 5, 20, 40])
def test_a_receiver_with_some_tokens_gets_the_rest(byte_level: Library, count: int) -> None:
    """After a second SUBMIT: what it has of the text is at most what these tokens cover."""
    ids = by_characters(byte_level, ANSWER)
    sequence = OutputSequence(Pieces(byte_level), parser=parser())
    chunks = run(sequence, ids, list(range(1, len(ids))))
    has = [chunk for chunk in chunks if chunk.token_count <= count]
    offset = sequence.offset_of_token(has[-1].token_count if has else 0)
    assert offset <= sum(len(chunk.text) for chunk in has)
    told = "".join(chunk.text for chunk in sequence.since(offset))
    assert "".join(text for _, text in PARTS).endswith(told)
