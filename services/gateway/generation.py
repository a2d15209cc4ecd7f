"""The endpoint behind everything that generates: validate, submit, then answer whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from services.gateway.body import read_json
from services.gateway.calls import Call, Delta, Request
from services.gateway.config import GatewayConfig
from services.gateway.engine import Engine
from services.gateway.errors import JSON, error_body, renaming
from services.gateway.model import Limits
from services.gateway.models import Models
from services.gateway.schemas import Asked, GenerationRequest, validate
from services.gateway.stream import DONE, EventStream, event
from shared.errors import RequestError
from shared.wire import SubmitText

log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Asked)
R = TypeVar("R", bound=GenerationRequest)


class Answer(ABC):
    """One call's answer, whole or in events. Both are made of the same pieces, so they tell the same."""

    id: str

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body of an answer that was not streamed; the call is over."""

    @abstractmethod
    def opening(self) -> list[bytes]:
        """The events that leave at ACCEPT."""

    @abstractmethod
    def piece(self, index: int, request: Request, delta: Delta) -> list[bytes]:
        """The events of what one sequence, the call's ``index``-th, produced."""

    @abstractmethod
    def failure(self, error: RequestError) -> list[bytes]:
        """The last events of a stream that ends by ``error``."""

    @abstractmethod
    def ending(self) -> list[bytes]:
        """The last events of a stream, after every piece; the call is over."""


