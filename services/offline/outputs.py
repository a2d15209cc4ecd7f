"""Answers as Python objects, read from the JSON that the server sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TokenLogprobs = dict[int, float]
"""By token id, the token itself and the others that were asked for."""


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt.

    finish_reason: stop, length or tool_calls. stop_reason: the stop string, or a stop token's id; None for an EOS.
    token_ids: all of them, an EOS included. logprobs: of each token, where they were asked for; cumulative_logprob:
    their sum. message: of a chat, as OpenAI's API has it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    message: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt.

    prompt: as it was given, None where it was token ids. prompt_logprobs: None for the first token. cached_tokens: of
    the prompt, what was not computed again. error: why there is no answer; ``outputs`` is empty then.
    """

    prompt: Any
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    error: str | None = None


def completions(prompt: Any, body: Mapping[str, Any]) -> RequestOutput:
    """An answer of /v1/completions to one prompt, with token ids asked for."""
    outputs = [_completion(choice, choice["text"], _of_columns(choice["logprobs"]), None) for choice in body["choices"]]
    first = body["choices"][0]
    return _output(prompt, body, outputs, first["prompt_token_ids"], first.get("prompt_logprobs"))


def chat(messages: Any, body: Mapping[str, Any]) -> RequestOutput:
    """An answer of /v1/chat/completions, with token ids asked for."""
    outputs = []
    for choice in body["choices"]:
        logprobs, message = choice["logprobs"], choice["message"]
        told = None if logprobs is None else _of_entries(logprobs["content"])
        outputs.append(_completion(choice, message["content"] or "", told, message))
    return _output(messages, body, outputs, body["prompt_token_ids"], body.get("prompt_logprobs"))


def _output(
    prompt: Any, body: Mapping[str, Any], outputs: list[Completion], ids: list[int], prompt_logprobs: Any
) -> RequestOutput:
    told: list[TokenLogprobs | None] | None = None
    if prompt_logprobs is not None:
        told = [
            None if one is None else {int(id): entry["logprob"] for id, entry in one.items()} for one in prompt_logprobs
        ]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return RequestOutput(prompt, ids, outputs, told, cached)


Told = tuple[list[TokenLogprobs], float]


def _completion(choice: Mapping[str, Any], text: str, told: Told | None, message: Any) -> Completion:
    logprobs, total = (None, None) if told is None else told
    return Completion(
        index=choice["index"],
        text=text,
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=logprobs,
        cumulative_logprob=total,
        message=message,
    )


def _of_columns(logprobs: Mapping[str, Any] | None) -> Told | None:
    if logprobs is None:
        return None
    tops = [{_id(name): value for name, value in top.items()} for top in logprobs["top_logprobs"]]
    return tops, sum(logprobs["token_logprobs"])


def _of_entries(entries: list[dict[str, Any]]) -> Told:
    tops = [{_id(one["token"]): one["logprob"] for one in [*entry["top_logprobs"], entry]} for entry in entries]
    return tops, sum(entry["logprob"] for entry in entries)


def _id(token: str) -> int:
    """Of a token that was told as ``token_id:5``."""
    return int(token.removeprefix("token_id:"))
