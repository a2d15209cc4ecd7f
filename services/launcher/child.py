"""One child process of the launcher: its command line, its lifeline, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shared import lifeline


def command() -> list[str]:
    """How to run ``quire``: the installed script, so that children read as ``quire worker …`` in process lists."""
    script = Path(sys.executable).with_name("quire")
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-m", "services.cli"]


class Child:
    """A started process. ``ended`` resolves when the kernel says so (a pidfd, no polling)."""

    def __init__(self, role: str, index: int, argv: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> None:
        self.role, self.index = role, index
        read_end, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command(), role, *argv],
                env={**os.environ, **env, lifeline.ENV: str(read_end)},
                pass_fds=[read_end, *fds],
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(read_end)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def __str__(self) -> str:
        return f"{self.role} {self.index}" if self.role != "scheduler" else self.role

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self.ended.done()

    def how_it_ended(self) -> str:
        code = self.ended.result()
        if code >= 0:
            return f"{self} exited with code {code}"
        return f"{self} was killed by signal {-code} ({signal.Signals(-code).name})"

    def tell(self, reason: str) -> None:
        """Says through the lifeline why the child must end; open streams carry it as their error."""
        with contextlib.suppress(OSError):  # it is gone already
            os.write(self._lifeline, reason.replace("\n", " ").encode() + b"\n")

    def send(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal(number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        os.close(self._lifeline)
        self.ended.set_result(self._process.wait())
