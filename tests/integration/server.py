"""A whole server as its user starts it: ``quire serve`` in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

QUIRE = [sys.executable, "-m", "services.cli"]
START_LIMIT = 120.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Server:
    """A running server. ``log`` is the file that holds everything its processes wrote to stderr."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        """The name clients may ask for."""
        with self.client() as client:
            return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])

    def client(self, timeout: float = 120.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)

    def children(self, role: str = "") -> list[psutil.Process]:
        """The live processes the launcher started; of one role, in order of their index."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = process.cmdline()
            if any(Path(word).name in ("quire", "services.cli") for word in words) and (not role or role in words):
                found.append(process)
        return found

    @property
    def connect(self) -> str:
        """The scheduler's address, to join by hand: the log's last line of becoming ready tells it."""
        return self.log.read_text().rsplit("--connect ", 1)[1].split(")")[0]

    def join(self, role: str, *argv: str) -> subprocess.Popen[bytes]:
        """One more gateway or tokenizer, started by hand; ends with the server."""
        with self.log.open("ab") as log:
            process = subprocess.Popen([*QUIRE, role, "--connect", self.connect, *argv], stdout=log, stderr=log)
        self.joined.append(process)
        return process

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics, by name and labels as they are written there."""
        with self.client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] not in ("#", "")}

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all its labels."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)

    def wait_for_metric(self, name: str, value: float, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {timeout} s"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)


@contextmanager
def serve(tmp_path: Path, *argv: str, env: dict[str, str] | None = None, ready: bool = True) -> Iterator[Server]:
    """Starts ``quire serve`` with ``argv``, waits until it is ready, and afterwards ends it and all that it started."""
    port, log = free_port(), tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*QUIRE, "serve", "--port", str(port), *argv],
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
        )
    server = Server(port, process, log)
    started: list[psutil.Process] = []
    try:
        if ready:
            wait_ready(server)
            started = server.children()
        yield server
    finally:
        started += [child for child in _children(process.pid) if child not in started]
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for joined in server.joined:
            joined.terminate()
            joined.wait(10)
        _, alive = psutil.wait_procs(started, timeout=5)
        for left in alive:
            left.kill()
        assert not alive, f"left behind: {[left.cmdline() for left in alive]}; log:\n{log.read_text()[-3000:]}"


def wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_LIMIT
    while server.process.poll() is None and time.monotonic() < deadline:
        if "ready in" in server.log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"the server did not become ready; its log:\n{server.log.read_text()[-5000:]}")


def run(*argv: str, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A ``quire`` command that is expected to end by itself."""
    return subprocess.run(
        [*QUIRE, *argv], env={**os.environ, **(env or {})}, timeout=timeout, capture_output=True, text=True, check=False
    )


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


NULL: Sequence[str] = ("--worker", "null")
