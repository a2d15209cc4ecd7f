"""Server-sent events."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream:
    """One SSE answer: the headers leave with the first event, and the end is always ``[DONE]``."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def write(self, events: list[bytes]) -> None:
        """Sends events together; waits while the client's socket is full."""
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def end(self, events: list[bytes]) -> None:
        await self._send({"type": "http.response.body", "body": b"".join([*events, DONE]), "more_body": False})
