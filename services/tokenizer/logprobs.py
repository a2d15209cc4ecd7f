"""Logprobs in words: every token with its own bytes, made without a look at its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.detokenizer import Pieces, bytes_of
from shared.logprobs import Found
from shared.wire import Candidate, TokenLogprob


def own_bytes(pieces: Pieces, id: int) -> bytes:
    """What a token stands for, be it part of a character; special tokens are spelled out."""
    return bytes_of(pieces.get(id, False))


def in_words(pieces: Pieces, id: int, found: Found | None, offset: int) -> TokenLogprob:
    """found: None for a token of which nothing is known."""
    text = own_bytes(pieces, id)
    if found is None:
        return TokenLogprob(id, text, None, 0, offset, [])
    logprob, rank, top_ids, top = found
    candidates = [Candidate(one, own_bytes(pieces, one), value) for one, value in zip(top_ids, top, strict=True)]
    return TokenLogprob(id, text, logprob, rank, offset, candidates)


def prompt_in_words(
    pieces: Pieces, ids: Sequence[int], found: dict[int, Found], skip_special: bool
) -> list[TokenLogprob]:
    """All tokens of a prompt; found: what is known, by position."""
    detokenizer, length, words = pieces.detokenizer(), 0, []
    for position, id in enumerate(ids):
        words.append(in_words(pieces, id, found.get(position), length))
        length += len(detokenizer.feed(pieces.get(id, skip_special)))
    return words
