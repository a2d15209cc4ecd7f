"""What a client may do to its own connection, told on raw sockets, while others' streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import orjson
import pytest
import uvicorn

from services.gateway import connection
from services.gateway.connection import HEAD_LIMIT, Connection
from tests.services.gateway.background import Streamed
from tests.services.gateway.pipeline import Gateway, Pipeline

pytestmark = pytest.mark.timeout(60)

COMPLETION = {"prompt": "x", "max_tokens": 100}


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        yield sock


def everything(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            received += chunk
    return received


def head(size: int) -> bytes:
    """A request whose target, header names and values are ``size`` bytes together."""
    fixed = len("/health") + len("host") + len("x") + len("big")
    return b"GET /health HTTP/1.1\r\nHost: x\r\nBig: " + b"a" * (size - fixed) + b"\r\n\r\n"


def test_a_head_up_to_the_limit_is_served(gateway: Gateway) -> None:
    with connected(gateway.port) as sock:
        for _ in range(2):  # the limit is one request's, not the connection's
            sock.sendall(head(HEAD_LIMIT - 1024))
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += sock.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        head(HEAD_LIMIT + 1),
        b"GET /" + b"a" * HEAD_LIMIT + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * (4 << 20),
        b"GET /health HTTP/1.1\r\n" + b"a" * (4 << 20),
    ],
    ids=["one header", "target", "many headers", "endless target", "endless name"],
)
def test_a_longer_head_is_refused(gateway: Gateway, request_bytes: bytes) -> None:
    with connected(gateway.port) as sock:
        sock.sendall(request_bytes)
        top, _, body = everything(sock).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 431 ") and b"connection: close" in top
    error = orjson.loads(body)["error"]
    assert (error["code"], error["type"]) == ("headers_too_large", "invalid_request_error")
    assert error["message"] == f"the request's head is over the limit of {HEAD_LIMIT} bytes"


def test_a_hundred_megabyte_header_leaves_streams_alone(
    pipeline: Pipeline, gateway: Gateway, client: httpx.Client
) -> None:
    streamed = Streamed(client, "/v1/completions", COMPLETION)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    with connected(gateway.port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nBig: ")
        for number in range(100):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(b"a" * (1 << 20))
            answer.text(f"{number} ")
            assert streamed.next()["choices"][0]["text"] == f"{number} "
        assert everything(sock)[:13] in (b"HTTP/1.1 431 ", b"")  # nothing when it was reset while sending
    answer.finish()
    assert streamed.rest()[-1] == "[DONE]"
    assert client.get("/health").status_code == 200


def test_endless_trailers_end_the_connection(gateway: Gateway) -> None:
    with connected(gateway.port) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(64):
                sock.sendall(b"a" * (1 << 16))
        assert b" 200 " not in everything(sock)


def test_a_body_in_many_reads_is_not_a_head(pipeline: Pipeline, client: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"a" * 10_000
        yield b'"}'

    pipeline.tokenizer.automatic(["fine"])
    try:
        assert client.post("/v1/completions", content=body()).json()["choices"][0]["text"] == "fine"
    finally:
        pipeline.tokenizer.answer = None


def test_what_is_not_http_gets_400(gateway: Gateway) -> None:
    with connected(gateway.port) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        top, _, body = everything(sock).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 400 ") and orjson.loads(body)["error"]["code"] == "invalid_http"


async def speak(parts: list[bytes], pause: float) -> tuple[bytes, float]:
    """Sends ``parts`` to an app that streams for 0.5 s, ``pause`` seconds apart; what came back, and after how long."""

    async def app(scope: object, receive: object, send: uvicorn._types.ASGISendCallable) -> None:  # type: ignore[name-defined]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        for letter in b"hello":
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": bytes([letter]), "more_body": letter != ord("o")})

    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None, timeout_keep_alive=2)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    received = bytearray()

    async def read() -> None:
        # A server that closes while bytes come answers them with a reset; what came before it still counts.
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(65536):
                received.extend(data)

    reading = asyncio.create_task(read())
    try:
        for part in parts:
            if reading.done():
                break
            writer.write(part)
            await asyncio.sleep(pause)
        await asyncio.wait_for(reading, 10)
        return bytes(received), time.monotonic() - begin
    finally:
        writer.close()
        server.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr(connection, "BODY_TIMEOUT", 0.6)
    monkeypatch.setattr(connection, "BODY_GRACE", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_head_that_trickles_is_refused() -> None:
    received, _ = asyncio.run(speak([b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 1000], 0.02))
    assert received.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in received


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("parts", [[], [b"\r\n"] * 1000], ids=["nothing", "empty lines"])
def test_a_connection_without_a_request_is_closed(parts: list[bytes]) -> None:
    assert asyncio.run(speak(parts, 0.02))[0] == b""


@pytest.mark.usefixtures("quick")
def test_a_body_that_nobody_reads_and_that_never_ends_is_closed() -> None:
    parts = [b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", *[b"a"] * 1000]
    received, _ = asyncio.run(speak(parts, 0.02))
    assert received.startswith(b"HTTP/1.1 200 ") and received.endswith(b"hello")


@pytest.mark.usefixtures("quick")
def test_a_pipelined_request_waits_for_the_answer_before_it() -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    received, _ = asyncio.run(speak([get + get + get[:10]], 0.0))
    assert received.count(b"HTTP/1.1 200 ") == 2 and b"hello" in received
