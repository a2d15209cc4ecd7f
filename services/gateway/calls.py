"""Requests under way: what each sequence has produced and its client has not taken yet.

A ``Call`` is one HTTP request; it holds one ``Request`` (rid) per prompt, and each of those an ``Output`` per sequence.
The engine feeds them as messages arrive; the HTTP side waits on the call and takes what is there, or follows it: then
it is called with each message, which costs a fraction of waking a task for it. What a slow client has not taken is
merged, so memory is bounded by the output itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import orjson

from shared.channels import CONTENT, call_of, opens_call
from shared.codec import Int32
from shared.errors import RequestError
from shared.wire import Done, Finished, Message, SubmitText, TokenLogprob


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Content:
    """A run of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A run of the text that the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call number ``index`` of the answer begins: its id, made here, and its function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A run of its arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str


Part = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)  # not frozen: one is made for every event, and freezing costs more than all the rest of it
class Delta:
    """What one sequence produced since the last take. finished is set with its last piece, first with its first.

    parts: in the order in which the model wrote them, neighbours of one kind joined. calls: tool calls begun in the
    whole sequence so far. logprobs: of the tokens that this piece covers, where the client wants them. cut_call: the
    sequence is over within a call, whose arguments are no JSON text.
    """

    parts: list[Part]
    ids: list[int]
    finished: Finished | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first: bool = False
    calls: int = 0
    cut_call: bool = False

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that begin in it, with the arguments that came so far."""
        arguments: dict[int, str] = {}
        for part in self.parts:
            if isinstance(part, CallArguments):
                arguments[part.index] = arguments.get(part.index, "") + part.text
        starts = [part for part in self.parts if isinstance(part, CallStart)]
        return [ToolCall(start.id, start.name, arguments.get(start.index, "")) for start in starts]

    @property
    def called(self) -> bool:
        """Whether the sequence is over and asks for tools: there are calls, and no string stopped it, nor a token
        within one."""
        if self.finished is None or self.finished.reason != "stop" or not self.calls:
            return False
        return not self.finished.stop_reason or (self.finished.stop_reason.isdecimal() and not self.cut_call)


class Output:
    """One sequence's output: how much of it arrived, and the part that was not taken yet."""

    def __init__(self) -> None:
        self.chars = 0
        self.tokens = 0
        self.finished: Finished | None = None
        self.gap = False
        self.calls = 0
        self._arguments = ""  # of the last call
        self._channels: list[int] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._taken = self._end_taken = False
        self._taken_tokens = 0

    def has_new(self, tokens: int) -> bool:
        """Whether so many tokens wait to be taken, or the first, or the end."""
        return not self._taken or self.finished is not None or self.tokens - self._taken_tokens >= tokens

    def feed(
        self,
        offset: int,
        text: str,
        tokens: int,
        ids: Int32,
        logprobs: Sequence[TokenLogprob] = (),
        channel: int = CONTENT,
    ) -> bool:
        """Takes in text of a channel that starts at character ``offset``; what is known already is dropped.

        tokens: output tokens covered once this text is there; ids and logprobs: the last of them, if the client wants
        these.
        Returns False when characters before ``offset`` are missing; nothing is taken in then.
        """
        self.gap = offset > self.chars
        if self.gap or self.finished is not None:
            return not self.gap
        if fresh := text[self.chars - offset :]:
            self._channels.append(channel)
            self._texts.append(fresh)
            self.chars += len(fresh)
        if tokens > self.tokens:
            if len(ids):
                self._ids.extend(ids[-(tokens - self.tokens) :].tolist())
            if logprobs:
                self._logprobs.extend(logprobs[-(tokens - self.tokens) :])
            self.tokens = tokens
        return True

    def finish(self, finished: Finished) -> None:
        if self.finished is None:
            self.finished = finished

    def take(self) -> Delta | None:
        """Everything new since the last take, merged; None when there is nothing."""
        ending = self.finished is not None and not self._end_taken
        if not (self._texts or self._ids or self._logprobs or ending):
            return None
        finished = self.finished if ending else None
        parts = self._parts()
        cut_call = ending and self.calls > 0 and not _is_json(self._arguments)
        delta = Delta(parts, self._ids, finished, self._logprobs, not self._taken, self.calls, cut_call)
        self._channels, self._texts, self._ids, self._logprobs = [], [], [], []
        self._taken, self._end_taken = True, self._end_taken or ending
        self._taken_tokens = self.tokens
        return delta

    def _parts(self) -> list[Part]:
        if self._channels == [CONTENT]:  # nearly every time
            return [Content(self._texts[0])]
        parts: list[Part] = []
        for channel, run in groupby(zip(self._channels, self._texts, strict=True), lambda entry: entry[0]):
            text, call = "".join(text for _, text in run), call_of(channel)
            if call is None:
                parts.append(Content(text) if channel == CONTENT else Reasoning(text))
            elif opens_call(channel):
                parts.append(CallStart(call, f"call_{secrets.token_hex(12)}", text))
                self.calls += 1
                self._arguments = ""
            else:
                self._arguments += text
                parts.append(CallArguments(call, text))
        return parts


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


