"""Starts, watches and ends the processes of a server on this host. Knows nothing about requests."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import time
from typing import Any

from services.gateway.config import GatewayConfig
from services.launcher.child import Child
from services.launcher.config import LauncherConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared.config import secret_env, to_argv
from shared.errors import ConfigError
from shared.lifeline import BEAT_INTERVAL, Lifeline

log = logging.getLogger(__name__)

SETTLE = 0.1  # seconds: a terminal's Ctrl-C reaches children too, and their end must not look like a crash
HUNG_AFTER = 3.5  # seconds without a beat after which a child counts as dead
SUSPECT_AFTER = 2.0  # seconds without a beat that make a child the likely cause of another's end
INTERRUPT_GRACE = 2.0  # seconds for each of the two rounds of an interrupt or a failure; five in all is the promise


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The configs of everything that ``quire serve`` starts."""

    launcher: LauncherConfig
    gateway: GatewayConfig
    tokenizer: TokenizerConfig
    scheduler: SchedulerConfig
    worker: WorkerConfig


def listen_socket(host: str, port: int) -> socket.socket:
    """A bound, inheritable TCP socket. It refuses connections until a gateway listens on it, once all is ready."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    sock.set_inheritable(True)
    return sock


class Launcher:
    """One run of a server. ``run`` returns the exit code."""

    def __init__(self, config: ServerConfig, sock: socket.socket, base: str) -> None:
        self._config, self._socket, self._base = config, sock, base
        self._children: list[Child] = []
        self._interrupts = 0
        self._signalled = asyncio.Event()
        self._signal: signal.Signals | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        # A program that started this server for itself alone is gone: as if it had been interrupted.
        Lifeline().call_at_end(loop, lambda: self._on_signal(signal.SIGINT))
        started = time.monotonic()
        self._start_all()
        signalled = asyncio.create_task(self._signalled.wait())
        ready = asyncio.create_task(self._become_ready(started))
        hung = asyncio.create_task(self._wait_for_hung())
        ends: list[asyncio.Future[Any]] = [hung, *(child.ended for child in self._children)]
        try:
            await asyncio.wait([*ends, signalled, ready], return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not signalled.done():
                if not ready.result():
                    limit = self._config.launcher.start_timeout
                    return await self._fail(f"the server was not ready after --start-timeout {limit:g} s")
                await asyncio.wait([*ends, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not signalled.done():
                await asyncio.wait([signalled], timeout=SETTLE)
            if signalled.done():
                return await self._end()
            dead = [child for child in self._children if not child.running]
            if not ready.done() and any(child.ended.result() == 2 for child in dead):
                return 2  # it has said in one line what the operator must change, and nobody is served yet
            return await self._fail(self._cause(dead))
        finally:
            for task in (signalled, ready, hung):
                task.cancel()
            await self._kill_rest()

    def _start_all(self) -> None:
        config, base = self._config, self._base
        self._start("scheduler", 0, dataclasses.replace(config.scheduler, bind=base))
        for index in range(config.scheduler.tensor_parallel_size):
            self._start("worker", index, dataclasses.replace(config.worker, index=index, connect=base))
        for index in range(config.launcher.tokenizers):
            # --bind is the scheduler's here; a tokenizer takes a free address beside it and tells it.
            tokenizer = dataclasses.replace(config.tokenizer, index=index, connect=base, bind="")
            self._start("tokenizer", index, tokenizer)
        for index in range(config.launcher.gateways):
            fd = self._socket.fileno()
            self._start("gateway", index, dataclasses.replace(config.gateway, index=index, fd=fd, connect=base), [fd])

    def _start(self, role: str, index: int, config: object, fds: list[int] | None = None) -> None:
        self._children.append(Child(role, index, to_argv(config), secret_env(config), fds or []))

    async def _become_ready(self, started: float) -> bool:
        """Asks the server itself, as a client would: it answers once a gateway, a tokenizer and all workers are up."""
        deadline = started + self._config.launcher.start_timeout
        while time.monotonic() < deadline:
            if await _answers_ready(self._socket):
                took, where = time.monotonic() - started, _address(self._socket)
                log.info("ready in %.1f s: %s (join with --connect %s)", took, where, self._base)
                return True
            await asyncio.sleep(0.1)
        return False

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupts += 1
        self._signal = self._signal or number
        if self._interrupts > 1:
            for child in self._children:
                child.send(signal.SIGKILL)
        self._signalled.set()

    async def _end(self) -> int:
        """A wanted end: gateways first, while everything behind them still works, then the rest."""
        number = self._signal or signal.SIGTERM
        drain = number == signal.SIGTERM
        patience = self._config.gateway.shutdown_timeout + INTERRUPT_GRACE if drain else INTERRUPT_GRACE
        if drain:
            log.info("draining, at most %g s; once more to stop at once", self._config.gateway.shutdown_timeout)
        for child in self._of("gateway"):
            child.send(number)
        await self._wait(self._of("gateway"), patience)
        for child in self._children:
            # A tokenizer would drain at SIGTERM, but with the gateways gone there is nobody left to drain for.
            child.send(signal.SIGINT if child.role == "tokenizer" else signal.SIGTERM)
        await self._wait(self._children, INTERRUPT_GRACE)
        return 0 if self._interrupts == 1 else 1

    async def _wait_for_hung(self) -> None:
        """Returns once a child has not beaten for too long. If this process itself was stopped, all get a new term."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_INTERVAL)
            now = time.monotonic()
            for child in self._children if now - checked > 2 * BEAT_INTERVAL else ():
                child.heard = child.heard and now
            checked = now
            if any(child.silence(now) > HUNG_AFTER for child in self._children):
                return

    def _cause(self, dead: list[Child]) -> str:
        """Why the server ends. A child that hangs comes first: others end because they no longer hear from it."""
        now = time.monotonic()
        slowest = max(self._children, key=lambda child: child.silence(now))
        if not dead or slowest.silence(now) > SUSPECT_AFTER:
            return f"{slowest} has hung for {slowest.silence(now):.1f} s"
        return dead[0].how_it_ended()

    async def _fail(self, reason: str) -> int:
        """An unwanted end: every process learns the reason, open streams get it as their error event."""
        log.error("%s; ending the server", reason)
        for child in self._children:
            if child.running:
                child.tell(reason)
        await self._wait(self._of("gateway"), INTERRUPT_GRACE)
        for child in self._children:
            child.send(signal.SIGTERM)
        await self._wait(self._children, INTERRUPT_GRACE)
        return 1

    def _of(self, role: str) -> list[Child]:
        return [child for child in self._children if child.role == role]

    async def _wait(self, children: list[Child], timeout: float) -> None:
        running = [child.ended for child in children if child.running]
        if running:
            await asyncio.wait(running, timeout=timeout)
        for child in children:
            if child.running:
                log.warning("%s has not ended within %g s", child, timeout)

    async def _kill_rest(self) -> None:
        for child in self._children:
            if child.running:
                child.send(signal.SIGKILL)
        await self._wait(self._children, INTERRUPT_GRACE)


def _address(sock: socket.socket) -> str:
    """Where clients find the server."""
    if sock.family == socket.AF_UNIX:
        return f"/v1 on the Unix socket {sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


async def _connect(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock.getsockname())
    host, port = sock.getsockname()[:2]
    return await asyncio.open_connection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


async def _answers_ready(sock: socket.socket) -> bool:
    try:
        async with asyncio.timeout(2):
            reader, writer = await _connect(sock)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return b" 200 " in status
    except (OSError, TimeoutError):
        return False
