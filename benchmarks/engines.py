"""The engines under test: servers reached over HTTP, and commands that measure in their own process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import signal
import socket
import string
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
import uvloop

T = TypeVar("T")

POLL = 0.2
END_LIMIT = 20.0  # seconds after SIGTERM


class EngineError(Exception):
    """An engine that cannot be used, in words for the person at the terminal."""


@dataclass(frozen=True)
class Engine:
    """One engine. Either ``start`` (with url) or ``run`` is given; neither: the server at ``url`` runs already.

    start: command of a server; {port} is a free port. run: command that prints one JSON line (see compare.py).
    ids: the body field that makes answers carry token ids, or "" if there is none. concurrency and requests override
    the load's, for engines that cannot run many at once or would take hours.
    """

    name: str
    start: str = ""
    run: str = ""
    url: str = "http://127.0.0.1:{port}"
    health: str = "/health"
    model: str = ""
    ids: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    concurrency: int = 0
    requests: int = 0
    start_timeout: float = 900.0

    def __post_init__(self) -> None:
        if self.start and self.run:
            raise EngineError(f"engine {self.name!r}: give 'start' or 'run', not both")
        if not self.start and not self.run and "{port}" in self.url:
            raise EngineError(f"engine {self.name!r}: give 'start', 'run', or the 'url' of a server that runs")


def quire(name: str, args: str) -> Engine:
    """This tree's server, with further arguments of ``quire serve``."""
    start = f"{shlex.quote(sys.executable)} -m services.cli serve --port {{port}} {args}"
    return Engine(name, start=start, health="/ready", ids="return_token_ids")


def from_file(path: Path) -> list[Engine]:
    """One engine per TOML table; $VARIABLES in its strings are the environment's."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: {error}") from error
    known = {one.name: one for one in dataclasses.fields(Engine)}
    engines = []
    for name, table in tables.items():
        if not isinstance(table, dict) or not set(table) <= set(known) - {"name"}:
            raise EngineError(f"{path}: [{name}] is to be a table with some of {', '.join(list(known)[1:])}")
        engines.append(Engine(name, **{key: _expanded(path, value) for key, value in table.items()}))
    return engines


def _expanded(path: Path, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(path, one) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    try:
        return string.Template(value).substitute(os.environ)
    except KeyError as error:
        raise EngineError(f"{path}: ${error.args[0]} is not set in the environment") from error
    except ValueError as error:
        raise EngineError(f"{path}: {value!r}: {error}") from error


@dataclass(frozen=True)
class Endpoint:
    """A server that answers. pid: the root of its processes, None when it was not started here."""

    engine: Engine
    url: str
    model: str
    pid: int | None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a benchmark on uvloop. SIGTERM ends it as Ctrl-C does, so that no server is left behind."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await coroutine

    try:
        result: T = uvloop.run(guarded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit("interrupted") from None
    return result


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def serving(engine: Engine, logs: Path) -> AsyncIterator[Endpoint]:
    """The engine's server, ready; ended with all its processes after the block. Its output goes to logs/NAME.log."""
    port = free_port()
    url = engine.url.replace("{port}", str(port))
    if not engine.start:
        await _ready(engine, url, None, None)
        yield Endpoint(engine, url, await _model(engine, url), None)
        return
    log = logs / f"{engine.name}.log"
    async with process(engine, engine.start.replace("{port}", str(port)), log) as started:
        await _ready(engine, url, started, log)
        yield Endpoint(engine, url, await _model(engine, url), started.pid)


@asynccontextmanager
async def process(
    engine: Engine, command: str, log: Path, stdout: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command in a session of its own, whose every process is gone after the block."""
    with log.open("ab") as output:
        try:
            started = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env={**os.environ, **engine.env},
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{engine.name}: {error}") from error
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), END_LIMIT)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        await started.wait()


async def _ready(engine: Engine, url: str, started: asyncio.subprocess.Process | None, log: Path | None) -> None:
    deadline = asyncio.get_running_loop().time() + engine.start_timeout
    while True:
        if started is not None and log is not None and started.returncode is not None:
            code = started.returncode
            raise EngineError(f"{engine.name} exited with code {code} before it was ready:\n{tail(log)}")
        if await asyncio.to_thread(_get, url + engine.health) is not None:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise EngineError(f"{engine.name}: {url}{engine.health} was not ready within {engine.start_timeout:g} s")
        await asyncio.sleep(POLL)


async def _model(engine: Engine, url: str) -> str:
    if engine.model:
        return engine.model
    answer = await asyncio.to_thread(_get, url + "/v1/models")
    try:
        return str(orjson.loads(answer or b"")["data"][0]["id"])
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{engine.name}: /v1/models names no model; give 'model'") from error


def _get(url: str) -> bytes | None:
    """The body of a 200 answer, else None."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # engines are on this machine
    try:
        with opener.open(url, timeout=5) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except (urllib.error.URLError, OSError):
        return None
