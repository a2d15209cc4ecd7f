"""HTTP to a server, from the programs of this package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from services.offline.server import ServerError
from shared.errors import RequestError

RETRIES = 30  # of a request that the server is too busy for
RETRY_LIMIT = 30.0  # seconds between two of them
BUSY = (429, 503)
CONNECT_LIMIT = 10.0  # seconds
KEPT_OPEN = 2.0  # seconds that a connection without a request is; servers close them after a few


@dataclass(frozen=True)
class Address:
    """uds: path of a Unix socket that ``url`` is reached through; empty: over the network."""

    url: str
    uds: str = ""
    api_key: str = ""


@dataclass(frozen=True)
class Answer:
    """status: of HTTP. body: the JSON that came. request_id: as the server's log calls it."""

    status: int
    body: Any
    request_id: str

    @property
    def failure(self) -> RequestError:
        """What it says, if it is an error."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        error = error if isinstance(error, dict) else {}
        message = str(error.get("message") or f"HTTP status {self.status}")
        return RequestError(message, status=self.status, code=error.get("code"), param=error.get("param"))


class Client:
    """An async context manager. Answers may take any time; only the server's end is an error here."""

    def __init__(self, address: Address, connections: int) -> None:
        self._address, self._connections = address, connections

    async def __aenter__(self) -> Client:
        address = self._address
        options: dict[str, Any] = {"limit": self._connections, "keepalive_timeout": KEPT_OPEN}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(address.uds, **options) if address.uds else aiohttp.TCPConnector(**options),
            headers={"Authorization": f"Bearer {address.api_key}"} if address.api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def get(self, path: str) -> Answer:
        """Raises ServerError when there is no server."""
        async with self._open("GET", path, None) as response:
            return await _answer(response)

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer, asking again while the server is too busy.

        Raises RequestError for a body that JSON cannot say, ServerError when there is no server.
        """
        content = _json(body)
        attempt = 0
        while True:
            async with self._open("POST", path, content) as response:
                answer, wait = await _answer(response), response.headers.get("Retry-After", "")
            attempt += 1
            if answer.status not in BUSY or not wait.isdecimal() or attempt > RETRIES:
                return answer
            await asyncio.sleep(min(float(wait), RETRY_LIMIT))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The JSON of a streamed answer's events. Whoever stops listening cancels the request.

        Raises RequestError for a body that JSON cannot say and with what the server says against it, ServerError when
        there is none.
        """
        async with self._open("POST", path, _json({**body, "stream": True})) as response:
            if response.status != 200:
                raise (await _answer(response)).failure
            async for event in _events(response.content):
                if "error" in event:
                    raise Answer(response.status, event, "").failure
                yield event

    @asynccontextmanager
    async def _open(self, method: str, path: str, content: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            async with self._http.request(method, self._address.url + path, data=content, headers=headers) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"no answer from {self._address.url}: {error or type(error).__name__}") from error


def _json(body: Mapping[str, Any]) -> bytes:
    """Raises RequestError that names the field with a lone surrogate, too many levels or the like."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        field = next((str(name) for name, value in body.items() if not _is_json(value)), "")
        message = f"{field or 'the body'}: cannot be sent as JSON: {error}"
        raise RequestError(message, code="invalid_json", param=field or None) from None


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    raw = await response.read()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        said = raw[:1000].decode(errors="replace")
        body = {"error": {"message": f"HTTP status {response.status}: {said}", "code": "invalid_response"}}
    return Answer(response.status, body, response.headers.get("X-Request-Id", ""))


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """Server-sent events up to ``[DONE]``, comments left out."""
    pending = b""
    async for piece in content.iter_any():
        *whole, pending = (pending + piece).split(b"\n\n")
        for event in whole:
            if event == b"data: [DONE]":
                return
            if event.startswith(b"data: "):
                yield orjson.loads(event.removeprefix(b"data: "))
