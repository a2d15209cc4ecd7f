"""The lifeline between a launcher and each child: one socket pair that tells each side how the other is.

To the child: the kernel closes the launcher's end when the launcher dies, however it dies, and the child's blocking
read returns; no polling, no orphan. Before an orderly end the launcher may write one line, the reason, which open
streams then carry as their error. To the launcher: a byte a second from the child's own loop, so that a process that
hangs is noticed like one that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, MutableMapping

ENV = "QUIRE_LIFELINE_FD"
BEAT_INTERVAL = 1.0  # seconds
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The child's end. Without a launcher (no ``QUIRE_LIFELINE_FD``) everything here does nothing."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        fd = environ.pop(ENV, None)
        self._socket = None if fd is None else socket.socket(fileno=int(fd))

    @property
    def held(self) -> bool:
        """Whether a launcher started this process."""
        return self._socket is not None

    def watch(self, on_reason: Callable[[str], None]) -> None:
        """Starts the thread that calls ``on_reason`` with each line the launcher writes, and ends the process with it.

        At end of file the launcher is dead, and there is nobody left to drain for.
        """
        if self._socket is None:
            return
        # A stopped process runs no thread, so the kernel is told as well.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._read, args=(self._socket, on_reason), name="lifeline", daemon=True).start()

    def call_at_end(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Calls back once the other end is closed, for a process that ends in an order of its own."""
        if self._socket is None:
            return
        sock = self._socket
        sock.setblocking(False)

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(4096):
                    loop.remove_reader(sock.fileno())
                    callback()

        loop.add_reader(sock.fileno(), read)

    def beat(self) -> None:
        """Tells the launcher that the caller's loop goes round. To be called about once a second."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is not reading, or gone: not this side's concern
                self._socket.send(b".", socket.MSG_DONTWAIT)

    def beat_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beats from now on for as long as ``loop`` goes round."""
        self.beat()
        loop.call_later(BEAT_INTERVAL, self.beat_in, loop)

    def beat_from_thread(self) -> None:
        """Beats from a thread: says only that the process is not stopped. For loops with steps of unknown length."""
        threading.Thread(target=self._beat_forever, name="lifeline beat", daemon=True).start()

    def _beat_forever(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_INTERVAL)

    @staticmethod
    def _read(sock: socket.socket, on_reason: Callable[[str], None]) -> None:
        pending = b""
        with contextlib.suppress(OSError):
            while chunk := sock.recv(4096):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    on_reason(line.decode(errors="replace"))
        os._exit(1)
