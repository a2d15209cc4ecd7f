"""Token ids to text, one id at a time, with a window of at most three bytes.

A token's text does not depend on its neighbours except where it holds part of a UTF-8 character. So each id becomes a
*piece* once, and only an incomplete character waits for the next one. Text of an output continues its prompt: the
joined pieces of ``ids`` are what ``decode(prompt + ids)`` has after ``decode(prompt)``, so the space before a first
SentencePiece word stays.

- Byte-level vocabularies (GPT-2 and its heirs): every piece is bytes; invalid ones become U+FFFD as in any UTF-8
  decoder with replacement (one per maximal invalid part).
- SentencePiece vocabularies with byte fallback: pieces are text, or single bytes (``<0xE2>``). A byte that fits no
  character becomes one U+FFFD. The ``tokenizers`` library replaces *all* bytes of a run of byte tokens when any of
  them is invalid; text already sent cannot be taken back, so here the valid characters of such a run stay.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

import tokenizers

from shared.errors import ConfigError

Piece = str | bytes | int | None  # text, bytes that hold part of a character, one byte of a character, nothing
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The text state of one sequence."""

    pending: bool
    """Whether bytes of an incomplete character wait."""

    def feed(self, piece: Piece) -> str:
        """Characters that are complete now."""

    def finish(self) -> str:
        """What an incomplete tail becomes at the very end."""


class ByteLevelDetokenizer:
    def __init__(self) -> None:
        self.pending = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: Piece) -> str:
        if type(piece) is str and not self.pending:  # nearly every token
            return piece
        text = self._decoder.decode(bytes_of(piece))
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self.pending = False
        return self._decoder.decode(b"", True)


class ByteFallbackDetokenizer:
    def __init__(self) -> None:
        self.pending = False
        self._tail = b""

    def feed(self, piece: Piece) -> str:
        if piece is None:
            return ""
        if type(piece) is str:
            return self.finish() + piece if self.pending else piece
        self._tail += bytes_of(piece)
        text = ""
        while self._tail:
            try:
                text += self._tail.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += REPLACEMENT
                self._tail = self._tail[1:]
            else:
                self._tail = b""
        self.pending = bool(self._tail)
        return text

    def finish(self) -> str:
        text, self._tail, self.pending = REPLACEMENT * len(self._tail), b"", False
        return text


def bytes_of(piece: Piece) -> bytes:
    if isinstance(piece, str):
        return piece.encode()
    return bytes((piece,)) if isinstance(piece, int) else piece or b""


class Pieces:
    """The piece of every id, made when first asked for, and the kind of detokenizer they need.

    Raises ConfigError for a decoder that is neither byte-level nor SentencePiece-like.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        if backend.decoder is None:
            raise ConfigError("the tokenizer has no decoder, so its tokens cannot be joined to text")
        steps = _steps(json.loads(backend.decoder.__getstate__()))  # its part of tokenizer.json
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._replacements: list[tuple[str, str]] = []
        if not self.byte_level:
            for step in steps:
                if step["type"] == "Replace" and "String" in step["pattern"]:
                    self._replacements.append((step["pattern"]["String"], step["content"]))
                elif step["type"] == "Metaspace":
                    self._replacements.append((step["replacement"], " "))
                elif step["type"] not in ("ByteFallback", "Fuse", "Strip"):
                    raise ConfigError(f"the tokenizer's decoder has a step {step['type']}, which is not supported")
        self._characters = _byte_of_character()
        self._pieces: dict[int, Piece] = {}

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer() if self.byte_level else ByteFallbackDetokenizer()

    def get(self, id: int, skip_special: bool) -> Piece:
        """The piece of ``id``; None for an id outside the vocabulary or a special token that is to be skipped."""
        if skip_special and id in self._special:
            return None
        try:
            return self._pieces[id]
        except KeyError:
            piece = self._pieces[id] = self._make(id)
            return piece

    def _make(self, id: int) -> Piece:
        token = self._backend.id_to_token(id) if id >= 0 else None
        if token is None:
            return None
        if self.byte_level:
            values = [self._characters.get(character) for character in token]
            known = [value for value in values if value is not None]
            if len(known) < len(values):  # a character outside the alphabet: an added token, which stands for itself
                return token
            try:
                return bytes(known).decode()
            except UnicodeDecodeError:
                return bytes(known)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return int(token[3:5], 16)
            except ValueError:
                pass
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet, reversed: printable Latin-1 characters are themselves, the others follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet
