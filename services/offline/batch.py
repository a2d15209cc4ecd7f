"""``quire run-batch``: answers a file of requests in OpenAI's batch format, at once and without a port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tqdm import tqdm

from services.offline.batch_output import DUPLICATE, BatchOutput
from services.offline.client import Address, Client
from services.offline.options import parse, url_option
from services.offline.server import ServerError
from shared.config import option
from shared.errors import ConfigError, RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LINES_AHEAD = 256  # that are read before they are needed
SOME_FAILED = 3  # exit code: every line has its answer, and some are errors
ABOUT = (
    "Answers requests in OpenAI's batch format, on a server of its own (whose options it takes) or the one at --url. "
    "The same command again goes on where it ended."
)
Line = dict[str, Any]


@dataclass(frozen=True)
class BatchConfig:
    input_file: str = option("", "requests, one JSON object a line; - is stdin", flags=("-i",))
    output_file: str = option("", "answers, appended to what is there already; - is stdout", flags=("-o",))
    url: str = url_option()
    max_concurrency: int = option(256, "requests under way at once", minimum=1, maximum=65536)


class BadLine(Exception):
    """A line that is no request; its message says why."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


def main(argv: Sequence[str]) -> int:
    """0: all answered well; 3: all answered, some with errors; 1: the server was lost before."""
    config, choice = parse(BatchConfig, argv, prog="quire run-batch", about=ABOUT)
    for name in ("input_file", "output_file"):
        if not getattr(config, name):
            raise ConfigError(f"--{name.replace('_', '-')} is missing")
    source, total = _input(config.input_file)
    with contextlib.closing(BatchOutput.open(config.output_file)) as output:
        batch = Batch(source, output, total, config.max_concurrency)
        try:
            with choice.address() as address:
                asyncio.run(batch.run(address))
        except KeyboardInterrupt:
            batch.report("interrupted; the same command goes on from here")
            return 130
        except (ServerError, OSError) as error:
            batch.report(f"ended early: {error}; the same command goes on from here")
            return 1
    batch.report("done")
    return SOME_FAILED if batch.failed else 0


class Batch:
    """One run over ``source``, a file descriptor. total: its lines, where that is known.

    concurrency: requests under way at once.
    """

    def __init__(self, source: int, output: BatchOutput, total: int | None, concurrency: int) -> None:
        self._source, self._output, self._total, self._concurrency = source, output, total, concurrency
        self._seen: set[str] = set()
        self._began = time.monotonic()
        self.kept = self.answered = self.failed = 0

    async def run(self, address: Address) -> None:
        """Raises ServerError when the server is lost, OSError when the output cannot be written."""
        self._began = time.monotonic()
        free = asyncio.Semaphore(self._concurrency)
        with tqdm(total=self._total, unit="request", dynamic_ncols=True, disable=None, file=sys.stderr) as bar:
            async with Client(address, self._concurrency) as client:

                async def answer(number: int, line: Line) -> None:
                    try:
                        await self._answer(client, number, line)
                        bar.update()
                    finally:
                        free.release()

                try:
                    async with asyncio.TaskGroup() as group:
                        async for number, raw in self._lines():
                            try:
                                line = self._check(raw)
                            except BadLine as error:
                                self._refuse(number, error)
                            else:
                                if line["custom_id"] not in self._output.answered:
                                    await free.acquire()
                                    group.create_task(answer(number, line))
                                    continue
                                self.kept += 1
                            bar.update()
                except* (ServerError, OSError) as errors:
                    raise _first(errors) from None

    def report(self, how: str) -> None:
        """What came of it, on stderr."""
        took = time.monotonic() - self._began
        kept = f", {self.kept} were there before" if self.kept else ""
        print(
            f"run-batch: {how}: {self.answered} answered in {took:.1f} s, {self.failed} of them with errors{kept}",
            file=sys.stderr,
        )

    async def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Lines that are not blank, with their numbers. Read in a thread: a pipe may keep one waiting.

        From the descriptor itself: a buffered stdin that a thread still waits for cannot be left behind at the end.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        room = threading.Semaphore(LINES_AHEAD)

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and nobody listens
                for line in _split(self._source):
                    room.acquire()
                    loop.call_soon_threadsafe(queue.put_nowait, line)
                loop.call_soon_threadsafe(queue.put_nowait, None)

        threading.Thread(target=read, name="input", daemon=True).start()
        number = 0
        while (line := await queue.get()) is not None:
            room.release()
            number += 1
            if line.strip():
                yield number, line

    def _check(self, raw: bytes) -> Line:
        """A request as its line has it. Raises BadLine."""
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadLine("invalid_json", f"not valid JSON: {error}") from None
        if not isinstance(line, dict):
            raise BadLine("invalid_json", "not a JSON object")
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise BadLine("missing_custom_id", "custom_id should be a string that is not empty")
        if custom_id in self._seen:
            raise BadLine(DUPLICATE, f"custom_id {custom_id!r} is that of a line before", custom_id)
        self._seen.add(custom_id)
        if custom_id in self._output.answered:
            return line
        body = line.get("body")
        if line.get("method", "POST") != "POST":
            raise BadLine("invalid_method", f"method is {_shown(line['method'])}, not 'POST'", custom_id)
        if (url := line.get("url")) not in ENDPOINTS:
            raise BadLine("invalid_url", f"url is {_shown(url)}, not one of {', '.join(ENDPOINTS)}", custom_id)
        if not isinstance(body, dict):
            raise BadLine("invalid_body", "body should be a JSON object", custom_id)
        if body.get("stream"):
            raise BadLine("invalid_body", "body.stream: a batch has no streams", custom_id)
        return line

    async def _answer(self, client: Client, number: int, line: Line) -> None:
        try:
            answer = await client.post(line["url"], line["body"])
        except RequestError as error:
            self._refuse(number, BadLine("invalid_body", f"body.{error.message}", line["custom_id"]))
            return
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        self._write(line["custom_id"], response, None)
        self.failed += answer.status != 200

    def _refuse(self, number: int, error: BadLine) -> None:
        message = f"line {number}: {error}"
        if message in self._output.refused:
            self.kept += 1
            return
        self._write(error.custom_id, None, {"code": error.code, "message": message})
        self.failed += 1

    def _write(self, custom_id: str | None, response: Line | None, error: Line | None) -> None:
        id = f"batch_req_{uuid.uuid4().hex}"
        self._output.append({"id": id, "custom_id": custom_id, "response": response, "error": error})
        self.answered += 1


def _input(path: str) -> tuple[int, int | None]:
    """The descriptor to read, and how many lines there are, where that can be seen."""
    if path == "-":
        return 0, None
    try:
        with open(path, "rb") as file:
            total = sum(bool(line.strip()) for line in file)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), total
    except OSError as error:
        raise ConfigError(f"--input-file {path}: {error.strerror}") from error


def _split(source: int) -> Iterator[bytes]:
    pending = b""
    while piece := os.read(source, 1 << 20):
        *lines, pending = (pending + piece).split(b"\n")
        yield from lines
    if pending:
        yield pending


def _shown(value: Any) -> str:
    """For a message: short, and without going down into what may be a thousand levels deep."""
    return repr(value[:80]) if isinstance(value, str) else f"a {type(value).__name__}"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
