"""A load generator light enough to share a small machine with what it measures.

HTTP/1.1 over asyncio protocols. While a request runs, each arriving segment is kept with its time, and that is all;
headers, chunks and events are read after the round, from the kept bytes.
"""

from __future__ import annotations

import asyncio
import bisect
import re
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast
from urllib.parse import urlsplit

LAST_CHUNK = b"\r\n0\r\n\r\n"
EVENT = re.compile(rb"^data:[ ]?(.*?)\r?\n", re.MULTILINE)


@dataclass
class Recording:
    """What a request's connection carried: segments, when they came (perf_counter), and how it failed if it did.

    lost: the server closed it before the answer's end.
    """

    segments: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    lost: bool = False


@dataclass(frozen=True)
class Response:
    """A recording, read. ``events``: the data of each server-sent event and when its last byte came."""

    status: int
    body: bytes
    events: list[tuple[float, bytes]]


class Connection(asyncio.Protocol):
    """One keep-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._recording = Recording()
        self._ended: asyncio.Future[None] | None = None
        self._left: int | None = None  # bytes until the answer's end; None: until its last chunk, or the stream's end
        self._chunked = False
        self._headers_read = False
        self._last = False  # the server said that it closes the connection after this answer

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        _, protocol = await asyncio.get_running_loop().create_connection(cls, parts.hostname or "", parts.port or 80)
        return protocol

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and not self._last

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def post(self, request: bytes, recording: Recording, timeout: float) -> None:
        """Sends the bytes of a request and waits for its answer's end; fills the recording as the answer comes."""
        assert self._transport is not None
        self._recording, self._ended = recording, asyncio.get_running_loop().create_future()
        self._left, self._chunked, self._headers_read = None, False, False
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout):
                await self._ended
        except TimeoutError:
            recording.error = f"the answer did not end within {timeout:g} s"
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        recording = self._recording
        recording.times.append(time.perf_counter())
        recording.segments.append(data)
        if not self._headers_read:
            self._read_headers()
        elif self._left is not None:
            self._left -= len(data)
        if self._left is not None:
            if self._left <= 0:
                self._end()
        elif self._chunked and (data if len(data) >= 7 else b"".join(recording.segments[-8:])).endswith(LAST_CHUNK):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            if not self._headers_read or self._chunked or self._left is not None:
                self._recording.lost = True
                self._recording.error = f"the connection was lost before the answer's end ({error or 'closed'})"
            self._end()

    def _read_headers(self) -> None:
        head, found, body = b"".join(self._recording.segments).partition(b"\r\n\r\n")
        if not found:
            return
        self._headers_read = True
        headers = _headers(head)
        self._chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._last = headers.get(b"connection", b"").lower() == b"close"
        if b"content-length" in headers:
            self._left = int(headers[b"content-length"]) - len(body)

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def post_bytes(url: str, path: str, body: bytes) -> bytes:
    """A whole POST request with a JSON body."""
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read(recording: Recording) -> Response:
    """Raises ValueError when the recorded bytes are not a whole HTTP answer."""
    raw = b"".join(recording.segments)
    ends = list(accumulate(map(len, recording.segments)))
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        raise ValueError("no whole HTTP header came")
    start = len(head) + 4
    pieces = [(start, len(raw))]
    if _headers(head).get(b"transfer-encoding", b"").lower() == b"chunked":
        pieces = list(_chunks(raw, start))
    body = b"".join(raw[begin:end] for begin, end in pieces)
    body_ends = list(accumulate(end - begin for begin, end in pieces))

    def came(offset: int) -> float:
        """When the body's byte before ``offset`` came."""
        piece = bisect.bisect_left(body_ends, offset)
        position = pieces[piece][1] - (body_ends[piece] - offset)
        return recording.times[bisect.bisect_left(ends, position)]

    events = [(came(match.end()), match.group(1)) for match in EVENT.finditer(body)]
    return Response(int(head.split(b" ", 2)[1]), body, events)


def _headers(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _chunks(raw: bytes, position: int) -> list[tuple[int, int]]:
    """Where the payloads of a chunked body lie in ``raw``."""
    found: list[tuple[int, int]] = []
    while True:
        line_end = raw.find(b"\r\n", position)
        if line_end < 0:
            raise ValueError("the chunked body breaks off")
        size = int(raw[position:line_end].split(b";")[0], 16)
        if size == 0:
            return found
        begin = line_end + 2
        if begin + size + 2 > len(raw):
            raise ValueError("the chunked body breaks off")
        found.append((begin, begin + size))
        position = begin + size + 2
