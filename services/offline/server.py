"""A whole server of one program's own: ``quire serve`` on a Unix socket that nobody else can reach."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.launcher.child import command
from services.launcher.rundir import RunDir
from shared import lifeline
from shared.errors import ConfigError, QuireError

POLL = 0.05  # seconds
END_LIMIT = 10.0  # seconds; the launcher promises five
SHOWN = 2000  # characters of the server's log in an error


class ServerError(QuireError):
    """The server did not start, or is gone."""


class PrivateServer:
    """Started by the constructor, ready after ``wait_ready``, ended by ``close``.

    It also ends with this process, however that ends. A terminal's Ctrl-C does not reach it: it has a session of its
    own. What it logs goes to a file, of which errors show the end.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """argv: options of ``quire serve``, MODEL included. env: variables beside this process's own."""
        self._directory = RunDir()
        self.uds = str(self._directory.path / "http")
        self._log = self._directory.path / "log"
        line, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command(), "serve", *argv, f"--uds={self.uds}"],
                env={**os.environ, **(env or {}), lifeline.ENV: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, line, self._directory)

    def wait_ready(self) -> None:
        """Raises ConfigError for what the server says must be changed, ServerError for what else ends it.

        ``--start-timeout`` of the server bounds the wait.
        """
        while not self._answers():
            if (code := self._process.poll()) is not None:
                said = self._last_words()
                raise ConfigError(said) if code == 2 else ServerError(f"the server did not start: {said}")
            time.sleep(POLL)

    def explained(self, error: ServerError) -> ServerError:
        """``error`` of a connection to it, or rather why it ended, if it did."""
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            return error
        return ServerError(f"the server has ended: {self._last_words()}")

    def _last_words(self) -> str:
        """The end of what it logged: for a mistake of the operator, the one line that says which."""
        text = _tail(self._log)
        last = text.rpartition("\n")[2]
        return last.removeprefix("quire serve: ") if self._process.poll() == 2 else text

    def close(self) -> None:
        """Ends it and all its processes; nothing on a second call."""
        self._end()

    def _answers(self) -> bool:
        """It listens only once it could serve."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(self.uds) == 0


def _end(process: subprocess.Popen[bytes], line: socket.socket, directory: RunDir) -> None:
    try:
        process.send_signal(signal.SIGINT)
        process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        line.close()
        directory.close()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - SHOWN)
        file.seek(start)
        text = file.read().decode(errors="replace").strip()
    return text.partition("\n")[2] if start else text
