"""``quire gateway``: serves HTTP on its own port, or on a listening socket the launcher passes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from services.gateway.app import make_app
from services.gateway.config import GatewayConfig
from services.gateway.connection import Connection
from services.gateway.engine import Engine
from services.gateway.metrics import GatewayMetrics
from shared import options
from shared.config import describe, parse
from shared.errors import ConfigError
from shared.lifeline import Lifeline
from shared.log import configure
from shared.transport import Endpoint, Security, check_connectable
from shared.unix import unix_socket

log = logging.getLogger(__name__)

BACKLOG = 2048
GRACE = 2.0  # seconds that clients get to read a last word
ECHO_LIMIT = 1.0  # seconds within which a second signal is the first one, told twice
FATAL_LIMIT = 1.5  # seconds after which a fatal end no longer waits for anybody


def main(argv: Sequence[str]) -> int:
    config = parse(GatewayConfig, argv, prog="quire gateway", about="HTTP front end")
    configure(f"gateway {config.index}", config.log_level)
    if not config.connect:
        raise ConfigError("--connect is missing: the scheduler's address")
    address, security = Endpoint(config.connect).clients, options.security(config)
    check_connectable(address)
    security.check(address)
    sock = listen(config)
    log.info("%s", describe(config))
    code: int = uvloop.run(serve(config, security, sock))
    return code


def listen(config: GatewayConfig) -> socket.socket:
    """The socket to serve on. Raises ConfigError when the address cannot be had."""
    if config.fd >= 0:
        try:
            return socket.socket(fileno=config.fd)
        except OSError as error:
            raise ConfigError(f"--fd {config.fd} is not a socket: {error.strerror}") from error
    if config.uds:
        sock = unix_socket(config.uds)
        sock.listen(BACKLOG)
        log.info("listening on %s", config.uds)
        return sock
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    log.info("listening on %s port %d", config.host, sock.getsockname()[1])
    return sock


async def serve(config: GatewayConfig, security: Security, sock: socket.socket) -> int:
    """Serves until a signal or the launcher ends it; returns the exit code.

    A socket of its own answers 503 until all is ready; the launcher's, which several gateways share and which is bound
    already, refuses connections until then.
    """
    engine = Engine(config.connect, config.index, security, GatewayMetrics(), lambda reason: ending.fail(reason))
    server = Server(
        uvicorn.Config(
            make_app(config, engine),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
        )
    )
    ending = Ending(engine, server, config.shutdown_timeout)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.drain)
    loop.add_signal_handler(signal.SIGINT, ending.interrupt)

    def on_reason(reason: str) -> None:  # in the lifeline's thread
        loop.call_soon_threadsafe(ending.fail, reason)

    line = Lifeline()
    line.watch(on_reason)
    line.beat_in(loop)
    engine.start()
    if config.fd >= 0:
        await _first(engine.ready, ending.begun)
    if not ending.begun.is_set():
        await server.serve(sockets=[sock])
    await engine.close("the gateway ends")
    return ending.code


async def _first(*events: asyncio.Event) -> None:
    """Waits until one of ``events`` is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class Server(uvicorn.Server):
    """Leaves signals to ``Ending``: uvicorn's handlers know nothing of what open streams have to be told."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Ending:
    """The ways this process ends. In each, no new request is taken, and open ones get an end their clients can see."""

    def __init__(self, engine: Engine, server: Server, shutdown_timeout: float) -> None:
        self.code = 0
        self.begun = asyncio.Event()
        self._engine, self._server, self._shutdown_timeout = engine, server, shutdown_timeout
        self._signalled: float | None = None

    def drain(self) -> None:
        """SIGTERM: open requests may finish within the shutdown timeout. A second signal ends at once."""
        reason = "the server is shutting down"
        if self._begin_signalled(reason, self._shutdown_timeout + GRACE):
            asyncio.get_running_loop().call_later(self._shutdown_timeout, self._engine.fail_all, reason)

    def interrupt(self) -> None:
        """SIGINT: open requests end with an error now. A second signal ends at once."""
        reason = "the server was interrupted"
        if self._begin_signalled(reason, GRACE):
            self._engine.fail_all(reason)

    def fail(self, reason: str) -> None:
        """The launcher ends the server for ``reason``, which open requests carry as their error."""
        self.code = 1
        self._begin(reason, FATAL_LIMIT / 2)
        self._engine.fail_all(reason)
        asyncio.get_running_loop().call_later(FATAL_LIMIT, os._exit, 1)

    def _begin_signalled(self, reason: str, limit: float) -> bool:
        """False for the echo of a first signal: at Ctrl-C the terminal and the launcher both send one."""
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
            self._begin(reason, limit)
            return True
        if now - self._signalled > ECHO_LIMIT:
            log.warning("second signal: ending at once")
            os._exit(1)
        return False

    def _begin(self, reason: str, limit: float) -> None:
        log.info("ending: %s", reason)
        self._engine.closing = reason
        # uvicorn's own limit, after which it cancels what is left: clients that do not read. It takes any number.
        self._server.config.timeout_graceful_shutdown = limit  # type: ignore[assignment]
        self._server.should_exit = True
        self.begun.set()