class Intake(ABC, Generic[Q]):
    """What one HTTP API's requests look like, and what is submitted for them."""

    request_model: type[Q]

    def names(self, asked: Q) -> Mapping[str, str]:
        """How the client calls fields that errors about what was submitted name otherwise (see ``renaming``)."""
        return {}

    @abstractmethod
    def submits(self, asked: Q, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        """One submission per prompt; the engine fills in the rids."""


class Api(Intake[Q]):
    """And how they are answered."""

    @abstractmethod
    def answer(self, asked: Q, call: Call, model: str) -> Answer:
        """``model`` is the name to answer with."""


class Shape(Api[R]):
    """How the choices of OpenAI's chat and text completions look. They get their ``index`` from ``Choices``."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, force_usage: bool = False) -> None:
        """force_usage: every chunk of every stream tells the usage, asked for or not."""
        self.force_usage = force_usage

    def answer(self, asked: R, call: Call, model: str) -> Answer:
        return Choices(self, asked, call, model)

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
                echo=asked.wants_prompt_text,
                grammar=asked.grammar,
                priority=asked.priority or 0,
                cache_salt=asked.cache_salt or "",
                tenant=tenant,
                arrival=time.time(),
                timeout=asked.timeout or 0.0,
                truncation=asked.truncation,
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
    usage["prompt_tokens_details"] = {"cached_tokens": sum(one.cached_tokens for one in done)}
    reasoning = [request.reasoning_tokens for request in requests if request.reasoning_tokens is not None]
    details = {"reasoning_tokens": sum(reasoning)} if reasoning else {}
    if asked.predicts:
        details |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    if details:
        usage["completion_tokens_details"] = details
    return usage


def usage_so_far(asked: GenerationRequest, requests: list[Request]) -> dict[str, Any]:
    """Of a stream that goes on: all its choices, up to what has come."""
    tokens = sum(output.tokens for request in requests for output in request.outputs)
    return _usage(asked, sum(request.prompt_tokens for request in requests), tokens)


def _usage(asked: GenerationRequest, prompt: int, completion: int) -> dict[str, Any]:
    completion = completion if asked.wants_output else 0
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Choices(Answer, Generic[R]):
    """An answer with one choice for each sequence."""

    def __init__(self, shape: Shape[R], asked: R, call: Call, model: str) -> None:
        self._shape, self._asked, self._call = shape, asked, call
        self.id = shape.id_prefix + call.request_id
        self._head = {
            "id": self.id,
            "object": shape.chunk_object if asked.stream else shape.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        options = asked.stream_options
        self._tells_usage = shape.force_usage or (options is not None and bool(options.include_usage))
        continuously = options is not None and bool(options.continuous_usage_stats)
        self._tells_continuously = shape.force_usage or (self._tells_usage and continuously)

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for request in self._call.requests:
            for output in request.outputs:
                delta = output.take() or Delta([], [], output.finished, first=True)
                choices.append({"index": len(choices), **self._shape.whole(self._asked, request, delta)})
        extra = self._shape.envelope(self._asked, self._call.requests)
        return {
            **self._head,
            "choices": choices,
            "usage": usage_of(self._asked, self._call.requests),
            "system_fingerprint": None,
            **extra,
        }

    def opening(self) -> list[bytes]:
        requests = [request for request in self._call.requests for _ in request.outputs]
        choices = [self._shape.opening(self._asked, request) for request in requests]
        extra = self._shape.envelope(self._asked, self._call.requests)
        return [self._chunk(index, choice, **extra) for index, choice in enumerate(choices) if choice is not None]

    def piece(self, index: int, request: Request, delta: Delta) -> list[bytes]:
        # After an error the client gets what was produced, but no finish_reason: it did not finish.
        if delta.finished is not None and delta.finished.reason == "error":
            return []
        return [self._chunk(index, choice) for choice in self._shape.pieces(self._asked, request, delta)]

    def failure(self, error: RequestError) -> list[bytes]:
        return [event(error_body(error)), DONE]

    def ending(self) -> list[bytes]:
        if not self._tells_usage:
            return [DONE]
        usage = usage_of(self._asked, self._call.requests)
        return [event({**self._head, "choices": [], "usage": usage, "system_fingerprint": None}), DONE]

    def _chunk(self, index: int, choice: dict[str, Any], **extra: Any) -> bytes:
        usage: dict[str, Any] = {}
        if self._tells_usage:
            usage["usage"] = usage_so_far(self._asked, self._call.requests) if self._tells_continuously else None
        choices = [{"index": index, **choice}]
        return event({**self._head, "choices": choices, **usage, "system_fingerprint": None, **extra})


async def take(
    request: HTTPRequest, api: Intake[Q], engine: Engine, models: Models, config: GatewayConfig
) -> tuple[Q, str, list[SubmitText]]:
    """What a body asks for, the model's name to answer with, and what to submit. Raises RequestError."""
    limits = replace(engine.limits, max_logprobs=config.max_logprobs)
    body = await read_json(request, config.max_body_bytes, limits.max_model_len)
    model = models.resolve(body.get("model"))
    asked = validate(api.request_model, body, limits)
    asked.check()
    state = request.scope["state"]
    if asked.request_id is not None and not state["named"]:
        state["request_id"] = asked.request_id
    with renaming(api.names(asked)):
        return asked, model, api.submits(asked, limits, state["request_id"], state["tenant"])


class Generation(Generic[Q]):
    """An ASGI app for POST. Headers leave only once the scheduler accepted, so refusals keep their real status."""

    def __init__(self, api: Api[Q], engine: Engine, models: Models, config: GatewayConfig) -> None:
        self._api, self._engine, self._models, self._config = api, engine, models, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPRequest(scope, receive)
        asked, model, submits = await take(request, self._api, self._engine, self._models, self._config)
        state = scope["state"]
        with self._engine.call(submits) as call:
            async with _watched(receive, call):
                with renaming(self._api.names(asked)):
                    await call.accepted(self._config.accept_timeout)
                answer = self._api.answer(asked, call, model)
                log.debug("request_id=%s is %s", state["request_id"], answer.id)
                if asked.stream:
                    interval = self._config.sse_keep_alive_interval
                    async with EventStream(scope, send, interval, call.wake) as stream:
                        await _stream(answer, call, stream, asked.tokens_per_event)
                    return
                await call.finished()
                whole = answer.whole()
        await JSON(whole)(scope, receive, send)


async def _stream(answer: Answer, call: Call, stream: EventStream, tokens_per_event: int) -> None:
    outputs = [(request, output) for request in call.requests for output in request.outputs]

    def news() -> list[bytes]:
        """Events of all that has come since the last call."""
        events = []
        for index, (request, output) in enumerate(outputs):
            if tokens_per_event > 1 and not call.has_ends and not output.has_new(tokens_per_event):
                continue
            delta = output.take()
            if delta is not None:
                events += answer.piece(index, request, delta)
        return events

    def follow() -> bool:
        """Writes what a message has just brought; the end, and waiting for a slow client, are left to the task."""
        if call.has_ends or not stream.is_open:
            return False
        if events := news():
            stream.push(events)
        return True

    await stream.start()
    events = answer.opening()
    while True:
        events += news()
        if call.error is not None:
            await stream.end([*events, *answer.failure(call.error)])
            return
        if call.over:
            await stream.end([*events, *answer.ending()])
            return
        if events:
            await stream.write(events)
            events = []
        elif stream.silent:
            await stream.keep_alive()
        call.follow = follow
        await call.changed()
        call.follow = None


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
