"""Logprobs in words: each token's own bytes, in step with the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Library

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.logprobs import own_bytes, prompt_in_words
from services.tokenizer.request import OutputSequence
from services.tokenizer.stop import StopStrings
from shared.logprobs import Found
from shared.wire import Candidate, Finished

TEXT = "중국 世界 “quotes” 😀🚀 é end"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_joined_are_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """Emoji, curly quotes (vLLM PR 34875, ollama 13497) and Chinese (vLLM 19177): every token has its real bytes."""
    library: Library = request.getfixturevalue(kind)
    pieces, ids = Pieces(library), library.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(own_bytes(pieces, id) for id in ids).decode().strip() == TEXT
    assert any(len(own_bytes(pieces, id).decode(errors="ignore")) == 0 for id in ids)  # parts of characters


def found(index: int) -> Found:
    return -float(index), index + 1, [index, index + 1], [-0.5, -1.5]


def test_logprobs_come_with_the_chunks_that_cover_their_tokens(byte_level: Library) -> None:
    """Whatever is held back for a character or a stop string, and again after a RESUME; offsets are the text's."""
    ids = library_ids(byte_level, TEXT)
    pieces = Pieces(byte_level)
    sequence = OutputSequence(pieces, stops=StopStrings(["end!"]))
    chunks = []
    for index, id in enumerate(ids):
        sequence.push([id], [found(index)])
        chunks += sequence.take()
    sequence.end(Finished(1, 0, len(ids), "length"))
    chunks += sequence.take()
    assert all([one.id for one in chunk.logprobs] == chunk.ids for chunk in chunks)
    told = [one for chunk in chunks for one in chunk.logprobs]
    assert [(one.logprob, one.rank) for one in told] == [found(index)[:2] for index in range(len(ids))]
    assert told[3].top == [Candidate(3, own_bytes(pieces, 3), -0.5), Candidate(4, own_bytes(pieces, 4), -1.5)]
    for index, one in enumerate(told):
        before = b"".join(own_bytes(pieces, id) for id in ids[:index])
        assert one.offset == len(before.decode(errors="ignore"))
    (again,) = sequence.since(0)
    assert (again.text, again.logprobs) == (TEXT, told)
    (later,) = sequence.since(10)
    assert [one.id for one in later.logprobs] == later.ids and len(later.ids) < len(ids)


def test_the_first_token_of_a_prompt_has_no_logprob(byte_level: Library) -> None:
    pieces, ids = Pieces(byte_level), [0, *library_ids(byte_level, TEXT)]
    words = prompt_in_words(pieces, ids, {position: found(position) for position in range(1, len(ids))}, True)
    assert (words[0].logprob, words[0].text, words[0].top) == (None, b"<|im_start|>", [])
    assert [one.offset for one in words[:2]] == [0, 0]  # a special token has no text
    assert [one.logprob for one in words[1:]] == [-float(position) for position in range(1, len(ids))]


def test_no_stop_string_ends_an_output_before_its_min_tokens(byte_level: Library) -> None:
    ids = library_ids(byte_level, "one end two end three")
    first = len(library_ids(byte_level, "one end"))
    texts = {}
    for least in (0, first, 100):
        sequence = OutputSequence(Pieces(byte_level), stops=StopStrings(["end"]), min_tokens=least)
        sequence.push(ids)
        sequence.end(Finished(1, 0, len(sequence.ids), "length"))
        texts[least] = "".join(chunk.text for chunk in sequence.take())
    assert texts == {0: "one ", first: "one end two ", 100: "one end two end three"}


def library_ids(library: Library, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids
