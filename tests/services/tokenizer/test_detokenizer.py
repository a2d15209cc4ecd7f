"""Joined pieces against the ``tokenizers`` library's decode of all ids at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ConfigError
from tests.services.tokenizer import toy

SAMPLES = ["Hello world", " and", "안녕하세요", "😀🚀", "naïve café", "\n\tx", "日本", "ab  cd", "👨‍👩‍👧", "<0x41>"]


def join(pieces: Pieces, ids: list[int], skip: bool) -> str:
    detokenizer = pieces.detokenizer()
    return "".join(detokenizer.feed(pieces.get(id, skip)) for id in ids) + detokenizer.finish()


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 430), max_size=24), skip=st.booleans())
def test_byte_level_random_ids(byte_level: Library, ids: list[int], skip: bool) -> None:
    """Broken UTF-8, special tokens, an added token outside the alphabet, and ids past the vocabulary included."""
    assert join(Pieces(byte_level), ids, skip) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49_200), max_size=24), skip=st.booleans())
def test_built_in_model_random_ids(builtin: Tokenizer, builtin_library: Library, ids: list[int], skip: bool) -> None:
    assert join(builtin.pieces, ids, skip) == builtin_library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=6)), min_size=1, max_size=5),
    skip=st.booleans(),
    special=st.booleans(),
)
def test_byte_fallback_continues_a_prompt(byte_fallback: Library, parts: list[str], skip: bool, special: bool) -> None:
    """Whole texts, so that every run of byte tokens is valid; the oracle decodes them behind a prompt."""
    ids = [id for part in parts for id in byte_fallback.encode(part, add_special_tokens=special).ids]
    before = byte_fallback.encode("x", add_special_tokens=False).ids
    expected = byte_fallback.decode([*before, *ids], skip_special_tokens=skip)
    assert join(Pieces(byte_fallback), ids, skip) == expected.removeprefix("x")


def fallback_ids(library: Library, raw: bytes) -> list[int]:
    return [library.token_to_id(f"<0x{byte:02X}>") for byte in raw]


def test_byte_fallback_shows_a_character_when_its_last_byte_comes(byte_fallback: Library) -> None:
    pieces = Pieces(byte_fallback)
    detokenizer = pieces.detokenizer()
    shown = [detokenizer.feed(pieces.get(id, True)) for id in fallback_ids(byte_fallback, "é😀".encode())]
    assert shown == ["", "é", "", "", "", "😀"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xe2\x82", "��"),  # the library too: one per byte
        (b"\x80", "�"),
        ("😀".encode() + b"\xf0\x9f", "😀��"),  # the library takes the valid character back; it was sent
        (b"\xe2\x41", "�A"),
    ],
)
def test_byte_fallback_invalid_bytes(byte_fallback: Library, raw: bytes, text: str) -> None:
    assert join(Pieces(byte_fallback), fallback_ids(byte_fallback, raw), True) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=30))
def test_window_is_three_bytes(byte_level: Library, byte_fallback: Library, ids: list[int]) -> None:
    """Whatever came, four more ASCII characters are shown at once: nothing older is held."""
    for library in (byte_level, byte_fallback):
        pieces = Pieces(library)
        detokenizer = pieces.detokenizer()
        for id in ids:
            detokenizer.feed(pieces.get(id, False))
        marker = library.token_to_id("e")
        assert detokenizer.feed(pieces.get(marker, False)).endswith("e")
        assert not detokenizer.pending


def test_a_decoder_of_another_kind_is_refused() -> None:
    library = Library(models.BPE())
    with pytest.raises(ConfigError, match="no decoder"):
        Pieces(library)
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Pieces(library)


@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_tokenizer_puts_spaces_between_special_tokens(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, spaces: bool
) -> None:
    """So requests' ``spaces_between_special_tokens`` changes nothing, here as in transformers."""
    library: Library = request.getfixturevalue(kind)
    oracle: Any = transformers.AutoTokenizer.from_pretrained(toy.save(tmp_path / kind, library))
    special = [id for id, token in library.get_added_tokens_decoder().items() if token.special]
    ids = [special[0], special[1], *library.encode("one two", add_special_tokens=False).ids, special[1], special[1]]
    text = join(Pieces(library), ids, skip=False)
    wanted = oracle.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert text == wanted and "> <" not in text
