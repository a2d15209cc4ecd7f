"""The other ends of a tokenizer's wires, played by the test: a scheduler and a gateway on plain sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import zmq

from shared import lifeline
from shared.ids import Identity
from shared.models import ModelFiles
from shared.transport import Endpoint, Security, bind_router, connect_dealer, start_zap
from shared.wire import PROTOCOL_VERSION, Heartbeat, Hello, Message, Welcome, decode, encode

M = TypeVar("M", bound=Message)
PATIENCE = 10.0  # seconds
PLAIN = Security()


class Scheduler:
    """A ROUTER at the clients' address. It welcomes only when told to."""

    def __init__(self, base: str, files: ModelFiles, *, max_model_len: int = 64, security: Security = PLAIN) -> None:
        self._context = zmq.Context()
        self._zap = start_zap(self._context, security)
        self.socket, _ = bind_router(self._context, Endpoint(base).clients, security)
        self.welcome = Welcome(77, 0, 16, 100, max_model_len, 400, [1], files.digest, files.name)
        self.peer = b""
        self.seen: list[Message] = []

    def receive(self, kind: type[M], timeout: float = PATIENCE) -> M:
        """The next message of ``kind``, others being kept in ``seen`` (heartbeats and HELLOs dropped)."""
        deadline = time.monotonic() + timeout
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            self.peer, *frames = self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, kind):
                return message
            if not isinstance(message, Heartbeat | Hello):
                self.seen.append(message)
        raise AssertionError(f"no {kind.__name__} from the tokenizer within {timeout} s; got {self.seen}")

    def send(self, message: Message) -> None:
        self.socket.send_multipart([self.peer, *encode(message)])

    def close(self) -> None:
        self.socket.close(0)
        if self._zap is not None:
            self._zap.stop()
        self._context.term()


class Gateway:
    """A DEALER that says HELLO at once."""

    def __init__(self, address: str, hello: bool = True, security: Security = PLAIN) -> None:
        self._context = zmq.Context()
        self.identity = Identity.fresh("gateway", 0).encode()
        self.socket = connect_dealer(self._context, self.identity, address, security)
        self.seen: list[Message] = []
        if hello:
            self.hello()

    def hello(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, "gateway", 0, 5, client_number=3))

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def receive(self, kind: type[M], timeout: float = PATIENCE) -> M:
        deadline = time.monotonic() + timeout
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message: Any = decode(self.socket.recv_multipart())
            if isinstance(message, kind):
                return message
            if not isinstance(message, Heartbeat):
                self.seen.append(message)
        raise AssertionError(f"no {kind.__name__} from the tokenizer within {timeout} s; got {self.seen}")

    def receives_nothing(self, seconds: float) -> bool:
        """Whether only heartbeats come for so long."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = decode(self.socket.recv_multipart())
            if not isinstance(message, Heartbeat):
                self.seen.append(message)
                return False
        return True

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Process:
    """A ``quire tokenizer`` whose log goes to a file (a pipe that nobody reads would stop it when it is full)."""

    def __init__(self, model: Path, base: str, log: Path, *options: str, lifeline_fd: int | None = None) -> None:
        self.log = log
        command = [sys.executable, "-m", "services.cli", "tokenizer", str(model), "--connect", base, *options]
        env, passed = dict(os.environ), []
        if lifeline_fd is not None:
            env[lifeline.ENV], passed = str(lifeline_fd), [lifeline_fd]
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stderr=file, env=env, pass_fds=passed)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_for_log(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.log.read_text():
            assert time.monotonic() < deadline, f"no {words!r} in the log: {self.log.read_text()}"
            time.sleep(0.02)

    def wait(self) -> int:
        """The exit code; a process that does not end in time is killed and fails the test."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def end(self) -> None:
        if self.running:
            self.signal(signal.SIGINT)
        self.wait()
