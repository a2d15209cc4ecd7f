"""One answer of an OpenAI-compatible completions endpoint, as it was streamed: when tokens came, and if it is right."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from benchmarks import client
from benchmarks.load import Request


@dataclass(frozen=True)
class Answer:
    """``times``: when each event that carried output came, perf_counter. ``due``: when the request was to be sent."""

    request: Request
    due: float
    times: list[float]
    tokens: int
    ids: list[int]
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    error: str

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due to its first output."""
        return self.times[0] - self.due

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    def faults(self) -> list[str]:
        """What is wrong with it, in words; none if it is as asked."""
        if self.error:
            return [self.error]
        asked, found = self.request, []
        if self.tokens != asked.max_tokens:
            found.append(f"{self.tokens} output tokens, {asked.max_tokens} asked for")
        if self.finish_reason != "length":
            found.append(f"finish_reason is {self.finish_reason!r}, not 'length'")
        if not self.times or not (self.ids or self.text):
            found.append("no output came")
        if isinstance(asked.prompt, list) and self.prompt_tokens not in (None, asked.prompt_tokens):
            found.append(f"{self.prompt_tokens} prompt tokens counted, {asked.prompt_tokens} sent")
        return found


def body(model: str, request: Request, extra: dict[str, Any]) -> bytes:
    """The request's JSON: streamed, greedy, exactly max_tokens long, with usage at the end."""
    return orjson.dumps(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
    )


def read(request: Request, due: float, recording: client.Recording) -> Answer:
    """Never raises: what cannot be read is an answer with an error."""
    times: list[float] = []
    ids: list[int] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    finish_reason, error, ended = None, recording.error, False
    if not error:
        try:
            response = client.read(recording)
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {response.body[:300].decode(errors='replace')}")
            for at, data in response.events:
                if data == b"[DONE]":
                    ended = True
                    continue
                chunk = orjson.loads(data)
                if "error" in chunk:
                    raise ValueError(f"error event: {data[:300].decode(errors='replace')}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or []:
                    some = choice.get("token_ids") or []
                    if choice.get("text") or some:
                        times.append(at)
                    ids += some
                    texts.append(choice.get("text") or "")
                    finish_reason = choice.get("finish_reason") or finish_reason
            if not ended:
                raise ValueError("the stream did not end with [DONE]")
        except ValueError as reason:
            error = str(reason)
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        request=request,
        due=due,
        times=times,
        tokens=usage.get("completion_tokens", len(ids)),
        ids=ids,
        text="".join(texts),
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        error=error,
    )


def same_ids(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference, over all answers that both gave ids for; NaN if none."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        if a and b:
            shortest = min(len(a), len(b))
            same += next((index for index in range(shortest) if a[index] != b[index]), shortest)
            total += shortest
    return same / total if total else float("nan")
