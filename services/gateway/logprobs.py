"""The shapes that logprobs have in answers: OpenAI's for chat, OpenAI's for completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.wire import Candidate, TokenLogprob

LOWEST = -9999.0
"""JSON has no -Infinity; this is what OpenAI and vLLM say for a token that cannot come."""


def spelled(text: bytes, prefix: str = "") -> str:
    r"""A token as a string. One that holds part of a character is its bytes, as \xf0\x9f, so no two look the same."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in text)


def of_chat(tokens: Sequence[TokenLogprob], top: int, *, as_ids: bool = False) -> dict[str, Any]:
    """as_ids: tokens are told as ``token_id:5``, which no two share."""

    def told(one: TokenLogprob | Candidate) -> dict[str, Any]:
        token = _numbered(one) if as_ids else spelled(one.text)
        return {"token": token, "logprob": _finite(one.logprob), "bytes": list(one.text)}

    return {
        "content": [{**told(one), "top_logprobs": [told(other) for other in one.top[:top]]} for one in tokens],
        "refusal": None,
    }


def of_completion(tokens: Sequence[TokenLogprob], top: int, shift: int, *, as_ids: bool = False) -> dict[str, Any]:
    """shift: characters before the output that the tokens are of. as_ids: as in ``of_chat``."""

    def name(one: TokenLogprob | Candidate) -> str:
        return _numbered(one) if as_ids else spelled(one.text, "bytes:")

    def likeliest(token: TokenLogprob) -> dict[str, float | None] | None:
        if token.logprob is None:
            return None
        return {**{name(one): _finite(one.logprob) for one in token.top[:top]}, name(token): _finite(token.logprob)}

    return {
        "tokens": [name(one) for one in tokens],
        "token_logprobs": [_finite(one.logprob) for one in tokens],
        "top_logprobs": [likeliest(one) for one in tokens],
        "text_offset": [shift + one.offset for one in tokens],
    }


def of_prompt(tokens: Sequence[TokenLogprob], top: int) -> list[dict[str, Any] | None]:
    """By position and token id: the likeliest tokens, and the prompt's own wherever it ranks."""
    found: list[dict[str, Any] | None] = []
    for one in tokens:
        if one.logprob is None:
            found.append(None)
            continue
        shown = {other.id: (other.logprob, rank, other.text) for rank, other in enumerate(one.top[:top], 1)}
        shown[one.id] = (one.logprob, one.rank, one.text)
        found.append(
            {
                str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spelled(text)}
                for id, (logprob, rank, text) in shown.items()
            }
        )
    return found


def _numbered(one: TokenLogprob | Candidate) -> str:
    return f"token_id:{one.id}"


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
