"""Sends a round's requests to an endpoint and reads the answers once all have ended."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks import answers, client
from benchmarks.answers import Answer
from benchmarks.engines import Endpoint
from benchmarks.load import Request

PATH = "/v1/completions"


@dataclass
class Drive:
    """What one round saw. Times are perf_counter's; cpu is the load generator's own, in seconds, during the round."""

    answers: list[Answer]
    start: float
    end: float
    cpu: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


@dataclass
class Sent:
    """Requests as bytes, and what came of each so far."""

    requests: Sequence[Request]
    payloads: list[bytes]
    recordings: list[client.Recording] = field(default_factory=list)
    due: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recordings = [client.Recording() for _ in self.requests]
        self.due = [0.0] * len(self.requests)

    def answers(self) -> list[Answer]:
        return [answers.read(*one) for one in zip(self.requests, self.due, self.recordings, strict=True)]


class Sender:
    """Sends an endpoint's requests; each answer must end within ``timeout`` seconds."""

    def __init__(self, endpoint: Endpoint, timeout: float, *, ids: bool = False) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        engine = endpoint.engine
        self._extra = {**engine.body, **({engine.ids: True} if ids and engine.ids else {})}

    def encode(self, requests: Sequence[Request]) -> Sent:
        """Before the round, so that it costs nothing within."""
        bodies = (answers.body(self._endpoint.model, request, self._extra) for request in requests)
        return Sent(requests, [client.post_bytes(self._endpoint.url, PATH, body) for body in bodies])

    async def closed(self, requests: Sequence[Request], concurrency: int) -> Drive:
        """``concurrency`` of them at a time, each followed by the next at once."""
        sent = self.encode(requests)
        waiting = iter(range(len(requests)))

        async def user() -> None:
            connection = client.Connection()
            for index in waiting:
                sent.due[index] = time.perf_counter()
                connection = await self._post(sent, index, connection)
            connection.close()

        return await _timed([sent], lambda: _all([user() for _ in range(concurrency)]))

    async def open(self, requests: Sequence[Request]) -> Drive:
        """Each at its own time, whatever became of those before."""
        sent = self.encode(requests)

        async def run() -> None:
            start = time.perf_counter()

            async def one(index: int) -> None:
                sent.due[index] = start + requests[index].at
                await asyncio.sleep(max(0.0, sent.due[index] - time.perf_counter()))
                (await self._post(sent, index, client.Connection())).close()

            await _all([one(index) for index in range(len(requests))])

        return await _timed([sent], run)

    async def streams_with_long(self, streams: Sequence[Request], long: Sequence[Request], after: int) -> Drive:
        """All streams at once; once every one has sent ``after`` segments (a token each, as servers write them), the
        long prompts, one after the other, for as long as all streams run. Unsent ones are left out of the answers.
        """
        sent, sent_long = self.encode(streams), self.encode(long)

        async def one(index: int) -> None:
            sent.due[index] = time.perf_counter()
            (await self._post(sent, index, client.Connection())).close()

        async def run() -> None:
            tasks = [asyncio.create_task(one(index)) for index in range(len(streams))]
            try:
                while min(len(one.segments) for one in sent.recordings) < after and not _any_done(tasks):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                for index in range(len(long)):
                    if _any_done(tasks):
                        break
                    sent_long.due[index] = time.perf_counter()
                    (await self._post(sent_long, index, client.Connection())).close()
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        drive = await _timed([sent, sent_long], run)
        drive.answers = [answer for answer in drive.answers if answer.due]
        return drive

    async def _post(self, sent: Sent, index: int, connection: client.Connection) -> client.Connection:
        """The connection to use for the next one."""
        recording, kept = sent.recordings[index], connection.usable
        try:
            if not kept:
                connection.close()
                connection = await client.Connection.open(self._endpoint.url)
            await connection.post(sent.payloads[index], recording, self._timeout)
            if kept and recording.lost and not recording.segments:
                # A server may close a kept connection without a word; a request that meets that is sent again.
                recording = sent.recordings[index] = client.Recording()
                connection = await client.Connection.open(self._endpoint.url)
                await connection.post(sent.payloads[index], recording, self._timeout)
        except OSError as error:
            recording.error = f"cannot connect to {self._endpoint.url}: {error}"
        return connection


def _any_done(tasks: list[asyncio.Task[None]]) -> bool:
    return any(task.done() for task in tasks)


async def _all(coroutines: list[Awaitable[None]]) -> None:
    await asyncio.gather(*coroutines)


async def _timed(sent: list[Sent], run: Callable[[], Awaitable[None]]) -> Drive:
    with _no_garbage_collection():
        cpu, start = time.process_time(), time.perf_counter()
        await run()
        end, cpu = time.perf_counter(), time.process_time() - cpu
    return Drive([answer for one in sent for answer in one.answers()], start, end, cpu)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection over all that was recorded takes long enough to show in the gaps between tokens."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
