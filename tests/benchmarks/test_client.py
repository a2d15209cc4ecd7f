"""The load generator reads answers as they were sent, whatever the segments; sockets are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import answers, client
from benchmarks.drive import Sender
from benchmarks.engines import Endpoint, Engine
from benchmarks.load import Request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, ids: list[int], finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish_reason}])


USAGE = event(
    choices=[], usage={"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
)
# Five segments: headers; an event without output; one event in two pieces; two events in one; usage and the end.
SEGMENTS = [
    HEAD,
    chunk(piece("", [])),
    chunk(piece("a", [1])[:20]),
    chunk(piece("a", [1])[20:]),
    chunk(piece("b", [2])) + chunk(piece("c", [3], "length")),
    chunk(USAGE + b"data: [DONE]\n\n") + b"0\r\n\r\n",
]
ASKED = Request(prompt=[7, 8, 9], prompt_tokens=3, max_tokens=3)


def test_events_come_when_their_last_byte_came() -> None:
    recording = client.Recording(SEGMENTS, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [at for at, _ in client.read(recording).events] == [2.0, 4.0, 5.0, 5.0, 6.0, 6.0]
    answer = answers.read(ASKED, 1.5, recording)
    assert answer.faults() == []
    assert (answer.times, answer.ids, answer.text) == ([4.0, 5.0, 5.0], [1, 2, 3], "abc")
    assert (answer.ttft, answer.tpot, answer.gaps) == (2.5, 0.5, [1.0, 0.0])
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)


def test_segments_may_break_anywhere() -> None:
    raw = b"".join(SEGMENTS)
    bytewise = client.Recording([raw[index : index + 1] for index in range(len(raw))], list(range(len(raw))))
    answer = answers.read(ASKED, 0.0, bytewise)
    assert answer.faults() == []
    done_end = raw.index(b'"c"') + raw[raw.index(b'"c"') :].index(b"\n")
    assert answer.times[-1] == done_end


@pytest.mark.parametrize(
    ("segments", "fault"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy"], "HTTP 429: busy"),
        (SEGMENTS[:-1], "the chunked body breaks off"),
        ([HEAD, chunk(piece("a", [1], "length")) + b"0\r\n\r\n"], "did not end with [DONE]"),
        ([HEAD, chunk(event(error={"message": "gone"})) + b"0\r\n\r\n"], "gone"),
        ([HEAD, chunk(b"data: {\n\n") + b"0\r\n\r\n"], "unexpected end"),
        ([*SEGMENTS[:4], SEGMENTS[-1]], "finish_reason is None"),
        ([HEAD, chunk(piece("", [], "length")), SEGMENTS[-1]], "no output came"),
    ],
)
def test_faults_are_told(segments: list[bytes], fault: str) -> None:
    recording = client.Recording(segments, [float(index) for index in range(len(segments))])
    assert fault in " ".join(answers.read(ASKED, 0.0, recording).faults())


def test_wrong_numbers_of_tokens_are_told() -> None:
    recording = client.Recording(SEGMENTS, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    faults = answers.read(Request([1] * 5, 5, 4), 0.0, recording).faults()
    assert faults == ["3 output tokens, 4 asked for", "3 prompt tokens counted, 5 sent"]


def test_same_ids_counts_up_to_the_first_difference() -> None:
    ours = [[1, 2, 3, 4], [5, 6], [], [7]]
    theirs = [[1, 2, 9, 4], [5, 6], [1], [7, 8]]
    assert answers.same_ids(ours, theirs) == (2 + 2 + 1) / (4 + 2 + 1)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def drive(handler: Handler, count: int, concurrency: int, timeout: float = 10.0) -> list[answers.Answer]:
    serving: set[asyncio.Task[None]] = set()

    async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # type: ignore[arg-type]
        await handler(reader, writer)
        await writer.wait_closed()

    async def main() -> list[answers.Answer]:
        server = await asyncio.start_server(tracked, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint = Endpoint(Engine("test", url=url, ids="return_token_ids"), url, "m", None)
        async with server:
            found = await Sender(endpoint, timeout, ids=True).closed([ASKED] * count, concurrency)
            await asyncio.wait(serving, timeout=10)
            return found.answers

    return asyncio.run(main())


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return dict(json.loads(await reader.readexactly(length)))


def test_requests_are_as_asked_and_connections_are_kept() -> None:
    bodies: list[dict[str, Any]] = []
    connections = most = now = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, most, now
        connections += 1
        try:
            while True:
                bodies.append(await read_request(reader))
                now += 1
                most = max(most, now)
                await asyncio.sleep(0.01)
                now -= 1
                writer.write(b"".join(SEGMENTS))
        except asyncio.IncompleteReadError:
            writer.close()

    found = drive(handler, count=12, concurrency=3)
    assert [answer.faults() for answer in found] == [[]] * 12
    assert (connections, most) == (3, 3)
    assert bodies[0] == {
        "model": "m",
        "prompt": [7, 8, 9],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_connection_that_is_to_be_closed_is_not_used_again() -> None:
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(b"".join(SEGMENTS).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await asyncio.sleep(0.05)  # the client must go by the header: the connection still stands
        writer.close()

    assert [answer.faults() for answer in drive(handler, count=3, concurrency=1)] == [[]] * 3
    assert connections == 3


def test_a_request_is_sent_again_when_its_kept_connection_was_closed_without_a_word() -> None:
    requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(b"".join(SEGMENTS))
        await read_request(reader)  # the next one is taken, and never answered
        writer.close()

    assert [answer.faults() for answer in drive(handler, count=3, concurrency=1)] == [[]] * 3
    assert requests == 3


def test_a_lost_connection_is_told_and_the_next_request_goes_on() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"".join(SEGMENTS[:3]))
        writer.close()

    found = drive(handler, count=2, concurrency=1)
    assert ["the connection was lost" in answer.error for answer in found] == [True, True]


def test_an_answer_that_does_not_end_is_bounded() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"".join(SEGMENTS[:3]))
        await reader.read()
        writer.close()

    (answer,) = drive(handler, count=1, concurrency=1, timeout=0.2)
    assert answer.error == "the answer did not end within 0.2 s"
