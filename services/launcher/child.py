"""One child process of the launcher: its command line, its lifeline, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared import lifeline


def command() -> list[str]:
    """How to run ``quire``: the installed script, so that children read as ``quire worker …`` in process lists."""
    script = Path(sys.executable).with_name("quire")
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-m", "services.cli"]


class Child:
    """A started process. ``ended`` resolves when the kernel says so (a pidfd, no polling).

    heard: when it last beat on its lifeline (monotonic seconds); None before its loop goes round the first time.
    """

    def __init__(self, role: str, index: int, argv: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> None:
        self.role, self.index = role, index
        self.heard: float | None = None
        self._loop = asyncio.get_running_loop()
        self._lifeline, theirs = socket.socketpair()
        self._lifeline.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*command(), role, *argv],
                env={**os.environ, **env, lifeline.ENV: str(theirs.fileno())},
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
            )
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._loop.add_reader(self._lifeline.fileno(), self._on_beat)

    def __str__(self) -> str:
        return f"{self.role} {self.index}" if self.role != "scheduler" else self.role

    @property
    def running(self) -> bool:
        return not self.ended.done()

    def silence(self, now: float) -> float:
        """Seconds since it last beat; 0 while it still starts and after its end."""
        return 0.0 if self.heard is None or not self.running else now - self.heard

    def how_it_ended(self) -> str:
        code = self.ended.result()
        if code >= 0:
            return f"{self} exited with code {code}"
        return f"{self} was killed by signal {-code} ({signal.Signals(-code).name})"

    def tell(self, reason: str) -> None:
        """Says through the lifeline why the child must end; open streams carry it as their error."""
        with contextlib.suppress(OSError):  # it is gone already
            self._lifeline.send(reason.replace("\n", " ").encode() + b"\n")

    def send(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal(number)

    def _on_beat(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):  # reset: killed with a reason unread
            if self._lifeline.recv(4096):
                self.heard = time.monotonic()
            else:
                self._loop.remove_reader(self._lifeline.fileno())  # its end, of which the pidfd tells more

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._lifeline.fileno())
        os.close(self._pidfd)
        self._lifeline.close()
        self.ended.set_result(self._process.wait())
