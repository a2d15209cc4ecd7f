"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Scope, Send

from services.gateway.connection import BODY, Body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# JSON may hold these as they are, and SSE knows no such ends of lines; but readers that split text by lines do.
LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]


def event(data: Any) -> bytes:
    text = orjson.dumps(data)
    for end, escaped in LINE_ENDS:
        text = text.replace(end, escaped)
    return b"data: " + text + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream:
    """One SSE answer: the headers leave with the first event.

    An async context manager around the answer: while it is open, ``silent`` becomes true and ``wake`` is called
    whenever nothing was written for ``interval`` seconds (0: never).
    """

    def __init__(self, scope: Scope, send: Send, interval: float, wake: Callable[[], None]) -> None:
        self._send, self._interval, self._wake = send, interval, wake
        self._body: Body | None = (scope.get("extensions") or {}).get(BODY, {}).get("body")
        self.silent = False
        self._written = False  # something, since the timer was set
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._listen()

    @property
    def is_open(self) -> bool:
        """Whether ``push`` can write now; never while another method of this runs."""
        return self._body is not None and not self._body.is_blocked

    def push(self, events: list[bytes]) -> None:
        """Sends events together, past all that is between here and the connection. Only while ``is_open``."""
        assert self._body is not None
        self._written, self.silent = True, False
        self._body.write(b"".join(events))

    async def write(self, events: list[bytes]) -> None:
        """Sends events together; waits while the client's socket is full."""
        self._written, self.silent = True, False
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def keep_alive(self) -> None:
        """A comment, which every reader of SSE skips, so that nothing between takes the connection for dead."""
        self.silent = False
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def end(self, events: list[bytes]) -> None:
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": False})

    def _listen(self) -> None:
        """One timer for each interval, not for each token: a comment comes after one to two intervals of silence."""
        if self._interval:
            self._written = False
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._on_time)

    def _on_time(self) -> None:
        if not self._written:
            self.silent = True
            self._wake()
        self._listen()