class Channel(Protocol):
    """Where a request was submitted; everything about it travels there."""

    name: str
    requests: dict[int, Request]

    def send(self, message: Message) -> bool: ...


class Request:
    """One prompt: its submission, where it went, and how far it is."""

    def __init__(self, submit: SubmitText, call: Call) -> None:
        self.submit = submit
        self.call = call
        self.rid = submit.rid
        self.outputs = [Output() for _ in range(submit.sampling.n)]
        self.channel: Channel | None = None
        self.accepted = False
        self.ended = False  # nothing of it is left beyond this process, so it needs no CANCEL
        self.prompt_tokens = 0
        self.cached_tokens = 0  # of these, known from the first text on
        self.prompt_ids: list[int] = []
        self.prompt = ""  # its text, for echo
        self.prompt_logprobs: list[TokenLogprob] = []  # of all its tokens, if the client wants them
        self.done: Done | None = None
        self.error: RequestError | None = None
        self.arrived = time.monotonic()
        self.heard = self.arrived
        self.first_token: float | None = None
        self.last_token = self.arrived

    @property
    def over(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all its sequences, once they are over; None where no reasoning is looked for."""
        ends = [output.finished for output in self.outputs if output.finished is not None]
        counts = [end.reasoning_tokens for end in ends if end.reasoning_tokens is not None]
        return sum(counts) if counts else None

    @property
    def lacks_prompt(self) -> bool:
        """Whether the prompt's logprobs are wanted, which come before any text, and are not here."""
        return self.submit.sampling.prompt_logprobs >= 0 and not self.prompt_logprobs

    def accept(self, prompt_tokens: int, prompt_ids: Int32, prompt: str) -> None:
        self.accepted = True
        self.prompt_tokens, self.prompt_ids, self.prompt = prompt_tokens, prompt_ids.tolist(), prompt
        self.call.tell()

    def fail(self, error: RequestError, *, ended: bool = False) -> None:
        self.ended = self.ended or ended
        if not self.over:
            self.error = error
        self.call.has_ends = True
        self.call.tell()

    def finish(self, done: Done) -> None:
        """The call has to be told."""
        self.ended = True
        if not self.over:
            self.done = done
        self.call.has_ends = True


class Call:
    """The requests of one HTTP request, in the order of its prompts.

    has_ends: one of its requests is over, or nobody is left to answer. follow: if set, is called at once when there is
    news; False: it cannot take it now, and who waits is woken.
    """

    def __init__(self, submits: Sequence[SubmitText]) -> None:
        self.requests = [Request(submit, self) for submit in submits]
        self.gone = self.has_ends = False
        self.follow: Callable[[], bool] | None = None
        self._changed = asyncio.Event()
        self._failure: Exception | None = None  # of ``follow``

    @property
    def request_id(self) -> str:
        return self.requests[0].submit.request_id

    @property
    def error(self) -> RequestError | None:
        return next((request.error for request in self.requests if request.error is not None), None)

    @property
    def over(self) -> bool:
        return all(request.over for request in self.requests)

    def tell(self) -> None:
        """There is news about a request. Never raises: what ``follow`` does wrong is for who waits to hear."""
        try:
            if self.follow is not None and self.follow():
                return
        except Exception as error:
            self._failure, self.follow = error, None
        self._changed.set()

    def leave(self) -> None:
        """The client is gone: whoever waits on this call gets ClientGone."""
        self.gone = self.has_ends = True
        self.wake()

    def wake(self) -> None:
        """Whoever waits on this call looks at it again."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits for news about any of the requests. Raises ClientGone, or what ``follow`` raised."""
        if not self.gone:
            await self._changed.wait()
            self._changed.clear()
        if self._failure is not None:
            raise self._failure
        if self.gone:
            raise ClientGone

    async def accepted(self, timeout: float) -> None:
        """Waits until every request is accepted. Raises the error of the first that is not, 503 after ``timeout``."""
        try:
            async with asyncio.timeout(timeout):
                while not all(request.accepted for request in self.requests):
                    if self.error is not None:
                        break
                    await self.changed()
        except TimeoutError:
            waiting = next(request for request in self.requests if not request.accepted)
            where = "a free tokenizer" if waiting.channel is None else f"{waiting.channel.name} and the scheduler"
            raise RequestError(
                f"not accepted within {timeout:g} s; waited for {where}", status=503, code="timeout", retry_after=1
            ) from None
        if self.error is not None:
            raise self.error

    async def finished(self) -> None:
        """Waits for the end of every request. Raises the first error."""
        while not self.over and self.error is None:
            await self.changed()
        if self.error is not None:
            raise self.error
