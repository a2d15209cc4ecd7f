"""uvicorn's HTTP/1.1 protocol with the limits it lacks: how long a request's head may be, and how long it may take.

It also lets an answer that streams write pieces of its body without a task (``Body``).

httptools collects a header field without a limit, joining its pieces again with each read. So a head that never ends
costs memory, and time of the one loop that all streams share, which grows with its square.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.body import BODY_TIMEOUT
from services.gateway.errors import error_body
from shared.errors import RequestError

HEAD_LIMIT = 64 << 10  # bytes of a request's target and headers; also of a body's chunk lines and trailers
HEAD_TIMEOUT = 30.0  # seconds from a connection's or head's first byte until the head is whole
BODY_GRACE = 10.0  # seconds that the app has to answer a body that came too slowly, before the connection is closed
READ_GRACE = 2.0  # seconds that a refused client has to read why, while what it still sends is thrown away


BODY = "quire.body"  # the ASGI extension under which an answer finds its ``Body``


class Body:
    """The body of an answer whose headers have left. What is written here is as if sent with ``more_body``."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_blocked(self) -> bool:
        """Whether the client reads too slowly, so that only a ``send``, which waits, may follow."""
        return self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Nothing happens when the client is gone: the app hears of that by itself."""
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)


class Connection(HttpToolsProtocol):
    """A client's connection. A head over a limit is answered 431 or 408 and ends it, as does an endless body."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unparsed = 0  # bytes fed since the parser last gave anything out
        self._gave = False
        self._in_head = False
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_time(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_time(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._gave = False
        super().data_received(data)
        self._unparsed = 0 if self._gave else self._unparsed + len(data)
        if self._unparsed > HEAD_LIMIT:
            self._refuse_length()
        elif self._timer is None and not self._answering:
            self._limit_time(HEAD_TIMEOUT)  # empty lines between requests: uvicorn's own timer ended with the first

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if not self._refused:
            self._limit_time(HEAD_TIMEOUT)

    def on_headers_complete(self) -> None:
        self._gave = True
        self._in_head = False
        if self._refused:
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_LIMIT:
            self._refuse_length()
            return
        self._limit_time(BODY_TIMEOUT + BODY_GRACE)
        super().on_headers_complete()
        self.scope["extensions"] = {BODY: {"body": Body(self.cycle)}}

    def on_chunk_header(self) -> None:
        self._gave = True

    def on_body(self, body: bytes) -> None:
        self._gave = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._gave = True
        if not self._refused:
            self._limit_time(None)
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_time(self, seconds: float | None) -> None:
        """From now on, until called again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        if self._answering:  # reading may be paused meanwhile, and the app itself limits the time of a body it reads
            self._limit_time(HEAD_TIMEOUT)
        elif self._in_head:
            self._refuse(408, "request_timeout", f"the request's head was not whole within {HEAD_TIMEOUT:g} s")
        else:  # a silent connection, or a body that did not end
            self.transport.close()

    def _refuse_length(self) -> None:
        self._refuse(431, "headers_too_large", f"the request's head is over the limit of {HEAD_LIMIT} bytes")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refused = True
        self._limit_time(None)
        if self.transport.is_closing():
            return
        if self._answering:
            self.transport.abort()  # another answer is under way on this connection, and must not be mixed with this
            return
        body = orjson.dumps(error_body(RequestError(message, status=status, code=code)))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.write_eof()
        # Closed at once, with bytes of the client unread, the kernel would reset the connection and the answer be lost.
        self._timer = self.loop.call_later(READ_GRACE, self.transport.close)
