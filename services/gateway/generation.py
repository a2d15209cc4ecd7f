"""The endpoint behind chat and text completions: validate, submit, then answer whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from services.gateway.body import read_json
from services.gateway.calls import Call, Delta, Request
from services.gateway.config import GatewayConfig
from services.gateway.engine import Engine
from services.gateway.errors import JSON, error_body
from services.gateway.models import Models
from services.gateway.schemas import GenerationRequest, Limits, validate
from services.gateway.stream import EventStream, event
from shared.wire import SubmitText

log = logging.getLogger(__name__)

R = TypeVar("R", bound=GenerationRequest)


class Shape(ABC, Generic[R]):
    """How one API's requests are submitted and its answers look. Choices get their ``index`` from the endpoint."""

    request_model: type[R]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @abstractmethod
    def submits(self, asked: R, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        """One submission per prompt; the engine fills in the rids."""

    @abstractmethod
    def envelope(self, asked: R, requests: list[Request]) -> dict[str, Any]:
        """Further top-level fields of a whole answer and of the first chunk."""

    @abstractmethod
    def opening(self, asked: R, request: Request) -> dict[str, Any] | None:
        """The choice of the chunk that leaves at ACCEPT, if there is one."""

    @abstractmethod
    def pieces(self, asked: R, request: Request, delta: Delta) -> list[dict[str, Any]]:
        """The choices of chunks; none when there is nothing in it that the client wants."""

    @abstractmethod
    def whole(self, asked: R, request: Request, delta: Delta) -> dict[str, Any]:
        """The choice of a whole answer; ``delta`` is the whole output."""

    def common(
        self, asked: R, limits: Limits, request_id: str, tenant: str, endpoint: str, *, add_special_tokens: bool
    ) -> Callable[..., SubmitText]:
        """SubmitText with everything filled in but the prompt."""

        def submit(**prompt: Any) -> SubmitText:
            special = add_special_tokens if asked.add_special_tokens is None else asked.add_special_tokens
            return SubmitText(
                rid=0,
                request_id=request_id,
                endpoint=endpoint,
                sampling=asked.sampling(limits),
                add_special_tokens=special,
                skip_special_tokens=True if asked.skip_special_tokens is None else asked.skip_special_tokens,
                stop=asked.stop or [],
                include_stop_str_in_output=bool(asked.include_stop_str_in_output),
                return_token_ids=bool(asked.return_token_ids),
                bad_words=asked.bad_words or [],
                echo=asked.echoes,
                priority=asked.priority or 0,
                cache_salt=asked.cache_salt or "",
                tenant=tenant,
                arrival=time.time(),
                timeout=asked.timeout or 0.0,
                **prompt,
            )

        return submit


def finish_of(asked: GenerationRequest, delta: Delta) -> dict[str, Any]:
    """finish_reason, and vLLM's stop_reason: the stop string, the stop token's id as a number, or null."""
    if delta.finished is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = delta.finished.stop_reason
    is_id = reason.isdecimal() and reason not in (asked.stop or [])
    return {"finish_reason": delta.finished.reason, "stop_reason": int(reason) if is_id else reason or None}


def usage_of(asked: GenerationRequest, requests: list[Request]) -> dict[str, Any]:
    """Of answers that are whole."""
    done = [request.done for request in requests if request.done is not None]
    usage = _usage(asked, sum(one.prompt_tokens for one in done), sum(one.completion_tokens for one in done))
    return {**usage, "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in done)}}


def usage_so_far(asked: GenerationRequest, requests: list[Request]) -> dict[str, Any]:
    """Of a stream that goes on: all its choices, up to what has come."""
    tokens = sum(output.tokens for request in requests for output in request.outputs)
    return _usage(asked, sum(request.prompt_tokens for request in requests), tokens)


def _usage(asked: GenerationRequest, prompt: int, completion: int) -> dict[str, Any]:
    completion = completion if asked.wants_output else 0
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Generation(Generic[R]):
    """An ASGI app for POST. Headers leave only once the scheduler accepted, so refusals keep their real status."""

    def __init__(self, shape: Shape[R], engine: Engine, models: Models, config: GatewayConfig) -> None:
        self._shape, self._engine, self._models, self._config = shape, engine, models, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPRequest(scope, receive)
        limits = replace(self._engine.limits, max_logprobs=self._config.max_logprobs)
        body = await read_json(request, self._config.max_body_bytes, limits.max_model_len)
        model = self._models.resolve(body.get("model"))
        asked = validate(self._shape.request_model, body, limits)
        asked.check()
        state = scope["state"]
        submits = self._shape.submits(asked, limits, state["request_id"], state["tenant"])
        with self._engine.call(submits) as call:
            async with _watched(receive, call):
                await call.accepted(self._config.accept_timeout)
                head = {
                    "id": self._shape.id_prefix + secrets.token_hex(16),
                    "object": self._shape.chunk_object if asked.stream else self._shape.whole_object,
                    "created": int(time.time()),
                    "model": model,
                }
                log.debug("request_id=%s is %s", state["request_id"], head["id"])
                if asked.stream:
                    async with EventStream(send, self._config.sse_keep_alive_interval, call.wake) as stream:
                        await self._stream(asked, call, head, stream)
                    return
                await call.finished()
                answer = self._whole(asked, call, head)
        await JSON(answer)(scope, receive, send)

    def _whole(self, asked: R, call: Call, head: dict[str, Any]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for request in call.requests:
            for output in request.outputs:
                delta = output.take() or Delta([], [], output.finished, first=True)
                choices.append({"index": len(choices), **self._shape.whole(asked, request, delta)})
        extra = self._shape.envelope(asked, call.requests)
        return {
            **head,
            "choices": choices,
            "usage": usage_of(asked, call.requests),
            "system_fingerprint": None,
            **extra,
        }

    async def _stream(self, asked: R, call: Call, head: dict[str, Any], stream: EventStream) -> None:
        include_usage, continuously = self._tells_usage(asked)

        def chunk(index: int, choice: dict[str, Any], **extra: Any) -> bytes:
            usage: dict[str, Any] = {}
            if include_usage:
                usage["usage"] = usage_so_far(asked, call.requests) if continuously else None
            return event(
                {**head, "choices": [{"index": index, **choice}], **usage, "system_fingerprint": None, **extra}
            )

        outputs = [(request, output) for request in call.requests for output in request.outputs]
        openings = [self._shape.opening(asked, request) for request, _ in outputs]
        extra = self._shape.envelope(asked, call.requests)
        await stream.start()
        events = [chunk(index, choice, **extra) for index, choice in enumerate(openings) if choice is not None]
        while True:
            for index, (request, output) in enumerate(outputs):
                delta = output.take()
                # After an error the client gets what was produced, but no finish_reason: it did not finish.
                if delta is not None and (delta.finished is None or delta.finished.reason != "error"):
                    events += [chunk(index, choice) for choice in self._shape.pieces(asked, request, delta)]
            if call.error is not None:
                await stream.end([*events, event(error_body(call.error))])
                return
            if call.over:
                break
            if events:
                await stream.write(events)
                events = []
            elif stream.silent:
                await stream.keep_alive()
            await call.changed()
        if include_usage:
            events.append(
                event({**head, "choices": [], "usage": usage_of(asked, call.requests), "system_fingerprint": None})
            )
        await stream.end(events)

    def _tells_usage(self, asked: R) -> tuple[bool, bool]:
        """Whether a stream ends with its usage, and whether every chunk before tells what it is by then."""
        if self._config.enable_force_include_usage:
            return True, True
        options = asked.stream_options
        told = options is not None and bool(options.include_usage)
        return told, told and options is not None and bool(options.continuous_usage_stats)


@contextlib.asynccontextmanager
async def _watched(receive: Receive, call: Call) -> AsyncIterator[None]:
    """Listens, beside the block, for the client's going away, and tells the call."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.leave()

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
